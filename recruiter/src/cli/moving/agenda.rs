//! `recruiter import agenda`: enqueues what waits in the collection of Agenda, the job library for Node, and declares its repeated jobs as
//! schedules. It only reads that collection. A job keeps its id, so a second import enqueues nothing twice.
//!
//! The documents are those of Agenda 4 to 6: `name`, `data`, `priority`, `nextRunAt`, `lockedAt`, `repeatInterval`, `repeatTimezone`,
//! `repeatAt`, `disabled`.

use std::{io::Write, time::Duration};

use bson::{Bson, Document, RawDocumentBuf, doc};
use chrono::TimeDelta;
use clap::Args;
use recruiter_common::{
    NewJob, flags::name_of_text, ids::JobId, instant::Instant, schedules::Schedule, shutdown::Shutdown, spec::duration_of_text,
    store::ConnectArgs,
};

use super::{
    Source, number,
    taking::{Found, Reason, Taking},
};

pub(super) const EXAMPLES: &str = "\
Stop the processes of Agenda first: a job that they run after the import runs twice.

Examples:
  recruiter import agenda --dry-run
  recruiter import agenda --database shop --zone Europe/Berlin --group mail
      the jobs in the collection agendaJobs of the database shop

A job whose `data` is no document has it as the parameter `data`. Repeated jobs become schedules
of the namespace `agenda`. Left alone are jobs that are finished, disabled or locked, and those
whose repetition has no counterpart; each is named with the reason.";

/// The namespace of the schedules.
const NAMESPACE: &str = "agenda";

#[derive(Args, Clone, Debug)]
pub(in crate::cli) struct AgendaArgs {
    #[command(flatten)]
    source: Source,
    /// Collection of Agenda
    #[arg(long, env = "RECRUITER_IMPORT_COLLECTION", value_name = "NAME", default_value = "agendaJobs", value_parser = name_of_text)]
    collection: String,
    /// Group of the jobs [default: that of all jobs without one]
    #[arg(long, env = "RECRUITER_IMPORT_GROUP", value_name = "GROUP", value_parser = name_of_text)]
    group: Option<String>,
    /// How long a lock of Agenda holds (its `defaultLockLifetime`): a job with an older one was left by a process that died
    #[arg(long, env = "RECRUITER_IMPORT_LOCK_LIFETIME", value_name = "DURATION", default_value = "10m", value_parser = duration_of_text)]
    lock_lifetime: Duration,
}

#[expect(clippy::disallowed_methods, reason = "the collection of another library")]
pub(super) async fn run(args: AgendaArgs, connect: &ConnectArgs, shutdown: &Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    let store = args.source.store(connect).await?;
    let collection = args.source.database(&store).collection::<RawDocumentBuf>(&args.collection);
    let nothing = format!("{} has no documents; --database and --collection name the collection of Agenda", collection.namespace());
    let now = store.now();
    let mut taking = Taking::new(&store, "Agenda", &args.source, out);
    let name = |document: &Document| document.get_str("name").unwrap_or_default().to_owned();
    taking.collection(&collection, shutdown, |document| (name(document), convert(document, now, &args))).await?;
    taking.finish(shutdown, &nothing).await
}

