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
use serde::{Serialize, Serializer};
use serde_json::json;

use super::{
    output::{Format, printable},
    roster::write_overdue,
    view::{Row, Screen, date, extended, json_line, left, or_dash, right, table},
    why::why_to_document,
};

/// Period for which archived jobs are read.
const PERIOD: TimeDelta = TimeDelta::minutes(1);

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
    let finished = store.finished(now - PERIOD).await?;
    let not_kept = store.not_kept(now - PERIOD).await?;
    let lanes = store.first_lanes(waiting.keys().cloned(), LANES).await?;
    let are_all = lanes.len() < LANES;
    let situation = Situation::read(&store, &lanes).await?;
    let leader = situation.leader();
    let pairs: BTreeSet<(&str, &str)> = lanes.iter().map(|lane| (lane.group.as_str(), lane.class.as_str())).collect();
    let untaken = pairs.into_iter().map(|(group, class)| Lane::new(group, class));
    let untaken: Vec<Blocked> = untaken.filter_map(|lane| Some(Blocked::of(&lane, situation.why_not_taken(&lane)?))).collect();
    let held = held(&situation, &lanes, &store.policies_of_due_jobs(&lanes, SAMPLE).await?, &untaken);
    let unrescued = situation.workers().0.iter().filter(|worker| worker.is_overdue()).count();
    let statistics = Statistics::of(now, &waiting, &running, &finished, &not_kept);
    let (leads, line) = (leader.holder().map(str::to_owned), leader.line());
    let statistics = Statistics { leader: leads, unrescued_workers: unrescued, untaken, held, ..statistics };
    if args.format.json {
        return Ok(json_line(out, &statistics)?);
    }
    statistics.write(out, Screen::of_stdout())?;
    write_held(out, &statistics.held)?;
    write_untaken(out, &statistics.untaken, are_all)?;
    write_overdue(out, unrescued)?;
    Ok(writeln!(out, "{line}")?)
}

/// A lane whose due jobs cannot start, and why.
#[derive(Clone, Debug, PartialEq)]
struct Blocked {
    lane: Lane,
    why: Why,
}

impl Blocked {
    fn of(lane: &Lane, why: Why) -> Self {
        Self { lane: lane.clone(), why }
    }
}

impl Serialize for Blocked {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut blocked = doc! { "group": &self.lane.group, "class": &self.lane.class, "gate": &self.lane.gate };
        blocked.extend(why_to_document(&self.why));
        extended(blocked).serialize(to)
    }
}

/// Why the due jobs of these lanes do not start: each kind of jobs, those with the same lane and the same retry policies, is judged by its
/// first job. What is about to start is left out, and those whose class or group no worker takes are listed elsewhere.
fn held(situation: &Situation, lanes: &[Lane], due: &[(ScheduledJob, BTreeSet<String>)], untaken: &[Blocked]) -> Vec<Blocked> {
    let mut held: Vec<Blocked> = lanes.iter().filter_map(|lane| Some(Blocked::of(lane, situation.why_refused(lane)?))).collect();
    let mut kinds: BTreeMap<(Lane, &BTreeSet<String>), Vec<&ScheduledJob>> = BTreeMap::new();
    for (job, policies) in due {
        kinds.entry((job.lane(), policies)).or_default().push(job);
    }
    let refused: BTreeSet<Lane> = held.iter().map(|blocked| blocked.lane.clone()).collect();
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
            let one = Blocked::of(lane, why);
            if !held.contains(&one) {
                held.push(one);
            }
        }
    }
    held
}

/// Writes each reason once, with the groups of the jobs that wait for it.
fn write_held(out: &mut impl Write, held: &[Blocked]) -> std::io::Result<()> {
    let mut reasons: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    // The last line says who leads.
    for Blocked { lane, why } in held.iter().filter(|blocked| blocked.why.reason != Reason::NoRecruiter) {
        reasons.entry(&why.text).or_default().insert(&lane.group);
    }
    let reasons = reasons.into_iter().map(|(text, groups)| {
        let groups: Vec<&str> = groups.into_iter().collect();
        format!("jobs wait in {}: {text}", printable(&groups.join(", "), 80))
    });
    write_first(out, reasons.collect(), |more| format!("jobs wait: {more} more reasons"))
}

