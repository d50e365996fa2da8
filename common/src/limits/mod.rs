//! Settings that operators change while the system runs: limits of resources and groups, and pauses.
//!
//! A job names the *resources* that it needs in its `gate` (`printer`, or several: `customer:17,printer`). Each resource has a [`Limit`]
//! in the collection `limits`: under its own name, or under a prefix that ends in `*`. A limit under a prefix holds for each resource with
//! that prefix by itself, so `customer:*` limits each customer. A group has its limit in the collection `groups`.
//!
//! A *capacity* is exact, because MongoDB enforces it. For each limited job that it runs, a worker holds one numbered permit of each resource,
//! for example `printer#0`. A unique index refuses a second worker with the same permit. The recruiter chooses numbers that are free,
//! and grants them with the assignment. When a job returns, its worker passes the permits on to the next job of the same group and gate, or
//! returns them with its next report. So a permit that stays with a worker costs nothing.
//!
//! Jobs in a *line* run one after the other in the order of enqueueing. A line is a resource with a capacity of one (`>invoice-7`), whose
//! next job is the one with the earliest `created_at`, and by `_id` among equals: whether it waits, runs, or is due later.
//!
//! A *rate* is exact too: each start has an interval of the server's clock in which it is allowed (see [`Rate`]).
//!
//! | file | content |
//! |---|---|
//! | `settings` | the settings of all limits, groups and pauses, read from their documents |
//! | `operations` | what an application calls: [`Limits`], [`Groups`], [`Pauses`] |
//! | `refusal` | whether the settings let the jobs of a lane start; the leader and `why` ask it |
//! | `rate`, `cells` | rates, and what the next leader must know of slow ones |
//! | `window`, `pause` | maintenance windows; what a pause covers |
//! | `backlogs`, `caps` | how many jobs wait, and how many may |
//!
//! A further setting of a group is in `settings` and `operations`, in the validator, the fields that are ours and the version of the schema
//! (`mongo/schema`), in `refusal` and the leader's `admission`, in the words of its refusal (`operator/why`), in a command (`cli/groups`), and in
//! what a process that executes its own jobs may take (the worker's `source/own`). What it counts of ended jobs is written by `cycle/effects`.

pub(crate) mod backlogs;
pub(crate) mod caps;
pub(crate) mod cells;
mod operations;
mod pause;
mod rate;
pub(crate) mod refusal;
pub(crate) mod settings;
pub(crate) mod window;

pub use self::backlogs::LARGEST_CAP;
pub(crate) use self::{
    cells::RateCell,
    refusal::{InUse, NotAdmitted},
    window::Maintenance,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

pub use self::{
    operations::{Groups, Limits, Pauses, SettingError},
    pause::{Pause, Paused},
    rate::Rate,
    window::MaintenanceWindow,
};
use crate::base::check_trimmed_name;
use crate::job::gate::{LINE, SEPARATOR};
use crate::job::{LONGEST_GATE, group_of_resource, line_of_gate};
pub use crate::mongo::schema::{LARGEST_CAPACITY, MOST_WINDOWS};

/// The weights that a group can have.
pub const WEIGHTS: std::ops::RangeInclusive<f64> = 0.001..=1_000_000.0;
/// The shortest and the longest time of [`GroupSettings::ageing`].
pub const AGEING: std::ops::RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(366 * 86_400);

/// A limit of a resource or of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limit {
    /// How many jobs may run at a time. `None`: any number.
    pub capacity: Option<u32>,
    /// How often jobs may start. `None`: at any rate.
    pub rate: Option<Rate>,
}

impl Limit {
    /// A limit with a capacity, a rate, or both. A limit with neither is refused when it is set.
    pub const fn new(capacity: Option<u32>, rate: Option<Rate>) -> Self {
        Self { capacity, rate }
    }

    /// At most so many jobs at a time, from 1 to [`LARGEST_CAPACITY`].
    pub const fn capacity(jobs: u32) -> Self {
        Self::new(Some(jobs), None)
    }

    /// Starts at most at this rate.
    pub const fn rate(rate: Rate) -> Self {
        Self::new(None, Some(rate))
    }
}

/// Why a text or a value is not a setting. One sentence, for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidSetting(pub(crate) String);

