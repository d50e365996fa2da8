//! Commands for development, trials and measurements, with a MongoDB of their own, and that MongoDB. `recruiter dev`, `demo` and
//! `bench` start this program, which is in the same directory. Production packages do without it.
//!
//! | module | what it is |
//! |---|---|
//! | [`cli`] | the command line |
//! | [`command`] | `recruiter dev`: a MongoDB and all three programs, until Ctrl-C |
//! | [`demo`] | `recruiter demo`: jobs for the user's own files, and a killed worker |
//! | [`bench`](mod@bench) | `recruiter bench`: measurements of speed |
//! | [`embedded`] | a MongoDB for development and tests |
//! | `fleet` | the programs as child processes |
//! | `package_files` | the man pages of a package, and the scripts for shells |
//! | `watchdog` | ends child processes when their parent ends |

pub mod bench;
pub mod cli;
pub mod command;
pub mod demo;
pub mod embedded;
mod fleet;
mod package_files;
mod watchdog;
