//! Enqueues jobs, now or in the caller's transaction.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use backon::{ExponentialBuilder, Retryable as _};
use bson::Document;
use mongodb::ClientSession;

use super::{EnqueueError, Enqueued, NewJob, Outcome, edges::connect};
use crate::{
    base::{Instant, JobId, Patience, pause},
    hints::Hint,
    job::ScheduledJob,
    mongo::{Client, IDS_PER_QUERY, Store, StoreError},
    unique::Keyed,
};

/// Maximum number of jobs in one call for which the notification is sent together with the insert. So few jobs are
/// inserted before a recipient of the notification can read them.
pub(super) const ANNOUNCED_EARLY: usize = 16;

/// If the insert ends this much later than the notification, recipients may have read before the insert. Then the
/// notification is sent again.
const TOO_EARLY: Duration = Duration::from_millis(5);

/// The pauses between attempts to enqueue in a full group. With jitter, because callers that began together must not ask together.
const PAUSES: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(50))
    .with_max_delay(Duration::from_millis(500))
    .with_jitter()
    .without_max_times();

impl NewJob {
    /// Enqueues the job. Returns when a majority of the replica set has it.
    ///
    /// # Errors
    /// [`EnqueueError`]. After a [`StoreError`] the outcome may be unknown: repeat the call under [`NewJob::with_id`].
    pub async fn enqueue(self, client: &Client) -> Result<Enqueued, EnqueueError> {
        Ok(client.enqueue_many([self]).await?[0])
    }

    /// Enqueues the job in the caller's transaction, in a session of [`Client::start_session`]. Call [`Client::announce_jobs`] after the
    /// commit to notify the workers. Without that call the job is found by polling.
    ///
    /// # Errors
    /// [`EnqueueError`]. The caller must then abort the transaction. In `and_run2` the driver wraps the error: `get_custom::<EnqueueError>()`
    /// of the driver's error returns it. [`StoreError::NoTransaction`] if the session has no transaction open.
    pub async fn enqueue_in(self, client: &Client, session: &mut ClientSession) -> Result<Enqueued, EnqueueError> {
        Ok(client.enqueue_many_in(session, [self]).await?[0])
    }
}

impl Client {
    /// Enqueues many jobs. Returns when a majority has all of them, with one result per job in the same order.
    ///
    /// All jobs are validated before the first is sent. A job whose id exists already is left unchanged.
    ///
    /// # Errors
    /// [`EnqueueError`]. After a [`StoreError`] some jobs may have been enqueued: repeat all of them under
    /// [`NewJob::with_id`].
    pub async fn enqueue_many(&self, jobs: impl IntoIterator<Item = NewJob>) -> Result<Vec<Enqueued>, EnqueueError> {
        let store = self.store();
        store.ready_to_enqueue().await?;
        let prepared = Prepared::from_jobs(jobs, self.clock.now_in_order())?;
        store.admit(&prepared).await?;
        if prepared.expires {
            self.prepare_expiring_jobs().await?;
        }
        if prepared.is_graph {
            return store.enqueue_graph(prepared).await;
        }
        if !prepared.keyed.is_empty() {
            return store.enqueue_keyed(prepared).await;
        }
        let groups: Vec<String> = prepared.groups.into_keys().collect();
        let mut documents = prepared.documents;
        let mut known = HashSet::new();
        if !prepared.resent.is_empty() {
            for some in prepared.resent.chunks(IDS_PER_QUERY) {
                known.extend(store.already_archived(some).await?);
            }
            documents.retain(|document| !crate::mongo::id_of(document).is_some_and(|id| known.contains(&id)));
        }
        let early = documents.len() <= ANNOUNCED_EARLY;
        let jobs = documents.iter().filter(|_| early && prepared.at.is_none()).filter_map(ScheduledJob::of_document).collect();
        let again = Hint::Jobs { groups: groups.clone(), at: prepared.at, jobs: Vec::new() };
        let hint = Hint::Jobs { groups, at: prepared.at, jobs };
        let insert = async {
            known.extend(store.insert_jobs(documents).await?);
            Ok::<_, StoreError>(known)
        };
        if early {
            // The notification reaches the workers while MongoDB waits for its journal.
            let announce = async {
                store.announce_hint(hint).await;
                std::time::Instant::now()
            };
            let (inserted, announced) = tokio::join!(insert, announce);
            known = inserted?;
            if announced.elapsed() > TOO_EARLY {
                store.announce_hint(again).await;
            }
        } else {
            known = insert.await?;
            store.announce_hint(hint).await;
        }
        Ok(prepared.ids.into_iter().map(|id| enqueued(id, &known)).collect())
    }

