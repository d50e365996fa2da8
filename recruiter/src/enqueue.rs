//! `recruiter enqueue`: one job described by flags, or many described by lines of JSON.
//!
//! A file is read as a stream and sent in batches of whatever lines are there without waiting, so that neither a large
//! file needs memory nor a slow pipe delays its jobs. Each job gets its id before it is first sent: sending it again
//! after a lost reply does not enqueue it twice.

use std::{
    collections::BTreeSet,
    io::{IsTerminal, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, anyhow};
use bson::{Bson, Document, doc};
use chrono::{DateTime, Utc};
use clap::{Args, builder::BoolishValueParser};
use indicatif::{ProgressBar, ProgressStyle};
use recruiter_common::{
    enqueue::{EnqueueError, NewJob},
    exit::Exit,
    ids::JobId,
    instant::Instant,
    job::{Priority, StoredPolicy},
    retry_policy::RetryPolicies,
    shutdown::{Shutdown, pause},
    store::{ConnectArgs, Store},
    telemetry::chain,
};
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::Value;
use tokio::{
    fs::File,
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
};

use crate::{
    output::{Format, json_line},
    presence::Workers,
};

/// Jobs that are sent together, at most.
const BATCH: usize = 1_000;
/// Bytes of a file that are looked at together: a batch is never larger than this and one more line.
const READ_AHEAD: usize = 1024 * 1024;
/// Longest line that is read, in bytes: a job of the largest size that MongoDB takes fits even when JSON needs four
/// bytes for one of BSON.
const LONGEST_LINE: usize = 16 * 1024 * 1024;
/// How often a batch is sent again when MongoDB does not answer: enough for a failover.
const TRIES: u32 = 10;
/// Between these tries.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Classes and groups of a file for which workers are looked for, at most.
const KINDS: usize = 1_000;

/// Warnings of such jobs, at most.
const WARNINGS: usize = 5;

/// What to enqueue. `--id`, `--from` and `--skip` belong to a single call and have no environment variable.
#[derive(Args, Clone, Debug)]
pub struct EnqueueArgs {
    #[command(flatten)]
    job: Description,
    /// Enqueue one job for each line of this file, or of standard input when it is `-`
    #[arg(long, value_name = "FILE", conflicts_with = "Description")]
    from: Option<PathBuf>,
    /// Leave out the first N lines of the file: they were enqueued before
    #[arg(long, value_name = "N", requires = "from", conflicts_with = "Description", default_value_t = 0)]
    skip: u64,
    /// Accept retry policies that this program does not know, because your workers do
    #[arg(long, env = "RECRUITER_ENQUEUE_CUSTOM_POLICY", value_parser = BoolishValueParser::new())]
    custom_policy: bool,
    #[command(flatten)]
    format: Format,
}

/// One job, as flags or as one line of JSON.
#[derive(Args, Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    /// Class of the workable: what is to be done
    #[arg(long, env = "RECRUITER_ENQUEUE_CLASS", value_name = "CLASS", required_unless_present = "from")]
    class: Option<String>,
    /// Parameters of the workable: a JSON object; MongoDB's extended JSON gives dates, ids and binary data
    #[arg(long, env = "RECRUITER_ENQUEUE_PARAMETERS", value_name = "JSON", value_parser = parameters_of_text)]
    #[serde(default, deserialize_with = "parameters")]
    parameters: Option<Document>,
    /// Make it a bundle: a JSON array with the parameters of each item, 1000 at most
    #[arg(long, env = "RECRUITER_ENQUEUE_ITEMS", value_name = "JSON", value_parser = items_of_text, conflicts_with = "parameters")]
    #[serde(default, deserialize_with = "items")]
    items: Option<Items>,
    /// Group: only workers that work on it get the job [default: generic]
    #[arg(long, env = "RECRUITER_ENQUEUE_GROUP", value_name = "GROUP")]
    group: Option<String>,
    /// How urgent it is: 0 to 9, higher first [default: 5]
    #[arg(long, env = "RECRUITER_ENQUEUE_PRIORITY", value_name = "0-9", allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(0..=9))]
    priority: Option<i64>,
    /// When it is due, like 2030-01-31T18:00:00Z; in the past is now [default: now]
    #[arg(long = "at", env = "RECRUITER_ENQUEUE_AT", value_name = "INSTANT", value_parser = instant_of_text, conflicts_with = "after")]
    #[serde(default, deserialize_with = "instant")]
    scheduled_at: Option<Instant>,
    /// How long after it is enqueued it is due, like 5m or 1h 30m
    #[arg(long, env = "RECRUITER_ENQUEUE_AFTER", value_name = "DURATION", value_parser = duration_of_text)]
    #[serde(default, deserialize_with = "duration")]
    after: Option<Duration>,
    /// A label, to find it by; may be given several times
    #[arg(long = "tag", env = "RECRUITER_ENQUEUE_TAG", value_name = "TAG")]
    #[serde(default)]
    tags: Vec<String>,
    /// Its name in your own terms; need not be unique
    #[arg(long, env = "RECRUITER_ENQUEUE_URN", value_name = "URN")]
    urn: Option<String>,
    /// What happens when it fails: a retry policy {"class": …, "parameters": …} [default: it is not done again]
    #[arg(long = "retry", env = "RECRUITER_ENQUEUE_RETRY", value_name = "JSON", value_parser = policy_of_text)]
    #[serde(default, deserialize_with = "policy")]
    retry_policy: Option<StoredPolicy>,
    /// Its id, 24 hexadecimal digits: enqueued again under the same id, it is left alone
    #[arg(long, value_name = "ID", value_parser = id_of_text)]
    #[serde(default, deserialize_with = "id")]
    id: Option<JobId>,
}

