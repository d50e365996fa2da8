//! Jobs that clients of this process execute, for servers that speak another protocol: clients take jobs, and say how they have ended.
//!
//! A [`Worker`](crate::Worker) that hands out its jobs has as many free slots as clients wait. Everything else is as for other workers:
//! limits, lines, retries, cancellation, rescue. While clients come back soon, jobs are assigned and locked ahead of them; those that no
//! client takes within about a second are returned.
//!
//! The contract is that of a queue with reservations, as Keuss (`reserve`, `commit`, `rollback`) and Faktory (`FETCH`, `ACK`, `FAIL`) have it.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::Arc,
    time::Duration,
};

use bson::Bson;
use futures_util::{FutureExt as _, future::BoxFuture};
use parking_lot::Mutex;
use recruiter_common::{failure::Failure, ids::JobId, store::Recorded};
use tokio::{
    sync::{Notify, oneshot},
    time::timeout,
};

use crate::{
    context::Context,
    outcome::{Done, NotDone},
    registry::{Handler, Ready},
};

/// How long a started job waits for a client, if the one that waited has gone. Then it is due again, and no attempt is counted.
const CLIENT_WITHIN: Duration = Duration::from_secs(1);
/// How long the client of a cancelled job may take to notice, and to end it.
const STOPS_WITHIN: Duration = Duration::from_secs(20);

/// Where clients wait for the jobs of one worker. Clones are the same places.
#[derive(Clone, Default)]
pub struct Places(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when there is a job, one for each.
    has_job: Notify,
    /// Notified when the number of places has changed.
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// Clients that wait, and jobs that clients have: so many slots are open.
    open: u32,
    /// Started jobs that no client has yet.
    jobs: VecDeque<HandedJob>,
    /// Those who wait until the end of a job is recorded.
    ends: HashMap<JobId, oneshot::Sender<bool>>,
}

/// A started job, which the client that takes it executes. Dropping it is a failure of the job, with the class `client-vanished`.
pub struct HandedJob {
    places: Places,
    context: Arc<Context>,
    parameters: Bson,
    end: oneshot::Sender<Result<Done, NotDone>>,
}

/// What has become of the end that a client has reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndOf {
    /// It is recorded.
    Job,
    /// It was the end of an item of a bundle, and is recorded with that of the bundle.
    Item,
}

/// The end that a client has reported is not recorded: the job was cancelled, was late, or was rescued and may run elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the job is no longer yours: it was cancelled, had reached its time limit, or was rescued; this end is not recorded")]
pub struct TooLate;

impl Places {
    /// Waits for a job. As long as the future lives, the worker has a free slot for it. Dropping it loses no job.
    pub async fn next(&self) -> HandedJob {
        let mut waiting = Waiting { places: self, is_empty: true };
        self.0.state.lock().open += 1;
        self.0.changed.notify_one();
        loop {
            let has_job = self.0.has_job.notified();
            if let Some(job) = self.0.state.lock().jobs.pop_front() {
                waiting.is_empty = false;
                return job;
            }
            has_job.await;
        }
    }

    /// The number of slots that are open.
    pub(crate) fn open(&self) -> u32 {
        self.0.state.lock().open
    }

    /// Waits until that number may have changed.
    pub(crate) async fn changed(&self) {
        self.0.changed.notified().await;
    }

    /// Notes whether the end of a job is recorded.
    pub(crate) fn note_ended(&self, job: JobId, recorded: Option<Recorded>) {
        let waits = self.0.state.lock().ends.remove(&job);
        // The client may have gone.
        let _ = waits.map(|waits| waits.send(recorded == Some(Recorded::Yes)));
    }

    /// No session runs jobs any more: no end is recorded.
    pub(crate) fn forget_ends(&self) {
        self.0.state.lock().ends.clear();
    }

    fn close(&self) {
        self.0.state.lock().open -= 1;
        self.0.changed.notify_one();
    }

    fn put(&self, job: HandedJob) {
        self.0.state.lock().jobs.push_back(job);
        self.0.has_job.notify_one();
    }

    /// Takes back a job that no client has. Returns whether there was one.
    fn take_back(&self, of: &Arc<Context>) -> bool {
        let mut state = self.0.state.lock();
        let at = state.jobs.iter().position(|job| Arc::ptr_eq(&job.context, of));
        at.and_then(|at| state.jobs.remove(at)).is_some()
    }
}

impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Places").field("open", &self.open()).finish_non_exhaustive()
    }
}

/// The place of a client. It closes when the client no longer waits, unless a job is in it.
struct Waiting<'a> {
    places: &'a Places,
    is_empty: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.is_empty {
            self.places.close();
        }
    }
}

impl HandedJob {
    /// The job, its notes and its cancellation.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The parameters; of a bundle, those of the item.
    pub fn parameters(&self) -> &Bson {
        &self.parameters
    }

    /// Gives the job back unexecuted: it is due again, and no attempt is counted.
    pub fn give_back(self) {
        // It may have been stopped.
        let _ = self.end.send(Err(not_executed()));
    }

    /// Ends the job: with a result, which may be null, or as not done. Returns when the end is recorded.
    ///
    /// # Errors
    /// When the job is no longer the client's. Nothing is recorded then.
    pub async fn end(self, outcome: Result<Bson, NotDone>) -> Result<EndOf, TooLate> {
        let Self { places, context, end, .. } = self;
        let is_item = context.item().is_some();
        let (sender, recorded) = oneshot::channel();
        if !is_item {
            places.0.state.lock().ends.insert(context.job_id(), sender);
        }
        let outcome = outcome.map(|result| Done { result: Some(result).filter(|result| *result != Bson::Null) });
        if end.send(outcome).is_err() {
            places.0.state.lock().ends.remove(&context.job_id());
            return Err(TooLate);
        }
        match recorded.await {
            _ if is_item => Ok(EndOf::Item),
            Ok(true) => Ok(EndOf::Job),
            Ok(false) | Err(_) => Err(TooLate),
        }
    }
}

