//! An event, and what subscribers ask for.

use std::collections::BTreeSet;

use bson::{Bson, Document, doc};

use crate::base::{Instant, Pattern};

/// Something that has happened.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Event {
    /// What has happened, for example `job.failed.SendMail`.
    pub topic: String,
    /// When it was published, by the server's clock.
    pub at: Instant,
    /// What it is about: ids, class and group of a job, the name of a pause.
    pub details: Document,
}

impl Event {
    pub(super) fn to_document(&self) -> Document {
        let mut document = doc! { "topic": &self.topic, "at": self.at };
        document.extend(self.details.clone());
        document
    }

    pub(super) fn from_document(mut document: Document) -> Option<Self> {
        let Some(Bson::String(topic)) = document.remove("topic") else { return None };
        let Some(Bson::DateTime(at)) = document.remove("at") else { return None };
        Some(Self { topic, at: at.to_chrono(), details: document })
    }

    /// The event as one document, for programs.
    pub fn into_document(self) -> Document {
        self.to_document()
    }
}

/// What subscribers ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) patterns: BTreeSet<Pattern>,
    /// Whether a process waits for the ends of jobs.
    pub(crate) ends: bool,
}

impl Wanted {
    /// What may be asked for, as long as nothing is known.
    pub(super) fn everything() -> Self {
        Self { patterns: [Pattern::everything()].into(), ends: true }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.patterns.is_empty() && !self.ends
    }

    pub(super) fn has(&self, topic: &str) -> bool {
        self.patterns.iter().any(|pattern| pattern.matches(topic))
    }
}
