//! A bundle in this worker: its items one after the other, each a run of the class with limits, failures and a verdict of its
//! own, and what follows for the whole.
//!
//! Each item is judged as a job of its own would be: it is done, or to be done again, or that was its last time. The bundle goes to
//! the archive once nothing is left to be done, and until then back to `scheduled`.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bson::Bson;
use chrono::TimeDelta;
use futures_util::{FutureExt, future::BoxFuture};
use recruiter_common::{
    failure::{self, Failure},
    instant::Instant,
    job::{
        Job, Why,
        bundle::{ItemOutcome, failure_of, is_left},
    },
    retry_policy::RetryPolicy,
    store::Store,
};

use crate::{
    execute::{Next, enter, guarded, judge},
    progress::{Queue, Record},
    registry::{Handler, Ready},
    runner::Equipment,
    workable::{Cancel, Cancellation, Context, Done, Item, NotDone},
};

/// A started bundle.
pub(crate) struct Bundle {
    job: Arc<Job>,
    items: Vec<Bson>,
    handler: Arc<dyn Handler>,
    policy: Arc<dyn RetryPolicy>,
    store: Store,
    queue: Queue,
    record: Arc<Record>,
    /// Of an item that has none of its own.
    time_limit: Option<Duration>,
    run: Mutex<Run>,
}

/// What this run has made of its items.
#[derive(Default)]
struct Run {
    ended: Vec<Ended>,
    /// How long to wait until every item that is to be done again may be.
    pause: TimeDelta,
    /// Whether one of them failed, so that the run counts.
    counts: bool,
    /// The first that is to be done again without having failed, and why.
    put_off: Option<(usize, Failure)>,
}

/// An item that was executed, for the hooks.
struct Ended {
    index: usize,
    workable: Arc<dyn Ready>,
    /// Why it is not done, and whether that was the last time.
    failure: Option<Box<(Failure, bool)>>,
}

impl Bundle {
    pub(crate) fn new(
        equipment: &Equipment,
        job: Arc<Job>,
        handler: &Arc<dyn Handler>,
        policy: &Arc<dyn RetryPolicy>,
        record: Arc<Record>,
    ) -> Arc<Self> {
        let (handler, policy) = (handler.clone(), policy.clone());
        let (store, queue, time_limit) = (equipment.store.clone(), equipment.progress.clone(), equipment.args.time_limit);
        let items = job.items();
        Arc::new(Self { job, items, handler, policy, store, queue, record, time_limit, run: Mutex::default() })
    }

    fn run(&self) -> MutexGuard<'_, Run> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What became of all items, as it is to be stored.
    pub(crate) fn outcomes(&self) -> Vec<Bson> {
        self.record.look(<[Bson]>::to_vec)
    }

    /// What follows for the bundle, once it has ended.
    pub(crate) fn next(&self, cancelled: Option<Cancellation>, now: Instant) -> Next {
        let run = self.run();
        self.record.look(|outcomes| conclude(outcomes, &run, cancelled, now))
    }

    /// Executes one item and notes what became of it.
    async fn execute_item(&self, index: usize, parameters: Bson, bundle: &Context) {
        let cancel = Arc::new(Cancel::of_item(&bundle.cancel));
        let (workable, ended) = match decode(&self.handler, parameters) {
            Ok((workable, limit)) => {
                let context = Arc::new(self.context_of(index, bundle, cancel.clone()));
                let ended = enter(workable.clone(), &context, limit.or(self.time_limit)).await;
                (Some(workable), ended)
            }
            Err(failure) => (None, Err(NotDone::Failed(failure))),
        };
        let now = self.store.now();
        let mut failed = None;
        let mut run = self.run();
        match judge(&self.job.history(), self.policy.as_ref(), ended, cancel.why(), now) {
            Next::Archive { why, failure: None, result } => {
                debug_assert_eq!(why, Why::DONE, "everything else has a failure");
                self.record.note(index, ItemOutcome::Done { result }.into(), &self.queue);
            }
            Next::Archive { why, failure: Some(failure), .. } => {
                failed = Some(Box::new((failure.clone(), true)));
                self.record.note(index, ItemOutcome::Failed { failure, last: Some(why) }.into(), &self.queue);
            }
            Next::Retry { failure, at, counts } => {
                failed = Some(Box::new((failure.clone(), false)));
                run.pause = run.pause.max(at - now);
                run.counts |= counts;
                if counts {
                    self.record.note(index, ItemOutcome::Failed { failure, last: None }.into(), &self.queue);
                } else {
                    run.put_off.get_or_insert((index, failure));
                }
            }
            Next::Release { failure, at } => {
                run.pause = run.pause.max(at - now);
                run.put_off.get_or_insert((index, failure));
                return;
            }
            // The claim is lost, and the item somebody else's.
            Next::Nothing => return,
        }
        run.ended.extend(workable.map(|workable| Ended { index, workable, failure: failed }));
    }

