//! Why a job does not run, and what to do about it.
//!
//! [`Client::why`] names the first [`Reason`], in the order in which the system would meet them. Limits, pauses and rates are judged by the
//! same function as in the recruiter ([`Settings::admit`](crate::limits::Settings::admit)). The commands `recruiter jobs why`, `groups why`
//! and `stats` take their words from here.
//!
//! ```no_run
//! use recruiter_common::{Client, JobId, Reason};
//!
//! # async fn example(client: &Client, job: JobId) -> Result<(), Box<dyn std::error::Error>> {
//! if let Some(why) = client.why(job).await? {
//!     println!("{}: {}", why.reason, why.text);
//!     assert_ne!(why.reason, Reason::NoWorker);
//! }
//! # Ok(())
//! # }
//! ```

mod reason;
pub(crate) mod situation;

use std::collections::{BTreeMap, BTreeSet};

pub use self::reason::{Reason, Why};
use self::situation::{Due, Situation};
use super::{policies_in, presence::Presence};
use crate::{
    base::{Instant, JobId, WorkerId, apart, moment, printable},
    job::{Job, JobState, Lane, line_of_gate},
    mongo::{Client, Store, StoreError},
};

/// Maximum number of jobs that are named: of a full resource, and of those that a job waits for.
const HOLDERS: usize = 10;
const NAMED: usize = 5;
/// Maximum number of lanes of a group that are examined.
pub const LANES: usize = 1_000;
/// Maximum number of due jobs of a lane whose retry policies are examined.
const POLICIES: usize = 1_000;

/// Why the waiting jobs of a group do not run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WhyGroup {
    /// Each reason with the number of its jobs, those with the most jobs first. A number of a million or more may be
    /// higher.
    pub reasons: Vec<(Why, u64)>,
    /// Whether all kinds of jobs were examined, and not only the first [`LANES`].
    pub is_complete: bool,
}

impl Client {
    /// Why a job does not run; `None` if there is no job with this id.
    ///
    /// # Errors
    /// When MongoDB cannot be used.
    pub async fn why(&self, job: JobId) -> Result<Option<Why>, StoreError> {
        self.fresh_clock().await?;
        let Some(stored) = self.job(job).await? else { return Ok(None) };
        Ok(Some(match Job::try_from(stored.document) {
            Ok(job) => why(&self.store(), &job).await?,
            Err((_, error)) => Why::new(
                Reason::Malformed,
                format!(
                    "the document is not a job, and a worker that gets it archives it as malformed: {}",
                    printable(&error.to_string(), 400)
                ),
            ),
        }))
    }

