//! When a schedule runs: a cron expression in a zone, or a fixed interval. Pure.
//!
//! A *slot* is an instant at which a schedule runs. The slots of an interval are its multiples since 1970 in UTC: with `1h` the full hours.
//! Therefore they do not depend on the moment of the declaration.
//!
//! When the clocks of the zone change, the rules of Vixie cron apply. Minutes and hours decide which; seconds never do:
//!
//! - An expression with `*` or `*/n` in its minutes or hours follows the clock on the wall: it does not run at times that the clock skips, and
//!   runs at both of two equal times.
//! - Any other expression names times of the day, be it with single values, lists or ranges. If the clock skips some of them, it runs once at
//!   the end of the gap. If the clock repeats a time, it runs at the first of the two.
//!
//! `croner` reads the expressions, and finds the next time on the wall. Its own search in a zone takes every list and every range for an
//! expression of the first kind, drops a run whose gap ends on another day, and knows no `@midnight`.

use std::{collections::VecDeque, fmt, time::Duration};

use bson::{Bson, Document, doc};
use chrono::{DateTime, NaiveDateTime, Offset as _, TimeDelta, TimeZone as _, Utc};
use chrono_tz::{GapInfo, TZ_VARIANTS, Tz};
use croner::parser::{CronParser, Seconds, Year};

use super::InvalidSchedule;
use crate::base::Instant;

/// Minimum of an interval.
const SHORTEST: Duration = Duration::from_secs(1);
/// Maximum of an interval: a thousand years.
const LONGEST: Duration = Duration::from_secs(1_000 * 365 * 86_400);
/// Number of slots whose distances limit the jitter of a cron expression.
const COMPARED: usize = 200;
/// Maximum length of a cron expression, in bytes.
const LONGEST_EXPRESSION: usize = 256;

/// When a schedule runs.
#[derive(Clone, Debug)]
pub struct Timing(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Cron { expression: String, zone: Tz, cron: Box<croner::Cron> },
    Every(TimeDelta),
}

impl Timing {
    /// A cron expression of five fields (minute, hour, day of month, month, day of week), or of six with the second in front, in the zone
    /// with this IANA name.
    ///
    /// # Errors
    /// When the expression is invalid or has no run, or the zone is unknown.
    pub fn cron(expression: &str, zone: &str) -> Result<Self, InvalidSchedule> {
        let shown = cut(expression);
        let invalid = |reason: String| InvalidSchedule::Cron { expression: shown.clone(), reason };
        if expression.len() > LONGEST_EXPRESSION {
            return Err(invalid(format!("it has {} bytes, and {LONGEST_EXPRESSION} is the limit", expression.len())));
        }
        let zone: Tz = zone.parse().map_err(|_| InvalidSchedule::Zone { zone: cut(zone), similar: similar_zone(zone) })?;
        let parser = CronParser::builder().seconds(Seconds::Optional).year(Year::Disallowed).build();
        // Single blanks: the validator of the collection does not know all that are blank here.
        let expression = expression.split_whitespace().collect::<Vec<_>>().join(" ");
        let fields = match expression.strip_prefix('@') {
            Some(name) => fields_of(name).map_err(&invalid)?,
            None => &expression,
        };
        let cron = parser.parse(fields).map_err(|error| {
            let wrong = wrong_field(&parser, fields).unwrap_or_default();
            invalid(format!("{wrong}{}", reason_of(&error.to_string())))
        })?;
        let timing = Self(Kind::Cron { expression: expression.clone(), zone, cron: Box::new(cron) });
        match timing.next_after(reference()) {
            Some(_) => Ok(timing),
            None => Err(InvalidSchedule::NeverRuns { expression: shown }),
        }
    }

