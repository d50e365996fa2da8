//! New values for waiting jobs.

use bson::Document;

use crate::{
    base::{DUE_MS, Instant, check_trimmed_name},
    job::{Job, Priority, Settings},
};

/// New values for fields of waiting jobs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Alteration {
    pub(crate) settings: Box<Settings>,
    pub(crate) at: Option<Instant>,
}

/// Why new values cannot be given to any job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidAlteration {
    /// No value is given.
    #[error("nothing is to be changed: give a priority, a group or a due date")]
    Nothing,
    /// The name of the group is not valid.
    #[error("the name of the new group {0}")]
    Group(String),
    /// Some programming languages cannot read the date.
    #[error("the jobs would be due outside of the years 1 to 9999: give another date")]
    Date,
}

impl Alteration {
    /// New values. A job keeps its own value where `None` is given.
    ///
    /// # Errors
    /// When no value is given, or one of them is not valid.
    pub fn new(priority: Option<Priority>, group: Option<String>, at: Option<Instant>) -> Result<Self, InvalidAlteration> {
        group.iter().try_for_each(|group| check_group(group))?;
        if at.is_some_and(|at| !DUE_MS.contains(&at.timestamp_millis())) {
            return Err(InvalidAlteration::Date);
        }
        let alteration = Self { settings: Settings { priority, group, ..Settings::default() }.into(), at };
        if alteration == Self::default() { Err(InvalidAlteration::Nothing) } else { Ok(alteration) }
    }

    pub(crate) fn to_document(&self) -> Document {
        let mut set = self.settings.fields().expect("a document");
        set.extend(self.at.map(|at| ("scheduled_at".to_owned(), at.into())));
        set
    }

    /// Whether a job that is due at `at` has these values.
    pub(crate) fn is_in(&self, job: &Job, at: Instant) -> bool {
        let stored = |instant: Instant| instant.timestamp_millis();
        self.settings.clone().or(&job.settings) == job.settings && self.at.is_none_or(|wanted| stored(wanted) == stored(at))
    }
}

pub(super) fn check_group(group: &str) -> Result<(), InvalidAlteration> {
    check_trimmed_name(group).map_err(InvalidAlteration::Group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_values_are_checked_before_a_job_is_read() {
        let new = |group: Option<&str>, at| Alteration::new(None, group.map(Into::into), at).map(drop);
        assert_eq!(new(None, None), Err(InvalidAlteration::Nothing));
        assert_eq!(new(Some(""), None), Err(InvalidAlteration::Group("is empty".into())));
        assert_eq!(new(None, Some(Instant::MAX_UTC)), Err(InvalidAlteration::Date));
        assert_eq!((new(Some("g"), None), new(None, Some(Instant::UNIX_EPOCH))), (Ok(()), Ok(())));
    }
}