    /// Why the waiting jobs of a group do not run. The next job of each lane is judged; the jobs behind it wait for the same reason.
    ///
    /// # Errors
    /// When MongoDB cannot be used.
    pub async fn why_group(&self, group: &str) -> Result<WhyGroup, StoreError> {
        let store = self.store();
        self.fresh_clock().await?;
        let lanes = store.first_lanes([group.to_owned()], LANES).await?;
        let mut is_complete = lanes.len() < LANES;
        let (situation, now) = (Situation::read(&store, &lanes).await?, self.now());
        let over = store.expired_in_group(group, now).await?;
        let mut reasons: BTreeMap<(Reason, String), (Why, u64)> = BTreeMap::new();
        let mut add = |why: Why, jobs: u64| {
            if jobs > 0 {
                reasons.entry((why.reason, why.text.clone())).or_insert((why, 0)).1 += jobs;
            }
        };
        for lane in &lanes {
            let counts = store.waiting_in_lane(lane, now).await?;
            let expired = "they have expired, and no worker starts them; a cleaner archives them, so check that recruiter-cleaner runs";
            let over = over.get(lane).copied().unwrap_or(0).min(counts.due);
            add(Why::new(Reason::Expired, expired), over);
            let mut due = counts.due - over;
            add(Why::new(Reason::NotDue, "their dates are in the future"), counts.later);
            add(Why::new(Reason::WaitsForJobs, "they wait for the ends of other jobs; `recruiter jobs why` names them"), counts.for_jobs);
            let once_more = "they run once more after the jobs that have their unique keys; `recruiter jobs why` names them";
            add(Why::new(Reason::WaitsForPredecessor, once_more), counts.for_predecessors);
            if let Some(why) = situation.why_not_run(lane) {
                add(why, due);
                continue;
            }
            if let Some(head) = situation.head_of(lane) {
                let is_here = !head.is_locked && head.job.lane() == *lane && head.job.scheduled_at <= now;
                let others = due.saturating_sub(u64::from(is_here));
                add(behind(lane, head.job.id), others);
                due -= others;
            }
            if due == 0 {
                continue;
            }
            if let Some(why) = situation.why_refused(lane) {
                add(why, due);
                continue;
            }
            let mut sample = store.policies_of_due_jobs(std::slice::from_ref(lane), POLICIES).await?;
            is_complete &= sample.len() < POLICIES;
            if let Some(head) = situation.head_of(lane) {
                sample.retain(|(job, _)| job.id == head.job.id);
            }
            let since = sample.iter().map(|(job, _)| job.scheduled_at).min().unwrap_or(now);
            let next = Due::first(None, since, due - 1);
            let mut kinds: BTreeMap<BTreeSet<String>, u64> = BTreeMap::new();
            sample.into_iter().for_each(|(_, policies)| *kinds.entry(policies).or_default() += 1);
            let not_yet = |policies: &BTreeSet<String>| situation.why_not_yet(lane, policies, &next);
            for (policies, jobs) in kinds {
                let jobs = jobs.min(due);
                due -= jobs;
                add(situation.why_unknown(lane, &policies).unwrap_or_else(|| not_yet(&policies)), jobs);
            }
            add(not_yet(&BTreeSet::new()), due);
        }
        let mut reasons: Vec<(Why, u64)> = reasons.into_values().collect();
        reasons.sort_by_key(|(_, jobs)| std::cmp::Reverse(*jobs));
        Ok(WhyGroup { reasons, is_complete })
    }
}

async fn why(store: &Store, job: &Job) -> Result<Why, StoreError> {
    let now = store.now();
    match &job.state {
        JobState::Archived { why } => {
            Ok(Why::new(Reason::Finished, format!("it is finished, with the reason `{}`", printable(why.as_str(), 80))))
        }
        JobState::Locked { worker, .. } => why_running(store, *worker).await,
        JobState::Waiting { .. } if job.is_expired(now) => {
            let ago = job.expires_at.map_or_else(String::new, |at| format!(" {} ago", apart(at, now)));
            Ok(Why::new(
                Reason::Expired,
                format!("it has expired{ago}, and no worker starts it; a cleaner archives it, so check that recruiter-cleaner runs"),
            ))
        }
        JobState::Waiting { .. } if job.is_waiting => waits_for(store, job).await,
        JobState::Waiting { at } => match job.predecessor_key() {
            Some(key) => waits_for_predecessor(store, &key).await,
            None if *at > now => {
                let text =
                    format!("it is due in {} ({}); `recruiter jobs retry {}` makes it due now", apart(*at, now), moment(*at), job.id);
                Ok(Why::new(Reason::NotDue, text).until(*at))
            }
            None => why_due(store, job, *at, now).await,
        },
    }
}

async fn why_running(store: &Store, worker: WorkerId) -> Result<Why, StoreError> {
    let (Presence(workers), now) = (Presence::find(store).await?, store.now());
    let holder = workers.iter().find(|other| other.id() == Some(worker));
    Ok(match holder {
        Some(holder) if holder.is_alive() && !holder.is_late() => Why::new(Reason::Running, format!("it runs on worker {worker}")),
        Some(holder) if holder.is_alive() => {
            Why::new(Reason::Running, format!("it runs on {}, which has missed a heartbeat", holder.described(now)))
        }
        Some(holder) if holder.is_overdue() => Why::new(
            Reason::NoCleaner,
            format!(
                "{}, which runs it, seems to be dead, and no cleaner seems to run: start recruiter-cleaner, which ends the execution",
                holder.described(now)
            ),
        ),
        _ => Why::new(
            Reason::DeadWorker,
            format!("its worker {worker} seems to be dead; a cleaner ends the execution, so check that recruiter-cleaner runs"),
        ),
    })
}

