//! Settings that operators change while the system runs: limits of resources and groups, and pauses.
//!
//! A job names the *resources* that it needs in its `gate` (`printer`, or several: `customer:17,printer`). Each resource has a [`Limit`]
//! in the collection `limits`: under its own name, or under a prefix that ends in `*`. A limit under a prefix holds for each resource with
//! that prefix by itself, so `customer:*` limits each customer. A group has its limit in the collection `groups`.
//!
//! A *capacity* is exact, because MongoDB enforces it: a job starts with one numbered [`Permit`] of each of its resources, for example
//! `printer#0`, and a unique index refuses a second running job with the same permit. The recruiter only chooses numbers that are free.
//!
//! Jobs in a *line* run one after the other in the order of enqueueing. A line is a resource with a capacity of one (`>invoice-7`), whose
//! next job is the one with the earliest `created_at`, and by `_id` among equals: whether it waits, runs, or is due later.
//!
//! A *rate* is exact too: each start has an interval of the server's clock in which it is allowed (see [`Rate`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
    time::Duration,
};

use crate::{
    enqueue::LONGEST_NAME,
    instant::Instant,
    store::{Store, StoreError},
};

/// Maximum number of running jobs of one resource.
pub const LARGEST_CAPACITY: u32 = 100_000;
/// Without a burst, starts are at least this far apart: an assignment takes some milliseconds to become a start.
const SLOWEST_WITHOUT_BURST: Duration = Duration::from_millis(100);
/// A burst covers at least this time at its rate.
const SHORTEST_BURST: Duration = Duration::from_millis(20);
/// A burst covers at most this time at its rate.
const LONGEST_BURST: Duration = Duration::from_secs(366 * 86_400);
/// Maximum length of a gate, in bytes.
pub const LONGEST_GATE: usize = LONGEST_NAME;
/// Separates the resources in a gate.
const SEPARATOR: char = ',';
/// The first character in the gate of a line.
const LINE: char = '>';

/// A limit of a resource or of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// How many jobs may run at a time. `None`: any number.
    pub capacity: Option<u32>,
    /// How often jobs may start. `None`: at any rate.
    pub rate: Option<Rate>,
}

/// At most `burst + starts / per · T` starts in any period of length T.
///
/// This is the generic cell rate algorithm (ITU-T I.371): each start takes the next *cell* of a clock that ticks every `per / starts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Number of starts in each period.
    pub starts: u32,
    /// The period.
    pub per: Duration,
    /// How many starts may follow each other at once.
    pub burst: u32,
}

impl Rate {
    /// The time between two starts at this rate, rounded up to nanoseconds.
    pub fn interval(self) -> Duration {
        let nanos = self.per.as_nanos().div_ceil(u128::from(self.starts.max(1)));
        u64::try_from(nanos).map_or(Duration::MAX, Duration::from_nanos)
    }
}

/// Why a text or a value is not a setting. One sentence, for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidSetting(pub(crate) String);

impl Rate {
    /// A rate.
    ///
    /// # Errors
    /// When a number is zero or too large, the period is not between 1 ms and 30 days, or the burst covers less than 20 ms or more than a year
    /// at this rate. Without a burst, starts must be at least 100 ms apart.
    pub fn new(starts: u32, per: Duration, burst: u32) -> Result<Self, InvalidSetting> {
        let refused = |problem: String| Err(InvalidSetting(problem));
        if starts == 0 || burst == 0 {
            return refused("a rate and its burst must be at least 1".into());
        }
        if per < Duration::from_millis(1) || per > Duration::from_secs(30 * 86_400) {
            return refused(format!("the period of a rate must be from 1ms to 30days, not {}", humantime::format_duration(per)));
        }
        if starts > 1_000_000 || burst > 1_000_000 || per / starts < Duration::from_micros(1) {
            return refused("a rate and its burst must be at most 1000000, and a rate at most one start in a microsecond".into());
        }
        let rate = Self { starts, per, burst };
        if burst == 1 && rate.interval() < SLOWEST_WITHOUT_BURST {
            return refused(format!(
                "a rate of more than one start in 100ms needs a burst of at least 2: `{starts}/{}`",
                humantime::format_duration(per)
            ));
        }
        let covered = rate.interval() * (burst - 1);
        if burst > 1 && covered < SHORTEST_BURST {
            let needed = SHORTEST_BURST.as_nanos().div_ceil(rate.interval().as_nanos()) + 1;
            return refused(format!("a burst of {burst} is over before an assignment arrives; use a burst of at least {needed}"));
        }
        if covered > LONGEST_BURST {
            return refused("a burst must not cover more than a year at its rate".into());
        }
        Ok(rate)
    }
}

