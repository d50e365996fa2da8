//! What follows when a run overlaps the previous one, and when runs were missed.

use std::str::FromStr;

use super::InvalidSchedule;

/// What follows when the job of the previous run is not finished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Overlap {
    /// The next run begins in any case.
    #[default]
    Allow,
    /// The slot is skipped. A job that waits for a retry is not finished.
    Skip,
}

/// What follows when slots have passed while no recruiter led, or while MongoDB was away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missed {
    /// None of them runs, except the newest one if it was due less than a minute ago.
    Skip,
    /// The newest one runs.
    #[default]
    One,
    /// All of them run, but no more than this number: the newest ones.
    All(u16),
}

impl FromStr for Overlap {
    type Err = InvalidSchedule;

    fn from_str(word: &str) -> Result<Self, InvalidSchedule> {
        match word {
            "allow" => Ok(Self::Allow),
            "skip" => Ok(Self::Skip),
            other => Err(InvalidSchedule::Word { what: "overlap", word: other.chars().take(80).collect(), known: "`allow` or `skip`" }),
        }
    }
}

impl Overlap {
    /// The word in documents and files.
    pub fn word(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Skip => "skip",
        }
    }
}

impl Missed {
    /// Maximum number of runs that are made up for if no number is given.
    pub const DEFAULT_LIMIT: u16 = 100;

    /// The policy with this word, and this maximum for `all`.
    ///
    /// # Errors
    /// When there is no such word, or the maximum does not belong to it.
    pub fn of_word(word: &str, limit: Option<u16>) -> Result<Self, InvalidSchedule> {
        match (word, limit) {
            ("all", limit) => Ok(Self::All(limit.unwrap_or(Self::DEFAULT_LIMIT))),
            ("skip" | "one", Some(_)) => Err(InvalidSchedule::LimitWithoutAll),
            ("skip", None) => Ok(Self::Skip),
            ("one", None) => Ok(Self::One),
            (other, _) => {
                Err(InvalidSchedule::Word { what: "missed", word: other.chars().take(80).collect(), known: "`skip`, `one` or `all`" })
            }
        }
    }

    /// The word in documents and files.
    pub fn word(self) -> &'static str {
        match self {
            Self::Skip => "skip",
            Self::One => "one",
            Self::All(_) => "all",
        }
    }

    pub(super) fn limit(self) -> Option<u16> {
        match self {
            Self::Skip | Self::One => None,
            Self::All(limit) => Some(limit),
        }
    }
}
