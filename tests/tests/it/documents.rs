//! The README and the pages in `docs/` are true: links, files, commands, flags, variables, exit codes, classes and fields exist.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use recruiter_common::{
    FinishReason, Reason,
    job::{Settings, Stage},
    retry_policy::RetryPolicies,
};
use recruiter_tests::processes::binary;

use super::tidy::{root, sources};

/// Each document: its path below the root, and its text.
fn documents() -> BTreeMap<PathBuf, String> {
    let pages = fs::read_dir(root().join("docs")).unwrap().map(|page| PathBuf::from("docs").join(page.unwrap().file_name()));
    let found: BTreeMap<PathBuf, String> = pages
        .filter(|path| path != Path::new("docs/images"))
        .chain(["README.md".into(), "CHANGELOG.md".into()])
        .map(|path| (path.clone(), fs::read_to_string(root().join(path)).unwrap()))
        .collect();
    assert!(found.len() > 6 && found.keys().all(|path| path.extension().is_some_and(|extension| extension == "md")), "{:?}", found.keys());
    found
}

fn document(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// Code of a document: the lines of its blocks, and what stands between backticks in its text.
fn code(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (at, part) in text.split("```").enumerate() {
        if at % 2 == 1 {
            found.extend(part.lines().skip(1));
        } else {
            found.extend(part.lines().flat_map(|line| line.split('`').skip(1).step_by(2)));
        }
    }
    found
}

/// The words of some code that are made of these characters.
fn words<'a>(code: &'a str, is_part: impl Fn(char) -> bool + 'a) -> impl Iterator<Item = &'a str> {
    code.split(move |c: char| !is_part(c)).filter(|word| !word.is_empty())
}

/// Cells of the table that comes first after this heading, row by row, without its head.
fn table<'a>(text: &'a str, heading: &str) -> Vec<Vec<&'a str>> {
    let (_, section) = text.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("there is no {heading}"));
    let rows = section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|')).skip(2);
    let rows: Vec<Vec<&str>> = rows.map(|row| row.trim_matches('|').split(" | ").map(str::trim).collect()).collect();
    assert!(!rows.is_empty(), "there is no table after {heading}");
    rows
}

fn help(command: &[&str]) -> String {
    let output = Command::new(binary(command[0])).args(&command[1..]).arg("--help").output().unwrap();
    assert!(output.status.success(), "{command:?} --help: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The help of each command of the three programs.
static HELPS: LazyLock<BTreeMap<Vec<String>, String>> = LazyLock::new(|| {
    let mut found = BTreeMap::new();
    let mut left: Vec<Vec<String>> = ["recruiter", "recruiter-worker", "recruiter-cleaner"].map(|name| vec![name.to_owned()]).into();
    while let Some(command) = left.pop() {
        let text = help(&command.iter().map(String::as_str).collect::<Vec<_>>());
        let listed = text.split_once("Commands:\n").map(|(_, rest)| rest.split("\n\n").next().unwrap().to_owned()).unwrap_or_default();
        let names = listed.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        let names = names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help");
        left.extend(names.map(|name| [command.as_slice(), &[name.to_owned()]].concat()));
        found.insert(command, text);
    }
    assert!(found.len() > 20, "{:?}", found.keys());
    found
});

/// The help text of one flag.
fn said_of(help: &str, flag: &str) -> Option<String> {
    // Text of an option is further to the right.
    let is_option = |line: &str| line.starts_with("      --") || line.starts_with("  -");
    let is_it = |line: &str| is_option(line) && line.split([' ', ',']).any(|word| word == flag);
    let mut lines = help.lines().skip_while(|line| !is_it(line));
    let first = lines.next()?;
    let text = [first].into_iter().chain(lines.take_while(|line| !is_option(line)));
    Some(text.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" "))
}

/// The anchor that a heading has on a page.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase().replace(' ', "-");
    kept.chars().filter(|c| c.is_alphanumeric() || *c == '-' || *c == '_').collect()
}

#[test]
fn every_link_of_the_documents_leads_somewhere() {
    for (page, text) in documents() {
        let home = root().join(&page).parent().unwrap().to_owned();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()).filter(|link| !link.starts_with("https://")) {
            let (path, section) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() { root().join(&page) } else { home.join(path) };
            assert!(target.exists(), "{} points at {link}", page.display());
            if !section.is_empty() {
                let target = fs::read_to_string(target).unwrap();
                let mut headings =
                    target.lines().filter(|line| line.starts_with('#')).map(|line| anchor(line.trim_start_matches(['#', ' '])));
                assert!(headings.any(|heading| heading == section), "{} points at {link}", page.display());
            }
        }
    }
}