    /// Like [`enqueue_many`](Self::enqueue_many), but waits while a group or a resource has as many waiting jobs as it may have
    /// ([`Groups::set_most_waiting`](crate::limits::Groups::set_most_waiting),
    /// [`Limits::set_most_waiting`](crate::limits::Limits::set_most_waiting)). The jobs are enqueued together, so there must be room for all of them.
    ///
    /// # Errors
    /// [`EnqueueError`]; [`EnqueueError::BacklogFull`] or [`EnqueueError::GateFull`] if there is no room within the timeout, or if the limit is lower than the number of
    /// jobs.
    pub async fn enqueue_when_room(
        &self,
        jobs: impl IntoIterator<Item = NewJob>,
        timeout: Duration,
    ) -> Result<Vec<Enqueued>, EnqueueError> {
        let jobs: Vec<NewJob> = jobs.into_iter().collect();
        let patience = Patience::new(timeout);
        let fit = |most: u64, is_in: &dyn Fn(&NewJob) -> bool| jobs.iter().filter(|job| is_in(job)).count() as u64 <= most;
        (|| self.enqueue_many(jobs.iter().cloned()))
            .retry(PAUSES)
            .sleep(pause)
            .when(|error| {
                if let EnqueueError::BacklogFull { group, most_waiting } = error {
                    fit(*most_waiting, &|job| job.settings.group() == group)
                } else if let EnqueueError::GateFull { gate, most_waiting, .. } = error {
                    fit(*most_waiting, &|job| job.settings.gate().as_ref() == Some(gate))
                } else {
                    false
                }
            })
            .adjust(|_, next| patience.shorten(next))
            .await
    }

    /// Enqueues many jobs in the caller's session and transaction. See [`NewJob::enqueue_in`].
    ///
    /// # Errors
    /// See [`NewJob::enqueue_in`].
    pub async fn enqueue_many_in(
        &self,
        session: &mut ClientSession,
        jobs: impl IntoIterator<Item = NewJob>,
    ) -> Result<Vec<Enqueued>, EnqueueError> {
        let store = self.store();
        store.ready_to_enqueue().await?;
        let prepared = Prepared::from_jobs(jobs, self.clock.now_in_order())?;
        store.admit(&prepared).await?;
        if prepared.is_graph {
            return store.enqueue_graph_in(session, prepared).await;
        }
        if !prepared.keyed.is_empty() {
            return store.enqueue_keyed_in(session, prepared).await;
        }
        let known = store.insert_jobs_in(session, prepared.documents, &prepared.resent).await?;
        Ok(prepared.ids.into_iter().map(|id| enqueued(id, &known)).collect())
    }

    /// Notifies the recruiter that jobs of these groups were committed. Without this call the jobs are found by
    /// polling.
    pub async fn announce_jobs(&self, groups: impl IntoIterator<Item = impl Into<String>>) {
        self.store().announce_hint(Hint::jobs_in(groups)).await;
    }
}

impl Store {
    /// Checks before an insert that the schema exists: an insert would create a missing collection without a validator.
    async fn ready_to_enqueue(&self) -> Result<(), EnqueueError> {
        if !self.is_set_up().await? {
            return Err(EnqueueError::NotSetUp { database: self.database().name().into() });
        }
        Ok(self.fresh_clock().await?)
    }
}

fn enqueued(id: JobId, known: &HashSet<JobId>) -> Enqueued {
    // Only a job with an id given by the application can exist already.
    Enqueued::new(id, if !known.is_empty() && known.contains(&id) { Outcome::KnownId } else { Outcome::New })
}

fn add_one(counts: &mut BTreeMap<String, u64>, name: &str) {
    match counts.get_mut(name) {
        Some(count) => *count += 1,
        None => drop(counts.insert(name.to_owned(), 1)),
    }
}

/// Validated jobs, ready to be sent.
pub(super) struct Prepared {
    pub(super) ids: Vec<JobId>,
    pub(super) documents: Vec<Document>,
    /// Ids that the application has given.
    pub(super) resent: Vec<JobId>,
    /// The unique keys, by the index of their job.
    pub(super) keyed: HashMap<usize, Keyed>,
    /// Whether one of them expires.
    pub(super) expires: bool,
    /// Whether one of them waits for another job, or is part of a graph.
    pub(super) is_graph: bool,
    /// The number of jobs in each group.
    pub(super) groups: BTreeMap<String, u64>,
    /// The number of jobs with each gate.
    pub(super) gates: BTreeMap<String, u64>,
    /// When the earliest job is due; `None` if one is due now.
    pub(super) at: Option<Instant>,
}

impl Prepared {
    fn from_jobs(jobs: impl IntoIterator<Item = NewJob>, now: Instant) -> Result<Self, EnqueueError> {
        let (mut ids, mut documents, mut resent) = (Vec::new(), Vec::new(), Vec::new());
        let (mut keyed, mut groups, mut gates) = (HashMap::new(), BTreeMap::new(), BTreeMap::new());
        let (mut first, mut expires, mut is_graph): (Option<Instant>, bool, bool) = (None, false, false);
        for job in jobs {
            expires |= job.expires.is_some();
            is_graph |= !job.waits_for.is_empty() || job.graph.is_some();
            resent.extend(job.id);
            add_one(&mut groups, job.settings.group());
            let (id, document, key) = job.into_keyed_document(now)?;
            if let Ok(gate) = document.get_str("gate") {
                add_one(&mut gates, gate);
            }
            keyed.extend(key.map(|key| (ids.len(), key)));
            let at = document.get_datetime("scheduled_at").map_or(now, |at| at.to_chrono());
            first = Some(first.map_or(at, |first| first.min(at)));
            ids.push(id);
            documents.push(document);
        }
        if is_graph {
            connect(&mut documents)?;
        }
        Ok(Self { ids, documents, resent, keyed, expires, is_graph, groups, gates, at: first.filter(|at| *at > now) })
    }
}
