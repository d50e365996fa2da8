//! Proves that a process on this machine is gone. The proof needs the same boot and the same pid namespace, and that no
//! process has this pid, or that the process with this pid is a zombie or started at another time. A process that cannot
//! be inspected counts as alive.

use nix::{errno::Errno, sys::signal::kill, unistd::Pid};
use procfs::process::Process;
use recruiter_common::store::ProcessIdentity;

/// Whether the process `there` can be inspected by the process `here`: both have the same boot id and pid namespace.
pub(crate) fn is_here(here: &ProcessIdentity, there: &ProcessIdentity) -> bool {
    let known = !there.boot_id.is_empty() && !there.pid_namespace.is_empty() && there.pid > 0;
    known && here.boot_id == there.boot_id && here.pid_namespace == there.pid_namespace
}

/// Whether the process `here` can prove that the process `there` is gone.
pub(crate) fn is_gone(here: &ProcessIdentity, there: &ProcessIdentity) -> bool {
    if !is_here(here, there) {
        return false;
    }
    match Process::new(there.pid).and_then(|process| process.stat()) {
        // A zombie has ended; its parent has not waited for it yet.
        Ok(stat) => i64::try_from(stat.starttime) != Ok(there.process_start_ticks) || matches!(stat.state, 'Z' | 'X'),
        // `/proc` may be hidden from this process: ask the kernel with a null signal.
        Err(_) => kill(Pid::from_raw(there.pid), None) == Err(Errno::ESRCH),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_gone_only_if_that_is_proven() {
        let here = ProcessIdentity::of_this_process().expect("/proc");
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = i32::try_from(child.id()).expect("a pid");
        let ticks = Process::new(pid).and_then(|process| process.stat()).expect("it runs").starttime;
        let there = ProcessIdentity { pid, process_start_ticks: i64::try_from(ticks).expect("ticks"), ..here.clone() };
        assert!(!is_gone(&here, &there), "it runs");
        assert!(
            is_gone(&here, &ProcessIdentity { process_start_ticks: there.process_start_ticks + 1, ..there.clone() }),
            "the pid is another's"
        );
        child.kill().expect("kill");
        // The child is a zombie until its parent waits for it.
        while !is_gone(&here, &there) {
            std::thread::yield_now();
        }
        child.wait().expect("wait");
        assert!(is_gone(&here, &there), "no such process");
        assert!(!is_gone(&here, &ProcessIdentity { boot_id: "another".into(), ..there.clone() }), "another machine");
        assert!(!is_gone(&here, &ProcessIdentity { pid_namespace: "pid:[1]".into(), ..there.clone() }), "another namespace");
        let nowhere = ProcessIdentity { boot_id: String::new(), pid_namespace: String::new(), ..here.clone() };
        assert!(!is_gone(&nowhere, &nowhere), "nothing is known");
    }
}