#[test]
fn every_reason_why_a_job_waits_and_every_state_is_documented() {
    let limits = document("docs/limits.md");
    let named = |heading| table(&limits, heading).iter().map(|row| row[0].trim_matches('`')).collect::<BTreeSet<_>>();
    assert_eq!(named("## Why does a job wait?"), Reason::ALL.into_iter().map(Reason::name).collect());
    assert_eq!(named("## States of jobs"), Stage::ALL.into_iter().map(Stage::word).collect());
}

#[test]
fn the_fields_and_settings_of_a_job_are_those_of_the_tables() {
    let (every, page) = (serde_json::to_value(Settings::every()).unwrap(), document("docs/protocol.md"));
    let listed = |heading| {
        let names = table(&page, heading).into_iter().flat_map(|row| row[0].split(", "));
        names.map(|name| name.trim_matches(['|', '`', ' '])).collect::<Vec<_>>()
    };
    let settings = listed("### Settings of a job");
    assert_eq!(settings, every.as_object().unwrap().keys().collect::<Vec<_>>());
    let builder = document("common/src/enqueue/new_job.rs");
    settings.iter().for_each(|name| assert!(builder.contains(&format!("self.settings.{name}")), "`NewJob` has no method for {name}"));

    // What reads a job, and what MongoDB checks when one is inserted. The rest is there only while a job runs, or in the archive.
    let (read, checked) = (document("common/src/job/document.rs"), document("common/src/mongo/schema/validators.rs"));
    let part = |text: &str, from: &str| text.split_once(from).unwrap().1.split_once("\n}\n").unwrap().0.to_owned();
    let (read, checked) = (part(&read, "struct JobDocument {\n"), part(&checked, "fn job_properties() -> Document {\n"));
    let later = ["progress", "checkpoint", "log", "result", "result_dropped", "reduced", "retried_as", "retrying"];
    let fields: BTreeSet<&str> = read
        .lines()
        .filter_map(|line| line.trim().split_once(": ").map(|(field, _)| if field == "id" { "_id" } else { field }))
        .chain(checked.lines().filter_map(|line| line.strip_prefix("        \"")?.split_once("\": ").map(|(field, _)| field)))
        .filter(|field| !settings.contains(field))
        .chain(later)
        .collect();
    let listed = listed("### Fields of a job");
    assert_eq!(listed.iter().copied().filter(|field| *field != "its settings").collect::<BTreeSet<_>>(), fields);
    assert!(listed.len() > 35, "{listed:?}");
    let sources: String =
        sources().into_iter().filter(|(path, _)| path.starts_with(root().join("common/src"))).map(|(_, text)| text).collect();
    for field in later {
        assert!(sources.contains(&format!("\"{field}\"")), "nothing in the sources is called {field}");
    }
}

#[test]
fn the_readme_leads_to_every_page() {
    let readme = document("README.md");
    for page in documents().keys().filter(|page| !page.ends_with("README.md")) {
        assert!(readme.contains(&format!("]({})", page.display())), "the README does not lead to {}", page.display());
    }
}

#[test]
fn every_file_that_is_named_exists() {
    let mut named = 0;
    for (page, text) in documents() {
        for path in code(&text).into_iter().filter(|code| {
            let directories = ["common/", "worker/", "recruiter/", "cleaner/", "tests/", "systemd/", "packaging/", "docs/"];
            directories.iter().any(|directory| code.starts_with(directory)) && !code.contains(' ')
        }) {
            assert!(root().join(path).exists(), "{} names {path}", page.display());
            named += 1;
        }
    }
    assert!(named > 8, "only {named} files");
}

/// Rust in a page that the tests do not compile would become untrue without a word.
#[test]
fn every_page_with_rust_is_compiled() {
    let compiled = document("tests/src/lib.rs");
    for (page, text) in documents().into_iter().filter(|(_, text)| text.contains("```rust")) {
        assert!(compiled.contains(&format!("include_str!(\"../../{}\")", page.display())), "{} is not compiled", page.display());
        assert!(!text.contains(concat!("```rust,ign", "ore")), "{}", page.display());
    }
}

