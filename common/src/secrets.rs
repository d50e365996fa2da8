//! Keeps the credentials of a process from other processes of the same user.
//!
//! Used by the three binaries. `MONGODB_URI` is in their environment, and programs that a worker runs belong to the same user: they
//! could read it in `/proc/<pid>/environ`, or in memory.

use nix::sys::prctl;

/// Lets only root read the environment and the memory of this process from now on. It leaves no core dump, and a debugger needs root.
pub fn hide() {
    if let Err(error) = prctl::set_dumpable(false) {
        tracing::warn!(%error, "other processes of this user can read the environment of this one");
    }
}
