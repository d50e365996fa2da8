//! What processes use: open sockets, memory, lines of log. All of it must stay bounded while MongoDB is away.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use procfs::process::{FDTarget, Process};
use recruiter_tests::world::{Member, Role, World};

/// Between two looks at a process.
const LOOK_EVERY: Duration = Duration::from_millis(300);
/// Sockets that a process may have open: two for signals; for each of a worker's two clients two to watch each of three members;
/// and a handful for the calls to each member that was primary once.
const SOCKETS: usize = 36;
/// Sockets that a process may have more than before the first fault, once unused ones are closed: another member may be
/// primary by then.
const MORE_SOCKETS: usize = 6;
/// Memory that a process may have, and how much more than when a fault began, in MiB.
const MEMORY: u64 = 64;
const MORE_MEMORY: u64 = 16;
/// Lines of log in an outage: some at once, then so many a second.
const LINES: usize = 15;
const LINES_A_SECOND: usize = 1;

/// The measurements of each process.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    looked: Option<Instant>,
    processes: BTreeMap<u32, Seen>,
    /// When the present fault began.
    since: Option<Instant>,
    too_much: Vec<String>,
    /// Whether there was a fault yet.
    struck: bool,
}

#[derive(Debug)]
struct Seen {
    role: Role,
    sockets: usize,
    /// Most of them before the first fault.
    at_rest: usize,
    memory: u64,
    /// In the worst outage.
    lines: usize,
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
            let seen = self.processes.entry(member.process.pid()).or_insert(Seen {
                role: member.role,
                sockets,
                at_rest: sockets,
                memory,
                lines: 0,
                before: None,
            });
            if !self.struck {
                seen.at_rest = seen.at_rest.max(sockets);
            }
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
        self.struck = true;
        self.looked = None;
        self.processes.values_mut().for_each(|seen| seen.before = None);
    }

    /// It is over.
    pub(crate) fn ends(&mut self, world: &World) {
        let Some(outage) = self.since.take() else { return };
        let seconds = usize::try_from(outage.elapsed().as_secs()).unwrap_or(usize::MAX);
        for member in &world.members {
            let pid = member.process.pid();
            let Some(seen) = self.processes.get_mut(&pid) else { continue };
            let Some((memory_before, lines_before)) = seen.before else { continue };
            let log = member.process.stderr();
            let lines: Vec<&str> = log.lines().skip(lines_before).collect();
            seen.lines = seen.lines.max(lines.len());
            let memory = used(pid).map_or(0, |(_, memory)| memory);
            if lines.len() > LINES + LINES_A_SECOND * seconds {
                self.too_much.push(format!("{:?}: {} lines of log in {seconds} s:\n{}", member.role, lines.len(), lines.join("\n")));
            }
            if memory > memory_before + MORE_MEMORY {
                self.too_much.push(format!("{:?}: {memory_before} MiB before the fault and {memory} after it", member.role));
            }
        }
    }

    /// Processes that have more sockets open now than before the first fault, in words.
    pub(crate) fn still_open(&self, world: &World) -> Vec<String> {
        let more = |member: &Member| {
            let seen = self.processes.get(&member.process.pid())?;
            let (sockets, _) = used(member.process.pid())?;
            (sockets > seen.at_rest + MORE_SOCKETS)
                .then(|| format!("{:?}: {sockets} sockets, and {} before the first fault", seen.role, seen.at_rest))
        };
        world.members.iter().filter_map(more).collect()
    }

    /// The exceeded limits.
    #[expect(clippy::print_stdout, reason = "the test runner shows it with a failed test")]
    pub(crate) fn close(self) -> Vec<String> {
        let mut too_much = self.too_much;
        for seen in self.processes.into_values() {
            println!("{:?}: {} sockets, {} MiB, {} lines of log in an outage", seen.role, seen.sockets, seen.memory, seen.lines);
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
