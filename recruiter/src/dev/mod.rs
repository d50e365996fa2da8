//! To develop, to try and to measure: commands with a MongoDB of their own. Behind the feature `dev`, which packages for production turn off.
//!
//! | module | what it is |
//! |---|---|
//! | [`command`] | `recruiter dev`: a MongoDB and a whole Recruiter, until Ctrl-C |
//! | [`demo`] | `recruiter demo`: real work on the user's own files, and a killed worker |
//! | [`bench`](mod@bench) | `recruiter bench`: how fast it is |
//! | [`embedded`] | a MongoDB for development and tests |
//! | `fleet` | the programs as child processes |
//! | `watchdog` | ends child processes with their parent |

pub mod bench;
pub mod command;
pub mod demo;
pub mod embedded;
mod fleet;
mod watchdog;