/// What a document of Agenda becomes at `now`.
fn convert(document: &Document, now: Instant, args: &AgendaArgs) -> Found {
    let left = |reason: Reason, why: &str| Found::Left(reason, why.to_owned());
    let is_set = |field: &str| document.get(field).is_some_and(|value| !matches!(value, Bson::Null | Bson::Boolean(false)));
    let at = |field: &str| document.get_datetime(field).ok().map(|at| at.to_chrono());
    let Ok(name) = document.get_str("name") else { return left(Reason::Malformed, "it has no name") };
    let Ok(id) = document.get_object_id("_id") else { return left(Reason::Malformed, "its _id is no ObjectId") };
    let is_repeated = is_set("repeatInterval") || is_set("repeatAt");
    // A job that runs once has no next run while it runs, but a lock.
    if !is_repeated && !is_set("nextRunAt") && !is_set("lockedAt") {
        return Found::Finished;
    }
    if is_set("disabled") {
        return left(Reason::Disabled, "it is disabled in Agenda");
    }
    let lifetime = TimeDelta::from_std(args.lock_lifetime).unwrap_or(TimeDelta::MAX);
    if at("lockedAt").is_some_and(|locked| now - locked < lifetime) {
        return left(
            Reason::Locked,
            "a process of Agenda has locked it: stop that, and import again when the lock is too old (--lock-lifetime)",
        );
    }
    let parameters = match document.get("data") {
        Some(Bson::Document(data)) => data.clone(),
        None | Some(Bson::Null) => doc! {},
        Some(other) => doc! { "data": other.clone() },
    };
    let mut job = NewJob::of_class(name, parameters).priority(priority(document.get("priority")));
    if let Some(group) = &args.group {
        job = job.in_group(group);
    }
    if is_repeated {
        return match timing(document, &args.source.zone) {
            Err(why) => Found::Left(Reason::Repetition, why),
            Ok(schedule) => {
                // `every` makes one such job for each name, `repeatEvery` any number.
                let is_only = document.get_str("type").is_ok_and(|kind| kind == "single");
                let key = if is_only { name.to_owned() } else { format!("{name}:{}", id.to_hex()) };
                Found::Schedule(key, Box::new(schedule.job(job).in_namespace(NAMESPACE)), None)
            }
        };
    }
    if is_set("nextRunAt") && at("nextRunAt").is_none() {
        return left(Reason::Malformed, "its nextRunAt is no date");
    }
    let due = at("nextRunAt").unwrap_or(now);
    let id = JobId::from(id);
    Found::Job(Box::new(job.with_id(id).at(due)), id, None)
}

/// Agenda counts from -20, the lowest, to 20, with words for five of them; jobs have 1 to 9, and 5 is usual.
fn priority(priority: Option<&Bson>) -> u8 {
    let of_word = |word: &str| match word {
        "lowest" => -20.0,
        "low" => -10.0,
        "high" => 10.0,
        "highest" => 20.0,
        _ => 0.0,
    };
    let number = priority.and_then(|priority| number(priority).or_else(|| priority.as_str().map(of_word))).unwrap_or_default();
    // The steps between are those of five.
    let above = [-17.5, -12.5, -7.5, -2.5, 2.5, 7.5, 12.5, 17.5].iter().filter(|step| number >= **step).count();
    1 + u8::try_from(above).unwrap_or_default()
}

/// When a repeated job runs: a cron expression, an interval such as `3 minutes`, or a time of day such as `3:30pm`.
fn timing(document: &Document, zone: &str) -> Result<Schedule, String> {
    for field in ["startDate", "endDate", "skipDays"] {
        if document.get(field).is_some_and(|value| *value != Bson::Null) {
            return Err(format!("a schedule has no counterpart of its `{field}`"));
        }
    }
    let zone = document.get_str("repeatTimezone").unwrap_or(zone);
    let schedule = match (document.get("repeatInterval"), document.get("repeatAt")) {
        (Some(Bson::String(text)), _) => match interval(text) {
            Some(interval) => Schedule::every(interval),
            None => Schedule::cron(text, zone),
        },
        (Some(value), _) if number(value).is_some() => {
            let seconds = number(value).unwrap_or_default() / 1_000.0;
            Schedule::every(Duration::try_from_secs_f64(seconds).unwrap_or_default())
        }
        (_, Some(Bson::String(text))) => {
            let (hour, minute) = time_of_day(text).ok_or_else(|| format!("its `repeatAt` is not understood: {text}"))?;
            Schedule::cron(&format!("{minute} {hour} * * *"), zone)
        }
        _ => return Err("its repetition is not understood".into()),
    };
    schedule.map_err(|problem| problem.to_string())
}

