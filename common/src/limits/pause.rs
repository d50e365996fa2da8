//! Pauses: what one covers, and who has paused.

use std::{fmt, str::FromStr};

use super::InvalidSetting;
use crate::base::Instant;

/// What one pause covers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum Paused {
    /// Every job.
    Everything,
    /// The jobs of one group.
    Group(String),
    /// The jobs of one class.
    Class(String),
    /// The jobs of one line.
    Line(String),
}

impl fmt::Display for Paused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Everything => f.write_str("everything"),
            Self::Group(group) => write!(f, "group:{group}"),
            Self::Class(class) => write!(f, "class:{class}"),
            Self::Line(key) => write!(f, "line:{key}"),
        }
    }
}

/// `everything`, `group:NAME`, `class:NAME` or `line:KEY`: the `_id` of a pause.
impl FromStr for Paused {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        match text.split_once(':') {
            None if text == "everything" => Ok(Self::Everything),
            Some(("group", group)) if !group.is_empty() => Ok(Self::Group(group.into())),
            Some(("class", class)) if !class.is_empty() => Ok(Self::Class(class.into())),
            Some(("line", key)) if !key.is_empty() => Ok(Self::Line(key.into())),
            _ => {
                Err(InvalidSetting(format!("`{text:.80}` cannot be paused; write `everything`, `group:NAME`, `class:NAME` or `line:KEY`")))
            }
        }
    }
}

/// A pause: no job that it covers is assigned. Running jobs continue.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub struct Pause {
    /// Who has paused.
    pub by: String,
    /// Why.
    pub reason: Option<String>,
    /// When, by the server's clock.
    pub at: Option<Instant>,
}
