//! Retries with a wait that depends on the age of the job.

use std::time::Duration;

use bson::{Bson, Document, doc};

use super::{
    Decision, History, InvalidPolicy, Parameters, RetryPolicy,
    parameters::{checked_wait, shown, stored_seconds},
};
use crate::{
    base::{Failure, Instant},
    job::FinishReason,
};

/// Retries young jobs often and old jobs rarely. The wait is that of the first row whose age the job has not reached
/// (counted from `created_at`). A job older than every row is archived as [`FinishReason::TRIED_TOO_MANY_TIMES`].
///
/// Stored as `time_table`, a list of `{younger_than_seconds, seconds_to_wait}`. The PHP Recruiter's map from `"5
/// minutes ago"` to `"1 minute"` is read as well.
///
/// ```
/// use std::time::Duration;
/// use recruiter_common::retry_policy::TimeTable;
///
/// const MINUTE: Duration = Duration::from_secs(60);
/// const HOUR: Duration = Duration::from_secs(3600);
/// let table = TimeTable::new([(5 * MINUTE, MINUTE), (HOUR, 5 * MINUTE), (24 * HOUR, HOUR)])?;
/// assert_eq!(table, TimeTable::default());
/// # Ok::<(), recruiter_common::retry_policy::InvalidPolicy>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeTable {
    rows: Vec<Row>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    younger_than: Duration,
    wait: Duration,
}

impl TimeTable {
    /// Each row is a pair: a job younger than the first value is retried after the second. Both are rounded to
    /// milliseconds.
    ///
    /// # Errors
    /// When there are no rows; when an age is not greater than that of the previous row, which would make the row
    /// unreachable; when a wait is longer than its row's age; and when a value is less than a millisecond or more than
    /// a hundred years.
    pub fn new(rows: impl IntoIterator<Item = (Duration, Duration)>) -> Result<Self, InvalidPolicy> {
        let mut checked: Vec<Row> = Vec::new();
        for (younger_than, wait) in rows {
            let row =
                Row::new(younger_than, wait, checked.last()).map_err(|problem| problem.within(format!("time_table[{}]", checked.len())))?;
            checked.push(row);
        }
        if checked.is_empty() {
            return Err(InvalidPolicy::parameter("time_table", "is empty; give at least one row, or use DoNotDoItAgain"));
        }
        Ok(Self { rows: checked })
    }

    pub(super) fn decode(parameters: &Parameters<'_>) -> Result<Self, InvalidPolicy> {
        match parameters.get("time_table").and_then(Bson::as_document) {
            Some(of_php) => Self::new(of_php.iter().map(row_of_php).collect::<Result<Vec<_>, _>>()?),
            None => {
                Self::new(parameters.rows("time_table", |row| Ok((row.seconds("younger_than_seconds")?, row.seconds("seconds_to_wait")?)))?)
            }
        }
    }

    fn row_for(&self, job: &History<'_>, now: Instant) -> Option<&Row> {
        // The age is negative if `created_at` is in the future. It then counts as zero.
        let age = now.signed_duration_since(job.created_at).to_std().unwrap_or_default();
        self.rows.iter().find(|row| age < row.younger_than)
    }
}

impl Row {
    fn new(younger_than: Duration, wait: Duration, before: Option<&Row>) -> Result<Self, InvalidPolicy> {
        let row = Self { younger_than: checked_wait("younger_than_seconds", younger_than)?, wait: checked_wait("seconds_to_wait", wait)? };
        let age = row.younger_than;
        if let Some(before) = before.filter(|before| before.younger_than >= age) {
            let problem = format!("is {age:?}; it must be greater than in the row before, {:?}", before.younger_than);
            return Err(InvalidPolicy::parameter("younger_than_seconds", problem));
        }
        if row.wait > age {
            let problem = format!("is {:?}; it must not be longer than the row's `younger_than_seconds`, {age:?}", row.wait);
            return Err(InvalidPolicy::parameter("seconds_to_wait", problem));
        }
        Ok(row)
    }
}

fn row_of_php((age, wait): (&String, &Bson)) -> Result<(Duration, Duration), InvalidPolicy> {
    let duration = |text: &str| humantime::parse_duration(text.trim()).ok();
    age.strip_suffix(" ago").and_then(duration).zip(wait.as_str().and_then(duration)).ok_or_else(|| {
        let problem = format!("has a row `{age:.80}`: {}; write it as {{younger_than_seconds: 300, seconds_to_wait: 60}}", shown(wait));
        InvalidPolicy::parameter("time_table", problem)
    })
}

impl Default for TimeTable {
    /// Every minute in the first five minutes, every five minutes in the first hour, every hour in the first day.
    fn default() -> Self {
        let row = |younger_than, wait| Row { younger_than: Duration::from_secs(younger_than), wait: Duration::from_secs(wait) };
        Self { rows: vec![row(300, 60), row(3_600, 300), row(86_400, 3_600)] }
    }
}

