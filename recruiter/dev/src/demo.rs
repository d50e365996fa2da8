//! `recruiter demo`: shows on the user's own files, within a minute, that jobs are done and that a killed worker loses
//! none.
//!
//! Each file below a directory is one job: the program `sha256sum` computes its SHA-256. The demonstration computes the
//! same digest itself, and compares it at the end with the result in the archive. During the work it kills one worker
//! that holds jobs. The output reports measurements only, without improving them.

use std::{
    collections::HashMap,
    fs,
    io::{self, BufRead as _, BufReader, Write},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant as Monotonic},
};

use anyhow::{Context as _, anyhow};
use bson::{Binary, Bson, doc, spec::BinarySubtype};
use clap::{Args, builder::BoolishValueParser};
use hdrhistogram::Histogram;
use ignore::WalkBuilder;
use indicatif::{ProgressBar, ProgressStyle};
use nix::sys::signal::Signal;
use recruiter_common::{
    enqueue::NewJob,
    exit::Exit,
    ids::JobId,
    instant::Instant,
    job::{Execution, FinishReason, Job, JobState},
    retry_policy::RetryManyTimes,
    shutdown::{Shutdown, Wake, pause},
    store::Store,
};
use sha2::{Digest as _, Sha256};

use super::{
    embedded::{Options, on_path},
    fleet::{Fleet, Installation, LOOK_EVERY, Plan, Programs, SHORT_LEASE, tell},
};
use recruiter::cli::{
    output::{Format, printable},
    view::document_line,
};

/// Name of the log file of all processes, in the demonstration's directory.
const LOG: &str = "processes.log";
const PROGRAM: &str = "sha256sum";
const CLASS: &str = "checksum";
/// The file that configures the classes of the workers.
const WORKABLES: &str = "\
[workables.checksum]
command = [\"sha256sum\", \"--\", \"{path}\"]
timeout = \"30s\"
";
/// Jobs that are enqueued or read together.
const BATCH: usize = 1_000;
/// How long after freezing a worker its jobs are read. The first read is early, to lose no time with a worker that
/// holds none. The second is late enough for the commands that were on their way when the worker froze, even on a busy
/// machine.
const LOOKS_AFTER: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(150)];
/// Longer than any job may take.
const STALLED_AFTER: Duration = Duration::from_secs(120);
/// Maximum of the latency histogram: one day. Longer latencies are counted as this.
const LONGEST_LATENCY_MS: u64 = 24 * 3_600_000;
/// Maximum number of skipped or wrong files that are listed.
const NAMED: u64 = 10;

/// The arguments of `demo`.
#[derive(Args, Clone, Debug)]
pub struct DemoArgs {
    /// Directory with the files; files that git ignores are skipped
    #[arg(long, env = "RECRUITER_DEMO_DIR", value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Path of the mongod program [default: mongod on PATH, otherwise downloaded once]
    #[arg(long, env = "RECRUITER_MONGOD", value_name = "FILE")]
    mongod: Option<PathBuf>,
    /// Number of worker processes
    #[arg(long, env = "RECRUITER_WORKERS", value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    workers: u32,
    /// Keep all processes running at the end, until Ctrl-C, and keep the database directory
    #[arg(long, env = "RECRUITER_DEMO_KEEP", value_parser = BoolishValueParser::new())]
    keep: bool,
    #[command(flatten)]
    format: Format,
}

