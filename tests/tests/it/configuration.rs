//! Settings: a file of TOML, below the environment, below the flags, for each of the three programs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use bson::doc;
use clap::{Arg, ArgAction, CommandFactory as _};
use recruiter_common::NewJob;
use recruiter_tests::{
    local::store,
    mongo::TestDatabase,
    processes::{Process, binary, can_run},
    wait::{SOON, wait_until},
};
use serde_json::Value;
use tempfile::TempDir;

use super::{cli::Said, tidy::root, usual_settings::run};

const PROGRAMS: [&str; 3] = ["recruiter", "recruiter-worker", "recruiter-cleaner"];

/// The flags that are about one call.
const OF_A_CALL: [&str; 6] = ["settings", "check-config", "show-config", "json", "help", "version"];

/// The settings of a program, as clap knows them: the table in the file, and the flag.
fn settings(program: &str) -> Vec<(Option<&'static str>, Arg)> {
    let command = match program {
        "recruiter" => recruiter::cli::Config::command(),
        "recruiter-worker" => recruiter_worker::cli::Config::command(),
        _ => recruiter_cleaner::cli::Config::command(),
    };
    let of = |command: &clap::Command| {
        let flags = command.get_arguments().filter(|arg| arg.get_long().is_some_and(|name| !OF_A_CALL.contains(&name)));
        flags.cloned().collect::<Vec<_>>()
    };
    let mut found: Vec<_> = of(&command).into_iter().map(|arg| (None, arg)).collect();
    if program == "recruiter" {
        for table in ["run", "web"] {
            found.extend(of(command.find_subcommand(table).unwrap()).into_iter().map(|arg| (Some(table), arg)));
        }
    }
    assert!(found.len() > 8, "{program}");
    found
}

/// Three values that a flag takes, as the file has them and as a shell has them. A flag with a new kind of value needs a line here.
fn samples(arg: &Arg) -> [(String, String); 3] {
    let texts = |values: [&str; 3]| values.map(|value| (format!("{value:?}"), value.to_owned()));
    let kind = arg.get_value_names().map(|names| names[0].as_str().to_owned()).unwrap_or_default();
    if arg.get_long() == Some("log-format") {
        return texts(["json", "text", "json"]);
    }
    match kind.as_str() {
        _ if matches!(arg.get_action(), ArgAction::SetTrue) => ["true", "false", "true"].map(|value| (value.into(), value.into())),
        "DURATION" => texts(["7m", "8m", "9m"]),
        "N" => ["7", "8", "9"].map(|value| (value.into(), value.into())),
        "SIZE" => texts(["7MiB", "8MiB", "9MiB"]),
        "URI" => texts(["mongodb://a/x", "mongodb://b/x", "mongodb://c/x"]),
        "FILE" | "DIR" | "PREFIX" => texts(["a", "b", "c"]),
        "FILTER" => texts(["debug", "info", "warn"]),
        "HOST:PORT" => texts(["a:1", "b:2", "c:3"]),
        "ROLE" => texts(["viewer", "client", "operator"]),
        "GROUP" => [("[\"a\", \" b\\n\"]".into(), "a,b".into()), ("\"c, d\"".into(), "c,d".into()), ("[\"e\"]".into(), "e".into())],
        "REASON=DURATION" | "CLASS=DURATION" => {
            [("[\"a=1d\", \"b=2d\"]".into(), "a=1d,b=2d".into()), ("\"c=1d\"".into(), "c=1d".into()), ("[\"d=1d\"]".into(), "d=1d".into())]
        }
        other => panic!("--{}: which values has a {other}?", arg.get_long().unwrap()),
    }
}

/// A file with the first sample of each setting.
fn full_file(program: &str) -> String {
    let (mut text, mut table) = (String::new(), None);
    for (within, arg) in settings(program) {
        if within != table {
            text += &format!("[{}]\n", within.unwrap());
            table = within;
        }
        text += &format!("{} = {}\n", arg.get_long().unwrap(), samples(&arg)[0].0);
    }
    text
}