/// A line that is copied into the manifest of an application beside a clone of this repository.
#[test]
fn every_dependency_of_the_documents_exists_with_its_features() {
    let mut dependencies = 0;
    for (page, text) in documents() {
        for line in text.split(['`', '\n']).filter(|line| line.starts_with("recruiter-") && line.contains(" = { path = ")) {
            let (name, rest) = line.split_once(" = ").unwrap();
            let crate_path = rest.split('"').nth(1).and_then(|path| path.strip_prefix("../recruiter/"));
            let manifest = document(&format!("{}/Cargo.toml", crate_path.unwrap_or_else(|| panic!("{}: {line}", page.display()))));
            assert!(manifest.contains(&format!("name = \"{name}\"\n")), "{}: {line}", page.display());
            let features = rest.split_once("features = [").map_or("", |(_, features)| features.split(']').next().unwrap());
            for feature in features.split('"').skip(1).step_by(2) {
                assert!(manifest.contains(&format!("\n{feature} = [")), "{}: {line}", page.display());
            }
            dependencies += 1;
        }
    }
    assert!(dependencies > 3, "only {dependencies}");
}

/// Each program is the one of the package of this name.
#[test]
fn what_is_built_for_production_is_what_is_installed() {
    let (page, target) = (document("docs/operating.md"), document("systemd/recruiter.target"));
    let build = page.lines().find(|line| line.trim().starts_with("cargo build --release --locked --bins ")).unwrap();
    let built: BTreeSet<&str> = build.split(" -p ").skip(1).map(|rest| rest.split(' ').next().unwrap()).collect();
    let installed: BTreeSet<&str> = target.split_whitespace().filter_map(|word| word.strip_prefix("../target/release/")).collect();
    assert_eq!(built, installed);
    let worker = document("worker/Cargo.toml");
    let needed = worker.split_once("required-features = [\"").unwrap().1.split('"').next().unwrap();
    assert!(build.ends_with(&format!("--features recruiter-worker/{needed}")), "{build}");
    let (package, manifest) = (document("packaging/deb"), document("recruiter/Cargo.toml"));
    let (_, of_build) = build.split_once(" --bins ").unwrap();
    assert!(package.contains(&format!("cargo build --locked --profile dist --bins {of_build}\n")), "packaging/deb builds something else");
    let packaged = manifest.split('"').filter_map(|text| text.strip_prefix("target/release/"));
    assert_eq!(built, packaged.collect(), "in the package on the right");
}

#[test]
fn every_command_and_flag_of_the_documents_exists() {
    let is_known = |flag: &str| HELPS.values().any(|help| said_of(help, flag).is_some());
    // Flags of other programs.
    let foreign = |code: &str| {
        ["cargo ", "npm ", "systemctl ", "mongosh ", "mongod ", "mongodump ", "mongorestore "].iter().any(|program| code.contains(program))
    };
    let of_others = format!("\"--setParameter\" {}", document("tests/soak"));
    let (mut flags, mut commands) = (0, 0);
    for (page, text) in documents() {
        for code in code(&text).into_iter().filter(|code| !foreign(code)) {
            let code = code.split(" # ").next().unwrap();
            for flag in words(code, |c| c.is_ascii_alphanumeric() || c == '-').filter(|word| word.starts_with("--") && word.len() > 2) {
                assert!(
                    is_known(flag) || of_others.contains(&format!("\"{flag}\"")),
                    "{} names {flag}, which no program has",
                    page.display()
                );
                flags += 1;
            }
            let mut words = code.split_whitespace();
            if words.next() == Some("recruiter") {
                let mut command = vec!["recruiter".to_owned()];
                for word in words.take_while(|word| word.chars().all(|c| c.is_ascii_lowercase() || c == '-') && !word.starts_with('-')) {
                    command.push(word.to_owned());
                }
                // Further words are arguments, if the command has no subcommands.
                let has_subcommands = |command: &[String]| HELPS.get(command).is_none_or(|help| help.contains("Commands:\n"));
                let known = (1..=command.len()).rev().map(|length| &command[..length]).find(|command| HELPS.contains_key(*command));
                let is_known = known.is_some_and(|known| known.len() == command.len() || (known.len() > 1 && !has_subcommands(known)));
                assert!(is_known, "{} names {code}, and there is no {command:?}", page.display());
                commands += 1;
            }
        }
    }
    assert!(flags > 40 && commands > 15, "{flags} flags, {commands} commands");
}

/// A terminal of 80 columns would break it.
#[test]
fn the_examples_of_each_help_fit_into_80_columns() {
    let mut examples = 0;
    for (command, help) in &*HELPS {
        let (_, after) = help.split_once("\nExample").unwrap_or_default();
        for line in after.lines().skip(1).take_while(|line| line.is_empty() || line.starts_with(' ')) {
            assert!(line.chars().count() <= 80, "{command:?}: {line}");
            examples += 1;
        }
    }
    assert!(examples > 30, "only {examples} lines");
}

