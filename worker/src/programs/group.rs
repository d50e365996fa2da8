//! The processes of a program: its group, and descendants that lead a group or a session of their own.
//!
//! These are found in `/proc`: as descendants, or, when a process between has ended, by a variable of their environment. In the middle of
//! `execve` a process shows no environment, and is looked at again.

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
use recruiter_common::shutdown::pause;
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
/// does not count, because one that leaves the group meanwhile is in neither. The pauses for one that is not sure yet take 255 ms in all.
const SEARCHES: u32 = 8;
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
            let found = self.search().await;
            self.signal_found(Signal::SIGKILL);
            match found {
                Found::Nothing if search > 0 => return,
                Found::Nothing | Found::New => {}
                Found::Unsure => pause(Duration::from_millis(1 << search)).await,
            }
        }
    }

    /// Searches the other descendants, before any is killed: a process whose parent was killed is no descendant any more.
    async fn search(&self) -> Found {
        let Some(leader) = self.id() else { return Found::Nothing };
        let (mark, others) = (self.mark.clone(), self.others.clone());
        let searched = tokio::task::spawn_blocking(move || others.lock().search(leader, &mark));
        searched.await.unwrap_or(Found::Nothing)
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
            let found = self.others.lock().search(leader, &self.mark);
            self.signal_found(Signal::SIGKILL);
            if search > 0 && found == Found::Nothing {
                break;
            }
        }
        self.pid.into_iter().for_each(orphans::forget);
    }
}

/// What a search has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Nothing,
    /// Descendants that were not known.
    New,
    /// A process that may be a descendant: it does not show its environment yet.
    Unsure,
}

/// The descendants that are not in the leader's group: process ids, with the time at which each process started. They are kept, because
/// one whose parent ends may not be found again.
#[derive(Default)]
struct Others(BTreeMap<i32, u64>);

impl Others {
    fn search(&mut self, leader: Pid, mark: &OsStr) -> Found {
        let Ok(processes) = all_processes() else { return Found::Nothing };
        let leader = leader.as_raw();
        let present: BTreeMap<i32, Stat> = processes.flatten().filter_map(|process| Some((process.pid, process.stat().ok()?))).collect();
        let begin = present.get(&leader).map_or(0, |stat| stat.starttime);
        let is_known = |pid: i32| present.get(&pid).is_some_and(|stat| self.0.get(&pid) == Some(&stat.starttime));
        let parent = |pid: &i32| present.get(pid).map(|stat| stat.ppid);
        // Processes that end meanwhile could make a circle.
        let descends = |pid: i32| std::iter::successors(Some(pid), parent).take(present.len()).any(|pid| pid == leader || is_known(pid));
        let (mut new, mut is_unsure) = (Vec::new(), false);
        for (pid, stat) in &present {
            let is_candidate = stat.pgrp != leader && stat.state != 'Z' && stat.starttime >= begin && !is_known(*pid);
            if is_candidate {
                match if descends(*pid) { Some(true) } else { has_mark(*pid, mark) } {
                    Some(true) => new.push((*pid, stat.starttime)),
                    Some(false) => {}
                    None => is_unsure = true,
                }
            }
        }
        let found = match (is_unsure, new.is_empty()) {
            (true, _) => Found::Unsure,
            (false, true) => Found::Nothing,
            (false, false) => Found::New,
        };
        self.0.extend(new);
        found
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

/// Whether a process has this mark. `None` if that cannot be told: in the middle of `execve` its environment is empty, or only its beginning
/// is read.
fn has_mark(pid: i32, mark: &OsStr) -> Option<bool> {
    // A process that has ended, or is another user's, shows none.
    let look = || Process::new(pid).and_then(|process| process.environ()).ok();
    let Some(environment) = look() else { return Some(false) };
    if environment.get(OsStr::new(MARK)).is_some_and(|value| value == mark) {
        return Some(true);
    }
    (!environment.is_empty() && look() == Some(environment)).then_some(false)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{BufRead, BufReader},
        os::unix::process::CommandExt,
        process::{Command, Stdio},
    };

    use super::*;

    #[test]
    fn a_process_that_begins_another_program_keeps_its_mark() {
        for _ in 0..100 {
            let mut shell = Command::new("sh");
            shell.args(["-c", "sleep 60 & echo $!; wait"]).env(MARK, "its").process_group(0).stdout(Stdio::piped());
            let mut shell = shell.spawn().unwrap();
            let mut line = String::new();
            BufReader::new(shell.stdout.take().unwrap()).read_line(&mut line).unwrap();
            let pid = line.trim().parse().unwrap();
            // Before, in the middle of and after `execve`.
            while fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() != "sleep\n" {
                assert_ne!(has_mark(pid, OsStr::new("its")), Some(false));
            }
            let looks = std::iter::repeat_with(|| has_mark(pid, OsStr::new("its")));
            assert_eq!(looks.flatten().next(), Some(true));
            assert_eq!(has_mark(pid, OsStr::new("another's")), Some(false));
            killpg(Pid::from_raw(shell.id().try_into().unwrap()), Signal::SIGKILL).unwrap();
            shell.wait().unwrap();
        }
    }
}