fn written(text: impl AsRef<[u8]>) -> (TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("settings.toml");
    fs::write(&file, text).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let name = file.to_str().unwrap().to_owned();
    (directory, name)
}

fn show(program: &str, args: &[&str], env: &[(&str, &str)]) -> BTreeMap<String, Value> {
    let asked: &[&str] = if program == "recruiter" { &["config", "show", "--json"] } else { &["--show-config", "--json"] };
    let said = run(program, &[asked, args].concat(), env);
    said.objects().into_iter().map(|row| (row["name"].as_str().unwrap().to_owned(), row)).collect()
}

/// A worker without classes is not right.
fn classes(program: &str) -> &'static [(&'static str, &'static str)] {
    if program == "recruiter-worker" { &[("RECRUITER_BUILTINS", "true")] } else { &[] }
}

fn check(program: &str, args: &[&str], env: &[(&str, &str)]) -> Said {
    let asked = if program == "recruiter" { "check-config" } else { "--check-config" };
    run(program, &[&[asked], args].concat(), env)
}

/// Every flag of every program: a new one is in clap's list.
#[test]
fn a_flag_comes_before_the_environment_and_that_before_the_file() {
    for program in PROGRAMS {
        let (_directory, file) = written(full_file(program));
        let all = settings(program);
        let variables: Vec<_> = all.iter().map(|(_, arg)| arg.get_env().unwrap().to_str().unwrap().to_owned()).collect();
        let empty: Vec<(&str, &str)> = variables.iter().map(|name| (name.as_str(), "")).collect();
        let second: Vec<_> = all.iter().map(|(_, arg)| samples(arg)[1].1.clone()).collect();
        let set: Vec<(&str, &str)> = variables.iter().map(String::as_str).zip(second.iter().map(String::as_str)).collect();
        // `config show` has no flags of `run`, and a switch has no value on the command line.
        let flags: Vec<String> = all
            .iter()
            .filter(|(within, _)| within.is_none())
            .map(|(_, arg)| (arg.get_long().unwrap(), matches!(arg.get_action(), ArgAction::SetTrue), samples(arg)[2].1.clone()))
            .map(|(name, is_switch, value)| if is_switch { format!("--{name}") } else { format!("--{name}={value}") })
            .collect();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let of_file = ["--settings", file.as_str()];
        let in_file = [show(program, &of_file, &[]), show(program, &of_file, &empty)];
        let in_environment = show(program, &of_file, &set);
        let on_command_line = show(program, &[&of_file, flags.as_slice()].concat(), &set);
        let nowhere = show(program, &["--settings", "/dev/null"], &empty);
        for ((within, arg), variable) in all.iter().zip(&variables) {
            let name = arg.get_long().unwrap();
            let row = within.map_or_else(|| name.to_owned(), |table| format!("{table}.{name}"));
            let expect = |shown: &BTreeMap<String, Value>, sample: Option<usize>, source: &str, from: Option<&str>| {
                let row = &shown[&row];
                assert_eq!((&row["source"], row["from"].as_str()), (&Value::from(source), from), "{program} {row}");
                if let Some(sample) = sample {
                    assert_eq!(row["value"].as_str(), Some(samples(arg)[sample].1.as_str()), "{program} {row}");
                }
            };
            let text = fs::read_to_string(&file).unwrap();
            let (mut table, mut line) = (None, 0);
            for (number, said) in text.lines().enumerate() {
                table = said.strip_prefix('[').map(|rest| rest.trim_end_matches(']')).or(table);
                if table == *within && said.starts_with(&format!("{name} = ")) {
                    line = number + 1;
                }
            }
            let place = format!("{file}:{line}");
            in_file.iter().for_each(|shown| {
                // The file has a list of two.
                let value = shown[&row]["value"].as_str().unwrap().replace(' ', "");
                assert_eq!(value.trim(), samples(arg)[0].1, "{program} {row}");
                expect(shown, None, "file", Some(&place));
            });
            expect(&in_environment, Some(1), "environment", Some(variable));
            match within {
                None => expect(&on_command_line, Some(2), "flag", Some(&format!("--{name}"))),
                Some(_) => expect(&on_command_line, Some(1), "environment", Some(variable)),
            }
            expect(&nowhere, None, "default", None);
        }
    }
}