    /// A fixed interval, of whole milliseconds.
    ///
    /// # Errors
    /// When it is shorter than a second or longer than a thousand years, or has a fraction of a millisecond.
    pub fn every(interval: Duration) -> Result<Self, InvalidSchedule> {
        let is_whole = interval.subsec_nanos().is_multiple_of(1_000_000);
        match TimeDelta::from_std(interval) {
            Ok(every) if is_whole && (SHORTEST..=LONGEST).contains(&interval) => Ok(Self(Kind::Every(every))),
            _ => Err(InvalidSchedule::Interval { interval }),
        }
    }

    /// The first slot after `at`; `None` after the last one that a date can express.
    pub fn next_after(&self, at: Instant) -> Option<Instant> {
        match &self.0 {
            Kind::Cron { zone, cron, .. } if follows_the_clock(cron) => {
                let next = cron.find_next_occurrence(&at.with_timezone(zone), false).ok()?;
                Some(next.with_timezone(&Utc)).filter(|next| *next > at)
            }
            Kind::Cron { zone, cron, .. } => {
                // A later time on the wall never comes at an earlier instant, so the first one that comes after `at` is the next.
                let offset = zone.offset_from_utc_datetime(&at.naive_utc()).fix();
                let mut local = at.naive_utc().checked_add_offset(offset)?;
                loop {
                    local = cron.find_next_occurrence(&local, false).ok()?;
                    let slot = comes_at(local, *zone)?;
                    if slot > at {
                        return Some(slot);
                    }
                }
            }
            Kind::Every(every) => {
                let every = every.num_milliseconds();
                let slot = at.timestamp_millis().div_euclid(every).checked_add(1)?.checked_mul(every)?;
                DateTime::from_timestamp_millis(slot)
            }
        }
    }

    /// The slots after `at`, in order.
    pub fn slots_after(&self, at: Instant) -> impl Iterator<Item = Instant> {
        std::iter::successors(self.next_after(at), |slot| self.next_after(*slot))
    }

    /// The slots after `after` up to `until`, in order; the newest ones, if there are more than `most`.
    ///
    /// The number of steps does not depend on the length of the period. The search begins shortly before `until` and goes back in growing
    /// steps. It never searches backwards for single slots: around a change of the clock the result could differ from the slots forwards.
    pub fn newest_slots(&self, after: Instant, until: Instant, most: usize) -> Vec<Instant> {
        let mut back = TimeDelta::seconds(1);
        loop {
            let begin = until.checked_sub_signed(back).unwrap_or(after).max(after);
            let mut slots: VecDeque<Instant> = VecDeque::new();
            let mut is_full = false;
            for slot in self.slots_after(begin).take_while(|slot| *slot <= until) {
                slots.push_back(slot);
                if slots.len() > most {
                    slots.pop_front();
                    is_full = true;
                }
            }
            if is_full || begin == after || slots.len() == most {
                return slots.into();
            }
            back = back.checked_mul(4).unwrap_or(TimeDelta::MAX);
        }
    }

    /// The shortest time between two slots, as far as the next slots show it.
    pub(super) fn shortest_gap(&self) -> TimeDelta {
        match &self.0 {
            Kind::Every(every) => *every,
            Kind::Cron { .. } => {
                let slots: Vec<Instant> = self.slots_after(reference()).take(COMPARED).collect();
                slots.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap_or(TimeDelta::MAX)
            }
        }
    }

    /// The fields of the document.
    pub(super) fn stored(&self) -> Document {
        match &self.0 {
            Kind::Cron { expression, zone, .. } => doc! { "cron": expression, "zone": zone.name(), "every_ms": Bson::Null },
            Kind::Every(every) => doc! { "cron": Bson::Null, "zone": Bson::Null, "every_ms": every.num_milliseconds() },
        }
    }
}

/// As people write it: `0 3 * * * Europe/Berlin`, or `every 1h 30m`.
impl fmt::Display for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Cron { expression, zone, .. } => write!(f, "{expression} {}", zone.name()),
            Kind::Every(every) => write!(f, "every {}", humantime::format_duration(every.to_std().unwrap_or_default())),
        }
    }
}

