"""Runs jobs of Recruiter in Python.

A worker starts this program as a long-lived program (`mode = "long-lived"` in its workables file) and gives it one job after
the other, as lines of JSON on standard input. The answers are lines of JSON on standard output.

    from recruiter_jobs import Job, job, run

    @job("resize")
    def resize(parameters: dict, job: Job) -> dict:
        for done, name in enumerate(parameters["names"]):
            job.progress(done, of=len(parameters["names"]))
            ...
        return {"resized": len(parameters["names"])}

    run()

Import this module first. From then on, what the program prints goes to standard error, and its standard input is empty, also
in the processes that it starts, because both belong to the protocol.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import traceback
from typing import Any, Callable, Dict, Optional, Tuple

__all__ = ["Cancelled", "Failed", "GiveUp", "Job", "Snooze", "job", "run"]

Handler = Callable[[Any, "Job"], Any]

_handlers: Dict[str, Handler] = {}


class Failed(Exception):
    """The job failed. Its retry policy decides whether there is another attempt.

    Any other exception is a failure as well, with the name of its type as the error class.
    """

    def __init__(self, message: str, error_class: Optional[str] = None, retry_after: Optional[float] = None) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.retry_after = retry_after


class GiveUp(Failed):
    """The job failed, and another attempt is pointless."""


class Snooze(Exception):
    """The work cannot be done yet. The job runs again after so many seconds, and this attempt does not count."""

    def __init__(self, after: Optional[float] = None, message: str = "too early", at_most: Optional[int] = None) -> None:
        super().__init__(message)
        self.after = after
        self.at_most = at_most


class Cancelled(Exception):
    """The job should stop: `Job.check` raises it."""


class Job:
    """What a handler knows about its job, and what it reports about it."""

    def __init__(self, channel: "_Channel", line: Dict[str, Any]) -> None:
        self._channel = channel
        self._number: int = line["id"]
        self._why: Optional[str] = None
        #: The id of the job.
        self.id: str = line["job"]
        #: The class of the job.
        self.class_name: str = line["class"]
        #: The group of the job.
        self.group: str = line["group"]
        #: The number of this start, from 1.
        self.attempt: int = line["attempt"]
        #: Whether a failure of this attempt would be the last.
        self.is_last_attempt: bool = line["is_last_attempt"]
        #: The index of the item of a bundle, from 0, and the number of items.
        self.item: Optional[int] = line.get("item")
        self.items: Optional[int] = line.get("items")
        #: The trace that the job belongs to, a W3C traceparent, or None.
        self.traceparent: Optional[str] = line.get("traceparent")
        #: The time limit in seconds, when the job began.
        limit = line.get("time_limit_ms")
        self.time_limit: Optional[float] = None if limit is None else limit / 1000
        #: The checkpoint of the last attempt, or None.
        self.last_checkpoint: Any = line.get("checkpoint")

    def progress(self, done: float, of: Optional[int] = None, text: Optional[str] = None) -> None:
        """Reports how far the job is: `progress(40)` is a percentage, `progress(3, of=10)` are counts."""
        progress: Dict[str, Any] = {"percent": done} if of is None else {"done": int(done), "of": of}
        if text is not None:
            progress["text"] = text
        self._say({"progress": progress})

    def checkpoint(self, value: Any) -> None:
        """Stores a cursor, which the next attempt has as `last_checkpoint`. It is written within a second."""
        self._say({"checkpoint": value})

    def log(self, line: str) -> None:
        """Adds a line to the log of the job."""
        self._say({"log": line})

    def extend(self, seconds: float) -> None:
        """Extends the time limit of this execution."""
        self._say({"extend_ms": int(seconds * 1000)})

    @property
    def cancelled(self) -> bool:
        """Whether the job should stop."""
        if self._why is None:
            self._why = self._channel.cancellation(self._number)
        return self._why is not None

    def check(self) -> None:
        """Raises `Cancelled` if the job should stop."""
        if self.cancelled:
            raise Cancelled(self._why)

    def _say(self, message: Dict[str, Any]) -> None:
        self._channel.write({"id": self._number, **message})


class _Channel:
    """The lines of JSON to and from the worker."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads = reads
        self._writes = writes
        self._buffer = bytearray()
        self._cancelled: Dict[int, str] = {}
        self._waiting: list = []
        # Threads of a handler may report at the same time.
        self._writing = threading.Lock()
        self._reading = threading.Lock()

    def write(self, message: Dict[str, Any]) -> None:
        line = memoryview(json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        with self._writing:
            while line:
                line = line[os.write(self._writes, line) :]

    def next(self) -> Optional[Dict[str, Any]]:
        """The next job; None at the end."""
        with self._reading:
            while not self._waiting:
                if not self._read():
                    return None
            return self._waiting.pop(0)

    def cancellation(self, number: int) -> Optional[str]:
        """Why this job should stop, if the worker has said so."""
        if self._reading.acquire(blocking=False):
            try:
                while number not in self._cancelled and select.select([self._reads], [], [], 0)[0]:
                    if not self._read():
                        return "worker-stopping"
            finally:
                self._reading.release()
        return self._cancelled.get(number)

    def _read(self) -> bool:
        chunk = os.read(self._reads, 65536)
        if not chunk:
            return False
        self._buffer += chunk
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            message = json.loads(line)
            if "cancel" in message:
                self._cancelled = {message["cancel"]: message.get("why", "requested")}
            else:
                self._waiting.append(message)
        return True


_pipes: Optional[Tuple[int, int]] = None


def _redirect() -> Tuple[int, int]:
    """Takes both pipes of the protocol away from the handlers, the libraries and the processes that they start."""
    global _pipes
    if _pipes is None:
        _pipes = (os.dup(0), os.dup(1))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
    return _pipes


# Only in the process that the worker has started, and in none of its children.
if os.environ.pop("RECRUITER_LONG_LIVED", None) == "1":
    _redirect()


def job(class_name: str) -> Callable[[Handler], Handler]:
    """Registers a function that runs jobs of this class."""

    def register(handler: Handler) -> Handler:
        if class_name in _handlers:
            raise ValueError(f"class {class_name!r} is registered twice: remove one")
        _handlers[class_name] = handler
        return handler

    return register


def run() -> None:
    """Runs jobs until the worker ends this program, and then returns."""
    channel = _Channel(*_redirect())
    while True:
        line = channel.next()
        if line is None:
            return
        channel.write({"id": line["id"], **_answer(line, Job(channel, line))})


def _answer(line: Dict[str, Any], current: Job) -> Dict[str, Any]:
    handler = _handlers.get(current.class_name)
    if handler is None:
        known = ", ".join(sorted(_handlers)) or "none"
        message = f"this program has no handler of class {current.class_name!r}; it has {known}"
        return {"error": {"class": "unknown-class", "message": message}}
    try:
        result = handler(line["parameters"], current)
        json.dumps(result, allow_nan=False)
        return {"result": result}
    except Snooze as snooze:
        answer: Dict[str, Any] = {"class": "snoozed", "message": str(snooze)}
        if snooze.after is not None:
            answer["after_ms"] = int(snooze.after * 1000)
        if snooze.at_most is not None:
            answer["at_most"] = snooze.at_most
        return {"snooze": answer}
    except Exception as error:
        failure: Dict[str, Any] = {
            "class": getattr(error, "error_class", None) or type(error).__name__,
            "message": str(error) or type(error).__name__,
            "trace": traceback.format_exc(),
        }
        if isinstance(error, GiveUp):
            failure["give_up"] = True
        if isinstance(error, Failed) and error.retry_after is not None:
            failure["retry_after_ms"] = int(error.retry_after * 1000)
        return {"error": failure}
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
