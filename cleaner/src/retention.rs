//! How long archived jobs stay in the archive: a period for all, and others for failures, for finish reasons
//! and for classes.
//!
//! Everything that has passed the longest period is deleted by its end alone. For each shorter period, the archive is walked by the ends of
//! jobs. The position of each walk is kept between passes, so that jobs with a longer period are not examined again in each pass. After a
//! restart the cleaner walks once over what the archive has.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

use chrono::TimeDelta;
use recruiter_common::{
    instant::Instant,
    job::FinishReason,
    store::{Covered, OtherClasses, Reasons, Store, StoreError, WalkStep},
    text::in_words,
};

use crate::Pass;

/// Maximum number of documents that one step examines and deletes. It is small, so that other operations do not wait long.
const STEP: u32 = 1_000;
/// How far a walk goes back in each pass, for jobs that came into the archive a while after they ended. One that came even later is deleted
/// when the longest period has passed.
const GO_BACK: TimeDelta = TimeDelta::minutes(1);

/// The periods. That of its class comes before that of a job's finish reason, and that before the period of failures.
#[derive(Clone, Debug)]
pub(crate) struct Periods {
    pub(crate) all: Duration,
    pub(crate) failures: Option<Duration>,
    pub(crate) reasons: BTreeMap<String, Duration>,
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
    /// The end of the last job that was examined; `None` before the first.
    position: Option<bson::DateTime>,
}

impl Periods {
    fn failures(&self) -> Duration {
        self.failures.unwrap_or(self.all)
    }

    /// The periods of the reasons that do not have the period of other failures by that alone.
    fn reasons(&self) -> BTreeMap<String, Duration> {
        let successes = [FinishReason::DONE, FinishReason::CANCELLED].map(|why| (why.as_str().to_owned(), self.all));
        successes.into_iter().chain(self.reasons.clone()).collect()
    }

    fn each(&self) -> impl Iterator<Item = Duration> {
        self.classes.values().chain(self.reasons.values()).copied().chain([self.all, self.failures()])
    }

    fn longest(&self) -> Duration {
        self.each().fold(self.all, Duration::max)
    }

    /// What each period covers that is shorter than the longest one.
    fn covered(&self) -> BTreeMap<Duration, Covered> {
        let of = |given: &BTreeMap<String, Duration>, is_wanted: &dyn Fn(Duration) -> bool| -> Vec<String> {
            given.iter().filter(|(_, period)| is_wanted(**period)).map(|(name, _)| name.clone()).collect()
        };
        let covered = |period: Duration| {
            let reasons = if self.failures() == period {
                Reasons::AllBut(of(&self.reasons(), &|other| other != period))
            } else {
                Reasons::Only(of(&self.reasons(), &|other| other == period))
            };
            let others = (reasons != Reasons::Only(Vec::new())).then(|| OtherClasses { except: of(&self.classes, &|_| true), reasons });
            Covered { classes: of(&self.classes, &|other| other == period), others }
        };
        let periods: BTreeSet<Duration> = self.each().filter(|period| *period < self.longest()).collect();
        periods.into_iter().map(|period| (period, covered(period))).collect()
    }
}

impl fmt::Display for Periods {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |what: &str, (name, period): (&String, &Duration)| format!("; {what} {name} {}", in_words(*period));
        let failures = self.failures.map(|period| format!("; failures {}", in_words(period)));
        let reasons = self.reasons.iter().map(|reason| named("reason", reason));
        let classes = self.classes.iter().map(|class| named("class", class));
        let others: String = failures.into_iter().chain(reasons).chain(classes).collect();
        write!(f, "{}{others}", in_words(self.all))
    }
}

impl Retention {
    pub(crate) fn new(periods: &Periods) -> Self {
        let walks = periods.covered().into_iter().map(|(period, covered)| Walk { period, covered, position: None });
        Self { longest: periods.longest(), walks: walks.collect() }
    }

