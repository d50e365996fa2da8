"""Jobs per second of a Python program that does nothing: a process for each job, and long-lived processes.

    cargo build --release --workspace
    python3 tests/bench/programs.py target/release
    python3 tests/bench/programs.py target/release --celery

Needs no package: it starts an embedded MongoDB, a recruiter and one worker by `recruiter dev`, enqueues the jobs of one class, and waits
until none is left. The number of slots, and so of processes, is the same in both modes. The time of the enqueueing counts.

With --celery, in turns: Celery on Redis with as many processes, tasks without results that are acknowledged when they have ended. Celery
comes by pip into a cache directory, Redis with a package of Debian. All tasks are enqueued before the worker starts, and the clock starts
when it says that it is ready.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True  # nothing is left in the source tree

from peers import install, servers

SLOTS = int(os.environ.get("SLOTS", "4"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
CELERY = "celery[redis]==5.5.3"
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

TASKS = """
from celery import Celery

app = Celery("tasks", broker="{broker}")
app.conf.update(task_ignore_result=True, task_acks_late=True, worker_prefetch_multiplier={prefetch})

@app.task
def nothing():
    pass
"""
# How many tasks each process takes ahead: Celery's default, and many.
PREFETCHES = (4, 64)


def main(binaries: str, *options: str) -> None:
    if set(options) - {"--celery"}:
        sys.exit(__doc__)
    with contextlib.ExitStack() as stack:
        celery = Celery(stack) if options else None
        measure(binaries, celery)


def measure(binaries: str, celery) -> None:
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
            runs = {"per-job": lambda: rate(ask, home, "per-job", 300), "long-lived": lambda: rate(ask, home, "long-lived", 20_000)}
            for prefetch in PREFETCHES if celery else ():
                runs[f"celery, {prefetch} ahead"] = lambda prefetch=prefetch: celery.rate(prefetch, 20_000)
            rates = {name: [] for name in runs}
            for _ in range(ROUNDS):
                for name, run in runs.items():
                    rates[name].append(run())
                    print(f"{name}: {rates[name][-1]:.0f} jobs/s", flush=True)
            print(f"{SLOTS} slots, median of {ROUNDS}:", end=" ")
            print(", ".join(f"{name} {sorted(of)[len(of) // 2]:.0f}" for name, of in rates.items()), "jobs/s")
        finally:
            dev.terminate()
            dev.wait()


def rate(ask, home: pathlib.Path, name: str, jobs: int) -> float:
    file = home / "jobs.ndjson"
    file.write_text(f'{{"class": "{name}"}}\n' * jobs)
    began = time.monotonic()
    ask("enqueue", "--from", str(file))
    while ask("jobs", "list", "--class", name, "--state", "waiting", "--limit", "1", "--json") or ask(
        "jobs", "list", "--class", name, "--state", "running", "--limit", "1", "--json"
    ):
        time.sleep(0.05)
    return jobs / (time.monotonic() - began)


class Celery:
    """Celery and a Redis for it."""

    def __init__(self, stack):
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"), "recruiter", "bench")
        self.bin = cache / f"celery-{CELERY.rpartition('=')[2]}" / "bin"
        if not (self.bin / "celery").exists():
            install.run([sys.executable, "-m", "venv", str(self.bin.parent)])
            install.run([str(self.bin / "pip"), "install", "--quiet", CELERY])
        self.redis = stack.enter_context(servers.Redis.running())
        self.home = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def rate(self, prefetch: int, jobs: int) -> float:
        self.redis.ask("FLUSHALL")
        broker = f"redis://127.0.0.1:{self.redis.port}/0"
        (self.home / "tasks.py").write_text(TASKS.format(broker=broker, prefetch=prefetch))
        enqueue = f"import tasks\nfor _ in range({jobs}): tasks.nothing.delay()"
        install.run([str(self.bin / "python"), "-c", enqueue], cwd=self.home)
        command = [str(self.bin / "celery"), "-A", "tasks", "worker", "--pool", "prefork", "--concurrency", str(SLOTS), "--loglevel", "info"]
        command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        log = open(self.home / "log", "w+")
        with servers.child(command, log, cwd=self.home, env={"C_FORCE_ROOT": "1"}):
            while " ready." not in (self.home / "log").read_text():
                time.sleep(0.005)
            began = time.monotonic()
            # Waiting, and delivered but not acknowledged.
            while self.redis.ask("LLEN celery") != ":0" or self.redis.ask("HLEN unacked") != ":0":
                time.sleep(0.05)
            return jobs / (time.monotonic() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
