//! `recruiter stats`: queue depth, throughput and latency per group and in total, and the reasons why jobs keep
//! waiting.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    time::Duration,
};

use bson::doc;
use chrono::TimeDelta;
use clap::Args;
use hdrhistogram::Histogram;
use recruiter_common::{
    Reason,
    instant::Instant,
    job::FinishReason,
    store::{COUNTED, ConnectArgs, Due, Finished, Lane, NotKept, SAMPLED, ScheduledJob, Situation, Store, Waiting},
    why::Why,
};
use serde_json::{Value, json};

use super::{
    output::{Format, printable},
    roster::write_overdue,
    view::{Row, Screen, extended, left, right, table},
    why::said,
};

/// Period for which archived jobs are read.
const WINDOW: TimeDelta = TimeDelta::minutes(1);

/// Maximum number of (group, class) pairs of waiting jobs that are compared with the workers.
const LANES: usize = 1_000;
/// Maximum number of due jobs whose retry policies are compared with those that the workers know.
const SAMPLE: usize = 1_000;
/// Maximum number of reasons shown.
const REASONS: usize = 10;

#[derive(Args, Clone, Copy, Debug)]
pub(super) struct StatsArgs {
    /// Time after which a due job that has not started counts as overdue
    #[arg(long, env = "RECRUITER_STATS_OVERDUE_AFTER", value_name = "DURATION", default_value = "1m", value_parser = humantime::parse_duration)]
    overdue_after: Duration,
    #[command(flatten)]
    format: Format,
}

pub(super) async fn run(args: StatsArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter stats").await?;
    let now = store.now();
    let overdue = TimeDelta::from_std(args.overdue_after).ok().and_then(|after| now.checked_sub_signed(after)).unwrap_or_default();
    let waiting = store.waiting(now, overdue).await?;
    let running = store.running().await?;
    let finished = store.finished(now - WINDOW).await?;
    let not_kept = store.not_kept(now - WINDOW).await?;
    let lanes = store.first_lanes(waiting.keys().cloned(), LANES).await?;
    let are_all = lanes.len() < LANES;
    let situation = Situation::read(&store, &lanes).await?;
    let leader = situation.leader();
    let pairs: BTreeSet<(&str, &str)> = lanes.iter().map(|lane| (lane.group.as_str(), lane.class.as_str())).collect();
    let untaken = pairs.into_iter().map(|(group, class)| Lane::new(group, class));
    let untaken: Vec<Held> = untaken.filter_map(|lane| Some(Held::of(&lane, situation.why_not_taken(&lane)?))).collect();
    let held = held(&situation, &lanes, &store.policies_of_due_jobs(&lanes, SAMPLE).await?, &untaken);
    let unrescued = situation.workers().0.iter().filter(|worker| worker.is_overdue()).count();
    let statistics = Statistics::of(now, &waiting, &running, &finished, &not_kept);
    if args.format.json {
        let mut json = statistics.to_json();
        json["leader"] = json!(leader.holder());
        json["unrescued_workers"] = json!(unrescued);
        json["untaken"] = untaken.iter().map(Held::to_json).collect();
        json["held"] = held.iter().map(Held::to_json).collect();
        return Ok(writeln!(out, "{json}")?);
    }
    statistics.write(out, Screen::of_stdout())?;
    write_held(out, &held)?;
    write_untaken(out, &untaken, are_all)?;
    write_overdue(out, unrescued)?;
    Ok(writeln!(out, "{}", leader.line())?)
}

/// A lane whose due jobs cannot start, and why.
#[derive(Clone, Debug, PartialEq)]
struct Held {
    lane: Lane,
    why: Why,
}

impl Held {
    fn of(lane: &Lane, why: Why) -> Self {
        Self { lane: lane.clone(), why }
    }

    fn to_json(&self) -> Value {
        let mut json = doc! { "group": &self.lane.group, "class": &self.lane.class, "gate": &self.lane.gate };
        json.extend(said(&self.why));
        extended(json)
    }
}

