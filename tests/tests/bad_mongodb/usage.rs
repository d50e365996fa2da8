//! What processes use: open sockets, memory, lines of log. All of it must stay bounded while MongoDB is away.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use procfs::process::{FDTarget, Process};
use recruiter_tests::world::{Role, World};

/// Between two looks at a process.
const LOOK_EVERY: Duration = Duration::from_millis(300);
/// Sockets that a process may have open: its connections and two of its own.
const SOCKETS: usize = 40;
/// Memory that a process may have, and how much more than when a fault began, in MiB.
const MEMORY: u64 = 96;
const MORE_MEMORY: u64 = 24;
/// Lines of log in an outage: some at once, then so many a second.
const LINES: usize = 20;
const LINES_A_SECOND: usize = 2;

/// What was seen of each process.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    looked: Option<Instant>,
    processes: BTreeMap<u32, Seen>,
    /// When the present fault began.
    since: Option<Instant>,
    too_much: Vec<String>,
}

#[derive(Debug)]
struct Seen {
    role: Role,
    sockets: usize,
    memory: u64,
    /// When the present fault began.
    before: Option<(u64, usize)>,
}

impl Usage {
    /// Looks at every process of a world.
    pub(crate) fn look(&mut self, world: &World) {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return;
        }
        self.looked = Some(Instant::now());
        for member in &world.members {
            // One that has just ended uses nothing.
            let Some((sockets, memory)) = used(member.process.pid()) else { continue };
            let seen = self.processes.entry(member.process.pid()).or_insert(Seen { role: member.role, sockets, memory, before: None });
            seen.sockets = seen.sockets.max(sockets);
            seen.memory = seen.memory.max(memory);
            if self.since.is_some() && seen.before.is_none() {
                seen.before = Some((memory, member.process.stderr().lines().count()));
            }
        }
    }

    /// A fault begins.
    pub(crate) fn begins(&mut self) {
        self.since = Some(Instant::now());
        self.looked = None;
        self.processes.values_mut().for_each(|seen| seen.before = None);
    }

    /// It is over.
    pub(crate) fn ends(&mut self, world: &World) {
        let Some(outage) = self.since.take() else { return };
        let seconds = usize::try_from(outage.elapsed().as_secs()).unwrap_or(usize::MAX);
        for member in &world.members {
            let pid = member.process.pid();
            let Some((memory_before, lines_before)) = self.processes.get(&pid).and_then(|seen| seen.before) else { continue };
            let log = member.process.stderr();
            let lines: Vec<&str> = log.lines().skip(lines_before).collect();
            let memory = used(pid).map_or(0, |(_, memory)| memory);
            println!("{:?} {pid}: {} lines in {seconds} s, {memory_before} to {memory} MiB", member.role, lines.len());
            if lines.len() > LINES + LINES_A_SECOND * seconds {
                self.too_much.push(format!("{:?}: {} lines of log in {seconds} s:\n{}", member.role, lines.len(), lines.join("\n")));
            }
            if memory > memory_before + MORE_MEMORY {
                self.too_much.push(format!("{:?}: {memory_before} MiB before the fault and {memory} after it", member.role));
            }
        }
    }

    /// What was too much.
    pub(crate) fn close(self) -> Vec<String> {
        let mut too_much = self.too_much;
        for (pid, seen) in self.processes {
            println!("{:?} {pid}: {} sockets, {} MiB", seen.role, seen.sockets, seen.memory);
            if seen.sockets > SOCKETS || seen.memory > MEMORY {
                too_much.push(format!("{:?}: {} sockets, {} MiB", seen.role, seen.sockets, seen.memory));
            }
        }
        too_much
    }
}

/// Open sockets, and resident memory in MiB.
fn used(pid: u32) -> Option<(usize, u64)> {
    let process = Process::new(pid.cast_signed()).ok()?;
    let sockets = process.fd().ok()?.flatten().filter(|fd| matches!(fd.target, FDTarget::Socket(_))).count();
    let pages = process.statm().ok()?.resident;
    Some((sockets, pages * procfs::page_size() / (1024 * 1024)))
}
