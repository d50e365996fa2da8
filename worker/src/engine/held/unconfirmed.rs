//! Unconfirmed starts: starts of this session that have locked jobs, or may still lock them, and whose jobs the session does not run.
//!
//! A job can be in here and have a phase as well: if the reply of its start was lost, it may be unlocked, and be assigned again.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use recruiter_common::{
    ids::{JobId, StartId},
    instant::Instant,
    job::Claim,
};

use super::Held;

/// How long after the end of its lease the jobs of a start are searched. A start that began in time may finish late.
const SEARCHED_FOR: Duration = Duration::from_secs(30);

/// The unconfirmed starts of a session. Only ids are kept, since jobs may be large.
#[derive(Default)]
pub(super) struct Unconfirmed {
    starts: HashMap<StartId, Start>,
    /// When their jobs were last released, by the server's clock.
    released: Instant,
    /// Whether jobs that these starts have locked are not released yet, or may not be.
    has_unreleased: bool,
}

struct Start {
    jobs: HashSet<JobId>,
    /// By the server's clock: MongoDB refuses the start if it begins after this date. A start that began earlier may still finish.
    until: Instant,
}

impl Unconfirmed {
    /// The jobs that may be locked.
    pub(super) fn jobs(&self) -> impl Iterator<Item = JobId> {
        let may_lock = |start: &&Start| self.has_unreleased || start.until > self.released;
        self.starts.values().filter(may_lock).flat_map(|start| start.jobs.iter().copied())
    }
}

impl Held {
    /// Adds a start that may begin until `until`, with the jobs that are not run.
    pub(crate) fn unconfirm(&self, start: StartId, jobs: HashSet<JobId>, until: Instant) {
        self.known.lock().unconfirmed.starts.insert(start, Start { jobs, until });
    }

    /// The unconfirmed starts, whose jobs are to be released now.
    pub(crate) fn begin_release(&self) -> HashMap<StartId, Vec<JobId>> {
        let unconfirmed = &mut self.known.lock().unconfirmed;
        unconfirmed.has_unreleased = true;
        unconfirmed.starts.iter().map(|(start, Start { jobs, .. })| (*start, jobs.iter().copied().collect())).collect()
    }

    /// Notes that these jobs are released.
    pub(crate) fn note_released(&self, claims: &[Claim]) {
        let starts = &mut self.known.lock().unconfirmed.starts;
        for claim in claims {
            if let Some(start) = starts.get_mut(&claim.start()) {
                start.jobs.remove(&claim.job());
            }
        }
    }

    /// Notes that all jobs are released that were locked at `now`, but for those that MongoDB has refused. Removes the starts that can no
    /// longer lock jobs.
    pub(crate) fn end_release(&self, now: Instant, has_refused: bool) {
        let unconfirmed = &mut self.known.lock().unconfirmed;
        (unconfirmed.released, unconfirmed.has_unreleased) = (now, has_refused);
        unconfirmed.starts.retain(|_, start| !start.jobs.is_empty() && (has_refused || now <= start.until + SEARCHED_FOR));
    }

    /// The jobs of these starts that may be locked.
    pub(crate) fn unconfirmed(&self) -> HashSet<JobId> {
        self.known.lock().unconfirmed.jobs().collect()
    }
}