/// Parameters of the items of a bundle.
#[derive(Clone, Debug)]
struct Items(Vec<Document>);

impl Description {
    /// The job under its id, checked as far as this program can.
    fn into_job(self, custom_policy: bool) -> Result<(JobId, NewJob), String> {
        let id = self.id.unwrap_or_else(JobId::new);
        let class = self.class.ok_or("`class` is missing: what is to be done?")?;
        let job = match (self.items, self.parameters) {
            (Some(_), Some(_)) => return Err("`items` and `parameters` contradict each other; say one of them".into()),
            (Some(Items(items)), None) => NewJob::bundle_of_class(class, items),
            (None, parameters) => NewJob::of_class(class, parameters.unwrap_or_default()),
        };
        let mut job = job.with_id(id);
        if let Some(group) = self.group {
            job = job.in_group(group);
        }
        if let Some(priority) = self.priority {
            let known = u8::try_from(priority).ok().and_then(Priority::new);
            job = job.priority(known.ok_or_else(|| format!("`priority` is {priority}; it must be from 0 to 9"))?);
        }
        job = match (self.scheduled_at, self.after) {
            (Some(_), Some(_)) => return Err("`scheduled_at` and `after` contradict each other; say one of them".into()),
            (Some(at), None) => job.at(at),
            (None, Some(delay)) => job.after(delay),
            (None, None) => job,
        };
        job = self.tags.into_iter().fold(job, NewJob::tag);
        if let Some(urn) = self.urn {
            job = job.urn(urn);
        }
        if let Some(policy) = self.retry_policy {
            check_policy(&policy, custom_policy)?;
            job = job.retry_stored(policy);
        }
        Ok((id, job))
    }
}

/// Whether workers will be able to use the policy.
fn check_policy(policy: &StoredPolicy, custom: bool) -> Result<(), String> {
    match RetryPolicies::default().check(policy) {
        Ok(()) => Ok(()),
        Err(problem) if problem.unknown_class().is_some() && custom => Ok(()),
        Err(problem) if problem.unknown_class().is_some() => Err(format!("{problem}; if your workers know it, say --custom-policy")),
        Err(problem) => Err(problem.to_string()),
    }
}

fn extended(value: Value) -> Result<Bson, String> {
    Bson::try_from(value).map_err(|error| format!("that is no extended JSON: {error}"))
}

