//! The overview: throughput, failures and latency, and what waits and why. All who look at it share one reading.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use askama::Template;
use axum::{Extension, extract::State};
use chrono::TimeDelta;
use recruiter_common::{
    instant::Instant,
    store::{Finished, Store, StoreError},
    text::{briefly_apart, in_words, moment, printable},
    workers::Leader,
};

use super::{
    super::{Shared, Web, problem::Problem, requests::Parameters},
    chart::Charts,
    frame::{Answer, Frame, page},
    recent::Recent,
    visitor::Visitor,
    words::{at_least, link},
};
use crate::views::{
    counts::{GroupCounts, counted},
    stats::{GroupStatistics, PERIOD, Reasons, Statistics},
    workers::no_cleaner,
};

/// Periods of the charts.
const HOUR: TimeDelta = TimeDelta::hours(1);
const DAY: TimeDelta = TimeDelta::days(1);
/// Maximum number of lanes of waiting jobs that are examined.
const LANES: usize = 200;
/// Maximum number of reasons and of groups shown.
const REASONS: usize = 20;

/// What is read for the overview and the groups.
pub(super) struct Overview {
    pub(super) at: Instant,
    leader: Leader,
    workers: usize,
    silent: usize,
    overdue: usize,
    pub(super) groups: Vec<GroupCounts>,
    /// How many groups are behind these in the alphabet.
    pub(super) more_groups: usize,
    /// What ended in the last minute.
    total: GroupStatistics,
    charts: Arc<Charts>,
    /// Why due jobs wait, with their groups.
    reasons: Vec<Reason>,
}

#[derive(Clone)]
struct Reason {
    name: &'static str,
    text: String,
    groups: String,
}

impl Overview {
    /// The shared reading.
    pub(super) async fn of(web: &Web) -> Result<Arc<Self>, Problem> {
        let (store, ended) = (web.store.clone(), web.kept.ended_in_hour.clone());
        web.kept.overview.get(&web.tasks, async move { Ok(Self::read(&store, &mut *ended.lock().await).await?) }).await
    }