/// The instant from which expressions are checked. Every expression that ever runs has a run in the centuries after it.
fn reference() -> Instant {
    DateTime::from_timestamp(1_704_067_200, 0).unwrap_or_default()
}

/// Whether it runs by the clock on the wall, also when that changes.
fn follows_the_clock(cron: &croner::Cron) -> bool {
    cron.pattern.minutes.from_wildcard || cron.pattern.hours.from_wildcard
}

/// The instant at which the clock on the wall first shows this time, or skips it.
fn comes_at(local: NaiveDateTime, zone: Tz) -> Option<Instant> {
    if let Some(first) = zone.from_local_datetime(&local).earliest() {
        return Some(first.with_timezone(&Utc));
    }
    let (begin, before) = GapInfo::new(&local, &zone)?.begin?;
    Some(begin.checked_sub_offset(before.fix())?.and_utc())
}

/// The fields of a nickname, such as `daily`.
fn fields_of(name: &str) -> Result<&'static str, String> {
    let lower = name.to_lowercase();
    Ok(match lower.as_str() {
        "yearly" | "annually" => "0 0 1 1 *",
        "monthly" => "0 0 1 * *",
        "weekly" => "0 0 * * SUN",
        "daily" | "midnight" => "0 0 * * *",
        "hourly" => "0 * * * *",
        _ if lower.starts_with("every") => {
            return Err("a fixed interval is no cron expression; use `every` in place of `cron`, like `every = \"5m\"`".to_owned());
        }
        _ => return Err("of the names with `@` there are @yearly, @annually, @monthly, @weekly, @daily, @midnight and @hourly".to_owned()),
    })
}

/// A text of others in a message: at most 80 characters.
fn cut(text: &str) -> String {
    text.chars().take(80).collect()
}

/// The names of the fields; the first is left out of an expression of five.
const FIELDS: [&str; 6] = ["second", "minute", "hour", "day of month", "month", "day of week"];

/// Which field is wrong: the first that the parser refuses beside stars.
fn wrong_field(parser: &CronParser, expression: &str) -> Option<String> {
    let fields: Vec<&str> = expression.split(' ').collect();
    let names = FIELDS.get(FIELDS.len().checked_sub(fields.len())?..)?.iter().zip(&fields).enumerate();
    let is_wrong = |index: usize, field: &str| {
        let mut alone = vec!["*"; fields.len()];
        alone[index] = field;
        parser.parse(&alone.join(" ")).is_err()
    };
    let (_, (name, field)) = names.into_iter().find(|(index, (_, field))| is_wrong(*index, field))?;
    (fields.len() > 4).then(|| format!("the {name} `{field}`: "))
}

/// The reason without the words that every error of the parser begins with.
fn reason_of(error: &str) -> String {
    let reason = error.trim_start_matches("Invalid pattern: ").trim_start_matches("Component error: ").trim_end_matches('.');
    if reason.contains("fields") || reason.contains("parts") {
        format!("{reason}; write minute, hour, day of month, month, day of week")
    } else {
        reason.to_owned()
    }
}

fn similar_zone(zone: &str) -> Option<&'static str> {
    let zone = zone.to_lowercase();
    let likeness = |known: &Tz| strsim::jaro_winkler(&zone, &known.name().to_lowercase());
    let best = TZ_VARIANTS.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)))?;
    (likeness(best) > 0.9).then(|| best.name())
}