/// Why the due jobs of these lanes do not start: each kind of jobs, those with the same lane and the same retry policies, is judged by its
/// first job. What is about to start is left out, and those whose class or group no worker takes are listed elsewhere.
fn held(situation: &Situation, lanes: &[Lane], due: &[(ScheduledJob, BTreeSet<String>)], untaken: &[Held]) -> Vec<Held> {
    let mut held: Vec<Held> = lanes.iter().filter_map(|lane| Some(Held::of(lane, situation.why_refused(lane)?))).collect();
    let mut kinds: BTreeMap<(Lane, &BTreeSet<String>), Vec<&ScheduledJob>> = BTreeMap::new();
    for (job, policies) in due {
        kinds.entry((job.lane(), policies)).or_default().push(job);
    }
    let refused: BTreeSet<Lane> = held.iter().map(|held| held.lane.clone()).collect();
    let is_untaken = |lane: &Lane| untaken.iter().any(|other| other.lane.group == lane.group && other.lane.class == lane.class);
    for ((lane, policies), jobs) in &kinds {
        let not_yet = || {
            let mut jobs = jobs.iter();
            let (behind, first) = match situation.head_of(lane) {
                Some(head) => (0, jobs.find(|job| job.id == head.job.id)),
                None => (jobs.len() as u64 - 1, jobs.next()),
            };
            let first = first.filter(|_| !refused.contains(lane) && !is_untaken(lane))?;
            let why = situation.why_not_yet(lane, policies, &Due::first(Some(first.id), first.scheduled_at, behind));
            (![Reason::Assigned, Reason::Assignable].contains(&why.reason)).then_some(why)
        };
        let why = situation.why_unknown(lane, policies).or_else(not_yet);
        for why in [situation.why_no_leader(), why].into_iter().flatten() {
            let one = Held::of(lane, why);
            if !held.contains(&one) {
                held.push(one);
            }
        }
    }
    held
}

/// Writes each reason once, with the groups of the jobs that wait for it.
fn write_held(out: &mut impl Write, held: &[Held]) -> std::io::Result<()> {
    let mut reasons: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    // The last line says who leads.
    for held in held.iter().filter(|held| held.why.reason != Reason::NoRecruiter) {
        reasons.entry(&held.why.text).or_default().insert(&held.lane.group);
    }
    for (text, groups) in reasons.iter().take(REASONS) {
        let groups: Vec<&str> = groups.iter().copied().collect();
        writeln!(out, "jobs wait in {}: {text}", printable(&groups.join(", "), 80))?;
    }
    if let Some(more @ 1..) = reasons.len().checked_sub(REASONS) {
        writeln!(out, "jobs wait: {more} more reasons; --json lists them")?;
    }
    Ok(())
}

/// Writes each reason once.
fn write_untaken(out: &mut impl Write, untaken: &[Held], are_all: bool) -> std::io::Result<()> {
    let reasons: BTreeSet<&str> = untaken.iter().map(|held| held.why.text.as_str()).collect();
    for reason in reasons.iter().take(REASONS) {
        writeln!(out, "jobs cannot start: {reason}")?;
    }
    if let Some(more @ 1..) = reasons.len().checked_sub(REASONS) {
        writeln!(out, "jobs cannot start: {more} more classes or groups without a worker; --json lists them")?;
    }
    if !are_all {
        writeln!(out, "only the first {LANES} pairs of group and class were compared with the workers")?;
    }
    Ok(())
}

/// Statistics of one group, or of all.
#[derive(Clone, Debug, Default)]
struct Group {
    waiting: Waiting,
    running: u64,
    done: u64,
    cancelled: u64,
    /// Ended, but neither done nor cancelled.
    failed: u64,
    /// Done, and nothing of it was kept.
    not_kept: u64,
    /// Time from due to started.
    latency: Times,
    /// Time from started to ended.
    execution: Times,
}

impl Group {
    fn add(&mut self, job: &Finished) {
        let count = if job.why == FinishReason::DONE {
            &mut self.done
        } else if job.why == FinishReason::CANCELLED {
            &mut self.cancelled
        } else {
            &mut self.failed
        };
        *count += 1;
        let Some(started_at) = job.started_at else { return };
        self.execution.add(job.ended_at - started_at);
        if let Some(scheduled_at) = job.scheduled_at {
            self.latency.add(started_at - scheduled_at);
        }
    }
}