    async fn read(store: &Store, ended: &mut Recent) -> Result<Self, StoreError> {
        let at = store.now();
        let (finished, not_kept, running) = tokio::try_join!(ended.read(store, at, HOUR), store.not_kept(at - PERIOD), store.running())?;
        let recent: Vec<Finished> = finished.iter().filter(|job| job.ended_at > at - PERIOD).cloned().collect();
        let statistics = Statistics::of(at, &BTreeMap::new(), &running, &recent, &not_kept);
        let rates: BTreeMap<String, f64> =
            statistics.groups.iter().filter_map(|group| Some((group.name.clone()?, group.done_per_second))).collect();
        let (groups, more_groups) = counted(store, at, &rates).await?;
        let waiting = groups.iter().filter(|group| group.due > 0).map(|group| group.name.clone());
        let Reasons { untaken, held, leader, workers, .. } = Reasons::read(store, waiting.collect::<Vec<_>>(), LANES).await?;
        let mut by_text: BTreeMap<(&'static str, &str), BTreeSet<&str>> = BTreeMap::new();
        for blocked in untaken.iter().chain(&held) {
            by_text.entry((blocked.why.reason.name(), &blocked.why.text)).or_default().insert(&blocked.lane.group);
        }
        let reasons = by_text.into_iter().take(REASONS).map(|((name, text), groups)| {
            let groups: Vec<&str> = groups.into_iter().take(REASONS).collect();
            Reason { name, text: text.to_owned(), groups: printable(&groups.join(", "), 200) }
        });
        Ok(Self {
            at,
            leader,
            workers: workers.0.iter().filter(|worker| worker.is_alive()).count(),
            silent: workers.0.iter().filter(|worker| !worker.is_alive() && !worker.is_retired).count(),
            overdue: workers.0.iter().filter(|worker| worker.is_overdue()).count(),
            groups,
            more_groups,
            total: statistics.total,
            charts: Charts::of(finished, at, HOUR).into(),
            reasons: reasons.collect(),
        })
    }
}

#[derive(Template)]
#[template(path = "overview.html")]
struct OverviewPage {
    frame: Frame,
    at: String,
    leader: String,
    is_led: bool,
    no_cleaner: Option<String>,
    tiles: Vec<(&'static str, String, Option<String>)>,
    chart: Arc<Charts>,
    period: String,
    periods: [(&'static str, &'static str, bool); 2],
    reasons: Vec<Reason>,
    groups: Vec<Row>,
    more_groups: usize,
}

struct Row {
    name: String,
    path: String,
    due: String,
    oldest: String,
    running: u64,
    rate: String,
    is_paused: bool,
}

impl Row {
    fn of(group: &GroupCounts, now: Instant) -> Self {
        Self {
            name: printable(&group.name, 80),
            path: link("/jobs", [("group", &*group.name)]),
            due: at_least(group.due, group.has_more),
            oldest: group.oldest.map_or_else(String::new, |at| briefly_apart(at, now)),
            running: group.running,
            rate: format!("{:.2}", group.done_per_second),
            is_paused: group.is_paused,
        }
    }
}

fn is_day(period: &str) -> Result<bool, String> {
    match period {
        "1h" => Ok(false),
        "24h" => Ok(true),
        _ => Err(format!("`{period:.80}` is neither `1h` nor `24h`")),
    }
}

/// What ended in the last day, or in a part of it with as many jobs as are read.
async fn day(web: &Web) -> Result<Arc<Charts>, Problem> {
    let (store, ended) = (web.store.clone(), web.kept.ended_in_day.clone());
    let read = async move {
        let at = store.now();
        Ok(Charts::of(ended.lock().await.read(&store, at, DAY).await?, at, DAY))
    };
    web.kept.day.get(&web.tasks, read).await
}

/// Shows the overview.
pub(super) async fn show(State(web): Shared, Extension(visitor): Extension<Visitor>, mut given: Parameters) -> Answer {
    let is_day = given.take("period", is_day)?.unwrap_or_default();
    given.end()?;
    let read = Overview::of(&web).await?;
    let chart = if is_day { day(&web).await? } else { read.charts.clone() };
    let sum = |of: fn(&GroupCounts) -> u64| {
        at_least(read.groups.iter().map(of).sum(), read.more_groups > 0 || read.groups.iter().any(|group| group.has_more))
    };
    let failed_lately = link("/jobs", [("state", "failed"), ("since", "1h")]);
    let milliseconds = |value: Option<u64>| value.map_or_else(|| "-".into(), |value| format!("{value} ms"));
    let (p50, p99) = read.total.latency_ms.summary().map(|(_, p50, p99)| (p50, p99)).unzip();
    let tiles = vec![
        ("Due", sum(|group| group.due), Some("/jobs?state=queued".into())),
        ("Due later", sum(|group| group.later), Some("/jobs?state=postponed".into())),
        ("Running", read.total.running.to_string(), Some("/jobs?state=running".into())),
        ("Done per second", format!("{:.2}", read.total.done_per_second), None),
        ("Failed, 1 min", read.total.failed.to_string(), Some(failed_lately)),
        ("Latency p50", milliseconds(p50), None),
        ("Latency p99", milliseconds(p99), None),
        (
            "Workers",
            read.workers.to_string() + &if read.silent > 0 { format!(", {} silent", read.silent) } else { String::new() },
            Some("/workers".into()),
        ),
    ];
    page(&OverviewPage {
        frame: Frame::new(visitor, "/", "Overview"),
        at: moment(read.at),
        leader: printable(&read.leader.line(), 400),
        is_led: !read.leader.is_missing(),
        no_cleaner: no_cleaner(read.overdue),
        tiles,
        period: in_words(chart.period.to_std().unwrap_or_default()),
        periods: [("Last hour", "/", !is_day), ("Last day", "/?period=24h", is_day)],
        chart,
        reasons: read.reasons.clone(),
        groups: read.groups.iter().take(REASONS).map(|group| Row::of(group, read.at)).collect(),
        more_groups: read.groups.len().saturating_sub(REASONS) + read.more_groups,
    })
}
