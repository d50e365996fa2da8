//! Starts of jobs: the intake reads assigned jobs, a start locks a batch of them, and its answer decides which are run.

mod confirm;
mod in_flight;
mod intake;
mod reading;
mod release;
mod skipped;
mod unstarted;

pub(super) use self::{
    confirm::Confirmed,
    in_flight::{Answered, InFlight},
    intake::Intake,
    release::release_unconfirmed,
    skipped::SkippedJobs,
};
