//! Logs: their destination and format.
//!
//! Used by the three programs. One line per event on standard error. [`telemetry`](crate::base::telemetry) describes the
//! contents of a line.

use std::{
    io::IsTerminal,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use clap::{Args, ValueEnum};
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

use super::{early, journal::Journal};
use crate::base::flags::variable;

/// The log settings of a process.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Logging", about = None, long_about = None, mut_args = crate::base::flags::unless_empty)]
pub struct LogArgs {
    /// Log filter: error, warn, info, debug, trace, or for example `info,recruiter=debug` [default: info; warn for
    /// commands that end by themselves]
    #[arg(long = "log", global = true, env = "RECRUITER_LOG", value_name = "FILTER")]
    filter: Option<String>,
    /// Format of the log lines
    #[arg(long = "log-format", global = true, env = "RECRUITER_LOG_FORMAT", value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Text for people
    Text,
    /// One JSON object per line
    Json,
}

/// The value of `--log` is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--log (RECRUITER_LOG): `{filter}` is not a valid log filter ({problem}); write for example `info` or `info,recruiter=debug`")]
pub struct InvalidFilter {
    filter: String,
    problem: String,
}

impl LogArgs {
    /// Changes the default, for commands whose output is for their user.
    #[must_use]
    pub fn or(mut self, filter: &str) -> Self {
        self.filter.get_or_insert_with(|| filter.into());
        self
    }

    /// Checks the filter.
    ///
    /// # Errors
    /// When it is invalid.
    pub fn check(&self) -> Result<(), InvalidFilter> {
        self.checked().map(drop)
    }

    fn checked(&self) -> Result<EnvFilter, InvalidFilter> {
        filter_of(self.filter.as_deref().unwrap_or("info"))
    }

    /// The same settings as command-line arguments for another of the programs.
    pub fn arguments(&self) -> Vec<String> {
        let filter = self.filter.iter().flat_map(|filter| ["--log".into(), filter.clone()]);
        filter.chain((self.format == Format::Json).then(|| "--log-format=json".into())).collect()
    }
}

/// Whether lines are JSON. Then the final error of the process is JSON as well.
static IS_JSON: AtomicBool = AtomicBool::new(false);

pub(crate) fn is_json() -> bool {
    IS_JSON.load(Ordering::Relaxed)
}

/// The crates that log something in the three programs.
const CRATES: [&str; 10] = ["recruiter", "mongodb", "tokio", "rustls", "hyper", "h2", "hickory", "mio", "tower", "opentelemetry"];

/// The filter of a text. A word that is no level would be the name of a module, and a misspelt level would then log nothing. So would the
/// misspelt name of a crate, unless there is a level for all others.
fn filter_of(text: &str) -> Result<EnvFilter, InvalidFilter> {
    let refused = |problem: String| InvalidFilter { filter: text.into(), problem };
    let directives = text.split(',').map(str::trim).collect::<Vec<_>>();
    let is_level = |word: &str| !word.is_empty() && word.parse::<LevelFilter>().is_ok();
    // In brackets, a comma separates the fields of a span.
    if !text.contains('[')
        && let Some(word) = directives.iter().find(|directive| !directive.contains('=') && !is_level(directive))
    {
        return Err(refused(format!("`{word}` is not a level: off, error, warn, info, debug or trace")));
    }
    let is_ours = |target: &str| CRATES.iter().any(|name| target.starts_with(name) || name.starts_with(target));
    let targets = directives.iter().map(|directive| directive.split(['=', '[']).next().unwrap_or_default());
    if !text.contains('[')
        && !directives.iter().any(|directive| is_level(directive))
        && let Some(target) = targets.into_iter().find(|target| !is_ours(target))
    {
        return Err(refused(format!("`{target}` is no crate of Recruiter; for one of your own, write a level for all others as well")));
    }
    EnvFilter::try_new(directives.join(",")).map_err(|error| refused(error.to_string()))
}

/// Starts logging to standard error, with colours only on a terminal. In systemd's journal each event is an entry with fields. If that
/// cannot be reached, lines have no time of their own.
///
/// # Errors
/// When the filter is invalid.
pub fn init(args: &LogArgs) -> Result<(), InvalidFilter> {
    let filter = args.checked()?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    // A line that cannot be written is lost. Reporting that on a closed terminal would panic.
    let builder = builder.log_internal_errors(false);
    let journal = variable("JOURNAL_STREAM").is_some();
    let colour = std::io::stderr().is_terminal() && variable("NO_COLOR").is_none();
    IS_JSON.store(args.format == Format::Json, Ordering::Relaxed);
    let entries = if args.format == Format::Text { Journal::connected() } else { None };
    match (entries, args.format, journal) {
        (Some(entries), ..) => builder.json().with_current_span(false).with_writer(Arc::new(entries)).init(),
        (None, Format::Json, _) => builder.json().init(),
        (None, Format::Text, true) => builder.with_ansi(false).without_time().init(),
        (None, Format::Text, false) => builder.with_ansi(colour).init(),
    }
    early::warnings().into_iter().for_each(|warning| tracing::warn!("{warning}"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_level_or_crate_is_refused_by_its_name() {
        for good in [
            "info",
            "WARN",
            "off",
            "info,recruiter=debug",
            " info , recruiter=debug\n",
            "warn\r\n",
            "recruiter[job]=trace",
            "recruiter_worker::engine=debug,mongodb=info",
            "warn,shop=debug",
        ] {
            assert!(filter_of(good).is_ok(), "{good}");
        }
        for (wrong, named) in [
            ("warning", "`warning` is not a level"),
            ("info,verbose", "`verbose`"),
            ("", "``"),
            ("recruiter=warning", ""),
            ("recruter=debug", "`recruter` is no crate"),
        ] {
            let problem = filter_of(wrong).map(drop).expect_err(wrong).to_string();
            assert!(problem.contains(named) && problem.contains("RECRUITER_LOG"), "{problem}");
        }
    }
}