/// `100/1s`, or `100/1s burst 20`. Without `burst`, the burst is the number of starts in a period.
impl FromStr for Rate {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        let example = || InvalidSetting(format!("`{text:.80}` is not a rate; write it like `100/1s`, or `100/1s burst 20`"));
        let (starts, rest) = text.split_once('/').ok_or_else(example)?;
        let (per, burst) = rest.split_once(" burst ").map_or((rest, None), |(per, burst)| (per, Some(burst)));
        let number = |text: &str| text.trim().parse().map_err(|_| example());
        let starts = number(starts)?;
        let per = humantime::parse_duration(per.trim()).map_err(|_| example())?;
        Self::new(starts, per, burst.map_or(Ok(starts), number)?)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} burst {}", self.starts, humantime::format_duration(self.per), self.burst)
    }
}

/// What one pause covers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Paused {
    /// Every job.
    Everything,
    /// The jobs of one group.
    Group(String),
    /// The jobs of one class.
    Class(String),
}

impl fmt::Display for Paused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Everything => f.write_str("everything"),
            Self::Group(group) => write!(f, "group:{group}"),
            Self::Class(class) => write!(f, "class:{class}"),
        }
    }
}

/// `everything`, `group:NAME` or `class:NAME`: the `_id` of a pause.
impl FromStr for Paused {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        match text.split_once(':') {
            None if text == "everything" => Ok(Self::Everything),
            Some(("group", group)) if !group.is_empty() => Ok(Self::Group(group.into())),
            Some(("class", class)) if !class.is_empty() => Ok(Self::Class(class.into())),
            _ => Err(InvalidSetting(format!("`{text:.80}` cannot be paused; write `everything`, `group:NAME` or `class:NAME`"))),
        }
    }
}

/// A pause: no job that it covers is assigned. Running jobs continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Who has paused.
    pub by: String,
    /// Why.
    pub reason: Option<String>,
    /// When, by the server's clock.
    pub at: Option<Instant>,
}

/// The settings of a group that decide when its jobs start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupSettings {
    /// The limit of the group.
    pub limit: Limit,
    /// The share of the group among groups with waiting jobs: a group with weight 2 gets twice as many starts as one with weight 1, the
    /// default. `None` for all groups: priorities and dates alone decide.
    pub weight: Option<f64>,
}

/// All settings, as the recruiter reads them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// The limits of resources, by their name or prefix.
    pub limits: BTreeMap<String, Limit>,
    /// The settings of groups.
    pub groups: BTreeMap<String, GroupSettings>,
    /// The present pauses.
    pub pauses: BTreeMap<Paused, Pause>,
    /// The ids of documents that are not valid settings. What they would limit waits.
    pub invalid: BTreeSet<String>,
}

