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

Dates arrive as `datetime` in UTC. A result and a checkpoint may have dates with a time zone.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import json
import math
import os
import re
import select
import sys
import threading
import traceback
from datetime import datetime, timedelta, timezone
from typing import Any, Callable, Dict, List, Optional, Protocol, Tuple, TypeVar, Union

__all__ = ["Cancelled", "Failed", "GiveUp", "Job", "Snooze", "job", "run"]

#: A function of the parameters and the job, or a coroutine function. It returns the result.
Handler = Callable[[Any, "Job"], Any]
_Handler = TypeVar("_Handler", bound=Handler)

_handlers: Dict[str, Handler] = {}

#: The worker keeps less of each text.
_LONGEST_TEXT = 16 * 1024
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Failed(Exception):
    """The job failed. Its retry policy decides whether there is another attempt.

    Any other exception is a failure as well, with the name of its type as the error class.
    """

    def __init__(self, message: str, error_class: Optional[str] = None, retry_after: Optional[float] = None) -> None:
        super().__init__(message)
        _refuse_nan(retry_after)
        self.error_class = error_class
        self.retry_after = retry_after


class GiveUp(Failed):
    """The job failed, and another attempt is pointless."""


class Snooze(Exception):
    """The work cannot be done yet. The job runs again after so many seconds, and this attempt does not count."""

    def __init__(self, after: Optional[float] = None, message: str = "too early", at_most: Optional[int] = None) -> None:
        super().__init__(message)
        _refuse_nan(after)
        self.after = after
        self.at_most = at_most


class Cancelled(BaseException):
    """The job should stop: `Job.check` raises it. Like `KeyboardInterrupt` it is no `Exception`, so that handlers do not catch it."""


class Job:
    """What a handler knows about its job, and what it reports about it.

    A report with a wrong value is ignored, with a line in the job's log.
    """

    def __init__(self, channel: "_Reports", line: Dict[str, Any]) -> None:
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
        #: Over HTTP: the results of the jobs that it has waited for.
        self.inputs: List[Any] = line.get("inputs") or []

    @classmethod
    def for_tests(
        cls,
        class_name: str = "test",
        group: str = "generic",
        attempt: int = 1,
        is_last_attempt: bool = False,
        checkpoint: Any = None,
        time_limit: Optional[float] = None,
        item: Optional[int] = None,
        items: Optional[int] = None,
    ) -> "Job":
        """A job for unit tests of handlers, without a worker. `reported` has what the handler reports; `cancel` cancels it."""
        line = {"id": 1, "job": "0" * 24, "class": class_name, "group": group, "attempt": attempt, "is_last_attempt": is_last_attempt}
        limit = None if time_limit is None else time_limit * 1000
        return cls(_Recorder(), {**line, "checkpoint": checkpoint, "time_limit_ms": limit, "item": item, "items": items})

    @property
    def reported(self) -> List[Dict[str, Any]]:
        """In a test: what the handler has reported, such as `{"progress": {"percent": 40}}`, oldest first."""
        return self._channel.reported if isinstance(self._channel, _Recorder) else []

    def cancel(self, why: str = "requested") -> None:
        """In a test: cancels the job."""
        self._why = why

    def progress(self, done: float, of: Optional[float] = None, text: Optional[str] = None) -> None:
        """Reports how far the job is: `progress(40)` is a percentage, `progress(3, of=10)` are counts."""
        progress: Dict[str, Any] = {"percent": _number(done)} if of is None else {"done": _number(done), "of": _number(of)}
        if text is not None:
            progress["text"] = _text(text)
        self._say("progress", progress)

    def checkpoint(self, value: Any) -> None:
        """Stores a cursor, which the next attempt has as `last_checkpoint`. It is written within a second."""
        try:
            self._say("checkpoint", value)
        except (TypeError, ValueError, RecursionError) as error:
            self.log(f"ignored `checkpoint`: {_text(error)}")

    def log(self, line: object) -> None:
        """Adds a line to the log of the job."""
        self._say("log", _text(line))

    def extend(self, seconds: float) -> None:
        """Extends the time limit of this execution."""
        _refuse_nan(seconds)
        self._say("extend_ms", _milliseconds(seconds))

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

    def _say(self, field: str, value: Any) -> None:
        self._channel.write(self._number, field, _encode(value))