/// Writes each reason once.
fn write_untaken(out: &mut impl Write, untaken: &[Blocked], are_all: bool) -> std::io::Result<()> {
    let reasons: BTreeSet<&str> = untaken.iter().map(|blocked| blocked.why.text.as_str()).collect();
    let reasons = reasons.into_iter().map(|reason| format!("jobs cannot start: {reason}"));
    write_first(out, reasons.collect(), |more| format!("jobs cannot start: {more} more classes or groups without a worker"))?;
    if !are_all {
        writeln!(out, "only the first {LANES} pairs of group and class were compared with the workers")?;
    }
    Ok(())
}

/// Writes the first of these lines, and how many more there are.
fn write_first(out: &mut impl Write, lines: Vec<String>, more_of_them: impl Fn(usize) -> String) -> std::io::Result<()> {
    lines.iter().take(REASONS).try_for_each(|line| writeln!(out, "{line}"))?;
    match lines.len().checked_sub(REASONS) {
        Some(more @ 1..) => writeln!(out, "{}; --json lists them", more_of_them(more)),
        Some(0) | None => Ok(()),
    }
}

/// Statistics of one group, or of all.
#[derive(Clone, Debug, Default, Serialize)]
struct GroupStatistics {
    /// `None`: of all groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(flatten)]
    waiting: Waiting,
    running: u64,
    done: u64,
    /// Ended, but neither done nor cancelled.
    failed: u64,
    cancelled: u64,
    /// Done, and nothing of it was kept.
    not_kept: u64,
    /// Done jobs per second, also those of which nothing was kept.
    done_per_second: f64,
    /// Time from due to started.
    latency_ms: Times,
    /// Time from started to ended.
    execution_ms: Times,
}

impl GroupStatistics {
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
        self.execution_ms.add(job.ended_at - started_at);
        if let Some(scheduled_at) = job.scheduled_at {
            self.latency_ms.add(started_at - scheduled_at);
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

impl Serialize for Times {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let summary = self.summary().map(|(avg, p50, p99)| json!({ "avg": (avg * 10.0).round() / 10.0, "p50": p50, "p99": p99 }));
        summary.serialize(to)
    }
}

/// The statistics that are shown.
#[derive(Clone, Debug, Default, Serialize)]
struct Statistics {
    #[serde(serialize_with = "date")]
    at: Instant,
    /// Period in which the archived jobs ended.
    window_ms: i64,
    /// Whether the period was shortened, because too many jobs finished within a minute.
    newest_only: bool,
    /// Period in which the jobs ended of which nothing was kept.
    not_kept_window_ms: i64,
    counted_up_to: u64,
    total: GroupStatistics,
    groups: Vec<GroupStatistics>,
    leader: Option<String>,
    unrescued_workers: usize,
    untaken: Vec<Blocked>,
    held: Vec<Blocked>,
}

impl Statistics {
    fn of(
        at: Instant,
        waiting: &BTreeMap<String, Waiting>,
        running: &BTreeMap<String, u64>,
        finished: &[Finished],
        not_kept: &NotKept,
    ) -> Self {
        let newest_only = finished.len() >= SAMPLED;
        let oldest = finished.iter().map(|job| job.ended_at).min().filter(|_| newest_only);
        let period = oldest.map_or(PERIOD, |oldest| (at - oldest).clamp(TimeDelta::milliseconds(1), PERIOD));
        let not_kept_period = (at - not_kept.since).max(PERIOD);
        let (mut groups, mut total): (BTreeMap<&String, GroupStatistics>, GroupStatistics) = Default::default();
        for (name, counts) in waiting {
            let Waiting { queued, overdue, postponed, waits } = *counts;
            groups.entry(name).or_default().waiting = *counts;
            total.waiting.queued += queued;
            total.waiting.overdue += overdue;
            total.waiting.postponed += postponed;
            total.waiting.waits += waits;
        }
        for (name, count) in running {
            groups.entry(name).or_default().running = *count;
            total.running += count;
        }
        for job in finished {
            groups.entry(&job.group).or_default().add(job);
            total.add(job);
        }
        for (name, count) in &not_kept.groups {
            groups.entry(name).or_default().not_kept += count;
            total.not_kept += count;
        }
        let rate = |count: u64, period: TimeDelta| {
            let milliseconds = u32::try_from(period.num_milliseconds()).unwrap_or(u32::MAX);
            f64::from(u32::try_from(count).unwrap_or(u32::MAX)) * 100_000.0 / f64::from(milliseconds)
        };
        let per_second = |group: &GroupStatistics| (rate(group.done, period) + rate(group.not_kept, not_kept_period)).round() / 100.0;
        let with_rate = |name, group| GroupStatistics { name, done_per_second: per_second(&group), ..group };
        Self {
            at,
            window_ms: period.num_milliseconds(),
            newest_only,
            not_kept_window_ms: not_kept_period.num_milliseconds(),
            counted_up_to: COUNTED,
            total: with_rate(None, total),
            groups: groups.into_iter().map(|(name, group)| with_rate(Some(name.clone()), group)).collect(),
            ..Self::default()
        }
    }

