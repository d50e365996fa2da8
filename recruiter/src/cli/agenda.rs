//! `recruiter import agenda`: enqueues what waits in the collection of Agenda, the job library for Node, and declares its repeated jobs as
//! schedules. It only reads that collection. A job keeps its id, so a second import enqueues nothing twice.
//!
//! The documents are those of Agenda 4 to 6: `name`, `data`, `priority`, `nextRunAt`, `lockedAt`, `repeatInterval`, `repeatTimezone`,
//! `repeatAt`, `disabled`.

use std::{collections::BTreeMap, io::Write, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use bson::{Bson, Document, RawDocumentBuf, doc};
use chrono::TimeDelta;
use clap::{Args, Subcommand};
use futures_util::TryStreamExt as _;
use indicatif::ProgressBar;
use recruiter_common::{
    NewJob,
    enqueue::{EnqueueError, Outcome},
    flags::name_of_text,
    ids::JobId,
    instant::Instant,
    schedules::Schedule,
    shutdown::Shutdown,
    spec::duration_of_text,
    store::{ConnectArgs, Store, lossy},
    telemetry::chain,
};
use serde_json::json;

use super::{
    connected_to_change,
    output::{Format, printable, progress},
    presence::{Needs, warn_of_unmet},
    view::{dry, id_in, json_line},
};

const EXAMPLES: &str = "\
Stop the processes of Agenda first: a job that they run after the import runs twice.

Examples:
  recruiter import agenda --dry-run
  recruiter import agenda --database shop --zone Europe/Berlin --group mail
      the jobs in the collection agendaJobs of the database shop

A job whose `data` is no document has it as the parameter `data`. Repeated jobs become schedules
of the namespace `agenda`. Left alone are jobs that are finished, disabled or locked, and those
whose repetition has no counterpart; each is named with the reason.";

/// Jobs are enqueued so many at a time.
const BATCH: usize = 1_000;
/// The namespace of the schedules.
const NAMESPACE: &str = "agenda";

#[derive(Subcommand, Clone, Debug)]
pub(super) enum ImportCommand {
    /// Enqueue what waits in the collection of Agenda (Node), and declare its repeated jobs as schedules
    #[command(after_help = EXAMPLES)]
    Agenda(AgendaArgs),
}

#[derive(Args, Clone, Debug)]
pub(super) struct AgendaArgs {
    /// Database of Agenda, on the same MongoDB [default: the database of the connection string]
    #[arg(long, env = "RECRUITER_IMPORT_DATABASE", value_name = "NAME", value_parser = name_of_text)]
    database: Option<String>,
    /// Collection of Agenda
    #[arg(long, env = "RECRUITER_IMPORT_COLLECTION", value_name = "NAME", default_value = "agendaJobs", value_parser = name_of_text)]
    collection: String,
    /// Group of the jobs [default: that of all jobs without one]
    #[arg(long, env = "RECRUITER_IMPORT_GROUP", value_name = "GROUP", value_parser = name_of_text)]
    group: Option<String>,
    /// Time zone of the processes of Agenda, for repeated jobs that name none
    #[arg(long, env = "RECRUITER_IMPORT_ZONE", value_name = "ZONE", default_value = "UTC")]
    zone: String,
    /// How long a lock of Agenda holds (its `defaultLockLifetime`): a job with an older one was left by a process that died
    #[arg(long, env = "RECRUITER_IMPORT_LOCK_LIFETIME", value_name = "DURATION", default_value = "10m", value_parser = duration_of_text)]
    lock_lifetime: Duration,
    /// Only show what would be enqueued and declared
    #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = clap::builder::BoolishValueParser::new())]
    dry_run: bool,
    #[command(flatten)]
    format: Format,
}

/// What a document of Agenda becomes.
#[derive(Debug)]
enum Found {
    Job(Box<NewJob>, JobId),
    Schedule(String, Box<Schedule>),
    /// It has nothing left to do.
    Finished,
    /// It is left alone, for this reason.
    Left(String),
}

/// One line of output, and the counts of all.
struct Report<'a, W> {
    out: &'a mut W,
    format: Format,
    dry_run: bool,
    counts: BTreeMap<&'static str, u64>,
    shown: ProgressBar,
}