/// Runs the demonstration.
///
/// # Errors
/// When it cannot begin, was stopped, or failed: a job was not done, or a digest differs.
pub async fn run(args: DemoArgs, mut shutdown: Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    let programs = Programs::find()?;
    anyhow::ensure!(on_path(PROGRAM).is_some(), "the demonstration needs the program `{PROGRAM}` on PATH: install GNU coreutils");
    let dir = args.dir.canonicalize().with_context(|| format!("--dir: cannot open {}", args.dir.display()))?;
    anyhow::ensure!(dir.is_dir(), "--dir: {} is not a directory", dir.display());
    let home = tempfile::Builder::new().prefix("recruiter-demo-").tempdir().context("cannot create a temporary directory")?;
    let (own, shown) = (home.path().canonicalize()?, ProgressBar::new_spinner());
    let reading = tokio::task::spawn_blocking({
        let shown = shown.clone();
        move || survey(&dir, &own, &shown)
    });
    let survey = tokio::select! {
        survey = reading => survey??,
        () = shutdown.requested() => return Err(stopped()),
    };
    let outcome = demonstrate(&args, programs, home.path(), &survey, &shown, &mut shutdown, out).await;
    let failed = outcome.as_ref().is_err_and(|error| error.downcast_ref() != Some(&Exit::Aborted));
    if args.keep || failed {
        let kept = home.keep();
        tell(&format!("kept: {} (with the log of the processes, {})", kept.display(), LOG));
    }
    outcome
}

fn stopped() -> anyhow::Error {
    anyhow!("stopped by a signal before the end").context(Exit::Aborted)
}

/// Starts all processes, does the work, reports the results, and stops all processes in every case.
async fn demonstrate(
    args: &DemoArgs,
    programs: Programs,
    home: &Path,
    survey: &Survey,
    shown: &ProgressBar,
    shutdown: &mut Shutdown,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let workables = home.join("workables.toml");
    fs::write(&workables, WORKABLES)?;
    let plan = Plan {
        web: None,
        programs,
        workers: args.workers,
        // Each worker runs 4 jobs at a time, so that a killed worker holds some of the jobs and not all.
        recruiter_arguments: vec![SHORT_LEASE.into()],
        worker_arguments: vec!["--concurrency=4".into(), "--config".into(), workables.into()],
        log_arguments: vec!["--log=info".into()],
        log: Some(fs::OpenOptions::new().append(true).create(true).open(home.join(LOG))?),
        pass_settings: false,
    };
    let options = |mongod| Options { temporary: !args.keep, ..Options::new(mongod, home.join("mongod")) };
    shown.set_message("starting MongoDB and Recruiter");
    let mut installation = tokio::select! {
        started = Installation::start(args.mongod.clone(), options, plan) => started?,
        () = shutdown.requested() => return Err(stopped()),
    };
    let uri = installation.uri().to_owned();
    let seen = installation.unless_mongod_ends(async |fleet, store| {
        let seen = work(fleet, store, survey, shown, shutdown).await?.ok_or_else(stopped)?;
        shown.finish_and_clear();
        seen.tell(args, &uri, out)?;
        if args.keep {
            shutdown.requested().await;
        }
        anyhow::Ok(seen)
    });
    let seen = seen.await;
    shown.finish_and_clear();
    let seen = match seen {
        Ok(seen) => seen,
        Err(ended) => return Err(installation.abort(ended).await),
    };
    installation.stop().await?;
    let seen = seen?;
    let complete = seen.archived == seen.files && seen.mismatches == 0;
    anyhow::ensure!(complete, "{} of {} jobs were done, and {} digests differ", seen.archived, seen.files, seen.mismatches);
    Ok(())
}

/// A file and the digest that this process computed.
struct Surveyed {
    path: PathBuf,
    digest: String,
}

struct Survey {
    files: Vec<Surveyed>,
    skipped: u64,
}

