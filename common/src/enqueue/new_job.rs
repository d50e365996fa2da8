//! A job that is not enqueued yet, and its settings.

use std::time::Duration;

use bson::{Bson, Document, doc};

use super::{AnyPriority, Defaults, Retry};
use crate::{
    base::{GraphId, Instant, JobId},
    job::{Edge, Keep, LARGEST_COUNT, MOST_ITEMS, Settings, StoredPolicy, When},
    retry_policy::{InvalidPolicy, RetryPolicies},
    unique::Unique,
};

/// A job that is not enqueued yet. The enqueueing call reports every invalid setting before it sends anything.
#[derive(Clone, Debug)]
#[must_use = "a job does nothing until it is enqueued"]
pub struct NewJob {
    pub(super) id: Option<JobId>,
    pub(super) class: String,
    pub(super) given: Result<Given, String>,
    pub(super) settings: Settings,
    /// A priority that does not exist, set instead of that in the settings.
    pub(super) wrong_priority: Option<i64>,
    /// What is wrong with the retry policy.
    pub(super) policy_problem: Option<InvalidPolicy>,
    pub(super) scheduled: Scheduled,
    pub(super) unique: Option<Unique>,
    pub(super) expires: Option<Expires>,
    pub(super) recovered_from: Option<JobId>,
    /// What it has behind it in another job system: its attempts, and when it was enqueued.
    pub(super) continues: Option<(u32, Option<Instant>)>,
    pub(super) schedule: Option<Document>,
    pub(super) waits_for: Vec<Edge>,
    pub(super) graph: Option<GraphId>,
    /// The id that the job gets if the application gives none.
    pub(super) made_id: Option<JobId>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Expires {
    At(Instant),
    After(Duration),
}

/// The content of the workable.
#[derive(Clone, Debug)]
pub(super) enum Given {
    Parameters(Bson),
    /// The parameters of each item of a bundle.
    Items(Vec<Bson>),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Scheduled {
    Now,
    At(Instant),
    After(Duration),
}

impl NewJob {
    /// A job of this class with these parameters. For classes that are not Rust types: programs, other languages.
    pub fn of_class(class: impl Into<String>, parameters: Document) -> Self {
        Self::of(class, Ok(Bson::Document(parameters)))
    }

    /// Like [`bundle`](Self::bundle), for classes that are not Rust types, with the parameters of each item.
    pub fn bundle_of_class(class: impl Into<String>, items: impl IntoIterator<Item = Document>) -> Self {
        Self::of_items(class, items.into_iter().map(|item| Ok(Bson::Document(item))))
    }

    pub(super) fn of_items(class: impl Into<String>, items: impl Iterator<Item = Result<Bson, String>>) -> Self {
        // One item above the limit is enough to detect too many items.
        let items = items
            .take(MOST_ITEMS + 1)
            .enumerate()
            .map(|(index, item)| item.and_then(document_or_nothing).map_err(|reason| format!("item {index}: {reason}")));
        Self { given: items.collect::<Result<_, _>>().map(Given::Items), ..Self::of(class, Ok(Bson::Null)) }
    }

    pub(super) fn of(class: impl Into<String>, parameters: Result<Bson, String>) -> Self {
        Self {
            id: None,
            class: class.into(),
            given: parameters.map(Given::Parameters),
            settings: Settings::default(),
            wrong_priority: None,
            policy_problem: None,
            scheduled: Scheduled::Now,
            unique: None,
            expires: None,
            recovered_from: None,
            continues: None,
            schedule: None,
            waits_for: Vec::new(),
            graph: None,
            made_id: None,
        }
    }

    pub(super) fn with(mut self, defaults: Defaults) -> Self {
        self.settings = defaults.settings;
        if let Some(priority) = defaults.priority {
            self = self.priority(priority);
        }
        match defaults.retry {
            Some(policy) => self.retry(policy),
            None => self,
        }
    }

    /// Sets all settings, for example those of another job.
    pub fn with_settings(mut self, settings: Settings) -> Self {
        self.policy_problem = settings.retry_policy.as_ref().and_then(problem_with);
        (self.settings, self.wrong_priority) = (settings, None);
        self
    }

    /// Sets the id, so that a call with an unknown outcome can be repeated: a job whose id is already scheduled or
    /// archived is not enqueued a second time. Of a job with [`Keep::Failures`] that has succeeded, nothing remains: it is enqueued again.
    pub fn with_id(mut self, id: JobId) -> Self {
        self.id = Some(id);
        self
    }

    /// Sets the group: only workers that work on it get the job. Default: the group of its class, or `generic`.
    pub fn in_group(mut self, group: impl Into<String>) -> Self {
        self.settings.group = Some(group.into());
        self
    }

