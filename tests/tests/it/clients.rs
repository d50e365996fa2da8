//! The clients for Python and Node as packages: their types, and what a build leaves behind.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use recruiter_tests::{
    cache::{self, run},
    mongosh::{npm, tsc},
};

/// The packages of mypy and of the build, in versions without machine code, and their checksums.
const PACKAGES: [&str; 5] = [
    "flit_core==3.12.0 --hash=sha256:e7a0304069ea895172e3c7bb703292e992c5d1555dd1233ab7b5621b5b69e62c",
    "mypy==1.18.2 --hash=sha256:22a1748707dd62b58d2ae53562ffc4d7f8bcc727e8ac7cbc69c053ddc874d47e",
    "mypy_extensions==1.1.0 --hash=sha256:1be4cccdb0f2482337c4743e60421de3a356cd97508abadd57d47403e94f5505",
    "pathspec==0.12.1 --hash=sha256:a0d503e138a4c123b27490a4f7beda6a01c6f288df0e4a8b79c7eb0dc7b4cc08",
    "typing_extensions==4.15.0 --hash=sha256:f0fa19c6845758ab08074a0cfa8b7aecb71c999ca73d62883bc25cc018c4e548",
];

const PYTHON: &str = r#"
from typing import Any, Dict
from recruiter_jobs import GiveUp, Job, Snooze, job, run

@job("resize")
def resize(parameters: Dict[str, Any], job: Job) -> Dict[str, int]:
    job.progress(1, of=2, text="page")
    job.check()
    if job.cancelled:
        raise GiveUp("no such picture", "NoPicture")
    return {"resized": 1}

@job("later")
async def later(parameters: Dict[str, Any], job: Job) -> None:
    raise Snooze(60, at_most=3)

resize({}, Job.for_tests(attempt=2))
run()

from recruiter_jobs.http import Client, JobFailed, Problem

client = Client("http://127.0.0.1:7420", None, patience=1)
try:
    id: str = client.enqueue("resize", {"names": []}, priority=7)
    number: int = client.enqueue_many({"class": "resize"} for _ in range(3))
    client.wait(id, timeout=60)["resized"]
    client.work(["resize"], resize, groups=["a"], slots=4)
except (Problem, JobFailed) as error:
    print(error.status if isinstance(error, Problem) else error.why)
"#;

const TYPESCRIPT: &str = r"
import { Failed, GiveUp, Job, Snooze, job, run } from 'recruiter-jobs';

job<{ names: string[]; at: Date }>('resize', async ({ names }, job: Job) => {
  job.progress(1, { of: names.length, text: 'page' });
  job.checkpoint({ at: new Date(), row: 5n });
  if (job.cancelled) throw new Snooze(60, 'later', { atMost: 3 });
  return { resized: names.length, at: new Date(), none: undefined };
});
job('nothing', () => { throw new GiveUp('x', { errorClass: 'Y' }); });
const test = Job.forTests({ attempt: 2, lastCheckpoint: { row: 7 } });
test.stop();
const reports: number = test.reported.length;
const failed: Error = new Failed('x', { retryAfter: reports });
console.log(failed);
run();
";

const TYPESCRIPT_HTTP: &str = r"
import { Client, Job, JobFailed, Problem } from 'recruiter-jobs/http';
import { Snooze } from 'recruiter-jobs';

const client = new Client('http://127.0.0.1:7420', undefined, { patience: 1 });
try {
  const id: string = await client.enqueue('resize', { names: ['a'] }, { priority: 7 });
  const many: number = await client.enqueueMany([{ class: 'resize', parameters: { names: [] } }]);
  const resized = await client.wait<{ resized: number }>(id, 60);
  await client.work('resize', async ({ names }: { names: string[] }, job: Job) => {
    if (job.cancelled) throw new Snooze(5);
    return { resized: names.length + many + resized.resized };
  }, { slots: 4 });
} catch (error) {
  console.log(error instanceof Problem ? error.status : (error as JobFailed).why);
}
client.stop();
";

fn clients() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/clients").canonicalize().unwrap()
}

fn python(script: &[&str]) -> Command {
    let tools = cache::installed("python-mypy-1.18.2", |target| PACKAGES.iter().for_each(|package| cache::pip(target, package)));
    let mut python = Command::new("python3");
    python.args(script).env("PYTHONPATH", tools).env("PYTHONDONTWRITEBYTECODE", "1");
    python
}

#[test]
fn programs_and_the_clients_themselves_are_typed() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("app.py"), PYTHON).unwrap();
    let package = clients().join("python/recruiter_jobs");
    let mut mypy = python(&["-m", "mypy", "--strict", "--no-incremental", "app.py"]);
    run(mypy.arg(package).current_dir(directory.path()).env("MYPYPATH", clients().join("python")));

    fs::create_dir(path("node_modules")).unwrap();
    std::os::unix::fs::symlink(clients().join("node"), path("node_modules/recruiter-jobs")).unwrap();
    fs::write(path("app.ts"), TYPESCRIPT).unwrap();
    let flags = ["--strict", "--noEmit", "--target", "es2022", "--module", "commonjs", "--lib", "es2022,dom", "app.ts"];
    run(tsc().args(flags).current_dir(directory.path()));
    fs::write(path("http.mts"), TYPESCRIPT_HTTP).unwrap();
    let flags = ["--strict", "--noEmit", "--target", "es2022", "--module", "node16", "--lib", "es2022,dom", "http.mts"];
    run(tsc().args(flags).current_dir(directory.path()));
}

#[test]
fn a_build_of_the_packages_leaves_nothing_in_the_tree() {
    fn files(path: &Path) -> BTreeSet<PathBuf> {
        let entries = || fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        entries().chain(entries().filter(|entry| entry.is_dir()).flat_map(|entry| files(&entry))).collect()
    }
    let (before, built) = (files(&clients()), tempfile::tempdir().unwrap());
    let built_into = built.path().to_str().unwrap();
    for what in ["wheel", "sdist"] {
        let build = format!("import flit_core.buildapi as build; build.build_{what}('{built_into}')");
        run(python(&["-c", &build]).current_dir(clients().join("python")));
    }
    run(npm().args(["pack", "--silent", "--pack-destination", built_into]).current_dir(clients().join("node")));
    assert_eq!(files(&clients()), before);
    assert_eq!(files(built.path()).len(), 3);
    let wheel = built.path().join("recruiter_jobs-0.1.0-py3-none-any.whl");
    let listed = run(python(&["-m", "zipfile", "-l"]).arg(wheel));
    for file in ["__init__.py", "http.py", "py.typed"] {
        assert!(listed.contains(&format!("recruiter_jobs/{file}")), "{listed}");
    }
    let packed = built.path().join("recruiter-jobs-0.1.0.tgz");
    let listed = run(Command::new("tar").arg("-tzf").arg(packed));
    let files: BTreeSet<&str> = listed.lines().filter_map(|file| file.strip_prefix("package/")).collect();
    assert_eq!(files, BTreeSet::from(["http.d.mts", "http.mjs", "index.d.ts", "index.js", "package.json"]));
}