impl RetryPolicy for TimeTable {
    fn class(&self) -> &str {
        "TimeTable"
    }

    fn parameters(&self) -> Document {
        let stored = |row: &Row| {
            Bson::Document(doc! { "younger_than_seconds": stored_seconds(row.younger_than), "seconds_to_wait": stored_seconds(row.wait) })
        };
        doc! { "time_table": self.rows.iter().map(stored).collect::<Vec<_>>() }
    }

    fn decide(&self, job: &History<'_>, _: &Failure, failed_at: Instant) -> Decision {
        self.row_for(job, failed_at).map_or(Decision::Archive(FinishReason::TRIED_TOO_MANY_TIMES), |row| Decision::RetryAfter(row.wait))
    }

    fn is_last_attempt(&self, job: &History<'_>, now: Instant) -> bool {
        self.row_for(job, now).is_none()
    }
}

#[cfg(test)]
mod tests {
    use bson::bson;

    use super::*;
    use crate::retry_policy::testing::*;

    #[test]
    fn the_first_row_that_the_job_is_younger_than_decides() {
        let second = Duration::from_secs(1);
        for (age, expected) in [
            (0, Ok(60)),
            (299, Ok(60)),
            (300, Ok(300)),
            (3_599, Ok(300)),
            (3_600, Ok(3_600)),
            (86_399, Ok(3_600)),
            (86_400, Err(())),
            (1 << 33, Err(())),
        ] {
            let expected = expected.map(|wait| second * wait).map_err(|()| FinishReason::TRIED_TOO_MANY_TIMES);
            check(&TimeTable::default(), &job(1), "timeout", Duration::from_secs(age), expected.clone());
            check(&TimeTable::default(), &job(u32::MAX), "timeout", Duration::from_secs(age), expected);
        }
    }

    #[test]
    fn a_job_from_the_future_is_young() {
        let job = job(1);
        let yesterday = job.created_at - Duration::from_secs(86_400);
        assert_eq!(TimeTable::default().decide(&job, &failure("timeout"), yesterday), Decision::RetryAfter(Duration::from_secs(60)));
        for extreme in [Instant::MIN_UTC, Instant::MAX_UTC] {
            TimeTable::default().decide(&job, &failure("timeout"), extreme);
        }
    }

    #[test]
    fn it_is_stored_and_read() {
        survives("TimeTable", bson!({ "time_table": [{ "younger_than_seconds": 60, "seconds_to_wait": 0.5 }] }));
        survives("TimeTable", bson!({ "time_table": [{ "younger_than_seconds": 60, "seconds_to_wait": 60 }] }));
        survives("TimeTable", TimeTable::default().parameters().into());
        let of_php = bson!({ "time_table": { "5 minutes ago": "1 minute", "1 hour ago": "5 minutes", "24 hours ago": "1 hour" } });
        assert_eq!(decoded("TimeTable", of_php).expect("valid").parameters(), TimeTable::default().parameters());
    }

    #[test]
    fn nonsense_is_refused() {
        fn check(rows: &[(Bson, Bson)], message: &str) {
            let row = |(age, wait): &(Bson, Bson)| bson!({ "younger_than_seconds": age, "seconds_to_wait": wait });
            refused("TimeTable", bson!({ "time_table": rows.iter().map(row).collect::<Vec<_>>() }), message);
        }
        check(&[], "TimeTable: `time_table` is empty; give at least one row");
        check(&[(bson!(60), bson!(61))], "TimeTable: time_table[0]: `seconds_to_wait` is 61s; it must not be longer than");
        check(&[(bson!(60), bson!(0))], "time_table[0]: `seconds_to_wait` is 0 seconds");
        check(
            &[(bson!(60), bson!(9)), (bson!(60), bson!(9))],
            "time_table[1]: `younger_than_seconds` is 60s; it must be greater than in the row before, 60s",
        );
        check(&[(bson!(60), bson!(9)), (bson!(null), bson!(9))], "time_table[1]: `younger_than_seconds` is missing");
        check(&[(bson!(1e10), bson!(9))], "time_table[0]: `younger_than_seconds` is 10000000000 seconds");
        refused("TimeTable", bson!({ "time_table": [60] }), "`time_table` is [60]; it must be a list of documents");
        refused(
            "TimeTable",
            bson!({ "time_table": { "yesterday": "1 hour" } }),
            "`time_table` has a row `yesterday`: \"1 hour\"; write it as {younger",
        );
        refused("TimeTable", bson!({ "time_table": {} }), "`time_table` is empty");
        refused("TimeTable", Bson::Null, "`time_table` is missing; it must be a list of documents");
    }
}