/// The settings of a group that decide when its jobs start.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub struct GroupSettings {
    /// The limit of the group.
    pub limit: Limit,
    /// The share of the group among groups with waiting jobs: a group with weight 2 gets twice as many starts as one with weight 1, the
    /// default. `None` for all groups: priorities and dates alone decide.
    pub weight: Option<f64>,
    /// A job that has waited for N times this time counts as N priorities higher, up to the highest one. `None`: priorities stay as they are.
    pub ageing: Option<Duration>,
    /// The times in which no job starts.
    pub maintenance: Vec<MaintenanceWindow>,
}

/// All settings, as the recruiter reads them.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub struct Settings {
    /// The limits of resources, by their name or prefix.
    pub limits: BTreeMap<String, Limit>,
    /// The settings of groups.
    pub groups: BTreeMap<String, GroupSettings>,
    /// The present pauses, except those of lines: these are read with the head of the line.
    pub pauses: BTreeMap<Paused, Pause>,
    /// The ids of documents in `limits` that are not valid, and those in `groups` after an `@`. What they would limit waits.
    pub invalid: BTreeSet<String>,
    /// The ids of documents in `pauses` that name nothing that can be paused. They pause nothing.
    pub invalid_pauses: BTreeSet<String>,
}

impl Settings {
    /// The limit of a resource: the one under its name, or else the one under the longest prefix. `None`: the resource has no limit.
    pub fn limit_of(&self, resource: &str) -> Option<Limit> {
        if line_of_gate(resource).is_some() {
            return Some(Limit::capacity(1));
        }
        if let Some(limit) = self.limits.get(resource) {
            return Some(*limit);
        }
        let prefix = |(name, limit): (&String, &Limit)| {
            let prefix = name.strip_suffix('*').filter(|prefix| resource.starts_with(prefix))?;
            Some((prefix.len(), *limit))
        };
        self.limits.iter().filter_map(prefix).max_by_key(|(length, _)| *length).map(|(_, limit)| limit)
    }

    /// The id of the invalid document that decides over a resource: under its name, or under a longer prefix than any valid one.
    pub fn invalid_for(&self, resource: &str) -> Option<&str> {
        if let Some(name) = self.invalid.get(resource) {
            return Some(name);
        }
        if self.invalid.is_empty() || self.limits.contains_key(resource) {
            return None;
        }
        let prefix = |name: &str| Some(name.strip_suffix('*').filter(|prefix| resource.starts_with(prefix))?.len());
        let valid = self.limits.keys().filter_map(|name| prefix(name)).max();
        let invalid = self.invalid.iter().filter_map(|name| Some((prefix(name)?, name.as_str()))).max();
        invalid.filter(|(length, _)| Some(*length) > valid).map(|(_, name)| name)
    }

    /// The pause that covers the jobs of this group and class.
    pub fn pause_of(&self, group: &str, class: &str) -> Option<(&Paused, &Pause)> {
        if self.pauses.is_empty() {
            return None;
        }
        let covers = |paused: &Paused| match paused {
            Paused::Everything => true,
            Paused::Group(paused) => paused == group,
            Paused::Class(paused) => paused == class,
            Paused::Line(_) => false,
        };
        self.pauses.iter().find(|(paused, _)| covers(paused))
    }

    /// Whether any group has a weight.
    pub fn has_weights(&self) -> bool {
        self.groups.values().any(|group| group.weight.is_some())
    }
}

pub(crate) fn check_limit(limit: Limit) -> Result<(), InvalidSetting> {
    let refused = |problem: String| Err(InvalidSetting(problem));
    match limit {
        Limit { capacity: None, rate: None } => refused("a limit has a capacity, a rate, or both".into()),
        Limit { capacity: Some(capacity), .. } if !(1..=LARGEST_CAPACITY).contains(&capacity) => {
            refused(format!("a capacity must be from 1 to {LARGEST_CAPACITY}, not {capacity}; to stop the jobs, pause them"))
        }
        Limit { .. } => Ok(()),
    }
}

/// Checks the name of a resource.
///
/// # Errors
/// When it is empty or too long, has a character with a meaning of its own, or begins or ends with a blank.
pub fn check_resource(name: &str) -> Result<(), InvalidSetting> {
    check_stored_resource(name)?;
    check_trimmed_name(name).map_err(|problem| InvalidSetting(format!("the name of a resource {problem}")))
}

