//! `recruiter jobs export`: jobs as lines of JSON that `recruiter enqueue --from` reads.

use std::{io::Write, ops::ControlFlow};

use anyhow::{anyhow, bail};
use clap::Args;
use recruiter_common::{
    exit::Exit,
    instant::Instant,
    shutdown::Shutdown,
    store::{ConnectArgs, Store},
};

use super::{
    exit::usage,
    filter::check_reason,
    output::{is_closed, printable},
    redaction::Reveal,
};
use crate::views::filter::FilterArgs;

/// Maximum number of jobs without a line that are named. All of them are counted.
const NAMED: u64 = 20;

/// Why a job is not exported. A line with other values would be another job.
const HIDDEN: &str = "its class is redacted: with --reveal, its line has the true values";

pub(super) const EXPORT_EXAMPLES: &str = "\
Writes jobs to standard output, one line of JSON each, as `recruiter enqueue --from` reads them:
without id and history, so that they are enqueued as new jobs. Nothing is changed. Without --why and
--state, it exports failed jobs (neither done nor cancelled).

Examples:
  recruiter jobs export --class mail --since 2h > failed.ndjson
  recruiter enqueue --from failed.ndjson
  recruiter jobs export --state waiting > waiting.ndjson
      waiting jobs, with the due dates that are to come
  recruiter jobs export --error-class SmtpDown |
      jq -c '.parameters.host = \"mx2\"' | recruiter enqueue --from -";

#[derive(Args, Clone, Debug)]
pub(super) struct ExportArgs {
    #[command(flatten)]
    reveal: Reveal,
    // Last field, because its heading applies to all arguments after it.
    #[command(flatten)]
    filter: FilterArgs,
}

/// Writes the jobs that match. Fails at the end if a job has no such form; the others are written.
pub(super) async fn run(
    ExportArgs { reveal, filter: args }: ExportArgs,
    connect: &ConnectArgs,
    shutdown: &Shutdown,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let given = args.clone().at(Instant::UNIX_EPOCH);
    given.whenever().narrowed_to_export().map_err(usage)?;
    let store = Store::connect_to_ask(connect, "recruiter jobs").await?;
    let filter = args.at(store.now()).narrowed_to_export().map_err(usage)?;
    let redaction = reveal.of(&store).await?;
    let (mut count, mut without, mut written) = (0_u64, 0_u64, Ok(()));
    let exported = store
        .export_jobs(&filter, |job, line| {
            written = match line.and_then(|spec| if redaction.concerns(&spec.class) { Err(HIDDEN.into()) } else { Ok(spec) }) {
                Ok(spec) => {
                    count += 1;
                    writeln!(out, "{spec}")
                }
                Err(problem) => {
                    without += 1;
                    if without <= NAMED { writeln!(std::io::stderr(), "{job}: {}", printable(&problem, 400)) } else { Ok(()) }
                }
            };
            if written.is_err() || is_closed() || shutdown.is_requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .await;
    written?;
    out.flush()?;
    // The reader has all that it wants, as in `| head`.
    if is_closed() {
        return Ok(());
    }
    if exported?.is_break() {
        return Err(anyhow!("stopped by a signal after {count} jobs").context(Exit::Aborted));
    }
    if count + without == 0 {
        check_reason(&filter)?;
    }
    if without > 0 {
        bail!("{without} of {} jobs were not exported", count + without);
    }
    writeln!(std::io::stderr(), "{count} jobs exported")?;
    Ok(())
}
