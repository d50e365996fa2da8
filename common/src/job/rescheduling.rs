//! The end of a start after which the job runs again, as a value. Pure: the [`store`](crate::store) writes it, under the guard of the start.

use bson::{Bson, Document, doc};

use super::{
    Job,
    ending::{OUTCOMES, REDUCED},
    execution::{Claim, Execution, Executions},
};
use crate::base::instant::Instant;

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
    /// The last execution that its workable was entered for.
    pub(crate) last: Option<Execution>,
    /// The history with this execution. `None` if its workable was not entered.
    pub(crate) executions: Option<Executions>,
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
            last: Some(execution.clone()),
            executions: Some(Executions::with(job, execution)),
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
            last: job.executions.last().cloned(),
            executions: None,
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
            set.insert("scheduled_at", bson::DateTime::from_chrono(self.due));
        }
        if let Some(executions) = &self.executions {
            set.extend(doc! { "executions_dropped": executions.dropped, "deaths": executions.deaths });
        }
        if self.last.is_none() {
            update.insert("$unset", doc! { "last_execution": "" });
        }
        if self.is_reduced {
            set.insert(REDUCED, "MongoDB refused the whole history");
        } else {
            set.extend(self.last.as_ref().map(|last| ("last_execution".to_owned(), stored(last))));
            let executions = self.executions.as_ref().map(|executions| executions.kept.iter().map(stored).collect());
            set.extend(executions.map(|executions| ("executions".to_owned(), Bson::Array(executions))));
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