async fn why_due(store: &Store, job: &Job, at: Instant, now: Instant) -> Result<Why, StoreError> {
    let lane = Lane { gate: job.gate.clone(), ..Lane::new(job.settings.group(), &job.class) };
    let situation = Situation::read(store, std::slice::from_ref(&lane)).await?;
    if let Some(why) = situation.why_not_run(&lane) {
        return Ok(why);
    }
    if let Some(head) = situation.head_of(&lane).map(|head| head.job.id).filter(|head| *head != job.id) {
        return Ok(behind(&lane, head));
    }
    if let Some(why) = situation.why_refused(&lane) {
        return Ok(match situation.full(&lane) {
            Some(resource) => Why { holders: store.holders_of_resource(&resource, HOLDERS).await?, ..why },
            None => why,
        });
    }
    let policies = policies_in(job.settings.retry_policy().clone().into());
    if let Some(why) = situation.why_unknown(&lane, &policies) {
        return Ok(why);
    }
    let (before, all) = if situation.has_rate(&lane) {
        (store.count_due_before(&lane, job.settings.priority(), at).await?, store.waiting_in_lane(&lane, now).await?.due)
    } else {
        (0, 0)
    };
    let waiting = format!("it has been due for {}", apart(at, now));
    let due = Due { job: Some(job.id), waiting: &waiting, since: at, before, behind: all.saturating_sub(before + 1) };
    Ok(situation.why_not_yet(&lane, &policies, &due))
}

/// A job that waits for an earlier one of its line.
fn behind(lane: &Lane, head: JobId) -> Why {
    let key = lane.gate.as_deref().and_then(line_of_gate).unwrap_or_default();
    let text = format!(
        "it is in the line `{}` behind job {head}, which must be finished first; `recruiter jobs why {head}` says more",
        printable(key, 80)
    );
    Why::new(Reason::Behind, text)
}

async fn waits_for(store: &Store, job: &Job) -> Result<Why, StoreError> {
    let ends = store.ends_of(&job.parents()).await?;
    let open: Vec<JobId> = job.parents().into_iter().filter(|parent| !ends.contains_key(parent)).collect();
    let Some(first) = open.first() else {
        let no_leader = Situation::read(store, &[]).await?.why_no_leader();
        let text = "all jobs that it waited for have ended; the leading recruiter releases it within a poll interval";
        return Ok(no_leader.unwrap_or_else(|| Why::new(Reason::ReleasedSoon, text)));
    };
    let named: Vec<String> = open.iter().take(NAMED).map(ToString::to_string).collect();
    let more = if open.len() > NAMED { format!(" and {} more", open.len() - NAMED) } else { String::new() };
    let text = format!("it waits for the end of {}{more}; `recruiter jobs why {first}` says more", named.join(", "));
    Ok(Why::new(Reason::WaitsForJobs, text))
}

async fn waits_for_predecessor(store: &Store, key: &str) -> Result<Why, StoreError> {
    let shown = printable(key, 80);
    Ok(match store.holder_of_key(key).await? {
        Some(holder) => Why::new(
            Reason::WaitsForPredecessor,
            format!(
                "it runs once more after the end of job {holder}, which has the unique key `{shown}`; `recruiter jobs why {holder}` says more"
            ),
        ),
        None => Why::new(
            Reason::ReleasedSoon,
            format!(
                "the job with the unique key `{shown}` has ended; a cleaner makes it due within seconds, so check that recruiter-cleaner runs"
            ),
        ),
    })
}
