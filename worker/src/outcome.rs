//! The closed set of outcomes of an execution.

use std::{error::Error, time::Duration};

use bson::Bson;
use recruiter_common::{
    enqueue::NewJob,
    failure::{self, Failure},
    json::bson_of,
};
use serde::Serialize;

/// The work is done.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Done {
    /// Kept as `result` in the archive.
    pub(crate) result: Option<Bson>,
}

impl Done {
    /// Done, with a result for the archive; `()` and `None` store no result. [`NotDone::GiveUp`] when it cannot be expressed in BSON:
    /// another attempt would not help.
    pub(crate) fn with(result: impl Serialize) -> Result<Self, NotDone> {
        match bson_of(&result) {
            Ok(result) => Ok(Self { result: Some(result).filter(|result| *result != Bson::Null) }),
            Err(error) => Err(NotDone::give_up("result", format!("the result cannot be stored: {error}"))),
        }
    }
}

/// Maximum number of jobs that one job becomes. For more, it enqueues a graph.
pub const MOST_CONTINUATIONS: usize = 1_000;

/// The error class of an error whose type is not specific: a text, or a boxed error.
const UNNAMED: &str = "error";

/// The work is not done.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum NotDone {
    /// The execution failed. The job's retry policy decides whether there is another attempt.
    Failed(Failure),
    /// The execution failed and another attempt is pointless. The retry policy is not called.
    GiveUp(Failure),
    /// Snooze: the work cannot be done yet, which is not a failure. The job runs again, and this run does not count against the retry
    /// policy.
    Snooze {
        /// How long to wait; `None` means the policy's delay, or 30 seconds if the policy has none.
        after: Option<Duration>,
        /// The reason, for the history.
        reason: Failure,
        /// How often a job may be snoozed with this error class. The next time is a failure. `None` means without limit.
        at_most: Option<u32>,
    },
    /// The execution could not begin, because the machine lacks a resource: open files, processes, memory. The job is released. The start
    /// does not count and has no entry in the history. The worker runs fewer jobs for a while.
    NoResources(Failure),
    /// The execution stopped early, after [`Context::cancelled`](crate::Context::cancelled) resolved.
    Stopped(Failure),
    /// The job becomes other jobs, in one transaction. It ends as done, and the jobs that wait for it wait for those.
    ContinueAs(Continuation),
}

/// The jobs that a job becomes.
#[derive(Clone, Debug)]
pub struct Continuation {
    pub(crate) jobs: Vec<NewJob>,
    note: Failure,
}

/// No two of them are equal, because each has new jobs.
impl PartialEq for Continuation {
    fn eq(&self, _other: &Self) -> bool {
        false
    }
}

impl NotDone {
    /// A failure of this class. Retry policies can select by the class.
    pub fn failed(class: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Failed(Failure::new(class, message))
    }

    /// A failure of this class after which another attempt is pointless.
    pub fn give_up(class: impl Into<String>, message: impl Into<String>) -> Self {
        Self::GiveUp(Failure::new(class, message))
    }

    /// Snoozes the job: it runs again after this time, and this run does not count against the retry policy.
    pub fn snooze(after: Duration, class: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Snooze { after: Some(after), reason: Failure::new(class, message), at_most: None }
    }

    /// Limits how often a job may be snoozed: after so many executions that ended with the same error class, this one is a failure, and
    /// the retry policy decides. It changes snoozes only.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use recruiter_worker::NotDone;
    /// fn too_early() -> NotDone {
    ///     NotDone::snooze(Duration::from_secs(60), "NotReady", "the report is not ready").at_most(20)
    /// }
    /// # assert_eq!(too_early().failure().class, "NotReady");
    /// ```
    #[must_use]
    pub fn at_most(mut self, times: u32) -> Self {
        if let Self::Snooze { at_most, .. } = &mut self {
            *at_most = Some(times);
        }
        self
    }

    /// Ends the job by making it other jobs: of another class, in another group, with other parameters, one or several. The end and the
    /// insert of the new jobs are one transaction. Jobs that wait for this one wait for the new ones instead, and a graph
    /// keeps them. At most [`MOST_CONTINUATIONS`] jobs.
    ///
    /// ```
    /// # use recruiter_worker::{NewJob, NotDone, bson::doc};
    /// fn translate_first(text: &str) -> NotDone {
    ///     NotDone::continue_as([NewJob::of_class("translate", doc! { "text": text }).in_group("slow")])
    /// }
    /// # assert_eq!(translate_first("x").failure().class, "continued");
    /// ```
    pub fn continue_as(jobs: impl IntoIterator<Item = NewJob>) -> Self {
        let jobs = jobs.into_iter();
        // They are enqueued after the span of the execution.
        #[cfg(feature = "opentelemetry")]
        let jobs = jobs.map(NewJob::traced);
        let jobs: Vec<NewJob> = jobs.collect();
        let note = Failure::new("continued", format!("it became {} jobs", jobs.len()));
        Self::ContinueAs(Continuation { jobs, note })
    }

    /// Stopped early, after [`Context::cancelled`](crate::Context::cancelled) resolved, for example: "7 of 9 files are done". The reason of the cancellation decides
    /// what follows.
    pub fn stopped(message: impl Into<String>) -> Self {
        Self::Stopped(Failure::new(failure::INTERRUPTED, message))
    }