    /// Deletes what has passed its period. Returns whether none of it is left.
    pub(crate) async fn tick(&mut self, store: &Store, pass: &Pass<'_>) -> Result<bool, StoreError> {
        let now = store.now();
        // A period longer than dates can express never passes.
        let before = |period: Duration| TimeDelta::from_std(period).ok().and_then(|period| now.checked_sub_signed(period));
        let mut all = match before(self.longest) {
            Some(before) => prune_all(store, before, pass).await?,
            None => true,
        };
        for walk in &mut self.walks {
            if let Some(before) = before(walk.period) {
                all &= walk.tick(store, before, pass).await?;
            }
        }
        Ok(all)
    }
}

/// Deletes the jobs that ended before `before`. Returns whether none are left.
async fn prune_all(store: &Store, before: Instant, pass: &Pass<'_>) -> Result<bool, StoreError> {
    let step = async |_| {
        let deleted = store.prune_archived(before, STEP.into()).await?;
        Ok(WalkStep { deleted, next: (deleted > 0).then_some(()) })
    };
    let (count, all) = pass.walk(&mut None, step).await?;
    note(count, pass);
    Ok(all)
}

fn note(count: u64, pass: &Pass<'_>) {
    pass.meters.pruned(count);
    if count > 0 {
        tracing::info!(count, "pruned the archive");
    }
}

impl Walk {
    async fn tick(&mut self, store: &Store, before: Instant, pass: &Pass<'_>) -> Result<bool, StoreError> {
        let step = |position| store.prune_covered(&self.covered, position, before, STEP.into());
        let (count, all) = pass.walk(&mut self.position, step).await?;
        if all {
            self.position = before.checked_sub_signed(GO_BACK).map(bson::DateTime::from_chrono);
        }
        note(count, pass);
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    /// The days of a period, the classes that it covers, and the finish reasons of all others.
    type Expected<'a> = (u32, &'a [&'a str], Option<Reasons>);

    fn owned(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    fn check(failures: Option<u32>, reasons: &[(&str, u32)], classes: &[(&str, u32)], expected: &[Expected<'_>]) {
        let given = |days: &[(&str, u32)]| -> BTreeMap<String, Duration> {
            days.iter().map(|(name, days)| ((*name).to_owned(), DAY * *days)).collect()
        };
        let (reasons, classes) = (given(reasons), given(classes));
        let except: Vec<String> = classes.keys().cloned().collect();
        let periods = Periods { all: DAY * 5, failures: failures.map(|days| DAY * days), reasons, classes };
        let expected = expected.iter().cloned().map(|(days, classes, reasons)| {
            let others = reasons.map(|reasons| OtherClasses { except: except.clone(), reasons });
            (DAY * days, Covered { classes: owned(classes), others })
        });
        assert_eq!(periods.covered(), expected.collect(), "{periods:?}");
    }

    #[test]
    fn a_walk_covers_what_has_the_same_period_and_the_longest_period_needs_none() {
        let only = |reasons: &[&str]| Some(Reasons::Only(owned(reasons)));
        let all_but = |reasons: &[&str]| Some(Reasons::AllBut(owned(reasons)));
        let successes = ["cancelled", "done"];
        check(None, &[], &[], &[]);
        check(Some(5), &[], &[], &[]);
        check(Some(30), &[], &[], &[(5, &[], only(&successes))]);
        check(Some(1), &[], &[], &[(1, &[], all_but(&successes))]);
        check(None, &[], &[("mail", 1)], &[(1, &["mail"], None)]);
        check(None, &[], &[("audit", 90)], &[(5, &[], all_but(&[]))]);
        let classes = [("mail", 5), ("sms", 1), ("push", 1)];
        check(Some(30), &[], &classes, &[(1, &["push", "sms"], None), (5, &["mail"], only(&successes))]);
        check(None, &[("cancelled", 1)], &[], &[(1, &[], only(&["cancelled"]))]);
        check(None, &[("gave-up", 9)], &[], &[(5, &[], all_but(&["gave-up"]))]);
        let reasons = [("cancelled", 1), ("expired", 1), ("gave-up", 90)];
        check(
            Some(30),
            &reasons,
            &[("mail", 1)],
            &[
                (1, &["mail"], only(&["cancelled", "expired"])),
                (5, &[], only(&["done"])),
                (30, &[], all_but(&["cancelled", "done", "expired", "gave-up"])),
            ],
        );
    }
}