    fn context_of(&self, index: usize, bundle: &Context, cancel: Arc<Cancel>) -> Context {
        bundle.of_item(Item { index, of: self.items.len() }, cancel)
    }
}

impl Ready for Bundle {
    fn time_limit(&self) -> Option<Duration> {
        None
    }

    /// Always ends with [`Done`]: what became of the items, [`Bundle::next`] knows.
    fn execute<'a>(&'a self, job: &'a Arc<Context>) -> BoxFuture<'a, Result<Done, NotDone>> {
        async move {
            for index in self.record.left() {
                if !job.cancel.may_go_on().await {
                    break;
                }
                self.execute_item(index, self.items[index].clone(), job).await;
                // Items that wait for nothing leave the others a turn.
                tokio::task::coop::consume_budget().await;
            }
            self.record.close().await;
            Ok(Done::default())
        }
        .boxed()
    }

    /// It ends when the present item has: that one is broken off like any other execution.
    fn blocks(&self) -> bool {
        true
    }

    fn after<'a>(&'a self, job: &'a Context, _failure: Option<&'a Failure>, last: bool) -> BoxFuture<'a, ()> {
        let ended = std::mem::take(&mut self.run().ended);
        async move {
            for Ended { index, workable, failure } in ended {
                let context = self.context_of(index, job, job.cancel.clone());
                let (failure, given_up) = failure.map_or((None, false), |failed| (Some(failed.0), failed.1));
                let hooks = AssertUnwindSafe(workable.after(&context, failure.as_ref(), last || given_up));
                if hooks.catch_unwind().await.is_err() {
                    tracing::error!(job.id = %job.job_id(), item = index, "a hook panicked");
                }
            }
        }
        .boxed()
    }
}

/// A workable and its own time limit, both made by code of users.
pub(crate) fn decode(handler: &Arc<dyn Handler>, parameters: Bson) -> Result<(Arc<dyn Ready>, Option<Duration>), Failure> {
    guarded(|| {
        let workable = handler.decode(parameters)?;
        let limit = workable.time_limit();
        Ok((workable, limit))
    })?
}

