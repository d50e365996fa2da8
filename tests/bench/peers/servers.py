"""The databases under the systems: each started for one measurement, with fresh data, on a free port of loopback."""

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from . import install

READY_WITHIN = 60.0  # seconds; a server that is not ready by then is broken
STOP_WITHIN = 20.0


class Mongo:
    """The mongod that `recruiter dev` starts: one member of a replica set, majority writes, journaled."""

    title = "MongoDB"
    settings = ["--wiredTigerCacheSizeGB", "2", "--setParameter", "minSnapshotHistoryWindowInSeconds=0"]
    conditions = "single-member replica set of `recruiter dev`, " + " ".join(settings) + "; data in a temporary directory"

    @staticmethod
    @contextlib.contextmanager
    def running():
        with temporary() as directory:
            command = [install.recruiter(), "dev", "--workers", "0", "--data-dir", directory, "--json", "--", *Mongo.settings]
            log = open(directory / "dev.log", "w+")
            with child(command, log, stdout=subprocess.PIPE, env={"RECRUITER_LOG": "warn"}) as process:
                line = first_line(process, log)
                yield MongoAt(json.loads(line)["uri"])


class MongoAt:
    def __init__(self, uri):
        self.uri = uri

    def fresh(self, number):
        """The URI of an unused database."""
        address, _, options = self.uri.partition("?")
        return f"{address.rsplit('/', 1)[0]}/bench{number}" + (f"?{options}" if options else "")

    def version(self):
        host, port = self.uri.split("//")[1].split("/")[0].split(",")[0].rsplit(":", 1)
        return ask_mongo_version(host, int(port))


def ask_mongo_version(host, port):
    """`buildInfo` in MongoDB's own wire format, so that the version needs no driver."""
    element = lambda kind, name, value: bytes([kind]) + name.encode() + b"\0" + value
    body = element(0x10, "buildInfo", struct.pack("<i", 1)) + element(0x02, "$db", struct.pack("<i", 6) + b"admin\0")
    document = struct.pack("<i", len(body) + 5) + body + b"\0"
    message = struct.pack("<I", 0) + b"\0" + document
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(struct.pack("<iiii", len(message) + 16, 1, 0, 2013) + message)
        answer = b""
        while len(answer) < 4 or len(answer) < struct.unpack("<i", answer[:4])[0]:
            received = connection.recv(65536)
            if not received:
                break
            answer += received
    _, _, rest = answer.partition(b"\x02version\0")
    return rest[4 : 4 + struct.unpack("<i", rest[:4])[0] - 1].decode() if rest else "unknown"


class Postgres:
    """PostgreSQL as initdb makes it, fsync and synchronous commit on, with as much memory as MongoDB has."""

    title = "PostgreSQL"
    settings = ["-c", "shared_buffers=2GB", "-c", "max_wal_size=4GB"]
    conditions = "settings as initdb makes them, " + " ".join(settings) + "; data in a temporary directory"
    places = ("usr/lib/postgresql/*/bin",)

    @classmethod
    @contextlib.contextmanager
    def running(cls):
        # A link on PATH leads to where the other programs of PostgreSQL are.
        program = install.debian("postgres", "postgresql", cls.places).resolve()
        with temporary() as directory:
            identity = cls.identity(directory)
            data = directory / "data"
            subprocess.run(
                [program.with_name("initdb"), "-D", data, "-U", "bench", "--auth=trust", "--encoding=UTF8", "--no-locale"],
                check=True,
                capture_output=True,
                cwd=directory,
                **identity,
            )
            port = free_port()
            options = ["-c", f"unix_socket_directories={directory}", "-c", "listen_addresses=127.0.0.1"]
            log = open(directory / "postgres.log", "w+")
            command = [program, "-D", data, "-p", str(port), *cls.settings, *options]
            # SIGQUIT is its immediate stop; others wait for connections, or write out data that is deleted next.
            with child(command, log, cwd=directory, stop_by=signal.SIGQUIT, **identity) as process:
                server = PostgresAt(port, program)
                until(process, log, server.answers)
                yield server

    @staticmethod
    def identity(directory):
        """As whom PostgreSQL runs when we are root, which it refuses."""
        if os.geteuid() != 0:
            return {}
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            raise install.Unavailable("PostgreSQL does not run as root, and there is no user `postgres`") from None
        os.chown(directory, user.pw_uid, user.pw_gid)
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


