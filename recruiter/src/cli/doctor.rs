//! `recruiter doctor`: examines MongoDB, the schema, the processes and the jobs that wait. The library has the checks.

use std::{cmp::Reverse, io::Write};

use anstyle::{AnsiColor, Reset};
use anyhow::anyhow;
use clap::{Args, builder::BoolishValueParser};
use recruiter_common::store::{ConnectArgs, Finding, State, Store};
use serde_json::json;

use super::{
    output::Format,
    view::{Screen, json_line},
};

pub(super) const EXAMPLES: &str = "\
Examples:
  recruiter doctor
  recruiter doctor --json | jq 'select(.state == \"error\")'
  recruiter doctor --strict --json >/dev/null || notify-the-operator

The exit code is 1 if something is an error, with --strict also for a warning, and 69 or 77
if MongoDB cannot be used at all. What this MongoDB user may not read is `unknown`, which is
neither.";

#[derive(Args, Clone, Copy, Debug)]
pub(super) struct DoctorArgs {
    /// End with 1 also if there are only warnings
    #[arg(long, env = "RECRUITER_DOCTOR_STRICT", value_parser = BoolishValueParser::new())]
    strict: bool,
    #[command(flatten)]
    format: Format,
}

pub(super) async fn run(args: DoctorArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter doctor").await?;
    let mut findings = store.findings().await;
    if args.format.json {
        for Finding { check, state, text } in &findings {
            json_line(out, &json!({ "check": check.name(), "state": state.name(), "text": text }))?;
        }
    } else {
        // The worst comes first, and checks stay in their order.
        findings.sort_by_key(|finding| Reverse(finding.state));
        let screen = Screen::of_stdout();
        findings.iter().try_for_each(|finding| write_finding(out, screen, finding))?;
    }
    out.flush()?;
    let count = |state: State| findings.iter().filter(|finding| finding.state == state).count();
    let (errors, warnings) = (count(State::Error), count(State::Warning));
    let is_bad = errors > 0 || (args.strict && warnings > 0);
    if is_bad { Err(anyhow!("errors: {errors}, warnings: {warnings}")) } else { Ok(()) }
}

fn write_finding(out: &mut impl Write, screen: Screen, finding: &Finding) -> std::io::Result<()> {
    let Finding { check, state, text } = finding;
    let colour = match state {
        State::Good => AnsiColor::Green,
        State::Unknown => AnsiColor::BrightBlack,
        State::Warning => AnsiColor::Yellow,
        State::Error => AnsiColor::Red,
    };
    let word = format!("{:<8}", state.name());
    let word = if screen.colours { format!("{}{word}{Reset}", colour.render_fg()) } else { word };
    writeln!(out, "{word} {:<12} {text}", check.name())
}