/// A flag of a command comes before the file as well.
#[test]
fn a_flag_of_a_command_comes_before_the_file() {
    ["run", "web"].iter().for_each(|command| check_flags_of(command));
}

fn check_flags_of(command: &str) {
    let (_directory, file) = written(full_file("recruiter"));
    let flags = settings("recruiter").into_iter().filter(|(within, _)| *within == Some(command));
    let on_command_line = |arg: &Arg| {
        let flag = format!("--{}", arg.get_long().unwrap());
        if matches!(arg.get_action(), ArgAction::SetTrue) { flag } else { format!("{flag}={}", samples(arg)[2].1) }
    };
    let flags: Vec<String> = flags.map(|(_, arg)| on_command_line(&arg)).collect();
    let read = |file: &str, flags: &[String]| {
        let words =
            ["recruiter", command, "--settings", file, "--log=info", "--log-format=text", "--connect-timeout=1s"].map(str::to_owned);
        let config = recruiter::cli::configured(words.into_iter().chain(flags.iter().cloned()).map(Into::into)).unwrap();
        format!("{config:?}").replace(file, "")
    };
    assert_eq!(read(&file, &flags), read("/dev/null", &flags));
    for flag in &flags {
        let others: Vec<String> = flags.iter().filter(|other| *other != flag).cloned().collect();
        assert_ne!(read(&file, &others), read("/dev/null", &others), "{flag} is not read from the file");
    }
}