    /// The failure that `?` makes of an error of type `E`.
    pub(crate) fn of<E>(error: &(dyn Error + 'static)) -> Self {
        Self::Failed(failure_of(class_of::<E>(), error))
    }

    /// The failure that goes into the history.
    pub fn failure(&self) -> &Failure {
        match self {
            Self::Failed(failure) | Self::GiveUp(failure) | Self::NoResources(failure) | Self::Stopped(failure) => failure,
            Self::Snooze { reason, .. } => reason,
            Self::ContinueAs(continuation) => &continuation.note,
        }
    }
}

/// A failure whose class is the name of the error's type without its path: `ParseIntError`. For a type named `Error` the class includes
/// the crate: `mongodb::Error`. A text or a boxed error has the class `error`. The causes of the error become the trace.
impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for NotDone {
    fn from(error: E) -> Self {
        Self::of::<E>(&*error.into())
    }
}

/// Sets the class of the failure that `?` returns.
///
/// ```
/// use recruiter_worker::{NotDone, OrNotDone as _};
///
/// fn port(text: &str) -> Result<u16, NotDone> {
///     Ok(text.parse().or_give_up("NoPort")?)
/// }
/// assert_eq!(port("http").unwrap_err().failure().class, "NoPort");
/// ```
pub trait OrNotDone<T> {
    /// A failure of this class, for retry policies to select by.
    ///
    /// # Errors
    /// [`NotDone::Failed`] when this is an error.
    fn or_failed(self, class: impl Into<String>) -> Result<T, NotDone>;

    /// A failure of this class after which another attempt is pointless.
    ///
    /// # Errors
    /// [`NotDone::GiveUp`] when this is an error.
    fn or_give_up(self, class: impl Into<String>) -> Result<T, NotDone>;
}

impl<T, E: Into<Box<dyn Error + Send + Sync>>> OrNotDone<T> for Result<T, E> {
    fn or_failed(self, class: impl Into<String>) -> Result<T, NotDone> {
        self.map_err(|error| NotDone::Failed(failure_of(class.into(), &*error.into())))
    }

    fn or_give_up(self, class: impl Into<String>) -> Result<T, NotDone> {
        self.map_err(|error| NotDone::GiveUp(failure_of(class.into(), &*error.into())))
    }
}

fn failure_of(class: String, error: &(dyn Error + 'static)) -> Failure {
    let failure = Failure::new(class, error.to_string());
    let (mut sources, mut next) = (Vec::new(), error.source());
    while let Some(source) = next {
        sources.push(source.to_string());
        next = source.source();
    }
    if sources.is_empty() { failure } else { failure.with_trace(sources.join("\n")) }
}

fn class_of<E>() -> String {
    let path = std::any::type_name::<E>();
    // Type parameters are left out: policies should not depend on them.
    let path = path.split('<').next().unwrap_or(path);
    let (start, name) = path.rsplit_once("::").unwrap_or(("", path));
    match (start.split("::").next().unwrap_or_default(), name) {
        (_, "Box" | "String" | "&str") => UNNAMED.into(),
        ("", name) => name.into(),
        (of, "Error") => format!("{of}::Error"),
        (_, name) => name.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the shop is closed")]
    struct Closed<T>(#[source] T);

    fn failed(with: impl FnOnce() -> Result<(), NotDone>) -> Failure {
        match with() {
            Err(NotDone::Failed(failure)) => failure,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_error_has_a_class_without_a_path() {
        let number = || "x".parse::<i32>();
        let classes = [
            failed(|| Ok(number().map(drop)?)),
            failed(|| Err(Closed(number().unwrap_err()))?),
            failed(|| Err(std::fmt::Error)?),
            failed(|| Err("a text")?),
            failed(|| Err(String::from("a text"))?),
            failed(|| Err(Box::<dyn Error + Send + Sync>::from("a box"))?),
            failed(|| number().map(drop).or_failed("NoNumber")),
        ]
        .map(|failure| failure.class);
        assert_eq!(classes, ["ParseIntError", "Closed", "core::Error", "error", "error", "error", "NoNumber"]);
        assert_eq!(number().map(drop).or_give_up("NoNumber"), Err(NotDone::give_up("NoNumber", "invalid digit found in string")));
    }

    #[test]
    fn a_result_that_would_be_rounded_is_given_up() {
        let given_up = Done::with(u64::MAX).expect_err("it has more than 64 bits with a sign");
        assert!(matches!(&given_up, NotDone::GiveUp(why) if why.class == "result" && why.message.contains("18446744073709551615")));
    }

    #[cfg(feature = "process")]
    #[test]
    fn an_anyhow_error_keeps_its_causes() {
        use anyhow::Context as _;
        let failure = failed(|| Ok("x".parse::<i32>().map(drop).context("no port").context("no server")?));
        let trace = failure.trace.as_deref();
        assert_eq!((failure.class.as_str(), failure.message.as_str()), ("anyhow::Error", "no server"));
        assert_eq!(trace, Some("no port\ninvalid digit found in string"));
    }
}
