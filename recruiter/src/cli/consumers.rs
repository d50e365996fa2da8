//! `recruiter consumers`: lists, sets, moves and removes consumer groups, whose messages become jobs.

use std::io::Write;

use anyhow::anyhow;
use clap::{Subcommand, builder::BoolishValueParser};
use recruiter_common::{
    consumers::{ConsumerError, ConsumerGroup, InvalidConsumer},
    flags::name_of_text,
    messages::{From, SubscribeError},
    spec::{Classes, InvalidSpec, JobSpec, UnknownPolicies},
    store::{ConnectArgs, Store},
    topics::Pattern,
};
use serde::Serialize;

use super::{
    connected,
    exit::usage,
    output::{Format, printable},
    presence::{Needs, warn_of_unmet},
    view::{Row, View, left, line, outcome, print, right, texts},
};
use crate::views::filter::{When, when_of_text};

pub(super) const EXAMPLES: &str = "\
Each message becomes one job, which one worker runs. Its parameters are those of the job, and
`topic` and `body` of the message.

Examples:
  recruiter consumers set billing --topic 'orders.*' \\
      --job '{\"class\": \"bill\", \"group\": \"billing\"}'
  recruiter consumers set billing --topic 'orders.*' \\
      --job '{\"class\": \"bill\"}' --since 1h
      with the messages of the last hour, as far as MongoDB has them
  recruiter consumers reset billing --since 10m
      get the messages of the last ten minutes again";

#[derive(Subcommand, Clone, Debug)]
pub(super) enum ConsumersCommand {
    /// List consumer groups: their topics, the class of their jobs, and how many messages have become jobs
    List(Format),
    /// Create a consumer group, or change its topics and its job; a known group continues where it is
    #[command(after_help = EXAMPLES)]
    Set {
        /// Name of the consumer group
        #[arg(value_parser = name_of_text)]
        name: String,
        /// Pattern of topics, for example orders.*; may be repeated
        #[arg(long = "topic", env = "RECRUITER_CONSUMER_TOPIC", value_name = "PATTERN", required = true, value_delimiter = ',')]
        topics: Vec<Pattern>,
        /// The job of each message, as in `recruiter enqueue --from`: {"class": …}
        #[arg(long, env = "RECRUITER_CONSUMER_JOB", value_name = "JSON", value_parser = job_of_text)]
        job: Box<JobSpec>,
        /// A new group begins with the messages since this instant, or since this long ago [default: from now on]
        #[arg(long, env = "RECRUITER_CONSUMER_SINCE", value_name = "WHEN", value_parser = when_of_text)]
        since: Option<When>,
        #[command(flatten)]
        format: Format,
    },
    /// Move a consumer group: it gets the messages from there on, also those that it has had before
    Reset {
        /// Name of the consumer group
        #[arg(value_parser = name_of_text)]
        name: String,
        /// Continue with the messages since this instant, or since this long ago [default: from now on]
        #[arg(long, env = "RECRUITER_CONSUMER_SINCE", value_name = "WHEN", value_parser = when_of_text)]
        since: Option<When>,
        /// Only show where the group would continue
        #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = BoolishValueParser::new())]
        dry_run: bool,
        #[command(flatten)]
        format: Format,
    },
    /// Remove a consumer group; its jobs stay
    Remove {
        /// Name of the consumer group
        #[arg(value_parser = name_of_text)]
        name: String,
        /// Only show what would be removed
        #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = BoolishValueParser::new())]
        dry_run: bool,
        #[command(flatten)]
        format: Format,
    },
}

fn job_of_text(text: &str) -> Result<Box<JobSpec>, InvalidSpec> {
    text.parse().map(Box::new)
}

