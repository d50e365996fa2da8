//! The command-line arguments of the cleaner.

use std::{collections::BTreeSet, time::Duration};

use clap::Args;
use recruiter_common::exit::Exit;

use crate::retention::Periods;

/// The settings of the cleaner.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Cleaning")]
pub struct CleanerArgs {
    /// Time without a new heartbeat after which a worker is dead. A worker on this cleaner's machine is dead as soon as
    /// its process is gone
    #[arg(long, env = "RECRUITER_DEAD_AFTER", value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration)]
    pub dead_after: Duration,
    /// Interval between polls of the roster
    #[arg(long, env = "RECRUITER_CLEAN_EVERY", value_name = "DURATION", default_value = "1s", value_parser = humantime::parse_duration)]
    pub every: Duration,
    /// Interval between sweeps for locked jobs whose worker is not in the roster
    #[arg(long, env = "RECRUITER_SWEEP_EVERY", value_name = "DURATION", default_value = "1m", value_parser = humantime::parse_duration)]
    pub sweep_every: Duration,
    /// Time for which jobs stay in the archive
    #[arg(long, env = "RECRUITER_KEEP_ARCHIVED", value_name = "DURATION", default_value = "5d", value_parser = humantime::parse_duration)]
    pub keep_archived: Duration,
    /// Time for which failed jobs (neither done nor cancelled) stay in the archive, if not as long as others
    #[arg(long, env = "RECRUITER_KEEP_FAILURES", value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub keep_failures: Option<Duration>,
    /// Time for which jobs with a finish reason stay in the archive, for example cancelled=1d; may be given several times
    #[arg(long, env = "RECRUITER_KEEP_REASON", value_name = "REASON=DURATION", value_delimiter = ',', value_parser = keep_of_text)]
    pub keep_reason: Vec<(String, Duration)>,
    /// Time for which jobs of a class stay in the archive, failed or not, for example mail=1d; may be given several times
    #[arg(long, env = "RECRUITER_KEEP", value_name = "CLASS=DURATION", value_delimiter = ',', value_parser = keep_of_text)]
    pub keep: Vec<(String, Duration)>,
    /// Interval between deletions of old jobs from the archive
    #[arg(long, env = "RECRUITER_PRUNE_EVERY", value_name = "DURATION", default_value = "1m", value_parser = humantime::parse_duration)]
    pub prune_every: Duration,
}

fn keep_of_text(text: &str) -> Result<(String, Duration), String> {
    // A name may contain `=`, a duration does not.
    let (name, duration) = text.rsplit_once('=').ok_or("write it like mail=1d: a name, and how long its archived jobs are kept")?;
    let duration = humantime::parse_duration(duration.trim()).map_err(|error| format!("`{duration:.80}` is not a duration ({error})"))?;
    match name.trim() {
        "" => Err("the name before `=` is missing".into()),
        name => Ok((name.to_owned(), duration)),
    }
}

impl CleanerArgs {
    /// Checks the arguments against each other.
    ///
    /// # Errors
    /// The error names the flag to change and carries [`Exit::Usage`].
    pub fn validate(&self) -> anyhow::Result<()> {
        let refuse = |text: String| Err(anyhow::anyhow!(text).context(Exit::Usage));
        if self.every.is_zero() {
            return refuse("--every must be above zero".into());
        }
        if self.dead_after < self.every * 3 {
            return refuse(format!(
                "--dead-after ({}) must be at least three polls of the roster (--every {}), so that one late poll cannot declare a worker dead",
                humantime::format_duration(self.dead_after),
                humantime::format_duration(self.every)
            ));
        }
        let periods = [("--keep-archived", Some(self.keep_archived)), ("--keep-failures", self.keep_failures)];
        let given = [("--keep-reason", &self.keep_reason), ("--keep", &self.keep)];
        let periods =
            periods.into_iter().chain(given.iter().flat_map(|(flag, kept)| kept.iter().map(|(_, period)| (*flag, Some(*period)))));
        if let Some((flag, _)) = periods.into_iter().find(|(_, period)| period.is_some_and(|period| period.is_zero())) {
            return refuse(format!("{flag} is zero, so archived jobs would be deleted at once: give a period, or leave the flag out"));
        }
        for (flag, kept) in given {
            let mut names = BTreeSet::new();
            if let Some((name, _)) = kept.iter().find(|(name, _)| !names.insert(name)) {
                return refuse(format!("{flag} is given twice for `{name:.80}`: give it once"));
            }
        }
        Ok(())
    }

    pub(crate) fn periods(&self) -> Periods {
        Periods {
            all: self.keep_archived,
            failures: self.keep_failures,
            reasons: self.keep_reason.iter().cloned().collect(),
            classes: self.keep.iter().cloned().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_kept_for_a_duration() {
        assert_eq!(keep_of_text("mail=1d"), Ok(("mail".into(), Duration::from_secs(86_400))));
        assert_eq!(keep_of_text(" mail = 1d\n"), Ok(("mail".into(), Duration::from_secs(86_400))));
        assert_eq!(keep_of_text("a=b=1h 30m"), Ok(("a=b".into(), Duration::from_secs(5_400))));
        for (text, problem) in [("mail", "write it like mail=1d"), ("=1d", "is missing"), ("mail=soon", "`soon` is not a duration")] {
            assert!(keep_of_text(text).is_err_and(|said| said.contains(problem)), "{text}");
        }
    }
}
