//! The classes of a worker: from a class name to a value that can be executed. Types are erased here and nowhere else.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    num::NonZeroU32,
    sync::Arc,
    time::Duration,
};

use bson::Bson;
use futures_util::{FutureExt, future::BoxFuture};
use recruiter_common::{
    failure::{self, Failure},
    job::Settings,
    store::{ClassSlots, check_trimmed_name},
    telemetry::{chain, of_bson},
};

use crate::{
    context::Context,
    hooks::hook,
    outcome::{Done, NotDone},
    panics::{GuardedDrop, guarded},
    threads::Threads,
    workable::{BlockingExecutable, Executable},
};

/// Makes executable values of one class from stored parameters.
pub(crate) trait Handler: Send + Sync {
    /// A failure of class `parameters` when the class cannot use them.
    fn decode(&self, parameters: Bson) -> Result<Arc<dyn Ready>, Failure>;
    /// The longest [`Ready::stops_within`] of all executions of the class.
    fn stops_within(&self) -> Option<Duration> {
        None
    }
}

/// One decoded workable, ready to be executed once.
pub(crate) trait Ready: Send + Sync {
    /// How long the execution may take.
    fn time_limit(&self) -> Option<Duration>;
    /// Does the work. Dropping the future ends the execution, unless [`Ready::blocks`].
    fn execute<'a>(&'a self, job: &'a Arc<Context>) -> BoxFuture<'a, Result<Done, NotDone>>;
    /// How long an execution may take to end after it is cancelled, for any reason; `None` for the worker's default.
    fn stops_within(&self) -> Option<Duration> {
        None
    }
    /// Whether dropping the future leaves the work running.
    fn blocks(&self) -> bool {
        false
    }
    /// The hooks, called once the end is recorded. `last` is true when the failure moved the job to the archive.
    fn after<'a>(&'a self, _job: &'a Arc<Context>, _failure: Option<&'a Failure>, _last: bool) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }
}

/// The classes of a worker.
#[derive(Default)]
pub(crate) struct Registry {
    handlers: BTreeMap<String, Arc<dyn Handler>>,
    /// How many jobs run at a time of the classes that have a limit.
    concurrency: BTreeMap<String, NonZeroU32>,
    /// The defaults of the classes of a workables file, which the worker declares when it registers.
    pub(crate) defaults: BTreeMap<String, Settings>,
    /// The threads of all blocking classes.
    pub(crate) threads: Threads,
}

/// A workable cannot be registered under its class.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidClass {
    /// The class has another workable.
    #[error("class `{0}` is registered twice: remove one, since a worker has one workable per class")]
    Duplicate(String),
    /// No job can have this class.
    #[error("the class of a workable {0}")]
    Name(String),
}

/// A limit was set for a class that is not registered.
#[derive(Debug, thiserror::Error)]
#[error("the class `{0}` is not registered: register it before its concurrency is set")]
pub struct UnknownClass(pub String);

impl Registry {
    pub(crate) fn add(&mut self, class: &str, handler: Arc<dyn Handler>) -> Result<(), InvalidClass> {
        check_trimmed_name(class).map_err(InvalidClass::Name)?;
        match self.handlers.entry(class.to_owned()) {
            Entry::Vacant(entry) => {
                entry.insert(handler);
                Ok(())
            }
            Entry::Occupied(_) => Err(InvalidClass::Duplicate(class.to_owned())),
        }
    }

    /// Sets how many jobs of a class run at a time.
    pub(crate) fn limit(&mut self, class: &str, jobs: NonZeroU32) -> Result<(), UnknownClass> {
        if !self.has(class) {
            return Err(UnknownClass(class.to_owned()));
        }
        self.concurrency.insert(class.to_owned(), jobs);
        Ok(())
    }

    /// The limits of the classes, as long as none of their jobs is here.
    pub(crate) fn class_slots(&self) -> Vec<ClassSlots> {
        self.concurrency.iter().map(|(class, jobs)| ClassSlots { class: class.clone(), free: jobs.get() }).collect()
    }

    pub(crate) fn has(&self, class: &str) -> bool {
        self.handlers.contains_key(class)
    }

    pub(crate) fn classes(&self) -> impl Iterator<Item = &str> {
        self.handlers.keys().map(String::as_str)
    }

