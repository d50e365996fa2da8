//! Runs a bundle: its items run one after the other, each with its own limits, verdict and hooks.
//!
//! An item gets the verdict that a single job would get. A bundle with pending items is rescheduled, unless it was cancelled.
//!
//! Before each item the worker checks whether it should stop and whether its lease still holds, as before a start. On a stop, the item that
//! runs may end within the grace, and the rest is rescheduled at once. A rescheduled bundle is due after the longest delay that one of its
//! items needs. The run counts as an attempt if an item failed that will be retried, or at the memory limit. `job/bundle.rs` says what is
//! recorded, and what a death costs.

use std::sync::Arc;

use bson::Bson;
use chrono::TimeDelta;
use recruiter_common::{
    failure::{self, Failure},
    instant::{Instant, later},
    job::{
        Claim, FinishReason, Job,
        bundle::{self, ItemOutcome, failure_of, is_pending},
    },
    retry_policy::RetryPolicy,
};

use super::place::Place;
use crate::{
    cancellation::{Cancel, Cancellation},
    context::{Context, Item},
    engine::{
        environment::Environment,
        record::{
            items::Items,
            verdict::{Again, Verdict, verdict},
        },
    },
    outcome::NotDone,
    registry::{Handler, Ready, decode},
};

/// A started bundle.
pub(super) struct Bundle {
    parameters: Vec<Bson>,
    handler: Arc<dyn Handler>,
    items: Arc<Items>,
    run: Run,
}

/// The results of this run of the bundle.
#[derive(Default)]
struct Run {
    ended: Vec<EndedItem>,
    /// The longest delay of the items that run again.
    pause: TimeDelta,
    /// Whether an item failed and will be retried, so that this run counts.
    counts: bool,
    /// The first item that runs again without having failed, and the reason.
    snoozed: Option<(usize, Failure)>,
}

/// An item that was executed, for the hooks.
struct EndedItem {
    index: usize,
    workable: Arc<dyn Ready>,
    /// The failure, and whether it was the item's last.
    failure: Option<Box<(Failure, bool)>>,
}

impl Bundle {
    pub(super) fn new(job: &Job, known: &bundle::Bundle, claim: Claim, handler: &Arc<dyn Handler>, cancel: &Arc<Cancel>) -> Self {
        let items = Arc::new(Items::new(claim, known, cancel.clone()));
        Self { parameters: job.items(), handler: handler.clone(), items, run: Run::default() }
    }

    /// Executes the pending items, until all have ended or the bundle must stop.
    pub(super) async fn execute(&mut self, environment: &Environment, policy: &dyn RetryPolicy, context: &Context) {
        for index in self.items.remaining() {
            if !context.cancel.allows_items() || !environment.lease.may_begin(&context.cancel).await {
                break;
            }
            self.execute_item(index, environment, policy, context).await;
            // Lets other tasks run, also if no item ever waits.
            tokio::task::coop::consume_budget().await;
        }
        self.items.close();
    }

    /// Executes one item and notes its outcome.
    async fn execute_item(&mut self, index: usize, environment: &Environment, policy: &dyn RetryPolicy, bundle: &Context) {
        let place = Place::Session(environment);
        let cancel = Arc::new(Cancel::of_item(&bundle.cancel));
        let (workable, ended, delay) = match decode(&self.handler, self.parameters[index].clone()) {
            Ok((workable, limit)) => {
                let context = Arc::new(self.context_of(index, bundle, cancel.clone()));
                let ended = place.execute(workable.clone(), &context, limit).await;
                (Some(workable), ended, *context.retry_after.lock())
            }
            Err(failure) => (None, Err(NotDone::Failed(failure)), None),
        };
        let now = place.now();
        let run = &mut self.run;
        let mut has_hooks = true;
        let (outcome, failed) = match verdict(&bundle.job.history(), policy, ended, cancel.why(), now).put_off(delay, now) {
            Verdict::Archive { why, failure: None, result } => {
                debug_assert_eq!(why, FinishReason::DONE, "every other reason has a failure");
                (ItemOutcome::Done { result }, None)
            }
            Verdict::Archive { why, failure: Some(failure), .. } => {
                has_hooks = why != FinishReason::CANCELLED;
                (ItemOutcome::Failed { failure: failure.clone(), last: Some(why) }, Some((failure, true)))
            }
            Verdict::Retry { failure, at, again: Again::Failed } => {
                run.pause = run.pause.max(at - now);
                run.counts = true;
                (ItemOutcome::Failed { failure: failure.clone(), last: None }, Some((failure, false)))
            }
            Verdict::Retry { failure, at, again: Again::Snoozed | Again::Interrupted } | Verdict::Release { failure, at } => {
                run.pause = run.pause.max(at - now);
                run.snoozed.get_or_insert((index, failure));
                return;
            }
            // No item becomes other jobs.
            Verdict::Become { .. } | Verdict::ClaimLost => return,
        };
        if let Some(workable) = workable.filter(|_| has_hooks) {
            run.ended.push(EndedItem { index, workable, failure: failed.map(Box::new) });
        }
        environment.recorder.note(&self.items, index, outcome.into());
    }

    /// The verdict on the bundle, once it has ended.
    pub(super) fn verdict(&self, cancelled: Option<Cancellation>, now: Instant) -> Verdict {
        self.items.read(|outcomes| conclude(outcomes, &self.run, cancelled, now))
    }

    /// The outcomes of all items, in the form in which they are stored.
    pub(super) fn outcomes(&self) -> Vec<Bson> {
        self.items.read(<[Bson]>::to_vec)
    }