impl<W: Write> Report<'_, W> {
    /// Counts an outcome. All are lines of JSON; of the others, those that need a look are written.
    fn add(&mut self, id: &str, name: &str, outcome: &'static str, why: Option<&str>) -> std::io::Result<()> {
        *self.counts.entry(outcome).or_default() += 1;
        self.shown.inc(1);
        if self.format.json {
            return json_line(self.out, &json!({ "id": id, "name": name, "outcome": outcome, "why": why, "dry_run": self.dry_run }));
        }
        match why {
            Some(why) => {
                self.shown.suspend(|| writeln!(std::io::stderr(), "{id} ({}) is left alone: {}", printable(name, 80), printable(why, 400)))
            }
            None => Ok(()),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the collection of another library")]
pub(super) async fn run(command: ImportCommand, connect: &ConnectArgs, shutdown: &Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    let ImportCommand::Agenda(args) = command;
    Schedule::cron("0 0 * * *", &args.zone).map(drop).map_err(|problem| super::exit::usage(format!("--zone: {problem}")))?;
    let store = connected_to_change(connect, "recruiter import", args.dry_run).await?;
    let database = store.database().client().database(args.database.as_deref().unwrap_or(store.database().name()));
    let place = format!("{}.{}", database.name(), args.collection);
    let agenda = database.collection::<RawDocumentBuf>(&args.collection);
    let mut found = agenda.find(doc! {}).sort(doc! { "_id": 1 }).await.with_context(|| format!("cannot read {place}"))?;
    let shown = progress(ProgressBar::no_length(), "{spinner} {pos} jobs of Agenda  {elapsed}");
    let mut report = Report { out, format: args.format, dry_run: args.dry_run, counts: BTreeMap::new(), shown };
    let (mut needs, now) = (Needs::default(), store.now());
    let mut batch = Vec::new();
    loop {
        let next = found.try_next().await.with_context(|| format!("cannot read {place}"))?;
        let is_last = next.is_none() || shutdown.is_requested();
        if let Some(next) = next {
            let document = lossy(&next);
            let name = document.get_str("name").unwrap_or_default().to_owned();
            let id = document.get("_id").map(id_in).unwrap_or_default();
            match convert(&document, now, &args) {
                Found::Job(job, id) => batch.push((id, name, *job)),
                Found::Schedule(key, schedule) => declare(&store, &key, &schedule, &id, &name, &mut report).await?,
                Found::Finished => report.add(&id, &name, "finished", None)?,
                Found::Left(why) => report.add(&id, &name, "left", Some(&why))?,
            }
        }
        if is_last || batch.len() >= BATCH {
            enqueue(&store, std::mem::take(&mut batch), &mut report, &mut needs).await?;
        }
        if is_last {
            break;
        }
    }
    report.shown.finish_and_clear();
    if report.counts.is_empty() {
        bail!("{place} has no documents; --database and --collection name the collection of Agenda");
    }
    let told = report.counts.iter().map(|(outcome, count)| format!("{count} {outcome}")).collect::<Vec<_>>().join(", ");
    if !args.format.json {
        writeln!(report.out, "{}{told}", dry(args.dry_run))?;
    }
    report.out.flush()?;
    warn_of_unmet(&store, &needs).await;
    if shutdown.is_requested() {
        return Err(anyhow!("stopped by a signal; repeat the command to import the rest").context(recruiter_common::exit::Exit::Aborted));
    }
    match report.counts.get("left") {
        None => Ok(()),
        Some(left) => bail!("{left} jobs of Agenda were left alone"),
    }
}

async fn declare(
    store: &Store,
    key: &str,
    schedule: &Schedule,
    id: &str,
    name: &str,
    report: &mut Report<'_, impl Write>,
) -> anyhow::Result<()> {
    let schedules = store.schedules();
    let declared = if report.dry_run { schedules.compare(key, schedule).await } else { schedules.declare(key, schedule).await };
    match declared {
        Ok(_) => Ok(report.add(id, name, "declared", None)?),
        Err(recruiter_common::schedules::ScheduleError::Store(error)) => Err(error.into()),
        Err(refused) => Ok(report.add(id, name, "left", Some(&chain(&refused)))?),
    }
}

/// Enqueues these jobs together; if one is refused, one by one, to find out which.
async fn enqueue(
    store: &Store,
    batch: Vec<(JobId, String, NewJob)>,
    report: &mut Report<'_, impl Write>,
    needs: &mut Needs,
) -> anyhow::Result<()> {
    batch.iter().for_each(|(.., job)| needs.add(job));
    let jobs = || batch.iter().map(|(.., job)| job.clone());
    if report.dry_run {
        for (id, name, job) in &batch {
            match job.to_job(store.now()) {
                Ok(_) => report.add(&id.to_string(), name, "enqueued", None)?,
                Err(refused) => report.add(&id.to_string(), name, "left", Some(&chain(&refused)))?,
            }
        }
        return Ok(());
    }
    let word = |outcome: Outcome| if outcome == Outcome::KnownId { "known" } else { "enqueued" };
    match store.enqueue_many(jobs()).await {
        Ok(enqueued) => {
            for ((id, name, _), enqueued) in batch.iter().zip(enqueued) {
                report.add(&id.to_string(), name, word(enqueued.outcome), None)?;
            }
        }
        Err(EnqueueError::Store(error)) => return Err(anyhow!(error).context("repeat the command: it enqueues nothing twice")),
        Err(_) => {
            for (id, name, job) in &batch {
                match store.enqueue_many([job.clone()]).await {
                    Ok(enqueued) => enqueued.iter().try_for_each(|one| report.add(&id.to_string(), name, word(one.outcome), None))?,
                    Err(EnqueueError::Store(error)) => return Err(anyhow!(error).context("repeat the command: it enqueues nothing twice")),
                    Err(refused) => report.add(&id.to_string(), name, "left", Some(&chain(&refused)))?,
                }
            }
        }
    }
    Ok(())
}

/// What a document of Agenda becomes at `now`.
fn convert(document: &Document, now: Instant, args: &AgendaArgs) -> Found {
    let left = |why: &str| Found::Left(why.to_owned());
    let is_set = |field: &str| document.get(field).is_some_and(|value| !matches!(value, Bson::Null | Bson::Boolean(false)));
    let at = |field: &str| document.get_datetime(field).ok().map(|at| at.to_chrono());
    let Ok(name) = document.get_str("name") else { return left("it has no name") };
    let Ok(id) = document.get_object_id("_id") else { return left("its _id is no ObjectId") };
    let is_repeated = is_set("repeatInterval") || is_set("repeatAt");
    // A job that runs once has no next run while it runs, but a lock.
    if !is_repeated && !is_set("nextRunAt") && !is_set("lockedAt") {
        return Found::Finished;
    }
    if is_set("disabled") {
        return left("it is disabled in Agenda");
    }
    let lifetime = TimeDelta::from_std(args.lock_lifetime).unwrap_or(TimeDelta::MAX);
    if at("lockedAt").is_some_and(|locked| now - locked < lifetime) {
        return left("a process of Agenda has locked it: stop that, and import again when the lock is too old (--lock-lifetime)");
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
        return match timing(document, &args.zone) {
            Err(why) => Found::Left(why),
            Ok(schedule) => {
                // `every` makes one such job for each name, `repeatEvery` any number.
                let is_only = document.get_str("type").is_ok_and(|kind| kind == "single");
                let key = if is_only { name.to_owned() } else { format!("{name}:{}", id.to_hex()) };
                Found::Schedule(key, Box::new(schedule.job(job).in_namespace(NAMESPACE)))
            }
        };
    }
    if is_set("nextRunAt") && at("nextRunAt").is_none() {
        return left("its nextRunAt is no date");
    }
    let due = at("nextRunAt").unwrap_or(now);
    let id = JobId::from(id);
    Found::Job(Box::new(job.with_id(id).at(due)), id)
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

fn number(value: &Bson) -> Option<f64> {
    let whole = value.as_i32().map(i64::from).or(value.as_i64());
    whole.map(|whole| whole as f64).or(value.as_f64()).filter(|number| number.is_finite())
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

    fn args() -> AgendaArgs {
        AgendaArgs {
            database: None,
            collection: "agendaJobs".into(),
            group: None,
            zone: "Europe/Berlin".into(),
            lock_lifetime: Duration::from_secs(600),
            dry_run: false,
            format: Format { json: false },
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
        let Found::Job(job, same) = converted(doc! { "_id": id, "priority": 10 }) else { panic!("no job") };
        let job = job.to_job(now()).unwrap();
        assert_eq!((same.to_string(), job.id, job.class.as_str()), (id.to_hex(), same, "mail"));
        assert_eq!((job.settings.priority().get(), job.parameters), (7, doc! { "to": "ada" }.into()));
        let parameters = |data: Bson| {
            let Found::Job(job, _) = converted(doc! { "data": data }) else { panic!("no job") };
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
            let Found::Left(why) = converted(more) else { panic!("it is taken over") };
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
            let Found::Schedule(key, schedule) = converted(more) else { panic!("no schedule") };
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
            let Found::Schedule(key, _) = converted(doc! { "repeatInterval": "1 hour", "type": kind }) else { panic!("no schedule") };
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
