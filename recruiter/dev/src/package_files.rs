//! `recruiter-dev package-files`: writes the files of a package that are made of the command lines: man pages, the scripts by which
//! shells complete commands, and examples of the files of settings.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use clap::{Args, Command, CommandFactory as _};
use clap_complete::{Generator as _, Shell, generate};
use recruiter_common::settings::{Program, example};

/// Where to.
#[derive(Args, Clone, Debug)]
pub(crate) struct PackageFilesArgs {
    /// Directory for them: `man`, `completions` and `examples` are created in it
    directory: PathBuf,
}

/// Writes the files of all three programs, and how many there are.
pub(crate) fn run(args: &PackageFilesArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let [pages, scripts, examples] = ["man", "completions", "examples"].map(|name| args.directory.join(name));
    for directory in [&pages, &scripts, &examples] {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    for program in [recruiter(), recruiter_worker::cli::Config::command(), recruiter_cleaner::cli::Config::command()] {
        complete(program.clone(), &scripts)?;
        // It must not be built before: its subcommands `help` would get pages.
        clap_mangen::generate_to(program.disable_help_subcommand(true), &pages)
            .with_context(|| format!("cannot write to {}", pages.display()))?;
    }
    write_example::<recruiter::cli::Config>(&examples)?;
    write_example::<recruiter_worker::cli::Config>(&examples)?;
    write_example::<recruiter_cleaner::cli::Config>(&examples)?;
    let count = |directory: &Path| fs::read_dir(directory).map(Iterator::count);
    Ok(writeln!(out, "{} man pages and {} scripts for shells are in {}", count(&pages)?, count(&scripts)?, args.directory.display())?)
}

/// Under the name that the file of settings has.
fn write_example<P: Program>(to: &Path) -> anyhow::Result<()> {
    let file = to.join(Path::new(P::FILE).file_name().unwrap_or_default());
    fs::write(&file, example::<P>(&P::command())).with_context(|| format!("cannot write {}", file.display()))
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
