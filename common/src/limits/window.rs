//! Maintenance windows: times of the day, in a zone, in which no job of a group starts. Pure.
//!
//! The clock on the wall decides: a window from 02:00 to 03:00 is open as long as a clock in its zone shows a time from 02:00:00 to
//! 02:59:59. So when the clocks change,
//!
//! - a window whose whole time is skipped does not occur on that day, and one whose begin is skipped begins with the gap's end;
//! - a window whose time is repeated occurs twice, and lasts from its first begin to its last end if the whole time is repeated at once.

use std::{fmt, str::FromStr};

use chrono::{DateTime, Datelike as _, NaiveTime, TimeDelta, TimeZone as _, Utc, Weekday};
use chrono_tz::Tz;

use super::InvalidSetting;
use crate::base::Instant;

/// Local times are examined at these steps where a clock changes. All changes since 1970 are at multiples of it.
const STEP: TimeDelta = TimeDelta::minutes(15);
/// How far ahead begins and ends are searched.
const AHEAD: TimeDelta = TimeDelta::days(8);
/// The names of the days, from Monday.
const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];

/// A time of the day in which no job of a group starts, for example from 02:00 to 03:00 in Europe/Berlin. If it begins later than it ends, it
/// ends on the next day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaintenanceWindow {
    from: NaiveTime,
    until: NaiveTime,
    zone: Tz,
    /// One bit for each day on which it begins, from Monday.
    days: u8,
}

impl MaintenanceWindow {
    /// A window from one time to another, in the zone with this IANA name, on these days (`mon` to `sun`); without days on every day. The
    /// times are written like `02:00` or `02:00:30`.
    ///
    /// # Errors
    /// When a time, the zone or a day is not valid, or the times are equal.
    pub fn new<'a>(from: &str, until: &str, zone: &str, days: impl IntoIterator<Item = &'a str>) -> Result<Self, InvalidSetting> {
        let (from, until) = (time_of(from)?, time_of(until)?);
        if from == until {
            return Err(InvalidSetting(
                "a maintenance window must not begin when it ends; to stop the jobs at all times, pause the group".into(),
            ));
        }
        let zone =
            zone.parse().map_err(|_| InvalidSetting(format!("`{zone:.80}` is not the IANA name of a time zone, such as Europe/Berlin")))?;
        let mut bits = 0;
        for day in days {
            let index = DAYS.iter().position(|known| day.eq_ignore_ascii_case(known));
            bits |= 1 << index.ok_or_else(|| InvalidSetting(format!("`{day:.80}` is not a day; write {}", DAYS.join(", "))))?;
        }
        Ok(Self { from, until, zone, days: if bits == 0 { 0x7f } else { bits } })
    }

    /// Whether the clock on the wall is in the window.
    fn covers(&self, at: Instant) -> bool {
        let local = at.with_timezone(&self.zone).naive_local();
        let is_on = |day: Weekday| self.days & (1 << day.num_days_from_monday()) != 0;
        let (today, time) = (local.date().weekday(), local.time());
        if self.from < self.until {
            is_on(today) && self.from <= time && time < self.until
        } else {
            is_on(today) && self.from <= time || is_on(today.pred()) && time < self.until
        }
    }

    /// The instants after `at` at which the window may begin or end, in the next days: its times, and the changes of the clock.
    fn changes_after(&self, at: Instant) -> Vec<Instant> {
        let first = at.with_timezone(&self.zone).date_naive().pred_opt();
        let mut changes = Vec::new();
        for date in first.into_iter().flat_map(|first| first.iter_days().take(11)) {
            for time in [self.from, self.until] {
                let local = date.and_time(time);
                match self.zone.from_local_datetime(&local) {
                    chrono::LocalResult::Single(one) => changes.push(one.with_timezone(&Utc)),
                    chrono::LocalResult::Ambiguous(first, last) => changes.extend([first, last].map(|one| one.with_timezone(&Utc))),
                    chrono::LocalResult::None => {}
                }
            }
        }
        changes.extend(self.clock_changes_after(at));
        changes.retain(|change| *change > at);
        changes.sort_unstable();
        changes
    }

    /// The first change of the clock in the next days.
    fn clock_changes_after(&self, at: Instant) -> Option<Instant> {
        let offset = |at: Instant| at.with_timezone(&self.zone).naive_local() - at.naive_utc();
        let end = at + AHEAD;
        if offset(at) == offset(end) {
            return None;
        }
        let begin = at.timestamp().div_euclid(STEP.num_seconds()) * STEP.num_seconds();
        let mut steps =
            (1..).map_while(|step| DateTime::from_timestamp(begin + step * STEP.num_seconds(), 0)).take_while(|step| *step <= end);
        let now = offset(at);
        steps.find(|step| offset(*step) != now)
    }

    /// The names of the days, if it is not on all days.
    pub fn days(&self) -> Vec<&'static str> {
        if self.days == 0x7f {
            return Vec::new();
        }
        DAYS.into_iter().enumerate().filter(|(index, _)| self.days & (1 << index) != 0).map(|(_, day)| day).collect()
    }

    /// When it begins and ends, and the name of its zone, as texts.
    pub fn texts(&self) -> (String, String, &'static str) {
        (text_of(self.from), text_of(self.until), self.zone.name())
    }
}