class _Reports(Protocol):
    """Where a job reports to."""

    def write(self, number: int, field: str, value: str) -> None: ...

    def cancellation(self, number: int) -> Optional[str]: ...


class _Recorder:
    """In place of the worker, in a test."""

    def __init__(self) -> None:
        self.reported: List[Dict[str, Any]] = []

    def write(self, number: int, field: str, value: str) -> None:
        self.reported.append({field: json.loads(value, object_hook=_decoded)})

    def cancellation(self, number: int) -> Optional[str]:
        return None


class _Channel:
    """The lines of JSON to and from the worker."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads = reads
        self._writes = writes
        self._buffer = bytearray()
        self._cancelled: Dict[int, str] = {}
        self._waiting: List[Dict[str, Any]] = []
        # Threads of a handler may report at the same time.
        self._writing = threading.Lock()
        self._reading = threading.Lock()

    def write(self, number: int, field: str, value: str) -> None:
        """One line about a job. The value is JSON."""
        line = memoryview(f'{{"id":{number},"{field}":{value}}}\n'.encode())
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
        if b"\n" not in chunk:
            return True
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            message = json.loads(line, object_hook=_decoded)
            if "cancel" in message:
                self._cancelled = {message["cancel"]: message.get("why", "requested")}
            else:
                self._waiting.append(message)
        return True


def _decoded(value: Dict[str, Any]) -> Any:
    """Dates and long integers of extended JSON as values of Python."""
    if len(value) == 1:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            if "$numberLong" in value:
                return int(value["$numberLong"])
            if "$date" in value:
                date = value["$date"]
                if isinstance(date, int):
                    return _EPOCH + timedelta(milliseconds=date)
                return datetime.fromisoformat(_iso(date)).astimezone(timezone.utc)
    return value


def _iso(date: str) -> str:
    """The text of a date for `fromisoformat`, which reads no `Z` and only three or six digits of a fraction before Python 3.11."""
    return re.sub(r"\.(\d{1,6})\d*", lambda fraction: f".{fraction[1]:0<6}", date).replace("Z", "+00:00")


def _encode(value: Any) -> str:
    # In ASCII: half of a surrogate pair has no UTF-8.
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_extended)


def _extended(value: Any) -> Any:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise TypeError("a date without a time zone is ambiguous: write datetime.now(timezone.utc)")
        return {"$date": {"$numberLong": str((value - _EPOCH) // timedelta(milliseconds=1))}}
    raise TypeError(f"a value of type {type(value).__name__} is no JSON")


def _text(value: object) -> str:
    try:
        return str(value)[:_LONGEST_TEXT]
    except Exception:
        return f"a value of type {type(value).__name__}"


def _number(value: Any) -> Union[int, float, str]:
    """A number, or else a text, which the worker ignores with a warning."""
    try:
        number: Union[int, float] = value if isinstance(value, int) else float(value)
        return number if math.isfinite(number) else _text(value)
    except Exception:
        return _text(value)


def _refuse_nan(seconds: Any) -> None:
    is_nan = False
    with contextlib.suppress(Exception):
        # Also that of `Decimal` and of numpy.
        is_nan = math.isnan(seconds)
    if is_nan:
        raise ValueError("a time is a number of seconds, and not NaN")


def _milliseconds(seconds: Any) -> Union[int, float, str]:
    if seconds == math.inf:
        return 10**18
    number = _number(seconds)
    return number if isinstance(number, str) else max(0, min(round(number * 1000), 10**18))


_pipes: Optional[Tuple[int, int]] = None
_process = os.getpid()
_has_run = False


def _redirect() -> Tuple[int, int]:
    """Takes both pipes of the protocol away from the handlers, the libraries and the processes that they start."""
    pipes = (os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return pipes


def _remind() -> None:
    is_crash = getattr(sys, "last_type", None) is not None
    if not _has_run and not is_crash and os.getpid() == _process:
        print("recruiter_jobs: the program ended before it called `run()`: call it last", file=sys.stderr)


# Only in the process that the worker has started, and in none of its children.
if os.environ.pop("RECRUITER_LONG_LIVED", None) == "1":
    _pipes = _redirect()
    atexit.register(_remind)


def job(class_name: str) -> Callable[[_Handler], _Handler]:
    """Registers a function that runs jobs of this class. It may be a coroutine function (`async def`)."""
    if not isinstance(class_name, str):
        raise TypeError('`@job` needs the class of its jobs: write `@job("resize")`')

    def register(handler: _Handler) -> _Handler:
        if class_name in _handlers:
            raise ValueError(f"class {class_name!r} is registered twice: remove one")
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise TypeError(f"the handler of class {class_name!r} is a generator, which would not run: use `return` in place of `yield`")
        if not callable(handler):
            raise TypeError(f"the handler of class {class_name!r} is not a function")
        _handlers[class_name] = handler
        return handler

    return register


def run() -> None:
    """Runs jobs until the worker ends this program, and then returns."""
    global _has_run
    _has_run = True
    if _pipes is None:
        class_name = os.environ.get("RECRUITER_JOB_CLASS")
        if class_name is not None:
            raise SystemExit(f'recruiter_jobs: add `mode = "long-lived"` to [workables.{class_name}] in the workables file of the worker')
        raise SystemExit(
            "recruiter_jobs: this program runs jobs that a worker gives it. Name it in a workables file, with "
            '`mode = "long-lived"`, and start `recruiter-worker --config FILE`. To try a handler, call it with `Job.for_tests()`'
        )
    channel = _Channel(*_pipes)
    while True:
        line = channel.next()
        if line is None:
            return
        channel.write(line["id"], *_answer(line, Job(channel, line)))


async def _finished(result: Any) -> Any:
    return await result


def _answer(line: Dict[str, Any], current: Job) -> Tuple[str, str]:
    handler = _handlers.get(current.class_name)
    if handler is None:
        known = ", ".join(sorted(_handlers)) or "none"
        message = f"this program has no handler of class {current.class_name!r}; it has {known}"
        return "error", _encode({"class": "unknown-class", "message": message})
    return _answer_of(handler, line["parameters"], current)


def _answer_of(handler: Handler, parameters: Any, current: Job) -> Tuple[str, str]:
    """The answer of a handler: a field, and its value as JSON."""
    try:
        result = handler(parameters, current)
        if inspect.isawaitable(result):
            result = asyncio.run(_finished(result))
    except (KeyboardInterrupt, SystemExit):
        raise
    except Snooze as snooze:
        answer: Dict[str, Any] = {"class": "snoozed", "message": _text(snooze)}
        if snooze.after is not None:
            answer["after_ms"] = _milliseconds(snooze.after)
        if snooze.at_most is not None:
            answer["at_most"] = _number(snooze.at_most)
        return "snooze", _encode(answer)
    except BaseException as error:
        return "error", _encode(_failure(error))
    finally:
        # A handler may have closed them.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
    try:
        return "result", _encode(result)
    except Exception as error:
        # The work is done: another attempt would do it again.
        return "error", _encode({"class": "result", "message": f"the result cannot be stored: {_text(error)}", "give_up": True})


def _failure(error: BaseException) -> Dict[str, Any]:
    name = type(error).__name__
    try:
        error_class = getattr(error, "error_class", None)
    except Exception:
        error_class = None
    failure: Dict[str, Any] = {"class": _text(error_class) if error_class else name, "message": _text(error) or name}
    with contextlib.suppress(Exception):
        failure["trace"] = traceback.format_exc()[-_LONGEST_TEXT:]
    if isinstance(error, GiveUp):
        failure["give_up"] = True
    elif isinstance(error, Failed) and error.retry_after is not None:
        failure["retry_after_ms"] = _milliseconds(error.retry_after)
    return failure