    /// The longest time that an execution of any class needs to stop.
    pub(crate) fn stops_within(&self) -> Duration {
        self.handlers.values().filter_map(|handler| handler.stops_within()).max().unwrap_or_default()
    }

    /// The error has the class `unknown-class`.
    pub(crate) fn handler(&self, class: &str) -> Result<&Arc<dyn Handler>, Failure> {
        match self.handlers.get(class) {
            Some(handler) => Ok(handler),
            None => Err(Failure::new(failure::UNKNOWN_CLASS, format!("this worker has no workable of class `{class}`"))),
        }
    }
}

/// Decodes a workable and asks for its time limit. Both are code of users. The error has the class `parameters` or `panic`.
pub(crate) fn decode(handler: &Arc<dyn Handler>, parameters: Bson) -> Result<(Arc<dyn Ready>, Option<Duration>), Failure> {
    guarded(|| {
        let workable = handler.decode(parameters)?;
        let limit = workable.time_limit();
        Ok((workable, limit))
    })?
}

pub(crate) fn deserialize<W: serde::de::DeserializeOwned>(parameters: Bson) -> Result<W, Failure> {
    // A struct without fields is stored as an empty document. serde reads a unit struct from null, and a tuple struct from an array.
    let others =
        if parameters.as_document().is_some_and(bson::Document::is_empty) { vec![Bson::Null, Bson::Array(Vec::new())] } else { Vec::new() };
    bson::deserialize_from_bson(parameters)
        .or_else(|error| others.into_iter().find_map(|empty| bson::deserialize_from_bson(empty).ok()).ok_or(error))
        .map_err(|error| Failure::new(failure::PARAMETERS, format!("the parameters cannot be decoded: {}", of_bson(&error))))
}

/// An asynchronous workable with its shared state.
pub(crate) struct Asynchronous<W: Executable>(pub(crate) Arc<W::State>);

struct ReadyAsynchronous<W: Executable> {
    workable: GuardedDrop<W>,
    state: Arc<W::State>,
}

impl<W: Executable> Handler for Asynchronous<W> {
    fn decode(&self, parameters: Bson) -> Result<Arc<dyn Ready>, Failure> {
        Ok(Arc::new(ReadyAsynchronous::<W> { workable: GuardedDrop::new(deserialize(parameters)?), state: self.0.clone() }))
    }
}

impl<W: Executable> Ready for ReadyAsynchronous<W> {
    fn time_limit(&self) -> Option<Duration> {
        self.workable.time_limit()
    }

    fn execute<'a>(&'a self, job: &'a Arc<Context>) -> BoxFuture<'a, Result<Done, NotDone>> {
        async { Done::with(self.workable.execute(&self.state, job).await?) }.boxed()
    }

    fn after<'a>(&'a self, job: &'a Arc<Context>, failure: Option<&'a Failure>, last: bool) -> BoxFuture<'a, ()> {
        async move {
            let (workable, state) = (&self.workable, &self.state);
            match failure {
                None => hook("after_success", job, async || workable.after_success(state, job).await).await,
                Some(failure) => {
                    hook("after_failure", job, async || workable.after_failure(state, job, failure).await).await;
                    if last {
                        hook("after_last_failure", job, async || workable.after_last_failure(state, job, failure).await).await;
                    }
                }
            }
        }
        .boxed()
    }
}

/// A blocking workable with its shared state, and the threads of its worker.
pub(crate) struct Blocking<W: BlockingExecutable> {
    pub(crate) state: Arc<W::State>,
    pub(crate) threads: Threads,
    /// The threads of hooks. A hook that hangs takes no slot.
    pub(crate) hook_threads: Threads,
}

struct ReadyBlocking<W: BlockingExecutable> {
    workable: GuardedDrop<W>,
    state: Arc<W::State>,
    threads: Threads,
    hook_threads: Threads,
}

impl<W: BlockingExecutable> Handler for Blocking<W> {
    fn decode(&self, parameters: Bson) -> Result<Arc<dyn Ready>, Failure> {
        Ok(Arc::new(ReadyBlocking::<W> {
            workable: GuardedDrop::new(deserialize(parameters)?),
            state: self.state.clone(),
            threads: self.threads.clone(),
            hook_threads: self.hook_threads.clone(),
        }))
    }
}