/// Each message says where, what, and what to do. The value of a secret is not in it.
#[test]
fn a_wrong_file_says_where_and_what_to_do() {
    let wrong = |program: &str, text: &[u8], expected: &[&str]| {
        let (_directory, file) = written(text);
        let needed: &[&str] = if program == "recruiter" { &["run"] } else { &[] };
        let started = run(program, &[needed, &["--settings", &file]].concat(), &[]);
        let checked = check(program, &["--settings", &file], &[]);
        for said in [started, checked] {
            assert_eq!((said.code, said.out.as_str()), (78, ""), "{}", said.err);
            let lines: Vec<&str> = said.err.lines().collect();
            assert_eq!(lines.len(), expected.len(), "{}", said.err);
            for (line, expected) in lines.iter().zip(expected) {
                let begin = format!("{program}: {file}:");
                assert!(line.strip_prefix(&begin).is_some_and(|rest| rest.starts_with(expected)), "{line}\nis not {expected}");
            }
            assert!(!said.err.contains("secret"), "{}", said.err);
        }
    };
    wrong("recruiter", b"[run]\npol = \"1s\"\n", &["2:1: unknown key `pol`: did you mean `poll`?"]);
    wrong("recruiter", b"connect_timeout = \"1s\"\n", &["1:1: unknown key `connect_timeout`: did you mean `connect-timeout`?"]);
    wrong("recruiter", b"poll = \"1s\"\n", &["1:1: `poll` belongs below the line [run]"]);
    wrong("recruiter", b"[run]\nlog = \"info\"\n", &["2:1: `log` belongs above the line [run]"]);
    wrong("recruiter", b"run = 5\n", &["1:1: `run` is a table: write [run]"]);
    wrong("recruiter", b"[jobs.list]\nlimit = 5\n", &["1:2: unknown key `jobs`; the keys here are collection-prefix, connect-timeout, "]);
    wrong("recruiter", b"settings = \"x\"\n", &["1:1: `settings` cannot be in a file"]);
    wrong(
        "recruiter",
        b"log = 5\nuri = 7\n[run]\npoll = 1\n",
        &["1:7: `log` is a text in quotes", "2:7: `uri` is a text", "4:8: `poll` is a"],
    );
    wrong("recruiter", b"log-format = \"xml\"", &["1:14: `log-format`: `xml`: write one of text, json"]);
    wrong("recruiter", b"[run]\nhints-address = \"x\"", &["2:17: `hints-address`: `x`: "]);
    wrong("recruiter", b"uri = [\"mongodb://u:secret@h\"]", &["1:7: `uri` is a text in quotes, and not of the type array"]);
    wrong("recruiter", b"uri = \"mongodb://u:secret@h\"\nuri = \"\"", &["2:1: duplicate key"]);
    wrong("recruiter", b"uri = \"mongodb://u:secret@h\n", &["1:"]);
    wrong("recruiter", b"log = \"info\"\nuri = \"\xff\"", &["2:8: this is no UTF-8: save the file as UTF-8"]);
    wrong("recruiter-worker", b"concurrency = 0\n", &["1:15: `concurrency`: `0`: 0 is not in 1..=10000"]);
    wrong("recruiter-worker", b"concurrency = 2.5\n", &["1:15: `concurrency` is a whole number, and not of the type float"]);
    wrong("recruiter-worker", b"builtins = \"perhaps\"\n", &["1:12: `builtins`: `perhaps`: "]);
    wrong("recruiter-worker", b"builtins = 1\n", &["1:12: `builtins` is true or false"]);
    wrong("recruiter-worker", b"work-on = [\"a\", \"b,c\"]\n", &["1:17: `work-on`: an entry of a list cannot contain `,`"]);
    wrong("recruiter-worker", b"work-on = [\"a\", \"\"]\n", &["1:17: `work-on`: ``: a name is empty"]);
    wrong("recruiter-worker", b"work-on = [1]\n", &["1:12: `work-on` is a text in quotes, or a list of texts"]);
    wrong("recruiter-worker", b"check-config = true\n", &["1:1: `check-config` cannot be in a file"]);
    wrong("recruiter-worker", b"[run]\npoll = \"1s\"\n", &["1:2: unknown key `run`"]);
    wrong("recruiter-cleaner", b"keep = [\"mail\"]\n", &["1:9: `keep`: `mail`: write it like mail=1d"]);
    wrong(
        "recruiter-cleaner",
        b"every = \"soon\"\nkep = \"\"\n",
        &["1:9: `every`: `soon`: ", "2:1: unknown key `kep`: did you mean `keep`?"],
    );
}

#[test]
fn a_file_that_cannot_be_read_is_an_error_if_it_was_named() {
    let directory = tempfile::tempdir().unwrap();
    let large = directory.path().join("large.toml");
    fs::File::create(&large).unwrap().set_len(17 * 1024 * 1024).unwrap();
    for (path, why) in
        [(Path::new("/nowhere/a.toml"), "No such file"), (directory.path(), "Is a directory"), (&large, "larger than 16 MiB")]
    {
        for program in PROGRAMS {
            let said = check(program, &["--settings", path.to_str().unwrap()], &[]);
            assert_eq!(said.code, 78, "{}", said.err);
            let begin = format!("{program}: cannot read the settings `{}`: ", path.display());
            assert!(said.err.starts_with(&begin) && said.err.contains(why), "{}", said.err);
        }
        // A command of a person ends as well, and by the variable too. The help does not need the file.
        let named = [("RECRUITER_SETTINGS", path.to_str().unwrap())];
        assert_eq!(run("recruiter", &["jobs", "list"], &named).code, 78);
        assert_eq!(run("recruiter", &["jobs", "list", "--help"], &named).code, 0);
    }
}

