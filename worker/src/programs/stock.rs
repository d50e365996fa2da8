//! The stock worker's workables file: the program of each class.
//!
//! The file is loaded once, at start. All possible checks are made then. An error has its line and column and a remedy.

use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytesize::ByteSize;
use nix::unistd::{AccessFlags, access};
use recruiter_common::{
    enqueue::LONGEST_NAME,
    job::{self, Keep, Priority},
    spec::{check_defaults, policy_of_text},
    toml_file::{self, FileError, Problem},
};
use serde::Deserialize;
use toml::Spanned;

use super::{
    files::OF_A_PROGRAM,
    long_lived::{HowToStart, Pool},
    program::Program,
    settings::{MessagesOn, Settings},
    template::Template,
};

/// Default of `result_limit`, in bytes.
const RESULT_LIMIT: usize = 1024 * 1024;
/// Maximum of `result_limit`, in bytes: MongoDB allows 16 MiB per document, which must also hold parameters and history.
const LARGEST_RESULT_LIMIT: usize = 8 * 1024 * 1024;
/// Default of `try_again_limit`.
const TRY_AGAIN_LIMIT: u32 = 25;
/// Default of `kill_after`. With the worker's grace it must fit into systemd's TimeoutStopSec.
const KILL_AFTER: Duration = Duration::from_secs(5);
/// Maximum of `kill_after`: a worker that stops waits for it.
const LONGEST_KILL_AFTER: Duration = Duration::from_secs(600);
/// Default of `idle_timeout`.
const IDLE_TIMEOUT: Duration = Duration::from_secs(300);
/// Default of `jobs_per_process`.
const JOBS_PER_PROCESS: u32 = 10_000;

/// Classes and their programs.
pub struct Programs(pub(crate) Vec<(String, Program)>);