    /// Sets when the job is due, by the server's clock.
    pub fn at(mut self, at: Instant) -> Self {
        self.scheduled = Scheduled::At(at);
        self
    }

    /// Sets how long after it is enqueued the job is due, at most until the end of the year 9999.
    pub fn after(mut self, delay: Duration) -> Self {
        self.scheduled = Scheduled::After(delay);
        self
    }

    /// Sets the priority, a [`Priority`](crate::job::Priority) or a number: 0 to 9, higher first. Default: the priority of its class, or 5.
    pub fn priority(mut self, priority: impl Into<AnyPriority>) -> Self {
        match priority.into().0 {
            Ok(priority) => (self.settings.priority, self.wrong_priority) = (Some(priority), None),
            Err(number) => self.wrong_priority = Some(number),
        }
        self
    }

    /// Adds a label.
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.settings.tags.push(tag.into());
        self
    }

    /// Sets a name in the application's own terms. It need not be unique.
    pub fn urn(mut self, urn: impl Into<String>) -> Self {
        self.settings.urn = Some(urn.into());
        self
    }

    /// Sets the retry policy, which decides what follows a failure. Default: the policy of its class, or
    /// [`DoNotDoItAgain`](crate::retry_policy::DoNotDoItAgain).
    pub fn retry(mut self, policy: impl Into<Retry>) -> Self {
        match policy.into().0 {
            Ok(policy) => (self.settings.retry_policy, self.policy_problem) = (Some(policy), None),
            Err(problem) => self.policy_problem = Some(problem),
        }
        self
    }

    /// Sets the retry policy in its stored form. A built-in policy with invalid or unknown parameters is refused. A
    /// policy that is not built in is accepted, because workers may know it.
    pub fn retry_stored(mut self, policy: StoredPolicy) -> Self {
        self.policy_problem = problem_with(&policy);
        self.settings.retry_policy = Some(policy);
        self
    }

    /// Sets what is kept of the job after its end. Default: the choice of its class, or [`Keep::All`]. With [`Keep::Failures`] nothing is
    /// kept of a success.
    pub fn keep(mut self, keep: Keep) -> Self {
        self.settings.keep = Some(keep);
        self
    }

    /// The trace that the job belongs to: a `traceparent` of the [W3C Trace Context](https://www.w3.org/TR/trace-context/), for example
    /// `00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01`. The workable reads it as `Context::traceparent`, and a program as
    /// `TRACEPARENT`.
    ///
    /// With the feature `opentelemetry`, a job without it gets that of the OpenTelemetry context in which it is enqueued.
    pub fn traceparent(mut self, traceparent: impl Into<String>) -> Self {
        self.settings.traceparent = Some(traceparent.into());
        self
    }

    /// Puts the job into the trace of the current OpenTelemetry context now. A [`traceparent`](Self::traceparent) that is set stays.
    ///
    /// Enqueueing does the same, so that all jobs of an application are traced without a change of its code, as by the instrumentations of
    /// other job systems. Call this where a job is described in one span and enqueued outside of it, for example by a task that collects
    /// jobs. To begin a new trace, enqueue the job in an empty context.
    #[cfg(feature = "opentelemetry")]
    pub fn traced(mut self) -> Self {
        self.settings.traceparent = self.settings.traceparent.or_else(crate::base::traces::current);
        self
    }

    /// Without the feature, there is no current trace.
    #[cfg(not(feature = "opentelemetry"))]
    pub(super) fn traced(self) -> Self {
        self
    }

    /// Adds a resource that the job needs, for example `printer` or `customer:17`. No more jobs with it run at a time, and they start no more
    /// often, than its limit allows ([`limits`](crate::limits)). A job whose resource has no limit yet waits for one.
    pub fn limit(mut self, resource: impl Into<String>) -> Self {
        self.settings.limits.push(resource.into());
        self
    }

    /// Puts the job into a line: jobs with the same key run one after the other, in the order in which they were enqueued. A job that is
    /// delayed or retried keeps its place, and those behind it wait until it is finished. A job in a line cannot have other limits, except
    /// that of its group.
    pub fn in_line(mut self, key: impl Into<String>) -> Self {
        self.settings.line = Some(key.into());
        self
    }

    /// Halts the line of the job if the job fails for the last time: the jobs behind it wait until an operator resumes the line. By default the
    /// line goes on.
    pub fn halt_on_failure(mut self) -> Self {
        self.settings.halt_on_failure = true;
        self
    }

