//! The flags of `recruiter jobs retry` that give the retried jobs new content.

use std::time::Duration;

use bson::Document;
use clap::{Args, builder::BoolishValueParser};
use recruiter_common::{
    control::Revision,
    job::Priority,
    spec::{duration_of_text, parameters_of_text},
};

use super::{
    exit::{problem_of, usage},
    retries::{self, Retries, retry_of_text, unknown_policies},
};

/// The new content of retried jobs.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "New content")]
pub(crate) struct NewContent {
    /// Merge this JSON object into the parameters (of each item of a bundle); null removes a field
    #[arg(long, env = "RECRUITER_JOBS_RETRY_SET", value_name = "JSON", value_parser = parameters_of_text)]
    set: Option<Document>,
    /// New number of retries, or new retry policy as JSON, as for `recruiter enqueue`
    #[arg(long = "retry", alias = "retry-policy", env = "RECRUITER_JOBS_RETRY_POLICY", value_name = "N|JSON", value_parser = retry_of_text)]
    retry_policy: Option<Retries>,
    /// With `--retry N`: the wait before each retry [default: 10s]
    #[arg(long, env = "RECRUITER_JOBS_RETRY_DELAY", value_name = "DURATION", value_parser = duration_of_text)]
    retry_delay: Option<Duration>,
    /// With `--retry N`: each wait is twice as long as the one before
    #[arg(long, env = "RECRUITER_JOBS_RETRY_BACKOFF", value_parser = BoolishValueParser::new())]
    backoff: bool,
    /// Accept a retry policy that only your workers know, not this program
    #[arg(long, env = "RECRUITER_JOBS_RETRY_CUSTOM_POLICY", value_parser = BoolishValueParser::new())]
    custom_policy: bool,
    /// New group
    #[arg(long, env = "RECRUITER_JOBS_RETRY_TO_GROUP", value_name = "GROUP")]
    to_group: Option<String>,
    /// New priority from 0 to 9, higher first
    #[arg(long, env = "RECRUITER_JOBS_RETRY_PRIORITY", value_name = "0-9", allow_negative_numbers = true, value_parser = clap::value_parser!(u8).range(0..=9))]
    priority: Option<u8>,
}

impl NewContent {
    pub(crate) fn revision(self) -> anyhow::Result<Revision> {
        let mut revision = Revision::default().set(self.set.unwrap_or_default());
        if let Some(policy) = retries::policy(self.retry_policy.as_ref(), self.retry_delay, self.backoff)? {
            revision =
                revision.retry_policy(policy, unknown_policies(self.custom_policy)).map_err(|problem| usage(problem_of(&problem)))?;
        }
        if let Some(group) = self.to_group {
            revision = revision.group(group).map_err(usage)?;
        }
        Ok(match self.priority.and_then(Priority::new) {
            Some(priority) => revision.priority(priority),
            None => revision,
        })
    }
}