#[cfg(test)]
mod reference;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Instant {
        DateTime::parse_from_rfc3339(text).expect(text).with_timezone(&Utc)
    }

    fn cron(expression: &str) -> Timing {
        Timing::cron(expression, "Europe/Berlin").expect(expression)
    }

    fn slots(timing: &Timing, after: &str, count: usize) -> Vec<String> {
        timing.slots_after(at(after)).take(count).map(|slot| slot.format("%m-%dT%H:%M:%SZ").to_string()).collect()
    }

    #[test]
    fn slots_follow_the_clock_of_the_zone() {
        assert_eq!(slots(&cron("0 3 * * *"), "2026-01-01T00:00:00Z", 2), ["01-01T02:00:00Z", "01-02T02:00:00Z"]);
        assert_eq!(slots(&cron("0 3 * * *"), "2026-07-01T01:00:00Z", 1), ["07-02T01:00:00Z"], "a slot is not after itself");
        assert_eq!(slots(&cron("30 0 12 * * MON-FRI"), "2026-01-02T11:00:29.999Z", 2), ["01-02T11:00:30Z", "01-05T11:00:30Z"]);
        assert_eq!(slots(&cron("@daily"), "2026-01-01T00:00:00Z", 1), ["01-01T23:00:00Z"]);
    }

    #[test]
    fn slots_of_an_interval_are_its_multiples() {
        let every = |seconds| Timing::every(Duration::from_secs(seconds)).expect("an interval");
        assert_eq!(slots(&every(3_600), "2026-01-01T00:00:00Z", 2), ["01-01T01:00:00Z", "01-01T02:00:00Z"]);
        assert_eq!(slots(&every(90), "2026-01-01T00:00:00.001Z", 2), ["01-01T00:01:30Z", "01-01T00:03:00Z"]);
        assert_eq!(slots(&every(7), "1969-12-31T23:59:50Z", 2), ["12-31T23:59:53Z", "01-01T00:00:00Z"]);
    }

    #[test]
    fn fixed_times_come_once_when_the_clocks_change() {
        let check = |expression: &str, zone: &str, after: &str, expected: &[&str]| {
            let timing = Timing::cron(expression, zone).expect(expression);
            assert_eq!(slots(&timing, after, expected.len()), expected, "{expression} {zone}");
        };
        let (spring, autumn) = ("2027-03-28T00:00:00Z", "2027-10-30T22:00:00Z");
        check("30 2,14 * * *", "Europe/Berlin", autumn, &["10-31T00:30:00Z", "10-31T13:30:00Z"]);
        check("30 2,14 * * *", "Europe/Berlin", spring, &["03-28T01:00:00Z", "03-28T12:30:00Z"]);
        check(
            "0 1-5 * * *",
            "Europe/Berlin",
            autumn,
            &["10-30T23:00:00Z", "10-31T00:00:00Z", "10-31T02:00:00Z", "10-31T03:00:00Z", "10-31T04:00:00Z"],
        );
        check("0,30 2 * * *", "Europe/Berlin", spring, &["03-28T01:00:00Z", "03-29T00:00:00Z"]);
        check("0 2,3 * * *", "Europe/Berlin", spring, &["03-28T01:00:00Z", "03-29T00:00:00Z"]);
        check("0 0,12 * * *", "America/Santiago", "2027-09-04T16:30:00Z", &["09-05T04:00:00Z", "09-05T15:00:00Z"]);
        check("30 23 * * SAT", "America/Nuuk", "2027-03-27T00:00:00Z", &["03-28T01:00:00Z", "04-04T00:30:00Z"]);
        check("*/10 30 2 * * *", "Europe/Berlin", spring, &["03-28T01:00:00Z", "03-29T00:30:00Z", "03-29T00:30:10Z"]);
        check("* 30 2 * * *", "Europe/Berlin", "2027-10-31T00:30:59Z", &["11-01T01:30:00Z"]);
        check("0 3 * * *", "Pacific/Apia", "2011-12-30T00:00:00Z", &["12-30T10:00:00Z", "12-30T13:00:00Z"]);
        check("0 12 30 12 *", "Pacific/Apia", "2011-12-30T00:00:00Z", &["12-30T10:00:00Z"]);
    }

    #[test]
    fn names_stand_for_their_fields() {
        let check = |name: &str, fields: &str| {
            assert_eq!(slots(&cron(name), "2026-01-01T00:30:00Z", 9), slots(&cron(fields), "2026-01-01T00:30:00Z", 9), "{name}");
        };
        check("@midnight", "0 0 * * *");
        check(" @Daily\n", "0 0 * * *");
        check("@annually", "@yearly");
        check("@weekly", "0 0 * * 0");
        check("@hourly", "0 * * * *");
        check("@monthly", "0 0 1 * *");
    }

    /// On 2026-03-29 at 2:00 (1:00 UTC) the clock in Berlin goes to 3:00.
    #[test]
    fn in_the_skipped_hour_a_daily_run_comes_after_the_gap_and_the_others_are_skipped() {
        let night = "2026-03-29T00:00:00Z";
        assert_eq!(slots(&cron("30 2 * * *"), night, 2), ["03-29T01:00:00Z", "03-30T00:30:00Z"], "once, at 3:00");
        assert_eq!(slots(&cron("0 3 * * *"), night, 2), ["03-29T01:00:00Z", "03-30T01:00:00Z"], "it is not skipped");
        assert_eq!(slots(&cron("30 1 * * *"), night, 1), ["03-29T00:30:00Z"]);
        assert_eq!(slots(&cron("*/30 * * * *"), night, 3), ["03-29T00:30:00Z", "03-29T01:00:00Z", "03-29T01:30:00Z"]);
        assert_eq!(slots(&cron("30 * * * *"), night, 3), ["03-29T00:30:00Z", "03-29T01:30:00Z", "03-29T02:30:00Z"]);
    }

    /// On 2026-10-25 at 3:00 (1:00 UTC) the clock in Berlin goes back to 2:00.
    #[test]
    fn in_the_doubled_hour_a_daily_run_comes_once_and_the_others_twice() {
        let night = "2026-10-24T23:59:00Z";
        assert_eq!(slots(&cron("30 2 * * *"), night, 2), ["10-25T00:30:00Z", "10-26T01:30:00Z"], "the first of the two");
        assert_eq!(slots(&cron("30 2 * * *"), "2026-10-25T00:45:00Z", 1), ["10-26T01:30:00Z"], "also from between the two");
        assert_eq!(slots(&cron("0 3 * * *"), night, 1), ["10-25T02:00:00Z"]);
        assert_eq!(slots(&cron("30 * * * *"), night, 3), ["10-25T00:30:00Z", "10-25T01:30:00Z", "10-25T02:30:00Z"]);
        assert_eq!(slots(&cron("*/30 2 * * *"), night, 4), ["10-25T00:00:00Z", "10-25T00:30:00Z", "10-25T01:00:00Z", "10-25T01:30:00Z"]);
    }

    /// A leader that starts in the middle of a change of the clock runs the same slots.
    #[test]
    fn the_slots_do_not_depend_on_where_the_search_begins() {
        let year = (at("2026-01-01T00:00:00Z"), at("2027-01-01T00:00:00Z"));
        for zone in ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Nuuk", "UTC"] {
            for expression in [
                "30 2 * * *",
                "0 2 * * *",
                "59 1 * * *",
                "*/20 * * * *",
                "15 */3 * * *",
                "0 0 * * SUN",
                "0 30 1-3 * * *",
                "0,30 0-3,22,23 * * *",
            ] {
                let timing = Timing::cron(expression, zone).expect(expression);
                let slots: Vec<Instant> = timing.slots_after(year.0).take_while(|slot| *slot <= year.1).collect();
                for pair in slots.windows(2) {
                    for part in 0..8 {
                        let from = pair[0] + (pair[1] - pair[0]) * part / 8;
                        assert!(timing.next_after(from) == Some(pair[1]), "{expression} {zone}: from {from}, {:?}", pair[1]);
                    }
                }
                for most in [1, 3, 1_000_000] {
                    let newest = timing.newest_slots(year.0, year.1, most);
                    assert!(newest == slots[slots.len().saturating_sub(most)..], "{expression} {zone} {most}");
                }
            }
        }
    }

    #[test]
    fn the_newest_slots_of_a_long_time_are_found_soon() {
        // One after the other would take hours.
        let timing = Timing::every(Duration::from_secs(1)).expect("an interval");
        let newest = timing.newest_slots(at("1970-01-01T00:00:00Z"), at("2026-01-01T00:00:00.5Z"), 3);
        assert_eq!(newest, ["2025-12-31T23:59:58Z", "2025-12-31T23:59:59Z", "2026-01-01T00:00:00Z"].map(at));
        assert!(timing.newest_slots(at("2026-01-01T00:00:00Z"), at("2026-01-01T00:00:00.9Z"), 3).is_empty());
        assert!(timing.newest_slots(at("2027-01-01T00:00:00Z"), at("2026-01-01T00:00:00Z"), 3).is_empty(), "the clock was put back");
    }

    #[test]
    fn an_expression_that_cannot_run_is_refused_with_the_reason() {
        let check = |expression: &str, zone: &str, expected: &str| {
            let problem = Timing::cron(expression, zone).map(|_| ()).expect_err(expression).to_string();
            assert!(problem.contains(expected), "{expression} {zone}: {problem}");
        };
        check("0 0 31 2 *", "UTC", "`0 0 31 2 *` never runs");
        check("0 0 31 4,6,9,11 *", "UTC", "never runs");
        check("", "UTC", "cannot be an empty string");
        check("* * * *", "UTC", "write minute, hour, day of month, month, day of week");
        check("0 0 0 1 1 * 2030", "UTC", "write minute, hour");
        check("61 3 * * *", "UTC", "`61 3 * * *` is not a cron expression: the minute `61`: ");
        check("0 61 3 * * *", "UTC", "the minute `61`: ");
        check("0 25 * * *", "UTC", "the hour `25`: ");
        check("0 3 * 13 *", "UTC", "the month `13`: ");
        check("0 3 32 * *", "UTC", "the day of month `32`: ");
        check("0 3 * * MOO", "UTC", "the day of week `MOO`: ");
        check("*/0 * * * *", "UTC", "`*/0 * * * *` is not a cron expression");
        check("@every 5m", "UTC", "use `every` in place of `cron`");
        check("@every", "UTC", "use `every`");
        check("@reboot", "UTC", "there are @yearly");
        check("0 3 * * * @daily", "UTC", "`0 3 * * * @daily` is not a cron expression");
        check("soon", "UTC", "`soon` is not a cron expression");
        check(&"1,".repeat(1_000), "UTC", "has 2000 bytes");
        check("0 3 * * *", "Europe/Berlim", "there is no zone `Europe/Berlim`; did you mean `Europe/Berlin`?");
        check("0 3 * * *", "europe/berlin", "did you mean `Europe/Berlin`?");
        check("0 3 * * *", "", "there is no zone ``; write an IANA name like Europe/Berlin or UTC");
    }

    #[test]
    fn an_interval_is_a_second_at_least() {
        let check = |interval, good| assert_eq!(Timing::every(interval).is_ok(), good, "{interval:?}");
        check(Duration::ZERO, false);
        check(Duration::from_millis(999), false);
        check(Duration::from_secs(1), true);
        check(Duration::from_millis(1_500), true);
        check(Duration::from_micros(1_500_500), false);
        check(LONGEST, true);
        check(Duration::MAX, false);
    }

    #[test]
    fn every_next_slot_is_found_soon() {
        // Minute by minute would take hours.
        for expression in ["0 0 29 2 +MON", "59 59 23 31 12 *", "0 0 31 2 *", "0 0 30 2 +MON"] {
            let _ = Timing::cron(expression, "Europe/Berlin").map(|timing| timing.shortest_gap());
        }
    }
}