fn parameters_of_json(value: Value) -> Result<Document, String> {
    let Bson::Document(parameters) = extended(value)? else {
        return Err(r#"parameters must be a JSON object, like {"path": "/tmp/x"}"#.into());
    };
    Ok(parameters)
}

fn items_of_json(value: Value) -> Result<Items, String> {
    let Value::Array(items) = value else {
        return Err(r#"items must be a JSON array of parameters, like [{"path": "/tmp/x"}, {"path": "/tmp/y"}]"#.into());
    };
    let item = |(index, item)| parameters_of_json(item).map_err(|problem| format!("item {index}: {problem}"));
    items.into_iter().enumerate().map(item).collect::<Result<_, _>>().map(Items)
}

fn policy_of_json(value: Value) -> Result<StoredPolicy, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Policy {
        class: String,
        #[serde(default)]
        parameters: Value,
    }
    let policy = Policy::deserialize(value).map_err(|error| format!(r#"a retry policy is {{"class": …, "parameters": …}}: {error}"#))?;
    Ok(StoredPolicy { class: policy.class, parameters: extended(policy.parameters)? })
}

fn instant_of_json(value: Value) -> Result<Instant, String> {
    let value = extended(value)?;
    value.as_datetime().map_or_else(|| instant_of_text(&text_in(&value)), |at| Ok(at.to_chrono()))
}

fn id_of_json(value: Value) -> Result<JobId, String> {
    let value = extended(value)?;
    value.as_object_id().map_or_else(|| id_of_text(&text_in(&value)), |id| Ok(id.into()))
}

fn text_in(value: &Bson) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn duration_of_json(value: Value) -> Result<Duration, String> {
    duration_of_text(value.as_str().unwrap_or(&value.to_string()))
}

fn json_of_text(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("that is no JSON: {error}"))
}

fn parameters_of_text(text: &str) -> Result<Document, String> {
    json_of_text(text).and_then(parameters_of_json)
}

fn items_of_text(text: &str) -> Result<Items, String> {
    json_of_text(text).and_then(items_of_json)
}

fn policy_of_text(text: &str) -> Result<StoredPolicy, String> {
    json_of_text(text).and_then(policy_of_json)
}

pub(crate) fn instant_of_text(text: &str) -> Result<Instant, String> {
    let at = DateTime::parse_from_rfc3339(text).map(|at| at.with_timezone(&Utc));
    at.map_err(|error| format!("`{text:.80}` is no instant ({error}); write it like 2030-01-31T18:00:00Z or 2030-01-31T19:00:00+01:00"))
}

pub(crate) fn duration_of_text(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("`{text:.80}` is no duration ({error}); write it like 90s, 5m or 1h 30m"))
}

/// A job's id as people write it.
pub(crate) fn id_of_text(text: &str) -> Result<JobId, String> {
    text.parse().map_err(|_| format!("`{text:.80}` is no job id, which has 24 hexadecimal digits"))
}

/// Through JSON, so that messages are the same for flags and lines.
fn optional<'de, D: Deserializer<'de>, T>(from: D, read: fn(Value) -> Result<T, String>) -> Result<Option<T>, D::Error> {
    let value = Value::deserialize(from)?;
    if value.is_null() { Ok(None) } else { read(value).map(Some).map_err(D::Error::custom) }
}

fn parameters<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Document>, D::Error> {
    optional(from, parameters_of_json)
}

fn items<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Items>, D::Error> {
    optional(from, items_of_json)
}

fn policy<'de, D: Deserializer<'de>>(from: D) -> Result<Option<StoredPolicy>, D::Error> {
    optional(from, policy_of_json)
}

fn instant<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Instant>, D::Error> {
    optional(from, instant_of_json)
}

fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    optional(from, duration_of_json)
}

fn id<'de, D: Deserializer<'de>>(from: D) -> Result<Option<JobId>, D::Error> {
    optional(from, id_of_json)
}