    /// Makes the job unique: while a job with the same key exists, another one is not enqueued.
    pub fn unique(mut self, unique: Unique) -> Self {
        self.unique = Some(unique);
        self
    }

    /// Sets when the job expires, by the server's clock. A job that has not started by then is archived as `expired`. It must be later than
    /// the due date.
    pub fn expires_at(mut self, at: Instant) -> Self {
        self.expires = Some(Expires::At(at));
        self
    }

    /// Sets how long after it is enqueued the job expires, at most until the end of the year 9999. A job that has not started by then is
    /// archived as `expired`. It must be longer than the delay of the job.
    pub fn expires_after(mut self, time: Duration) -> Self {
        self.expires = Some(Expires::After(time));
        self
    }

    /// Sets the archived job that this one repeats. The new document names it. The retry policy is accepted without
    /// validation.
    pub fn recovered_from(mut self, job: JobId) -> Self {
        self.recovered_from = Some(job);
        self
    }

    /// Continues a job of another job system, which has made this number of attempts and was enqueued there at this time. Both count for the
    /// retry policy: the next attempt is one more, and a [`TimeTable`](crate::retry_policy::TimeTable) begins at that time.
    pub fn continues(mut self, attempts: u32, created_at: Option<Instant>) -> Self {
        self.continues = Some((attempts.min(LARGEST_COUNT), created_at));
        self
    }

    /// Makes the job wait until another one is done. If that one ends in any other way, this job is cancelled
    /// ([`graphs`](crate::graphs)).
    pub fn waits_for(self, job: JobId) -> Self {
        self.waits_for_all([Edge { job, when: When::Done }])
    }

    /// Makes the job wait for the ends of other jobs. The results of those jobs are its inputs, in this order.
    pub fn waits_for_all(mut self, jobs: impl IntoIterator<Item = impl Into<Edge>>) -> Self {
        self.waits_for.extend(jobs.into_iter().map(Into::into));
        self
    }

    /// Makes the job part of a graph, for example that of the job that enqueues it.
    pub fn in_graph(mut self, graph: GraphId) -> Self {
        self.graph = Some(graph);
        self
    }

    /// Sets the id that the job gets if the application has given none.
    pub(crate) fn made_as(mut self, id: JobId) -> Self {
        self.made_id = Some(id);
        self
    }

    pub(crate) fn has_own_id(&self) -> bool {
        self.id.is_some()
    }

    pub(crate) fn is_unique(&self) -> bool {
        self.unique.is_some()
    }

    /// The id that the job will have.
    pub(crate) fn fix_id(&mut self) -> JobId {
        self.id.unwrap_or_else(|| *self.made_id.get_or_insert_with(JobId::new))
    }

    /// Sets the run of a schedule that this job is. The document names it.
    pub(crate) fn of_schedule(mut self, run: Document) -> Self {
        self.schedule = Some(run);
        self
    }

    /// Whether it has no id, no date, no unique key and no expiry of its own, so that a schedule can enqueue it again and again.
    pub(crate) fn is_repeatable(&self) -> bool {
        let is_plain = self.unique.is_none() && self.expires.is_none() && self.waits_for.is_empty() && self.graph.is_none();
        is_plain
            && self.id.is_none()
            && self.recovered_from.is_none()
            && self.continues.is_none()
            && matches!(self.scheduled, Scheduled::Now)
    }

    /// Adds parameters, and replaces those of the same name.
    pub(crate) fn with_parameters(mut self, more: Document) -> Self {
        if let Ok(Given::Parameters(parameters)) = &mut self.given {
            match parameters.as_document_mut() {
                Some(parameters) => parameters.extend(more),
                None => *parameters = more.into(),
            }
        }
        self
    }

    /// Its settings, as far as it has them.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The class and the group, which decide which workers get the job.
    pub fn class_and_group(&self) -> (&str, &str) {
        (&self.class, self.settings.group())
    }
}

/// What is wrong with a policy. One that is not built in may be known to workers.
fn problem_with(policy: &StoredPolicy) -> Option<InvalidPolicy> {
    RetryPolicies::default().check(policy).err().filter(|problem| problem.unknown_class().is_none())
}

/// Parameters in their stored form. A unit struct (null for serde) and a tuple struct without fields (an empty array) have none.
pub(super) fn document_or_nothing(parameters: Bson) -> Result<Bson, String> {
    if parameters == Bson::Null || parameters.as_array().is_some_and(Vec::is_empty) {
        Ok(Bson::Document(doc! {}))
    } else if parameters.as_document().is_some() {
        Ok(parameters)
    } else {
        Err(format!("they must be a struct or a map, not {:?}", parameters.element_type()))
    }
}
