//! Every operation on `roster`, in the order of a worker's life: register, announce, assign, take, free, beat, leave,
//! retire.
//!
//! Written by turns: while a document is `available: true` only the recruiter may change its assignment, otherwise
//! only its worker. `round` tells the turns apart: the recruiter writes a fresh one with each assignment, and every
//! write of the worker names the one it took last, so that neither can overwrite what it has not seen.
//!
//! The collection holds one document for each worker *process*, hundreds at most, most of them written several times
//! a second: reading it whole is cheaper than keeping an index on what changes most.

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

use super::{Store, StoreError, call, hints::Assignment, schema};
use crate::{
    clock::Uptime,
    ids::{JobId, LeaseTerm, RoundId, WorkerId},
    instant::Instant,
    roster::{self, AvailableWorker, Channel, Place, RegisteredWorker, WorkOn},
};

/// Job ids in one piece of the assignment map. One map for all workers would be written into each of their documents,
/// which is quadratic; a map for each would be a statement for each. Measured: 64 serves both ends.
const IDS_PER_PIECE: usize = 64;

/// Commit sessions that the roster names of a worker: the present one and those given up last.
const KEPT_SESSIONS: i32 = 4;

/// Workers that tail one collection, about.
const WORKERS_PER_CHANNEL: i64 = 32;
/// Channels at most.
const CHANNELS: i64 = 32;

/// How long MongoDB may take to retire a worker. A command that waits for longer, behind writes that stand still, is given up by
/// MongoDB itself: carried out later, it would overtake heartbeats that wait there as well.
const RETIRE_WITHIN: Duration = Duration::from_secs(1);

/// Documents that were warned of, at most; after that they are forgotten, and warned of again.
const WARNED_OF: usize = 10_000;

/// A worker as it registers.
#[derive(Clone, Debug)]
pub struct Announcement {
    /// Its identity.
    pub id: WorkerId,
    /// Groups it works on.
    pub work_on: WorkOn,
    /// Classes it has.
    pub classes: Vec<String>,
    /// Retry policies it knows.
    pub policies: Vec<String>,
    /// Jobs it runs at a time.
    pub capacity: u32,
    /// How long it trusts itself after a heartbeat, milliseconds.
    pub lease_ms: i64,
    /// Where it listens.
    pub channel: Channel,
    /// The session that it commits in.
    pub session: Option<Document>,
    /// Where it runs.
    pub place: Place,
}

/// The work of a worker, as its document describes it.
#[derive(Clone, Debug)]
pub struct Free {
    /// Free slots.
    pub places: u32,
    /// Every job it holds or is about to start.
    pub working_on: Vec<JobId>,
}

/// The answer to a heartbeat.
#[derive(Clone, Debug)]
pub enum Beat {
    /// Acknowledged, by the server's clock at this time.
    Seen {
        /// The time written.
        at: Instant,
        /// The assignment that stands in the document, taken or not.
        assignment: Option<roster::Assignment>,
        /// Free slots that the document offers.
        offered: u32,
    },
    /// The document is gone or being retired: this worker was declared dead.
    Retired,
}