impl fmt::Debug for HandedJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HandedJob").field(&self.context).finish()
    }
}

/// A class whose jobs are handed out.
pub(crate) struct HandsOut(pub(crate) Places);

impl Handler for HandsOut {
    fn decode(&self, parameters: Bson) -> Result<Arc<dyn Ready>, Failure> {
        Ok(Arc::new(ToHandOut { places: self.0.clone(), parameters }))
    }
}

struct ToHandOut {
    places: Places,
    parameters: Bson,
}

impl Ready for ToHandOut {
    fn time_limit(&self) -> Option<Duration> {
        None
    }

    fn execute<'a>(&'a self, job: &'a Arc<Context>) -> BoxFuture<'a, Result<Done, NotDone>> {
        async {
            let (end, mut ended) = oneshot::channel();
            let mut slot = Slot { places: &self.places, context: job, is_taken: true };
            self.places.put(HandedJob { places: self.places.clone(), context: job.clone(), parameters: self.parameters.clone(), end });
            let ended = match timeout(CLIENT_WITHIN, &mut ended).await {
                Ok(ended) => ended,
                Err(_) if slot.take_back() => return Err(not_executed()),
                Err(_) => ended.await,
            };
            ended.unwrap_or_else(|_| Err(NotDone::failed("client-vanished", "the client that had this job has not ended it in time")))
        }
        .boxed()
    }

    fn stops_within(&self) -> Option<Duration> {
        Some(STOPS_WITHIN)
    }
}

fn not_executed() -> NotDone {
    NotDone::snooze(Duration::ZERO, "client-gone", "the client that had waited for a job was gone; the job was not executed")
}

/// The slot of a job, until its execution ends, however that is.
struct Slot<'a> {
    places: &'a Places,
    context: &'a Arc<Context>,
    /// Whether the place of a client is that of this job.
    is_taken: bool,
}

impl Slot<'_> {
    fn take_back(&mut self) -> bool {
        self.is_taken = !self.places.take_back(self.context);
        !self.is_taken
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if self.is_taken && !self.places.take_back(self.context) {
            self.places.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> Arc<Context> {
        Arc::new(Context::for_tests().build())
    }

    fn ready(places: &Places, parameters: impl Into<Bson>) -> Arc<dyn Ready> {
        HandsOut(places.clone()).decode(parameters.into()).expect("anything can be handed out")
    }

    #[tokio::test]
    async fn a_slot_is_open_while_a_client_waits_and_until_its_job_has_ended() {
        let (places, context) = (Places::default(), job());
        let mut next = Box::pin(places.next());
        assert!(next.as_mut().now_or_never().is_none() && places.open() == 1);
        drop(next);
        assert_eq!(places.open(), 0, "the client has gone");
        let (workable, taken) = (ready(&places, 7), places.next());
        let (ended, ()) = tokio::join!(workable.execute(&context), async {
            let job = taken.await;
            assert_eq!((job.parameters(), places.open()), (&Bson::Int32(7), 1));
            let end = job.end(Ok(Bson::Boolean(true)));
            let note = async { places.note_ended(context.job_id(), Some(Recorded::Yes)) };
            assert_eq!(tokio::join!(end, note).0, Ok(EndOf::Job));
        });
        assert_eq!((ended, places.open()), (Ok(Done { result: Some(Bson::Boolean(true)) }), 0));
    }

    #[tokio::test]
    async fn a_job_for_which_nobody_waits_any_more_is_due_again_and_was_not_executed() {
        let (places, context) = (Places::default(), job());
        let ended = ready(&places, Bson::Null).execute(&context).await;
        assert!(matches!(&ended, Err(NotDone::Snooze { after: Some(Duration::ZERO), .. })), "{ended:?}");
        assert_eq!((places.open(), places.0.state.lock().jobs.len()), (0, 0));
    }

    #[tokio::test]
    async fn a_client_that_drops_its_job_has_failed_it_and_one_whose_job_was_stopped_is_told() {
        let (places, context) = (Places::default(), job());
        let workable = ready(&places, Bson::Null);
        let (ended, ()) = tokio::join!(workable.execute(&context), async { drop(places.next().await) });
        assert_eq!(ended.expect_err("it failed").failure().class, "client-vanished");
        let mut execution = workable.execute(&context);
        assert!((&mut execution).now_or_never().is_none());
        let job = places.next().await;
        drop(execution);
        assert_eq!((job.end(Ok(Bson::Null)).await, places.open()), (Err(TooLate), 0));
        // The end is reported, and another execution has the job.
        let (_, end) = tokio::join!(workable.execute(&context), async {
            let end = places.next().await.end(Ok(Bson::Null));
            tokio::join!(end, async { places.note_ended(context.job_id(), Some(Recorded::ClaimLost)) }).0
        });
        assert_eq!(end, Err(TooLate));
    }

    /// Between the notification of a client and its next poll, the client may go.
    #[tokio::test]
    async fn a_job_goes_to_another_client_if_the_notified_one_goes() {
        let places = Places::default();
        let (mut first, mut second) = (Box::pin(places.next()), Box::pin(places.next()));
        assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
        let (workable, context) = (ready(&places, Bson::Null), job());
        let mut execution = workable.execute(&context);
        assert!((&mut execution).now_or_never().is_none());
        drop(first);
        assert!(second.now_or_never().is_some(), "the second has it");
    }
}