impl Settings {
    /// The limit of a resource: the one under its name, or else the one under the longest prefix. `None`: the resource has no limit.
    pub fn limit_of(&self, resource: &str) -> Option<Limit> {
        if line_of_gate(resource).is_some() {
            return Some(Limit { capacity: Some(1), rate: None });
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

    /// The pause that covers the jobs of this group and class.
    pub fn pause_of(&self, group: &str, class: &str) -> Option<(&Paused, &Pause)> {
        if self.pauses.is_empty() {
            return None;
        }
        let covers = |paused: &Paused| match paused {
            Paused::Everything => true,
            Paused::Group(paused) => paused == group,
            Paused::Class(paused) => paused == class,
        };
        self.pauses.iter().find(|(paused, _)| covers(paused))
    }

    /// Whether any group has a weight.
    pub fn has_weights(&self) -> bool {
        self.groups.values().any(|group| group.weight.is_some())
    }
}

/// The right to start a limited job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permit {
    /// The gate of the job for which it was given.
    pub gate: Option<String>,
    /// One number of each resource with a capacity, for example `printer#0`. MongoDB refuses a second running job with the same one.
    pub names: Vec<String>,
    /// A start under a rate is allowed in this interval of the server's clock.
    pub between: Option<(Instant, Instant)>,
}

impl Permit {
    /// Whether this is a permit for a job of this group and gate: the job may have been replaced since.
    pub fn is_for(&self, group: &str, gate: Option<&str>) -> bool {
        let mut groups = self.names.iter().filter_map(|name| group_of_resource(resource_and_number(name)?.0));
        self.gate.as_deref() == gate && groups.all(|other| other == group)
    }
}

/// The name of the permit `number` of a resource.
pub fn permit_name(resource: &str, number: u32) -> String {
    format!("{resource}#{number}")
}

/// The resource and the number in the name of a permit.
pub fn resource_and_number(permit: &str) -> Option<(&str, u32)> {
    let (resource, number) = permit.rsplit_once('#')?;
    Some((resource, number.parse().ok()?))
}

/// The resource that stands for the limit of a group. No resource of a gate can have this name.
pub fn resource_of_group(group: &str) -> String {
    format!("@{group}")
}

/// The group whose limit a resource stands for.
pub fn group_of_resource(resource: &str) -> Option<&str> {
    resource.strip_prefix('@')
}

/// The gate of the jobs in a line. It is a resource of its own, with a capacity of one.
pub fn gate_of_line(key: &str) -> String {
    format!("{LINE}{key}")
}

/// The key of the line, if this is the gate of one.
pub fn line_of_gate(gate: &str) -> Option<&str> {
    gate.strip_prefix(LINE)
}

/// The resources in a gate.
pub fn resources_in(gate: &str) -> impl Iterator<Item = &str> {
    // A line is one resource, whatever its key.
    let (line, resources) = if line_of_gate(gate).is_some() { (Some(gate), "") } else { (None, gate) };
    line.into_iter().chain(resources.split(SEPARATOR).filter(|resource| !resource.is_empty()))
}

/// The gate of a job that needs these resources: sorted, each once.
pub fn gate_of<'a>(resources: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let sorted: BTreeSet<&str> = resources.into_iter().collect();
    (!sorted.is_empty()).then(|| sorted.into_iter().collect::<Vec<_>>().join(","))
}