impl Store {
    /// The roster as bytes: one document that is no good BSON does not hide the others.
    fn roster_as_it_is(&self) -> Collection<RawDocumentBuf> {
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

    /// The channel of a worker that registers: in turns one of as many as the roster needs. Makes the collection, unless it is there.
    ///
    /// Index: `_id`. Invariant: none.
    pub async fn join_channel(&self) -> Result<Channel, StoreError> {
        let (metadata, roster) = (self.metadata.clone(), self.roster.clone());
        let registered = call("join_channel", async move { roster.estimated_document_count().await }).await?;
        let channels = (i64::try_from(registered).unwrap_or(i64::MAX) / WORKERS_PER_CHANNEL + 1).min(CHANNELS);
        let counted = call("join_channel", async move {
            metadata
                .find_one_and_update(doc! { "_id": "channels" }, doc! { "$inc": { "workers": 1_i64 } })
                .upsert(true)
                .return_document(ReturnDocument::Before)
                .await
        })
        .await?;
        let before = counted.and_then(|counted| counted.get_i64("workers").ok()).unwrap_or(0);
        let channel = Channel(u32::try_from(before.rem_euclid(channels)).unwrap_or(0));
        schema::ensure_channel(self, channel).await?;
        Ok(channel)
    }

    /// The channels of all registered workers, and the first channel.
    ///
    /// Filter: none. Index: none, the roster is small. Invariant: none.
    pub async fn channels(&self) -> Result<BTreeSet<Channel>, StoreError> {
        let roster = self.roster.clone();
        let found = call("channels", async move { roster.distinct("channel", doc! {}).await }).await?;
        let number = |found: &Bson| found.as_i64().or(found.as_i32().map(i64::from)).and_then(|number| u32::try_from(number).ok());
        Ok(found.iter().filter_map(number).map(Channel).chain([Channel::default()]).collect())
    }

    /// Registers a worker, not available yet.
    ///
    /// Index: `_id`. Invariant: I1 of the worker's side: jobs are assigned only to registered workers.
    pub async fn register(&self, worker: &Announcement) -> Result<(), StoreError> {
        let now = bson::DateTime::from_chrono(self.now());
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
            "sessions": worker.session.iter().collect::<Vec<_>>(),
            "version": env!("CARGO_PKG_VERSION"),
            "mongodb_user": self.user().await?,
        };
        document.extend(bson::serialize_to_document(&worker.place).expect("a place is made of texts and numbers"));
        let roster = self.roster.clone();
        call("register", async move { roster.insert_one(document).await }).await.map(drop)
    }

    /// Makes a registered worker available for the first time, in the recruiter's present term.
    ///
    /// The term is read after the document is there, and only ever raised: a leader that took over in between has
    /// stamped its own. Filter: id, no round yet, not retired. Index: `_id`. Invariant: I7.
    pub async fn announce(&self, worker: WorkerId, places: u32) -> Result<bool, StoreError> {
        let term = self.observe_lease().await?.map_or(LeaseTerm::default(), |lease| lease.term);
        let roster = self.roster.clone();
        let filter = doc! { "_id": worker, "round": null, "retired": { "$ne": true } };
        let now = bson::DateTime::from_chrono(self.now());
        let update = doc! { "$set": { "available": true, "available_since": now, "free": places }, "$max": { "term": term } };
        let written = call("announce", async move { roster.update_one(filter, update).await }).await?;
        Ok(written.matched_count == 1)
    }

    /// Stamps a leader's term on every worker, so that no earlier leader can assign to it any more.
    ///
    /// Filter: an earlier term or none. Index: none, see above. Invariant: one leader assigns (jobs are safe
    /// without it).
    pub async fn stamp_term(&self, term: LeaseTerm) -> Result<u64, StoreError> {
        let roster = self.roster.clone();
        let filter = doc! { "$or": [{ "term": { "$lt": term } }, { "term": null }] };
        let stamped = call("stamp_term", async move { roster.update_many(filter, doc! { "$set": { "term": term } }).await }).await?;
        Ok(stamped.modified_count)
    }

    /// The highest term in the roster; zero when no worker has one.
    ///
    /// Filter: none. Index: none, see above. Invariant: one leader in each term, also when the lease was deleted.
    pub async fn highest_term(&self) -> Result<LeaseTerm, StoreError> {
        let roster = self.roster_as_it_is();
        let found: Vec<RawDocumentBuf> = call("highest_term", async move {
            roster.find(doc! {}).projection(doc! { "term": 1 }).batch_size(10_000).await?.try_collect().await
        })
        .await?;
        // A term beyond that was written by a hand, and nothing could follow it.
        let term = |worker: &RawDocumentBuf| roster::integer(roster::legible(worker).get("term")).filter(|term| *term < i64::MAX / 2);
        Ok(found.iter().filter_map(term).max().map_or(LeaseTerm::default(), LeaseTerm))
    }

