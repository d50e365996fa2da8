//! What decides whether due jobs may start, as it was read once.

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap, HashSet},
    time::Duration,
};

use chrono::TimeDelta;

use super::{Reason, Why};
use crate::{
    base::{Instant, JobId, apart, briefly_apart, in_words, moment, printable},
    job::{Lane, line_of_gate, resource_and_number, resource_of_group},
    limits::{InUse, Limit, Maintenance, NotAdmitted, Pause, Rate, RateCell, Settings},
    lines::Head,
    mongo::{Store, StoreError},
    operator::presence::{Leader, Presence, Worker},
    roster::{PermitHolder, free_slots_of},
};

/// Maximum number of workers that are named.
const NAMED: usize = 3;
/// In addition to twice the time that a rate needs for all due jobs of a lane: when its next one has been due for longer, it does not wait for
/// the rate.
const NOT_THE_RATE_AFTER: Duration = Duration::from_secs(5);

/// A due job that has not started, or the next one of a lane.
#[derive(Clone, Copy, Debug)]
pub struct Due<'a> {
    /// The job, if it is about this one.
    pub(crate) job: Option<JobId>,
    /// How long it has been due, in words.
    pub(crate) waiting: &'a str,
    pub(crate) since: Instant,
    /// Number of due jobs of the lane that come first.
    pub(crate) before: u64,
    /// Number of due jobs of the lane that come after it.
    pub(crate) behind: u64,
}

impl Due<'static> {
    /// The next job of a lane, due since then, with so many due jobs behind it.
    pub fn first(job: Option<JobId>, since: Instant, behind: u64) -> Self {
        Self { job, waiting: "the next job is due", since, before: 0, behind }
    }
}

/// What decides whether the due jobs of some lanes may start: the leader, the workers, and the settings with what is in use of them.
#[derive(Clone, Debug)]
pub struct Situation {
    leader: Leader,
    workers: Presence,
    settings: Settings,
    holders: Vec<PermitHolder>,
    /// Number of jobs that use each resource.
    used: HashMap<String, usize>,
    heads: HashMap<String, Head>,
    /// When slow rates allow the next start, as the leader has kept it.
    cells: HashMap<String, RateCell>,
    now: Instant,
}

impl Situation {
    /// Reads what decides about these lanes.
    ///
    /// # Errors
    /// When MongoDB cannot be used.
    pub async fn read(store: &Store, lanes: &[Lane]) -> Result<Self, StoreError> {
        let now = store.now();
        let (leader, workers) = (Leader::find(store).await?, Presence::find(store).await?);
        let (settings, holders) = (store.settings().await?, store.permit_holders().await?);
        let held: HashSet<&str> = holders.iter().flat_map(|holder| &holder.permits).map(String::as_str).collect();
        let mut used: HashMap<String, usize> = HashMap::new();
        for (resource, _) in held.into_iter().filter_map(resource_and_number) {
            *used.entry(resource.to_owned()).or_default() += 1;
        }
        let has_capacity = |group: &&str| settings.groups.get(*group).is_some_and(|group| group.limit.capacity.is_some());
        let limited: BTreeSet<&str> = lanes.iter().map(|lane| lane.group.as_str()).filter(has_capacity).collect();
        let limited: Vec<String> = limited.into_iter().map(str::to_owned).collect();
        for (group, without) in store.running_without_permit(&limited).await? {
            *used.entry(resource_of_group(&group)).or_default() += usize::try_from(without).unwrap_or(usize::MAX);
        }
        let lines: Vec<&str> = lanes.iter().filter_map(|lane| lane.gate.as_deref()).filter(|gate| line_of_gate(gate).is_some()).collect();
        let heads = if lines.is_empty() { HashMap::new() } else { store.heads_of_lines(&lines).await? };
        let has_rate = |limit: &Limit| limit.rate.is_some();
        let has_rates = settings.limits.values().any(has_rate) || settings.groups.values().any(|group| has_rate(&group.limit));
        let cells = if has_rates { store.rate_cells().await? } else { HashMap::new() };
        Ok(Self { leader, workers, settings, holders, used, heads, cells, now })
    }

    /// The leader.
    pub fn leader(&self) -> &Leader {
        &self.leader
    }

    /// The workers.
    pub fn workers(&self) -> &Presence {
        &self.workers
    }

