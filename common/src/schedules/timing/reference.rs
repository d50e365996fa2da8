//! A second, slow computation of slots, for the tests: it walks along the clock on the wall, minute by minute, and looks at each.
//!
//! It shares nothing with the first but the offsets of zones: neither the reading of expressions nor the search.

use std::collections::BTreeMap;

use chrono::{DateTime, Datelike as _, NaiveDateTime, Offset as _, TimeDelta, TimeZone as _, Timelike as _, Utc};
use chrono_tz::{TZ_VARIANTS, Tz};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng, seq::IndexedRandom as _};

use super::Timing;
use crate::base::Instant;

const MINUTE: TimeDelta = TimeDelta::minutes(1);
/// How far around a change of the clock the slots are compared.
const AROUND: TimeDelta = TimeDelta::hours(27);

/// A field as its text, its values, and whether it is `*`, or has it with a step.
struct Field {
    text: String,
    values: Vec<u32>,
    is_star: bool,
    has_star: bool,
}

impl Field {
    fn random(random: &mut StdRng, (first, last): (u32, u32), stars: f64) -> Self {
        if random.random_bool(stars) {
            return Self { text: "*".into(), values: (first..=last).collect(), is_star: true, has_star: true };
        }
        let mut field = Self { text: String::new(), values: Vec::new(), is_star: false, has_star: false };
        for _ in 0..random.random_range(1..4) {
            let (from, to) = (random.random_range(first..=last), random.random_range(first..=last));
            let (from, to) = (from.min(to), from.max(to).min(from.min(to) + 6));
            let step = random.random_range(1..=last);
            let (text, values) = match random.random_range(0..20) {
                0..2 => (format!("*/{step}"), (first..=last).step_by(step as usize).collect()),
                2..5 => (format!("{from}-{to}"), (from..=to).collect()),
                5..7 => (format!("{from}-{to}/{step}"), (from..=to).step_by(step as usize).collect()),
                _ => (from.to_string(), vec![from]),
            };
            field.has_star |= text.starts_with('*');
            field.text = format!("{}{}{text}", field.text, if field.text.is_empty() { "" } else { "," });
            field.values.extend(values);
        }
        field
    }

    fn has(&self, value: u32) -> bool {
        self.values.contains(&value)
    }
}

/// An expression of six fields.
struct Expression([Field; 6]);

impl Expression {
    fn random(random: &mut StdRng) -> Self {
        let seconds = if random.random_bool(0.1) {
            Field::random(random, (0, 59), 0.1)
        } else {
            Field { text: "0".into(), values: vec![0], is_star: false, has_star: false }
        };
        let mut field = |range, stars| Field::random(random, range, stars);
        Self([seconds, field((0, 59), 0.05), field((0, 23), 0.2), field((1, 31), 0.7), field((1, 12), 0.9), field((0, 6), 0.7)])
    }

    fn text(&self) -> String {
        self.0.iter().map(|field| field.text.as_str()).collect::<Vec<_>>().join(" ")
    }

    /// Whether it names this minute on the wall.
    fn names(&self, local: NaiveDateTime) -> bool {
        let [_, minutes, hours, days, months, weekdays] = &self.0;
        let (day, weekday) = (days.has(local.day()), weekdays.has(local.weekday().num_days_from_sunday()));
        let is_on = if days.is_star || weekdays.is_star { day && weekday } else { day || weekday };
        minutes.has(local.minute()) && hours.has(local.hour()) && months.has(local.month()) && is_on
    }

    /// The slots from `from` to before `until`. The clock does not change in the day before `from`.
    fn slots(&self, zone: Tz, from: Instant, until: Instant) -> Vec<Instant> {
        let follows = self.0[1].has_star || self.0[2].has_star;
        let seconds = || (0..60).filter(|second| self.0[0].has(*second)).map(|second| TimeDelta::seconds(second.into()));
        let mut latest = local(zone, from - MINUTE);
        let (mut slots, mut at) = (Vec::new(), from);
        while at < until {
            let now = local(zone, at);
            if follows || now > latest {
                let mut skipped = latest + MINUTE;
                while !follows && skipped < now {
                    if self.names(skipped) {
                        slots.push(at);
                    }
                    skipped += MINUTE;
                }
                if self.names(now) {
                    slots.extend(seconds().map(|second| at + second));
                }
            }
            latest = latest.max(now);
            at += MINUTE;
        }
        slots.dedup();
        slots
    }
}

