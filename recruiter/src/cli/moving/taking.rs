//! What the imports have in common: documents are read as a stream and become jobs, which are enqueued in batches, or schedules. Each
//! outcome is counted, and what is left alone is named with its reason.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
};

use anyhow::{Context as _, anyhow, bail};
use bson::{Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt as _;
use indicatif::ProgressBar;
use mongodb::Collection;
use recruiter_common::{
    NewJob,
    enqueue::{EnqueueError, Outcome},
    exit::Exit,
    ids::JobId,
    schedules::{Schedule, ScheduleError},
    shutdown::Shutdown,
    store::{Store, lossy},
    telemetry::chain,
};
use serde_json::json;

use super::{
    super::{
        output::{printable, progress},
        presence::{Needs, warn_of_unmet},
        view::{dry, id_in, json_line},
    },
    Source,
};

/// Jobs are enqueued so many at a time.
const BATCH: usize = 1_000;
/// Or so many bytes of documents.
const BATCH_BYTES: usize = 8 << 20;
/// Maximum number of different notes that are counted.
const NOTES: usize = 50;

/// What a document of the other system becomes.
#[derive(Debug)]
pub(super) enum Found {
    /// A job with this id, and what is different here.
    Job(Box<NewJob>, JobId, Option<String>),
    /// A schedule with this name, and what is different here.
    Schedule(String, Box<Schedule>, Option<String>),
    /// A schedule enqueues it when it is due.
    BySchedule,
    /// It has nothing left to do.
    Finished,
    /// It is left alone.
    Left(Reason, String),
}

/// Why a document is left alone, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// A process of the other system has it.
    Locked,
    /// A process of the other system died while it ran, and it is not to be repeated.
    Died,
    /// The other system would not run it.
    Disabled,
    /// Its repetition has no counterpart.
    Repetition,
    /// Its retry policy has no counterpart.
    RetryPolicy,
    /// The document is not one of the other system.
    Malformed,
    /// This job system refuses it.
    Refused,
}

impl Reason {
    fn word(self) -> &'static str {
        match self {
            Self::Locked => "locked",
            Self::Died => "died",
            Self::Disabled => "disabled",
            Self::Repetition => "repetition",
            Self::RetryPolicy => "retry-policy",
            Self::Malformed => "malformed",
            Self::Refused => "refused",
        }
    }
}

/// A job that is not enqueued yet: its id and its name in the other system.
struct Pending {
    id: JobId,
    name: String,
    job: NewJob,
    note: Option<String>,
}

/// An import under way.
pub(super) struct Taking<'a, W> {
    store: &'a Store,
    /// Name of the other system.
    system: &'static str,
    source: &'a Source,
    out: &'a mut W,
    batch: Vec<Pending>,
    batch_bytes: usize,
    needs: Needs,
    declared: BTreeSet<String>,
    outcomes: BTreeMap<&'static str, u64>,
    reasons: BTreeMap<&'static str, u64>,
    notes: BTreeMap<String, u64>,
    shown: ProgressBar,
}

impl<'a, W: Write> Taking<'a, W> {
    pub(super) fn new(store: &'a Store, system: &'static str, source: &'a Source, out: &'a mut W) -> Self {
        let shown = progress(ProgressBar::no_length(), &format!("{{spinner}} {{pos}} jobs of {system}  {{elapsed}}"));
        let (batch, needs) = (Vec::new(), Needs::default());
        let (declared, outcomes, reasons, notes) = Default::default();
        Self { store, system, source, out, batch, batch_bytes: 0, needs, declared, outcomes, reasons, notes, shown }
    }

    /// Takes over all documents of a collection, until a stop is requested. `convert` gives the name of a document, and what it becomes.
    pub(super) async fn collection(
        &mut self,
        collection: &Collection<RawDocumentBuf>,
        shutdown: &Shutdown,
        mut convert: impl FnMut(&Document) -> (String, Found),
    ) -> anyhow::Result<()> {
        let place = || format!("cannot read {}", collection.namespace());
        let mut found = collection.find(doc! {}).sort(doc! { "_id": 1 }).await.with_context(place)?;
        while !shutdown.is_requested()
            && let Some(next) = found.try_next().await.with_context(place)?
        {
            self.batch_bytes += next.as_bytes().len();
            let (document, name, becomes) = self.read(&next, &mut convert);
            self.take(&document, name, becomes).await?;
        }
        self.flush().await
    }

    /// A text that is no UTF-8 would be stored with other characters, so its document is left alone.
    fn read(&self, next: &RawDocumentBuf, convert: &mut impl FnMut(&Document) -> (String, Found)) -> (Document, String, Found) {
        match Document::try_from(next) {
            Ok(document) => {
                let (name, becomes) = convert(&document);
                (document, name, becomes)
            }
            Err(problem) => {
                let document = lossy(next);
                let (name, _) = convert(&document);
                (document, name, Found::Left(Reason::Malformed, format!("it cannot be read: {problem}")))
            }
        }
    }

    async fn take(&mut self, document: &Document, name: String, becomes: Found) -> anyhow::Result<()> {
        let id = document.get("_id").map(id_in).unwrap_or_default();
        match becomes {
            Found::Job(job, id, note) => {
                self.batch.push(Pending { id, name, job: *job, note });
                if self.batch.len() >= BATCH || self.batch_bytes >= BATCH_BYTES { self.flush().await } else { Ok(()) }
            }
            Found::Schedule(key, schedule, note) => self.declare(&key, &schedule, &id, &name, note.as_deref()).await,
            Found::BySchedule => self.add(&id, &name, "by-schedule", None),
            Found::Finished => self.add(&id, &name, "finished", None),
            Found::Left(reason, why) => self.leave(&id, &name, reason, &why),
        }
    }