#[test]
fn a_password_is_never_shown() {
    let uri = "mongodb://ada:se-cret@h/jobs?authMechanismProperties=TOKEN:se-cret";
    let (_directory, file) = written(format!("uri = \"\"\"{uri}\n\"\"\"\n"));
    let shown = "mongodb://ada:****@h/jobs?authMechanismProperties=****";
    for program in PROGRAMS {
        let ask: [&[&str]; 2] = if program == "recruiter" {
            [&["config", "show"], &["config", "show", "--json"]]
        } else {
            [&["--show-config"], &["--show-config", "--json"]]
        };
        for ask in ask {
            for (args, env) in [
                (vec!["--settings", &file], vec![]),
                (vec!["--settings", "/dev/null"], vec![("MONGODB_URI", uri)]),
                (vec!["--settings", "/dev/null", "--uri", uri], vec![]),
            ] {
                let said = run(program, &[ask, &args].concat(), &env).succeeded();
                assert!(said.out.contains(shown) && !format!("{}{}", said.out, said.err).contains("se-cret"), "{}{}", said.out, said.err);
            }
        }
        // The defaults of the help are those of the program.
        let help = run(program, &["--help", "--settings", &file], &[("MONGODB_URI", uri)]).out;
        assert!(!help.contains("se-cret"), "{help}");
        let (_directory, file) = written("uri = \"mongodb://ada:se-cret@h/jobs\"\n");
        let clean = check(program, &["--settings", &file], classes(program)).succeeded();
        assert_eq!((clean.out, clean.err), (format!("{file} is right\n"), String::new()));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        let open = check(program, &["--settings", &file], classes(program)).succeeded();
        let warns = open.err.contains(&format!("{file}:1: other users may read the password in it"));
        assert!(warns && !open.err.contains("se-cret"), "{}", open.err);
    }
    // Also in the log of a program that starts.
    let (_directory, file) = written("uri = \"mongodb://ada:se-cret@127.0.0.1:1/jobs\"\nconnect-timeout = \"1ms\"\n");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let said = run("recruiter", &["jobs", "list", "--settings", &file], &[]);
    assert_eq!(said.code, 69, "{}", said.err);
    assert!(said.err.contains("other users may read the password") && !said.err.contains("se-cret"), "{}", said.err);
}

#[test]
fn a_check_says_all_that_is_wrong_and_needs_no_mongodb() {
    let directory = tempfile::tempdir().unwrap();
    let workables = directory.path().join("workables.toml");
    fs::write(&workables, "[workables.a]\ncommand = [\"no-such-program\"]\n").unwrap();
    let (_directory, cleaner) = written("every = \"1m\"\n");
    let (_directory, worker) = written(format!("config = {workables:?}\nlog = \"loud\"\nheartbeat = \"1m\"\n"));
    let (_directory, recruiter) = written("uri = \"mongodb://h/x?tlsCAFiles=x\"\ncollection-prefix = \"5\"\n[run]\npoll = \"1m\"\n");
    for (program, file, env, expected) in [
        ("recruiter-cleaner", &cleaner, [("RECRUITER_X", "")], vec!["--dead-after (30s) must be at least three polls"]),
        ("recruiter-cleaner", &cleaner, [("RECRUITER_DEAD_AFTER", "soon")], vec!["RECRUITER_DEAD_AFTER: invalid value 'soon'"]),
        ("recruiter-worker", &worker, [("RECRUITER_X", "")], vec!["`loud` is not a level", "no-such-program"]),
        (
            "recruiter",
            &recruiter,
            [("RECRUITER_X", "")],
            vec!["the option `tlsCAFiles`", "--lease must be at least 1s and at least three times --poll"],
        ),
        ("recruiter", &recruiter, [("RECRUITER_LEASE", "soon")], vec!["the option `tlsCAFiles`", "RECRUITER_LEASE: invalid value 'soon'"]),
    ] {
        let said = check(program, &["--settings", file], &env);
        assert_eq!((said.code, said.out.as_str()), (78, ""), "{}", said.err);
        for expected in &expected {
            assert_eq!(said.err.lines().filter(|line| line.contains(expected)).count(), 1, "{expected} is not in\n{}", said.err);
        }
        assert_eq!(said.err.lines().count(), expected.len(), "{}", said.err);
        assert!(said.err.lines().all(|line| line.starts_with(&format!("{program}: "))), "{}", said.err);
    }
    let json = run("recruiter", &["check-config", "--json", "--settings", &recruiter], &[]);
    let object: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!((json.code, &object["right"], object["problems"].as_array().unwrap().len()), (78, &Value::Bool(false), 2));
    // A wrong flag is a wrong call.
    assert_eq!(check("recruiter", &["--no-such-flag"], &[]).code, 2);
    // What is asked last is answered, and the workables are right.
    fs::write(&workables, "[workables.a]\ncommand = [\"true\"]\n").unwrap();
    let (_directory, file) = written(format!("config = {workables:?}\n"));
    assert_eq!(check("recruiter-worker", &["--settings", &file], &[]).succeeded().out, format!("{file} is right\n"));
}

