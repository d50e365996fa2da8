//! Reaps what programs leave behind, when this process is the one that must: as process 1 of a container without an init.
//!
//! There every process whose parent has ended becomes a child of the worker, and stays a zombie until the worker waits for it. How a
//! program itself ended is read by its execution alone, and how a child ended that other code in this process has started, by that code.

use std::{
    collections::BTreeSet,
    io,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nix::{
    sys::wait::{WaitPidFlag, waitpid},
    unistd::{Pid, getpgrp},
};
use procfs::process::{Process, Stat, all_processes};
use recruiter_common::shutdown::pause;
use tokio::{
    process::{Child, Command},
    signal::unix::{SignalKind, signal},
};

/// At least so long between two looks through `/proc`.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The programs that run. Locked while one is started, so that it is known before it can end, and while orphans are reaped.
static PROGRAMS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

fn programs() -> MutexGuard<'static, BTreeSet<u32>> {
    PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether orphans come to this process.
pub(crate) fn come_here() -> bool {
    std::process::id() == 1
}

/// Starts a program that is not to be taken for an orphan.
pub(super) fn spawn(command: &mut Command) -> io::Result<Child> {
    if !come_here() {
        return command.spawn();
    }
    let mut programs = programs();
    let child = command.spawn()?;
    programs.extend(child.id());
    Ok(child)
}

/// Notes that nobody is interested any more in how a program ends.
pub(super) fn forget(program: u32) {
    if come_here() {
        programs().remove(&program);
    }
}

/// Reaps orphans for ever.
pub(crate) async fn reap() {
    let mut ended = match signal(SignalKind::child()) {
        Ok(ended) => ended,
        Err(error) => return tracing::warn!(%error, "what programs leave behind stays as zombies: start this container with an init"),
    };
    loop {
        reap_all();
        ended.recv().await;
        pause(LOOK_EVERY).await;
    }
}

fn reap_all() {
    let Ok(processes) = all_processes() else { return };
    let programs = programs();
    let own_group = getpgrp().as_raw();
    let is_orphan = |stat: &Stat| {
        let is_program = u32::try_from(stat.pid).is_ok_and(|pid| programs.contains(&pid));
        stat.ppid == 1 && stat.state == 'Z' && stat.pgrp != own_group && !is_program
    };
    for stat in processes.flatten().filter_map(|process: Process| process.stat().ok()).filter(is_orphan) {
        // Somebody else may have waited for it by now.
        let _ = waitpid(Pid::from_raw(stat.pid), Some(WaitPidFlag::WNOHANG));
    }
}
