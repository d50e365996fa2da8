//! How a job has ended, and what that brings about: stated once, as a pure function of the job and its end.
//!
//! Every end has these effects: of a start, of its rescue after the death of its worker, in a transaction of its workable, by a cancellation
//! or by an expiry. The room `cycle` carries them out. Permits are not among them: their holder passes them on or gives them back, that of
//! a line when the end is recorded, and those of a dead worker are in its roster document.

use std::sync::Arc;

use bson::{Bson, Document, RawDocument, RawDocumentBuf};

use super::{Execution, FinishReason, Job, Keep, Stage, line_of_gate};

/// How a job has ended.
#[derive(Clone, Debug)]
pub struct Ending {
    /// The execution, which has ended.
    pub execution: Execution,
    /// The finish reason.
    pub why: FinishReason,
    /// The result, if the job has one.
    pub result: Option<Bson>,
    /// The outcomes of all items, if it is a bundle.
    pub items: Option<Vec<Bson>>,
    /// The notes that it has made.
    pub notes: Document,
    /// The jobs that it becomes.
    pub becomes: Arc<[Document]>,
}

impl Ending {
    /// An end without anything that is optional.
    pub fn new(execution: Execution, why: FinishReason) -> Self {
        Self { execution, why, result: None, items: None, notes: Document::new(), becomes: Arc::default() }
    }
}

/// What the end of a job brings about.
#[derive(Clone, Debug)]
pub(crate) struct Effects {
    /// In its transaction: the job is archived in this form. Without it, it is deleted, and counted in its group.
    pub(crate) archived: Option<RawDocumentBuf>,
    /// In its transaction: these jobs are inserted, which it becomes.
    pub(crate) becomes: Arc<[Document]>,
    /// In its transaction: this line is paused.
    pub(crate) halts: Option<String>,
    /// The job that waits for this unique key is released.
    pub(crate) frees: Option<String>,
    /// The recruiter is notified, because other jobs are known to wait for it.
    pub(crate) is_followed: bool,
    /// Subscribers and those who wait for the job learn how it has ended.
    pub(crate) class: String,
    pub(crate) group: String,
    pub(crate) why: FinishReason,
    /// The error class of its failure.
    pub(crate) error: Option<String>,
}

/// A job that ends, as far as the effects depend on it.
#[derive(Debug)]
pub(crate) struct EndedJob {
    class: String,
    group: String,
    keep: Keep,
    is_followed: bool,
    /// The line that its failure halts.
    line: Option<String>,
    /// Its unique key, if that is taken until the job is finished.
    unique: Option<String>,
}

impl From<&Job> for EndedJob {
    fn from(job: &Job) -> Self {
        Self {
            class: job.class.clone(),
            group: job.settings.group().to_owned(),
            keep: job.settings.keep(),
            is_followed: job.is_followed,
            line: line(job.settings.halt_on_failure, job.gate.as_deref()),
            unique: job.unique.clone(),
        }
    }
}

impl EndedJob {
    /// The same of a document that may not be a job, and that does not end with success.
    pub(crate) fn of_document(document: &RawDocument) -> Self {
        let text = |field: &str| document.get_str(field).ok();
        let flag = |field: &str| document.get_bool(field).unwrap_or(false);
        let class = document.get_document("workable").ok().and_then(|workable| workable.get_str("class").ok());
        Self {
            class: class.unwrap_or_default().to_owned(),
            group: text("group").unwrap_or_default().to_owned(),
            keep: Keep::All,
            is_followed: flag("followed"),
            line: line(flag("halt_on_failure"), text("gate")),
            unique: text("unique").map(str::to_owned),
        }
    }
}

fn line(halts: bool, gate: Option<&str>) -> Option<String> {
    line_of_gate(gate.filter(|_| halts)?).map(str::to_owned)
}

impl Effects {
    /// The effects of this end; `archived` makes the document, if one is kept.
    pub(crate) fn of(job: EndedJob, ending: Ending, archived: impl FnOnce(Ending) -> RawDocumentBuf) -> Self {
        let (why, error, becomes) = (ending.why.clone(), ending.execution.class.clone(), ending.becomes.clone());
        let stage = Stage::of_end(&why);
        let is_kept = stage != Stage::Done || job.keep == Keep::All || job.is_followed;
        let archived = is_kept.then(|| archived(ending));
        let (halts, frees) = (job.line.filter(|_| stage == Stage::Failed), job.unique);
        Self { archived, becomes, halts, frees, is_followed: job.is_followed, class: job.class, group: job.group, why, error }
    }