/// Reads every file below `dir`, except those below `own`, the demonstration's own directory.
fn survey(dir: &Path, own: &Path, shown: &ProgressBar) -> anyhow::Result<Survey> {
    let mut survey = Survey { files: Vec::new(), skipped: 0 };
    let own = own.to_owned();
    let wanted = move |entry: &ignore::DirEntry| {
        let is_git = entry.file_name() == ".git" && entry.file_type().is_some_and(|kind| kind.is_dir());
        !is_git && entry.path() != own
    };
    shown.set_message("reading the files");
    for entry in WalkBuilder::new(dir).hidden(false).ignore(false).filter_entry(wanted).build() {
        let read = match entry {
            Ok(entry) if !entry.file_type().is_some_and(|kind| kind.is_file()) => continue,
            Ok(entry) => digest(entry.path())
                .map(|digest| (entry.path().to_owned(), digest))
                .map_err(|error| format!("{}: {error}", entry.path().display())),
            Err(error) => Err(error.to_string()),
        };
        match read {
            Ok((path, digest)) => survey.files.push(Surveyed { path, digest }),
            Err(problem) => {
                survey.skipped += 1;
                if survey.skipped <= NAMED {
                    say(shown, &format!("skipped: {}", printable(&problem, 200)));
                }
            }
        }
        shown.inc(1);
    }
    anyhow::ensure!(!survey.files.is_empty(), "there is no readable file below {}: choose another directory with --dir", dir.display());
    say(shown, &format!("{} files in {}", survey.files.len(), dir.display()));
    Ok(survey)
}

fn digest(path: &Path) -> io::Result<String> {
    let mut file = BufReader::with_capacity(64 * 1024, fs::File::open(path)?);
    let mut digest = Sha256::new();
    loop {
        let read = file.fill_buf()?;
        if read.is_empty() {
            return Ok(hex::encode(digest.finalize()));
        }
        digest.update(read);
        let length = read.len();
        file.consume(length);
    }
}

/// Writes a line for the user; on a terminal above the progress bar.
fn say(shown: &ProgressBar, line: &str) {
    if shown.is_hidden() { tell(line) } else { shown.println(line) }
}

/// Enqueues a job for each file and waits until all are archived. `None` when stopped by a signal before that.
async fn work(
    fleet: &mut Fleet,
    store: &Store,
    survey: &Survey,
    shown: &ProgressBar,
    shutdown: &mut Shutdown,
) -> anyhow::Result<Option<Seen>> {
    let files = survey.files.len() as u64;
    let style =
        ProgressStyle::with_template("{wide_bar} {pos}/{len} jobs archived  {elapsed}").unwrap_or_else(|_| ProgressStyle::default_bar());
    shown.set_style(style);
    shown.set_length(files);
    shown.set_position(0);
    let begun = Monotonic::now();
    let mut jobs = Vec::with_capacity(survey.files.len());
    for batch in survey.files.chunks(BATCH) {
        if shutdown.is_requested() {
            return Ok(None);
        }
        let enqueued = store.enqueue_many(batch.iter().map(job).collect::<Result<Vec<_>, _>>()?).await?;
        jobs.extend(enqueued.into_iter().map(|job| job.id));
    }
    say(shown, &format!("{files} jobs enqueued"));
    let (mut killed, mut moved) = (None, (0, begun));
    loop {
        fleet.tend()?.iter().for_each(|line| say(shown, line));
        let archived = store.archived_count().await?;
        shown.set_position(archived);
        if archived != moved.0 {
            moved = (archived, Monotonic::now());
        }
        let stalled = moved.1.elapsed() > STALLED_AFTER;
        if archived >= files || stalled {
            let seen = Seen::look(store, survey, &jobs, killed, begun.elapsed(), shown).await?;
            if seen.archived == files || stalled {
                return Ok(Some(seen));
            }
        } else if killed.is_none() && archived >= files / 2 {
            killed = kill_one_at_work(fleet, store, shown).await?;
        }
        if shutdown.sleep(LOOK_EVERY).await == Wake::Stop {
            return Ok(None);
        }
    }
}

fn job(file: &Surveyed) -> anyhow::Result<NewJob> {
    let path = match file.path.to_str() {
        Some(path) => Bson::String(path.to_owned()),
        None => Bson::Binary(Binary { subtype: BinarySubtype::Generic, bytes: file.path.as_os_str().as_bytes().to_vec() }),
    };
    // Retries without delay, because the death of a worker is not a fault of the file.
    Ok(NewJob::of_class(CLASS, doc! { "path": path }).retry(&RetryManyTimes::new(3, Duration::ZERO)?))
}

