"""What is known about each system: its version, what it promises, its settings, and how to run it."""

import contextlib
import itertools
import json
import os
import re
import subprocess
from pathlib import Path

from . import install, ordinary, processes
from .servers import Mongo, Postgres, Redis

# A run that takes longer is broken, or its number of jobs is far off.
WITHIN = 300.0  # seconds

# With `--ordinary`: what every system has, besides its best.
TEN_SLOTS = {"processes": ordinary.PROCESSES, "concurrency": ordinary.SLOTS_EACH}


class System:
    """One system. What is measured of it is in `burn_down`, `latency` and `rows`; `server` is what they run on."""

    name: str
    title: str
    server: type
    durability: str  # what a job that was acknowledged, or completed, survives
    kept: str  # what is left of a completed job
    unit = "jobs"
    jobs: int  # so many that a run takes some ten seconds on two cores
    sweep: list  # of settings, the likely best first; the fastest in a short run is what is measured
    latency_settings: dict = {}  # None: it is not measured
    ordinary_sweep: list | None = None  # the same for few slots; None: it is not measured with `--ordinary`
    runtime = None  # what runs it, if it is not a program by itself

    def set_up(self, cache):
        raise NotImplementedError

    def set_up_ordinary(self, cache):
        """Sets up what `rows` needs."""
        self.set_up(cache)

    def version(self):
        raise NotImplementedError

    def burn_down(self, address, jobs, settings):
        raise NotImplementedError

    def latency(self, address, jobs):
        raise NotImplementedError

    def rows(self, server, wanted):
        """Measures ordinary jobs: yields a row for each load, number of jobs and settings that is wanted."""
        raise NotImplementedError


class Recruiter(System):
    name, title, server = "recruiter", "Recruiter", Mongo
    durability = "majority, journaled"
    kept = "archived with its attempts"
    jobs = 50_000
    sweep = [
        {"workers": 2, "concurrency": 1000},
        {"workers": 2, "concurrency": 2000},
        {"workers": 2, "concurrency": 3000},
    ]
    ordinary_sweep = [{"workers": ordinary.PROCESSES, "slots": ordinary.SLOTS_EACH}]
    load = ("--jobs", "jobs_per_second")
    ordinary_flags: tuple[str, ...] = ()

    def set_up(self, _cache):
        self.program = install.recruiter()

    def version(self):
        return subprocess.run([self.program, "--version"], text=True, capture_output=True).stdout.split()[-1]

    def burn_down(self, address, jobs, settings):
        count, rate = self.load
        told = self.bench(address, "burn-down", count, str(jobs), *flags(settings))
        return {
            "jobs_per_second": told[rate],
            "seconds": told["seconds"],
            "enqueued_per_second": told.get("enqueued_per_second"),
            "conditions": told.get("conditions"),
        }

    def latency(self, address, jobs):
        told = self.bench(address, "latency", "--jobs", str(jobs))
        started, archived = told["started_ms"], told.get("archived_ms")
        if archived and archived["p50"] <= started["p50"]:
            raise RuntimeError(f"`recruiter bench latency` tells what cannot be: started {started}, archived {archived}")
        return {"started_ms": started, "archived_ms": archived, "conditions": told.get("conditions")}

    def rows(self, server, wanted):
        """All rows of one command, which takes one number of jobs, the most of a row, and one of settings."""
        loads, jobs, settings = zip(*wanted, strict=True)
        plain = [str(load.ms) for load in loads if not load.long_ms]
        long = max(load.long_ms for load in loads)
        arguments = ["--durations", ",".join(plain), "--long", str(long), "--jobs", str(max(jobs)), *flags(settings[0])]
        arguments += self.ordinary_flags
        told = self.bench(server.fresh("ordinary"), "ordinary", *arguments)
        if len(told["rows"]) != len(loads):
            raise RuntimeError(f"`recruiter bench ordinary` has {len(told['rows'])} rows instead of {len(loads)}")
        for row in told["rows"]:
            yield {**row, "conditions": told.get("conditions")}

    def bench(self, address, *arguments):
        # `recruiter bench` takes the address by a variable of its own, so that no measurement uses a database in use.
        uri = {"MONGODB_URI": address, "RECRUITER_BENCH_ON": address}
        return json.loads(command([self.program, "bench", "--json", *arguments], uri).splitlines()[-1])


class RecruiterRepeatable(Recruiter):
    """Jobs that are run again after the death of their worker, as those of all the others are; by default they are not."""

    name, title = "recruiter-repeatable", "Recruiter, repeatable jobs"
    sweep = None
    ordinary_flags = ("--repeatable",)


class RecruiterFailures(RecruiterRepeatable):
    """Of those that succeed nothing is kept, as with graphile-worker."""

    name, title = "recruiter-failures", "Recruiter, repeatable jobs, failures kept"
    kept = "deleted"
    ordinary_flags = ("--repeatable", "--keep-failures")


