//! `recruiter completions`: writes a script with which a shell completes the command line.

use std::io::Write;

use clap::{Args, Command};
use clap_complete::{Shell, generate};

pub(super) const EXAMPLES: &str = "Examples:
  recruiter completions bash > /etc/bash_completion.d/recruiter
  recruiter completions zsh > /usr/local/share/zsh/site-functions/_recruiter
  recruiter completions fish > ~/.config/fish/completions/recruiter.fish";

/// The shell.
#[derive(Args, Clone, Debug)]
pub(super) struct CompletionsArgs {
    /// Shell that is to complete commands
    #[arg(value_enum)]
    shell: Shell,
}

/// Writes the script.
pub(super) fn run(args: &CompletionsArgs, mut command: Command, out: &mut impl Write) -> anyhow::Result<()> {
    let mut script = Vec::new();
    generate(args.shell, &mut command, "recruiter", &mut script);
    Ok(out.write_all(&script)?)
}
