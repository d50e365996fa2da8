//! Lines: their heads, and the halts that a failed job writes.
//!
//! A halt is a pause of the line (`line:order-17` in `pauses`). It is written in the transaction that archives the failed job. A job of a
//! line is assigned only if a query has returned it as the head of its line and has found no halt *after* that. A job becomes the head by
//! the transaction that archives the one before it, so a query that finds it as the head also finds the halt.

use std::collections::HashMap;

use bson::{Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use mongodb::{ClientSession, Collection, error::Error, options::ReadConcern};

use crate::{
    base::Instant,
    job::{Archival, ScheduledJob},
    limits::{
        Pause, Paused,
        settings::{id_of_pause, pause_in},
    },
    mongo::{CALL_LIMIT, Feature, Readable, Store, StoreError, call},
};

/// Maximum number of lines in one query.
const LINES_PER_QUERY: usize = 100;

/// The first job of a line that is not finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The job.
    pub job: ScheduledJob,
    /// Whether it runs.
    pub is_locked: bool,
    /// The pause of its line.
    pub halt: Option<Pause>,
}

impl Store {
    /// The head of each of these lines: its first unfinished job, locked or not, due or not; and the pause of the line.
    ///
    /// Filter: gate; the `_id` of the pause. Index: `lines`, which the first call makes. Invariant: the order of a line. The pause is read
    /// after the head, so a halt that was written with the end of the job before it is found. A worker
    /// holds the permit of the line until a majority has the end of its head, so no failover undoes that end while another job runs.
    pub async fn heads_of_lines(&self, gates: &[&str]) -> Result<HashMap<String, Head>, StoreError> {
        if self.may_mend {
            self.prepare(Feature::Lines).await?;
        }
        let mut heads = HashMap::with_capacity(gates.len());
        for gates in gates.chunks(LINES_PER_QUERY) {
            let (scheduled, of_head) = (self.scheduled.clone_with_type::<RawDocumentBuf>(), |field: &str| doc! { "$first": field });
            // MongoDB jumps in the index from the first job of one line to that of the next.
            let stages = [
                doc! { "$match": { "gate": { "$in": gates } } },
                doc! { "$sort": { "gate": 1, "created_at": 1, "_id": 1 } },
                doc! { "$group": {
                    "_id": "$gate", "job": of_head("$_id"), "group": of_head("$group"), "class": of_head("$workable.class"),
                    "priority": of_head("$priority"), "scheduled_at": of_head("$scheduled_at"), "locked": of_head("$locked"),
                } },
                doc! { "$project": {
                    "_id": "$job", "gate": "$_id", "group": 1, "workable": { "class": "$class" }, "priority": 1, "scheduled_at": 1, "locked": 1,
                } },
            ];
            let found: Vec<RawDocumentBuf> = call("heads_of_lines", async move {
                let search = scheduled.aggregate(stages).with_type::<RawDocumentBuf>().batch_size(100_000).max_time(CALL_LIMIT / 2);
                search.read_concern(ReadConcern::local()).await?.try_collect().await
            })
            .await?;
            let mut halts = self.halted_lines(gates).await?;
            for job in &found {
                let class = job.get_document("workable").and_then(|workable| workable.get_str("class"));
                let Some(head) = class.ok().and_then(|class| ScheduledJob::of(job, class)) else { continue };
                let Some(gate) = head.gate.clone() else { continue };
                let (is_locked, halt) = (job.get_bool("locked").unwrap_or(false), halts.remove(&gate));
                heads.insert(gate, Head { job: head, is_locked, halt });
            }
        }
        Ok(heads)
    }

    /// The pauses of those of these lines that are paused, by their gates.
    ///
    /// Filter: ids. Index: `_id`. Invariant: none, [`heads_of_lines`](Self::heads_of_lines) reads the pause of a line again.
    pub async fn halted_lines(&self, gates: &[&str]) -> Result<HashMap<String, Pause>, StoreError> {
        let ids: HashMap<String, &str> = gates.iter().map(|gate| (id_of_pause(gate), *gate)).collect();
        let (pauses, filter) = (self.pauses.clone(), doc! { "_id": { "$in": ids.keys().cloned().collect::<Vec<_>>() } });
        let found: Vec<Document> = call("halted_lines", async move {
            pauses.find(filter).batch_size(100_000).read_concern(ReadConcern::local()).await?.readable().await
        })
        .await?;
        let halted = |pause: &Document| Some(((*ids.get(pause.get_str("_id").ok()?)?).to_owned(), pause_in(pause)));
        Ok(found.iter().filter_map(halted).collect())
    }

    /// The pauses of lines: the first `most` by their keys.
    ///
    /// Filter: ids of lines. Index: `_id`. Invariant: none, for people.
    pub async fn pauses_of_lines(&self, most: i64) -> Result<Vec<(Paused, Pause)>, StoreError> {
        let (pauses, filter) = (self.pauses.clone(), doc! { "_id": { "$gte": "line:", "$lt": "line;" } });
        let found: Vec<Document> = call("pauses_of_lines", async move {
            pauses
                .find(filter)
                .sort(doc! { "_id": 1 })
                .limit(most)
                .batch_size(10_000)
                .read_concern(ReadConcern::local())
                .await?
                .readable()
                .await
        })
        .await?;
        Ok(found.iter().filter_map(|pause| Some((pause.get_str("_id").ok()?.parse().ok()?, pause_in(pause)))).collect())
    }
}

/// Pauses the lines that these ends halt, in their transaction. A line that is paused already stays so.
///
/// Filter: id. Index: `_id`. Invariant: the order of a line, as stated above.
pub(crate) async fn halt_lines_in(
    session: &mut ClientSession,
    pauses: &Collection<Document>,
    ends: &[Archival],
    now: Instant,
) -> Result<(), Error> {
    for (end, line) in ends.iter().filter_map(|end| Some((end, end.effects.halts.as_ref()?))) {
        let (job, why) = (end.job(), &end.effects.why);
        let pause = doc! {
            "by": "halt_on_failure",
            "reason": format!("job {job} has failed (`{why}`)"),
            "at": now,
        };
        let update = doc! { "$set": { "job": job }, "$setOnInsert": pause };
        let id = Paused::Line(line.clone()).to_string();
        pauses.update_one(doc! { "_id": id }, update).upsert(true).session(&mut *session).await?;
    }
    Ok(())
}
