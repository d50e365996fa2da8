"""Jobs per second of a Python program that does nothing: a process for each job, and long-lived processes.

    cargo build --release --workspace
    python3 tests/bench/programs.py target/release

Needs no package: it starts an embedded MongoDB, a recruiter and one worker by `recruiter dev`, enqueues the jobs of one class, and waits
until none is left. The number of slots, and so of processes, is the same in both modes.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

SLOTS = int(os.environ.get("SLOTS", "4"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
HERE = pathlib.Path(__file__).resolve()
CLIENT = HERE.parents[2] / "worker/clients/python"

APP = """
from recruiter_jobs import job, run

@job("long-lived")
def nothing(parameters, job):
    pass

run()
"""

WORKABLES = """
[workables.per-job]
command = ['{python}', "-c", "pass"]

[workables.long-lived]
command = ['{python}', "app.py"]
mode = "long-lived"
env = {{ PYTHONPATH = '{client}' }}
"""


def main(binaries: str) -> None:
    recruiter = str(pathlib.Path(binaries).resolve() / "recruiter")
    with tempfile.TemporaryDirectory() as name:
        home = pathlib.Path(name)
        (home / "app.py").write_text(APP)
        (home / "workables.toml").write_text(WORKABLES.format(client=CLIENT, python=sys.executable))
        command = [recruiter, "dev", "--json", "--workers", "1", "--data-dir", str(home / "data")]
        command += ["--worker-config", str(home / "workables.toml")]
        environment = {**os.environ, "RECRUITER_CONCURRENCY": str(SLOTS)}
        dev = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True)
        try:
            uri = json.loads(dev.stdout.readline())["uri"]
            ask = lambda *words: subprocess.run([recruiter, "--uri", uri, *words], check=True, capture_output=True, text=True).stdout
            rates = {"per-job": [], "long-lived": []}
            for _ in range(ROUNDS):
                for name, jobs in (("per-job", 300), ("long-lived", 20_000)):
                    rates[name].append(rate(ask, home, name, jobs))
                    print(f"{name}: {rates[name][-1]:.0f} jobs/s", flush=True)
            median = {name: sorted(of)[len(of) // 2] for name, of in rates.items()}
            print(f"{SLOTS} slots, median of {ROUNDS}: {median['per-job']:.0f} and {median['long-lived']:.0f} jobs/s,", end=" ")
            print(f"{median['long-lived'] / median['per-job']:.0f} times as many")
        finally:
            dev.terminate()
            dev.wait()


def rate(ask, home: pathlib.Path, name: str, jobs: int) -> float:
    file = home / "jobs.ndjson"
    file.write_text(f'{{"class": "{name}"}}\n' * jobs)
    began = time.monotonic()
    ask("enqueue", "--from", str(file))
    while ask("jobs", "list", "--class", name, "--state", "scheduled", "--limit", "1", "--json") or ask(
        "jobs", "list", "--class", name, "--state", "running", "--limit", "1", "--json"
    ):
        time.sleep(0.05)
    return jobs / (time.monotonic() - began)


if __name__ == "__main__":
    main(sys.argv[1])
