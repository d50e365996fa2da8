//! The processes: who leads, who cleans, and which workers are dead.

use std::collections::BTreeSet;

use super::{Check, Finding, or_good};
use crate::{
    base::{Instant, in_words, printable},
    mongo::Store,
    operator::{
        cleaners::Cleaner,
        presence::{Leader, Presence, Worker},
    },
};

/// Maximum number of processes that are named in one finding.
const NAMED: usize = 5;

pub(super) async fn findings(store: &Store) -> Vec<Finding> {
    let mut findings = vec![match Leader::find(store).await {
        Ok(leader @ Leader::Leads(_)) => Finding::good(Check::Leader, leader.line()),
        Ok(absent) => Finding::error(Check::Leader, format!("{}; start `recruiter run`", absent.line())),
        Err(error) => Finding::unknown(Check::Leader, "read", &error),
    }];
    let (cleaners, workers) = (store.cleaners().await, Presence::find(store).await);
    match &cleaners {
        Ok(cleaners) => findings.extend(of_cleaners(cleaners)),
        Err(error) => findings.extend([Check::Cleaners, Check::Retention].map(|check| Finding::unknown(check, "read", error))),
    }
    match &workers {
        Ok(Presence(workers)) => findings.extend(of_workers(workers, store.now())),
        Err(error) => findings.push(Finding::unknown(Check::Workers, "read", error)),
    }
    if let (Ok(cleaners), Ok(Presence(workers))) = (&cleaners, &workers) {
        findings.push(of_releases(cleaners, workers));
    }
    findings
}

/// The cleaners that run, and whether they keep jobs for the same time.
fn of_cleaners(cleaners: &[Cleaner]) -> Vec<Finding> {
    let running: Vec<&Cleaner> = cleaners.iter().filter(|cleaner| !cleaner.is_silent()).collect();
    let Some(first) = running.first() else {
        let last = cleaners.iter().min_by_key(|cleaner| cleaner.seen_before);
        let last = last.map_or_else(String::new, |last| {
            format!(" (the last one, {}, was seen {} ago)", last.name, in_words(last.seen_before.to_std().unwrap_or_default()))
        });
        let text = format!("no cleaner runs{last}: jobs of dead workers are not rescued and the archive grows; start recruiter-cleaner");
        return vec![Finding::error(Check::Cleaners, text), Finding::good(Check::Retention, "no cleaner runs, so nothing is deleted")];
    };
    let names: Vec<&str> = running.iter().map(|cleaner| cleaner.name.as_str()).collect();
    let periods: BTreeSet<&str> = running.iter().map(|cleaner| cleaner.keeps.as_str()).collect();
    let retention = if periods.len() == 1 {
        Finding::good(Check::Retention, format!("archived jobs are kept for: {}", first.keeps))
    } else {
        let each: Vec<String> = running.iter().take(NAMED).map(|cleaner| format!("{} keeps {}", cleaner.name, cleaner.keeps)).collect();
        let text =
            format!("the cleaners keep jobs for different times, so the shortest ones hold: {}; give all the same flags", each.join("; "));
        Finding::warning(Check::Retention, text)
    };
    vec![Finding::good(Check::Cleaners, format!("running: {}", some_of(&names))), retention]
}

fn of_workers(workers: &[Worker], now: Instant) -> Vec<Finding> {
    let named = |which: &dyn Fn(&&Worker) -> bool| workers.iter().filter(which).map(|worker| worker.described(now)).collect::<Vec<_>>();
    let mut findings = Vec::new();
    let overdue = named(&|worker| worker.is_overdue());
    if !overdue.is_empty() {
        let text = format!("dead, and no cleaner has ended their jobs: {}; start recruiter-cleaner", some_of(&overdue));
        findings.push(Finding::error(Check::Workers, text));
    }
    let silent = named(&|worker| !worker.is_overdue() && !worker.is_retired && (worker.silent_for.is_some() || worker.is_late()));
    if !silent.is_empty() {
        let text = format!(
            "without a heartbeat for too long: {}; if the process lives, it is frozen, or its machine or MongoDB is overloaded",
            some_of(&silent)
        );
        findings.push(Finding::warning(Check::Workers, text));
    }
    let malformed = workers.iter().filter(|worker| worker.work_on.is_none()).count();
    if malformed > 0 {
        let text = format!("{malformed} documents of `roster` are not those of workers; delete them, if no worker has written them");
        findings.push(Finding::warning(Check::Workers, text));
    }
    let alive = workers.iter().filter(|worker| worker.is_alive()).count();
    if alive == 0 {
        findings.push(Finding::error(Check::Workers, "no worker runs: start `recruiter-worker` or your own worker program"));
    }
    let asked = workers.iter().filter(|worker| worker.is_alive() && worker.request.is_some()).count();
    let quiet = if asked == 0 { String::new() } else { format!(", of which {asked} were asked to be quiet or to stop") };
    or_good(findings, Check::Workers, format!("{alive} run{quiet}"))
}

/// Processes of different releases work together, for the time of an upgrade.
fn of_releases(cleaners: &[Cleaner], workers: &[Worker]) -> Finding {
    let of_workers = workers.iter().filter(|worker| worker.is_alive()).filter_map(|worker| worker.document.get_str("version").ok());
    let of_cleaners = cleaners.iter().filter(|cleaner| !cleaner.is_silent()).map(|cleaner| cleaner.version.as_str());
    let releases: BTreeSet<String> = of_workers.chain(of_cleaners).map(|version| printable(version, 40)).collect();
    let list = releases.into_iter().collect::<Vec<_>>();
    let own = env!("CARGO_PKG_VERSION");
    if list.iter().all(|release| release == own) {
        return Finding::good(Check::Releases, format!("all processes have {own}"));
    }
    let text = format!("the workers and cleaners have {}, this command {own}: end the upgrade within a day or two", list.join(" and "));
    Finding::warning(Check::Releases, text)
}

/// The first names of a list, and how many more there are.
fn some_of(names: &[impl AsRef<str>]) -> String {
    let named: Vec<&str> = names.iter().take(NAMED).map(AsRef::as_ref).collect();
    let more = if names.len() > NAMED { format!(" and {} more", names.len() - NAMED) } else { String::new() };
    format!("{}{more}", named.join(", "))
}