/// A histogram of durations in milliseconds, with three significant digits.
#[derive(Clone, Debug)]
struct Times(Histogram<u64>);

impl Default for Times {
    fn default() -> Self {
        Self(Histogram::new(3).expect("three digits are between one and five"))
    }
}

impl Times {
    fn add(&mut self, time: TimeDelta) {
        // Never fails: the histogram grows on demand and accepts every 64-bit value.
        let _ = self.0.record(u64::try_from(time.num_milliseconds()).unwrap_or(0));
    }

    /// Average, median and 99th percentile, if a value was recorded.
    fn summary(&self) -> Option<(f64, u64, u64)> {
        (!self.0.is_empty()).then(|| (self.0.mean(), self.0.value_at_quantile(0.5), self.0.value_at_quantile(0.99)))
    }
}

/// The statistics that are shown.
#[derive(Clone, Debug)]
struct Statistics {
    at: Instant,
    /// Period in which the archived jobs ended.
    window: TimeDelta,
    /// Whether the period was shortened, because too many jobs finished within a minute.
    cut: bool,
    /// Period in which the jobs ended of which nothing was kept.
    not_kept_window: TimeDelta,
    groups: BTreeMap<String, Group>,
    total: Group,
}

impl Statistics {
    fn of(
        at: Instant,
        waiting: &BTreeMap<String, Waiting>,
        running: &BTreeMap<String, u64>,
        finished: &[Finished],
        not_kept: &NotKept,
    ) -> Self {
        let cut = finished.len() >= SAMPLED;
        let oldest = finished.iter().map(|job| job.ended_at).min().filter(|_| cut);
        let window = oldest.map_or(WINDOW, |oldest| (at - oldest).clamp(TimeDelta::milliseconds(1), WINDOW));
        let (mut groups, mut total): (BTreeMap<String, Group>, Group) = Default::default();
        let names: BTreeSet<&String> = waiting.keys().chain(running.keys()).collect();
        for name in names {
            let waiting = waiting.get(name).copied().unwrap_or_default();
            let running = running.get(name).copied().unwrap_or_default();
            total.waiting.queued += waiting.queued;
            total.waiting.overdue += waiting.overdue;
            total.waiting.postponed += waiting.postponed;
            total.waiting.waits += waiting.waits;
            total.running += running;
            groups.insert(name.clone(), Group { waiting, running, ..Group::default() });
        }
        for job in finished {
            groups.entry(job.group.clone()).or_default().add(job);
            total.add(job);
        }
        for (name, count) in &not_kept.groups {
            groups.entry(name.clone()).or_default().not_kept += count;
            total.not_kept += count;
        }
        let not_kept_window = (at - not_kept.since).max(WINDOW);
        Self { at, window, cut, not_kept_window, groups, total }
    }

    /// Done jobs per second, also those of which nothing was kept.
    fn per_second(&self, group: &Group) -> f64 {
        let rate = |count: u64, window: TimeDelta| {
            let milliseconds = u32::try_from(window.num_milliseconds()).unwrap_or(u32::MAX);
            f64::from(u32::try_from(count).unwrap_or(u32::MAX)) * 100_000.0 / f64::from(milliseconds)
        };
        (rate(group.done, self.window) + rate(group.not_kept, self.not_kept_window)).round() / 100.0
    }

