//! What people do with many jobs and workers, and what the cleaner does for them.
//!
//! | file | operations |
//! |---|---|
//! | `select`, `views` | lists, walks and statistics |
//! | `sample` | numbers of waiting jobs, for metrics |
//! | `why` | why a job does not run |
//! | `control` | cancel, hasten, change, retry, delete |
//! | `expiry`, `retention` | jobs that were not started in time; prune by class and outcome |
//! | `presence` | the leading recruiter and the workers, for display |
//! | `workers`, `wanted` | quiet, resume and stop workers |
//! | `redaction` | what is not shown of the jobs of some classes |
//! | `audit` | what was done through `recruiter web` |
//! | `cleaners` | which cleaners run, and how long they keep jobs |
//! | `doctor` | what is wrong with an installation, and what to do |

pub(crate) mod audit;
pub(crate) mod cleaners;
pub mod control;
pub(crate) mod doctor;
pub(crate) mod expiry;
pub(crate) mod presence;
pub(crate) mod redaction;
pub(crate) mod retention;
pub(crate) mod sample;
pub(crate) mod select;
pub(crate) mod views;
pub(crate) mod wanted;
pub mod why;
pub mod workers;

pub use self::{
    control::operations::{Retrial, RetryNote},
    retention::{Covered, OtherClasses, Reasons},
    sample::GroupSample,
    select::{Match, Walk},
    views::{COUNTED, Finished, LaneCounts, SAMPLED, Unfinished, Waiting, policies_in},
};
