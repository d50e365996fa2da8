//! `recruiter enqueue`: one job described by flags, or many jobs described by lines of JSON.
//!
//! A file is read as a stream. A batch contains the lines that can be read without waiting. Therefore a large file
//! needs little memory, and a slow pipe does not delay its jobs. Each job gets its id before the first attempt to send
//! it, so a repetition after a lost reply does not enqueue it twice.

use std::{
    collections::BTreeSet,
    io::{IsTerminal, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, anyhow};
use bson::{Document, doc};
use clap::{Args, builder::BoolishValueParser};
use indicatif::{ProgressBar, ProgressStyle};
use recruiter_common::{
    enqueue::{EnqueueError, Enqueued, NewJob, Outcome},
    exit::Exit,
    ids::JobId,
    instant::Instant,
    job::{Keep, Priority, StoredPolicy},
    shutdown::{Shutdown, pause},
    spec::{
        InvalidSpec, JobSpec, LONGEST_LINE, Reaction, UniqueSpec, UnknownPolicies, Until, duration_of_text, id_of_text, instant_of_text,
        items_of_text, keep_of_text, parameters_of_text, policy_of_text,
    },
    store::{ConnectArgs, Store},
    telemetry::chain,
};
use tokio::{
    fs::File,
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
};

use super::{
    exit::or_stopped,
    output::{Format, json_line},
    presence::Workers,
    wait::until_ended,
};

/// Maximum number of jobs sent together.
const BATCH: usize = 1_000;
/// Size of the read buffer in bytes. A batch has at most this many bytes plus one line.
const READ_AHEAD: usize = 1024 * 1024;
/// How many times a batch is sent again when MongoDB does not answer. Enough for a failover.
const TRIES: u32 = 10;
/// Wait between two of these tries.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Maximum number of (class, group) pairs of a file that are compared with the workers in the roster.
const KINDS: usize = 1_000;

/// Maximum number of warnings about pairs without a worker.
const WARNINGS: usize = 5;

/// The arguments of `enqueue`. `--id`, `--from` and `--skip` belong to a single call and have no environment variable.
#[derive(Args, Clone, Debug)]
pub(super) struct EnqueueArgs {
    #[command(flatten)]
    job: Description,
    /// Enqueue one job for each line of this file; `-` is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "Description")]
    from: Option<PathBuf>,
    /// Skip the first N lines of the file, which were enqueued before
    #[arg(long, value_name = "N", requires = "from", conflicts_with = "Description", default_value_t = 0)]
    skip: u64,
    /// Wait for this long if a group has as many waiting jobs as it may have (`recruiter groups set`) [default: fail at once]
    #[arg(long, env = "RECRUITER_ENQUEUE_WAIT_FOR_ROOM", value_name = "DURATION", value_parser = duration_of_text)]
    wait_for_room: Option<Duration>,
    /// Wait until the job has ended, and write its result
    #[arg(long, env = "RECRUITER_ENQUEUE_WAIT", conflicts_with = "from", value_parser = BoolishValueParser::new())]
    wait: bool,
    /// With `--wait`: maximum time to wait, after which the command ends with code 124 [default: no limit]
    #[arg(long, env = "RECRUITER_ENQUEUE_TIMEOUT", value_name = "DURATION", value_parser = duration_of_text, conflicts_with = "from", requires = "wait")]
    timeout: Option<Duration>,
    /// Accept retry policies that only your workers know, not this program
    #[arg(long, env = "RECRUITER_ENQUEUE_CUSTOM_POLICY", value_parser = BoolishValueParser::new())]
    custom_policy: bool,
    #[command(flatten)]
    format: Format,
}

/// One job, as flags.
#[derive(Args, Clone, Debug)]
struct Description {
    /// Class of the workable, which names the Rust type or program to run
    #[arg(long, env = "RECRUITER_ENQUEUE_CLASS", value_name = "CLASS", required_unless_present = "from")]
    class: Option<String>,
    /// Parameters of the workable: a JSON object; MongoDB's extended JSON for dates, ids and binary data
    #[arg(long, env = "RECRUITER_ENQUEUE_PARAMETERS", value_name = "JSON", value_parser = parameters_of_text)]
    parameters: Option<Document>,
    /// Items of a bundle: a JSON array with the parameters of each item, at most 1000
    #[arg(long, env = "RECRUITER_ENQUEUE_ITEMS", value_name = "JSON", value_parser = items, conflicts_with = "parameters")]
    items: Option<Items>,
    /// Group: only workers that work on this group get the job [default: generic]
    #[arg(long, env = "RECRUITER_ENQUEUE_GROUP", value_name = "GROUP")]
    group: Option<String>,
    /// Priority from 0 to 9, higher first [default: 5]
    #[arg(long, env = "RECRUITER_ENQUEUE_PRIORITY", value_name = "0-9", allow_negative_numbers = true, value_parser = clap::value_parser!(u8).range(0..=9))]
    priority: Option<u8>,
    /// Instant at which the job is due, for example 2030-01-31T18:00:00Z; a past instant means now [default: now]
    #[arg(long = "at", env = "RECRUITER_ENQUEUE_AT", value_name = "INSTANT", value_parser = instant_of_text, conflicts_with = "after")]
    scheduled_at: Option<Instant>,
    /// Delay after which the job is due, for example 5m or 1h 30m
    #[arg(long, env = "RECRUITER_ENQUEUE_AFTER", value_name = "DURATION", value_parser = duration_of_text)]
    after: Option<Duration>,
    /// Instant at which the job expires: if it has not started by then, it is archived as `expired`
    #[arg(long, env = "RECRUITER_ENQUEUE_EXPIRES_AT", value_name = "INSTANT", value_parser = instant_of_text, conflicts_with = "expires_after")]
    expires_at: Option<Instant>,
    /// Time after which the job expires, counted from now, for example 2h
    #[arg(long, env = "RECRUITER_ENQUEUE_EXPIRES_AFTER", value_name = "DURATION", value_parser = duration_of_text)]
    expires_after: Option<Duration>,
    /// Unique key: while a job with this key exists, nothing is enqueued
    #[arg(long, env = "RECRUITER_ENQUEUE_UNIQUE", value_name = "KEY", conflicts_with = "unique_by")]
    unique: Option<String>,
    /// Make the key of the class and these parameters, separated by commas; `*` for all parameters
    #[arg(long, env = "RECRUITER_ENQUEUE_UNIQUE_BY", value_name = "NAMES", value_delimiter = ',')]
    unique_by: Option<Vec<String>>,
    /// How long the key is taken [default: finished]
    #[arg(long, env = "RECRUITER_ENQUEUE_UNIQUE_UNTIL", value_name = "EVENT", conflicts_with = "unique_for")]
    unique_until: Option<Until>,
    /// The key is taken for this time, for example 1h, whether the job is finished or not
    #[arg(long, env = "RECRUITER_ENQUEUE_UNIQUE_FOR", value_name = "DURATION", value_parser = duration_of_text)]
    unique_for: Option<Duration>,
    /// What happens if the key is taken [default: ignore]
    #[arg(long, env = "RECRUITER_ENQUEUE_ON_CONFLICT", value_name = "REACTION")]
    on_conflict: Option<Reaction>,
    /// With `--on-conflict postpone`: the job is not postponed beyond this time after it was enqueued
    #[arg(long, env = "RECRUITER_ENQUEUE_POSTPONE_AT_MOST", value_name = "DURATION", value_parser = duration_of_text)]
    postpone_at_most: Option<Duration>,
    /// Label of the job, for filters; may be given several times
    #[arg(long = "tag", env = "RECRUITER_ENQUEUE_TAG", value_name = "TAG")]
    tags: Vec<String>,
    /// Name of the job in your own terms; need not be unique
    #[arg(long, env = "RECRUITER_ENQUEUE_URN", value_name = "URN")]
    urn: Option<String>,
    /// Trace that the job belongs to: a traceparent of the W3C Trace Context
    #[arg(long, env = "RECRUITER_ENQUEUE_TRACEPARENT", value_name = "TRACEPARENT")]
    traceparent: Option<String>,
    /// Retry policy after a failure: {"class": …, "parameters": …} [default: no retry]
    #[arg(long = "retry", env = "RECRUITER_ENQUEUE_RETRY", value_name = "JSON", value_parser = policy_of_text)]
    retry_policy: Option<StoredPolicy>,
    /// What is kept of the finished job: `all`, or `failures`: a job that succeeded is deleted, with its result, and its id is free again [default: all]
    #[arg(long, env = "RECRUITER_ENQUEUE_KEEP", value_name = "all|failures", value_parser = keep_of_text)]
    keep: Option<Keep>,
    /// Resource that the job needs, for example printer or customer:17; may be given several times
    #[arg(long = "limit", env = "RECRUITER_ENQUEUE_LIMIT", value_name = "RESOURCE")]
    limits: Vec<String>,
    /// Key of a line: jobs with the same key run one after the other, in the order of enqueueing
    #[arg(long, env = "RECRUITER_ENQUEUE_LINE", value_name = "KEY", conflicts_with = "limits")]
    line: Option<String>,
    /// Halt the line if the job fails for the last time, until `recruiter resume line:KEY`
    #[arg(long, env = "RECRUITER_ENQUEUE_HALT_ON_FAILURE", requires = "line", value_parser = BoolishValueParser::new())]
    halt_on_failure: bool,
    /// Id of the job, 24 hexadecimal digits; if a job with this id exists, nothing is enqueued
    #[arg(long, value_name = "ID", value_parser = id_of_text)]
    id: Option<JobId>,
}

/// Parameters of the items of a bundle. The type makes clap treat the list as one value of one flag.
#[derive(Clone, Debug)]
struct Items(Vec<Document>);

fn items(text: &str) -> Result<Items, InvalidSpec> {
    items_of_text(text).map(Items)
}

impl Description {
    /// What makes the job unique; `None` if no flag is about that.
    fn unique(&self) -> Option<UniqueSpec> {
        let mut unique = UniqueSpec::default();
        unique.key.clone_from(&self.unique);
        // All parameters.
        let is_all = |names: &[String]| matches!(names, [name] if name == "*");
        unique.parameters = self.unique_by.clone().map(|names| if is_all(&names) { Vec::new() } else { names });
        (unique.until, unique.period) = (self.unique_until, self.unique_for);
        (unique.on_conflict, unique.at_most) = (self.on_conflict, self.postpone_at_most);
        Some(unique).filter(|unique| *unique != UniqueSpec::default())
    }
}

impl From<Description> for JobSpec {
    fn from(flags: Description) -> Self {
        let mut spec = Self::default();
        spec.unique = flags.unique();
        (spec.expires_at, spec.expires_after) = (flags.expires_at, flags.expires_after);
        spec.class = flags.class.unwrap_or_default();
        spec.parameters = flags.parameters;
        spec.items = flags.items.map(|Items(items)| items);
        spec.group = flags.group;
        spec.priority = flags.priority.and_then(Priority::new);
        spec.scheduled_at = flags.scheduled_at;
        spec.after = flags.after;
        spec.tags = flags.tags;
        spec.urn = flags.urn;
        spec.traceparent = flags.traceparent;
        spec.retry_policy = flags.retry_policy;
        spec.keep = flags.keep;
        spec.limits = flags.limits;
        spec.line = flags.line;
        spec.halt_on_failure = flags.halt_on_failure.then_some(true);
        spec.id = flags.id;
        spec
    }
}

/// The job and its id, validated as far as this program can.
fn job_of(mut spec: JobSpec, custom_policy: bool) -> Result<(JobId, NewJob), String> {
    let id = *spec.id.get_or_insert_with(JobId::new);
    let unknown = if custom_policy { UnknownPolicies::Accept } else { UnknownPolicies::Refuse };
    match spec.into_job(unknown) {
        Ok(job) => Ok((id, job)),
        Err(problem) if problem.is_unknown_policy() => Err(format!("{problem}; if your workers know it, add --custom-policy")),
        Err(problem) => Err(problem.to_string()),
    }
}

/// The job on one line of a file; `None` for a blank line.
fn job_of_line(line: &[u8], custom_policy: bool) -> Result<Option<(JobId, NewJob)>, String> {
    JobSpec::of_line(line).map_err(|problem| problem.to_string())?.map(|spec| job_of(spec, custom_policy)).transpose()
}

/// Enqueues the jobs that the arguments describe, and writes their ids.
///
/// # Errors
/// When a job is invalid (no job after it is enqueued), or MongoDB cannot be used.
pub(super) async fn run(args: EnqueueArgs, connect: &ConnectArgs, mut shutdown: Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    match &args.from {
        None if args.wait => or_stopped(shutdown, enqueue_one(args, connect, out)).await,
        None => enqueue_one(args, connect, out).await,
        Some(path) => {
            let mut lines = Lines::open(path).await?;
            let store = Store::connect(connect, "recruiter enqueue").await?;
            let mut import = Import {
                store: &store,
                json: args.format.json,
                wait_for_room: args.wait_for_room.unwrap_or_default(),
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

async fn enqueue_one(args: EnqueueArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let (id, job) = job_of(args.job.into(), args.custom_policy).map_err(|problem| anyhow!(problem).context(Exit::Usage))?;
    let store = Store::connect(connect, "recruiter enqueue").await?;
    let kind = kind_of(&job);
    let kept = job.kept();
    match store.enqueue_when_room([job], args.wait_for_room.unwrap_or_default()).await {
        Ok(enqueued) => {
            // Whoever waits for the result wants nothing else on standard output.
            if !args.wait {
                write_ids(out, args.format.json, &enqueued)?;
                out.flush()?;
            }
            for enqueued in enqueued.iter().filter(|enqueued| !enqueued.is_new) {
                // Standard error is closed: the note is not needed.
                let _ = writeln!(std::io::stderr(), "nothing was enqueued: {}", reason(enqueued.outcome));
            }
            if enqueued.iter().any(|enqueued| enqueued.is_new) {
                warn_of_untaken(&store, &BTreeSet::from([kind])).await;
            }
            store.flush_events().await;
            match enqueued.first() {
                Some(job) if args.wait => {
                    // What is kept of a job that was there already is not known.
                    let is_deleted_after_success = kept == Keep::Failures && matches!(job.outcome, Outcome::New);
                    until_ended(&store, job.id, args.timeout, is_deleted_after_success, args.format, out).await
                }
                Some(_) | None => Ok(()),
            }
        }
        Err(EnqueueError::Store(error)) if error.is_transient() => {
            Err(anyhow!(error).context(format!("the job may have been enqueued; repeat the command with --id {id}")))
        }
        Err(full @ (EnqueueError::BacklogFull { .. } | EnqueueError::GateFull { .. } | EnqueueError::KeyKeepsChanging { .. })) => {
            Err(full.into())
        }
        Err(refused) => Err(anyhow!(refused).context(Exit::Usage)),
    }
}

/// Why nothing was enqueued.
fn reason(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::KnownId => "a job with this id exists",
        Outcome::Duplicate => "a job with this unique key exists",
        Outcome::Replaced => "the waiting job with this unique key has the new content",
        Outcome::Postponed => "the waiting job with this unique key has the later date",
        Outcome::AlreadyStarted => "the job with this unique key has started, so it was not changed",
        Outcome::New | Outcome::RunsOnceMore | _ => "a job exists already",
    }
}

/// Class and group of a job.
pub(super) type Kind = (String, String);

fn kind_of(job: &NewJob) -> Kind {
    let (class, group) = job.class_and_group();
    (class.to_owned(), group.to_owned())
}

/// Warns about jobs whose class and group no running worker takes. This is not an error: the jobs wait for such a
/// worker. Without permission to read the roster there is no warning.
pub(super) async fn warn_of_untaken(store: &Store, kinds: &BTreeSet<Kind>) {
    let Ok(workers) = Workers::find(store).await else { return };
    let reasons: BTreeSet<String> = kinds.iter().filter_map(|(class, group)| workers.why_nobody_takes(class, group)).collect();
    for reason in reasons.iter().take(WARNINGS) {
        // Standard error is closed: the warning is not needed.
        let _ = writeln!(std::io::stderr(), "warning: {reason}; the job waits until there is one");
    }
    if let Some(more @ 1..) = reasons.len().checked_sub(WARNINGS) {
        let _ = writeln!(std::io::stderr(), "warning: {more} more classes or groups have no worker");
    }
}

/// Writes the ids of the jobs: of a job that was not enqueued, the id of the existing one.
fn write_ids(out: &mut impl Write, json: bool, enqueued: &[Enqueued]) -> std::io::Result<()> {
    enqueued.iter().try_for_each(|Enqueued { id, outcome, .. }| {
        if json { json_line(out, doc! { "id": id.to_string(), "outcome": outcome.word() }) } else { writeln!(out, "{id}") }
    })
}

/// A reader of a file, line by line.
struct Lines {
    name: String,
    reader: BufReader<File>,
    /// Size of the file in bytes, if known.
    size: Option<u64>,
    /// Number of the current line.
    number: u64,
    line: Vec<u8>,
}

impl Lines {
    async fn open(path: &Path) -> anyhow::Result<Self> {
        let (name, file) = if path == Path::new("-") {
            let stdin = std::io::stdin().as_fd().try_clone_to_owned().context("cannot read standard input")?;
            ("standard input".to_owned(), File::from_std(stdin.into()))
        } else {
            let name = path.display().to_string();
            let file = File::open(path).await.with_context(|| format!("cannot open {name}"))?;
            (name, file)
        };
        let size = file.metadata().await.ok().filter(std::fs::Metadata::is_file).map(|file| file.len());
        Ok(Self { name, reader: BufReader::with_capacity(READ_AHEAD, file), size, number: 0, line: Vec::new() })
    }

    /// Reads the next line, cut after [`LONGEST_LINE`] bytes. Returns whether there was one.
    async fn advance(&mut self) -> Result<bool, String> {
        self.line.clear();
        self.number += 1;
        let limit = LONGEST_LINE as u64 + 1;
        let read = (&mut self.reader).take(limit).read_until(b'\n', &mut self.line).await;
        read.map(|bytes| bytes > 0).map_err(|error| format!("cannot be read: {error}"))
    }

    /// Whether the next line is in the buffer already, so that reading it does not wait.
    fn has_next(&self) -> bool {
        self.reader.buffer().contains(&b'\n')
    }

    /// Progress bar, on a terminal only.
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

/// A file that is being enqueued.
struct Import<'a, W> {
    store: &'a Store,
    json: bool,
    wait_for_room: Duration,
    out: &'a mut W,
    /// Number of jobs enqueued so far.
    enqueued: u64,
    /// All lines up to this number are enqueued.
    done: u64,
    shown: ProgressBar,
    /// Classes and groups of the jobs enqueued so far, at most [`KINDS`].
    kinds: BTreeSet<Kind>,
}

/// Line number, id and job.
type Numbered = (u64, JobId, NewJob);

impl<W: Write> Import<'_, W> {
    async fn run(&mut self, lines: &mut Lines, custom_policy: bool, shutdown: &mut Shutdown) -> anyhow::Result<()> {
        let skip = self.done;
        let mut batch: Vec<Numbered> = Vec::new();
        loop {
            // Cancelling this read is safe: after a stop no more lines are read.
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

    /// Sends the jobs together. If one is refused, sends them one by one to find out which.
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

    /// Enqueues all of these jobs and writes their ids. Returns the reason if MongoDB or the library refuses one of
    /// them.
    async fn deliver(&mut self, batch: &[Numbered]) -> anyhow::Result<Option<String>> {
        let ([(first, ..), ..], [.., (last, ..)]) = (batch, batch) else { return Ok(None) };
        let mut tries = 0;
        let sent = loop {
            match self.store.enqueue_when_room(batch.iter().map(|(.., job)| job.clone()), self.wait_for_room).await {
                Ok(enqueued) => break Ok(enqueued),
                Err(EnqueueError::Store(error)) if error.is_transient() && !error.is_unauthorized() && tries < TRIES => {
                    tries += 1;
                    tracing::warn!(error = chain(&error), "a batch may not have arrived; sending it again");
                    pause(TRY_AGAIN_AFTER).await;
                }
                Err(EnqueueError::Store(error)) if error.is_transient() => break Err(error),
                Err(refused) => return Ok(Some(chain(&refused))),
            }
        };
        let enqueued = match sent {
            Ok(enqueued) => enqueued,
            Err(error) => {
                return Err(self.stopped(
                    Exit::Unavailable,
                    &format!("lines {first} to {last} may have been enqueued; --skip {last} skips them: {}", chain(&error)),
                ));
            }
        };
        self.done = *last;
        // A known id may be of an earlier attempt to send this batch.
        self.enqueued += enqueued.iter().filter(|job| job.is_new || job.outcome == Outcome::KnownId).count() as u64;
        self.kinds.extend(batch.iter().map(|(.., job)| kind_of(job)).take(KINDS.saturating_sub(self.kinds.len())));
        self.shown.set_message(self.enqueued.to_string());
        let written = write_ids(self.out, self.json, &enqueued).and_then(|()| self.out.flush());
        written.map(|()| None).map_err(|error| self.stopped(Exit::Failure, &format!("cannot write the ids: {error}")))
    }

    /// The error of an import that stopped, with the line to continue at.
    fn stopped(&self, exit: Exit, why: &str) -> anyhow::Error {
        self.shown.finish_and_clear();
        let (enqueued, done) = (self.enqueued, self.done);
        let so_far = match enqueued {
            0 => "nothing was enqueued".to_owned(),
            _ => format!("{enqueued} jobs were enqueued, up to line {done}; continue with --skip {done}"),
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

    #[test]
    fn a_policy_that_this_program_does_not_know_needs_a_flag() {
        let line = br#"{"class": "c", "retry_policy": {"class": "Mine"}}"#;
        assert!(job_of_line(line, false).is_err_and(|problem| problem.ends_with("if your workers know it, add --custom-policy")));
        assert!(job_of_line(line, true).is_ok_and(|job| job.is_some()));
        let same_id = br#"{"class": "c", "id": "65a1b2c3d4e5f60718293a4b"}"#;
        let (id, job) = job_of_line(same_id, false).expect("a job").expect("a job");
        assert!(id.to_string() == "65a1b2c3d4e5f60718293a4b" && format!("{job:?}").contains("65a1b2c3d4e5f60718293a4b"));
    }
}