/// What the README takes from the page about performance.
#[test]
fn the_figures_of_the_readme_are_those_of_the_page_about_performance() {
    let (readme, page) = (document("README.md"), document("docs/performance.md"));
    let (_, section) = readme.split_once("\n## Performance\n").unwrap();
    let section = section.split_once("\n## ").unwrap().0;
    let numbers = |text: &str| -> BTreeSet<String> {
        let parts = text.split(|c: char| !c.is_ascii_digit() && c != ',' && c != '.').map(|part| part.trim_matches([',', '.']));
        parts.filter(|part| part.starts_with(|c: char| c.is_ascii_digit())).map(str::to_owned).collect()
    };
    // The rows of other systems are in the README only.
    let of_ours = section.lines().filter(|line| !line.starts_with('|') || line.starts_with("| **Recruiter**"));
    let (figures, known) = (numbers(&of_ours.collect::<Vec<_>>().join("\n")), numbers(&page));
    let unknown: Vec<&String> = figures.difference(&known).collect();
    assert!(figures.len() > 15 && unknown.is_empty(), "not in docs/performance.md: {unknown:?} of {figures:?}");
}

/// Every setting of the table has its flag, its variable and its default in the help of its program.
#[test]
fn the_settings_are_those_of_the_help() {
    let plain = |cell: &str| cell.split(", ").map(|part| part.trim_matches('`').to_owned()).collect::<Vec<_>>();
    let text = document("docs/operating.md");
    for row in table(&text, "## Settings") {
        let [program, flags, variables, defaults, _] = row.as_slice() else { panic!("{row:?}") };
        let program = plain(program).remove(0);
        let programs = if program == "all" { vec!["recruiter", "recruiter-worker", "recruiter-cleaner"] } else { vec![program.as_str()] };
        for program in programs {
            let help = &HELPS[&program.split(' ').map(str::to_owned).collect::<Vec<_>>()];
            for ((flag, variable), default) in plain(flags).iter().zip(plain(variables)).zip(plain(defaults)) {
                let said = said_of(help, flag).unwrap_or_else(|| panic!("{program} has no {flag}"));
                assert!(said.contains(&format!("[env: {variable}")), "{program} {flag}: {variable} is not in {said}");
                let default = default.replace(' ', "");
                let is_in_help = said.contains(&format!("[default: {default}"));
                let is_none =
                    ["none", "allgroups"].contains(&default.as_str()) && (!said.contains("[default:") || said.contains("[default: none]"));
                assert!(is_in_help || is_none, "{program} {flag}: {default} is not in {said}");
            }
        }
    }
}

#[test]
fn every_variable_that_is_named_is_read_or_set() {
    let sources: String = sources().into_iter().map(|(_, text)| text).chain([document("tests/run")]).collect();
    let mut named = BTreeSet::new();
    let units = fs::read_dir(root().join("systemd")).unwrap().map(|file| fs::read_to_string(file.unwrap().path()).unwrap());
    for text in documents().into_values().chain(units) {
        named.extend(words(&text, |c| c.is_ascii_uppercase() || c == '_').filter(|word| word.starts_with("RECRUITER_")).map(str::to_owned));
    }
    for name in &named {
        assert!(sources.contains(&format!("\"{name}\"")), "nothing in the sources is called {name}");
    }
    assert!(named.len() > 20, "{named:?}");
}

#[test]
fn the_exit_codes_are_those_of_the_help() {
    let text = document("docs/operating.md");
    let listed: BTreeSet<u8> = table(&text, "## Exit codes").iter().map(|row| row[0].parse().unwrap()).collect();
    let help = help(&["recruiter"]);
    let (_, codes) = help.split_once("Exit codes:\n").unwrap();
    let codes: BTreeSet<u8> = codes.lines().map_while(|line| line.split_whitespace().next()?.parse().ok()).collect();
    assert_eq!(listed, codes);
}

#[test]
fn every_finish_reason_and_retry_policy_is_described() {
    let protocol = document("docs/protocol.md");
    for why in FinishReason::BUILT_IN {
        assert!(protocol.contains(&format!("`{why}`")), "the protocol does not name {why}");
    }
    let guide = document("docs/library.md");
    let listed: BTreeSet<&str> = table(&guide, "## Retry policies").iter().map(|row| row[0].trim_matches('`')).collect();
    let known = RetryPolicies::default();
    assert_eq!(listed, known.classes().collect::<BTreeSet<_>>());
}

/// The README claims that no fault lost a job.
#[test]
fn no_row_of_the_failures_has_a_finding() {
    for row in table(&format!("\n{}", document("docs/failures.md")), "# Failures") {
        assert_eq!(row[3..5], ["0", "0"], "{row:?}");
    }
}
