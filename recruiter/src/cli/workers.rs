//! `recruiter workers`: quiets, resumes and stops workers from afar.
//!
//! The library has the rules ([`recruiter_common::workers`]). This file has the arguments and the output.

use std::io::Write;

use anyhow::{anyhow, bail};
use clap::{Args, Subcommand, builder::BoolishValueParser};
use recruiter_common::{
    flags::name_of_text,
    ids::WorkerId,
    store::ConnectArgs,
    workers::{Chosen, WorkerChange},
};

use super::{
    change::write_outcome,
    connected_to_change,
    exit::usage,
    limits::this_operator,
    output::{Format, printable},
};
use crate::views::workers::{outcome, participle};

const EXAMPLES: &str = "\
Examples:
  recruiter workers quiet --host web-3
      workers on this machine take no more jobs; running jobs continue
  recruiter workers resume --host web-3
  recruiter workers stop 65a1b2c3d4e5f60718293a4b
      this worker drains as after TERM, and exits with code 0
  recruiter workers stop --all --dry-run";

#[derive(Subcommand, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) enum WorkersCommand {
    /// Take no more jobs until a resume: running jobs continue, and jobs that were assigned ahead are returned
    Quiet(ChosenArgs),
    /// Let quiet workers take jobs again
    Resume(ChosenArgs),
    /// Drain as after TERM, and end
    Stop(ChosenArgs),
}

/// The workers, and how to change them.
#[derive(Args, Clone, Debug)]
pub(super) struct ChosenArgs {
    /// Ids of the workers, from `recruiter roster`
    #[arg(value_name = "ID", value_parser = worker_of_text)]
    ids: Vec<WorkerId>,
    /// All workers on the machine with this name
    #[arg(long, env = "RECRUITER_WORKERS_HOST", value_name = "HOST", value_parser = name_of_text, conflicts_with = "all")]
    host: Option<String>,
    /// All workers
    #[arg(long)]
    all: bool,
    /// Who makes the request [default: the user and the host]
    #[arg(long, env = "RECRUITER_WORKERS_BY", value_name = "NAME")]
    by: Option<String>,
    /// Dry run: report the changes without making them
    #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = BoolishValueParser::new())]
    dry_run: bool,
    #[command(flatten)]
    format: Format,
}

fn worker_of_text(text: &str) -> Result<WorkerId, String> {
    text.parse().map_err(|_| format!("`{text:.80}` is not the id of a worker (24 hexadecimal digits); `recruiter roster` lists them"))
}

impl ChosenArgs {
    fn chosen(&self) -> anyhow::Result<Chosen> {
        match (self.ids.is_empty(), &self.host, self.all) {
            (false, None, false) => Ok(Chosen::Ids(self.ids.clone())),
            (true, Some(host), false) => Ok(Chosen::Host(host.clone())),
            (true, None, true) => Ok(Chosen::All),
            (true, None, false) => Err(usage("name the workers: by ids, by --host, or by --all")),
            _ => Err(usage("ids, --host and --all cannot be combined; use one of them")),
        }
    }
}

pub(super) async fn run(command: WorkersCommand, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let (change, args) = match command {
        WorkersCommand::Quiet(args) => (WorkerChange::Quiet, args),
        WorkersCommand::Resume(args) => (WorkerChange::Resume, args),
        WorkersCommand::Stop(args) => (WorkerChange::Stop, args),
    };
    let chosen = args.chosen()?;
    let store = connected_to_change(connect, "recruiter workers", args.dry_run).await?;
    let by = args.by.clone().unwrap_or_else(this_operator);
    let answers = store.workers().change(change, &chosen, &by, args.dry_run).await?;
    let mut refused = 0;
    for answer in &answers {
        let is_refused = answer.asked.is_refused();
        refused += usize::from(is_refused);
        write_outcome(&outcome(change, answer, args.dry_run), out, args.format, is_refused)?;
    }
    out.flush()?;
    match (&chosen, refused) {
        (Chosen::Host(host), _) if answers.is_empty() => {
            Err(anyhow!("the roster has no worker on the host `{}`; `recruiter roster` lists the hosts", printable(host, 80)))
        }
        (Chosen::All, _) if answers.is_empty() && !args.format.json => Ok(writeln!(out, "no worker is registered")?),
        (_, 0) => Ok(()),
        (_, refused) => bail!("{refused} of {} workers could not be {}", answers.len(), participle(change)),
    }
}