    /// Whether more is written than the deletion of the job, all of it or nothing.
    pub(crate) fn needs_transaction(&self) -> bool {
        // A field that is added here is written in the transaction, or follows it.
        let Self { archived, becomes, halts, frees: _, is_followed: _, class: _, group: _, why: _, error: _ } = self;
        archived.is_some() || halts.is_some() || !becomes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    fn words(job: EndedJob, why: &FinishReason, becomes: usize) -> String {
        let execution = Execution { class: (*why != FinishReason::DONE).then(|| "exit:1".into()), ..Execution::default() };
        let ending = Ending { becomes: vec![doc! {}; becomes].into(), ..Ending::new(execution, why.clone()) };
        let effects = Effects::of(job, ending, |_| RawDocumentBuf::new());
        let mut words = vec![if effects.archived.is_some() { "archives" } else { "deletes" }.to_owned()];
        words.extend((becomes > 0).then(|| format!("inserts {}", effects.becomes.len())));
        words.extend(effects.halts.map(|line| format!("halts {line}")));
        words.extend(effects.frees.map(|key| format!("frees {key}")));
        words.extend(effects.is_followed.then(|| "notifies".to_owned()));
        words.push(format!("tells {}/{} {} {}", effects.group, effects.class, effects.why, effects.error.unwrap_or_default()));
        words.join(", ")
    }

    /// The effects of the end of a job with these fields. A document that is not decoded has the effects of its job.
    fn check(more: Document, why: &FinishReason, becomes: usize) -> String {
        let mut document = doc! { "_id": bson::oid::ObjectId::new(), "locked": false, "group": "g", "workable": { "class": "c" } };
        document.extend(doc! { "scheduled_at": bson::DateTime::now() }.into_iter().chain(more));
        let job = Job::try_from(document).expect("a job");
        let effects = words(EndedJob::from(&job), why, becomes);
        if *why != FinishReason::DONE {
            assert_eq!(words(EndedJob::of_document(&job.document), why, becomes), effects);
        }
        effects
    }

    #[test]
    fn an_end_has_its_effects() {
        let (done, failed, expired, cancelled) =
            (&FinishReason::DONE, &FinishReason::GAVE_UP, &FinishReason::EXPIRED, &FinishReason::CANCELLED);
        let (not_kept, in_line, unique) =
            (doc! { "keep": "failures" }, doc! { "gate": ">l", "halt_on_failure": true }, doc! { "unique": "k" });
        let followed = doc! { "keep": "failures", "followed": true };
        for (more, why, becomes, effects) in [
            (doc! {}, done, 0, "archives, tells g/c done "),
            (doc! {}, failed, 0, "archives, tells g/c gave-up exit:1"),
            (doc! {}, done, 2, "archives, inserts 2, tells g/c done "),
            (not_kept.clone(), done, 0, "deletes, tells g/c done "),
            (not_kept.clone(), done, 1, "deletes, inserts 1, tells g/c done "),
            (not_kept, cancelled, 0, "archives, tells g/c cancelled exit:1"),
            (followed.clone(), done, 0, "archives, notifies, tells g/c done "),
            (followed, failed, 0, "archives, notifies, tells g/c gave-up exit:1"),
            (in_line.clone(), done, 0, "archives, tells g/c done "),
            (in_line.clone(), cancelled, 0, "archives, tells g/c cancelled exit:1"),
            (in_line.clone(), failed, 0, "archives, halts l, tells g/c gave-up exit:1"),
            (in_line, expired, 0, "archives, halts l, tells g/c expired exit:1"),
            (doc! { "gate": ">l" }, failed, 0, "archives, tells g/c gave-up exit:1"),
            (doc! { "gate": "l", "halt_on_failure": true }, failed, 0, "archives, tells g/c gave-up exit:1"),
            (unique.clone(), done, 0, "archives, frees k, tells g/c done "),
            (unique, cancelled, 0, "archives, frees k, tells g/c cancelled exit:1"),
        ] {
            assert_eq!(check(more, why, becomes), effects);
        }
        let not_a_job = EndedJob::of_document(&RawDocumentBuf::new());
        assert_eq!(words(not_a_job, &FinishReason::MALFORMED, 0), "archives, tells / malformed exit:1");
    }
}