/// One line of a file; nothing when it is blank.
fn job_of_line(line: &[u8], custom_policy: bool) -> Result<Option<(JobId, NewJob)>, String> {
    if line.len() > LONGEST_LINE {
        return Err(format!("the line is longer than {LONGEST_LINE} bytes: store the data elsewhere and enqueue where it is"));
    }
    let text = std::str::from_utf8(line).map_err(|error| format!("the line is not UTF-8: {error}"))?.trim_start_matches('\u{feff}').trim();
    if text.is_empty() {
        return Ok(None);
    }
    if !text.starts_with('{') {
        return Err(r#"a job is one JSON object on one line, like {"class": "checksum", "parameters": {"path": "/tmp/x"}}"#.into());
    }
    let description: Description = serde_json::from_str(text).map_err(|error| {
        // The line is said already, and it is not line 1.
        let said = error.to_string();
        let problem = said.rsplit_once(" at line ").map_or(said.as_str(), |(problem, _)| problem);
        format!("{problem} (column {})", error.column())
    })?;
    description.into_job(custom_policy).map(Some)
}

/// Enqueues what the arguments say; writes the ids.
///
/// # Errors
/// When something is wrong with a job (nothing after it is enqueued), or MongoDB cannot be used.
pub async fn run(args: EnqueueArgs, connect: &ConnectArgs, mut shutdown: Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    match &args.from {
        None => enqueue_one(args.job, args.custom_policy, args.format, connect, out).await,
        Some(path) => {
            let mut lines = Lines::open(path).await?;
            let store = Store::connect(connect, "recruiter enqueue").await?;
            let mut import = Import {
                store: &store,
                json: args.format.json,
                out,
                enqueued: 0,
                done: args.skip,
                shown: lines.progress(),
                kinds: BTreeSet::new(),
            };
            let imported = import.run(&mut lines, args.custom_policy, &mut shutdown).await;
            let kinds = import.kinds;
            warn_of_untaken(&store, &kinds).await;
            imported
        }
    }
}

async fn enqueue_one(
    job: Description,
    custom_policy: bool,
    format: Format,
    connect: &ConnectArgs,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let (id, job) = job.into_job(custom_policy).map_err(|problem| anyhow!(problem).context(Exit::Usage))?;
    let store = Store::connect(connect, "recruiter enqueue").await?;
    let kind = kind_of(&job);
    match job.enqueue(&store).await {
        Ok(_) => {
            write_id(out, format.json, id)?;
            out.flush()?;
            warn_of_untaken(&store, &BTreeSet::from([kind])).await;
            Ok(())
        }
        Err(EnqueueError::Store(error)) if error.is_transient() => {
            Err(anyhow!(error).context(format!("it is not known whether the job was enqueued; say the same again with --id {id}")))
        }
        Err(refused) => Err(anyhow!(refused).context(Exit::Usage)),
    }
}

/// A class and a group.
type Kind = (String, String);

fn kind_of(job: &NewJob) -> Kind {
    let (class, group) = job.class_and_group();
    (class.to_owned(), group.to_owned())
}

/// Says of which jobs, by class and group, no running worker takes any. They wait for a worker that does, so this is no error; and
/// whoever may not read the roster is told nothing.
async fn warn_of_untaken(store: &Store, kinds: &BTreeSet<Kind>) {
    let Ok(workers) = Workers::find(store).await else { return };
    let reasons: BTreeSet<String> = kinds.iter().filter_map(|(class, group)| workers.why_nobody_takes(class, group)).collect();
    for reason in reasons.iter().take(WARNINGS) {
        // Nobody reads it: then it is not needed.
        let _ = writeln!(std::io::stderr(), "warning: {reason}; the job waits until there is one");
    }
    if let Some(more @ 1..) = reasons.len().checked_sub(WARNINGS) {
        let _ = writeln!(std::io::stderr(), "warning: the same for {more} more classes or groups");
    }
}

fn write_id(out: &mut impl Write, json: bool, id: JobId) -> std::io::Result<()> {
    if json { json_line(out, doc! { "id": id.to_string() }) } else { writeln!(out, "{id}") }
}

/// The lines of a file, one after the other.
struct Lines {
    name: String,
    reader: BufReader<File>,
    /// Size of the file, when it has one.
    size: Option<u64>,
    /// Number of the present line.
    number: u64,
    line: Vec<u8>,
}

impl Lines {
    async fn open(path: &Path) -> anyhow::Result<Self> {
        let (name, file) = if path == Path::new("-") {
            let stdin = std::io::stdin().as_fd().try_clone_to_owned().context("standard input cannot be read")?;
            ("standard input".to_owned(), File::from_std(stdin.into()))
        } else {
            let name = path.display().to_string();
            let file = File::open(path).await.with_context(|| format!("cannot open {name}"))?;
            (name, file)
        };
        let size = file.metadata().await.ok().filter(std::fs::Metadata::is_file).map(|file| file.len());
        Ok(Self { name, reader: BufReader::with_capacity(READ_AHEAD, file), size, number: 0, line: Vec::new() })
    }

    /// Goes to the next line, cut off behind [`LONGEST_LINE`]; says whether there is one.
    async fn advance(&mut self) -> Result<bool, String> {
        self.line.clear();
        self.number += 1;
        let limit = LONGEST_LINE as u64 + 1;
        let read = (&mut self.reader).take(limit).read_until(b'\n', &mut self.line).await;
        read.map(|bytes| bytes > 0).map_err(|error| format!("cannot be read: {error}"))
    }

    /// Whether another line is here without waiting for it.
    fn has_next(&self) -> bool {
        self.reader.buffer().contains(&b'\n')
    }

    /// On a terminal, how far we are.
    fn progress(&self) -> ProgressBar {
        if !std::io::stderr().is_terminal() {
            return ProgressBar::hidden();
        }
        let (bar, style) = match self.size {
            Some(size) => (ProgressBar::new(size), "{bar:40} {percent:>3} %  {msg} enqueued  {eta} left"),
            None => (ProgressBar::no_length(), "{spinner} {msg} enqueued  {elapsed}"),
        };
        bar.with_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar())).with_message("0")
    }
}