    /// Workers with free slots, in this leader's term. The reply also carries the server's time.
    ///
    /// Filter: available, free, term. Index: none, see above. Invariant: none, the assignment repeats it.
    pub async fn available_workers(&self, term: LeaseTerm) -> Result<Vec<AvailableWorker>, StoreError> {
        let roster = self.roster_as_it_is();
        let filter = doc! { "available": true, "free": { "$gt": 0 }, "term": term, "retired": { "$ne": true } };
        let projection =
            doc! { "work_on": 1, "classes": 1, "free": 1, "round": 1, "channel": 1, "last_seen_at": 1, "lease_ms": 1, "now": "$$NOW" };
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

    /// Assigns jobs to available workers, in one command; returns the workers that got theirs.
    ///
    /// Acknowledged by the primary alone: an assignment that a failover takes back leaves its jobs unlocked and due.
    /// Filter: available, this leader's term, and at least as many free slots as jobs. Update: `available: false`, the
    /// map from workers to jobs, the round. Index: `_id`. Invariant: single writer by turn.
    /// Loses to a worker that withdrew or was retired, or to a new leader.
    pub async fn assign_if_available(
        &self,
        term: LeaseTerm,
        round: RoundId,
        assignments: &[Assignment],
    ) -> Result<Vec<WorkerId>, StoreError> {
        let now = bson::DateTime::from_chrono(self.now());
        let statement = |piece: &[Assignment]| {
            let map: Document = piece.iter().map(|given| (given.worker.to_string(), Bson::from(given.jobs.clone()))).collect();
            let any: Vec<Document> = piece
                .iter()
                .map(|given| doc! { "_id": given.worker, "free": { "$gte": i64::try_from(given.jobs.len()).unwrap_or(i64::MAX) } })
                .collect();
            doc! {
                "q": { "available": true, "term": term, "retired": { "$ne": true }, "$or": any },
                "u": { "$set": { "available": false, "assigned_to": map, "assigned_since": now, "round": round } },
                "multi": true,
            }
        };
        let command = doc! {
            "update": "roster",
            "updates": pieces(assignments).map(statement).collect::<Vec<_>>(),
            "ordered": false,
            "writeConcern": { "w": 1 },
        };
        if self.write("assign_if_available", command).await? == assignments.len() {
            return Ok(assignments.iter().map(|given| given.worker).collect());
        }
        let roster = self.roster_as_it_is();
        let found: Vec<RawDocumentBuf> = call("assigned_in", async move {
            roster.find(doc! { "round": round }).projection(doc! { "_id": 1 }).read_concern(ReadConcern::local()).await?.try_collect().await
        })
        .await?;
        Ok(found.iter().filter_map(|document| worker_of(document)).collect())
    }

    /// Takes an assignment: from now on it is the worker's turn, until it announces free slots again.
    ///
    /// Filter: not available, this round. Update: what it works on, and whether slots remain. Index: `_id`.
    /// Invariant: single writer by turn; the roster names every job the worker can have locked.
    /// Loses when the assignment was taken back by a failover or the worker was retired.
    pub async fn take_if_assigned(&self, worker: WorkerId, round: RoundId, free: &Free) -> Result<bool, StoreError> {
        self.write_own(worker, doc! { "available": false, "round": round }, free, "take_if_assigned").await
    }

    /// Records how many slots are free and which jobs are worked on.
    ///
    /// Filter: no assignment since `round`, the last that was taken. Index: `_id`. Invariant: single writer by turn.
    /// Loses when the recruiter has assigned meanwhile: the worker must read the new assignment first.
    pub async fn free_if_unassigned_since(&self, worker: WorkerId, round: Option<RoundId>, free: &Free) -> Result<bool, StoreError> {
        self.write_own(worker, doc! { "round": round.map(Bson::from) }, free, "free_if_unassigned_since").await
    }

    async fn write_own(&self, worker: WorkerId, turn: Document, free: &Free, operation: &'static str) -> Result<bool, StoreError> {
        let mut filter = doc! { "_id": worker, "retired": { "$ne": true } };
        filter.extend(turn);
        let now = bson::DateTime::from_chrono(self.now());
        let mut set = doc! { "available": free.places > 0, "free": free.places, "working": !free.working_on.is_empty() };
        if free.places > 0 {
            set.insert("available_since", now);
        }
        let mut update = doc! {};
        if free.working_on.is_empty() {
            update.insert("$unset", doc! { "assigned_to": "", "assigned_since": "", "working_on": "", "working_since": "" });
        } else {
            set.extend(doc! { "working_on": free.working_on.clone(), "working_since": now });
        }
        update.insert("$set", set);
        let command = || doc! { "update": "roster", "updates": [{ "q": filter.clone(), "u": update.clone() }], "writeConcern": { "w": 1 } };
        Ok(self.write_repeatable(operation, command).await? == 1)
    }

    /// Stops being available, also while jobs still run.
    ///
    /// Filter: no assignment since `round`. Index: `_id`. Invariant: single writer by turn; I8.
    /// Loses when the recruiter has assigned meanwhile: what it gave must not be started, and is free again once the
    /// document is gone.
    pub async fn withdraw_if_unassigned_since(&self, worker: WorkerId, round: Option<RoundId>) -> Result<bool, StoreError> {
        let roster = self.roster.clone();
        let filter = doc! { "_id": worker, "round": round.map(Bson::from) };
        let update = doc! { "$set": { "available": false, "free": 0 } };
        let written = call("withdraw_if_unassigned_since", async move { roster.update_one(filter, update).await }).await?;
        Ok(written.matched_count == 1)
    }

    /// The assignment that stands in a worker's own document, taken or not; the fallback for a lost hint.
    ///
    /// Filter: id. Index: `_id`. Invariant: I7.
    pub async fn assignment(&self, worker: WorkerId) -> Result<Option<roster::Assignment>, StoreError> {
        let roster = self.roster.clone_with_type::<RawDocumentBuf>();
        let found = call("assignment", async move {
            roster
                .find_one(doc! { "_id": worker, "available": false })
                .projection(doc! { "available": 1, "round": 1, format!("assigned_to.{worker}"): 1 })
                .read_concern(ReadConcern::local())
                .await
        })
        .await?;
        let document = found.and_then(|document| Document::try_from(&*document).ok());
        Ok(document.and_then(|document| roster::assignment_in(worker, &document)))
    }

    /// Records that a worker lives and which jobs it works on.
    ///
    /// Filter: id, not retired. Never an upsert: a retired worker must not come back under the same id.
    /// Update: `last_seen_at` by the server's clock. Index: `_id`. Invariant: I10, the cleaner compares it for change.
    pub async fn heartbeat(&self, worker: WorkerId, working_on: &[JobId]) -> Result<Beat, StoreError> {
        let mut set = doc! { "last_seen_at": "$$NOW" };
        if !working_on.is_empty() {
            set.insert("working_on", doc! { "$literal": working_on.to_vec() });
        }
        let roster = self.roster.clone();
        let filter = doc! { "_id": worker, "retired": { "$ne": true } };
        let asked = Uptime::now();
        let found = call("heartbeat", async move {
            roster
                .find_one_and_update(filter, vec![doc! { "$set": set }])
                .projection(doc! { "last_seen_at": 1, "available": 1, "free": 1, "round": 1, format!("assigned_to.{worker}"): 1 })
                .return_document(ReturnDocument::After)
                .await
        })
        .await?;
        Ok(match found {
            Some(document) => {
                let at = document.get_datetime("last_seen_at").map_or_else(|_| self.now(), |at| at.to_chrono());
                self.clock.observe(at, asked);
                Beat::Seen { at, assignment: roster::assignment_in(worker, &document), offered: roster::offered_in(&document) }
            }
            None => Beat::Retired,
        })
    }

    /// Notes another session that a worker commits in, before it does; false when it was declared dead. The last few stay: a
    /// call that was given up may still be on its way.
    ///
    /// Filter: id, not retired. Index: `_id`. Invariant: none, the cleaner ends what a dead worker left open.
    pub async fn commit_in(&self, worker: WorkerId, session: Document) -> Result<bool, StoreError> {
        let roster = self.roster.clone();
        let filter = doc! { "_id": worker, "retired": { "$ne": true } };
        let update = doc! { "$push": { "sessions": { "$each": [session], "$slice": -KEPT_SESSIONS } } };
        let noted = call("commit_in", async move { roster.update_one(filter, update).await }).await?;
        Ok(noted.matched_count == 1)
    }

    /// Deletes a worker's own document, last of all.
    ///
    /// Filter: id, not retired. Index: `_id`. Invariant: I8; of a dead one the document names what a cleaner must rescue.
    pub async fn leave_if_alive(&self, worker: WorkerId) -> Result<(), StoreError> {
        let roster = self.roster.clone();
        let filter = doc! { "_id": worker, "retired": { "$ne": true } };
        call("leave_if_alive", async move { roster.delete_one(filter).await }).await.map(drop)
    }

    /// The round that each of these workers was assigned or took last; those missing are gone.
    ///
    /// Filter: ids. Index: `_id`. Invariant: I7, the recruiter does not wait for a worker that is gone.
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

    /// Assignments that stand in the roster and were not taken yet, with their rounds: what a new leader must know.
    ///
    /// Filter: not available, assigned. Index: none, see above. Invariant: none, forgetting one is harmless.
    pub async fn assigned_and_not_taken(&self) -> Result<Vec<(RoundId, Assignment)>, StoreError> {
        let roster = self.roster_as_it_is();
        let filter = doc! { "available": false, "assigned_to": { "$exists": true }, "retired": { "$ne": true } };
        let found: Vec<RawDocumentBuf> =
            call(
                "assigned_and_not_taken",
                async move { roster.find(filter).read_concern(ReadConcern::local()).await?.try_collect().await },
            )
            .await?;
        let not_taken = |document: &RawDocumentBuf| {
            let (worker, document) = (worker_of(document)?, roster::legible(document));
            let assigned = roster::assignment_in(worker, &document)?;
            let working_on = roster::ids_in(document.get("working_on"));
            let jobs: Vec<JobId> = assigned.jobs.into_iter().filter(|job| !working_on.contains(job)).collect();
            Some((assigned.round, Assignment { worker, jobs }))
        };
        Ok(found.iter().filter_map(not_taken).collect())
    }

    /// Every registered worker, as a majority sees it, as far as its document can be read.
    ///
    /// Filter: none. Index: none, see above. Invariant: I10; I9, a worker with a damaged document is watched as the others are.
    pub async fn registered_workers(&self) -> Result<Vec<RegisteredWorker>, StoreError> {
        let roster = self.roster_as_it_is();
        let found: Vec<RawDocumentBuf> =
            call("registered_workers", async move { roster.find(doc! {}).batch_size(10_000).await?.try_collect().await }).await?;
        Ok(found.iter().filter_map(|document| registered(document)).collect())
    }

    /// Every roster document as it is, for people: one that cannot be understood hides no other.
    ///
    /// Filter: none. Index: none, see above. Invariant: I9.
    pub async fn roster_documents(&self) -> Result<Vec<RawDocumentBuf>, StoreError> {
        let roster = self.roster_as_it_is();
        call("roster_documents", async move { roster.find(doc! {}).sort(doc! { "_id": 1 }).await?.try_collect().await }).await
    }

    /// Whether MongoDB acknowledges writes: makes a small one of its own and waits for it for so long.
    ///
    /// While writes stand still (a lock for a backup, a disk that hangs) reads are answered all the same, and show heartbeats that do
    /// not change. All cleaners count in one document, so that none is left behind by a cleaner that has gone.
    /// Filter: id. Update: one more. Index: `_id`. Invariant: I10, what MongoDB keeps waiting is not silence of a worker.
    pub async fn acknowledges_writes(&self, within: Duration) -> Result<bool, StoreError> {
        let command = doc! {
            "update": "metadata",
            "updates": [{ "q": { "_id": "cleaners" }, "u": { "$inc": { "looks": 1_i64 } }, "upsert": true }],
            "writeConcern": { "w": "majority", "j": true },
            // So that it does not wait on in MongoDB, and keep a connection.
            "maxTimeMS": i64::try_from(within.as_millis()).unwrap_or(i64::MAX).max(1),
        };
        match tokio::time::timeout(within, self.write("acknowledges_writes", command)).await {
            Ok(Ok(_)) => Ok(true),
            Ok(Err(error)) if error.is_too_slow() => Ok(false),
            Ok(Err(error)) => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// Declares a worker dead: it can neither be assigned nor beat any more. Returns its document as it stays from now
    /// on, with everything it may have taken since it was read.
    ///
    /// Filter: id, the very heartbeat that was seen unchanged, and not retired by another cleaner. Index: `_id`. Invariant: I10.
    /// MongoDB gives it up after a second.
    /// Loses when the worker gave another sign of life or left, or when another cleaner was faster, who then rescues its jobs.
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
            roster.find_one_and_update(filter, update).return_document(ReturnDocument::After).max_time(RETIRE_WITHIN).await
        })
        .await?;
        Ok(retired.and_then(|document| registered(&document)))
    }

