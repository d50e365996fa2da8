//! Man pages, and the scripts by which shells complete commands.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Command, Output},
};

use recruiter_tests::processes::{binary, skipped};

fn output(command: &mut Command) -> Output {
    command.stdin(std::process::Stdio::null()).output().unwrap()
}

/// A check by a program that not every machine has.
fn checked_by(program: &str, arguments: &[&str], file: &Path) {
    let mut check = Command::new(program);
    let checked = match check.args(arguments).arg(file).env("MANWIDTH", "100").output() {
        Ok(checked) => checked,
        Err(_) => return skipped(&format!("{program} is not installed")),
    };
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert!(checked.status.success() && said.is_empty(), "{program} {}: {said}", file.display());
}

/// The long flags in a text.
fn flags(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    words.filter(|word| word.starts_with("--") && word.len() > 2).collect()
}

#[test]
fn each_program_has_man_pages_and_completes_its_flags() {
    let directory = tempfile::tempdir().unwrap();
    let made = output(Command::new(binary("recruiter-dev")).arg("package-files").arg(directory.path()));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let read = |path: &str| fs::read_to_string(directory.path().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    for program in ["recruiter", "recruiter-worker", "recruiter-cleaner"] {
        for (shell, script) in [("bash", format!("{program}.bash")), ("zsh", format!("_{program}")), ("fish", format!("{program}.fish"))] {
            checked_by(shell, &["-n"], &directory.path().join("completions").join(script));
        }
        let script = read(&format!("completions/{program}.bash"));
        let help = output(Command::new(binary(program)).arg("--help")).stdout;
        let help = String::from_utf8(help).unwrap();
        // The first words of the lines about flags.
        let own: String = help
            .lines()
            .map(str::trim)
            .filter(|line| line.starts_with('-') && !line.contains("--version"))
            .map(|line| format!("{line}\n"))
            .collect();
        let missing: Vec<_> = flags(&own).difference(&flags(&script)).copied().collect();
        assert!(missing.is_empty(), "{program} does not complete {missing:?}");
        let page = read(&format!("man/{program}.1")).replace("\\-", "-").replace("\\fB", " ").replace("\\fR", " ");
        let missing: Vec<_> = flags(&own).difference(&flags(&page)).copied().collect();
        assert!(missing.is_empty(), "the page of {program} is without {missing:?}");
        assert!(page.contains("Exit codes") && page.contains("MONGODB_URI"), "{program}");
    }
    let pages: Vec<_> = fs::read_dir(directory.path().join("man")).unwrap().map(|page| page.unwrap().path()).collect();
    for page in &pages {
        checked_by("man", &["--warnings", "--local-file", "--pager=cat", "--troff-device=utf8"], page);
    }
    let names: BTreeSet<_> = pages.iter().map(|page| page.file_name().unwrap().to_str().unwrap()).collect();
    assert!(names.contains("recruiter-jobs-retry.1") && names.contains("recruiter-completions.1"), "{names:?}");
    assert!(!names.iter().any(|name| name.contains("help") || name.contains("dev") || name.contains("bench")), "{names:?}");
    let written = output(Command::new(binary("recruiter")).args(["completions", "bash"])).stdout;
    assert!(flags(&String::from_utf8(written).unwrap()).contains("--to-group"));
}
