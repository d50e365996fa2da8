//! Periodic jobs: declare, list, pause, resume and remove schedules, and run one at once.
//!
//! ```no_run
//! use recruiter_common::{Client, Workable, schedules::{Missed, Overlap, Schedule}};
//!
//! #[derive(serde::Serialize, serde::Deserialize)]
//! struct Report {
//!     kind: String,
//! }
//!
//! impl Workable for Report {
//!     const CLASS: &'static str = "Report";
//!     type Output = ();
//! }
//!
//! # async fn example(client: &Client) -> Result<(), Box<dyn std::error::Error>> {
//! let nightly = Schedule::cron("0 3 * * *", "Europe/Berlin")?
//!     .job(Report { kind: "daily".into() }.as_job())
//!     .overlap(Overlap::Skip)
//!     .missed(Missed::One);
//! client.schedules().declare("nightly-report", &nightly).await?;
//! # Ok(())
//! # }
//! ```
//!
//! A schedule is a document in `schedulers`. The leading recruiter reads it and enqueues a job for each slot. The `_id` of that job is
//! derived from the name and the slot, so a repeated insert is the same job.
//!
//! | file | content |
//! |---|---|
//! | `definition` | a schedule |
//! | `operations` | declare, list, pause, resume, run, remove |
//! | `runs` | the operations on their documents; the leading recruiter advances them |
//! | `timing` | slots: cron expressions and intervals |
//! | `policy` | overlapping and missed runs |
//! | `error` | invalid schedules, failed changes |
//! | `document`, `template`, `fields` | the stored form |

pub(crate) mod definition;
mod document;
mod error;
mod fields;
mod operations;
mod policy;
pub(crate) mod runs;
pub(crate) mod template;
mod timing;

pub use self::{
    definition::{Declared, Schedule},
    document::{Paused, Run, Skipped, StoredSchedule},
    error::{InvalidSchedule, ScheduleError},
    operations::Schedules,
    policy::{Missed, Overlap},
    timing::Timing,
};
pub use crate::mongo::schema::MOST_MISSED;

/// Number of newest runs in the history of a schedule.
pub const KEPT_RUNS: usize = 20;