/// What follows for a bundle from what became of its items.
fn conclude(outcomes: &[Bson], run: &Run, cancelled: Option<Cancellation>, now: Instant) -> Next {
    let left = outcomes.iter().filter(|outcome| is_left(outcome)).count();
    let archive = |why: Why, failure: Option<Failure>| Next::Archive { why, failure, result: None };
    let mut failed = outcomes.iter().enumerate().filter_map(|(index, outcome)| Some((index, failure_of(outcome)?))).peekable();
    let first = failed.peek().cloned();
    let summary = |(index, (failure, _)): &(usize, (Failure, Option<Why>)), count: usize| {
        let message = format!("{count} of {} items failed, the first of them item {index}: {}", outcomes.len(), failure.message);
        Failure::new(failure.class.clone(), message)
    };
    let rest = |class: &str| Failure::new(class, format!("{left} of {} items are still to be done", outcomes.len()));
    match (cancelled, first) {
        (Some(Cancellation::LeaseLost), _) => Next::Nothing,
        (_, None) if left == 0 => archive(Why::DONE, None),
        (_, Some(first)) if left == 0 => archive(first.1.1.clone().unwrap_or(Why::GAVE_UP), Some(summary(&first, failed.count()))),
        (Some(Cancellation::Requested), _) => archive(Why::CANCELLED, Some(rest(failure::CANCELLED))),
        (cancelled, first) => {
            let failure = match (first, cancelled, &run.put_off) {
                (Some(first), _, _) if run.counts => summary(&first, failed.count()),
                (_, Some(Cancellation::MemoryLimit), _) => rest(failure::MEMORY_LIMIT),
                (_, Some(_), _) | (_, None, None) => rest(failure::INTERRUPTED),
                (_, None, Some((index, reason))) => {
                    Failure::new(reason.class.clone(), format!("item {index} is to be tried again: {}", reason.message))
                }
            };
            // At its memory limit a worker would otherwise be taken there by the same bundle for ever.
            let counts = run.counts || cancelled == Some(Cancellation::MemoryLimit);
            let at = now.checked_add_signed(run.pause).unwrap_or(Instant::MAX_UTC);
            Next::Retry { failure, at, counts }
        }
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    fn now() -> Instant {
        Instant::from_timestamp_millis(1_000_000).expect("a date")
    }

    /// One letter for each item: done, left, failed, given up.
    fn check(items: &str, run: Run, cancelled: Option<Cancellation>) -> String {
        let outcome = |item: char| match item {
            'd' => "done".into(),
            'f' => doc! { "class": "f", "message": "m" }.into(),
            'g' => doc! { "class": "g", "message": "m", "why": "gave-up" }.into(),
            't' => doc! { "class": "t", "message": "m", "why": "tried-too-many-times" }.into(),
            _ => Bson::Null,
        };
        let outcomes: Vec<Bson> = items.chars().map(outcome).collect();
        match conclude(&outcomes, &run, cancelled, now()) {
            Next::Archive { why, failure, .. } => {
                format!("archive {why} {}", failure.map_or_else(String::new, |failure| format!("{} {}", failure.class, failure.message)))
            }
            Next::Retry { failure, at, counts } => {
                format!("retry {} +{} {counts}: {}", failure.class, (at - now()).num_seconds(), failure.message)
            }
            Next::Release { .. } | Next::Nothing => "nothing".into(),
        }
    }

    #[test]
    fn what_follows_for_a_bundle() {
        let run = |counts: bool, seconds: i64| Run { counts, pause: TimeDelta::seconds(seconds), ..Run::default() };
        let put_off = || Run { put_off: Some((1, Failure::new("exit:75", "early"))), ..run(false, 30) };
        assert_eq!(check("ddd", run(false, 0), None), "archive done ");
        assert_eq!(check("ddd", run(false, 0), Some(Cancellation::WorkerStopping)), "archive done ");
        assert_eq!(check("dgt", run(false, 0), None), "archive gave-up g 2 of 3 items failed, the first of them item 1: m");
        assert_eq!(
            check("tgd", run(false, 0), Some(Cancellation::Requested)),
            "archive tried-too-many-times t 2 of 3 items failed, the first of them item 0: m"
        );
        assert_eq!(check("dfg", run(true, 60), None), "retry f +60 true: 2 of 3 items failed, the first of them item 1: m");
        assert_eq!(check("d.d", put_off(), None), "retry exit:75 +30 false: item 1 is to be tried again: early");
        assert_eq!(check("g.d", put_off(), None), "retry exit:75 +30 false: item 1 is to be tried again: early", "the other has its end");
        assert_eq!(
            check("f.d", Run { counts: true, ..put_off() }, None),
            "retry f +30 true: 1 of 3 items failed, the first of them item 0: m"
        );
        assert_eq!(
            check("d..", run(false, 0), Some(Cancellation::WorkerStopping)),
            "retry interrupted +0 false: 2 of 3 items are still to be done"
        );
        assert_eq!(
            check("f..", run(true, 9), Some(Cancellation::WorkerStopping)),
            "retry f +9 true: 1 of 3 items failed, the first of them item 0: m"
        );
        assert_eq!(
            check("d..", run(false, 0), Some(Cancellation::MemoryLimit)),
            "retry memory-limit +0 true: 2 of 3 items are still to be done"
        );
        assert_eq!(
            check("d..", run(false, 0), Some(Cancellation::Requested)),
            "archive cancelled cancelled 2 of 3 items are still to be done"
        );
        assert_eq!(check("ddd", run(false, 0), Some(Cancellation::LeaseLost)), "nothing");
    }
}
