//! The fields of a stored document, with messages that name the field.

use bson::{Bson, Document};

use super::InvalidSchedule;
use crate::base::{DUE_MS, Instant, integer};

/// The fields of a document. A missing field is null.
pub(super) struct Fields<'a> {
    pub(super) document: &'a Document,
    /// The path of the document, for messages.
    pub(super) within: &'static str,
}

impl<'a> Fields<'a> {
    pub(super) fn get<T>(
        &self,
        field: &str,
        expected: &'static str,
        read: impl Fn(&'a Bson) -> Option<T>,
    ) -> Result<Option<T>, InvalidSchedule> {
        match self.document.get(field) {
            None | Some(Bson::Null) => Ok(None),
            Some(value) => {
                read(value).map(Some).ok_or_else(|| InvalidSchedule::Field { field: format!("{}{field}", self.within), expected })
            }
        }
    }

    pub(super) fn text(&self, field: &str) -> Result<Option<&'a str>, InvalidSchedule> {
        self.get(field, "a text", Bson::as_str)
    }

    pub(super) fn count(&self, field: &str) -> Result<Option<u64>, InvalidSchedule> {
        self.get(field, "an integer from 0", |value| u64::try_from(integer(Some(value))?).ok())
    }

    pub(super) fn document(&self, field: &str) -> Result<Option<&'a Document>, InvalidSchedule> {
        self.get(field, "a document", Bson::as_document)
    }

    pub(super) fn date(&self, field: &str) -> Result<Option<Instant>, InvalidSchedule> {
        let valid = |at: &&bson::DateTime| DUE_MS.contains(&at.timestamp_millis());
        self.get(field, "a date from the year 1 to the year 9999", |value| value.as_datetime().filter(valid).map(|at| at.to_chrono()))
    }
}