/// Why a setting was not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// The name or the value is not valid.
    #[error(transparent)]
    Invalid(#[from] InvalidSetting),
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Sets the limit of a resource, of each resource with a prefix (`customer:*`), or of a group (`@mail`). It holds from now on: a lower
/// capacity ends no running job.
///
/// # Errors
/// When the name is not one, the limit is empty, or the capacity is not from 1 to [`LARGEST_CAPACITY`]; or an error of MongoDB.
pub async fn set_limit(store: &Store, name: &str, limit: Limit) -> Result<(), SettingError> {
    check_limit_name(name)?;
    check_limit(limit)?;
    Ok(store.put_limit(name, limit).await?)
}

/// Removes a limit. Jobs that name the resource wait until it has a limit again; a group has no limit then. Returns whether there was one.
///
/// # Errors
/// An error of MongoDB.
pub async fn remove_limit(store: &Store, name: &str) -> Result<bool, SettingError> {
    Ok(store.delete_limit(name).await?)
}

/// Pauses jobs: they are not assigned until [`resume`]. Running jobs continue. Returns false if the same was paused before: that pause
/// stays.
///
/// # Errors
/// An error of MongoDB.
pub async fn pause(store: &Store, paused: &Paused, by: &str, reason: Option<&str>) -> Result<bool, SettingError> {
    Ok(store.put_pause(paused, by, reason).await?)
}

/// Ends a pause. Returns whether there was one.
///
/// # Errors
/// An error of MongoDB.
pub async fn resume(store: &Store, paused: &Paused) -> Result<bool, SettingError> {
    Ok(store.delete_pause(paused).await?)
}

fn check_limit(limit: Limit) -> Result<(), InvalidSetting> {
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
/// When it is empty or too long, or has a character with a meaning of its own.
pub fn check_resource(name: &str) -> Result<(), InvalidSetting> {
    let refused = |problem: &str| Err(InvalidSetting(format!("the name of a resource {problem}: `{name:.80}`")));
    if name.is_empty() {
        return refused("is empty");
    }
    if name.len() > LONGEST_NAME - 8 {
        return refused("has more than 248 bytes");
    }
    if name.starts_with(['@', LINE]) || name.contains([SEPARATOR, '#', '*']) || name.chars().any(char::is_control) {
        return refused("must not begin with `@` or `>`, and must not contain `,`, `#`, `*` or control characters");
    }
    Ok(())
}

/// Checks the name of a limit: a resource, a prefix that ends in `*`, or a group after an `@`.
///
/// # Errors
/// When it is none of them.
pub fn check_limit_name(name: &str) -> Result<(), InvalidSetting> {
    if let Some(group) = group_of_resource(name) {
        let is_group = !group.is_empty() && group.len() <= LONGEST_NAME && !group.chars().any(char::is_control);
        return if is_group { Ok(()) } else { Err(InvalidSetting(format!("`{name:.80}` does not name a group after the `@`"))) };
    }
    match name.strip_suffix('*') {
        Some("") => Err(InvalidSetting("the prefix of a limit is empty: write at least one character before `*`".into())),
        Some(prefix) => check_resource(prefix),
        None => check_resource(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_read_as_it_is_written() {
        for text in ["100/1s burst 20", "1/1m burst 1", "5/1h 30m burst 7", "10/1s burst 1", "1000/1s burst 21"] {
            assert_eq!(text.parse::<Rate>().unwrap().to_string(), text);
        }
        assert_eq!("100/1s".parse::<Rate>().unwrap(), Rate { starts: 100, per: Duration::from_secs(1), burst: 100 });
        for wrong in [
            "",
            "100",
            "0/1s",
            "1/0s",
            "1/1s burst 0",
            "-1/1s",
            "1/31days",
            "2000000/1s",
            "1/1s burst",
            "x/1s",
            "11/1s burst 1",
            "1000/1s burst 20",
            "1/30days burst 14",
        ] {
            assert!(wrong.parse::<Rate>().is_err(), "{wrong}");
        }
        assert_eq!("100/1s".parse::<Rate>().unwrap().interval(), Duration::from_millis(10));
    }

    #[test]
    fn a_limit_is_found_by_name_and_else_by_the_longest_prefix() {
        let capacity = |capacity| Limit { capacity: Some(capacity), rate: None };
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
        let permit = Permit { gate: Some("a".into()), names: vec!["@mail#0".into(), "a#1".into()], between: None };
        assert!(
            permit.is_for("mail", Some("a"))
                && !permit.is_for("post", Some("a"))
                && !permit.is_for("mail", Some("b"))
                && !permit.is_for("mail", None)
        );
        for wrong in ["", "a,b", "a#1", "@mail", "a*", "a\nb"] {
            assert!(check_resource(wrong).is_err(), "{wrong}");
        }
        assert!(check_limit_name("customer:*").is_ok() && check_limit_name("*").is_err() && check_limit_name("a*b").is_err());
    }
}