    /// The first unfinished job of the lane's line, if the lane is a line.
    pub fn head_of(&self, lane: &Lane) -> Option<&Head> {
        self.heads.get(lane.gate.as_ref()?)
    }

    /// Why no process assigns or takes jobs of this lane.
    pub(crate) fn why_not_run(&self, lane: &Lane) -> Option<Why> {
        self.why_no_leader().or_else(|| self.why_not_taken(lane))
    }

    /// The reason if no recruiter leads.
    pub fn why_no_leader(&self) -> Option<Why> {
        self.leader.is_missing().then(|| Why::new(Reason::NoRecruiter, format!("{}; start `recruiter run`", self.leader.line())))
    }

    /// Why no running worker takes jobs of this lane.
    pub fn why_not_taken(&self, lane: &Lane) -> Option<Why> {
        let reason = self.workers.why_no_worker_takes(&lane.class, &lane.group)?;
        let silent = |worker: &&Worker| !worker.is_retired && worker.silent_for.is_some() && worker.takes(&lane.class, &lane.group);
        let silent: Vec<&Worker> = self.workers.0.iter().filter(silent).collect();
        if silent.is_empty() {
            return Some(Why::new(Reason::NoWorker, format!("{reason}; start one that does")));
        }
        Some(Why::new(Reason::WorkerSilent, format!("{reason}: {}", self.silent(&silent))))
    }

    /// Programs that do not answer, and what to do.
    fn silent(&self, workers: &[&Worker]) -> String {
        let named: Vec<String> = workers.iter().take(NAMED).map(|worker| worker.described(self.now)).collect();
        let more = if workers.len() > NAMED { format!(" and {} more", workers.len() - NAMED) } else { String::new() };
        let cleaner =
            if workers.iter().any(|worker| worker.is_overdue()) { "; no cleaner seems to run either: start recruiter-cleaner" } else { "" };
        format!("{}{more} does not answer: the process is dead, frozen, or cannot reach MongoDB; restart it{cleaner}", named.join(", "))
    }

    /// Why the settings refuse the jobs of this lane: pauses, maintenance windows, limits and rates.
    pub fn why_refused(&self, lane: &Lane) -> Option<Why> {
        let refusal = self.settings.admit(lane, self).err()?;
        let why = self.explained(&refusal);
        let NotAdmitted::Full { resource, .. } = refusal else { return Some(why) };
        let is_of = |permit: &String| resource_and_number(permit).is_some_and(|(of, _)| of == resource);
        let holds = |worker: &&Worker| self.holders.iter().any(|one| Some(one.worker) == worker.id() && one.permits.iter().any(is_of));
        match self.workers.0.iter().find(|worker| worker.is_overdue() && holds(worker)) {
            None => Some(why),
            Some(dead) => Some(self.without_cleaner(&format!("{}; a permit is held by", why.text), dead)),
        }
    }

    /// The reason if a dead worker has something that no cleaner frees.
    pub(crate) fn without_cleaner(&self, what: &str, dead: &Worker) -> Why {
        let text = format!(
            "{what} {}, which seems to be dead, and no cleaner seems to run: start recruiter-cleaner, which ends its jobs",
            dead.described(self.now)
        );
        Why::new(Reason::NoCleaner, text)
    }

    /// The resource whose permits are all held, if that is why this lane is refused.
    pub(crate) fn full(&self, lane: &Lane) -> Option<String> {
        let refused = self.settings.admit(lane, self).err()?;
        if let NotAdmitted::Full { resource, .. } = refused { Some(resource) } else { None }
    }

    /// A refusal in words.
    fn explained(&self, refusal: &NotAdmitted) -> Why {
        let (quoted, now) = (|name: &str| format!("`{}`", printable(name, 80)), self.now);
        match refusal {
            NotAdmitted::Paused(paused, pause) => {
                let what = printable(&paused.to_string(), 80);
                Why::new(Reason::Paused, format!("{what} is {}; `recruiter resume {what}` ends the pause", paused_by(pause, now)))
            }
            NotAdmitted::Undefined(resource) => Why::new(
                Reason::LimitUndefined,
                format!("it needs {}, which has no limit yet; set one with `recruiter limits set`, or cancel the job", quoted(resource)),
            ),
            NotAdmitted::Invalid(resource) => Why::new(
                Reason::LimitInvalid,
                format!(
                    "the settings of {} are not valid; correct its document, for example with `recruiter limits set` or `recruiter groups set`",
                    quoted(resource)
                ),
            ),
            NotAdmitted::Full { resource, capacity } => Why::new(
                Reason::LimitFull,
                format!("{} is full: at most {capacity} at a time; it waits for one of these jobs to end", quoted(resource)),
            ),
            NotAdmitted::Maintenance { group, until } => Why::new(
                Reason::Maintenance,
                format!("the maintenance window of group {} ends in {} ({})", quoted(group), apart(*until, now), moment(*until)),
            )
            .until(*until),
            NotAdmitted::Rate { resource, until } => Why::new(
                Reason::Rate,
                format!("the rate of {} allows the next start in {} ({})", quoted(resource), apart(now, *until), moment(*until)),
            )
            .until(*until),
        }
    }