/// When the present window ends, or the next one begins, for these windows together. The answer holds until then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maintenance {
    /// No job may start until this instant.
    Closed(Instant),
    /// Jobs may start until this instant.
    Open(Instant),
}

impl Maintenance {
    /// The state of these windows at `at`.
    pub fn of(windows: &[MaintenanceWindow], at: Instant) -> Self {
        let is_closed = |at: Instant| windows.iter().any(|window| window.covers(at));
        let now = is_closed(at);
        let mut changes: Vec<Instant> = windows.iter().flat_map(|window| window.changes_after(at)).collect();
        changes.sort_unstable();
        // Later changes are found when this instant has come.
        let change = changes.into_iter().find(|change| is_closed(*change) != now).unwrap_or(at + AHEAD);
        if now { Self::Closed(change) } else { Self::Open(change) }
    }
}

fn time_of(text: &str) -> Result<NaiveTime, InvalidSetting> {
    let time = NaiveTime::parse_from_str(text, "%H:%M").or_else(|_| NaiveTime::parse_from_str(text, "%H:%M:%S"));
    // A leap second is written as 60.
    let time = time.ok().filter(|time| chrono::Timelike::nanosecond(time) == 0);
    time.ok_or_else(|| InvalidSetting(format!("`{text:.80}` is not a time of the day; write it like 02:00 or 02:00:30")))
}

fn text_of(time: NaiveTime) -> String {
    let is_whole = chrono::Timelike::second(&time) == 0;
    time.format(if is_whole { "%H:%M" } else { "%H:%M:%S" }).to_string()
}

/// `02:00-03:00 Europe/Berlin`, or `22:00-06:00 UTC mon,tue`.
impl FromStr for MaintenanceWindow {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let (times, zone, days) = match words[..] {
            [times, zone] => (times, zone, ""),
            [times, zone, days] => (times, zone, days),
            _ => ("", "", ""),
        };
        let Some((from, until)) = times.split_once('-') else {
            return Err(InvalidSetting(format!(
                "`{text:.80}` is not a maintenance window; write it like `02:00-03:00 Europe/Berlin`, or `22:00-06:00 UTC mon,tue`"
            )));
        };
        Self::new(from, until, zone, days.split(',').filter(|day| !day.is_empty()))
    }
}