class RecruiterBundles(Recruiter):
    """Many small pieces of work in one job, which is what one does with pieces that are too small for a job each."""

    name, title, unit = "recruiter-bundles", "Recruiter, bundles of 1000", "items"
    jobs = 1_000_000
    sweep = [{}]
    load = ("--jobs", "items_per_second")
    latency_settings = None
    ordinary_sweep = None
    bundle = 1000

    def burn_down(self, address, jobs, settings):
        return super().burn_down(address, max(1, jobs // self.bundle), {**settings, "items": self.bundle})


class Peer(System):
    """A system whose processes speak the lines of `harness.mjs`."""

    config: dict = {}
    databases = itertools.count()  # each row has a new one

    def at(self, address):
        return {"url": address}

    def started(self, role, config):
        raise NotImplementedError

    def burn_down(self, address, jobs, settings, counted=None):
        config = {**self.at(address), **self.config, **settings}
        with self.started("fill", {**config, "jobs": jobs}) as producer:
            filled = producer.hear("filled", WITHIN)
        with contextlib.ExitStack() as stack:
            count = settings["processes"]
            workers = [stack.enter_context(self.started("work", config)) for _ in range(count)]
            for worker in workers:
                worker.hear("ready", processes.READY_WITHIN)
            completed, seconds = processes.burn_down(workers, jobs, WITHIN, counted)
        return {
            "jobs_per_second": completed / seconds,
            "seconds": seconds,
            "enqueued_per_second": jobs / filled["seconds"],
        }

    def latency(self, address, jobs):
        config = {**self.at(address), **self.config, **self.latency_settings, "trace": True}
        with self.started("work", config) as worker, self.started("drip", config) as producer:
            for process in (worker, producer):
                process.hear("ready", processes.READY_WITHIN)
            worker.tell(go=True)
            worker.hear("started", processes.READY_WITHIN)
            return processes.latency(producer, worker, jobs)

    def rows(self, server, wanted):
        """Each row on a database of its own, with processes of its own."""
        for load, jobs, settings in wanted:
            config = {**settings, "ms": load.ms, "longMs": load.long_ms}
            address = server.fresh(f"ordinary{next(self.databases)}")
            run = Peer.burn_down(self, address, jobs, config, load.counted(jobs))
            yield {"job": str(load), "jobs": jobs, **run}


class River(Peer):
    name, title, server = "river", "River for Rust", Postgres
    durability = "fsync on, synchronous commit"
    kept = "kept for a day"
    crate = "0.5.0"
    config = {"fetchPollIntervalMs": 20}  # as in its own benchmark; default 1 s
    jobs = 50_000
    sweep = [
        {"max-workers": 2000, "max-connections": 50},  # the defaults of its own benchmark
        {"max-workers": 500, "max-connections": 20},
        {"max-workers": 2000, "max-connections": 20},
        {"max-workers": 5000, "max-connections": 20},
    ]
    latency_settings = {"concurrency": 10, "fetchCooldownMs": 2, "connections": 10}
    ordinary_sweep = [
        {**TEN_SLOTS, "fetchCooldownMs": 1, "connections": 10},  # the shortest that it takes
        {**TEN_SLOTS, "fetchCooldownMs": 2, "connections": 10},  # as in its own benchmark
    ]

    def set_up(self, cache):
        self.set_up_ordinary(cache)
        self.program = cache.crate("riverqueue-cli", self.crate, "riverqueue")

    def set_up_ordinary(self, cache):
        install.debian("postgres", "postgresql", Postgres.places)
        self.single = cache.package("river")

    def version(self):
        return self.crate

    def started(self, role, config):
        return processes.talking([self.single, role, json.dumps(config)])

    def burn_down(self, address, jobs, settings):
        command([self.program, "migrate-up", "--database-url", address])
        arguments = ["bench", "--database-url", address, "--num-total-jobs", str(jobs), *flags(settings)]
        output = command([self.program, *arguments])
        # bench: total jobs worked [ 50000 ], …, overall job/sec [ 9999.9 ], p95 [ … ], running 5.0s
        told = re.search(r"total jobs worked \[\s*(\d+) \].*overall job/sec \[\s*([\d.]+) \]", output)
        if told is None or int(told[1]) != jobs:
            raise RuntimeError(f"River's benchmark did not end as expected:\n{output[-500:]}")
        return {"jobs_per_second": float(told[2]), "seconds": jobs / float(told[2]), "enqueued_per_second": None}


class NodeSystem(Peer):
    program: str  # a file beside this one
    package: str

    def set_up(self, cache):
        self.node, version, self.directory = cache.node()
        self.runtime = f"Node.js {version}"
        self.version_of = cache.node_version

    def version(self):
        return self.version_of(self.package)

    def started(self, role, config):
        return processes.talking([self.node, self.program, role, json.dumps(config)], cwd=self.directory)


class BullMq(NodeSystem):
    name, title, server = "bullmq", "BullMQ", Redis
    durability = "everysec: the last second may be lost"
    kept = "kept"
    program, package = "bullmq.mjs", "bullmq"
    jobs = 50_000
    sweep = [
        {"processes": 2, "concurrency": 100},
        {"processes": 1, "concurrency": 100},
        {"processes": 1, "concurrency": 500},
        {"processes": 2, "concurrency": 500},
        {"processes": 4, "concurrency": 100},
    ]
    latency_settings = {"concurrency": 1}
    ordinary_sweep = [TEN_SLOTS]

    def set_up(self, cache):
        install.debian("redis-server", "redis-server")
        super().set_up(cache)

    def at(self, address):
        return address


class GraphileWorker(NodeSystem):
    name, title, server = "graphile-worker", "graphile-worker", Postgres
    durability = "fsync on, synchronous commit"
    kept = "deleted"
    program, package = "graphile-worker.mjs", "graphile-worker"
    config = {"pollInterval": 100}  # only the safety net of NOTIFY; default 2 s
    jobs = 50_000
    sweep = [
        {"processes": 2, "concurrency": 24, "batch": 500},  # as in its own performance test
        {"processes": 1, "concurrency": 24, "batch": 500},
        {"processes": 4, "concurrency": 24, "batch": 500},
        {"processes": 2, "concurrency": 100, "batch": 1000},
        {"processes": 4, "concurrency": 10, "batch": 0},
    ]
    latency_settings = {"concurrency": 1, "batch": 0}
    ordinary_sweep = [
        # Jobs that a process fetches at a time; its slots run them one by one. If it is killed, they wait for four hours.
        {**TEN_SLOTS, "batch": 500},
        {**TEN_SLOTS, "batch": 50},
        {**TEN_SLOTS, "batch": 11},  # one more than the slots, as its documentation advises
        {**TEN_SLOTS, "batch": 0},
    ]

    def set_up(self, cache):
        install.debian("postgres", "postgresql", Postgres.places)
        super().set_up(cache)


class Keuss(NodeSystem):
    server = Mongo
    durability = "majority, journaled"
    kept = "deleted"
    program, package = "keuss.mjs", "keuss"
    jobs = 5_000
    sweep = [
        {"processes": 2, "concurrency": 20},
        {"processes": 1, "concurrency": 20},
        {"processes": 1, "concurrency": 5},
        {"processes": 4, "concurrency": 20},
        {"processes": 2, "concurrency": 100},
    ]
    latency_settings = {"concurrency": 1}


class KeussSimple(Keuss):
    name, title, config = "keuss-simple", "Keuss, simple", {"backend": "mongo"}


class KeussPipeline(Keuss):
    name, title, config = "keuss-pipeline", "Keuss, pipeline", {"backend": "pl-mongo"}


class KeussBucket(Keuss):
    name, title, config = "keuss-bucket", "Keuss, bucket", {"backend": "bucket-mongo-safe"}
    durability = "acknowledged up to 0.5 s before it is written; a killed process loses or repeats jobs"
    jobs = 300_000
    sweep = [
        {"processes": 1, "concurrency": 20},
        {"processes": 2, "concurrency": 20},
        {"processes": 1, "concurrency": 100},
        {"processes": 2, "concurrency": 100},
        {"processes": 4, "concurrency": 20},
    ]
    # A job waits in its bucket for others, by default half a second: not when its latency matters.
    latency_settings = {"concurrency": 1, "options": {"bucket_max_wait": 1}}


class Agenda(NodeSystem):
    name, title, server = "agenda", "Agenda", Mongo
    durability = "majority, journaled"
    kept = "kept"
    program, package = "agenda.mjs", "agenda"
    jobs = 2_000
    sweep = [
        {"processes": 1, "concurrency": 100, "lockLimit": 0, "processEvery": 20},
        {"processes": 1, "concurrency": 100, "lockLimit": 100, "processEvery": 20},
        {"processes": 2, "concurrency": 100, "lockLimit": 100, "processEvery": 20},
        {"processes": 4, "concurrency": 100, "lockLimit": 100, "processEvery": 20},
        {"processes": 1, "concurrency": 500, "lockLimit": 0, "processEvery": 200},
        {"processes": 1, "concurrency": 100, "lockLimit": 100, "processEvery": 20, "changeStream": True},
    ]
    latency_settings = {"concurrency": 1, "processEvery": 100, "changeStream": True}


ALL = [
    Recruiter,
    RecruiterRepeatable,
    RecruiterFailures,
    RecruiterBundles,
    River,
    BullMq,
    GraphileWorker,
    KeussSimple,
    KeussPipeline,
    KeussBucket,
    Agenda,
]


def flags(settings):
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def command(words, env=None):
    """Runs a program to its end; what it wrote to standard output."""
    words = [str(word) for word in words]
    process = subprocess.Popen(
        words,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=WITHIN)
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        raise
    if process.returncode != 0:
        last = "\n".join((err or out).strip().splitlines()[-8:])
        raise RuntimeError(f"`{Path(words[0]).name} {words[1]}` failed:\n{last}")
    return out