    /// Why no worker that takes jobs of this lane can run one with these retry policies.
    pub fn why_unknown(&self, lane: &Lane, policies: &BTreeSet<String>) -> Option<Why> {
        let unknown = self.workers.why_unknown(&lane.class, &lane.group, policies)?;
        let text = format!("{unknown}; register it in the workers, or retry the job with another policy");
        Some(Why::new(Reason::UnknownPolicy, text))
    }

    /// Whether a rate applies to this lane.
    pub(crate) fn has_rate(&self, lane: &Lane) -> bool {
        self.settings.limits_of(lane).is_ok_and(|limits| limits.iter().any(|(_, limit)| limit.rate.is_some()))
    }

    /// Why a due job with these retry policies, which nothing refuses, has not started.
    pub fn why_not_yet(&self, lane: &Lane, policies: &BTreeSet<String>, due: &Due<'_>) -> Why {
        let Due { job, waiting, .. } = *due;
        let able = self.workers.takers(&lane.class, &lane.group).filter(|worker| worker.knows(policies));
        let takers: Vec<&Worker> = able.collect();
        let has_not_taken = |worker: &&&Worker| worker.is_late() && !worker.untaken().is_empty();
        let has_it = |worker: &&Worker| job.is_some_and(|job| worker.untaken().contains(&job) || worker.ahead().contains(&job));
        if let Some(worker) = self.workers.0.iter().find(has_it) {
            return if worker.is_overdue() {
                self.without_cleaner(&format!("{waiting}, and was assigned to"), worker)
            } else if worker.is_late() || !worker.is_alive() {
                Why::new(Reason::WorkerSilent, format!("{waiting}, and was assigned to a worker: {}", self.silent(&[worker])))
            } else {
                let text =
                    format!("{waiting}, and is assigned to {}, which starts it as soon as it has a free slot", worker.described(self.now));
                Why::new(Reason::Assigned, text)
            };
        }
        let free: i64 = takers.iter().map(|worker| free_slots_of(&worker.document, &lane.class)).sum();
        if free == 0 {
            let late: Vec<&Worker> = takers.iter().filter(has_not_taken).copied().collect();
            if !late.is_empty() {
                return Why::new(Reason::WorkerSilent, format!("{waiting}, and {}", self.silent(&late)));
            }
            let text = format!(
                "{waiting}, and all slots of the workers that take it are in use or just being assigned, or all that they have for its class; \
                 add workers, or raise its priority"
            );
            return Why::new(Reason::NoFreeSlot, text);
        }
        if let Some(why) = self.why_rate(lane, due) {
            return why;
        }
        let text = format!(
            "{waiting}, and nothing keeps it from being assigned; if this lasts for seconds, see the logs of the recruiter and the workers"
        );
        Why::new(Reason::Assignable, text)
    }

    /// Why the due jobs of this lane wait, in one word: what `why` says about most of them.
    pub fn reason_in_lane(&self, lane: &Lane) -> Reason {
        let is_line = || lane.gate.as_deref().is_some_and(|gate| line_of_gate(gate).is_some());
        let has_slots = || self.workers.takers(&lane.class, &lane.group).any(|worker| free_slots_of(&worker.document, &lane.class) > 0);
        // Its own permit is in use then.
        let runs_in_line = || self.head_of(lane).is_some_and(|head| head.is_locked);
        match self.why_not_taken(lane).or_else(|| self.why_refused(lane).filter(|_| !runs_in_line())) {
            Some(why) => why.reason,
            None if is_line() => Reason::Behind,
            None if !has_slots() => Reason::NoFreeSlot,
            None if self.has_rate(lane) => Reason::Rate,
            None => Reason::Assignable,
        }
    }