impl<W: BlockingExecutable> Ready for ReadyBlocking<W> {
    fn time_limit(&self) -> Option<Duration> {
        self.workable.time_limit()
    }

    fn execute<'a>(&'a self, job: &'a Arc<Context>) -> BoxFuture<'a, Result<Done, NotDone>> {
        let (workable, state, job) = (W::clone(&self.workable), self.state.clone(), job.clone());
        async move {
            match self.threads.run(W::CLASS, move || workable.execute(&state, &job)).await {
                Ok(Ok(result)) => Done::with(result?),
                Ok(Err(panic)) => std::panic::resume_unwind(panic),
                Err(error) => Err(NotDone::NoResources(Failure::new("thread", format!("cannot start a thread: {error}")))),
            }
        }
        .boxed()
    }

    fn blocks(&self) -> bool {
        true
    }

    fn after<'a>(&'a self, job: &'a Arc<Context>, failure: Option<&'a Failure>, last: bool) -> BoxFuture<'a, ()> {
        if !W::HAS_HOOKS {
            return async {}.boxed();
        }
        async move {
            match failure.cloned() {
                None => self.call("after_success", job, |workable, state, job| workable.after_success(state, job)).await,
                Some(failure) => {
                    let failed = failure.clone();
                    self.call("after_failure", job, move |workable, state, job| workable.after_failure(state, job, &failed)).await;
                    if last {
                        let call = move |workable: &W, state: &W::State, job: &Context| workable.after_last_failure(state, job, &failure);
                        self.call("after_last_failure", job, call).await;
                    }
                }
            }
        }
        .boxed()
    }
}

impl<W: BlockingExecutable> ReadyBlocking<W> {
    /// Calls one hook in a thread of its own.
    async fn call(&self, name: &str, job: &Arc<Context>, call: impl FnOnce(&W, &W::State, &Context) + Send + 'static) {
        let in_thread = async || {
            // A panic of `clone` is one of the hook.
            let (workable, state, context) = (W::clone(&self.workable), self.state.clone(), job.clone());
            match self.hook_threads.run(W::CLASS, move || call(&workable, &state, &context)).await {
                Ok(Ok(())) => {}
                Ok(Err(panic)) => std::panic::resume_unwind(panic),
                Err(error) => tracing::error!(job.id = %job.job_id(), error = chain(&error), "no thread can be started for a hook"),
            }
        };
        hook(name, job, in_thread).await;
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Sweep;

    #[derive(Debug, Deserialize)]
    struct Empty();

    #[derive(Debug, Deserialize)]
    struct Wrapped(());

    #[derive(Debug, Deserialize)]
    struct Named {
        #[serde(rename = "name")]
        _name: String,
    }

    #[test]
    fn a_struct_without_fields_is_read_as_it_was_stored() {
        assert_eq!(deserialize::<Sweep>(Bson::Null).map(drop), Ok(()));
        assert_eq!(deserialize::<Sweep>(doc! {}.into()).map(drop), Ok(()));
        assert_eq!(deserialize::<Empty>(doc! {}.into()).map(drop), Ok(()));
        assert_eq!(deserialize::<Wrapped>(doc! {}.into()).map(drop), Ok(()));
        let missing = deserialize::<Named>(doc! {}.into()).map(drop).expect_err("it has no name");
        assert!(missing.message.contains("name"), "{}", missing.message);
    }

    #[test]
    fn a_class_that_no_job_can_have_is_refused_and_one_that_is_there() {
        struct Unused;
        impl Handler for Unused {
            fn decode(&self, _: Bson) -> Result<Arc<dyn Ready>, Failure> {
                Err(Failure::new("unused", ""))
            }
        }
        let mut registry = Registry::default();
        let mut add = |class: &str| registry.add(class, Arc::new(Unused)).map_err(|error| error.to_string());
        assert_eq!(add("mail"), Ok(()));
        let long = "x".repeat(257);
        for (class, problem) in [("mail", "registered twice"), ("mail ", "a blank"), ("a\0", "NUL"), ("", "is empty"), (&long, "257 bytes")]
        {
            assert!(add(class).is_err_and(|error| error.contains(problem)), "{class:?}");
        }
    }
}