/// Freezes one worker after the other until one holds jobs, and kills that one. Returns when, by the server's clock.
/// `None` when no worker holds a job at the moment.
async fn kill_one_at_work(fleet: &mut Fleet, store: &Store, shown: &ProgressBar) -> anyhow::Result<Option<Instant>> {
    store.refresh_clock().await?;
    for worker in fleet.workers() {
        if worker.signal(Signal::SIGSTOP).is_err() {
            // The worker has just ended by itself.
            continue;
        }
        let held = held_when_frozen(store, worker.pid()).await;
        if let Ok(count @ 1..) = held {
            let at = store.now();
            worker.signal(Signal::SIGKILL)?;
            say(shown, &format!("killed a worker (pid {}) while it ran {count} jobs", worker.pid()));
            return Ok(Some(at));
        }
        worker.signal(Signal::SIGCONT)?;
        held?;
    }
    Ok(None)
}

/// Number of jobs that the frozen worker with this process id has started and not ended.
async fn held_when_frozen(store: &Store, pid: u32) -> anyhow::Result<usize> {
    let mut held = 0;
    for after in LOOKS_AFTER {
        pause(after).await;
        let workers = store.registered_workers().await?;
        let Some(worker) = workers.iter().find(|worker| worker.process.as_ref().is_some_and(|process| process.pid.cast_unsigned() == pid))
        else {
            return Ok(0);
        };
        held = store.held_by(worker.id, &worker.jobs).await?.len();
        if held == 0 {
            break;
        }
    }
    Ok(held)
}

/// Measurements, read from the archive.
#[derive(Debug)]
struct Seen {
    files: u64,
    skipped: u64,
    archived: u64,
    /// Executions of all jobs, with any outcome.
    executions: u64,
    /// Jobs that were running in a worker when it died.
    recovered: u64,
    /// Time from the kill until the last of them was due again, by the server's clock.
    recovered_within_ms: Option<i64>,
    mismatches: u64,
    killed: Option<Instant>,
    jobs_per_second: f64,
    /// Time from due to started in milliseconds. Most of it is queueing, because all jobs are enqueued at once.
    latency: Histogram<u64>,
}

impl Seen {
    async fn look(
        store: &Store,
        survey: &Survey,
        jobs: &[JobId],
        killed: Option<Instant>,
        taken: Duration,
        shown: &ProgressBar,
    ) -> anyhow::Result<Self> {
        let mut seen = Self {
            files: survey.files.len() as u64,
            skipped: survey.skipped,
            archived: 0,
            executions: 0,
            recovered: 0,
            recovered_within_ms: None,
            mismatches: 0,
            killed,
            jobs_per_second: 0.0,
            latency: Histogram::new_with_max(LONGEST_LATENCY_MS, 3)?,
        };
        for (jobs, files) in jobs.chunks(BATCH).zip(survey.files.chunks(BATCH)) {
            let files: HashMap<&JobId, &Surveyed> = jobs.iter().zip(files).collect();
            for document in store.archived_jobs(jobs).await? {
                let job = Job::try_from(document)?;
                let Some(file) = files.get(&job.id) else { continue };
                seen.note(&job);
                if !is_digest_of(&job, &file.digest) {
                    seen.mismatches += 1;
                    if seen.mismatches <= NAMED {
                        let path = printable(&file.path.to_string_lossy(), 200);
                        say(shown, &format!("different digest (did the file change in the meantime?): {path}, job {}", job.id));
                    }
                }
            }
        }
        // Far below the largest integer that an `f64` represents exactly.
        seen.jobs_per_second = f64::from(u32::try_from(seen.archived).unwrap_or(u32::MAX)) / taken.as_secs_f64();
        Ok(seen)
    }