/// A file on its way into `scheduled`.
struct Import<'a, W> {
    store: &'a Store,
    json: bool,
    out: &'a mut W,
    /// Jobs so far.
    enqueued: u64,
    /// Everything up to this line is enqueued.
    done: u64,
    shown: ProgressBar,
    /// Classes and groups of the jobs so far, up to [`KINDS`].
    kinds: BTreeSet<Kind>,
}

/// A job and the line it came from.
type Numbered = (u64, JobId, NewJob);

impl<W: Write> Import<'_, W> {
    async fn run(&mut self, lines: &mut Lines, custom_policy: bool, shutdown: &mut Shutdown) -> anyhow::Result<()> {
        let skip = self.done;
        let mut batch: Vec<Numbered> = Vec::new();
        loop {
            // Reading may be dropped half-way: nobody reads on after a stop.
            let advanced = tokio::select! {
                advanced = lines.advance() => advanced,
                () = shutdown.requested() => return Err(self.stopped(Exit::Aborted, "stopped by a signal")),
            };
            self.shown.inc(lines.line.len() as u64);
            let ended = advanced == Ok(false);
            let job = match advanced {
                Ok(true) if lines.number <= skip => continue,
                Ok(true) => job_of_line(&lines.line, custom_policy),
                Ok(false) => Ok(None),
                Err(problem) => Err(problem),
            };
            let (job, bad) = match job {
                Ok(job) => (job, None),
                Err(problem) => (None, Some(problem)),
            };
            batch.extend(job.map(|(id, job)| (lines.number, id, job)));
            if ended || bad.is_some() || batch.len() >= BATCH || !lines.has_next() {
                self.send(std::mem::take(&mut batch), &lines.name).await?;
            }
            match bad {
                Some(problem) => return Err(self.stopped(Exit::Failure, &format!("{}:{}: {problem}", lines.name, lines.number))),
                None if ended => return self.finish(),
                None => {}
            }
        }
    }

    /// Sends jobs together; when one of them is refused, one by one, to find out which.
    async fn send(&mut self, batch: Vec<Numbered>, name: &str) -> anyhow::Result<()> {
        let refused = self.deliver(&batch).await?;
        if refused.is_some() {
            for one in &batch {
                if let Some(refused) = self.deliver(std::slice::from_ref(one)).await? {
                    return Err(self.stopped(Exit::Failure, &format!("{name}:{}: {refused}", one.0)));
                }
            }
        }
        Ok(())
    }

    /// Enqueues all of them and writes their ids, or says why MongoDB or the enqueuer refuses one of them.
    async fn deliver(&mut self, batch: &[Numbered]) -> anyhow::Result<Option<String>> {
        let ([(first, ..), ..], [.., (last, ..)]) = (batch, batch) else { return Ok(None) };
        let mut tries = 0;
        let unknown = loop {
            match self.store.enqueue_many(batch.iter().map(|(.., job)| job.clone())).await {
                Ok(_) => break None,
                Err(EnqueueError::Store(error)) if error.is_transient() && !error.is_unauthorized() && tries < TRIES => {
                    tries += 1;
                    tracing::warn!(error = chain(&error), "a batch may not have arrived; sending it again");
                    pause(TRY_AGAIN_AFTER).await;
                }
                Err(EnqueueError::Store(error)) if error.is_transient() => break Some(error),
                Err(refused) => return Ok(Some(chain(&refused))),
            }
        };
        if let Some(error) = unknown {
            let unknown = "it is not known whether they were enqueued";
            return Err(self.stopped(
                Exit::Unavailable,
                &format!("lines {first} to {last}: {unknown}, --skip {last} leaves them out: {}", chain(&error)),
            ));
        }
        self.done = *last;
        self.enqueued += u64::try_from(batch.len())?;
        self.kinds.extend(batch.iter().map(|(.., job)| kind_of(job)).take(KINDS.saturating_sub(self.kinds.len())));
        self.shown.set_message(self.enqueued.to_string());
        let written = batch.iter().try_for_each(|(_, id, _)| write_id(self.out, self.json, *id)).and_then(|()| self.out.flush());
        written.map(|()| None).map_err(|error| self.stopped(Exit::Failure, &format!("the ids cannot be written: {error}")))
    }

    /// Where to go on.
    fn stopped(&self, exit: Exit, why: &str) -> anyhow::Error {
        self.shown.finish_and_clear();
        let (enqueued, done) = (self.enqueued, self.done);
        let so_far = match enqueued {
            0 => "nothing was enqueued".to_owned(),
            _ => format!("enqueued before: {enqueued}, everything up to line {done}; go on with --skip {done}"),
        };
        anyhow!("{why}; {so_far}").context(exit)
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        self.shown.finish_and_clear();
        if self.json {
            json_line(self.out, doc! { "enqueued": i64::try_from(self.enqueued)? })?;
        } else {
            writeln!(std::io::stderr(), "enqueued: {}", self.enqueued)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line is a job whose description contains this, or is refused with this.
    #[track_caller]
    fn check(line: &[u8], expected: Result<&str, &str>) {
        let shown: String = String::from_utf8_lossy(line).chars().take(200).collect();
        match (job_of_line(line, false), expected) {
            (Ok(Some((_, job))), Ok(part)) => assert!(format!("{job:?}").contains(part), "{job:?} of {shown} does not contain {part:?}"),
            (Err(problem), Err(part)) => assert!(problem.contains(part), "{problem:?} of {shown} does not contain {part:?}"),
            (read, _) => panic!("{shown} is read as {read:?}, not {expected:?}"),
        }
    }

    #[test]
    fn a_line_says_all_that_flags_can_say() {
        check(br#"{"class": "c"}"#, Ok("class: \"c\""));
        check(b"\xef\xbb\xbf {\"class\": \"c\"}\r\n", Ok("class: \"c\""));
        check(br#"{"class": "c", "group": "$where.a", "parameters": null, "tags": ["t"], "urn": "u"}"#, Ok("$where.a"));
        check(br#"{"class": "c", "priority": 9}"#, Ok("Priority(9)"));
        check(br#"{"class": "c", "items": [{"a": 1}, {}]}"#, Ok("Items([Document"));
        check(br#"{"class": "c", "after": "1h 30m"}"#, Ok("After(5400s)"));
        check(br#"{"class": "c", "scheduled_at": "2030-01-31T19:00:00+01:00"}"#, Ok("At(2030-01-31T18:00:00Z)"));
        check(br#"{"class": "c", "scheduled_at": {"$date": "2030-01-31T18:00:00Z"}}"#, Ok("At(2030-01-31T18:00:00Z)"));
        check(br#"{"class": "c", "id": "65a1b2c3d4e5f60718293a4b"}"#, Ok("65a1b2c3d4e5f60718293a4b"));
        check(br#"{"class": "c", "id": {"$oid": "65a1b2c3d4e5f60718293a4b"}}"#, Ok("65a1b2c3d4e5f60718293a4b"));
        check(
            br#"{"class": "c", "retry_policy": {"class": "RetryForever", "parameters": {"seconds_to_wait_before_retry": 1}}}"#,
            Ok("RetryForever"),
        );
    }

    #[test]
    fn parameters_are_extended_json() {
        let check = |json: &str, expected: Result<Document, &str>| match (parameters_of_text(json), expected) {
            (Ok(parameters), Ok(expected)) => assert_eq!(parameters, expected),
            (Err(problem), Err(part)) => assert!(problem.contains(part), "{problem:?} of {json} does not contain {part:?}"),
            (read, expected) => panic!("{json} is read as {read:?}, not {expected:?}"),
        };
        check(
            r#"{"z": 1, "a": {"$numberLong": "2"}, "d": {"$date": {"$numberLong": "3"}}}"#,
            Ok(doc! { "z": 1, "a": 2_i64, "d": bson::DateTime::from_millis(3) }),
        );
        check(r#"{"$where": "x", "a.b": 1}"#, Ok(doc! { "$where": "x", "a.b": 1 }));
        check(r#"[1]"#, Err("must be a JSON object"));
        check(r#"{"$oid": "65a1b2c3d4e5f60718293a4b"}"#, Err("must be a JSON object"));
        check(r#"{"a": {"$oid": "short"}}"#, Err("that is no extended JSON"));
        check(r#"{"path": x}"#, Err("that is no JSON"));
        check(&format!("{{\"a\": {}{}}}", "[".repeat(200), "]".repeat(200)), Err("that is no JSON: recursion limit exceeded"));
    }

    #[test]
    fn what_is_wrong_with_a_line_is_said() {
        check(br#"{"group": "g"}"#, Err("`class` is missing"));
        check(br#"{"class": "c", "klass": "c"}"#, Err("unknown field `klass`"));
        check(br#"{"class": "c""#, Err("EOF while parsing an object (column 13)"));
        check(br#"["c"]"#, Err("a job is one JSON object on one line"));
        check(b"{\"class\": \"\xff\"}", Err("the line is not UTF-8"));
        check(&vec![b'x'; LONGEST_LINE + 1], Err("the line is longer than 16777216 bytes"));
        check(br#"{"class": "c", "priority": 12}"#, Err("`priority` is 12; it must be from 0 to 9"));
        check(br#"{"class": "c", "priority": "high"}"#, Err("expected i64"));
        check(br#"{"class": "c", "parameters": [1]}"#, Err("parameters must be a JSON object"));
        check(br#"{"class": "c", "scheduled_at": "tomorrow"}"#, Err("`tomorrow` is no instant"));
        check(br#"{"class": "c", "scheduled_at": "tomorrow"}"#, Err("write it like 2030-01-31T18:00:00Z"));
        check(br#"{"class": "c", "items": {}}"#, Err("items must be a JSON array"));
        check(br#"{"class": "c", "items": [{}, 1]}"#, Err("item 1: parameters must be a JSON object"));
        check(br#"{"class": "c", "items": [{}], "parameters": {}}"#, Err("contradict each other"));
        check(br#"{"class": "c", "scheduled_at": 5}"#, Err("`5` is no instant"));
        check(br#"{"class": "c", "after": 5}"#, Err("`5` is no duration"));
        check(br#"{"class": "c", "after": "5m", "scheduled_at": "2030-01-31T18:00:00Z"}"#, Err("contradict each other"));
        check(br#"{"class": "c", "id": "x"}"#, Err("`x` is no job id"));
    }

    #[test]
    fn a_policy_that_workers_will_not_know_is_refused_unless_said() {
        let policy = |json: &str| policy_of_text(json).unwrap();
        let check = |json: &str, custom: bool, expected: Result<(), &str>| match (check_policy(&policy(json), custom), expected) {
            (Ok(()), Ok(())) => {}
            (Err(problem), Err(part)) => assert!(problem.contains(part), "{problem:?} of {json} does not contain {part:?}"),
            (checked, expected) => panic!("{json}: {checked:?}, not {expected:?}"),
        };
        let nested = r#"{"class": "RetriableExceptionFilter", "parameters": {"retriable_exceptions": ["*"], "filtered_retry_policy": {"class": "Mine"}}}"#;
        for unknown in [r#"{"class": "Mine"}"#, nested] {
            check(unknown, false, Err("say --custom-policy"));
            check(unknown, true, Ok(()));
        }
        check(r#"{"class": "RetryForever"}"#, true, Err("`seconds_to_wait_before_retry` is missing"));
        assert!(
            policy_of_text(r#"{"class": "RetryForever", "paramters": {}}"#)
                .is_err_and(|problem| problem.contains("unknown field `paramters`"))
        );
    }

    #[test]
    fn blank_lines_are_no_jobs() {
        for line in ["", "\n", " \t\r\n"] {
            assert!(job_of_line(line.as_bytes(), false).is_ok_and(|job| job.is_none()), "{line:?}");
        }
    }
}
