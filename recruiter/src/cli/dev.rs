//! `dev`, `demo` and `bench`: the program `recruiter-dev` does them, which production does without.

use std::{env, ffi::OsString, os::unix::process::CommandExt as _, process::Command};

use clap::Args;

/// The arguments of `dev`, `demo` and `bench`, which `recruiter-dev` reads.
#[derive(Args, Clone, Debug)]
pub(super) struct DevArgs {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Replaces this process by `recruiter-dev`, which is in the same directory. Returns only if that is not possible.
pub(super) fn become_recruiter_dev() -> anyhow::Error {
    let program = env::current_exe().map(|this| this.with_file_name("recruiter-dev"));
    let program = match program {
        Ok(program) => program,
        Err(error) => return anyhow::Error::new(error).context("cannot find the path of this program"),
    };
    let error = Command::new(&program).args(env::args_os().skip(1)).exec();
    let needs =
        "`dev`, `demo` and `bench` need the program recruiter-dev in the same directory: build it with `cargo build --release --workspace`";
    anyhow::Error::new(error).context(format!("cannot start {}; {needs}", program.display()))
}
