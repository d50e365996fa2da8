//! The first due jobs of each of some lanes: the backlog of one lane takes no room from another.

use super::due::{DueJobs, due_in_lane};
use crate::{
    base::Instant,
    job::{Lane, ScheduledJob},
    mongo::{CALL_LIMIT, GATED_JOBS, Store, StoreError, call},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use bson::{Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use mongodb::options::ReadConcern;

/// Maximum number of lanes in one union. MongoDB plans each part by itself, which takes ten times as long as the reading of its entries.
const LANES_PER_UNION: usize = 50;
/// Minimum number of lanes that differ in their gates only for a walk.
const FEWEST_FOR_WALK: usize = 10;
/// Maximum time of a walk. The longest reads 20,000 entries, which takes a tenth of it.
const WALK_FOR: Duration = Duration::from_secs(2);

/// A lane, and the maximum number of jobs to find in it.
type Asked = (Lane, usize);

impl Store {
    /// The first unlocked jobs of each of these lanes that are due at `until`: as many as the lane's number if there are so many, and at most
    /// twice as many. The answer has an end unless it contains all of them. In contrast to [`Store::due_jobs`], the backlog of one lane takes
    /// no room from another.
    ///
    /// Filter: group, class, gate, unlocked, due, with one range of an index for each lane. Lanes that differ in their gates only are searched
    /// together, by walks over the index, unless their backlogs are long or a walk takes too long. Index: `due_jobs`, `gated_jobs`. Invariant: none, the start repeats
    /// the conditions.
    pub async fn due_jobs_of_each(&self, lanes: &[Asked], until: Instant) -> Result<Vec<DueJobs>, StoreError> {
        debug_assert!(lanes.iter().all(|(_, limit)| *limit > 0), "a limit of 0 asks for nothing");
        let mut answers = vec![DueJobs::default(); lanes.len()];
        let mut left: BTreeSet<usize> = (0..lanes.len()).collect();
        for mut alike in that_differ_in_gates(lanes) {
            while alike.len() >= FEWEST_FOR_WALK && !self.must_scan(GATED_JOBS) {
                let reached = match self.due_in_gates(lanes, &alike, until).await {
                    Err(error) if error.is_too_slow() => Vec::new(),
                    reached => reached?,
                };
                let are_most = reached.len() * 2 > alike.len();
                for (number, answer) in reached {
                    left.remove(&number);
                    answers[number] = answer;
                }
                if !are_most {
                    break;
                }
                alike.retain(|number| left.contains(number));
            }
        }
        for numbers in left.into_iter().collect::<Vec<_>>().chunks(LANES_PER_UNION) {
            let some: Vec<&Asked> = numbers.iter().map(|number| &lanes[*number]).collect();
            for (number, answer) in numbers.iter().zip(self.due_in_union(&some, until).await?) {
                answers[*number] = answer;
            }
        }
        Ok(answers)
    }

    /// The jobs of those lanes that a walk over the index reaches, in the order of the gates. It reads as many entries as are asked for in all
    /// lanes. These lanes, by their numbers, differ in their gates only and are sorted by them.
    async fn due_in_gates(&self, lanes: &[Asked], alike: &[usize], until: Instant) -> Result<Vec<(usize, DueJobs)>, StoreError> {
        let asked = || alike.iter().map(|number| &lanes[*number]);
        let Some((first, _)) = asked().next() else { return Ok(Vec::new()) };
        let most: usize = asked().map(|(_, limit)| *limit).sum();
        let limit = i64::try_from(most).unwrap_or(i64::MAX);
        let mut filter = due_in_lane(first, until);
        filter.insert("gate", doc! { "$in": asked().filter_map(|(lane, _)| lane.gate.as_ref()).collect::<Vec<_>>() });
        let (scheduled, index) = (self.scheduled.clone_with_type::<RawDocumentBuf>(), self.index(GATED_JOBS));
        let (fields, is_entry) = self.fields_of_entry(GATED_JOBS);
        let entries: Vec<RawDocumentBuf> = self
            .indexed("due_jobs_of_each", async move {
                let walk = scheduled.find(filter).sort(doc! { "gate": 1, "priority": -1, "scheduled_at": 1, "_id": 1 }).limit(limit);
                let walk = walk.projection(fields).return_key(is_entry).hint(index).batch_size(100_000).max_time(WALK_FOR);
                walk.read_concern(ReadConcern::local()).await?.try_collect().await
            })
            .await?;
        // The walk may have ended within the last gate, and before all later ones.
        let last = entries.last().filter(|_| entries.len() >= most).map(|entry| gate_of(entry).unwrap_or_default());
        let mut by_gate: HashMap<&str, Vec<&RawDocumentBuf>> = HashMap::new();
        for entry in &entries {
            by_gate.entry(gate_of(entry).unwrap_or_default()).or_default().push(entry);
        }
        let answer = |number: &usize| {
            let (lane, limit) = &lanes[*number];
            let gate = lane.gate.as_deref()?;
            let mut found = by_gate.get(gate).cloned().unwrap_or_default();
            let (is_whole, is_enough) = (last.is_none_or(|last| gate < last), found.len() >= *limit);
            let is_cut = !is_whole || found.len() > limit * 2;
            found.truncate(limit * 2);
            let jobs: Vec<ScheduledJob> = found.into_iter().filter_map(|entry| ScheduledJob::of_entry(entry)).collect();
            let end = jobs.last().map(ScheduledJob::position).filter(|_| is_cut);
            (is_whole || (last == Some(gate) && is_enough)).then_some((*number, DueJobs { jobs, end }))
        };
        Ok(alike.iter().filter_map(answer).collect())
    }

    /// The jobs of each of these lanes, by one query with a part for each.
    async fn due_in_union(&self, lanes: &[&Asked], until: Instant) -> Result<Vec<DueJobs>, StoreError> {
        let stages = |(number, (lane, limit)): (usize, &&Asked)| {
            let number = i64::try_from(number).unwrap_or(i64::MAX);
            [
                doc! { "$match": due_in_lane(lane, until) },
                doc! { "$sort": { "priority": -1, "scheduled_at": 1, "_id": 1 } },
                doc! { "$limit": i64::try_from(*limit).unwrap_or(i64::MAX) },
                doc! { "$project": { "group": 1, "workable.class": 1, "gate": 1, "priority": 1, "scheduled_at": 1, "lane": { "$literal": number } } },
            ]
        };
        let entries = self.union("due_jobs_of_each", lanes.iter().enumerate().map(stages)).await?;
        let mut counts = vec![0; lanes.len()];
        let mut found = vec![DueJobs::default(); lanes.len()];
        for entry in &entries {
            let Some(lane) = entry.get_i64("lane").ok().and_then(|lane| usize::try_from(lane).ok()).filter(|lane| *lane < lanes.len())
            else {
                continue;
            };
            counts[lane] += 1;
            let class = entry.get_document("workable").and_then(|workable| workable.get_str("class"));
            found[lane].jobs.extend(class.ok().and_then(|class| ScheduledJob::of(entry, class)));
        }
        for ((found, count), (_, limit)) in found.iter_mut().zip(counts).zip(lanes) {
            found.end = found.jobs.last().map(ScheduledJob::position).filter(|_| count >= *limit);
        }
        Ok(found)
    }

    /// One query for several parts of `scheduled`.
    async fn union<const N: usize>(
        &self,
        operation: &'static str,
        mut parts: impl Iterator<Item = [Document; N]>,
    ) -> Result<Vec<RawDocumentBuf>, StoreError> {
        let Some(first) = parts.next() else { return Ok(Vec::new()) };
        let mut pipeline = Vec::from(first);
        pipeline.extend(parts.map(|stages| doc! { "$unionWith": { "coll": self.scheduled.name(), "pipeline": Vec::from(stages) } }));
        let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
        call(operation, async move {
            let search = scheduled.aggregate(pipeline).with_type::<RawDocumentBuf>().batch_size(100_000).max_time(CALL_LIMIT / 2);
            search.read_concern(ReadConcern::local()).await?.try_collect().await
        })
        .await
    }
}

fn gate_of(entry: &RawDocumentBuf) -> Option<&str> {
    entry.get_str("gate").ok()
}

/// The numbers of the lanes with a gate, by what else they have in common, and sorted by their gates.
fn that_differ_in_gates(lanes: &[Asked]) -> Vec<Vec<usize>> {
    let mut alike: BTreeMap<(&str, &str), BTreeMap<&str, usize>> = BTreeMap::new();
    for (number, (lane, _)) in lanes.iter().enumerate().filter(|(_, (lane, _))| lane.priority.is_none()) {
        if let Some(gate) = &lane.gate {
            alike.entry((&lane.group, &lane.class)).or_default().insert(gate, number);
        }
    }
    alike.into_values().map(|by_gate| by_gate.into_values().collect()).collect()
}