    /// Adds the session in which a cleaner ends the jobs of a retired worker to the worker's own: should that cleaner die in
    /// the middle, the next one ends it like those of the worker.
    ///
    /// Filter: id, retired. Index: `_id`. Invariant: another cleaner can go on where one died.
    pub async fn rescue_in(&self, worker: WorkerId, session: Document) -> Result<(), StoreError> {
        let roster = self.roster.clone();
        // `$addToSet` is refused where there is no array.
        let named = doc! { "$cond": [{ "$isArray": "$sessions" }, "$sessions", []] };
        let update = vec![doc! { "$set": { "sessions": { "$setUnion": [named, [{ "$literal": session }]] } } }];
        call("rescue_in", async move { roster.update_one(doc! { "_id": worker, "retired": true }, update).await }).await.map(drop)
    }

    /// Deletes the document of a retired worker, after all its jobs were rescued.
    ///
    /// Filter: id, retired. Index: `_id`. Invariant: another cleaner can go on where one died.
    pub async fn delete_if_retired(&self, worker: WorkerId) -> Result<(), StoreError> {
        let roster = self.roster.clone();
        call("delete_if_retired", async move { roster.delete_one(doc! { "_id": worker, "retired": true }).await }).await.map(drop)
    }
}

fn worker_of(document: &RawDocument) -> Option<WorkerId> {
    document.get_object_id("_id").ok().map(WorkerId::from)
}

