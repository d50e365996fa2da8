//! The end of a start after which the job runs again, as a value. Pure: the [`store`](crate::store) writes it, under a guard.

use bson::{Bson, Document, doc};

use super::{
    Claim, Execution, Job,
    bundle::OUTCOMES,
    execution::{deaths_with, history_with},
};
use crate::base::Instant;

/// The field that marks a document of which a part could not be stored.
pub(super) const REDUCED: &str = "reduced";

/// The end of a start that reschedules the job.
#[derive(Clone, Debug)]
pub struct Rescheduling {
    pub(crate) claim: Claim,
    pub(crate) class: String,
    pub(crate) group: String,
    pub(crate) due: Instant,
    /// Whether `due` is a new date: a start leaves the date in the document.
    has_new_date: bool,
    pub(crate) interruptions: u32,
    pub(crate) deaths: u32,
    /// The last execution that its workable was entered for.
    pub(crate) last: Option<Execution>,
    /// The history with this execution, and how many are dropped. `None` if its workable was not entered.
    pub(crate) history: Option<(Vec<Execution>, u32)>,
    /// The outcomes of all items, if it is a bundle.
    pub(crate) items: Option<Vec<Bson>>,
    notes: Document,
    is_reduced: bool,
}

impl Rescheduling {
    /// Another attempt at `at`, with the ended `execution` in the history. `counts` is false for an interruption.
    pub fn retry(job: &Job, claim: Claim, execution: &Execution, at: Instant, counts: bool) -> Self {
        Self {
            due: at,
            has_new_date: true,
            interruptions: job.interruptions + u32::from(!counts),
            deaths: deaths_with(job, execution),
            last: Some(execution.clone()),
            history: Some(history_with(job, execution)),
            ..Self::release(job, claim)
        }
    }

    /// Releases a job whose workable was not entered: the same due date as before, and the start does not count. The newest execution in
    /// the history becomes `last_execution` again.
    pub fn release(job: &Job, claim: Claim) -> Self {
        let was_due = job.last_execution.as_ref().and_then(|execution| execution.scheduled_at);
        Self {
            claim,
            class: job.class.clone(),
            group: job.settings.group().to_owned(),
            due: job.due().or(was_due).unwrap_or_default(),
            has_new_date: false,
            interruptions: job.interruptions + 1,
            deaths: job.deaths,
            last: job.executions.last().cloned(),
            history: None,
            items: None,
            notes: Document::new(),
            is_reduced: false,
        }
    }

    /// Like a release, but due at `at`, when the obstacle may be gone.
    pub fn release_until(job: &Job, claim: Claim, at: Instant) -> Self {
        Self { due: at, has_new_date: true, ..Self::release(job, claim) }
    }

    /// The same with the outcomes of all items of a bundle, and the notes of the job.
    #[must_use]
    pub fn with(self, items: Option<Vec<Bson>>, notes: Document) -> Self {
        Self { items, notes, ..self }
    }

    /// The same without the history and the notes, for an outcome that MongoDB refuses.
    pub(crate) fn without_history(self) -> Self {
        Self { is_reduced: true, ..self }
    }

    /// The update that unlocks the job.
    pub(crate) fn update(&self) -> Document {
        let mut set = doc! { "locked": false, "interruptions": self.interruptions };
        let mut update = doc! {};
        if self.has_new_date {
            set.insert("scheduled_at", self.due);
        }
        if let Some((executions, dropped)) = &self.history {
            set.extend(doc! { "executions_dropped": *dropped, "deaths": self.deaths });
            if !self.is_reduced {
                set.insert("executions", executions.iter().map(stored).collect::<Vec<_>>());
            }
        }
        match &self.last {
            None => drop(update.insert("$unset", doc! { "last_execution": "" })),
            Some(last) if !self.is_reduced => drop(set.insert("last_execution", stored(last))),
            Some(_) => {}
        }
        if self.is_reduced {
            set.insert(REDUCED, "MongoDB refused the whole history");
        } else {
            set.extend(self.notes.clone());
        }
        set.extend(self.items.clone().map(|outcomes| (OUTCOMES.to_owned(), outcomes.into())));
        update.insert("$set", set);
        update
    }
}

fn stored(execution: &Execution) -> Bson {
    Bson::Document(Document::try_from(&*execution.to_raw()).expect("an execution is made of dates, ids, texts and numbers"))
}
