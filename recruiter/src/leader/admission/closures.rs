//! Closures: which groups are in a maintenance window, and until when that holds.
//!
//! No job of the group starts in the window. Shortly before it, a job of the group goes to a free slot only, with a permit that MongoDB
//! accepts until the begin of the window. So also an assignment that arrives late starts nothing in the window.

use std::collections::HashMap;

use chrono::TimeDelta;
use recruiter_common::{
    instant::Instant,
    limits::{MaintenanceWindow, Settings},
    store::Maintenance,
};

/// How long before a window a job needs a permit. An assignment is started within this time, or not at all in most cases.
const SOON: TimeDelta = TimeDelta::seconds(3);

#[derive(Clone, Debug)]
struct Closure {
    windows: Vec<MaintenanceWindow>,
    state: Maintenance,
}

/// The groups that have maintenance windows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Closures(HashMap<String, Closure>);

impl Closures {
    /// Replaces the windows. Returns whether a group is closed now that was not.
    pub(crate) fn change(&mut self, settings: &Settings, now: Instant) -> bool {
        let before = std::mem::take(&mut self.0);
        let with_windows = settings.groups.iter().filter(|(_, group)| !group.maintenance.is_empty());
        self.0 = with_windows
            .map(|(name, group)| {
                let windows = group.maintenance.clone();
                let state = match before.get(name) {
                    Some(known) if known.windows == windows && until(known.state) > now => known.state,
                    _ => Maintenance::of(&windows, now),
                };
                (name.clone(), Closure { windows, state })
            })
            .collect();
        let was_closed = |name: &String| before.get(name).is_some_and(|before| is_closed(before.state));
        self.0.iter().any(|(name, closure)| is_closed(closure.state) && !was_closed(name))
    }

    /// Computes the states that have ended again. Returns whether a group is closed now that was not.
    pub(crate) fn refresh(&mut self, now: Instant) -> bool {
        let mut has_closed = false;
        for closure in self.0.values_mut().filter(|closure| until(closure.state) <= now) {
            let was_closed = is_closed(closure.state);
            closure.state = Maintenance::of(&closure.windows, now);
            has_closed |= is_closed(closure.state) && !was_closed;
        }
        has_closed
    }

    /// When the present window of this group ends.
    pub(crate) fn closed_until(&self, group: &str) -> Option<Instant> {
        match self.of(group)? {
            Maintenance::Closed(until) => Some(until),
            Maintenance::Open(_) => None,
        }
    }

    /// When the next window of this group begins, if that is soon.
    pub(crate) fn closes_soon(&self, group: &str, now: Instant) -> Option<Instant> {
        match self.of(group)? {
            Maintenance::Open(until) if until - now < SOON => Some(until),
            Maintenance::Open(_) | Maintenance::Closed(_) => None,
        }
    }

    /// When the next window begins or ends.
    pub(crate) fn next_change(&self) -> Option<Instant> {
        self.0.values().map(|closure| until(closure.state)).min()
    }

    fn of(&self, group: &str) -> Option<Maintenance> {
        if self.0.is_empty() { None } else { self.0.get(group).map(|closure| closure.state) }
    }
}

fn until(state: Maintenance) -> Instant {
    match state {
        Maintenance::Closed(until) | Maintenance::Open(until) => until,
    }
}

fn is_closed(state: Maintenance) -> bool {
    matches!(state, Maintenance::Closed(_))
}

#[cfg(test)]
mod tests {
    use recruiter_common::limits::GroupSettings;

    use super::*;

    #[test]
    fn a_group_is_closed_in_its_windows() {
        let noon = Instant::from_timestamp_millis(1_700_049_600_000).unwrap();
        let (at, minute) = (|seconds: i64| noon + TimeDelta::seconds(seconds), 60);
        let group = |text: &str| GroupSettings { maintenance: vec![text.parse().unwrap()], ..GroupSettings::default() };
        let settings = |text: &str| Settings { groups: [("mail".into(), group(text))].into(), ..Settings::default() };
        let mut closures = Closures::default();
        assert!(!closures.change(&settings("12:01-12:02 UTC"), at(0)));
        assert_eq!((closures.closed_until("mail"), closures.next_change()), (None, Some(at(minute))));
        assert_eq!([0, 57, 58].map(|second| closures.closes_soon("mail", at(second)).is_some()), [false, false, true]);
        assert!(!closures.refresh(at(59)) && closures.refresh(at(minute)), "it begins");
        assert_eq!((closures.closed_until("mail"), closures.closed_until("post")), (Some(at(2 * minute)), None));
        assert!(!closures.change(&settings("12:01-12:02 UTC"), at(61)) && !closures.refresh(at(2 * minute)));
        assert_eq!(closures.closed_until("mail"), None);
        assert!(closures.change(&settings("12:00-13:00 UTC"), at(2 * minute)), "a new window");
        assert!(!closures.change(&Settings::default(), at(2 * minute)) && closures.next_change().is_none());
    }
}
