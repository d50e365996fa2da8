//! Small charts, drawn here: what ended in each part of a period.

use chrono::TimeDelta;
use hdrhistogram::Histogram;
use recruiter_common::{
    instant::Instant,
    job::Stage,
    store::{Finished, SAMPLED},
};

/// Parts of a period.
const PARTS: usize = 60;
/// Width of a part and height of a chart, in the units of the drawing.
const WIDTH: u64 = 10;
const HEIGHT: u64 = 90;

/// What ended in a period, in parts.
pub(super) struct Charts {
    pub(super) period: TimeDelta,
    pub(super) done: u64,
    pub(super) failed: u64,
    /// The most that ended in one part.
    pub(super) most: u64,
    /// Median and 99th percentile of the latency, in milliseconds.
    pub(super) latency: Option<(u64, u64)>,
    /// The highest 99th percentile of a part.
    pub(super) slowest: u64,
    pub(super) ends: Vec<Bar>,
    pub(super) latencies: Vec<Bar>,
}

/// A rectangle of a drawing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bar {
    pub(super) kind: &'static str,
    pub(super) x: u64,
    pub(super) y: u64,
    pub(super) height: u64,
}

#[derive(Clone)]
struct Part {
    done: u64,
    failed: u64,
    latency: Histogram<u32>,
}

impl Charts {
    /// `finished` are the newest jobs of the period before `now`, at most [`SAMPLED`]: if there are more, the period is shorter.
    pub(super) fn of(finished: &[Finished], now: Instant, period: TimeDelta) -> Self {
        let oldest = finished.iter().map(|job| job.ended_at).min().filter(|_| finished.len() >= SAMPLED);
        let period = oldest.map_or(period, |oldest| (now - oldest).clamp(TimeDelta::milliseconds(PARTS as i64), period));
        let empty = || Histogram::new(2).expect("two digits are between one and five");
        let (mut parts, mut all) = (vec![Part { done: 0, failed: 0, latency: empty() }; PARTS], empty());
        for job in finished {
            let ago = (now - job.ended_at).num_milliseconds().max(0);
            let at = usize::try_from(ago * PARTS as i64 / period.num_milliseconds().max(1)).unwrap_or(PARTS);
            let Some(part) = (PARTS - 1).checked_sub(at).and_then(|at| parts.get_mut(at)) else { continue };
            let stage = Stage::of_end(&job.why);
            part.done += u64::from(stage == Stage::Done);
            part.failed += u64::from(stage == Stage::Failed);
            if let (Some(due), Some(started)) = (job.scheduled_at, job.started_at) {
                let latency = u64::try_from((started - due).num_milliseconds()).unwrap_or(0);
                // Never fails: the histograms grow on demand.
                let _ = (part.latency.record(latency), all.record(latency));
            }
        }
        Self::drawn(&parts, &all, period)
    }

    fn drawn(parts: &[Part], all: &Histogram<u32>, period: TimeDelta) -> Self {
        let p99 = |part: &Part| if part.latency.is_empty() { 0 } else { part.latency.value_at_quantile(0.99) };
        let p50 = |part: &Part| if part.latency.is_empty() { 0 } else { part.latency.value_at_quantile(0.5) };
        let most = parts.iter().map(|part| part.done + part.failed).max().unwrap_or_default();
        let slowest = parts.iter().map(p99).max().unwrap_or_default();
        let (mut ends, mut latencies) = (Vec::new(), Vec::new());
        for (x, part) in (0..).map(|part| part * WIDTH).zip(parts) {
            let failed = scaled(part.failed, most);
            let done = scaled(part.done + part.failed, most) - failed;
            ends.push(Bar { kind: "failed", x, y: HEIGHT - failed, height: failed });
            ends.push(Bar { kind: "done", x, y: HEIGHT - failed - done, height: done });
            for (kind, value) in [("latency p99", p99(part)), ("latency p50", p50(part))] {
                let height = scaled(value, slowest);
                latencies.push(Bar { kind, x, y: HEIGHT - height, height });
            }
        }
        ends.retain(|bar| bar.height > 0);
        latencies.retain(|bar| bar.height > 0);
        Self {
            period,
            done: parts.iter().map(|part| part.done).sum(),
            failed: parts.iter().map(|part| part.failed).sum(),
            most,
            latency: (!all.is_empty()).then(|| (all.value_at_quantile(0.5), all.value_at_quantile(0.99))),
            slowest,
            ends,
            latencies,
        }
    }

    pub(super) fn width(&self) -> u64 {
        WIDTH * PARTS as u64
    }

    /// The width of a bar, with some space beside it.
    pub(super) fn bar(&self) -> u64 {
        WIDTH - 2
    }

    pub(super) fn height(&self) -> u64 {
        HEIGHT
    }
}

/// The height of a value: something that is not nothing is seen.
fn scaled(value: u64, most: u64) -> u64 {
    if value == 0 { 0 } else { (value * (HEIGHT - 2) / most.max(1)).max(2) }
}

#[cfg(test)]
mod tests {
    use recruiter_common::job::FinishReason;

    use super::*;

    #[test]
    fn what_ended_is_drawn_where_it_ended() {
        let now = Instant::UNIX_EPOCH + TimeDelta::hours(2);
        let job = |why, minutes: i64, latency: i64| {
            let ended_at = now - TimeDelta::minutes(minutes);
            let started_at = Some(ended_at);
            Finished { group: "g".into(), why, scheduled_at: Some(ended_at - TimeDelta::milliseconds(latency)), started_at, ended_at }
        };
        let failed = FinishReason::custom("gave-up");
        let jobs = [job(FinishReason::DONE, 0, 10), job(FinishReason::DONE, 59, 40), job(failed, 59, 40), job(FinishReason::DONE, 500, 1)];
        let charts = Charts::of(&jobs, now, TimeDelta::hours(1));
        assert_eq!((charts.done, charts.failed, charts.most, charts.slowest, charts.latency), (2, 1, 2, 40, Some((40, 40))));
        let (x, at): (Vec<u64>, Vec<&str>) = charts.ends.iter().map(|bar| (bar.x, bar.kind)).unzip();
        assert_eq!((x, at), (vec![0, 0, 590], vec!["failed", "done", "done"]));
        assert!(charts.ends.iter().chain(&charts.latencies).all(|bar| bar.y + bar.height <= HEIGHT), "{:?}", charts.ends);
        let none = Charts::of(&[], now, TimeDelta::hours(1));
        assert!(none.ends.is_empty() && none.latency.is_none());
    }
}
