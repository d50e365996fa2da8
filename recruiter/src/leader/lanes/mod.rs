//! Searching: which lanes have jobs, and which of their jobs are due.
//!
//! | module | content |
//! |---|---|
//! | `windows` | the known due jobs of each lane, and when that knowledge is stale |
//! | `discover` | lists the lanes that have jobs |
//! | `search` | fills the stale windows |

pub(crate) mod discover;
pub(crate) mod search;
pub(crate) mod windows;

use std::collections::{BTreeSet, HashSet};

use recruiter_common::{
    ids::JobId,
    instant::Instant,
    store::{ScheduledJob, StoreError},
};

use self::{discover::Discovery, windows::Windows};
use crate::leader::{database::Database, fleet::Kind};

/// Maximum number of groups with news that are kept while no worker accepts jobs. If there are more, a full scan costs less.
const NEWS: usize = 100;

/// What is known of the lanes that have jobs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lanes {
    pub(crate) windows: Windows,
    pub(crate) discovery: Discovery,
    /// Groups that were announced and not listed yet, because no worker accepted jobs.
    news: BTreeSet<String>,
    /// Groups that hints had named when the scan of this round began.
    hinted: BTreeSet<String>,
    /// Jobs that the searches of this round have found, and that were due without a hint.
    unannounced: HashSet<JobId>,
    /// Whether lanes with room are left to search.
    has_unsearched: bool,
    /// Maximum number of jobs in one search; `None` while MongoDB is fast enough.
    at_most: Option<usize>,
}

impl Lanes {
    /// Drops what a failed round may have made wrong.
    pub(crate) fn forget(&mut self) {
        self.windows.forget();
        self.discovery.forget();
        self.unannounced.clear();
    }

    /// Sets the groups whose lanes are divided by priority.
    pub(crate) fn set_ageing(&mut self, groups: BTreeSet<String>) {
        if self.windows.set_ageing(groups) {
            self.discovery.forget();
        }
    }

    /// Requests an audit: a full scan that finds unannounced jobs. A scan that takes several rounds is completed first.
    pub(crate) fn request_audit(&mut self) {
        if !self.discovery.is_scanning() {
            self.windows.request_audit();
        }
    }

    /// Requests a full scan, unless one is under way.
    pub(crate) fn request_scan(&mut self) {
        if !self.discovery.is_scanning() {
            self.windows.request_scan();
        }
    }

    /// Adds groups with due jobs.
    pub(crate) fn add_groups(&mut self, groups: BTreeSet<String>) {
        self.news.extend(groups);
    }

    /// No worker accepts jobs, so nothing is searched. After a full scan, or very many hints, the next search begins with a full scan. One
    /// that takes several rounds goes on: if it began anew each time, it might never list the last groups.
    pub(crate) fn without_slots(&mut self, is_full_scan: bool) {
        if !self.discovery.is_scanning() && (is_full_scan || self.news.len() > NEWS) {
            self.discovery.forget();
            self.windows.request_scan();
            self.news.clear();
        }
    }

    /// Adds announced jobs. They are not unannounced any more.
    pub(crate) fn announce(&mut self, jobs: Vec<ScheduledJob>, is_new: impl Fn(&ScheduledJob) -> bool) {
        jobs.iter().for_each(|job| _ = self.unannounced.remove(&job.id));
        if !jobs.is_empty() {
            self.has_unsearched |= self.windows.announce(jobs.into_iter().filter(is_new));
        }
    }

    /// How many of these jobs the searches of this round have found, although no hint had announced them.
    pub(crate) fn count_unannounced(&mut self, assigned: &HashSet<JobId>) -> usize {
        std::mem::take(&mut self.unannounced).intersection(assigned).count()
    }

    /// Whether some lanes are not listed, or not searched although there are slots.
    pub(crate) fn are_incomplete(&self, has_slots: bool) -> bool {
        self.discovery.is_incomplete() || (self.has_unsearched && has_slots)
    }

    /// Finds the lanes that may have jobs: all of them in a full scan, otherwise those of new kinds of workers and of announced groups.
    /// The kinds include those whose workers are busy now: a stale lane is searched when they accept jobs.
    async fn discover(&mut self, store: &impl Database, kinds: &[Kind], now: Instant, until: Instant) -> Result<(), StoreError> {
        let all: Vec<&Kind> = kinds.iter().collect();
        let Self { windows, discovery, news, hinted, .. } = self;
        let is_scanning = discovery.is_scanning();
        if discovery.is_incomplete() {
            let lanes = discovery.list_some(store, &all).await?;
            lanes.into_iter().for_each(|lane| windows.list(lane));
        }
        if !is_scanning && windows.needs_scan(now) {
            *hinted = std::mem::take(news);
            hinted.extend(discovery.take_news());
            let lanes = discovery.lanes_of_all(store, &all, &all, until).await?;
            windows.begin_scan(lanes, 0..kinds.len(), until, |lane| discovery.will_list(lane));
        }
        if !news.is_empty() {
            let lanes = discovery.lanes_of_groups(store, &all, std::mem::take(news), until).await?;
            lanes.into_iter().for_each(|lane| windows.list(lane));
        }
        let unscanned = windows.unscanned(0..kinds.len());
        // A worker of a new kind may have come while lanes were listed in steps.
        if !discovery.is_scanning() && !unscanned.is_empty() {
            let some: Vec<&Kind> = unscanned.iter().map(|kind| &kinds[*kind]).collect();
            let lanes = discovery.lanes_of_all(store, &all, &some, until).await?;
            lanes.into_iter().for_each(|lane| windows.list(lane));
            windows.scanned_for(unscanned);
        }
        windows.learn_kinds(kinds);
        Ok(())
    }
}