    fn to_json(&self) -> Value {
        let times =
            |times: &Times| times.summary().map(|(avg, p50, p99)| json!({ "avg": (avg * 10.0).round() / 10.0, "p50": p50, "p99": p99 }));
        let group = |name: Option<&String>, group: &Group| {
            let Waiting { queued, overdue, postponed, waits } = group.waiting;
            let mut value = json!({
                "queued": queued, "overdue": overdue, "postponed": postponed, "waits": waits, "running": group.running,
                "done": group.done, "failed": group.failed, "cancelled": group.cancelled, "not_kept": group.not_kept, "done_per_second": self.per_second(group),
                "latency_ms": times(&group.latency), "execution_ms": times(&group.execution),
            });
            if let (Some(name), Some(fields)) = (name, value.as_object_mut()) {
                fields.shift_insert(0, "name".into(), name.as_str().into());
            }
            value
        };
        let groups: Vec<Value> = self.groups.iter().map(|(name, one)| group(Some(name), one)).collect();
        json!({
            "at": extended(bson::DateTime::from_chrono(self.at)), "window_ms": self.window.num_milliseconds(), "newest_only": self.cut,
            "not_kept_window_ms": self.not_kept_window.num_milliseconds(), "counted_up_to": COUNTED, "total": group(None, &self.total), "groups": groups,
        })
    }