/// `5 minutes`, `one hour and 30 minutes`, `a day`: the texts of the package `human-interval`.
fn interval(text: &str) -> Option<Duration> {
    const WORDS: [&str; 11] = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];
    let number_of = |word: &str| match word {
        "a" | "an" => Some("1".to_owned()),
        _ => WORDS.iter().position(|other| *other == word).map(|number| number.to_string()),
    };
    let text = text.to_lowercase().replace(',', " ");
    let words = text.split_whitespace().filter(|word| *word != "and");
    let words: Vec<String> = words.map(|word| number_of(word).unwrap_or_else(|| word.to_owned())).collect();
    let text =
        if words.len() == 1 && !words[0].starts_with(|c: char| c.is_ascii_digit()) { format!("1 {}", words[0]) } else { words.join(" ") };
    humantime::parse_duration(&text).ok()
}

/// `15:30`, `3:30pm`, `3pm`, `3:30 pm`: hour and minute.
fn time_of_day(text: &str) -> Option<(u8, u8)> {
    let text = text.trim().to_lowercase();
    let (time, is_afternoon) = match (text.strip_suffix("am"), text.strip_suffix("pm")) {
        (Some(time), _) => (time, Some(false)),
        (_, Some(time)) => (time, Some(true)),
        (None, None) => (text.as_str(), None),
    };
    let (hour, minute) = time.trim().split_once(':').or(is_afternoon.map(|_| (time.trim(), "0")))?;
    let (hour, minute) = (hour.parse::<u8>().ok()?, minute.parse::<u8>().ok()?);
    let hour = match is_afternoon {
        None => hour,
        Some(_) if !(1..=12).contains(&hour) => return None,
        Some(is_afternoon) => hour % 12 + if is_afternoon { 12 } else { 0 },
    };
    (hour < 24 && minute < 60).then_some((hour, minute))
}

#[cfg(test)]
mod tests {
    use bson::oid::ObjectId;

    use super::*;
    use crate::cli::output::Format;

    fn args() -> AgendaArgs {
        AgendaArgs {
            source: Source { database: None, zone: "Europe/Berlin".into(), dry_run: false, format: Format { json: false } },
            collection: "agendaJobs".into(),
            group: None,
            lock_lifetime: Duration::from_secs(600),
        }
    }

    fn now() -> Instant {
        Instant::UNIX_EPOCH + TimeDelta::days(20_000)
    }

    fn converted(more: Document) -> Found {
        let mut document = doc! { "_id": ObjectId::new(), "name": "mail", "type": "normal", "priority": 0, "data": { "to": "ada" },
        "nextRunAt": bson::DateTime::from_chrono(now()), "lockedAt": Bson::Null };
        document.extend(more);
        convert(&document, now(), &args())
    }

    #[test]
    fn what_waits_becomes_a_job_and_keeps_its_id() {
        let id = ObjectId::new();
        let Found::Job(job, same, None) = converted(doc! { "_id": id, "priority": 10 }) else { panic!("no job") };
        let job = job.to_job(now()).unwrap();
        assert_eq!((same.to_string(), job.id, job.class.as_str()), (id.to_hex(), same, "mail"));
        assert_eq!((job.settings.priority().get(), job.parameters), (7, doc! { "to": "ada" }.into()));
        let parameters = |data: Bson| {
            let Found::Job(job, ..) = converted(doc! { "data": data }) else { panic!("no job") };
            job.to_job(now()).unwrap().parameters
        };
        assert_eq!(parameters(Bson::Null), doc! {}.into());
        assert_eq!(parameters(vec![1, 2].into()), doc! { "data": [1, 2] }.into());
        let old = bson::DateTime::from_chrono(now() - TimeDelta::minutes(11));
        for next in [Bson::Null, old.into()] {
            assert!(matches!(converted(doc! { "lockedAt": old, "nextRunAt": next }), Found::Job(..)), "its process has died");
        }
    }

