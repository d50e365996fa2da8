//! The roster, in the order of a worker's life: register, make available, report, heartbeat, leave, retire. What the recruiter assigns is in
//! `assignments`.
//!
//! Recruiter and worker take turns to write a document. While it is `available: true`, only the recruiter may change
//! its assignment; otherwise only its worker may. `round` distinguishes the turns: the recruiter writes a new round
//! with each assignment, and every write of the worker names the round that it took last. Therefore neither can
//! overwrite a write that it has not read.
//!
//! The collection has one document for each worker *process*, hundreds at most, and most of them are written several
//! times per second. Reading the whole collection is cheaper than maintaining an index on fields that change so often.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::{LazyLock, Mutex, PoisonError},
    time::Duration,
};

use bson::{Bson, Document, RawDocument, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use mongodb::{
    Collection,
    options::{ReadConcern, ReturnDocument},
};

use crate::{
    base::{Instant, JobId, LeaseTerm, RoundId, Uptime, WorkerId, integer},
    limits::cells::any_cell,
    mongo::{Channel, Store, StoreError, any_worker, call, channel::CHANNELS, schema, update::increased},
    roster,
    roster::{AvailableWorker, ClassSlots, Offered, ProcessIdentity, RegisteredWorker, Request, WorkOn},
};

/// Number of commit sessions of a worker in its roster document: the current one and the last ones before it.
const KEPT_SESSIONS: i32 = 4;

/// Maximum number of sessions of workables' own transactions in the roster document. The transactions of further ones end by themselves after
/// a minute.
const TRANSACTION_SESSIONS: i32 = 512;

/// Approximate number of workers that read one channel.
const WORKERS_PER_CHANNEL: i64 = 32;

/// Maximum time for MongoDB to retire a worker. When writes are blocked, MongoDB aborts the command after this time. If
/// it were executed later, it could overtake heartbeats that are blocked too.
const RETIRE_WITHIN: Duration = Duration::from_secs(1);

/// Maximum number of documents in the list of documents with a warning. When it is reached, the list is cleared, and the warnings are
/// logged again.
const WARNED_OF: usize = 10_000;

/// The data of a worker that registers.
#[derive(Clone, Debug)]
pub struct Registration {
    /// Its id.
    pub id: WorkerId,
    /// The groups whose jobs it takes.
    pub work_on: WorkOn,
    /// The classes that it runs.
    pub classes: Vec<String>,
    /// The retry policies that it knows.
    pub policies: Vec<String>,
    /// How many jobs it runs at a time of the classes that have a limit in its process.
    pub class_slots: Vec<ClassSlots>,
    /// Number of jobs that it runs at a time.
    pub capacity: u32,
    /// The length of its lease: how long it starts jobs after an acknowledged heartbeat, in milliseconds.
    pub lease_ms: i64,
    /// The channel that it reads hints from.
    pub channel: Channel,
    /// The session in which it commits.
    pub session: Option<Document>,
    /// Its process and machine.
    pub process: ProcessIdentity,
}

/// A worker's report in its document: the jobs that it accepts and holds.
#[derive(Clone, Debug, Default)]
pub struct Offer {
    /// Number of free slots.
    pub slots: u32,
    /// How many jobs it accepts ahead, beyond the free slots.
    pub prefetch: u32,
    /// How many more jobs it accepts of the classes that have a limit in its process.
    pub class_slots: Vec<ClassSlots>,
    /// Jobs that were assigned ahead and are not started yet.
    pub prefetched: Vec<JobId>,
    /// The names of the permits that it still holds.
    pub held_permits: Vec<String>,
    /// Every job that it can have locked before its next report: running jobs, starts without a reply, and jobs that were assigned ahead.
    pub working_on: Vec<JobId>,
}

impl Offer {
    /// The free slots.
    pub fn offered(&self) -> Offered {
        Offered { slots: self.slots, class_slots: self.class_slots.clone() }
    }

    /// Whether the recruiter may assign jobs.
    pub fn accepts_jobs(&self) -> bool {
        self.slots > 0 || self.prefetch > 0
    }
}

/// The result of a heartbeat.
#[derive(Clone, Debug)]
pub enum HeartbeatReply {
    /// The heartbeat was written, with this time of the server's clock.
    Seen {
        /// The time written.
        at: Instant,
        /// The assignment in the document, taken or not.
        assignment: Option<roster::Assignment>,
        /// The free slots that the document offers.
        offered: Offered,
        /// The names of the permits that the document says the worker holds.
        held_permits: Vec<String>,
        /// Whether the document names jobs of the worker.
        has_jobs: bool,
        /// What an operator wants of the worker.
        request: Option<Request>,
    },
    /// The document is deleted or being retired: this worker was declared dead.
    Retired,
}

fn stored_class_slots(slots: &[ClassSlots]) -> Vec<Document> {
    slots.iter().map(|ClassSlots { class, free }| doc! { "class": class, "free": *free }).collect()
}

impl Store {
    /// The roster as raw documents. A document with invalid BSON does not hide the others.
    pub(crate) fn roster_as_it_is(&self) -> Collection<RawDocumentBuf> {
        self.roster.clone_with_type()
    }

    /// The MongoDB user of this process, `name@database`; empty without access control.
    ///
    /// Index: none. Invariant: none, cleaners compare it.
    pub async fn user(&self) -> Result<String, StoreError> {
        let database = self.database.clone();
        let status = call("user", async move { database.run_command(doc! { "connectionStatus": 1 }).await }).await?;
        let users = status.get_document("authInfo").and_then(|info| info.get_array("authenticatedUsers")).cloned().unwrap_or_default();
        let name = |user: &Bson| {
            let user = user.as_document()?;
            Some(format!("{}@{}", user.get_str("user").ok()?, user.get_str("db").ok()?))
        };
        Ok(users.iter().filter_map(name).collect::<Vec<_>>().join(","))
    }

    /// The channel for a worker that registers, chosen in turn from as many as the roster needs. Creates its collection
    /// if it is missing.
    ///
    /// Index: `_id`. Invariant: none.
    pub async fn join_channel(&self) -> Result<Channel, StoreError> {
        let (metadata, roster) = (self.metadata.clone_with_type::<RawDocumentBuf>(), self.roster.clone());
        let registered = call("join_channel", async move { roster.estimated_document_count().await }).await?;
        let channels = (i64::try_from(registered).unwrap_or(i64::MAX) / WORKERS_PER_CHANNEL + 1).min(CHANNELS.into());
        let one_more = vec![doc! { "$set": { "workers": increased("workers", 1) } }];
        let counted = call("join_channel", async move {
            metadata
                .find_one_and_update(doc! { "_id": "channels" }, one_more)
                .upsert(true)
                .projection(doc! { "_id": 0, "workers": 1 })
                .return_document(ReturnDocument::After)
                .await
        })
        .await?;
        let workers = counted.and_then(|counted| integer(roster::legible(&counted).get("workers"))).unwrap_or(1);
        let channel = Channel(u32::try_from((workers - 1).rem_euclid(channels)).unwrap_or(0));
        schema::join_channel(self, channel).await?;
        Ok(channel)
    }

    /// The channels of all registered workers, and the first channel.
    ///
    /// Filter: none. Index: none, the roster is small. Invariant: none.
    pub async fn channels(&self) -> Result<BTreeSet<Channel>, StoreError> {
        let (roster, connected) = (self.roster_as_it_is(), self.relay().workers());
        let found: Vec<RawDocumentBuf> = call("channels", async move {
            let others = roster.find(doc! { "_id": { "$nin": connected } }).projection(doc! { "_id": 0, "channel": 1 });
            others.batch_size(10_000).await?.try_collect().await
        })
        .await?;
        let number = |found: &RawDocumentBuf| integer(roster::legible(found).get("channel")).and_then(|number| u32::try_from(number).ok());
        Ok(found.iter().filter_map(number).map(Channel).chain([Channel::default()]).collect())
    }

    /// Registers a worker, not available yet.
    ///
    /// Index: `_id`. Invariant: I4 and I5, a worker is in the roster before it locks its first job.
    pub async fn register(&self, worker: &Registration) -> Result<(), StoreError> {
        let now = self.now();
        let mut document = doc! {
            "_id": worker.id,
            "work_on": &worker.work_on,
            "available": false,
            "available_since": now,
            "free": 0,
            "capacity": worker.capacity,
            "last_seen_at": now,
            "created_at": now,
            "working": false,
            "classes": worker.classes.clone(),
            "policies": worker.policies.clone(),
            "lease_ms": worker.lease_ms,
            "channel": worker.channel.0,
            "held_permits": [],
            "sessions": worker.session.iter().collect::<Vec<_>>(),
            "version": env!("CARGO_PKG_VERSION"),
            "mongodb_user": self.user().await?,
        };
        if !worker.class_slots.is_empty() {
            document.insert("class_slots", stored_class_slots(&worker.class_slots));
        }
        document.extend(bson::serialize_to_document(&worker.process).expect("an identity is made of texts and numbers"));
        let roster = self.roster.clone();
        call("register", async move { roster.insert_one(document).await }).await?;
        self.tell_of_worker("joined", worker.id);
        Ok(())
    }

    /// Makes a registered worker available for the first time, in the recruiter's current term.
    ///
    /// The term is read after the document exists, and the update never lowers it: a leader that has taken over in between has written a
    /// higher term.
    /// Filter: id, no round yet, not retired. Index: `_id`. Invariant: I7.
    pub async fn make_available(&self, worker: WorkerId, slots: u32) -> Result<bool, StoreError> {
        let term = self.observe_lease().await?.map_or(LeaseTerm::default(), |lease| lease.term);
        let roster = self.roster.clone();
        let filter = doc! { "_id": worker, "round": null, "retired": { "$ne": true } };
        let now = self.now();
        let update = doc! { "$set": { "available": true, "available_since": now, "free": slots }, "$max": { "term": term } };
        let written = call("make_available", async move { roster.update_one(filter, update).await }).await?;
        Ok(written.matched_count == 1)
    }

    /// Writes a leader's term into every worker, so that no earlier leader can assign to it any more.
    ///
    /// Filter: a worker without a later term. Index: none, the roster is small. Invariant: one leader assigns (jobs are safe
    /// without it).
    pub async fn stamp_term(&self, term: LeaseTerm) -> Result<u64, StoreError> {
        let roster = self.roster.clone();
        let filter = doc! { "$and": [term.no_later_in("term"), any_worker()] };
        let stamped = call("stamp_term", async move { roster.update_many(filter, doc! { "$set": { "term": term } }).await }).await?;
        Ok(stamped.modified_count)
    }

    /// The highest term in the roster, and in what leaders keep in `metadata`; zero when none is there.
    ///
    /// Filter: in `metadata`, the documents with a term. Index: `_id`, and none in the roster, which is small. Invariant: one leader in each
    /// term, also when the lease was deleted.
    pub async fn highest_term(&self) -> Result<LeaseTerm, StoreError> {
        let (roster, metadata) = (self.roster_as_it_is(), self.metadata.clone_with_type::<RawDocumentBuf>());
        let fields = doc! { "term": 1, "fast_term": 1 };
        // Not in the lease, whose term may be damaged.
        let of_leaders = doc! { "$or": [{ "_id": any_cell() }, { "_id": { "$in": ["rates", "relay"] } }] };
        let found: Vec<RawDocumentBuf> = call("highest_term", async move {
            let mut found: Vec<_> = roster.find(doc! {}).projection(fields.clone()).batch_size(10_000).await?.try_collect().await?;
            let kept: Vec<_> = metadata.find(of_leaders).projection(fields).batch_size(10_000).await?.try_collect().await?;
            found.extend(kept);
            Ok(found)
        })
        .await?;
        let terms = |stored: &RawDocumentBuf| {
            let stored = roster::legible(stored);
            ["term", "fast_term"].map(|field| roster::term_of(stored.get(field)))
        };
        Ok(found.iter().flat_map(terms).flatten().max().unwrap_or_default())
    }

    /// Workers that accept jobs, in this leader's term, and those that hold permits: they may accept none. The reply also contains the
    /// server's time.
    ///
    /// Filter: term; available with free or prefetch, or any permit. Index: none, the roster is small. Invariant: none, the assignment
    /// repeats it.
    pub async fn available_workers(&self, term: LeaseTerm) -> Result<Vec<AvailableWorker>, StoreError> {
        let roster = self.roster_as_it_is();
        let accepts = doc! { "$gt": 0 };
        let filter = doc! {
            "$or": [
                { "available": true, "free": &accepts },
                { "available": { "$eq": true }, "prefetch": accepts },
                { "held_permits.0": { "$exists": true } },
            ],
            "term": term, "retired": { "$ne": true },
        };
        let projection = doc! {
            "available": 1, "work_on": 1, "classes": 1, "class_slots": 1, "free": 1, "prefetch": 1, "prefetched": 1, "held_permits": 1, "round": 1, "channel": 1, "last_seen_at": 1, "lease_ms": 1,
            "now": "$$NOW",
        };
        let asked = Uptime::now();
        let found: Vec<RawDocumentBuf> = call("available_workers", async move {
            roster.find(filter).projection(projection).batch_size(10_000).read_concern(ReadConcern::local()).await?.try_collect().await
        })
        .await?;
        if let Some(now) = found.first().and_then(|worker| worker.get_datetime("now").ok()) {
            self.clock.observe(now.to_chrono(), asked);
        }
        Ok(found.iter().filter_map(|document| understood(document)).collect())
    }

    /// Reports the free slots, the jobs and the permits of a worker, and takes the assignment of `round` with the first report that names it.
    /// If the worker accepts further jobs, it is available again. Permits that it no longer holds are free for other workers. The date of the
    /// assignment is removed: it is taken.
    ///
    /// Filter: not retired, no assignment since `round`, the last that was taken. Index: `_id`.
    /// Invariant: single writer by turn; the roster names every job that the worker can have locked.
    /// Loses when the recruiter has assigned in between: the worker must first read the new assignment. Also when a failover rolled the
    /// assignment of `round` back, or when the worker was retired.
    pub async fn report_if_unassigned_since(&self, worker: WorkerId, round: Option<RoundId>, offer: &Offer) -> Result<bool, StoreError> {
        let filter = doc! { "_id": worker, "retired": { "$ne": true }, "round": round.map(Bson::from) };
        let now = self.now();
        let is_available = offer.accepts_jobs();
        let mut set = doc! {
            "available": is_available, "free": offer.slots, "working": !offer.working_on.is_empty(), "held_permits": offer.held_permits.clone(),
        };
        let mut unset = doc! { "assigned_since": "" };
        if is_available {
            set.insert("available_since", now);
        }
        if offer.working_on.is_empty() {
            unset.extend(doc! { "assigned_to": "", "grants": "", "working_on": "", "working_since": "" });
        } else {
            set.extend(doc! { "working_on": offer.working_on.clone(), "working_since": now });
        }
        if offer.prefetch > 0 {
            set.insert("prefetch", offer.prefetch);
        } else {
            unset.insert("prefetch", "");
        }
        if !offer.class_slots.is_empty() {
            set.insert("class_slots", stored_class_slots(&offer.class_slots));
        }
        if offer.prefetched.is_empty() {
            unset.insert("prefetched", "");
        } else {
            set.insert("prefetched", offer.prefetched.clone());
        }
        let update = doc! { "$set": set, "$unset": unset };
        let command =
            || doc! { "update": self.roster.name(), "updates": [{ "q": filter.clone(), "u": update.clone() }], "writeConcern": { "w": 1 } };
        Ok(self.write_repeatable("report_if_unassigned_since", command).await? == 1)
    }

    /// Makes a worker unavailable, even while jobs are still running.
    ///
    /// Filter: no assignment since `round`. Index: `_id`. Invariant: single writer by turn; I8.
    /// Loses when the recruiter has assigned in between: the new jobs must not be started. They become free again when
    /// the document is deleted.
    pub async fn withdraw_if_unassigned_since(&self, worker: WorkerId, round: Option<RoundId>) -> Result<bool, StoreError> {
        let roster = self.roster.clone();
        let filter = doc! { "_id": worker, "round": round.map(Bson::from) };
        let update = doc! { "$set": { "available": false, "free": 0 }, "$unset": { "prefetch": "", "prefetched": "" } };
        let written = call("withdraw_if_unassigned_since", async move { roster.update_one(filter, update).await }).await?;
        Ok(written.matched_count == 1)
    }

    /// The assignment in a worker's own document, taken or not. The fallback for a lost hint. An assignment that grants permits is returned
    /// only once a majority has it: after a failover another worker might get the same permits.
    ///
    /// Filter: as below. Index: `_id`. Invariant: I7.
    pub async fn assignment(&self, worker: WorkerId) -> Result<Option<roster::Assignment>, StoreError> {
        match self.assignment_at(worker, ReadConcern::local()).await? {
            Some(found) if found.permits.values().any(|permit| !permit.names.is_empty()) => {
                let at_majority = self.assignment_at(worker, ReadConcern::majority()).await?;
                Ok(at_majority.filter(|assignment| assignment.round == found.round))
            }
            other => Ok(other),
        }
    }

    /// The assignment in a worker's own document, as a read with this concern sees it.
    ///
    /// Filter: id, not available. Index: `_id`. Invariant: I7.
    async fn assignment_at(&self, worker: WorkerId, concern: ReadConcern) -> Result<Option<roster::Assignment>, StoreError> {
        let roster = self.roster_as_it_is();
        let found = call("assignment", async move {
            roster
                .find_one(doc! { "_id": worker, "available": false })
                .projection(doc! { "available": 1, "round": 1, "grants": 1, format!("assigned_to.{worker}"): 1 })
                .read_concern(concern)
                .await
        })
        .await?;
        let document = found.map(|document| roster::legible(&document));
        Ok(document.and_then(|document| roster::assignment_in(worker, &document)))
    }

    /// Records that a worker is alive, and which jobs it works on, if any. A worker that has none any more says so with a report, which
    /// cannot undo a later one.
    ///
    /// Filter: id, not retired. Never an upsert: a retired worker must not return under the same id. Update:
    /// `last_seen_at` by the server's clock; the resident memory of its process, for people. Index: `_id`. Invariant: I10, the cleaner compares
    /// the date for change.
    pub async fn heartbeat(&self, worker: WorkerId, working_on: &[JobId], memory_bytes: u64) -> Result<HeartbeatReply, StoreError> {
        let mut set = doc! { "last_seen_at": "$$NOW", "memory_bytes": memory_bytes.cast_signed() };
        if !working_on.is_empty() {
            set.extend(doc! { "working": true, "working_on": { "$literal": working_on.to_vec() } });
        }
        let roster = self.roster_as_it_is();
        let filter = doc! { "_id": worker, "retired": { "$ne": true } };
        let asked = Uptime::now();
        let found = call("heartbeat", async move {
            roster
                .find_one_and_update(filter, vec![doc! { "$set": set }])
                .projection(
                    doc! { "last_seen_at": 1, "available": 1, "free": 1, "class_slots": 1, "held_permits": 1, "round": 1, "grants": 1, "wanted": 1, "wanted_by": 1, "wanted_at": 1,
                    "working": 1, "working_on": { "$slice": 1 },
                    format!("assigned_to.{worker}"): 1 },
                )
                .return_document(ReturnDocument::After)
                .await
        })
        .await?;
        Ok(match found {
            Some(document) => {
                let document = roster::legible(&document);
                let at = document.get_datetime("last_seen_at").map_or_else(|_| self.now(), |at| at.to_chrono());
                self.clock.observe(at, asked);
                let (assignment, offered) = (roster::assignment_in(worker, &document), roster::offered_in(&document));
                let held_permits = roster::held_permits_in(&document);
                let has_jobs = document.get_bool("working").unwrap_or(false) || document.contains_key("working_on");
                HeartbeatReply::Seen { at, assignment, offered, held_permits, has_jobs, request: Request::of(&document) }
            }
            None => HeartbeatReply::Retired,
        })
    }

    /// Records a new session before a worker commits in it. Returns false when the worker was declared dead. The last
    /// few sessions are kept, because a cancelled call may still be in flight.
    ///
    /// Filter: id, not retired. Index: `_id`. Invariant: none, the cleaner ends the open sessions of a dead worker.
    pub async fn record_commit_session(&self, worker: WorkerId, session: Document) -> Result<bool, StoreError> {
        let roster = self.roster.clone();
        let filter = doc! { "_id": worker, "retired": { "$ne": true } };
        let update = doc! { "$push": { "sessions": { "$each": [session], "$slice": -KEPT_SESSIONS } } };
        let noted = call("record_commit_session", async move { roster.update_one(filter, update).await }).await?;
        Ok(noted.matched_count == 1)
    }

    /// Records a session before a workable's own transaction uses it. Returns false when the worker was declared dead. They are used again
    /// and again, so there are as many as such transactions at a time; the newest are kept.
    ///
    /// Filter: id, not retired. Index: `_id`. Invariant: none, as above.
    pub async fn record_transaction_session(&self, worker: WorkerId, session: Document) -> Result<bool, StoreError> {
        let roster = self.roster.clone();
        let filter = doc! { "_id": worker, "retired": { "$ne": true } };
        let update = doc! { "$push": { "transaction_sessions": { "$each": [session], "$slice": -TRANSACTION_SESSIONS } } };
        let noted = call("record_transaction_session", async move { roster.update_one(filter, update).await }).await?;
        Ok(noted.matched_count == 1)
    }

    /// Whether a worker is in the roster and was not declared dead. If so, no cleaner has rescued a job of this worker before this call.
    ///
    /// A linearizable read, so that no former primary answers it.
    /// Filter: id, not retired. Index: `_id`. Invariant: I3: if the holder of a missing job lives, the holder has ended the job.
    pub(crate) async fn is_alive(&self, worker: WorkerId) -> Result<bool, StoreError> {
        let roster = self.roster_as_it_is();
        let filter = doc! { "_id": worker, "retired": { "$ne": true } };
        let found = call("is_alive", async move {
            roster.find_one(filter).projection(doc! { "_id": 1 }).read_concern(ReadConcern::linearizable()).await
        });
        Ok(found.await?.is_some())
    }

    /// Deletes a worker's own document, as its last write.
    ///
    /// Filter: id, not retired. Index: `_id`. Invariant: I8; the document of a dead worker names the jobs that a
    /// cleaner must rescue.
    pub async fn leave_if_alive(&self, worker: WorkerId) -> Result<(), StoreError> {
        let roster = self.roster.clone();
        let filter = doc! { "_id": worker, "retired": { "$ne": true } };
        call("leave_if_alive", async move { roster.delete_one(filter).await }).await?;
        self.tell_of_worker("left", worker);
        // The process ends now.
        self.flush_events().await;
        Ok(())
    }

    /// The last round of each of these workers, taken or not. A worker that is not in the result has left or was retired.
    ///
    /// Filter: ids. Index: `_id`. Invariant: I7, the recruiter does not wait for a worker that has left.
    pub async fn rounds_of(&self, workers: &[WorkerId]) -> Result<HashMap<WorkerId, Option<RoundId>>, StoreError> {
        let roster = self.roster_as_it_is();
        let filter = doc! { "_id": { "$in": workers.to_vec() }, "retired": { "$ne": true } };
        let found: Vec<RawDocumentBuf> = call("rounds_of", async move {
            roster.find(filter).projection(doc! { "round": 1 }).read_concern(ReadConcern::local()).await?.try_collect().await
        })
        .await?;
        Ok(found
            .iter()
            .filter_map(|document| Some((worker_of(document)?, document.get_object_id("round").ok().map(RoundId::from))))
            .collect())
    }

    /// Every registered worker, from a majority read, with the fields of its document that can be decoded.
    ///
    /// Filter: none. Index: none, the roster is small. Invariant: I10; I9, a worker with a damaged document is observed
    /// as the others are.
    pub async fn registered_workers(&self) -> Result<Vec<RegisteredWorker>, StoreError> {
        let roster = self.roster_as_it_is();
        let found: Vec<RawDocumentBuf> =
            call("registered_workers", async move { roster.find(doc! {}).batch_size(10_000).await?.try_collect().await }).await?;
        Ok(found.iter().filter_map(|document| registered(document)).collect())
    }

    /// Every roster document as stored, for display: one that cannot be decoded hides no other.
    ///
    /// Filter: none. Index: none, the roster is small. Invariant: I9.
    pub async fn roster_documents(&self) -> Result<Vec<RawDocumentBuf>, StoreError> {
        let roster = self.roster_as_it_is();
        call("roster_documents", async move { roster.find(doc! {}).sort(doc! { "_id": 1 }).await?.try_collect().await }).await
    }

    /// Whether MongoDB acknowledges a small write within this time.
    ///
    /// While writes are blocked (a lock for a backup, a disk that hangs), reads still return heartbeats that do not
    /// change. All cleaners increment the same document, so that an ended cleaner leaves no document behind.
    /// Filter: id. Update: a counter plus one. Index: `_id`. Invariant: I10, a write that MongoDB delays is not silence
    /// of a worker.
    pub async fn acknowledges_writes(&self, within: Duration) -> Result<bool, StoreError> {
        let one_more = vec![doc! { "$set": { "looks": increased("looks", 1) } }];
        let command = doc! {
            "update": self.metadata.name(),
            "updates": [{ "q": { "_id": "cleaners" }, "u": one_more, "upsert": true }],
            "writeConcern": { "w": "majority", "j": true },
            // Limits the command in MongoDB as well, so that it does not keep waiting there and use a connection.
            "maxTimeMS": i64::try_from(within.as_millis()).unwrap_or(i64::MAX).max(1),
        };
        match tokio::time::timeout(within, self.write("acknowledges_writes", command)).await {
            Ok(Ok(_)) => Ok(true),
            Ok(Err(error)) if error.is_too_slow() => Ok(false),
            Ok(Err(error)) => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// Declares a worker dead: from now on it gets no assignments, and its heartbeats fail. Returns its final document,
    /// including assignments taken since it was last read.
    ///
    /// Filter: id, the heartbeat that was observed unchanged, and not retired by another cleaner. Index: `_id`.
    /// Invariant: I10. MongoDB aborts the command after one second.
    /// Loses when the worker sent another heartbeat or left, or when another cleaner retired it first and rescues its
    /// jobs.
    pub async fn retire_if_silent_since(
        &self,
        worker: WorkerId,
        last_seen_at: Option<bson::DateTime>,
    ) -> Result<Option<RegisteredWorker>, StoreError> {
        let roster = self.roster_as_it_is();
        // Every heartbeat writes a date.
        let unchanged = last_seen_at.map_or_else(|| doc! { "$not": { "$type": "date" } }, |at| doc! { "$eq": at });
        let filter = doc! { "_id": worker, "last_seen_at": unchanged, "retired": { "$ne": true } };
        let update = doc! { "$set": { "retired": true, "available": false } };
        let retired = call("retire_if_silent_since", async move {
            // The driver decodes the whole reply, so the document is read by itself.
            let retired = roster.find_one_and_update(filter, update).projection(doc! { "_id": 1 }).max_time(RETIRE_WITHIN).await?;
            if retired.is_some() { roster.find_one(doc! { "_id": worker }).await } else { Ok(None) }
        })
        .await?;
        if retired.is_some() {
            self.tell_of_worker("died", worker);
        }
        Ok(retired.and_then(|document| registered(&document)))
    }

    /// Adds the session in which a cleaner ends the jobs of a retired worker to the worker's own sessions. If that
    /// cleaner dies, the next one ends this session like those of the worker. It takes the place of an earlier one of this cleaner that was
    /// `ended`: the driver may use that for other calls.
    ///
    /// Filter: id, retired. Index: `_id`. Invariant: another cleaner can continue after a cleaner's death.
    pub async fn record_rescue_session(&self, worker: WorkerId, session: Document, ended: Option<Document>) -> Result<(), StoreError> {
        let roster = self.roster.clone();
        // `$addToSet` fails on a field that is not an array.
        let named = doc! { "$cond": [{ "$isArray": "$sessions" }, "$sessions", []] };
        let literals = |sessions: Option<Document>| sessions.into_iter().map(|session| doc! { "$literal": session }).collect::<Vec<_>>();
        let others = doc! { "$setDifference": [named, literals(ended)] };
        let update = vec![doc! { "$set": { "sessions": { "$setUnion": [others, literals(Some(session))] } } }];
        call("record_rescue_session", async move { roster.update_one(doc! { "_id": worker, "retired": true }, update).await })
            .await
            .map(drop)
    }

    /// Deletes the document of a retired worker, after all its jobs were rescued.
    ///
    /// Filter: id, retired. Index: `_id`. Invariant: another cleaner can continue after a cleaner's death.
    pub async fn delete_if_retired(&self, worker: WorkerId) -> Result<(), StoreError> {
        let roster = self.roster.clone();
        call("delete_if_retired", async move { roster.delete_one(doc! { "_id": worker, "retired": true }).await }).await.map(drop)
    }
}

pub(crate) fn worker_of(document: &RawDocument) -> Option<WorkerId> {
    document.get_object_id("_id").ok().map(WorkerId::from)
}

/// A worker that can receive jobs. `None`, with a warning, when its document is damaged and lacks a necessary field.
fn understood(document: &RawDocument) -> Option<AvailableWorker> {
    let understood = AvailableWorker::try_from(roster::legible(document));
    understood
        .inspect_err(|error| warn_once(document, error, "the roster document of a worker cannot be decoded: the worker gets no jobs"))
        .ok()
}

/// A worker to be observed. Logs a warning when its document is damaged and fields cannot be decoded.
fn registered(document: &RawDocument) -> Option<RegisteredWorker> {
    match RegisteredWorker::read(document) {
        Some((worker, unreadable)) if unreadable.is_empty() => Some(worker),
        Some((worker, unreadable)) => {
            let fields = unreadable.join(", ");
            warn_once(document, &fields, "fields of a roster document cannot be decoded: the cleaner watches the worker without them");
            Some(worker)
        }
        None => {
            warn_once(
                document,
                "no `_id` or too few fields of a worker",
                "a roster document does not belong to a worker and is left as it is",
            );
            None
        }
    }
}

/// Warns about a roster document once per process, because it is read again every second or in every round.
fn warn_once(document: &RawDocument, what: &str, message: &'static str) {
    static WARNED: LazyLock<Mutex<HashSet<(String, &'static str)>>> = LazyLock::new(Mutex::default);
    let id = roster::legible(document).get("_id").map_or_else(|| "none".to_owned(), ToString::to_string);
    let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
    if warned.len() >= WARNED_OF {
        warned.clear();
    }
    if warned.insert((id.clone(), message)) {
        tracing::warn!(worker.id = id, what, "{message}");
    }
}
