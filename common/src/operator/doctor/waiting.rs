//! The jobs: due ones that no process runs, locked ones without a worker; and the settings that hold them back.

use std::collections::{BTreeMap, BTreeSet};

use bson::RawDocumentBuf;
use chrono::TimeDelta;

use super::{Check, Finding, State, or_good};
use crate::{
    base::{WorkerId, in_words, printable},
    cycle::LockedJobs,
    job::Lane,
    limits::Settings,
    mongo::{Store, StoreError, raw_id_of},
    operator::why::{LANES, Reason, Why, situation::Situation},
};

/// A due job that waits for longer than this should have a reason.
const OVERDUE: TimeDelta = TimeDelta::minutes(1);
/// Maximum number of reasons that are named.
const NAMED: usize = 10;
/// Maximum number of steps over `scheduled` in search of locked jobs; each reads some thousand entries of an index.
const STEPS: usize = 50;

pub(super) async fn findings(store: &Store) -> Vec<Finding> {
    let mut findings = vec![match stuck(store).await {
        Ok(finding) => finding,
        Err(error) => Finding::unknown(Check::Stuck, "read", &error),
    }];
    match waiting(store).await {
        Ok(more) => findings.extend(more),
        Err(error) => findings.push(Finding::unknown(Check::Waiting, "read", &error)),
    }
    match store.settings().await {
        Ok(settings) => findings.extend(of_settings(&settings)),
        Err(error) => findings.push(Finding::unknown(Check::Settings, "read", &error)),
    }
    findings
}

/// Locked jobs whose worker is not in the roster.
async fn stuck(store: &Store) -> Result<Finding, StoreError> {
    let (mut position, mut stuck, mut first, mut is_complete) = (None, 0, None, false);
    for _ in 0..STEPS {
        let LockedJobs { documents, registered, next } = store.locked_jobs(position).await?;
        let is_orphan = |job: &&RawDocumentBuf| holder_of(job).is_none_or(|worker| !registered.contains(&worker));
        let orphans = documents.iter().filter(is_orphan);
        for job in orphans {
            stuck += 1;
            first = first.or_else(|| raw_id_of(job));
        }
        position = next;
        is_complete = position.is_none();
        if is_complete {
            break;
        }
    }
    let part = if is_complete { "" } else { " among the oldest jobs" };
    Ok(match first {
        Some(job) => Finding::warning(
            Check::Stuck,
            format!(
                "{stuck} jobs{part} are locked by workers that are not in the roster, such as {job}: a cleaner ends these executions in its \
                 next sweep, so check that recruiter-cleaner runs"
            ),
        ),
        None => Finding::good(Check::Stuck, format!("no job{part} is locked by a worker that is gone")),
    })
}

fn holder_of(job: &RawDocumentBuf) -> Option<WorkerId> {
    Some(WorkerId::from(job.get_document("last_execution").ok()?.get_object_id("worker").ok()?))
}

/// The reasons why lanes with jobs that have been due for a minute do not move.
async fn waiting(store: &Store) -> Result<Vec<Finding>, StoreError> {
    let now = store.now();
    let waiting = store.waiting(now, now - OVERDUE).await?;
    let overdue: u64 = waiting.values().map(|group| group.overdue).sum();
    let due: u64 = waiting.values().map(|group| group.queued).sum();
    let groups = waiting.into_iter().filter(|(_, counts)| counts.overdue > 0).map(|(group, _)| group);
    let lanes = store.first_lanes(groups, LANES).await?;
    let situation = Situation::read(store, &lanes).await?;
    let mut reasons: BTreeMap<(Reason, String), (Why, BTreeSet<&str>)> = BTreeMap::new();
    for lane in &lanes {
        let lane_without_gate = Lane { gate: None, ..lane.clone() };
        if let Some(why) = situation.why_not_taken(&lane_without_gate).or_else(|| situation.why_refused(lane)) {
            reasons.entry((why.reason, why.text.clone())).or_insert_with(|| (why, BTreeSet::new())).1.insert(&lane.group);
        }
    }
    let all = reasons.len();
    let mut findings: Vec<Finding> = reasons.into_values().take(NAMED).map(|(why, groups)| of_reason(&why, &groups)).collect();
    if all > NAMED {
        findings.push(Finding::warning(Check::Waiting, format!("{} more reasons: `recruiter stats` has them", all - NAMED)));
    }
    let good = match overdue {
        0 => format!("{due} due jobs; none has been due for longer than {}", in_words(OVERDUE.to_std().unwrap_or_default())),
        some => format!("{due} due jobs, {some} of them for longer than a minute: they wait for free slots"),
    };
    Ok(or_good(findings, Check::Waiting, good))
}

/// What a person has decided, or what passes, is no fault.
fn of_reason(why: &Why, groups: &BTreeSet<&str>) -> Finding {
    let named: Vec<String> = groups.iter().take(3).map(|group| printable(group, 60)).collect();
    let more = if groups.len() > named.len() { format!(" and {} more", groups.len() - named.len()) } else { String::new() };
    let text = format!("due jobs of {}{more} wait, {}: {}", named.join(", "), why.reason, why.text);
    let are_lost =
        [Reason::NoWorker, Reason::WorkerSilent, Reason::LimitUndefined, Reason::LimitInvalid, Reason::NoCleaner].contains(&why.reason);
    let state = if are_lost {
        State::Error
    } else if why.reason == Reason::Paused {
        State::Warning
    } else {
        State::Good
    };
    Finding::new(Check::Waiting, state, text)
}

fn of_settings(settings: &Settings) -> Vec<Finding> {
    let invalid = settings.invalid.iter().map(|name| match name.strip_prefix('@') {
        Some(group) => format!(
            "the document of the group `{}` in `groups` is not valid: its jobs wait; correct it with `recruiter groups set`",
            printable(group, 80)
        ),
        None => format!(
            "the document of the limit `{}` in `limits` is not valid: its jobs wait; correct it with `recruiter limits set`",
            printable(name, 80)
        ),
    });
    let pauses =
        settings.invalid_pauses.iter().map(|name| format!("the document `{}` in `pauses` pauses nothing: delete it", printable(name, 80)));
    let findings = invalid.chain(pauses).take(NAMED).map(|text| Finding::warning(Check::Settings, text)).collect();
    let (limits, groups, pauses) = (settings.limits.len(), settings.groups.len(), settings.pauses.len());
    or_good(findings, Check::Settings, format!("{limits} limits, settings of {groups} groups, {pauses} pauses; all are valid"))
}