/// A worker that can be given jobs; none, with a warning, when its document was damaged and a necessary field is missing.
fn understood(document: &RawDocument) -> Option<AvailableWorker> {
    let understood = AvailableWorker::try_from(roster::legible(document));
    understood
        .inspect_err(|error| warn_once(document, error, "the roster document of a worker cannot be understood: it is given no jobs"))
        .ok()
}

/// A worker to be watched, with a warning when its document was damaged and fields cannot be read.
fn registered(document: &RawDocument) -> Option<RegisteredWorker> {
    match RegisteredWorker::read(document) {
        Some((worker, unreadable)) if unreadable.is_empty() => Some(worker),
        Some((worker, unreadable)) => {
            let fields = unreadable.join(", ");
            warn_once(document, &fields, "fields of a roster document cannot be read: its worker is watched without them");
            Some(worker)
        }
        None => {
            warn_once(document, "`_id` is no ObjectId", "a roster document is no worker's: leaving it alone; delete it");
            None
        }
    }
}

/// Warns of a roster document, once in the life of this process: it is read again every second, or with every round.
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

/// Cuts assignments into pieces of at most [`IDS_PER_PIECE`] job ids, at least one worker each.
fn pieces(assignments: &[Assignment]) -> impl Iterator<Item = &[Assignment]> {
    let mut rest = assignments;
    std::iter::from_fn(move || {
        let mut ids = 0;
        let fits = rest
            .iter()
            .take_while(|given| {
                ids += given.jobs.len();
                ids <= IDS_PER_PIECE
            })
            .count();
        let (piece, left) = rest.split_at(fits.max(1).min(rest.len()));
        rest = left;
        (!piece.is_empty()).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_is_cut_by_the_number_of_job_ids() {
        let check = |sizes: &[usize], expected: &[usize]| {
            let given: Vec<Assignment> =
                sizes.iter().map(|size| Assignment { worker: WorkerId::new(), jobs: (0..*size).map(|_| JobId::new()).collect() }).collect();
            assert_eq!(pieces(&given).map(<[Assignment]>::len).collect::<Vec<_>>(), expected, "{sizes:?}");
        };
        check(&[], &[]);
        check(&[1; 64], &[64]);
        check(&[1; 130], &[64, 64, 2]);
        check(&[1000, 1000], &[1, 1]);
        check(&[40, 40, 24, 1], &[1, 2, 1]);
    }
}
