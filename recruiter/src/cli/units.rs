//! `recruiter units`: installs the units of systemd, for machines without the Debian package. They are those of `systemd/`, which are in the
//! program, and start the programs that are beside it.

use std::{
    fs::{self, DirBuilder, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, anyhow};
use clap::{Args, Subcommand, builder::BoolishValueParser};
use recruiter_common::exit::Exit;

use super::{
    output::Format,
    view::{dry, line, outcome},
};

/// Where the units in `systemd/` have their programs.
const PROGRAMS: &str = "/usr/bin/";
const BESIDE: [&str; 2] = ["recruiter-worker", "recruiter-cleaner"];
/// The services do not see these directories: `ProtectHome=` and `PrivateTmp=`.
const HIDDEN: [&str; 5] = ["/home", "/root", "/run/user", "/tmp", "/var/tmp"];
/// Where the package has the units.
const PACKAGED: &str = "usr/lib/systemd/system/recruiter.service";

const NEXT: &str = "\
next, name your MongoDB in /etc/recruiter/recruiter.env and your programs in /etc/recruiter/workables.toml, then
  systemctl enable --now recruiter.target recruiter.service recruiter-cleaner.service recruiter-worker@main.service";

#[derive(Subcommand, Clone, Debug)]
pub(super) enum UnitsCommand {
    /// Install the units of systemd, the system user and the files of settings; start nothing
    Install(InstallArgs),
}

#[derive(Args, Clone, Debug)]
pub(super) struct InstallArgs {
    /// The root of the file system, to prepare an image
    #[arg(long, env = "RECRUITER_UNITS_ROOT", value_name = "DIRECTORY", default_value = "/")]
    root: PathBuf,
    /// Only show what would be written
    #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = BoolishValueParser::new())]
    dry_run: bool,
    #[command(flatten)]
    format: Format,
}

/// A file that is installed.
struct Installed {
    text: &'static str,
    path: &'static str,
    mode: u32,
    /// The administrator's, once it is there.
    is_settings: bool,
}

const fn ours(path: &'static str, text: &'static str) -> Installed {
    Installed { text, path, mode: 0o644, is_settings: false }
}

const FILES: [Installed; 9] = [
    ours("etc/sysusers.d/recruiter.conf", include_str!("../../../systemd/recruiter.sysusers")),
    ours("etc/tmpfiles.d/recruiter.conf", include_str!("../../../systemd/recruiter.tmpfiles")),
    ours("etc/systemd/system/recruiter.target", include_str!("../../../systemd/recruiter.target")),
    ours("etc/systemd/system/recruiter.service", include_str!("../../../systemd/recruiter.service")),
    ours("etc/systemd/system/recruiter-cleaner.service", include_str!("../../../systemd/recruiter-cleaner.service")),
    ours("etc/systemd/system/recruiter-worker@.service", include_str!("../../../systemd/recruiter-worker@.service")),
    ours("etc/systemd/system/recruiter-web.service", include_str!("../../../systemd/recruiter-web.service")),
    Installed {
        text: include_str!("../../../systemd/recruiter.env"),
        path: "etc/recruiter/recruiter.env",
        mode: 0o600, // for the password
        is_settings: true,
    },
    Installed {
        text: include_str!("../../../systemd/workables.toml"),
        path: "etc/recruiter/workables.toml",
        mode: 0o644,
        is_settings: true,
    },
];

pub(super) fn run(command: UnitsCommand, out: &mut impl Write) -> anyhow::Result<()> {
    let UnitsCommand::Install(InstallArgs { root, dry_run, format }) = command;
    let root = root.canonicalize().with_context(|| format!("--root {}", root.display())).context(Exit::Usage)?;
    if root.join(PACKAGED).exists() {
        return Err(anyhow!("the package has installed the units: /{PACKAGED}; what you would change belongs into `systemctl edit`"));
    }
    let programs = programs(&root)?;
    for file in &FILES {
        let path = root.join(file.path);
        let done = install(file, &path, &programs, dry_run).with_context(|| format!("cannot install {}", path.display()));
        let done = done.map_err(|error| if is_denied(&error) { error.context("run it as root") } else { error })?;
        let shown = path.display().to_string();
        line(out, format, &outcome(&shown, done, dry_run), format_args!("{}{done} {shown}", dry(dry_run)))?;
    }
    if !dry_run && root == Path::new("/") {
        take_effect()?;
    }
    if !format.json && !dry_run {
        writeln!(out, "{NEXT}")?;
    }
    Ok(())
}

fn is_denied(error: &anyhow::Error) -> bool {
    error.root_cause().downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// The directory of the three programs, as it is named within the root.
fn programs(root: &Path) -> anyhow::Result<PathBuf> {
    let refused = |problem: String| Err(anyhow!(problem).context(Exit::Config));
    let program = std::env::current_exe().context("the path of this program is not known")?;
    let directory = program.parent().unwrap_or(Path::new("/"));
    for other in BESIDE {
        if !directory.join(other).is_file() {
            return refused(format!("{} has no {other}: install the three programs in one directory", directory.display()));
        }
    }
    let within = directory.strip_prefix(root).map_or_else(|_| directory.to_owned(), |within| Path::new("/").join(within));
    if let Some(hidden) = HIDDEN.iter().find(|hidden| within.starts_with(hidden)) {
        return refused(format!("the services do not see {hidden}: install the three programs elsewhere, for example in /usr/local/bin"));
    }
    if within.to_str().is_none_or(|path| path.contains(|c: char| c.is_whitespace() || c.is_control() || "\"'\\%$;".contains(c))) {
        return refused(format!("a unit cannot name {within:?} as it is: install the three programs elsewhere"));
    }
    Ok(within)
}

/// Installs a file, unless it is there: what came of it. A unit that differs is kept beside the new one, with the suffix `.old`, where systemd
/// does not look.
fn install(file: &Installed, path: &Path, programs: &Path, dry_run: bool) -> io::Result<&'static str> {
    let programs = format!("ExecStart={}/", programs.display().to_string().trim_end_matches('/'));
    let text = file.text.replace(&format!("ExecStart={PROGRAMS}"), &programs);
    let found = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        found => Some(found?),
    };
    let done = match &found {
        Some(found) if *found == text.as_bytes() => return Ok("unchanged"),
        Some(_) if file.is_settings => return Ok("kept"),
        Some(_) => "replaced",
        None => "written",
    };
    if dry_run {
        return Ok(done);
    }
    if let Some(directory) = path.parent().filter(|directory| !directory.exists()) {
        // The services read it, also if root has a narrow umask.
        DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
        fs::set_permissions(directory, Permissions::from_mode(0o755))?;
    }
    let beside = |suffix: &str| PathBuf::from(format!("{}.{suffix}", path.display()));
    if found.is_some() {
        fs::copy(path, beside("old"))?;
    }
    let new = beside("new");
    let mut written = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    written.write_all(text.as_bytes())?;
    written.set_permissions(Permissions::from_mode(file.mode))?;
    written.sync_all()?;
    fs::rename(new, path)?;
    Ok(done)
}

/// Creates the system user and `/run/recruiter`, and lets systemd read the units.
fn take_effect() -> anyhow::Result<()> {
    let mut commands: Vec<&[&str]> = vec![&["systemd-sysusers", "recruiter.conf"], &["systemd-tmpfiles", "--create", "recruiter.conf"]];
    if Path::new("/run/systemd/system").exists() {
        commands.push(&["systemctl", "daemon-reload"]);
    }
    for command in commands {
        let shown = command.join(" ");
        let status = Command::new(command[0]).args(&command[1..]).status();
        let status =
            status.with_context(|| format!("the files are installed, but `{shown}` cannot be run: is this a machine with systemd?"))?;
        if !status.success() {
            return Err(anyhow!("the files are installed, but `{shown}` has failed: {status}; run it again when its cause is gone"));
        }
    }
    Ok(())
}
