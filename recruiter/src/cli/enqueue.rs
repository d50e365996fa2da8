//! `recruiter enqueue`: one job described by flags, or many jobs described by lines of a file.

use std::{io::Write, path::PathBuf, time::Duration};

use anyhow::anyhow;
use bson::Document;
use clap::{Args, builder::BoolishValueParser};
use recruiter_common::{
    enqueue::{EnqueueError, Outcome},
    exit::Exit,
    flags::name_of_text,
    ids::JobId,
    instant::Instant,
    job::{Keep, Settings, StoredPolicy},
    shutdown::Shutdown,
    spec::{
        Classes, InvalidSpec, JobSpec, Reaction, UniqueSpec, Until, duration_of_text, id_of_text, instant_of_text, items_of_text,
        parameters_of_text,
    },
    store::{ConnectArgs, Store},
};

use super::{
    exit::{or_stopped, usage},
    files::{NewFile, delete_all, put_all},
    import::{Import, Lines, job_of, write_ids},
    output::Format,
    presence::{Needs, warn_of_unmet},
    redaction::Reveal,
    retries::{self, Retries, retry_of_text},
    wait::until_ended,
};

/// `--id`, `--from` and `--skip` belong to a single call and have no environment variable.
#[derive(Args, Clone, Debug)]
pub(super) struct EnqueueArgs {
    #[command(flatten)]
    job: Description,
    #[command(flatten)]
    settings: Settings,
    /// Enqueue one job for each line of this file; `-` is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["Description", "Settings"])]
    from: Option<PathBuf>,
    /// Skip the first N lines of the file, which were enqueued before
    #[arg(long, value_name = "N", requires = "from", conflicts_with_all = ["Description", "Settings"], default_value_t = 0)]
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
    #[command(flatten)]
    reveal: Reveal,
}

/// One job, as flags, besides its settings.
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
    #[arg(long, env = "RECRUITER_ENQUEUE_UNIQUE_BY", value_name = "NAMES", value_delimiter = ',', value_parser = name_of_text)]
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
    /// How many times a failed job is retried; or a retry policy as JSON: {"class": …, "parameters": …} [default: of the workables file, or no retry]
    #[arg(long = "retry", alias = "retry-policy", env = "RECRUITER_ENQUEUE_RETRY", value_name = "N|JSON", value_parser = retry_of_text)]
    retry_policy: Option<Retries>,
    /// With `--retry N`: the wait before each retry [default: 10s]
    #[arg(long, env = "RECRUITER_ENQUEUE_RETRY_DELAY", value_name = "DURATION", value_parser = duration_of_text)]
    retry_delay: Option<Duration>,
    /// With `--retry N`: each wait is twice as long as the one before
    #[arg(long, env = "RECRUITER_ENQUEUE_BACKOFF", value_parser = BoolishValueParser::new())]
    backoff: bool,
    /// Id of the job, 24 hexadecimal digits; if a job with this id exists, nothing is enqueued
    #[arg(long, value_name = "ID", value_parser = id_of_text, conflicts_with = "files")]
    id: Option<JobId>,
    /// File that is stored with the job, for content that is too large for parameters (`recruiter files`); may be given several times
    #[arg(long = "file", env = "RECRUITER_ENQUEUE_FILE", value_name = "[NAME=]PATH", conflicts_with = "on_conflict")]
    files: Vec<NewFile>,
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

    /// Whether the flags about a unique job fit together.
    fn check_unique(&self) -> anyhow::Result<()> {
        let of_key = [
            (self.unique_until.is_some(), "--unique-until"),
            (self.unique_for.is_some(), "--unique-for"),
            (self.on_conflict.is_some(), "--on-conflict"),
            (self.postpone_at_most.is_some(), "--postpone-at-most"),
        ];
        if self.unique.is_none()
            && self.unique_by.is_none()
            && let Some((_, flag)) = of_key.into_iter().find(|(is_given, _)| *is_given)
        {
            return Err(usage(format!("{flag} is about a unique job: add --unique KEY, or --unique-by NAMES")));
        }
        match (self.on_conflict, self.postpone_at_most) {
            (Some(Reaction::Postpone), None) => {
                Err(usage("--on-conflict postpone needs --postpone-at-most, the longest wait, for example 10m"))
            }
            (Some(Reaction::Postpone), Some(_)) | (_, None) => Ok(()),
            (_, Some(_)) => Err(usage("--postpone-at-most is for --on-conflict postpone only")),
        }
    }

    /// The retry policy that the flags describe.
    fn retry_policy(&self) -> anyhow::Result<Option<StoredPolicy>> {
        retries::policy(self.retry_policy.as_ref(), self.retry_delay, self.backoff)
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
        spec.scheduled_at = flags.scheduled_at;
        spec.after = flags.after;
        spec.id = flags.id;
        spec
    }
}

