//! `recruiter redaction`: lists, sets and removes what is not shown of the jobs of some classes. `--reveal` of the commands that show jobs.

use std::io::Write;

use clap::{Args, Subcommand};
use recruiter_common::{
    StoreError,
    flags::name_of_text,
    store::{ConnectArgs, FollowedRedaction, Redaction, RedactionRule, Store},
};
use serde::Serialize;

use super::{
    connected,
    exit::usage,
    output::{Format, printable},
    view::{Row, View, left, line, outcome, print},
};

/// The name of this command in the logs of MongoDB.
const NAME: &str = "recruiter redaction";

pub(super) const SET_EXAMPLES: &str = "\
Commands and logs show `[redacted]` in place of these parameters. In place of results, error messages,
traces, log lines, checkpoints and texts of progress they show it as a whole, because these may quote
the parameters. Names of parameters and classes of errors stay. Running workers follow within a minute.

Who may read the collections of the job system reads the values: redaction is no protection from them.

Examples:
  recruiter redaction set mail to token
      the parameters `to` and `token` of the class mail
  recruiter redaction set 'payments.*'
      all parameters of the classes that begin with `payments.`
  recruiter redaction remove mail
  recruiter jobs show 65a1b2c3d4e5f60718293a4b --reveal";

#[derive(Subcommand, Clone, Debug)]
pub(super) enum RedactionCommand {
    /// List the classes whose parameters are not shown
    List(Format),
    /// Redact parameters of a class, in place of what was set for it before
    #[command(after_help = SET_EXAMPLES)]
    Set {
        /// A class; or the begin of classes and one * at the end, such as 'payments.*'
        #[arg(value_parser = name_of_text)]
        class: String,
        /// Names of parameters, at the top level [default: all]
        #[arg(value_name = "PARAMETER")]
        keys: Vec<String>,
        #[command(flatten)]
        format: Format,
    },
    /// Show the parameters of a class again
    Remove {
        /// The class or the begin, as it is listed
        #[arg(value_parser = name_of_text)]
        class: String,
        #[command(flatten)]
        format: Format,
    },
}

/// Whether what is redacted is shown.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Reveal {
    /// Show also what is redacted
    #[arg(long)]
    pub(super) reveal: bool,
}

impl Reveal {
    /// What is redacted in this call.
    pub(super) async fn of(self, store: &Store) -> Result<Redaction, StoreError> {
        if self.reveal { Ok(Redaction::default()) } else { store.redaction().await }
    }

    /// What is redacted in this call, which may last for long.
    pub(super) async fn followed(self, store: &Store) -> Result<FollowedRedaction, StoreError> {
        if self.reveal { Ok(FollowedRedaction::nothing()) } else { store.followed_redaction().await }
    }
}

pub(super) async fn run(command: RedactionCommand, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    match command {
        RedactionCommand::List(format) => {
            let redaction = connected(connect, NAME, true).await?.redaction().await?;
            Ok(print(out, format, "nothing is redacted", redaction.rules().iter().map(Listed::of))?)
        }
        RedactionCommand::Set { class, keys, format } => {
            // A wrong rule is an error even without MongoDB.
            let rule = RedactionRule::new(class, keys).map_err(usage)?;
            connected(connect, NAME, false).await?.set_redaction(&rule).await?;
            let listed = Listed::of(&rule);
            let text = format!("redacted of {}: {}", printable(rule.class(), 256), listed.parameters());
            Ok(line(out, format, &listed, text)?)
        }
        RedactionCommand::Remove { class, format } => {
            let removed = connected(connect, NAME, false).await?.remove_redaction(&class).await?;
            let (done, name) = (if removed { "removed" } else { "removed-before" }, printable(&class, 256));
            let text = if removed { format!("the parameters of {name} are shown again") } else { format!("there is no rule for {name}") };
            Ok(line(out, format, &outcome(&class, done, false), text)?)
        }
    }
}

/// A rule.
#[derive(Serialize)]
struct Listed {
    name: String,
    /// None for all.
    parameters: Vec<String>,
}

impl Listed {
    fn of(rule: &RedactionRule) -> Self {
        Self { name: rule.class().into(), parameters: rule.keys().iter().cloned().collect() }
    }

    fn parameters(&self) -> String {
        if self.parameters.is_empty() { "all parameters".into() } else { printable(&self.parameters.join(", "), 400) }
    }
}

impl View for Listed {
    fn row(self) -> Row {
        let parameters = self.parameters();
        Row::from([left("CLASS", printable(&self.name, 256)).cut_to(12), left("PARAMETERS", parameters).cut_to(12)])
    }
}