    fn note(&mut self, job: &Job) {
        self.archived += 1;
        let executions: Vec<&Execution> = job.every_execution().collect();
        self.executions += executions.len() as u64 + u64::from(job.executions_dropped);
        let crashes: Vec<&Execution> = executions.iter().copied().filter(|execution| execution.crashed == Some(true)).collect();
        self.recovered += u64::from(!crashes.is_empty());
        let rescued = crashes.iter().filter_map(|crash| crash.ended_at).max();
        let within = rescued.zip(self.killed).map(|(rescued, killed)| (rescued - killed).num_milliseconds());
        self.recovered_within_ms = self.recovered_within_ms.max(within);
        if let Some((started, due)) = executions.first().and_then(|first| first.started_at.zip(first.scheduled_at)) {
            self.latency.saturating_record(u64::try_from((started - due).num_milliseconds()).unwrap_or(0));
        }
    }

    fn tell(&self, args: &DemoArgs, uri: &str, out: &mut impl Write) -> anyhow::Result<()> {
        let (p50, p99) = (self.latency.value_at_quantile(0.50), self.latency.value_at_quantile(0.99));
        if args.format.json {
            let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
            let summary = doc! {
                "files": number(self.files),
                "skipped": number(self.skipped),
                "archived": number(self.archived),
                "executions": number(self.executions),
                "recovered": number(self.recovered),
                "recovered_within_ms": self.recovered_within_ms,
                "mismatches": number(self.mismatches),
                "jobs_per_second": (self.jobs_per_second * 10.0).round() / 10.0,
                "latency_p50_ms": number(p50),
                "latency_p99_ms": number(p99),
            };
            document_line(out, summary)?;
        } else {
            let recovered = match (self.recovered, self.recovered_within_ms) {
                (0, _) if self.killed.is_some() => "0, because the killed worker had just finished its jobs".to_owned(),
                (0, _) => "0, because all jobs were done before a worker could be killed".to_owned(),
                (jobs, Some(ms)) => format!("{jobs} jobs of a killed worker, due again {ms} ms after the kill"),
                (jobs, None) => format!("{jobs} jobs of a worker that died by itself"),
            };
            writeln!(out, "files       {} ({} skipped)", self.files, self.skipped)?;
            writeln!(out, "archived    {}, {:.0} per second", self.archived, self.jobs_per_second)?;
            writeln!(out, "executions  {}", self.executions)?;
            writeln!(out, "recovered   {recovered}")?;
            writeln!(out, "mismatches  {} between the archive's digests and those computed here", self.mismatches)?;
            writeln!(out, "started     {p50} ms after being due (p50), {p99} ms (p99): all jobs were enqueued at once")?;
            writeln!(out, "{}", look_inside(args.keep, uri))?;
        }
        Ok(out.flush()?)
    }
}

/// Commands for inspecting a database: this one while it is kept, otherwise any other.
fn look_inside(keep: bool, uri: &str) -> String {
    let (when, uri) = match keep {
        true => ("until Ctrl-C here", format!("'{uri}'")),
        false => ("run it with --keep, or `recruiter dev`, and use the MONGODB_URI it prints", "\"$MONGODB_URI\"".into()),
    };
    let query = |query: &str| format!("\n  mongosh {uri} --eval '{query}'");
    let queries = ["db.archived.findOne()", "db.archived.find({\"executions.crashed\": true})", "db.roster.find()"].map(query).concat();
    format!("\nTo look inside, {when}:{queries}")
}

/// Whether the job is done and its result is this digest. `sha256sum` begins its line with a backslash when it escapes
/// the file name.
fn is_digest_of(job: &Job, digest: &str) -> bool {
    let result = job.field("result");
    let result = match &result {
        Some(Bson::String(text)) => text.as_bytes(),
        // The file name in the output is not UTF-8.
        Some(Bson::Binary(binary)) => binary.bytes.as_slice(),
        _ => return false,
    };
    let done = matches!(&job.state, JobState::Archived { why } if *why == FinishReason::DONE);
    let rest = result.strip_prefix(b"\\").unwrap_or(result).strip_prefix(digest.as_bytes());
    done && rest.is_some_and(|rest| rest.starts_with(b"  "))
}