impl fmt::Display for MaintenanceWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, until, zone) = self.texts();
        write!(f, "{from}-{until} {zone}")?;
        let days = self.days();
        if days.is_empty() { Ok(()) } else { write!(f, " {}", days.join(",")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Instant {
        DateTime::parse_from_rfc3339(text).expect("a date").with_timezone(&Utc)
    }

    fn windows(texts: &[&str]) -> Vec<MaintenanceWindow> {
        texts.iter().map(|text| text.parse().unwrap_or_else(|problem| panic!("{text}: {problem}"))).collect()
    }

    /// The state at an instant, and until when it lasts.
    fn state(texts: &[&str], now: &str) -> (bool, String) {
        let text = |at: Instant| at.to_rfc3339_opts(chrono::SecondsFormat::Secs, true);
        match Maintenance::of(&windows(texts), at(now)) {
            Maintenance::Closed(until) => (true, text(until)),
            Maintenance::Open(until) => (false, text(until)),
        }
    }

    fn check(texts: &[&str], now: &str, is_closed: bool, until: &str) {
        assert_eq!(state(texts, now), (is_closed, until.to_owned()), "{texts:?} at {now}");
    }

    #[test]
    fn a_window_is_read_as_it_is_written() {
        for text in ["02:00-03:00 Europe/Berlin", "22:30-06:00 UTC mon,tue,sun", "02:00:30-02:00:31 America/New_York"] {
            assert_eq!(windows(&[text])[0].to_string(), text);
        }
        for wrong in [
            "",
            "02:00",
            "02:00-03:00",
            "2-3 UTC",
            "24:00-25:00 UTC",
            "02:00-02:00 UTC",
            "02:00-03:00 Mars/Base",
            "02:00-03:00 UTC monday",
            "23:59:60-03:00 UTC",
            "02:00-03:00 UTC mon tue",
        ] {
            assert!(wrong.parse::<MaintenanceWindow>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_window_is_closed_from_its_begin_to_before_its_end() {
        let night = &["02:00-03:00 Europe/Berlin"];
        check(night, "2026-01-10T00:59:59Z", false, "2026-01-10T01:00:00Z");
        check(night, "2026-01-10T01:00:00Z", true, "2026-01-10T02:00:00Z");
        check(night, "2026-01-10T01:59:59.999Z", true, "2026-01-10T02:00:00Z");
        check(night, "2026-01-10T02:00:00Z", false, "2026-01-11T01:00:00Z");
        check(night, "2026-07-10T00:30:00Z", true, "2026-07-10T01:00:00Z");
    }

    #[test]
    fn a_window_over_midnight_belongs_to_the_day_on_which_it_begins() {
        // 2026-01-09 is a Friday.
        let friday = &["22:00-06:00 UTC fri"];
        check(friday, "2026-01-09T21:00:00Z", false, "2026-01-09T22:00:00Z");
        check(friday, "2026-01-09T23:00:00Z", true, "2026-01-10T06:00:00Z");
        check(friday, "2026-01-10T05:00:00Z", true, "2026-01-10T06:00:00Z");
        check(friday, "2026-01-10T23:00:00Z", false, "2026-01-16T22:00:00Z");
        check(friday, "2026-01-09T05:00:00Z", false, "2026-01-09T22:00:00Z");
    }

    #[test]
    fn windows_that_touch_or_overlap_are_one() {
        let both = &["01:00-02:00 UTC", "02:00-03:00 UTC", "02:30-04:00 UTC"];
        check(both, "2026-01-10T01:30:00Z", true, "2026-01-10T04:00:00Z");
        check(both, "2026-01-10T04:00:00Z", false, "2026-01-11T01:00:00Z");
        let always = &["00:00-12:00 UTC", "12:00-00:00 UTC"];
        assert!(state(always, "2026-01-10T01:30:00Z").0);
        assert_eq!(Maintenance::of(&[], at("2026-01-10T00:00:00Z")), Maintenance::Open(at("2026-01-18T00:00:00Z")));
    }

    #[test]
    fn a_window_that_the_clock_skips_does_not_occur() {
        // In Berlin the clock goes from 02:00 to 03:00 on 2026-03-29, at 01:00 UTC.
        check(&["02:00-03:00 Europe/Berlin"], "2026-03-28T23:00:00Z", false, "2026-03-30T00:00:00Z");
        check(&["02:30-03:30 Europe/Berlin"], "2026-03-29T00:30:00Z", false, "2026-03-29T01:00:00Z");
        check(&["02:30-03:30 Europe/Berlin"], "2026-03-29T01:00:00Z", true, "2026-03-29T01:30:00Z");
        check(&["01:30-02:30 Europe/Berlin"], "2026-03-29T00:45:00Z", true, "2026-03-29T01:00:00Z");
    }

    #[test]
    fn a_window_that_the_clock_repeats_occurs_twice() {
        // In Berlin the clock goes from 03:00 to 02:00 on 2026-10-25, at 01:00 UTC.
        check(&["02:00-03:00 Europe/Berlin"], "2026-10-25T00:30:00Z", true, "2026-10-25T02:00:00Z");
        let half = &["02:00-02:30 Europe/Berlin"];
        check(half, "2026-10-25T00:10:00Z", true, "2026-10-25T00:30:00Z");
        check(half, "2026-10-25T00:40:00Z", false, "2026-10-25T01:00:00Z");
        check(half, "2026-10-25T01:10:00Z", true, "2026-10-25T01:30:00Z");
        let quarter = &["02:40-03:10 Europe/Berlin"];
        check(quarter, "2026-10-25T00:50:00Z", true, "2026-10-25T01:00:00Z");
        check(quarter, "2026-10-25T01:50:00Z", true, "2026-10-25T02:10:00Z");
    }
}
