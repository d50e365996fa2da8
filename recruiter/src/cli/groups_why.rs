//! `recruiter groups why`: why the waiting jobs of a group do not run, with the number of jobs for each reason.
//!
//! The same functions as for a single job (`recruiter jobs why`) judge the next job of each lane of the group. The jobs behind it wait for
//! the same reason.

use std::{collections::BTreeMap, io::Write};

use bson::doc;
use recruiter_common::{
    limits::line_of_gate,
    store::{COUNTED, ConnectArgs, Store},
};

use super::{
    output::{Format, json_line, printable},
    why::{Facts, Why, behind},
};

/// Maximum number of lanes that are examined.
const LANES: usize = 1_000;

/// Writes why the waiting jobs of a group do not run.
///
/// # Errors
/// When MongoDB cannot be used.
pub(super) async fn run(group: &str, format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter groups").await?;
    let now = store.now();
    let lanes = store.first_lanes([group.to_owned()], LANES).await?;
    let mut facts = Facts::find(&store, group, now).await?;
    let lines: Vec<&str> = lanes.iter().filter_map(|lane| lane.gate.as_deref()).filter(|gate| line_of_gate(gate).is_some()).collect();
    let heads = store.heads_of_lines(&lines).await?;
    for (gate, head) in &heads {
        head.halt.clone().into_iter().for_each(|pause| facts.admission.halt(gate, pause));
    }
    let mut reasons: BTreeMap<(&'static str, String), u64> = BTreeMap::new();
    let mut add = |Why { name, text, .. }: Why, jobs: u64| {
        if jobs > 0 {
            *reasons.entry((name, text)).or_default() += jobs;
        }
    };
    for lane in &lanes {
        let (mut due, later) = store.waiting_in_lane(lane, now).await?;
        add(Why::new("not-due", "their dates are in the future"), later);
        if let Some(why) = facts.why_nobody(lane) {
            add(why, due);
            continue;
        }
        if let Some(head) = lane.gate.as_ref().and_then(|gate| heads.get(gate)) {
            let is_here = !head.is_locked && head.job.lane() == *lane && head.job.scheduled_at <= now;
            let others = due.saturating_sub(u64::from(is_here));
            add(behind(lane.gate.as_deref().and_then(line_of_gate).unwrap_or_default(), head.job.id), others);
            due -= others;
        }
        if due > 0 {
            add(facts.why_not_now(&store, lane, "the next job is due").await?, due);
        }
    }
    write(group, &reasons, lanes.len() >= LANES, format, out)
}

fn write(
    group: &str,
    reasons: &BTreeMap<(&'static str, String), u64>,
    are_more: bool,
    format: Format,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let mut reasons: Vec<_> = reasons.iter().collect();
    reasons.sort_by(|(_, one), (_, other)| other.cmp(one));
    if format.json {
        let reason = |((name, text), jobs): &(&(&'static str, String), &u64)| {
            doc! { "reason": *name, "text": text, "jobs": i64::try_from(**jobs).unwrap_or(i64::MAX) }
        };
        let reasons: Vec<_> = reasons.iter().map(reason).collect();
        return Ok(json_line(out, doc! { "group": group, "reasons": reasons, "is_complete": !are_more })?);
    }
    if reasons.is_empty() {
        return Ok(writeln!(out, "no job waits in {}", printable(group, 60))?);
    }
    for ((name, text), jobs) in reasons {
        let or_more = if *jobs >= COUNTED { " or more" } else { "" };
        writeln!(out, "{jobs}{or_more} {name}: {text}")?;
    }
    if are_more {
        writeln!(out, "(the first {LANES} kinds of jobs were examined)")?;
    }
    Ok(())
}