    /// The names of the schedules that were declared.
    pub(super) fn declared(&self) -> &BTreeSet<String> {
        &self.declared
    }

    async fn declare(&mut self, key: &str, schedule: &Schedule, id: &str, name: &str, note: Option<&str>) -> anyhow::Result<()> {
        let schedules = self.store.schedules();
        let declared = if self.source.dry_run { schedules.compare(key, schedule).await } else { schedules.declare(key, schedule).await };
        match declared {
            Ok(_) => {
                self.declared.insert(key.to_owned());
                self.add(id, name, "declared", note)
            }
            Err(ScheduleError::Store(error)) => Err(error.into()),
            Err(refused) => self.leave(id, name, Reason::Refused, &chain(&refused)),
        }
    }

    /// Enqueues the jobs of the batch together; if one is refused, one by one, to find out which.
    async fn flush(&mut self) -> anyhow::Result<()> {
        self.batch_bytes = 0;
        let batch = std::mem::take(&mut self.batch);
        if !self.source.dry_run {
            if self.enqueue(&batch).await?.is_some() {
                for one in batch.chunks(1) {
                    if let Some(refused) = self.enqueue(one).await? {
                        self.leave(&one[0].id.to_string(), &one[0].name, Reason::Refused, &refused)?;
                    }
                }
            }
            return Ok(());
        }
        for Pending { id, name, job, note } in &batch {
            self.needs.add(job);
            match job.to_job(self.store.now()) {
                Ok(_) => self.add(&id.to_string(), name, "enqueued", note.as_deref())?,
                Err(refused) => self.leave(&id.to_string(), name, Reason::Refused, &chain(&refused))?,
            }
        }
        Ok(())
    }

    /// Enqueues these jobs. Returns why one of them is refused: then none is enqueued.
    async fn enqueue(&mut self, jobs: &[Pending]) -> anyhow::Result<Option<String>> {
        let enqueued = match self.store.enqueue_many(jobs.iter().map(|pending| pending.job.clone())).await {
            Ok(enqueued) => enqueued,
            Err(EnqueueError::Store(error)) => return Err(anyhow!(error).context("repeat the command: it enqueues nothing twice")),
            Err(refused) => return Ok(Some(chain(&refused))),
        };
        for (Pending { id, name, job, note }, enqueued) in jobs.iter().zip(enqueued) {
            self.needs.add(job);
            let outcome = if enqueued.outcome == Outcome::KnownId { "known" } else { "enqueued" };
            self.add(&id.to_string(), name, outcome, note.as_deref())?;
        }
        Ok(None)
    }

    fn add(&mut self, id: &str, name: &str, outcome: &'static str, note: Option<&str>) -> anyhow::Result<()> {
        if let Some(note) = note
            && (self.notes.len() < NOTES || self.notes.contains_key(note))
        {
            *self.notes.entry(note.to_owned()).or_default() += 1;
        }
        self.count(id, name, outcome, note, None)
    }

    fn leave(&mut self, id: &str, name: &str, reason: Reason, why: &str) -> anyhow::Result<()> {
        *self.reasons.entry(reason.word()).or_default() += 1;
        if !self.source.format.json {
            let (name, why) = (printable(name, 80), printable(why, 400));
            self.shown.suspend(|| writeln!(std::io::stderr(), "{id} ({name}) is left alone: {why}"))?;
        }
        self.count(id, name, "left", None, Some((reason, why)))
    }

    fn count(
        &mut self,
        id: &str,
        name: &str,
        outcome: &'static str,
        note: Option<&str>,
        left: Option<(Reason, &str)>,
    ) -> anyhow::Result<()> {
        *self.outcomes.entry(outcome).or_default() += 1;
        self.shown.inc(1);
        if self.source.format.json {
            let (reason, why) = left.map(|(reason, why)| (reason.word(), why)).unzip();
            let dry_run = self.source.dry_run;
            let line =
                json!({ "id": id, "name": name, "outcome": outcome, "reason": reason, "why": why, "note": note, "dry_run": dry_run });
            json_line(self.out, &line)?;
        }
        Ok(())
    }

    /// Writes the counts. The import has failed if something was left alone, or if there was nothing: then `place` says where.
    pub(super) async fn finish(self, shutdown: &Shutdown, place: &str) -> anyhow::Result<()> {
        self.shown.finish_and_clear();
        if self.outcomes.is_empty() && !shutdown.is_requested() {
            bail!("{place}");
        }
        let counted = |counts: &BTreeMap<&'static str, u64>| {
            counts.iter().map(|(what, count)| format!("{count} {what}")).collect::<Vec<_>>().join(", ")
        };
        if !self.source.format.json {
            for (note, count) in &self.notes {
                writeln!(std::io::stderr(), "{count} jobs: {}", printable(note, 400))?;
            }
            let reasons = if self.reasons.is_empty() { String::new() } else { format!(" ({})", counted(&self.reasons)) };
            writeln!(self.out, "{}{}{reasons}", dry(self.source.dry_run), counted(&self.outcomes))?;
        }
        self.out.flush()?;
        warn_of_unmet(self.store, &self.needs).await;
        if shutdown.is_requested() {
            return Err(anyhow!("stopped by a signal; repeat the command to import the rest").context(Exit::Aborted));
        }
        match self.outcomes.get("left") {
            None => Ok(()),
            Some(left) => bail!("{left} jobs of {} were left alone", self.system),
        }
    }
}
