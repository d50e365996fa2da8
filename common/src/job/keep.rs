//! What is kept of a finished job.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What is kept of a job after its end.
///
/// With [`Keep::Failures`] a job that succeeded is deleted, and not moved to the archive. This saves the write of the archive and its disk
/// space. A job that failed for the last time, that was cancelled, or whose worker died is archived as always. So is a bundle with an item
/// that failed for the last time. Of a job that succeeded nothing remains:
///
/// - its result is lost: [`Client::result_of`](crate::mongo::Client::result_of) returns [`JobResult::Unknown`](crate::wait::finished::JobResult::Unknown);
/// - its id is free again: a job that is enqueued once more under the same id ([`NewJob::with_id`](crate::enqueue::NewJob::with_id)) runs
///   again. After an unknown outcome, repeat the call only if the job may run twice;
/// - `recruiter jobs show` and the lists do not show it. `recruiter stats` counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Keep {
    /// Every finished job is archived.
    #[default]
    All,
    /// A job that succeeded is deleted.
    Failures,
}

impl Keep {
    /// The value of the field `keep`. Without it, and with a value of a later release, everything is kept.
    pub(crate) fn of_stored(stored: Option<&str>) -> Self {
        stored.and_then(|stored| stored.parse().ok()).unwrap_or_default()
    }
}

impl FromStr for Keep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self::All),
            "failures" => Ok(Self::Failures),
            _ => Err(format!("`{text:.80}` is neither `all` nor `failures`")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_later_release_may_have_written_keeps_everything() {
        assert_eq!(Keep::of_stored(Some("failures")), Keep::Failures);
        for stored in ["all", "nothing", "Failures", ""] {
            assert_eq!(Keep::of_stored(Some(stored)), Keep::All);
        }
    }
}
