//! The processes of a program: its group, and descendants that lead a group or a session of their own.
//!
//! These are found in `/proc`: as descendants, or, when a process between has ended, by a variable of their environment.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    io,
    sync::Arc,
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
use parking_lot::Mutex;
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
/// How often descendants are searched at most: until nothing new is found, as they may start others while they are killed. The first search
/// does not count, because one that leaves the group meanwhile is in neither.
const SEARCHES: usize = 10;
/// Asks whether a process has ended, without waiting for it or reaping it.
const LOOK: WaitPidFlag = WaitPidFlag::WEXITED.union(WaitPidFlag::WNOWAIT).union(WaitPidFlag::WNOHANG);

/// A program and its descendants. All of them are killed on drop, unless the leader has been reaped.
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
        self.search().await;
        self.signal_found(Signal::SIGTERM);
    }

    /// Kills the group and all other descendants, unless the leader is reaped.
    pub(super) async fn kill_all(&self) {
        for search in 0..SEARCHES {
            let has_found = self.search().await;
            self.signal_found(Signal::SIGKILL);
            if search > 0 && !has_found {
                return;
            }
        }
    }

    /// Searches the other descendants, before any is killed: a process whose parent was killed is no descendant any more. Returns whether
    /// there are any that were not known.
    async fn search(&self) -> bool {
        let Some(leader) = self.id() else { return false };
        let (mark, others) = (self.mark.clone(), self.others.clone());
        let searched = tokio::task::spawn_blocking(move || others.lock().search(leader, &mark));
        searched.await.unwrap_or(false)
    }

    fn signal_found(&self, signal: Signal) {
        if self.id().is_some() {
            self.signal(signal);
            self.others.lock().signal(signal);
        }
    }

    /// Whether the leader has ended with exit code 0. Does not reap it.
    pub(super) fn has_succeeded(&self) -> bool {
        self.id().is_some_and(|id| matches!(waitid(Id::Pid(id), LOOK), Ok(WaitStatus::Exited(_, 0))))
    }

    /// Resolves when the leader has ended, or nothing can be learned about it. Does not reap it.
    pub(super) async fn leader_ended(&self) {
        if let Ok(ended) = self.ended() {
            drop(ended.await);
        }
    }

    /// Whether the leader has ended. Does not reap it.
    pub(super) fn has_ended(&self) -> bool {
        self.id().is_none_or(|id| !matches!(waitid(Id::Pid(id), LOOK), Ok(WaitStatus::StillAlive)))
    }

    /// Resolves when the leader has ended. Does not reap it.
    pub(super) fn ended(&self) -> io::Result<impl Future<Output = io::Result<()>> + use<>> {
        let id = self.id().ok_or(Errno::ECHILD)?;
        let mut children = signal(SignalKind::child())?;
        Ok(async move {
            loop {
                match waitid(Id::Pid(id), LOOK) {
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
        for search in 0..SEARCHES {
            let Some(leader) = self.id() else { break };
            let has_found = self.others.lock().search(leader, &self.mark);
            self.signal_found(Signal::SIGKILL);
            if search > 0 && !has_found {
                break;
            }
        }
        self.pid.into_iter().for_each(orphans::forget);
    }
}

/// The descendants that are not in the leader's group: process ids, with the time at which each process started. They are kept, because
/// one whose parent ends may not be found again.
#[derive(Default)]
struct Others(BTreeMap<i32, u64>);

impl Others {
    /// Returns whether there are any that were not known.
    fn search(&mut self, leader: Pid, mark: &OsStr) -> bool {
        let Ok(processes) = all_processes() else { return false };
        let leader = leader.as_raw();
        let present: BTreeMap<i32, Stat> = processes.flatten().filter_map(|process| Some((process.pid, process.stat().ok()?))).collect();
        let begin = present.get(&leader).map_or(0, |stat| stat.starttime);
        let is_marked = |pid: i32| {
            let environment = Process::new(pid).and_then(|process| process.environ());
            environment.is_ok_and(|environment| environment.get(OsStr::new(MARK)).is_some_and(|value| value == mark))
        };
        let is_known = |pid: i32| present.get(&pid).is_some_and(|stat| self.0.get(&pid) == Some(&stat.starttime));
        let parent = |pid: &i32| present.get(pid).map(|stat| stat.ppid);
        // Processes that end meanwhile could make a circle.
        let descends = |pid: i32| std::iter::successors(Some(pid), parent).take(present.len()).any(|pid| pid == leader || is_known(pid));
        let found: Vec<(i32, u64)> = present
            .iter()
            .filter(|(pid, stat)| {
                let is_candidate = stat.pgrp != leader && stat.state != 'Z' && stat.starttime >= begin && !is_known(**pid);
                is_candidate && (descends(**pid) || is_marked(**pid))
            })
            .map(|(pid, stat)| (*pid, stat.starttime))
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