    /// Calls the hooks of the items that were executed. `last` is true when the bundle failed and went to the archive.
    pub(super) async fn after(&mut self, context: &Context, last: bool) {
        for EndedItem { index, workable, failure } in std::mem::take(&mut self.run.ended) {
            let context = Arc::new(self.context_of(index, context, context.cancel.clone()));
            let (failure, is_last) = failure.map_or((None, false), |failed| (Some(failed.0), failed.1));
            workable.after(&context, failure.as_ref(), last || is_last).await;
        }
    }

    fn context_of(&self, index: usize, bundle: &Context, cancel: Arc<Cancel>) -> Context {
        bundle.of_item(Item { index, of: self.parameters.len() }, cancel)
    }
}

/// The verdict on a bundle, from the outcomes of its items.
fn conclude(outcomes: &[Bson], run: &Run, cancelled: Option<Cancellation>, now: Instant) -> Verdict {
    let pending = outcomes.iter().filter(|outcome| is_pending(outcome)).count();
    let archive = |why: FinishReason, failure: Option<Failure>| Verdict::Archive { why, failure, result: None };
    let mut failed = outcomes.iter().enumerate().filter_map(|(index, outcome)| Some((index, failure_of(outcome)?))).peekable();
    let first = failed.peek().cloned();
    let summary = |(index, (failure, _)): &(usize, (Failure, Option<FinishReason>)), count: usize| {
        let message = format!("{count} of {} items failed, the first of them item {index}: {}", outcomes.len(), failure.message);
        Failure::new(failure.class.clone(), message)
    };
    let rest = |class: &str| Failure::new(class, format!("{pending} of {} items are still to be done", outcomes.len()));
    match (cancelled, first) {
        (Some(Cancellation::ClaimLost), _) => Verdict::ClaimLost,
        (_, None) if pending == 0 => archive(FinishReason::DONE, None),
        (_, Some(first)) if pending == 0 => {
            archive(first.1.1.clone().unwrap_or(FinishReason::GAVE_UP), Some(summary(&first, failed.count())))
        }
        (Some(Cancellation::Requested), _) => archive(FinishReason::CANCELLED, Some(rest(failure::CANCELLED))),
        (cancelled, first) => {
            let (failure, again) = match (first, cancelled, &run.snoozed) {
                (Some(first), _, _) if run.counts => (summary(&first, failed.count()), Again::Failed),
                // Counts as a failure. Otherwise a bundle that exhausts the memory of each worker would run again without end.
                (_, Some(Cancellation::MemoryLimit), _) => (rest(failure::MEMORY_LIMIT), Again::Failed),
                (_, Some(_), _) | (_, None, None) => (rest(failure::INTERRUPTED), Again::Interrupted),
                (_, None, Some((index, reason))) => {
                    let message = format!("item {index} is to be tried again: {}", reason.message);
                    (Failure::new(reason.class.clone(), message), Again::Snoozed)
                }
            };
            let at = later(now, run.pause.to_std().unwrap_or_default());
            Verdict::Retry { failure, at, again }
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

    /// One letter for each item: done, pending, failed, given up, tried too often.
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
            Verdict::Archive { why, failure, .. } => {
                format!("archive {why} {}", failure.map_or_else(String::new, |failure| format!("{} {}", failure.class, failure.message)))
            }
            Verdict::Retry { failure, at, again } => {
                format!("retry {} +{} {again:?}: {}", failure.class, (at - now()).num_seconds(), failure.message)
            }
            Verdict::Become { .. } | Verdict::Release { .. } | Verdict::ClaimLost => "nothing".into(),
        }
    }

    #[test]
    fn a_bundle_has_its_verdict() {
        let run = |counts: bool, seconds: i64| Run { counts, pause: TimeDelta::seconds(seconds), ..Run::default() };
        let snoozed = || Run { snoozed: Some((1, Failure::new("exit:75", "early"))), ..run(false, 30) };
        assert_eq!(check("ddd", run(false, 0), None), "archive done ");
        assert_eq!(check("ddd", run(false, 0), Some(Cancellation::WorkerStopping)), "archive done ");
        assert_eq!(check("dgt", run(false, 0), None), "archive gave-up g 2 of 3 items failed, the first of them item 1: m");
        assert_eq!(
            check("tgd", run(false, 0), Some(Cancellation::Requested)),
            "archive tried-too-many-times t 2 of 3 items failed, the first of them item 0: m"
        );
        assert_eq!(check("dfg", run(true, 60), None), "retry f +60 Failed: 2 of 3 items failed, the first of them item 1: m");
        assert_eq!(check("d.d", snoozed(), None), "retry exit:75 +30 Snoozed: item 1 is to be tried again: early");
        assert_eq!(
            check("g.d", snoozed(), None),
            "retry exit:75 +30 Snoozed: item 1 is to be tried again: early",
            "the failed item is final"
        );
        assert_eq!(
            check("f.d", Run { counts: true, ..snoozed() }, None),
            "retry f +30 Failed: 1 of 3 items failed, the first of them item 0: m"
        );
        assert_eq!(
            check("d..", run(false, 0), Some(Cancellation::WorkerStopping)),
            "retry interrupted +0 Interrupted: 2 of 3 items are still to be done"
        );
        assert_eq!(
            check("f..", run(true, 9), Some(Cancellation::WorkerStopping)),
            "retry f +9 Failed: 1 of 3 items failed, the first of them item 0: m"
        );
        assert_eq!(
            check("d..", run(false, 0), Some(Cancellation::MemoryLimit)),
            "retry memory-limit +0 Failed: 2 of 3 items are still to be done"
        );
        assert_eq!(
            check("d..", run(false, 0), Some(Cancellation::Requested)),
            "archive cancelled cancelled 2 of 3 items are still to be done"
        );
        assert_eq!(check("ddd", run(false, 0), Some(Cancellation::ClaimLost)), "nothing");
    }
}