pub(super) async fn run(command: ConsumersCommand, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    match command {
        ConsumersCommand::List(format) => {
            let groups = connected(connect, "recruiter consumers", true).await?.consumers().list().await?;
            Ok(print(out, format, "there is no consumer group", groups.into_iter().map(|(name, group)| Listed::of(name, group)))?)
        }
        ConsumersCommand::Set { name, topics, job, since, format } => {
            let job_of = |classes: &Classes| job.clone().with_defaults(classes).into_job(UnknownPolicies::Accept).map_err(usage);
            // A wrong job is an error even without MongoDB.
            job_of(&Classes::new()).map(drop)?;
            let store = Store::connect(connect, "recruiter consumers").await?;
            let job = job_of(&store.class_defaults().await?)?;
            let needs = Needs::of([&job]);
            let from = since.map_or(From::Now, |when| From::Since(when.by(store.now())));
            store.consumers().declare(&name, topics, job, from).await.map_err(refused)?;
            warn_of_unmet(&store, &needs).await;
            let text = format!("the messages of {} become jobs", printable(&name, 256));
            Ok(line(out, format, &outcome(&name, "set", false), text)?)
        }
        ConsumersCommand::Reset { name, since, dry_run, format } => {
            let store = connected(connect, "recruiter consumers", dry_run).await?;
            let at = since.map(|when| when.by(store.now()));
            let done = if dry_run {
                find(&store, &name).await?;
                "would continue"
            } else {
                store.consumers().reset(&name, at.map_or(From::Now, From::Since)).await.map_err(refused)?;
                "continues"
            };
            let whence = at.map_or_else(|| "now".into(), super::output::moment);
            let text = format!("{} {done} with the messages since {whence}", printable(&name, 256));
            Ok(line(out, format, &outcome(&name, "reset", dry_run), text)?)
        }
        ConsumersCommand::Remove { name, dry_run, format } => {
            let store = connected(connect, "recruiter consumers", dry_run).await?;
            find(&store, &name).await?;
            let text = if dry_run {
                format!("would remove the consumer group {}", printable(&name, 256))
            } else {
                store.consumers().remove(&name).await?;
                format!("removed the consumer group {}; its jobs stay", printable(&name, 256))
            };
            Ok(line(out, format, &outcome(&name, "removed", dry_run), text)?)
        }
    }
}

async fn find(store: &Store, name: &str) -> anyhow::Result<()> {
    let known = store.consumers().list().await?.into_iter().any(|(other, _)| other == name);
    if known { Ok(()) } else { Err(anyhow!("there is no consumer group `{}`", printable(name, 256))) }
}

fn refused(error: ConsumerError) -> anyhow::Error {
    match error {
        ConsumerError::Store(error) | ConsumerError::Subscribe(SubscribeError::Store(error)) => error.into(),
        other @ (ConsumerError::Unknown(_) | ConsumerError::Subscribe(SubscribeError::HistoryLost)) => other.into(),
        other @ (ConsumerError::Name(_) | ConsumerError::Job(_) | ConsumerError::TooMany | ConsumerError::Subscribe(_) | _) => usage(other),
    }
}

/// A consumer group.
#[derive(Serialize)]
struct Listed {
    name: String,
    /// Not if its document is not valid.
    #[serde(flatten)]
    valid: Option<Valid>,
    problem: Option<String>,
}

#[derive(Serialize)]
struct Valid {
    topics: Vec<String>,
    class: String,
    group: String,
    messages: i64,
    skipped: i64,
    position: String,
}

impl Listed {
    fn of(name: String, group: Result<ConsumerGroup, InvalidConsumer>) -> Self {
        let ConsumerGroup { patterns, job, position, forwarded: messages, skipped, problem, .. } = match group {
            Ok(group) => group,
            Err(problem) => return Self { name, valid: None, problem: Some(format!("not valid: {problem}")) },
        };
        let (class, group) = job.class_and_group();
        let (topics, position) = (texts(&patterns), position.to_string());
        let valid = Valid { topics, class: class.into(), group: group.into(), messages, skipped, position };
        Self { name, valid: Some(valid), problem }
    }
}

impl View for Listed {
    fn row(self) -> Row {
        let Self { name, valid, problem } = self;
        let (topics, class, [messages, skipped]) = match valid {
            Some(Valid { topics, class, messages, skipped, group: _, position: _ }) => {
                (topics.join(", "), class, [messages, skipped].map(|count| count.to_string()))
            }
            None => Default::default(),
        };
        let cells = [
            left("NAME", printable(&name, 80)).cut_to(10),
            left("TOPICS", printable(&topics, 120)).cut_to(10),
            left("CLASS", printable(&class, 80)).cut_to(10),
            right("MESSAGES", messages),
            right("SKIPPED", skipped),
        ];
        Row::from(cells).below(problem.map(|problem| format!("has stopped: {}", printable(&problem, 400))))
    }
}