/// Checks the name of a resource of a job that is enqueued again, or the key of a line.
///
/// # Errors
/// When it is empty or too long, or has a character with a meaning of its own.
pub(crate) fn check_stored_resource(name: &str) -> Result<(), InvalidSetting> {
    let refused = |problem: &str| Err(InvalidSetting(format!("the name of a resource {problem}: `{name:.80}`")));
    if name.is_empty() {
        return refused("is empty");
    }
    if name.len() > LONGEST_GATE - 8 {
        return refused("has more than 248 bytes");
    }
    if name.starts_with(['@', LINE]) || name.contains([SEPARATOR, '#', '*']) || name.chars().any(char::is_control) {
        return refused("must not begin with `@` or `>`, and must not contain `,`, `#`, `*` or control characters");
    }
    Ok(())
}

fn check_group(group: &str) -> Result<(), InvalidSetting> {
    let refused = |problem: String| InvalidSetting(format!("the name of a group {problem}"));
    check_trimmed_name(group).map_err(refused)?;
    if group.chars().any(char::is_control) { Err(refused(format!("contains a control character: {group:?}"))) } else { Ok(()) }
}

/// Checks the name of a limit: a resource, a prefix that ends in `*`, or a group after an `@`.
///
/// # Errors
/// When it is none of them.
pub fn check_limit_name(name: &str) -> Result<(), InvalidSetting> {
    if let Some(group) = group_of_resource(name) {
        return check_group(group);
    }
    match name.strip_suffix('*') {
        Some("") => Err(InvalidSetting("the prefix of a limit is empty: write at least one character before `*`".into())),
        // A blank before the `*` may be within the names.
        Some(prefix) => check_stored_resource(prefix).and_then(|()| check_resource(prefix.trim_end())),
        None => check_resource(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{
        Permit,
        gate::{gate_of, permit_name},
        resource_and_number, resources_in,
    };

    #[test]
    fn a_limit_is_found_by_name_and_else_by_the_longest_prefix() {
        let capacity = |capacity| Limit::capacity(capacity);
        let limits = [("customer:*", 1), ("customer:1*", 2), ("customer:17", 3)];
        let settings = Settings { limits: limits.map(|(name, number)| (name.into(), capacity(number))).into(), ..Settings::default() };
        let of = |resource| settings.limit_of(resource).and_then(|limit| limit.capacity);
        assert_eq!((of("customer:2"), of("customer:18"), of("customer:17"), of("printer")), (Some(1), Some(2), Some(3), None));
    }

    #[test]
    fn a_pause_covers_everything_a_group_or_a_class() {
        let pause = Pause { by: "ada".into(), reason: None, at: None };
        let check = |paused: &str| {
            let paused: Paused = paused.parse().unwrap();
            let settings = Settings { pauses: [(paused, pause.clone())].into(), ..Settings::default() };
            [("a", "x"), ("a", "y"), ("b", "x")].map(|(group, class)| settings.pause_of(group, class).is_some())
        };
        assert_eq!(check("everything"), [true; 3]);
        assert_eq!(check("group:a"), [true, true, false]);
        assert_eq!(check("class:x"), [true, false, true]);
        assert!(["", "group:", "a", "Everything", "class:"].iter().all(|text| text.parse::<Paused>().is_err()));
    }

    #[test]
    fn a_gate_lists_its_resources_once_and_in_order() {
        assert_eq!(gate_of(["printer", "customer:17", "printer"]).as_deref(), Some("customer:17,printer"));
        assert_eq!(gate_of([]), None);
        assert_eq!(resources_in("customer:17,printer").collect::<Vec<_>>(), ["customer:17", "printer"]);
        assert_eq!(resource_and_number(&permit_name("customer:17", 3)), Some(("customer:17", 3)));
        assert_eq!(resource_and_number("x#y"), None);
        assert_eq!(resources_in(">Smith, John").collect::<Vec<_>>(), [">Smith, John"]);
        let permit = Permit { gate: Some("a".into()), names: vec!["@mail#0".into(), "a#1".into()], ..Permit::default() };
        assert!(
            permit.is_for("mail", Some("a"))
                && !permit.is_for("post", Some("a"))
                && !permit.is_for("mail", Some("b"))
                && !permit.is_for("mail", None)
        );
        for wrong in ["", "a,b", "a#1", "@mail", "a*", "a\nb", " a", "a "] {
            assert!(check_resource(wrong).is_err(), "{wrong}");
        }
        assert!(["customer:*", "room *", "@mail"].iter().all(|name| check_limit_name(name).is_ok()));
        for wrong in ["*", "a*b", " a*", " *", "a ", "@", "@mail ", "@a\nb"] {
            assert!(check_limit_name(wrong).is_err(), "{wrong}");
        }
    }
}