class PostgresAt:
    def __init__(self, port, program):
        self.port, self.program = port, program

    def answers(self):
        ready = self.program.with_name("pg_isready")
        command = [ready, "-q", "-h", "127.0.0.1", "-p", str(self.port), "-U", "bench", "-d", "postgres"]
        return subprocess.run(command).returncode == 0

    def fresh(self, number):
        name = f"bench{number}"
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "bench"]
        createdb = self.program.with_name("createdb")
        subprocess.run([createdb, *where, name], check=True, capture_output=True)
        return f"postgres://bench@127.0.0.1:{self.port}/{name}"

    def version(self):
        return subprocess.run([self.program, "--version"], text=True, capture_output=True).stdout.split()[2]


class Redis:
    """Redis with an append-only file that is synced once a second, as BullMQ's production guide advises."""

    title = "Redis"
    conditions = "appendonly yes, appendfsync everysec, no snapshots; data in a temporary directory"

    @staticmethod
    @contextlib.contextmanager
    def running():
        program = install.debian("redis-server", "redis-server")
        with temporary() as directory:
            port = free_port()
            settings = {"bind": "127.0.0.1", "port": port, "dir": directory, "save": ""}
            settings |= {"appendonly": "yes", "appendfsync": "everysec"}
            log = open(directory / "redis.log", "w+")
            command = [program, *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]
            with child(command, log, stdout=log) as process:
                server = RedisAt(port, program)
                until(process, log, lambda: server.ask("PING") == "PONG")
                yield server


class RedisAt:
    def __init__(self, port, program):
        self.port, self.program = port, program

    def ask(self, command):
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(f"{command}\r\n".encode())
                return connection.recv(4096).decode().strip().lstrip("+")
        except OSError:
            return None

    def fresh(self, _number):
        self.ask("FLUSHALL")
        return {"host": "127.0.0.1", "port": self.port}

    def version(self):
        output = subprocess.run([self.program, "--version"], text=True, capture_output=True).stdout
        return output.split("v=")[1].split()[0]


@contextlib.contextmanager
def temporary():
    directory = Path(tempfile.mkdtemp(prefix="recruiter-compare-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def child(command, log, stdout=None, stdin=subprocess.DEVNULL, env=None, stop_by=signal.SIGTERM, **more):
    """A process in a group of its own, that has ended when this ends: politely at first, for sure in the end."""
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=stdin,
        stdout=stdout if stdout is not None else log,
        stderr=log,
        env={**os.environ, **(env or {})},
        text=True,
        start_new_session=True,
        **more,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(stop_by)
            try:
                process.wait(STOP_WITHIN)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        log.close()


def first_line(process, log):
    line = process.stdout.readline()
    if not line:
        process.wait()
        raise RuntimeError(f"{process.args[0]} ended before it was ready:\n{tail(log)}")
    return line


def until(process, log, ready):
    deadline = time.monotonic() + READY_WITHIN
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            how = "in time" if process.returncode is None else f"and ended with {process.returncode}"
            raise RuntimeError(f"{process.args[0]} was not ready {how}:\n{tail(log)}")
        time.sleep(0.05)


def tail(log, lines=8):
    """What a process wrote at its end, and where the last error in it begins."""
    log.flush()
    log.seek(0)
    written = log.read().strip().splitlines()
    errors = [line for line in written[:-lines] if "Error:" in line]
    return "\n".join(errors[-1:] + written[-lines:])


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
