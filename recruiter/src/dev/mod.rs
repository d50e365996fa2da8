//! Commands for development, trials and measurements, with a MongoDB of their own. They need the feature `dev`, and
//! the MongoDB alone needs `embedded`. Production packages disable both.
//!
//! | module | what it is |
//! |---|---|
//! | [`command`] | `recruiter dev`: a MongoDB and all three programs, until Ctrl-C |
//! | [`demo`] | `recruiter demo`: jobs for the user's own files, and a killed worker |
//! | [`bench`](mod@bench) | `recruiter bench`: measurements of speed |
//! | [`embedded`] | a MongoDB for development and tests |
//! | `fleet` | the programs as child processes |
//! | `watchdog` | ends child processes when their parent ends |

#[cfg(feature = "dev")]
pub mod bench;
#[cfg(feature = "dev")]
pub mod command;
#[cfg(feature = "dev")]
pub mod demo;
pub mod embedded;
#[cfg(feature = "dev")]
mod fleet;
mod watchdog;