impl Programs {
    /// The most open files that one running program needs.
    pub(crate) fn files(&self) -> u64 {
        let has_pipe = self.0.iter().any(|(_, program)| program.settings.messages == MessagesOn::Descriptor);
        OF_A_PROGRAM + u64::from(has_pipe)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    workables: BTreeMap<Spanned<String>, Workable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Workable {
    command: Spanned<Vec<Spanned<String>>>,
    timeout: Option<Spanned<String>>,
    concurrency: Option<Spanned<u32>>,
    group: Option<String>,
    priority: Option<Priority>,
    retry: Option<Spanned<toml::Table>>,
    keep: Option<Keep>,
    #[serde(default)]
    limits: Vec<String>,
    try_again_after: Option<Spanned<String>>,
    try_again_limit: Option<u32>,
    kill_after: Option<Spanned<String>>,
    result_limit: Option<Spanned<String>>,
    directory: Option<Spanned<PathBuf>>,
    mode: Option<Spanned<String>>,
    idle_timeout: Option<Spanned<String>>,
    jobs_per_process: Option<Spanned<u32>>,
    messages: Option<Spanned<String>>,
    #[serde(default)]
    log_stderr: bool,
    result: Option<Spanned<String>>,
    #[serde(default)]
    env: BTreeMap<Spanned<String>, Spanned<String>>,
}

/// Reads the programs of a workables file, by class.
///
/// # Errors
/// When the file cannot be read, is invalid, or names a program that does not exist.
pub fn load(path: &Path) -> Result<Programs, FileError> {
    read(path, false)
}

/// As [`load`], and as if each workable had `log_stderr = true`.
///
/// # Errors
/// As [`load`].
pub fn load_logged(path: &Path) -> Result<Programs, FileError> {
    read(path, true)
}

fn read(path: &Path, log_stderr: bool) -> Result<Programs, FileError> {
    const WHAT: &str = "the workables file";
    let home = std::path::absolute(path).map_err(|source| FileError::Unreadable { what: WHAT, path: path.into(), source })?;
    let home = home.parent().unwrap_or(Path::new("/"));
    toml_file::read(WHAT, path, |text| programs(text, home, log_stderr)).map(Programs)
}

fn programs(text: &str, home: &Path, log_stderr: bool) -> Result<Vec<(String, Program)>, Problem> {
    let mut file: File = toml_file::parse(text)?;
    if file.workables.is_empty() {
        return Err(Problem(0..0, "no workables: add a table `[workables.<class>]` with `command = [\"program\", \"argument\"]`".into()));
    }
    file.workables.values_mut().for_each(|workable| workable.log_stderr |= log_stderr);
    let mut pools = Vec::new();
    let program = |(class, workable): (Spanned<String>, Workable)| {
        let (span, class) = (class.span(), checked_class(class)?);
        let defaults = defaults(&workable)?;
        check_defaults(&class, &defaults).map_err(|problem| Problem(span, problem.to_string()))?;
        Ok((class, Program { defaults, ..program(workable, home, &mut pools)? }))
    };
    file.workables.into_iter().map(program).collect()
}

/// What a job of the class has if it says nothing else.
fn defaults(workable: &Workable) -> Result<job::Settings, Problem> {
    let mut defaults = job::Settings::default();
    let Workable { group, priority, keep, limits, .. } = workable;
    (defaults.group, defaults.priority, defaults.keep, defaults.limits) = (group.clone(), *priority, *keep, limits.clone());
    if let Some(retry) = &workable.retry {
        let json = serde_json::to_string(retry.as_ref()).map_err(|error| Problem::of(retry, error))?;
        defaults.retry_policy = Some(policy_of_text(&json).map_err(|problem| Problem::of(retry, problem))?);
    }
    Ok(defaults)
}

fn checked_class(class: Spanned<String>) -> Result<String, Problem> {
    let problem = match class.as_ref().as_str() {
        "" => "the class has no name: write `[workables.<class>]`".into(),
        name if name.contains('\0') => "a class cannot contain a NUL: remove it".into(),
        name if name.len() > LONGEST_NAME => format!("a class has at most {LONGEST_NAME} bytes, this one {}: shorten it", name.len()),
        name if name.trim() != name => "a class cannot begin or end with a blank: remove it".into(),
        _ => return Ok(class.into_inner()),
    };
    Err(Problem(class.span(), problem))
}

fn program(mut workable: Workable, home: &Path, pools: &mut Vec<Arc<Pool>>) -> Result<Program, Problem> {
    let command = workable.command.as_ref().iter().map(|argument| match Template::parse(argument.as_ref()) {
        Ok(template) => Ok((argument, template)),
        Err(problem) => Err(Problem::of(argument, problem)),
    });
    let mut command = command.collect::<Result<Vec<_>, _>>()?.into_iter();
    let Some((argument, name)) = command.next() else {
        return Err(Problem::of(&workable.command, "the command is empty: write `[\"program\", \"argument\"]`"));
    };
    let Some(name) = name.literal() else {
        return Err(Problem::of(argument, "a job cannot choose the program: name it without a placeholder"));
    };
    let environment = std::mem::take(&mut workable.env).into_iter().map(variable).collect::<Result<BTreeMap<_, _>, _>>()?;
    let path = find(name, home, environment.get("PATH")).map_err(|problem| Problem::of(argument, problem))?;
    let settings = Settings {
        path,
        time_limit: workable.timeout.as_ref().map(duration).transpose()?,
        try_again_after: workable.try_again_after.as_ref().map(duration).transpose()?,
        try_again_limit: workable.try_again_limit.unwrap_or(TRY_AGAIN_LIMIT),
        kill_after: workable.kill_after.as_ref().map_or(Ok(KILL_AFTER), kill_after)?,
        result_limit: workable.result_limit.as_ref().map_or(Ok(RESULT_LIMIT), size)?,
        directory: workable.directory.as_ref().map_or_else(|| Ok(home.to_owned()), |name| directory(name, home))?,
        environment,
        messages: workable.messages.as_ref().map_or(Ok(MessagesOn::Nothing), messages)?,
        log_stderr: workable.log_stderr,
        keeps_text: workable.result.as_ref().map_or(Ok(false), keeps_text)?,
    };
    let command: Vec<(&Spanned<String>, Template)> = command.collect();
    let pool = if is_long_lived(&workable)? {
        let literal = |(argument, template): &(&Spanned<String>, Template)| match template.literal() {
            Some(text) => Ok(OsString::from(text)),
            None => Err(Problem::of(argument, "a long-lived program runs many jobs: it reads their parameters from standard input")),
        };
        let arguments = command.iter().map(literal).collect::<Result<_, _>>()?;
        Some(pool(start(&workable, &settings, arguments)?, pools))
    } else {
        None
    };
    let concurrency = workable.concurrency.as_ref().map(|jobs| match NonZeroU32::new(*jobs.as_ref()) {
        Some(jobs) => Ok(jobs),
        None => Err(Problem::of(jobs, "a worker runs at least one job of a class at a time; to run none, remove the class")),
    });
    let concurrency = concurrency.transpose()?;
    Ok(Program {
        concurrency,
        defaults: job::Settings::default(),
        arguments: command.into_iter().map(|(_, template)| template).collect(),
        settings: Arc::new(settings),
        pool,
    })
}

/// Whether the processes of a class run many jobs. Refuses keys that have no effect in its mode.
fn is_long_lived(workable: &Workable) -> Result<bool, Problem> {
    let is_long_lived = match workable.mode.as_ref().map(|mode| (mode, mode.as_ref().as_str())) {
        None | Some((_, "per-job")) => false,
        Some((_, "long-lived")) => true,
        Some((mode, _)) => return Err(Problem::of(mode, "a mode is \"per-job\" or \"long-lived\"")),
    };
    let only_long_lived = [&workable.idle_timeout.as_ref().map(Spanned::span), &workable.jobs_per_process.as_ref().map(Spanned::span)];
    if let Some(place) = only_long_lived.into_iter().flatten().next().filter(|_| !is_long_lived) {
        return Err(Problem(place.clone(), "this key is for long-lived programs: add `mode = \"long-lived\"`".into()));
    }
    let only_per_job = [&workable.messages, &workable.result, &workable.try_again_after].map(|key| key.as_ref().map(Spanned::span));
    if let Some(place) = only_per_job.into_iter().flatten().next().filter(|_| is_long_lived) {
        return Err(Problem(place, "this key has no effect with `mode = \"long-lived\"`: the protocol has messages for it".into()));
    }
    Ok(is_long_lived)
}

fn start(workable: &Workable, settings: &Settings, arguments: Vec<OsString>) -> Result<HowToStart, Problem> {
    let jobs_per_process = match &workable.jobs_per_process {
        Some(jobs) if *jobs.as_ref() == 0 => return Err(Problem::of(jobs, "a process runs at least one job")),
        Some(jobs) => *jobs.as_ref(),
        None => JOBS_PER_PROCESS,
    };
    Ok(HowToStart {
        path: settings.path.clone(),
        arguments,
        directory: settings.directory.clone(),
        environment: settings.environment.clone(),
        idle_timeout: workable.idle_timeout.as_ref().map_or(Ok(IDLE_TIMEOUT), duration)?,
        jobs_per_process,
        kill_after: settings.kill_after,
        log_stderr: settings.log_stderr,
    })
}

/// The pool of processes that are started in this way. Classes share it.
fn pool(start: HowToStart, pools: &mut Vec<Arc<Pool>>) -> Arc<Pool> {
    if let Some(pool) = pools.iter().find(|pool| pool.start == start) {
        return pool.clone();
    }
    let pool = Arc::new(Pool::new(start));
    pools.push(pool.clone());
    pool
}

fn messages(text: &Spanned<String>) -> Result<MessagesOn, Problem> {
    match text.as_ref().as_str() {
        "fd" => Ok(MessagesOn::Descriptor),
        "stderr" => Ok(MessagesOn::StandardError),
        _ => Err(Problem::of(text, "messages come from \"fd\" (file descriptor 3) or from \"stderr\"")),
    }
}

fn keeps_text(text: &Spanned<String>) -> Result<bool, Problem> {
    match text.as_ref().as_str() {
        "text" => Ok(true),
        "json" => Ok(false),
        _ => Err(Problem::of(text, "a result is \"json\" (an object or an array is stored as such) or \"text\"")),
    }
}

fn duration(text: &Spanned<String>) -> Result<Duration, Problem> {
    match humantime::parse_duration(text.as_ref()) {
        Ok(Duration::ZERO) => Err(Problem::of(text, "must be longer than zero: leave the key out for no limit")),
        Ok(duration) => Ok(duration),
        Err(error) => Err(Problem::of(text, format!("not a duration ({error}): write it like \"30s\" or \"1h 30m\""))),
    }
}

fn kill_after(text: &Spanned<String>) -> Result<Duration, Problem> {
    match humantime::parse_duration(text.as_ref()) {
        Ok(duration) if duration <= LONGEST_KILL_AFTER => Ok(duration),
        Ok(_) => Err(Problem::of(text, "too long, because a stopping worker waits for it: write at most \"10m\"")),
        Err(error) => Err(Problem::of(text, format!("not a duration ({error}): write it like \"5s\""))),
    }
}

fn size(text: &Spanned<String>) -> Result<usize, Problem> {
    match text.as_ref().parse::<ByteSize>().map(|size| usize::try_from(size.as_u64())) {
        Ok(Ok(bytes)) if bytes <= LARGEST_RESULT_LIMIT => Ok(bytes),
        Ok(_) => Err(Problem::of(text, "too large, because results are stored in the job's document: write at most \"8MiB\"")),
        Err(error) => Err(Problem::of(text, format!("not a size ({error}): write it like \"64KiB\" or \"1MiB\""))),
    }
}

fn directory(name: &Spanned<PathBuf>, home: &Path) -> Result<PathBuf, Problem> {
    let directory = home.join(name.as_ref());
    if directory.is_dir() {
        return Ok(directory);
    }
    Err(Problem::of(name, format!("there is no directory `{}`: create it or correct the path", directory.display())))
}

fn variable((name, value): (Spanned<String>, Spanned<String>)) -> Result<(String, String), Problem> {
    if name.as_ref().is_empty() || name.as_ref().contains(['=', '\0']) {
        return Err(Problem::of(&name, "not a valid name of a variable: remove `=` and NUL"));
    }
    if value.as_ref().contains('\0') {
        return Err(Problem::of(&value, "a variable cannot contain a NUL: remove it"));
    }
    Ok((name.into_inner(), value.into_inner()))
}

/// The program of this name. A name with a slash is relative to the file; any other is searched in the `PATH` that the program will have.
fn find(name: &str, home: &Path, path: Option<&String>) -> Result<PathBuf, String> {
    let (candidates, places) = if name.contains('/') {
        let candidate = home.join(name);
        (vec![candidate.clone()], format!("at `{}`", candidate.display()))
    } else {
        let path = path.map_or_else(|| env::var_os("PATH").unwrap_or_default(), OsString::from);
        (env::split_paths(&path).map(|directory| directory.join(name)).collect(), format!("along the PATH `{}`", path.display()))
    };
    let files = candidates.into_iter().filter(|candidate| candidate.is_file()).collect::<Vec<_>>();
    match (files.iter().find(|file| access(*file, AccessFlags::X_OK).is_ok()), files.first()) {
        (Some(file), _) => {
            std::path::absolute(file).map_err(|error| format!("cannot find the absolute path of `{}`: {error}", file.display()))
        }
        (None, Some(file)) => Err(format!("`{}` is not executable by this user: chmod it or correct the command", file.display())),
        (None, None) => Err(format!("there is no program `{name}` {places}: install it or correct the command")),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    /// Loads this text as `workables.toml` of a directory with an executable `run`, a plain file `data` and a directory `in`.
    fn loaded(text: &str) -> (PathBuf, Result<Vec<(String, Program)>, FileError>) {
        let home = tempfile::tempdir().unwrap();
        for (name, mode) in [("run", 0o755), ("data", 0o644)] {
            fs::write(home.path().join(name), "#!/bin/sh\n").unwrap();
            fs::set_permissions(home.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        fs::create_dir(home.path().join("in")).unwrap();
        let file = home.path().join("workables.toml");
        fs::write(&file, text).unwrap();
        (home.path().into(), load(&file).map(|programs| programs.0))
    }

    #[test]
    fn everything_that_can_be_said_is_understood() {
        let (home, programs) = loaded(
            r#"
            [workables.checksum]
            command = ["sha256sum", "--", "{path}"]
            [workables."App\\Mail"]
            command = ["./run", "{{}}"]
            timeout = "1m 30s"
            try_again_after = "1h"
            try_again_limit = 2
            kill_after = "500ms"
            result_limit = "64KiB"
            directory = "in"
            env = { LANG = "C", EMPTY = "" }
            "#,
        );
        let programs = programs.unwrap();
        assert_eq!(programs.iter().map(|(class, _)| class.as_str()).collect::<Vec<_>>(), ["App\\Mail", "checksum"]);
        let (mail, checksum) = (&programs[0].1.settings, &programs[1].1.settings);
        assert_eq!(mail.path, home.join("run"));
        assert_eq!((mail.time_limit, mail.try_again_after), (Some(Duration::from_secs(90)), Some(Duration::from_secs(3600))));
        assert_eq!((mail.result_limit, &mail.directory), (64 * 1024, &home.join("in")));
        assert_eq!((mail.try_again_limit, mail.kill_after), (2, Duration::from_millis(500)));
        assert_eq!((checksum.try_again_limit, checksum.kill_after), (25, Duration::from_secs(5)));
        assert_eq!(checksum.directory, home, "where the file is");
        assert_eq!(mail.environment, BTreeMap::from([("EMPTY".into(), String::new()), ("LANG".into(), "C".into())]));
        assert!(checksum.path.is_absolute() && checksum.path.ends_with("sha256sum"));
        assert_eq!((checksum.time_limit, checksum.try_again_after, checksum.result_limit), (None, None, 1024 * 1024));
        assert_eq!(programs[1].1.arguments, ["--", "{path}"].map(|argument| Template::parse(argument).unwrap()));
    }

    #[test]
    fn classes_with_the_same_command_share_processes() {
        let class = |name: &str, more: &str| format!("[workables.{name}]\ncommand = [\"./run\", \"x\"]\nmode = \"long-lived\"\n{more}\n");
        let text = [class("a", ""), class("b", "timeout = \"1s\""), class("c", "idle_timeout = \"1s\""), class("d", "env = { A = \"1\" }")];
        let programs = loaded(&text.concat()).1.unwrap();
        let pool = |class: usize| programs[class].1.pool.clone().unwrap();
        assert!(Arc::ptr_eq(&pool(0), &pool(1)) && !Arc::ptr_eq(&pool(0), &pool(2)) && !Arc::ptr_eq(&pool(0), &pool(3)));
    }

    #[test]
    fn a_wrong_file_says_where_and_what_to_do() {
        let check = |text: &str, expected: &str| {
            let problem = loaded(text).1.err().expect(text).to_string();
            let (_, place_and_problem) = problem.split_once("workables.toml:").expect(&problem);
            assert!(place_and_problem.starts_with(expected), "{text}\ngives   {place_and_problem}\ninstead {expected}");
        };
        let long = "[workables.x]\ncommand = [\"true\"]\nmode = \"long-lived\"\n";
        check("[workables.x]\ncommand = [\"true\"]\nmode = \"daemon\"", "3:8: a mode is \"per-job\" or \"long-lived\"");
        check("[workables.x]\nmode = \"long-lived\"\ncommand = [\"true\", \"{a}\"]", "3:20: a long-lived program runs many jobs");
        check("[workables.x]\ncommand = [\"true\"]\npriority = 10", "3:12: `priority` is 10; it must be from 0 to 9");
        check("[workables.x]\ncommand = [\"true\"]\nkeep = \"some\"", "3:8: unknown variant `some`, expected `all` or `failures`");
        check("[workables.x]\ncommand = [\"true\"]\nretry = { class = \"Mine\" }", "1:12: ");
        check("[workables.x]\ncommand = [\"true\"]\nretry = { times = 3 }", "3:9: a retry policy is");
        check("[workables.x]\ncommand = [\"true\"]\nlimits = [\"a,b\"]", "1:12: the job cannot be limited: the name of a resource");
        check("[workables.x]\ncommand = [\"true\"]\ngroup = \"\"", "1:12: ");
        check("[workables.x]\ncommand = [\"true\"]\nconcurrency = 0", "3:15: a worker runs at least one job of a class at a time");
        check("[workables.x]\ncommand = [\"true\"]\nconcurrency = \"2\"", "3:15: ");
        check("[workables.x]\ncommand = [\"true\"]\njobs_per_process = 3", "3:20: this key is for long-lived programs");
        check(&format!("{long}messages = \"fd\""), "4:12: this key has no effect with `mode");
        check(&format!("{long}jobs_per_process = 0"), "4:20: a process runs at least one job");
        check(&format!("{long}jobs_per_process = -1"), "4:20: ");
        check(&format!("{long}idle_timeout = \"0s\""), "4:16: must be longer than zero");
        check("[workables.x]\ncommand = [\"true\"]\nmessages = \"stdout\"", "3:12: messages come from \"fd\"");
        check("[workables.x]\ncommand = [\"true\"]\nresult = \"xml\"", "3:10: a result is \"json\"");
        check("", "1:1: no workables: add a table");
        check("[workables]", "1:1: no workables: add a table");
        check("[workable.x]\ncommand = [\"true\"]", "1:2: unknown key `workable`, expected `workables`");
        check("[workables.x]\ncommand = [\"true\"]\ntimout = \"1s\"", "3:1: unknown key `timout`, expected one of");
        check("[workables.x]\ntimeout = \"1s\"", "1:1: missing key `command`");
        check("[workables.x]\ncommand = \"true\"", "2:11: invalid type: string");
        check("[workables.x]\ncommand = [\"true\", 1]", "2:20: invalid type: integer");
        check("[workables.x]\ncommand = [", "2:12: ");
        check("[workables.x]\ncommand = []", "2:11: the command is empty");
        check("[workables.x]\ncommand = [\"{program}\"]", "2:12: a job cannot choose the program");
        check("[workables.x]\ncommand = [\"true\", \"ü\", \"{path\"]", "2:25: a `{` is never closed");
        check("[workables.x]\ncommand = [\"true\", \"{a{b}\"]", "2:20: a placeholder is written");
        check("[workables.x]\ncommand = [\"true\", \"path}\"]", "2:20: a `}` was never opened");
        check("[workables.x]\ncommand = [\"true\", \"{}\"]", "2:20: a placeholder is written `{name}`");
        check("[workables.x]\ncommand = [\"true\", \"{print $1}\"]", "2:20: a placeholder is written `{name}`");
        check("[workables.x]\ncommand = [\"true\", \"{a..b}\"]", "2:20: a placeholder is written `{name}`");
        check("[workables.x]\ncommand = [\"true\", \"\\u0000\"]", "2:20: an argument cannot contain a NUL");
        check("[workables.x]\ncommand = [\"no-such-program\"]", "2:12: there is no program `no-such-program` along the PATH `/");
        check("[workables.x]\ncommand = [\"./absent\"]", "2:12: there is no program `./absent` at `/");
        check("[workables.x]\ncommand = [\"\"]", "2:12: there is no program `` along the PATH");
        check("[workables.x]\ncommand = [\"./in\"]", "2:12: there is no program `./in` at `/");
        check("[workables.x]\ncommand = [\"true\"]\nenv.PATH = \"/nowhere\"", "2:12: there is no program `true` along the PATH `/nowhere`");
        check("[workables.\"\"]\ncommand = [\"true\"]", "1:12: the class has no name");
        check("[workables.\"a \"]\ncommand = [\"true\"]", "1:12: a class cannot begin or end with a blank");
        check("[workables.\"a\\u0000\"]\ncommand = [\"true\"]", "1:12: a class cannot contain a NUL");
        check(&format!("[workables.{}]\ncommand = [\"true\"]", "x".repeat(257)), "1:12: a class has at most 256 bytes, this one 257");
        check("[workables.x]\ncommand = [\"true\"]\n[workables.x]", "3:12: duplicate key");
        check("[workables.x]\ncommand = [\"true\"]\ntimeout = \"0s\"", "3:11: must be longer than zero");
        check("[workables.x]\ncommand = [\"true\"]\ntry_again_limit = -1", "3:19: invalid value: integer `-1`");
        check("[workables.x]\ncommand = [\"true\"]\nkill_after = \"11m\"", "3:14: too long, because a stopping worker waits for it");
        check("[workables.x]\ncommand = [\"true\"]\nkill_after = \"5\"", "3:14: not a duration (");
        check("[workables.x]\ncommand = [\"true\"]\ntimeout = \"soon\"", "3:11: not a duration (");
        check("[workables.x]\ncommand = [\"true\"]\nresult_limit = \"much\"", "3:16: not a size (");
        check(
            "[workables.x]\ncommand = [\"true\"]\nresult_limit = \"1GiB\"",
            "3:16: too large, because results are stored in the job's document",
        );
        check("[workables.x]\ncommand = [\"true\"]\ndirectory = \"absent\"", "3:13: there is no directory `/");
        check("[workables.x]\ncommand = [\"true\"]\nenv = { \"A=B\" = \"\" }", "3:9: not a valid name of a variable");
        check("[workables.x]\ncommand = [\"true\"]\nenv = { A = \"\\u0000\" }", "3:13: a variable cannot contain a NUL");
    }

    #[test]
    fn a_program_must_be_executable() {
        let problem = loaded("[workables.x]\ncommand = [\"./data\"]").1.err().unwrap().to_string();
        assert!(
            problem.contains("workables.toml:2:12: `/") && problem.contains("/data` is not executable by this user: chmod it"),
            "{problem}"
        );
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let problem = load(Path::new("/nowhere/workables.toml")).err().unwrap();
        assert_eq!(problem.to_string(), "cannot read the workables file `/nowhere/workables.toml`");
    }
}
