//! Hides the credentials of a process from other processes of the same user.
//!
//! Used by the three binaries. `MONGODB_URI` is in their environment. The programs that a worker runs belong to the
//! same user, so they could read it in `/proc/<pid>/environ` or in memory.

use nix::sys::prctl;

/// From now on only root can read the environment and the memory of this process. It writes no core dump, and a
/// debugger needs root.
pub fn hide() {
    if let Err(error) = prctl::set_dumpable(false) {
        tracing::warn!(%error, "other processes of this user can read the environment of this one");
    }
}