fn local(zone: Tz, at: Instant) -> NaiveDateTime {
    at.naive_utc() + zone.offset_from_utc_datetime(&at.naive_utc()).fix()
}

fn offset(zone: Tz, at: Instant) -> i32 {
    zone.offset_from_utc_datetime(&at.naive_utc()).fix().local_minus_utc()
}

/// Each way in which the clocks of zones change in ten years: a zone, and the first minutes of its new offsets.
fn changes() -> Vec<(Tz, Vec<Instant>)> {
    let begin = DateTime::from_timestamp(1_798_761_600, 0).expect("2027-01-01");
    let mut ways: BTreeMap<Vec<(Instant, i32)>, Tz> = BTreeMap::new();
    for zone in TZ_VARIANTS {
        let mut changes = Vec::new();
        for day in (0..3_653).map(|day| begin + TimeDelta::days(day)) {
            let (mut before, mut after) = (day, day + TimeDelta::days(1));
            if offset(zone, before) == offset(zone, after) {
                continue;
            }
            while after - before > MINUTE {
                let middle = before + MINUTE * i32::try_from((after - before).num_minutes() / 2).expect("a day");
                if offset(zone, middle) == offset(zone, before) { before = middle } else { after = middle }
            }
            changes.push((after, offset(zone, after)));
        }
        if !changes.is_empty() {
            ways.entry(changes).or_insert(zone);
        }
    }
    ways.into_iter().map(|(changes, zone)| (zone, changes.into_iter().map(|(at, _)| at).collect())).collect()
}

/// A thousand random expressions, in each zone that changes, around the changes of ten years and on other days. Each time each zone has its
/// turn. In the whole length each expression meets each zone, each change of each zone has its turn, and the expressions are other ones.
#[test]
fn the_slots_are_those_of_a_walk_over_each_minute() {
    let is_full = std::env::var_os("RECRUITER_TEST_LENGTH").is_some_and(|length| length == "full");
    let seed = if is_full { rand::random() } else { 17 };
    let (ways, mut random) = (changes(), StdRng::seed_from_u64(seed));
    assert!(ways.len() > 20, "only {} ways", ways.len());
    let (mut compared, mut accepted) = (0, 0);
    for number in 0..1_000 {
        let expression = Expression::random(&mut random);
        let zones = ways.iter().cycle().skip(number % ways.len()).take(if is_full { ways.len() } else { 1 });
        let timed = zones.map_while(|(zone, changes)| Some((zone, changes, Timing::cron(&expression.text(), zone.name()).ok()?)));
        for (at, (zone, changes, timing)) in timed.enumerate() {
            accepted += usize::from(at == 0);
            let change = if is_full { changes[number % changes.len()] } else { *changes.choose(&mut random).expect("a change") };
            let elsewhere = change + TimeDelta::minutes(random.random_range(-100_000..100_000));
            for middle in [change, elsewhere] {
                let (from, until) = (middle - AROUND, middle + AROUND);
                let expected = expression.slots(*zone, from, until);
                let slots: Vec<Instant> = timing.slots_after(from - TimeDelta::milliseconds(1)).take_while(|slot| *slot < until).collect();
                assert_eq!(slots, expected, "seed {seed}: {} {} {}", expression.text(), zone.name(), middle.with_timezone(&Utc));
                compared += slots.len();
            }
        }
    }
    assert!(compared > 10_000, "seed {seed}: only {compared} slots");
    // The others name a date like the 31st of June.
    assert!(accepted >= 900, "seed {seed}: only {accepted} expressions");
}
