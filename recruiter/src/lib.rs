//! The `recruiter` command: assigns due jobs to workers, and lets people enqueue, inspect and change jobs.
//! Used by its binary and by the tests. Applications use `recruiter-common`.
//!
//! | module | what it is |
//! |---|---|
//! | [`run`] | `recruiter run`: wait for the lease, lead, stand by |
//! | `leader` | a term of leadership: the duties, and how a job finds its worker |
//! | `views` | what programs read of jobs, as JSON; and which jobs, in words |
//! | [`web`] | `recruiter web`: the HTTP API and the pages |
//! | [`cli`] | the command line, one command per file |

pub mod cli;
mod leader;
pub mod run;
mod views;
pub mod web;

#[doc(hidden)]
pub use leader::assign_once;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub use leader::simulation::{Simulated, Simulation, Size};
