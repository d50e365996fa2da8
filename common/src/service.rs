//! What the service manager is told: that a process is ready, stopping, and what it does.
//!
//! Used by the three processes. Nothing happens where no service manager listens.

use sd_notify::NotifyState;

/// The process does its work from now on.
pub fn ready(status: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// What the process does just now, for `systemctl status`.
pub fn status(status: &str) {
    notify(&[NotifyState::Status(status)]);
}

/// The process has begun to stop.
pub fn stopping() {
    notify(&[NotifyState::Stopping]);
}

fn notify(state: &[NotifyState]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::debug!(%error, "the service manager could not be told");
    }
}