/// An example as it comes, and with all its keys.
#[test]
fn the_examples_are_right() {
    let directory = tempfile::tempdir().unwrap();
    let made = Command::new(binary("recruiter-dev")).arg("package-files").arg(directory.path()).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    for program in PROGRAMS {
        let name = program.strip_prefix("recruiter-").unwrap_or(program);
        let text = fs::read_to_string(directory.path().join(format!("examples/{name}.toml"))).unwrap();
        let is_key = |line: &str| line.starts_with('#') && !line.starts_with("# ");
        let used: String = text.lines().map(|line| format!("{}\n", if is_key(line) { &line[1..] } else { line })).collect();
        let keys: BTreeSet<&str> =
            used.lines().filter_map(|line| line.split_once(" = ")).map(|(key, _)| key).filter(|key| !key.starts_with('#')).collect();
        let all = settings(program);
        assert_eq!(keys, all.iter().map(|(_, arg)| arg.get_long().unwrap()).collect::<BTreeSet<_>>(), "{program}");
        for text in [&text, &used] {
            let (_directory, file) = written(text);
            assert_eq!(check(program, &["--settings", &file], classes(program)).succeeded().out, format!("{file} is right\n"));
        }
    }
}

/// The blocks of TOML in the section of the page, each of which begins with the name of its file.
#[test]
fn the_examples_of_the_page_are_right() {
    let page = fs::read_to_string(root().join("docs/operating.md")).unwrap();
    let section = page.split_once("\n## Configuration\n").unwrap().1.split("\n## ").next().unwrap().to_owned();
    let mut found = 0;
    for block in section.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()) {
        let name = block.lines().next().and_then(|line| line.strip_prefix("# /etc/recruiter/")).unwrap().trim_end_matches(".toml");
        let program = if name == "recruiter" { name.to_owned() } else { format!("recruiter-{name}") };
        let (_directory, file) =
            written(block.replace("/etc/recruiter/workables.toml", root().join("systemd/workables.toml").to_str().unwrap()));
        check(&program, &["--settings", &file], &[]).succeeded();
        found += 1;
    }
    assert_eq!(found, 3);
}

