"""Gets each system with its own package manager, once, into a cache directory."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]


OLDEST_NODE = (22, 18)  # what graphile-worker asks for


class Unavailable(Exception):
    """A system that cannot be set up, and why. It is told at the end, and makes the run fail."""


class Cache:
    """Where the systems are kept between runs."""

    def __init__(self, directory, tell):
        self.directory = Path(directory)
        self.tell = tell

    def node(self):
        """The Node.js to run the peers with, and the directory with their programs and packages."""
        need("npm", "install Node.js with npm; `npm` is not on PATH")
        lock = (HERE / "package-lock.json").read_bytes()
        directory = self.directory / f"node-{hashlib.sha256(lock).hexdigest()[:12]}"
        if not (directory / ".complete").exists():
            self.tell("setting up the Node.js peers with npm ci")
            directory.mkdir(parents=True, exist_ok=True)
            for name in ("package.json", "package-lock.json"):
                shutil.copy(HERE / name, directory)
            # Nothing of these packages needs to be compiled here: what is native is shipped built.
            run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=directory)
            (directory / ".complete").touch()
        for program in HERE.glob("*.mjs"):
            shutil.copy(program, directory)
        # The lockfile names a Node.js as well, for the machines that have it: the same for all, and not too old.
        shipped = sorted(directory.glob("node_modules/node-*/bin/node"))
        node = shipped[0] if shipped else Path(shutil.which("node") or "node")
        version = run([node, "--version"]).strip()
        if tuple(map(int, version.lstrip("v").split(".")[:2])) < OLDEST_NODE:
            raise Unavailable(f"{node} is {version}; install Node.js {'.'.join(map(str, OLDEST_NODE))} or newer")
        return node, version, directory

    def crate(self, name, version, binary):
        """The program of a published crate, built as its authors locked it."""
        need("cargo", "install Rust; `cargo` is not on PATH")
        root = self.directory / f"{name}-{version}"
        program = root / "bin" / binary
        if not program.exists():
            self.tell(f"building {name} {version} with cargo install; this takes minutes, once")
            run(
                ["cargo", "install", name, "--version", version, "--locked", "--root", str(root)],
                env={"CARGO_TARGET_DIR": str(self.directory / "target")},
            )
        return program

    def package(self, directory):
        """The program of a crate of ours below this directory."""
        need("cargo", "install Rust; `cargo` is not on PATH")
        sources = sorted(path for path in (HERE / directory).rglob("*") if path.is_file())
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
        program = self.directory / f"{directory}-{digest}"
        if not program.exists():
            self.tell(f"building {directory} with cargo build; this takes minutes, once")
            target = self.directory / "target"
            run(
                ["cargo", "build", "--release", "--locked", "--manifest-path", str(HERE / directory / "Cargo.toml")],
                env={"CARGO_TARGET_DIR": str(target)},
            )
            shutil.copy(target / "release" / directory, program)
            shutil.rmtree(target)  # a gigabyte that is not needed again
        return program

    def node_version(self, package):
        lock = json.loads((HERE / "package-lock.json").read_text())
        return lock["packages"][f"node_modules/{package}"]["version"]


def recruiter():
    """Our own program. It is not built here: the caller names it."""
    named = os.environ.get("RECRUITER_BIN")
    program = Path(named) if named else REPOSITORY / "target/release/recruiter"
    if not program.is_file():
        raise Unavailable(f"{program} is missing: run `cargo build --release`, or name another with RECRUITER_BIN")
    return program.resolve()


def debian(program, package, places=()):
    """A program that is installed, or else comes with a package of Debian."""
    found = find(program, places)
    if found is None and shutil.which("apt-get") and os.geteuid() == 0:
        run(["apt-get", "update", "-qq"])
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", package], env=NO_QUESTIONS)
        found = find(program, places)
    if found is None:
        raise Unavailable(f"`{program}` is neither on PATH nor could it be installed: install {package}")
    return found


NO_QUESTIONS = {"DEBIAN_FRONTEND": "noninteractive"}


def find(program, places):
    on_path = shutil.which(program)
    if on_path:
        return Path(on_path)
    # Debian keeps one directory a version of PostgreSQL; the newest is the best it can do.
    found = [path for place in places for path in Path("/").glob(f"{place}/{program}")]
    return max(found, key=lambda path: [int(part) for part in path.parts if part.isdigit()], default=None)


def need(tool, advice):
    if shutil.which(tool) is None:
        raise Unavailable(advice)


def run(command, cwd=None, env=None):
    """Runs a command of the set-up to its end; what it wrote is told only if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, text=True, capture_output=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).strip().splitlines() if " warn " not in line]
        told = lines if len(lines) <= 10 else [*lines[:5], "…", *lines[-5:]]
        raise Unavailable("\n".join([f"`{' '.join(map(str, command))}` failed:", *told]))
    return done.stdout
