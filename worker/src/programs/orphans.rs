//! Reaps orphaned processes when this process is process 1 of a container without an init.
//!
//! In such a container every process whose parent has ended becomes a child of the worker, and stays a zombie until the worker waits for
//! it. This module does not reap the programs of jobs, nor children that other code in this process has started.

use std::{collections::BTreeSet, io, time::Duration};

use nix::{
    sys::wait::{WaitPidFlag, waitpid},
    unistd::{Pid, getpgrp},
};
use parking_lot::Mutex;
use procfs::process::{Process, Stat, all_processes};
use recruiter_common::shutdown::pause;
use tokio::{
    process::{Child, Command},
    signal::unix::{SignalKind, signal},
};

/// The shortest time between two scans of `/proc`.
const SCAN_EVERY: Duration = Duration::from_millis(200);

/// The process ids of running programs. Locked while a program is started, so that it is registered before it can end, and while
/// orphans are reaped.
static PROGRAMS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Whether this process inherits orphans.
pub(crate) fn are_inherited() -> bool {
    std::process::id() == 1
}

/// Starts a program and registers it, so that it is not reaped as an orphan.
pub(super) fn spawn(command: &mut Command) -> io::Result<Child> {
    if !are_inherited() {
        return command.spawn();
    }
    let mut programs = PROGRAMS.lock();
    let child = command.spawn()?;
    programs.extend(child.id());
    Ok(child)
}

/// Removes a program whose end no execution waits for.
pub(super) fn forget(program: u32) {
    if are_inherited() {
        PROGRAMS.lock().remove(&program);
    }
}

/// Reaps orphans for ever.
pub(crate) async fn reap() {
    let mut ended = match signal(SignalKind::child()) {
        Ok(ended) => ended,
        Err(error) => return tracing::warn!(%error, "orphaned processes stay zombies: start this container with an init"),
    };
    loop {
        reap_all();
        ended.recv().await;
        pause(SCAN_EVERY).await;
    }
}

fn reap_all() {
    let Ok(processes) = all_processes() else { return };
    let programs = PROGRAMS.lock();
    let own_group = getpgrp().as_raw();
    let is_orphan = |stat: &Stat| {
        let is_program = u32::try_from(stat.pid).is_ok_and(|pid| programs.contains(&pid));
        stat.ppid == 1 && stat.state == 'Z' && stat.pgrp != own_group && !is_program
    };
    for stat in processes.flatten().filter_map(|process: Process| process.stat().ok()).filter(is_orphan) {
        // Other code may have reaped it by now.
        let _ = waitpid(Pid::from_raw(stat.pid), Some(WaitPidFlag::WNOHANG));
    }
}