/// All three programs do what their files say.
#[tokio::test(flavor = "multi_thread")]
async fn the_programs_run_by_their_files() {
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| -> PathBuf {
        let path = directory.path().join(name);
        fs::write(&path, format!("uri = \"{}\"\ncollection-prefix = \"of_file_\"\n{text}", database.uri())).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    };
    let workables = directory.path().join("workables.toml");
    fs::write(&workables, "[workables.of-file]\ncommand = [\"true\"]\n").unwrap();
    let files = [
        ("recruiter", "RECRUITER_SETTINGS", file("recruiter.toml", "log-format = \"json\"\n[run]\npoll = \"300ms\"\nlease = \"5s\"\n")),
        (
            "recruiter-worker",
            "RECRUITER_WORKER_SETTINGS",
            file("worker.toml", &format!("config = {workables:?}\nbuiltins = true\nconcurrency = 3\nwork-on = [\"mail \", \"reports\"]\n")),
        ),
        (
            "recruiter-cleaner",
            "RECRUITER_CLEANER_SETTINGS",
            file("cleaner.toml", "keep-archived = \"9d\"\nkeep = [\"mail=1d\", \"a=2d\"]\n"),
        ),
    ];
    let started: Vec<Process> = files
        .iter()
        .map(|(program, variable, file)| {
            let args: &[&str] = if *program == "recruiter" { &["run"] } else { &[] };
            Process::start(program, args, &[(variable, file.to_str().unwrap())])
        })
        .collect();
    let registered = async || database.raw("of_file_roster").find_one(doc! { "capacity": 3 }).await.unwrap().is_some();
    wait_until(SOON, "the worker registers with the slots of its file", registered).await;
    let worker = database.raw("of_file_roster").find_one(doc! {}).await.unwrap().unwrap();
    assert_eq!(worker.get_array("work_on").unwrap(), &["mail".into(), "reports".into()]);
    let prefixed = (*store(&database).await).clone().with_collection_prefix("of_file_").unwrap();
    for class in ["of-file", "noop"] {
        NewJob::of_class(class, doc! {}).in_group("mail").enqueue(&prefixed).await.unwrap();
    }
    let done = async || database.raw("of_file_archived").count_documents(doc! { "why": "done" }).await.unwrap() == 2;
    wait_until(SOON, "both jobs are done", done).await;
    wait_until(SOON, "the recruiter logs JSON", async || started[0].stderr().lines().any(|line| line.starts_with('{'))).await;
    let noted = async || database.raw("of_file_metadata").find_one(doc! { "keeps": { "$regex": "9d.*mail" } }).await.unwrap().is_some();
    wait_until(SOON, "the cleaner notes its periods", noted).await;
}

/// In `/etc`, of which the programs get another one here.
#[test]
fn the_usual_file_is_read_and_one_that_may_not_be_read_stops_the_services() {
    // Root without the right to read everything.
    const USER: &str = "setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-all --";
    let script = |then: &str| format!("mount -t tmpfs none /etc && mkdir /etc/recruiter && cd /etc/recruiter && {then}");
    if !can_run(&["unshare", "--mount", "sh", "-c", &script(&format!("{USER} true"))]) {
        return;
    }
    let inside = |then: &str, program: &str| {
        let mut command = Command::new("unshare");
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RECRUITER_")) {
            command.env_remove(name);
        }
        command.env_remove("MONGODB_URI").args(["--mount", "sh", "-c", &script(then)]).arg(binary(program));
        Said::of(command.output().unwrap())
    };
    let said =
        inside("echo 'keep-archived = \"9d\"' >cleaner.toml && \"$0\" --show-config | grep keep-archived", "recruiter-cleaner").succeeded();
    assert_eq!(said.out.split_whitespace().collect::<Vec<_>>(), ["keep-archived", "9d", "/etc/recruiter/cleaner.toml:1"]);
    let said =
        inside("echo 'keep-archived = \"9d\"' >other.toml && \"$0\" --show-config | grep keep-archived", "recruiter-cleaner").succeeded();
    assert_eq!(said.out.split_whitespace().collect::<Vec<_>>(), ["keep-archived", "5d", "default"]);
    for (program, file, args) in
        [("recruiter-cleaner", "cleaner", ""), ("recruiter-worker", "worker", "--builtins"), ("recruiter", "recruiter", "run")]
    {
        let said = inside(
            &format!("echo 'log = \"info\"' >{file}.toml && chmod 0 {file}.toml && {USER} \"$0\" {args} --connect-timeout 1ms"),
            program,
        );
        assert_eq!(said.code, 78, "{}", said.err);
        assert!(said.err.contains(&format!("cannot read the settings `/etc/recruiter/{file}.toml`: Permission denied")), "{}", said.err);
    }
    let listed = format!(
        "echo x >recruiter.toml && chmod 0 recruiter.toml && {USER} \"$0\" jobs list --uri mongodb://127.0.0.1:1/x --connect-timeout 1ms"
    );
    let said = inside(&listed, "recruiter");
    assert_eq!(said.code, 69, "{}", said.err);
    assert!(said.err.contains("/etc/recruiter/recruiter.toml exists, and this user may not read it"), "{}", said.err);
}
