//! `recruiter-dev package-files`: writes the files of a package that are made of the command lines: man pages, and the scripts by which
//! shells complete commands.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use clap::{Args, Command, CommandFactory as _};
use clap_complete::{Generator as _, Shell, generate};

/// Where to.
#[derive(Args, Clone, Debug)]
pub(crate) struct PackageFilesArgs {
    /// Directory for them: `man` and `completions` are created in it
    directory: PathBuf,
}

/// Writes the files of all three programs, and how many there are.
pub(crate) fn run(args: &PackageFilesArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let (pages, scripts) = (args.directory.join("man"), args.directory.join("completions"));
    for directory in [&pages, &scripts] {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    for program in [recruiter(), recruiter_worker::cli::Config::command(), recruiter_cleaner::cli::Config::command()] {
        complete(program.clone(), &scripts)?;
        // It must not be built before: its subcommands `help` would get pages.
        clap_mangen::generate_to(program.disable_help_subcommand(true), &pages)
            .with_context(|| format!("cannot write to {}", pages.display()))?;
    }
    let count = |directory: &Path| fs::read_dir(directory).map(Iterator::count);
    Ok(writeln!(out, "{} man pages and {} scripts for shells are in {}", count(&pages)?, count(&scripts)?, args.directory.display())?)
}

/// As in a package, which comes without `recruiter-dev`.
fn recruiter() -> Command {
    ["dev", "demo", "bench"]
        .into_iter()
        .fold(recruiter::cli::Config::command(), |all, command| all.mut_subcommand(command, |one| one.hide(true)))
}

fn complete(mut program: Command, to: &Path) -> anyhow::Result<()> {
    let name = program.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let file = to.join(shell.file_name(&name));
        let mut script = File::create(&file).with_context(|| format!("cannot create {}", file.display()))?;
        generate(shell, &mut program, &name, &mut script);
    }
    Ok(())
}
