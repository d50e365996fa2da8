//! How long finished jobs stay in the archive: a period for all, and others for failures and for classes.
//!
//! Everything that has passed the longest period is deleted by its end alone. For each shorter period, the archive is walked by the ends of
//! jobs. The position of each walk is kept between passes, so that jobs with a longer period are not examined again in each pass. After a
//! restart the cleaner walks once over what the archive has.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use chrono::TimeDelta;
use recruiter_common::{
    instant::Instant,
    shutdown::Shutdown,
    store::{Covered, OtherClasses, RetentionPosition, Store, StoreError},
};

use crate::prune;

/// Maximum number of documents that one step examines and deletes. It is small, so that other operations do not wait long.
const STEP: u64 = 1_000;
/// Maximum number of steps of each walk in one pass. Between two passes the cleaner polls the roster.
const STEPS: usize = 10;
/// How far a walk goes back in each pass, for jobs that came into the archive a while after they ended. One that came even later is deleted
/// when the longest period has passed.
const GO_BACK: TimeDelta = TimeDelta::minutes(1);

/// The periods.
#[derive(Clone, Debug)]
pub(crate) struct Periods {
    pub(crate) all: Duration,
    pub(crate) failures: Option<Duration>,
    pub(crate) classes: BTreeMap<String, Duration>,
}

/// The walks over the archive.
#[derive(Debug)]
pub(crate) struct Retention {
    longest: Duration,
    walks: Vec<Walk>,
}

#[derive(Debug)]
struct Walk {
    period: Duration,
    covered: Covered,
    position: RetentionPosition,
}

impl Periods {
    fn longest(&self) -> Duration {
        self.classes.values().copied().chain(self.failures).fold(self.all, Duration::max)
    }

    /// What each period covers that is shorter than the longest one.
    fn covered(&self) -> BTreeMap<Duration, Covered> {
        let failures = self.failures.unwrap_or(self.all);
        let periods: BTreeSet<Duration> = self.classes.values().copied().chain([self.all, failures]).collect();
        let covered = |period: Duration| {
            let classes = self.classes.iter().filter(|(_, given)| **given == period).map(|(class, _)| class.clone());
            let (successes, failures) = (self.all == period, failures == period);
            let except = self.classes.keys().cloned().collect();
            Covered { classes: classes.collect(), others: (successes || failures).then_some(OtherClasses { except, successes, failures }) }
        };
        periods.into_iter().filter(|period| *period < self.longest()).map(|period| (period, covered(period))).collect()
    }
}

impl Retention {
    pub(crate) fn new(periods: &Periods) -> Self {
        let walks = periods.covered().into_iter().map(|(period, covered)| Walk { period, covered, position: None });
        Self { longest: periods.longest(), walks: walks.collect() }
    }

    /// Deletes what has passed its period. Returns whether none of it is left.
    pub(crate) async fn tick(&mut self, store: &Store, shutdown: &Shutdown) -> Result<bool, StoreError> {
        let now = store.now();
        // A period longer than dates can express never passes.
        let before = |period: Duration| TimeDelta::from_std(period).ok().and_then(|period| now.checked_sub_signed(period));
        let mut all = match before(self.longest) {
            Some(before) => prune::tick(store, before, shutdown).await?,
            None => true,
        };
        for walk in &mut self.walks {
            if let Some(before) = before(walk.period) {
                all &= walk.tick(store, before, shutdown).await?;
            }
        }
        Ok(all)
    }
}

impl Walk {
    async fn tick(&mut self, store: &Store, before: Instant, shutdown: &Shutdown) -> Result<bool, StoreError> {
        let (mut count, mut all) = (0, false);
        for _ in 0..STEPS {
            if shutdown.is_requested() {
                break;
            }
            let step = store.prune_covered(&self.covered, self.position, before, STEP).await?;
            count += step.deleted;
            if step.next.is_none() {
                self.position = before.checked_sub_signed(GO_BACK).map(bson::DateTime::from_chrono);
                all = true;
                break;
            }
            self.position = step.next;
        }
        if count > 0 {
            tracing::info!(count, "pruned the archive");
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    /// The days of a period, the classes that it covers, and whether it covers successes and failures of all others.
    type Expected<'a> = (u32, &'a [&'a str], Option<(bool, bool)>);

    fn check(failures: Option<u32>, classes: &[(&str, u32)], expected: &[Expected<'_>]) {
        let classes: BTreeMap<String, Duration> = classes.iter().map(|(class, days)| ((*class).to_owned(), DAY * *days)).collect();
        let periods = Periods { all: DAY * 5, failures: failures.map(|days| DAY * days), classes: classes.clone() };
        let except: Vec<String> = classes.into_keys().collect();
        let expected = expected.iter().map(|(days, classes, others)| {
            let others = others.map(|(successes, failures)| OtherClasses { except: except.clone(), successes, failures });
            (DAY * *days, Covered { classes: classes.iter().map(|class| (*class).to_owned()).collect(), others })
        });
        assert_eq!(periods.covered(), expected.collect(), "{periods:?}");
    }

    #[test]
    fn a_walk_covers_what_has_the_same_period_and_the_longest_period_needs_none() {
        check(None, &[], &[]);
        check(Some(5), &[], &[]);
        check(Some(30), &[], &[(5, &[], Some((true, false)))]);
        check(Some(1), &[], &[(1, &[], Some((false, true)))]);
        check(None, &[("mail", 1)], &[(1, &["mail"], None)]);
        check(None, &[("audit", 90)], &[(5, &[], Some((true, true)))]);
        check(Some(30), &[("mail", 5), ("sms", 1), ("push", 1)], &[(1, &["push", "sms"], None), (5, &["mail"], Some((true, false)))]);
    }
}
