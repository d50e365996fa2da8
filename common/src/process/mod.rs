//! What the three programs are besides Recruiter: settings, logs, metrics over HTTP, exit codes, the service manager.

#[cfg(feature = "process")]
mod early;
#[cfg(feature = "process")]
pub mod exit;
#[cfg(feature = "process")]
pub mod http;
#[cfg(feature = "process")]
mod journal;
#[cfg(feature = "process")]
pub mod logging;
#[cfg(feature = "process")]
pub mod monitoring;
#[cfg(feature = "process")]
pub mod secrets;
pub mod service;
#[cfg(feature = "process")]
pub mod settings;
#[cfg(feature = "process")]
pub mod toml_file;