    /// Writes two tables: the current state, and the jobs that ended in the window.
    fn write(&self, out: &mut impl Write, screen: Screen) -> std::io::Result<()> {
        let count = |count: u64| if count >= COUNTED { format!("{count}+") } else { count.to_string() };
        let name = |group: &GroupStatistics| group.name.as_ref().map_or_else(|| "(all)".into(), |name| printable(name, 64));
        let groups = || self.groups.iter().chain([&self.total]);
        let present = groups().map(|group| {
            let Waiting { queued, overdue, postponed, waits } = group.waiting;
            Row::from([
                left("NOW", name(group)).cut_to(8),
                right("QUEUED", count(queued)),
                right("OVERDUE", count(overdue)),
                right("POSTPONED", count(postponed)),
                right("WAITS", count(waits)),
                right("RUNNING", group.running),
            ])
        });
        table(out, screen, &present.collect::<Vec<_>>())?;
        writeln!(out)?;
        let times = |times: &Times| or_dash(times.summary().map(|(_, p50, p99)| format!("{p50} {p99}")));
        let ended = groups().filter(|group| group.done + group.failed + group.cancelled + group.not_kept > 0).map(|group| {
            Row::from([
                left("ENDED", name(group)).cut_to(8),
                right("DONE", group.done),
                right("FAILED", group.failed),
                right("CANCELLED", group.cancelled),
                right("DONE/S", format!("{:.2}", group.done_per_second)),
                right("LATENCY MS", times(&group.latency_ms)),
                right("RUNTIME MS", times(&group.execution_ms)),
            ])
        });
        let ended: Vec<Row> = ended.collect();
        let seconds = |milliseconds: i64| f64::from(u32::try_from(milliseconds).unwrap_or(u32::MAX)) / 1_000.0;
        let (seconds, not_kept_seconds) = (seconds(self.window_ms), seconds(self.not_kept_window_ms));
        if ended.is_empty() {
            return writeln!(out, "no job ended in the last {seconds:.1} s");
        }
        table(out, screen, &ended)?;
        let newest = if self.newest_only { format!(", only the newest {SAMPLED} jobs") } else { String::new() };
        writeln!(out, "ended: in the last {seconds:.1} s{newest}")?;
        for group in groups().filter(|group| group.not_kept > 0) {
            let of = group.name.as_ref().map_or_else(|| "all groups".into(), |_| format!("group {}", name(group)));
            writeln!(out, "done and not kept: about {} in the last {not_kept_seconds:.1} s, {of}", group.not_kept)?;
        }
        writeln!(out, "latency (from due to started) and runtime: median and 99th percentile")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

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
        let statistics = Statistics::of(now, &waiting, &running, finished, &NotKept::default());
        serde_json::to_value(statistics).unwrap()
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
        assert_eq!(statistics.groups[0].failed, 1);
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
        let json = serde_json::to_value(&statistics).unwrap();
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