/// After a job that is invalid, none is enqueued.
pub(super) async fn run(args: EnqueueArgs, connect: &ConnectArgs, mut shutdown: Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    match &args.from {
        None if args.wait => or_stopped(shutdown, enqueue_one(args, connect, out)).await,
        None => enqueue_one(args, connect, out).await,
        Some(path) => {
            let mut lines = Lines::open(path).await?;
            let store = Store::connect(connect, "recruiter enqueue").await?;
            let classes = store.class_defaults().await?;
            let mut import = Import::new(&store, &lines, args.skip, args.wait_for_room.unwrap_or_default(), args.format, out);
            let imported = import.run(&mut lines, &classes, args.custom_policy, &mut shutdown).await;
            let needs = import.needs;
            warn_of_unmet(&store, &needs).await;
            imported
        }
    }
}

async fn enqueue_one(args: EnqueueArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    args.job.check_unique()?;
    let files = args.job.files.clone();
    let policy = args.job.retry_policy()?;
    let mut spec = JobSpec::from(args.job);
    spec.settings = args.settings;
    spec.settings.retry_policy = policy;
    spec.id.get_or_insert_with(JobId::new);
    let job_of =
        |classes: &Classes| job_of(spec.clone(), classes, args.custom_policy).map_err(|problem| anyhow!(problem).context(Exit::Usage));
    // A wrong flag is an error even without MongoDB.
    job_of(&Classes::new()).map(drop)?;
    let store = Store::connect(connect, "recruiter enqueue").await?;
    let (id, job) = job_of(&store.class_defaults().await?)?;
    let needs = Needs::of([&job]);
    let kept = job.settings().keep();
    put_all(&store, id, &files).await?;
    let enqueued = store.enqueue_when_room([job], args.wait_for_room.unwrap_or_default()).await;
    let may_be_there = match &enqueued {
        Ok(enqueued) => enqueued.iter().any(|enqueued| enqueued.id == id),
        Err(EnqueueError::Store(error)) => error.is_transient(),
        Err(_) => false,
    };
    if !may_be_there {
        delete_all(&store, id, &files).await?;
    }
    match enqueued {
        Ok(enqueued) => {
            // With --wait, only the result is on standard output.
            if !args.wait {
                write_ids(out, args.format, &enqueued)?;
                out.flush()?;
            }
            for enqueued in enqueued.iter().filter(|enqueued| !enqueued.is_new) {
                // Standard error is closed: the note is not needed.
                let _ = writeln!(std::io::stderr(), "nothing was enqueued: {}", reason(enqueued.outcome));
            }
            if enqueued.iter().any(|enqueued| enqueued.is_new) {
                warn_of_unmet(&store, &needs).await;
            }
            match enqueued.first() {
                Some(job) if args.wait => {
                    // What is kept of a job that was there already is not known.
                    let is_deleted_after_success = kept == Keep::Failures && matches!(job.outcome, Outcome::New);
                    until_ended(&store, job.id, args.timeout, is_deleted_after_success, (args.format, args.reveal), out).await
                }
                Some(_) | None => Ok(()),
            }
        }
        Err(EnqueueError::Store(error)) if error.is_transient() => {
            let what_to_do = if files.is_empty() { "repeat the command with --id" } else { "look for it with `recruiter jobs show`:" };
            Err(anyhow!(error).context(format!("the job may have been enqueued; {what_to_do} {id}")))
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

#[cfg(test)]
mod tests {
    use clap::{ArgAction, Command, FromArgMatches as _};

    use super::*;

    #[test]
    fn every_setting_has_a_flag() {
        let command = EnqueueArgs::augment_args(Command::new("enqueue"));
        let mut settings = [Settings::every(), Settings::every()];
        settings[0].limits.clear();
        (settings[1].line, settings[1].halt_on_failure) = (None, false);
        for settings in settings {
            let mut line = vec!["enqueue".to_owned(), "--class".to_owned(), "c".to_owned()];
            for (name, value) in serde_json::to_value(&settings).unwrap().as_object().unwrap() {
                let flag =
                    command.get_arguments().find(|flag| flag.get_id().as_str() == name).unwrap_or_else(|| panic!("no flag for {name}"));
                let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
                for value in values {
                    line.push(format!("--{}", flag.get_long().unwrap()));
                    if !matches!(flag.get_action(), ArgAction::SetTrue) {
                        line.push(value.as_str().map_or_else(|| value.to_string(), str::to_owned));
                    }
                }
                assert!(flag.get_env().is_some(), "no variable for {name}");
            }
            let args = EnqueueArgs::from_arg_matches(&command.clone().try_get_matches_from(&line).unwrap()).unwrap();
            let mut given = args.settings;
            given.retry_policy = args.job.retry_policy().unwrap();
            assert_eq!(given, settings, "{line:?}");
        }
    }
}
