//! x
pub mod embedded;
pub mod run;
mod leadership;
mod round;
mod matching;