    /// The resources that have a capacity: how many permits of each are in use, and how many there are.
    pub fn permits(&self) -> impl Iterator<Item = (String, usize, u32)> {
        let of_groups = self.settings.groups.iter().map(|(group, settings)| (resource_of_group(group), &settings.limit));
        let limits = self.settings.limits.iter().map(|(resource, limit)| (resource.clone(), limit)).chain(of_groups);
        limits.filter_map(|(resource, limit)| Some((resource.clone(), self.used(&resource), limit.capacity?)))
    }

    /// The slowest rate of this lane, if it may be why its next job waits. The leader alone knows the next start of a fast rate.
    fn why_rate(&self, lane: &Lane, due: &Due<'_>) -> Option<Why> {
        let Due { waiting, since, before, behind, .. } = *due;
        let due_for = (self.now - since).to_std().unwrap_or_default();
        let limits = self.settings.limits_of(lane).unwrap_or_default();
        let may_wait = |(resource, rate): &(Cow<'_, str>, Rate)| {
            // A kept cell says exactly that the next start is allowed.
            let is_free = self.cells.get(&**resource).is_some_and(|cell| cell.rate == Some(*rate));
            let is_past = due_for > for_starts(*rate, behind).saturating_mul(2).saturating_add(NOT_THE_RATE_AFTER);
            before > 0 || !(is_free || is_past)
        };
        let rates = limits.into_iter().filter_map(|(resource, limit)| Some((resource, limit.rate?)));
        let (resource, rate) = rates.filter(may_wait).max_by_key(|(_, rate)| rate.interval())?;
        let (until, within) = self.after(rate, before);
        let first = match before {
            0 => String::new(),
            1 => ", and one due job of its kind comes first".into(),
            more => format!(", and {more} due jobs of its kind come first"),
        };
        let text = format!("{waiting}; the rate of `{}` is {rate}{first}: it may start within about {within}", printable(&resource, 80));
        let why = Why::new(Reason::Rate, text);
        Some(until.map_or(why.clone(), |until| why.until(until)))
    }

    /// When a rate allows one more start after as many as come `before`, and in how long that is.
    fn after(&self, rate: Rate, before: u64) -> (Option<Instant>, String) {
        let within = for_starts(rate, before);
        let until = TimeDelta::from_std(within).ok().and_then(|within| self.now.checked_add_signed(within));
        (until, in_words(within.max(Duration::from_secs(1))))
    }
}

/// The time in which a rate allows one more start after as many others.
fn for_starts(rate: Rate, others: u64) -> Duration {
    rate.interval().saturating_mul(u32::try_from(others).unwrap_or(u32::MAX).saturating_add(1))
}

impl InUse for Situation {
    fn halt_of(&self, gate: &str) -> Option<&Pause> {
        self.heads.get(gate)?.halt.as_ref()
    }

    fn closed_until(&self, group: &str) -> Option<Instant> {
        let windows = &self.settings.groups.get(group)?.maintenance;
        match Maintenance::of(windows, self.now) {
            Maintenance::Closed(until) if !windows.is_empty() => Some(until),
            Maintenance::Closed(_) | Maintenance::Open(_) => None,
        }
    }

    fn used(&self, resource: &str) -> usize {
        self.used.get(resource).copied().unwrap_or(0)
    }

    fn starts(&self, resource: &str, rate: Rate) -> Result<usize, Instant> {
        // The leader computes a cell of another rate anew.
        let Some(cell) = self.cells.get(resource).filter(|cell| cell.rate == Some(rate)) else { return Ok(1) };
        let tolerance = rate.interval().saturating_mul(rate.burst.saturating_sub(1));
        let opens = TimeDelta::from_std(tolerance).ok().and_then(|tolerance| cell.at.checked_sub_signed(tolerance)).unwrap_or(self.now);
        if opens > self.now { Err(opens) } else { Ok(1) }
    }
}

/// Who has paused, when and why, in words.
pub fn paused_by(pause: &Pause, now: Instant) -> String {
    let at = pause.at.map_or_else(String::new, |at| format!(" {} ago ({})", briefly_apart(at, now), moment(at)));
    let why = pause.reason.as_ref().map_or_else(String::new, |reason| format!(": {}", printable(reason, 200)));
    format!("paused by {}{at}{why}", printable(&pause.by, 80))
}
