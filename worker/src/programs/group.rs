//! The process group of a program.

use std::{io, time::Duration};

use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, killpg},
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::Pid,
};
use tokio::{
    process::{Child, Command},
    signal::unix::{SignalKind, signal},
};

use super::orphans;

/// How long descendants may keep the pipes of an ended program open, and how long a killed program may take to disappear.
pub(super) const LINGER: Duration = Duration::from_secs(1);

/// A program and its descendants. They are killed on drop, unless the leader has been reaped.
///
/// The process id stays reserved until the leader is reaped. Reaping is therefore the last step: afterwards the id may
/// already be the group of another job.
pub(super) struct Group {
    pub(super) leader: Child,
    /// Kept also after the leader was reaped.
    pub(super) pid: Option<u32>,
}

impl Group {
    pub(super) fn spawn(command: &mut Command) -> io::Result<Self> {
        let leader = orphans::spawn(command)?;
        let pid = leader.id();
        Ok(Self { leader, pid })
    }

    fn id(&self) -> Option<Pid> {
        self.leader.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw)
    }

    /// Sends a signal to the group, unless the leader is reaped.
    pub(super) fn signal(&self, signal: Signal) {
        if let Some(id) = self.id() {
            // Fails only when no process is left.
            let _ = killpg(id, signal);
        }
    }

    pub(super) fn kill(&self) {
        self.signal(Signal::SIGKILL);
    }

    /// Resolves when the leader has ended, or nothing can be learned about it. Does not reap it.
    pub(super) async fn leader_ended(&self) {
        if let Ok(ended) = self.ended() {
            drop(ended.await);
        }
    }

    /// Whether the leader has ended. Does not reap it.
    pub(super) fn has_ended(&self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        self.id().is_none_or(|id| !matches!(waitid(Id::Pid(id), flags), Ok(WaitStatus::StillAlive)))
    }

    /// Resolves when the leader has ended. Does not reap it.
    pub(super) fn ended(&self) -> io::Result<impl Future<Output = io::Result<()>> + use<>> {
        let id = self.id().ok_or(Errno::ECHILD)?;
        let mut children = signal(SignalKind::child())?;
        Ok(async move {
            loop {
                match waitid(Id::Pid(id), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG) {
                    Ok(WaitStatus::StillAlive) => children.recv().await,
                    // EINVAL is an end as well: by a real-time signal, which `nix` cannot represent.
                    Ok(_) | Err(Errno::EINVAL) => return Ok(()),
                    Err(error) => return Err(error.into()),
                };
            }
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
        self.pid.into_iter().for_each(orphans::forget);
    }
}
