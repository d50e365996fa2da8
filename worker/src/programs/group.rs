//! The processes of a program: its group, and descendants that lead a group or a session of their own.
//!
//! These are found in `/proc`: as descendants, or, when a process between has ended, by a variable of their environment.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bson::oid::ObjectId;

use nix::{
    errno::Errno,
    sys::{
        signal::{Signal, kill, killpg},
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::Pid,
};
use procfs::process::{Process, Stat, all_processes};
use tokio::{
    process::{Child, Command},
    signal::unix::{SignalKind, signal},
};

use super::orphans;

/// How long descendants may keep the pipes of an ended program open, and how long a killed program may take to disappear.
pub(super) const LINGER: Duration = Duration::from_secs(1);

/// The variable that marks the descendants of one program. Its value is unique.
const MARK: &str = "RECRUITER_PROCESS";
/// How often the descendants are searched that start others while they are killed.
const SEARCHES: usize = 10;

/// A program and its descendants. They are killed on drop, unless the leader has been reaped.
///
/// The process id stays reserved until the leader is reaped. Reaping is therefore the last step: afterwards the id may
/// already be the group of another job.
pub(super) struct Group {
    pub(super) leader: Child,
    /// Kept also after the leader was reaped.
    pub(super) pid: Option<u32>,
    mark: OsString,
    others: Arc<Mutex<Others>>,
}

impl Group {
    pub(super) fn spawn(command: &mut Command) -> io::Result<Self> {
        let mark = OsString::from(ObjectId::new().to_hex());
        let leader = orphans::spawn(command.env(MARK, &mark))?;
        let pid = leader.id();
        Ok(Self { leader, pid, mark, others: Arc::default() })
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

    /// Sends TERM to the group and to all other descendants, unless the leader is reaped.
    pub(super) async fn terminate_all(&self) {
        self.signal_all(Signal::SIGTERM, 1).await;
    }

    /// Kills the group and all other descendants, unless the leader is reaped.
    pub(super) async fn kill_all(&self) {
        self.signal_all(Signal::SIGKILL, SEARCHES).await;
    }

    /// The others are searched first: a process whose parent was killed is no descendant any more.
    async fn signal_all(&self, signal: Signal, searches: usize) {
        for _ in 0..searches {
            let Some(leader) = self.id() else { return };
            let (mark, others) = (self.mark.clone(), self.others.clone());
            let search = tokio::task::spawn_blocking(move || lock(&others).search(leader, &mark));
            let has_found = search.await.unwrap_or(false);
            self.signal(signal);
            lock(&self.others).signal(signal);
            if !has_found {
                return;
            }
        }
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

/// The descendants that are not in the leader's group: process ids, with the time at which each process started. They are kept, because
/// one whose parent ends may not be found again.
#[derive(Default)]
struct Others(BTreeMap<i32, u64>);

fn lock(others: &Mutex<Others>) -> MutexGuard<'_, Others> {
    others.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Others {
    /// Returns whether there are any that were not known.
    fn search(&mut self, leader: Pid, mark: &OsStr) -> bool {
        let Ok(processes) = all_processes() else { return false };
        let leader = leader.as_raw();
        let is_marked = |process: &Process| {
            process.environ().is_ok_and(|environment| environment.get(OsStr::new(MARK)).is_some_and(|value| value == mark))
        };
        let present: BTreeMap<i32, (Stat, bool)> =
            processes.flatten().filter_map(|process| Some((process.pid, (process.stat().ok()?, is_marked(&process))))).collect();
        let is_known = |pid: i32| present.get(&pid).is_some_and(|(stat, _)| self.0.get(&pid) == Some(&stat.starttime));
        let parent = |pid: &i32| present.get(pid).map(|(stat, _)| stat.ppid);
        // Processes that end meanwhile could make a circle.
        let descends = |pid: i32| std::iter::successors(Some(pid), parent).take(present.len()).any(|pid| pid == leader || is_known(pid));
        let found: Vec<(i32, u64)> = present
            .iter()
            .filter(|(pid, (stat, is_marked))| {
                stat.pgrp != leader && stat.state != 'Z' && !is_known(**pid) && (*is_marked || descends(**pid))
            })
            .map(|(pid, (stat, _))| (*pid, stat.starttime))
            .collect();
        let has_found = !found.is_empty();
        self.0.extend(found);
        has_found
    }

    fn signal(&self, signal: Signal) {
        for (pid, started) in &self.0 {
            // The id may have become that of another process.
            if Process::new(*pid).and_then(|process| process.stat()).is_ok_and(|stat| stat.starttime == *started) {
                let _ = kill(Pid::from_raw(*pid), signal);
            }
        }
    }
}
