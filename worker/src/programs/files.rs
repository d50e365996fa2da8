//! The limit of open files of this process, and the number of programs that it allows.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::config::WorkerConfig;

/// Files of a running program: three pipes and a handle to wait for its end.
pub(crate) const OF_A_PROGRAM: u64 = 4;
/// Files of everything else: mostly connections to MongoDB, and the other ends of the pipes while a program starts.
const OF_THE_REST: u64 = 100;

/// The same settings, with the concurrency limited to the programs for which there are enough file descriptors.
pub(crate) fn with_files_for(config: WorkerConfig, of_a_program: u64) -> WorkerConfig {
    raise_limit();
    let concurrency = enough_for(config.concurrency, of_a_program);
    config.concurrency(concurrency)
}

/// Raises the soft limit of this process to the hard one. Programs inherit it.
fn raise_limit() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::warn!(limit = soft, %error, "failed to raise the limit of open files");
    }
}

/// How many of `wanted` programs may run at a time. Logs a warning when the limit of open files allows fewer.
fn enough_for(wanted: u32, of_a_program: u64) -> u32 {
    let Ok((limit, _)) = getrlimit(Resource::RLIMIT_NOFILE) else { return wanted };
    let enough = programs_within(limit, of_a_program);
    if enough >= wanted {
        return wanted;
    }
    let needed = OF_THE_REST + u64::from(wanted) * of_a_program;
    tracing::warn!(
        limit,
        needed,
        worker.capacity = enough,
        "the limit of open files is too low for --concurrency {wanted}: running at most {enough} jobs at a time; set LimitNOFILE= or ulimit -n to {needed}"
    );
    enough
}

fn programs_within(limit: u64, of_a_program: u64) -> u32 {
    u32::try_from(limit.saturating_sub(OF_THE_REST) / of_a_program).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_enough_for_so_many_programs() {
        assert_eq!(
            [0, 100, 104, 108, 1_024, 65_536, u64::MAX].map(|limit| programs_within(limit, OF_A_PROGRAM)),
            [1, 1, 1, 2, 231, 16_359, u32::MAX]
        );
    }
}