    /// Writes two tables: the current state, and the jobs that ended in the window.
    fn write(&self, out: &mut impl Write, screen: Screen) -> std::io::Result<()> {
        let count = |count: u64| if count >= COUNTED { format!("{count}+") } else { count.to_string() };
        let groups = || self.groups.iter().map(|(name, group)| (printable(name, 64), group)).chain([("(all)".into(), &self.total)]);
        let present = groups().map(|(name, group)| {
            let Waiting { queued, overdue, postponed, waits } = group.waiting;
            Row::from([
                left("NOW", name).cut_to(8),
                right("QUEUED", count(queued)),
                right("OVERDUE", count(overdue)),
                right("POSTPONED", count(postponed)),
                right("WAITS", count(waits)),
                right("RUNNING", group.running),
            ])
        });
        table(out, screen, &present.collect::<Vec<_>>())?;
        writeln!(out)?;
        let times = |times: &Times| match times.summary() {
            Some((_, p50, p99)) => format!("{p50} {p99}"),
            None => "-".into(),
        };
        let ended = groups().filter(|(_, group)| group.done + group.failed + group.cancelled + group.not_kept > 0).map(|(name, group)| {
            Row::from([
                left("ENDED", name).cut_to(8),
                right("DONE", group.done),
                right("FAILED", group.failed),
                right("CANCELLED", group.cancelled),
                right("DONE/S", format!("{:.2}", self.per_second(group))),
                right("LATENCY MS", times(&group.latency)),
                right("RUNTIME MS", times(&group.execution)),
            ])
        });
        let ended: Vec<Row> = ended.collect();
        let seconds = |window: TimeDelta| f64::from(u32::try_from(window.num_milliseconds()).unwrap_or(u32::MAX)) / 1_000.0;
        let (seconds, not_kept_seconds) = (seconds(self.window), seconds(self.not_kept_window));
        let cut = if self.cut { format!(", only the newest {SAMPLED} jobs") } else { String::new() };
        if ended.is_empty() {
            return writeln!(out, "no job ended in the last {seconds:.1} s");
        }
        table(out, screen, &ended)?;
        writeln!(out, "ended: in the last {seconds:.1} s{cut}")?;
        for (name, group) in groups().filter(|(_, group)| group.not_kept > 0) {
            let name = if name == "(all)" { "all groups".into() } else { format!("group {name}") };
            writeln!(out, "done and not kept: about {} in the last {not_kept_seconds:.1} s, {name}", group.not_kept)?;
        }
        writeln!(out, "latency (from due to started) and runtime: median and 99th percentile")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(group: &str, times: [Option<i64>; 2], ended: i64) -> Finished {
        let at = |ms: i64| Instant::UNIX_EPOCH + TimeDelta::milliseconds(ms);
        let [scheduled_at, started_at] = times.map(|time| time.map(at));
        Finished { group: group.into(), why: FinishReason::DONE, scheduled_at, started_at, ended_at: at(ended) }
    }

    fn statistics(now: i64, finished: &[Finished]) -> Value {
        let waiting = BTreeMap::from([
            ("a".to_owned(), Waiting { queued: 3, overdue: 1, postponed: 2, waits: 0 }),
            ("w".to_owned(), Waiting { queued: 4, ..Waiting::default() }),
        ]);
        let running = BTreeMap::from([("a".to_owned(), 1), ("r".to_owned(), 2)]);
        let now = Instant::UNIX_EPOCH + TimeDelta::milliseconds(now);
        Statistics::of(now, &waiting, &running, finished, &NotKept::default()).to_json()
    }

    #[test]
    fn groups_are_the_union_of_all_that_is_known() {
        let json = statistics(60_000, &[job("f", [Some(0), Some(100)], 300), job("f", [None, None], 300)]);
        let names: Vec<_> = json["groups"].as_array().unwrap().iter().map(|group| group["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["a", "f", "r", "w"]);
        assert_eq!((&json["total"]["queued"], &json["total"]["running"], &json["total"]["done"]), (&json!(7), &json!(3), &json!(2)));
        let f = &json["groups"][1];
        assert_eq!((&f["latency_ms"], &f["execution_ms"]["p99"]), (&json!({ "avg": 100.0, "p50": 100, "p99": 100 }), &json!(200)));
        assert_eq!(json["groups"][0]["latency_ms"], Value::Null);
    }

    #[test]
    fn more_than_is_looked_at_shortens_the_window() {
        let json = statistics(60_000, &vec![job("f", [Some(0), Some(0)], 50_000); SAMPLED]);
        assert_eq!((&json["window_ms"], &json["newest_only"]), (&json!(10_000), &json!(true)));
        assert_eq!(json["total"]["done_per_second"], json!(1_000.0));
    }

    #[test]
    fn clocks_that_disagree_give_no_negative_times() {
        let json = statistics(1_000, &[job("f", [Some(500), Some(400)], 300)]);
        assert_eq!((&json["total"]["latency_ms"]["p50"], &json["total"]["execution_ms"]["p50"]), (&json!(0), &json!(0)));
    }

    #[test]
    fn failures_are_told_from_successes_on_a_narrow_screen() {
        let (done, failed) = (job("g", [Some(0), Some(1)], 2), FinishReason::custom("not-scheduled-by-retry-policy"));
        let finished = [done.clone(), Finished { why: failed, ..done.clone() }, Finished { why: FinishReason::CANCELLED, ..done }];
        let waiting =
            BTreeMap::from([("x".repeat(100), Waiting { queued: COUNTED, overdue: COUNTED, postponed: COUNTED, waits: COUNTED })]);
        let statistics = Statistics::of(Instant::UNIX_EPOCH, &waiting, &BTreeMap::new(), &finished, &NotKept::default());
        assert_eq!(statistics.to_json()["groups"][0]["failed"], json!(1));
        let mut out = Vec::new();
        statistics.write(&mut out, Screen { width: 80, colours: false }).unwrap();
        let shown = String::from_utf8(out).unwrap();
        assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert!(shown.lines().any(|line| words(line) == ["g", "1", "1", "1", "0.02", "1", "1", "1", "1"]), "{shown}");
        assert!(shown.contains("ended: in the last 60.0 s"), "{shown}");
    }
    #[test]
    fn successes_of_which_nothing_was_kept_are_counted_beside_those_in_the_archive() {
        let now = Instant::UNIX_EPOCH + TimeDelta::milliseconds(64_000);
        let not_kept = NotKept { groups: BTreeMap::from([("n".to_owned(), 640)]), since: Instant::UNIX_EPOCH };
        let statistics = Statistics::of(now, &BTreeMap::new(), &BTreeMap::new(), &[job("f", [None, None], 10_000)], &not_kept);
        let json = statistics.to_json();
        let of = |group: &Value| ["done", "not_kept", "done_per_second"].map(|field| group[field].as_f64().unwrap());
        assert_eq!(of(&json["groups"][1]), [0.0, 640.0, 10.0]);
        assert_eq!(of(&json["total"]), [1.0, 640.0, 10.02]);
        assert_eq!(json["not_kept_window_ms"], json!(64_000));
        let mut out = Vec::new();
        statistics.write(&mut out, Screen { width: 80, colours: false }).unwrap();
        let shown = String::from_utf8(out).unwrap();
        assert!(shown.contains("done and not kept: about 640 in the last 64.0 s, group n"), "{shown}");
    }
}