    #[test]
    fn what_is_left_alone_has_a_reason() {
        let date = bson::DateTime::from_chrono(now());
        let left = |more: Document, words: &str| {
            let Found::Left(_, why) = converted(more) else { panic!("it is taken over") };
            assert!(why.contains(words), "{why}");
        };
        left(doc! { "name": 7 }, "no name");
        left(doc! { "_id": "x" }, "no ObjectId");
        left(doc! { "disabled": true }, "disabled");
        left(doc! { "lockedAt": date }, "has locked it");
        left(doc! { "nextRunAt": "soon" }, "no date");
        left(doc! { "repeatInterval": "5 minutes", "skipDays": "1 day" }, "`skipDays`");
        left(doc! { "repeatInterval": "whenever" }, "whenever");
        left(doc! { "repeatAt": "noonish" }, "noonish");
        left(doc! { "repeatInterval": [] }, "not understood");
        left(doc! { "repeatInterval": 0 }, "");
        left(doc! { "repeatInterval": "0 3 * * *", "repeatTimezone": "Europe/Nowhere" }, "Europe/Nowhere");
        assert!(matches!(converted(doc! { "nextRunAt": Bson::Null }), Found::Finished));
    }

    #[test]
    fn repetitions_become_schedules() {
        let next = |more: Document| {
            let Found::Schedule(key, schedule, None) = converted(more) else { panic!("no schedule") };
            schedule.check(&key).unwrap();
            let next = schedule.timing().next_after(now()).unwrap();
            (key.split(':').next().unwrap().to_owned(), (next - now()).num_minutes())
        };
        // The day 20,000 begins at one o'clock in Berlin.
        assert_eq!(next(doc! { "repeatInterval": "0 3 * * *", "type": "single" }), ("mail".into(), 60));
        assert_eq!(next(doc! { "repeatInterval": "0 3 * * *", "repeatTimezone": "UTC" }), ("mail".into(), 180));
        assert_eq!(next(doc! { "repeatInterval": "three minutes" }).1, 3);
        assert_eq!(next(doc! { "repeatInterval": 120_000_i64 }).1, 2);
        assert_eq!(next(doc! { "repeatAt": "3:30pm" }).1, 13 * 60 + 30);
        let key = |kind: &str| {
            let Found::Schedule(key, ..) = converted(doc! { "repeatInterval": "1 hour", "type": kind }) else { panic!("no schedule") };
            key
        };
        assert!(key("single") == "mail" && key("normal") != key("normal"));
    }

    #[test]
    fn intervals_times_and_priorities_are_read_as_agenda_reads_them() {
        for (text, seconds) in
            [("5 minutes", 300), ("one hour and 30 minutes", 5_400), ("a day", 86_400), ("minute", 60), ("3 hours, 1 second", 10_801)]
        {
            assert_eq!(interval(text), Some(Duration::from_secs(seconds)), "{text}");
        }
        assert_eq!((interval("0 3 * * *"), interval(""), interval("soon")), (None, None, None));
        for (text, time) in [("15:30", (15, 30)), ("3:30pm", (15, 30)), ("3:30 PM", (15, 30)), ("12am", (0, 0)), ("12:05pm", (12, 5))] {
            assert_eq!(time_of_day(text), Some(time), "{text}");
        }
        assert!(["15", "24:00", "13pm", "3:60", "", "pm"].iter().all(|text| time_of_day(text).is_none()));
        for (given, ours) in [(-20, 1), (-10, 3), (0, 5), (10, 7), (20, 9), (i32::MAX, 9), (i32::MIN, 1), (3, 6), (2, 5)] {
            assert_eq!(priority(Some(&given.into())), ours, "{given}");
        }
        assert_eq!([priority(Some(&"highest".into())), priority(None), priority(Some(&f64::NAN.into()))], [9, 5, 5]);
    }
}
