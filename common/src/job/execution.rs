//! One execution of a job: its start, its outcome, and the verdict for the death of its worker.

use bson::{RawBsonRef, RawDocumentBuf, raw::cstr, rawdoc};
use serde::Deserialize;

use super::{FinishReason, Job, raw::roomy};
use crate::base::{Failure, Instant, JobId, StartId, WorkerId, instant};

/// Proof of a start: its owner may write the outcome, once. Only the start operations create it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Claim {
    pub(crate) job: JobId,
    pub(crate) start: StartId,
}

impl Claim {
    /// The job that was started.
    pub fn job(self) -> JobId {
        self.job
    }

    /// The start of the job.
    pub fn start(self) -> StartId {
        self.start
    }
}

/// The crash verdict: what the cleaner does with a started job if its worker dies. The retry policy decides it at the start, when it is
/// stored as `{retry_after_ms: …}` or `{archive: <why>}`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum IfWorkerDies {
    /// Reschedule it this many milliseconds after the death was detected.
    RetryAfterMs(i64),
    /// Archive it with this finish reason.
    Archive(FinishReason),
}

impl IfWorkerDies {
    /// The stored form.
    pub(crate) fn to_raw(&self) -> RawDocumentBuf {
        match self {
            Self::RetryAfterMs(delay) => rawdoc! { "retry_after_ms": *delay },
            Self::Archive(why) => rawdoc! { "archive": why.as_str() },
        }
    }
}

/// One execution of a job, as stored in its history. Every field except `scheduled_at` is absent until it is known.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub struct Execution {
    /// When it was due.
    #[serde(deserialize_with = "instant::stored", default)]
    pub scheduled_at: Option<Instant>,
    /// When the worker locked it, by the server's clock.
    #[serde(deserialize_with = "instant::stored", default)]
    pub started_at: Option<Instant>,
    /// When it ended, or when its worker's death was detected, by the estimated server clock.
    #[serde(deserialize_with = "instant::stored", default)]
    pub ended_at: Option<Instant>,
    /// The worker that started it.
    pub worker: Option<WorkerId>,
    /// The start: the fencing token of the outcome.
    pub start: Option<StartId>,
    /// The crash verdict; removed once the execution has ended.
    pub if_worker_dies: Option<IfWorkerDies>,
    /// Whether the limit of its group admitted it. Absent if the group had none.
    pub group_permit: Option<bool>,
    /// Machine of the worker.
    pub hostname: Option<String>,
    /// Process of the worker.
    pub pid: Option<i64>,
    /// Error class; absent when it succeeded.
    pub class: Option<String>,
    /// Error message; absent when it succeeded.
    pub message: Option<String>,
    /// Error trace, if there is one.
    pub trace: Option<String>,
    /// Set if the worker died during the execution.
    pub crashed: Option<bool>,
}

impl Execution {
    /// This execution, ended at `ended_at`, with `failure` if it failed.
    #[must_use]
    pub fn ended(mut self, ended_at: Instant, failure: Option<&Failure>) -> Self {
        self.ended_at = Some(ended_at);
        self.if_worker_dies = None;
        if let Some(failure) = failure {
            self.class = Some(failure.class.clone());
            self.message = Some(failure.message.clone());
            self.trace.clone_from(&failure.trace);
        }
        self
    }

    /// Whether a cleaner has written its end, after the death of its worker.
    pub(crate) fn is_of_rescue(&self) -> bool {
        self.crashed == Some(true)
    }

    /// The stored form. Written without serde, which would convert ids by way of text, because this runs for every job.
    pub(crate) fn to_raw(&self) -> RawDocumentBuf {
        let date = |at: Option<Instant>| at.map(|at| RawBsonRef::DateTime(bson::DateTime::from_chrono(at)));
        let verdict = self.if_worker_dies.as_ref().map(IfWorkerDies::to_raw);
        let fields = [
            (cstr!("scheduled_at"), date(self.scheduled_at)),
            (cstr!("started_at"), date(self.started_at)),
            (cstr!("ended_at"), date(self.ended_at)),
            (cstr!("worker"), self.worker.map(|id| RawBsonRef::ObjectId(id.into()))),
            (cstr!("start"), self.start.map(|id| RawBsonRef::ObjectId(id.into()))),
            (cstr!("if_worker_dies"), verdict.as_deref().map(RawBsonRef::Document)),
            (cstr!("hostname"), self.hostname.as_deref().map(RawBsonRef::String)),
            (cstr!("pid"), self.pid.map(RawBsonRef::Int64)),
            (cstr!("class"), self.class.as_deref().map(RawBsonRef::String)),
            (cstr!("message"), self.message.as_deref().map(RawBsonRef::String)),
            (cstr!("trace"), self.trace.as_deref().map(RawBsonRef::String)),
            (cstr!("crashed"), self.crashed.map(RawBsonRef::Boolean)),
            (cstr!("group_permit"), self.group_permit.map(RawBsonRef::Boolean)),
        ];
        let mut raw = roomy(256);
        for (field, value) in fields {
            value.into_iter().for_each(|value| raw.append(field, value));
        }
        raw
    }
}

/// Maximum number of executions in a job's history: the first and the newest. Dropped ones are counted.
pub const KEPT_EXECUTIONS: usize = 20;

/// The bounded history with one more execution: the first and the newest are kept. And the number of those that are dropped.
pub(crate) fn history_with(job: &Job, execution: &Execution) -> (Vec<Execution>, u32) {
    let mut executions = job.executions.clone();
    executions.push(execution.clone());
    let excess = executions.len().saturating_sub(KEPT_EXECUTIONS);
    executions.drain(1..=excess);
    (executions, job.executions_dropped + u32::try_from(excess).unwrap_or(u32::MAX))
}

/// The number of deaths of the job's workers, including this execution.
pub(crate) fn deaths_with(job: &Job, execution: &Execution) -> u32 {
    job.deaths + u32::from(execution.is_of_rescue())
}

/// A count as stored.
pub(crate) fn count(value: u32) -> RawBsonRef<'static> {
    i32::try_from(value).map_or_else(|_| RawBsonRef::Int64(value.into()), RawBsonRef::Int32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_execution_is_read_as_it_was_written() {
        let at = Instant::from_timestamp_millis(1_700_000_000_123);
        let whole = Execution {
            scheduled_at: at,
            started_at: at,
            ended_at: at,
            worker: Some(WorkerId::new()),
            start: Some(StartId::new()),
            if_worker_dies: Some(IfWorkerDies::RetryAfterMs(7)),
            hostname: Some("host".into()),
            pid: Some(17),
            class: Some("c".into()),
            message: Some("m".into()),
            trace: Some("t".into()),
            crashed: Some(true),
            group_permit: Some(true),
        };
        let archive = Execution { if_worker_dies: Some(IfWorkerDies::Archive(FinishReason::WORKER_DIED)), ..Execution::default() };
        for written in [whole, archive, Execution::default()] {
            let read: Execution = bson::deserialize_from_slice(written.to_raw().as_bytes()).unwrap();
            assert_eq!(read, written);
        }
    }
}
