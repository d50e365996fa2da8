"""Enqueues jobs of Recruiter, waits for them and runs them over HTTP: a client of `recruiter web`.

    from recruiter_jobs.http import Client

    client = Client("http://127.0.0.1:7420", token)
    resized = client.wait(client.enqueue("resize", {"names": ["a.png"]}), timeout=60)
    client.work(["resize"], resize)    # until SIGTERM

A request whose connection breaks, or that the server cannot answer for a moment, is repeated: each job has an id, so it is enqueued
once, and each end of a job is recorded once. Only `cancel` and `retry` are sent once. A client may be used by several threads.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import os
import signal
import threading
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union
from urllib.parse import quote, urlsplit

from . import Cancelled, Failed, GiveUp, Handler, Job, Snooze, _answer_of, _decoded, _encode, _failure, _text

__all__ = ["Cancelled", "Client", "Failed", "GiveUp", "Job", "JobFailed", "Problem", "Snooze", "Unreachable"]

_log = logging.getLogger("recruiter_jobs")

#: The longest wait of one request, in seconds.
_LONGEST_WAIT = 50.0
#: How long to wait for an answer beyond the time that the server may take for it.
_ANSWER_WITHIN = 60.0
#: A connection that was idle for longer is not used again.
_IDLE = 30.0
#: The server is asked at least so often whether a job should stop.
_ASK_EVERY = 5.0
#: How long handlers that were told to stop have for it, and then the requests that roll their jobs back.
_STOP_WITHIN = 5.0
#: How many jobs are enqueued by one request, and about how many bytes.
_BATCH = 1_000
_BATCH_BYTES = 4 * 1024 * 1024


class Problem(Exception):
    """The server refuses a request. `status` is that of HTTP, None without an answer; `detail` says what is wrong."""

    def __init__(self, status: Optional[int], detail: str, retry_after: Optional[float] = None) -> None:
        super().__init__(detail if status is None else f"{status}: {detail}")
        self.status = status
        self.detail = detail
        #: After how many seconds the request may be repeated, if the server says so.
        self.retry_after = retry_after

    @property
    def _passes(self) -> bool:
        return self.status in (None, 502, 503, 504)


class Unreachable(Problem):
    """No answer has come."""

    def __init__(self, detail: str) -> None:
        super().__init__(None, detail)


class JobFailed(Exception):
    """A job that was waited for is not done. `why` is the finish reason."""

    def __init__(self, end: Mapping[str, Any]) -> None:
        failure: Mapping[str, Any] = end.get("failure") or {}
        said = ": ".join(str(failure[field]) for field in ("class", "message") if failure.get(field))
        super().__init__(f"job {end['id']} has ended as {end['why']}" + (f": {said}" if said else ""))
        self.id: str = end["id"]
        self.why: str = end["why"]
        self.error_class: Optional[str] = failure.get("class")
        self.message: Optional[str] = failure.get("message")
        self.trace: Optional[str] = failure.get("trace")


class Client:
    """A client of the server at this URL. A request is repeated for `patience` seconds from its first failure on, until it is answered."""

    def __init__(self, url: str, token: Optional[str] = None, patience: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None or parts.query:
            raise ValueError("the URL of `recruiter web` is like http://127.0.0.1:7420, without a user and a query")
        token = None if token is None else token.strip()
        if token is not None and not (token.isascii() and token.isprintable() and token):
            raise ValueError("the token is empty, or has characters that no token has")
        self.url = url.rstrip("/")
        self._path = f"{parts.path.rstrip('/')}/api/v1"
        self._at = (parts.hostname, parts.port)
        self._connects = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._patience = patience
        self._idle: List[Tuple[float, http.client.HTTPConnection]] = []
        self._works: Set[_Work] = set()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def enqueue(self, class_name: str, parameters: Optional[Mapping[str, Any]] = None, **spec: Any) -> str:
        """Enqueues a job, and returns its id; with a `unique` key that is taken, the id of the job that has it.

        `spec` has the settings as a line of `recruiter enqueue --from`: `after="5m"`, `group="mail"`, `priority=7`, `id="…"`.
        """
        job = {"class": class_name, **spec} if parameters is None else {"class": class_name, "parameters": parameters, **spec}
        enqueued: str = self._call("POST", "/jobs", {"id": _new_id(), **job})[1]["id"]
        return enqueued

    def enqueue_many(self, jobs: Iterable[Mapping[str, Any]]) -> int:
        """Enqueues any number of jobs, `{"class": "mail", "parameters": {…}, …}` each, and returns how many.

        When one is refused, `Problem` says which, counted from 1: those before it are enqueued.
        """
        done, batch, size = 0, [], 0
        for job in jobs:
            line = _encode({"id": _new_id(), **job})
            batch.append(line)
            size += len(line)
            if len(batch) >= _BATCH or size >= _BATCH_BYTES:
                done = self._enqueue_batch(batch, done)
                batch, size = [], 0
        return self._enqueue_batch(batch, done) if batch else done

    def wait(self, id: str, timeout: Optional[float] = None) -> Any:
        """Waits until a job has ended, and returns its result. Raises `JobFailed` if it is not done, and `TimeoutError`."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            poll = max(1.0, min(until - time.monotonic(), _LONGEST_WAIT))
            path = f"{_path_of(id)}/end?timeout={_duration(poll)}"
            status, end = self._call("GET", path, within=poll + _ANSWER_WITHIN)
            if status != 202:
                if end["why"] == "done":
                    return end.get("result")
                raise JobFailed(end)
            if time.monotonic() >= until:
                raise TimeoutError(f"job {id} has not ended within {timeout} s")

    def job(self, id: str) -> Dict[str, Any]:
        """A job with its history."""
        job: Dict[str, Any] = self._call("GET", _path_of(id))[1]
        return job

    def cancel(self, id: str) -> Dict[str, Any]:
        """Cancels a job. This needs the role `operator`, and is sent once, as `retry`: after `Unreachable`, look at the job."""
        return self._change(f"{_path_of(id)}/cancel")

    def retry(self, id: str, **changes: Any) -> Dict[str, Any]:
        """Enqueues an archived job again: `new_id` in the answer. After `Unreachable`, `retried_as` of `job(id)` has it, if it was done."""
        return self._change(f"{_path_of(id)}/retry", changes)

    def work(
        self,
        classes: Union[str, Sequence[str]],
        handler: Handler,
        *,
        groups: Sequence[str] = (),
        slots: int = 1,
        lease: float = 60.0,
        wait: float = 5.0,
        grace: float = 20.0,
    ) -> None:
        """Runs jobs of these classes, in these groups, `slots` at a time, until `stop()`; in the main thread also until SIGTERM or SIGINT.

        `handler(parameters, job)` is as for a long-lived program. The lease of its job is extended while it runs. After a stop, handlers
        have `grace` seconds to end, then they are told to (`job.cancelled`), and 5 s later their jobs are rolled back. A stop takes up to
        `wait` seconds also without jobs. While the server is away, this waits for it, and warns in the log `recruiter_jobs`.
        """
        if slots < 1:
            raise ValueError("`slots` is at least 1")
        wanted = {"classes": [classes] if isinstance(classes, str) else list(classes), "groups": list(groups)}
        work = _Work(self, {**wanted, "wait": _duration(wait), "lease": _duration(lease)}, handler, lease, wait)
        self._works.add(work)
        try:
            with _on_signals(work.stop):
                work.run(slots, grace)
        finally:
            self._works.discard(work)

    def stop(self) -> None:
        """Ends all `work` of this client, soon."""
        for work in list(self._works):
            work.stop()

    def _change(self, path: str, body: Any = None) -> Dict[str, Any]:
        """Sent once: if only the answer was lost, the same request would be refused, or retry the job twice."""
        changed: Dict[str, Any] = self._send("POST", path, body)[1]
        return changed

    def _enqueue_batch(self, batch: List[str], done: int) -> int:
        self._call("POST", "/jobs/lines", "\n".join(batch), lines_before=done)
        return done + len(batch)

    def _call(self, method: str, path: str, body: Any = None, until: Optional[float] = None, **options: Any) -> Tuple[int, Any]:
        """A request that is repeated while the server does not answer, until this time or as long as the client has patience."""
        is_bounded = until is not None
        while True:
            if until is not None and is_bounded:
                # An answer that does not come leaves time for further requests.
                options["within"] = min(_ANSWER_WITHIN, max(1.0, (until - time.monotonic()) / 3))
            try:
                return self._send(method, path, body, **options)
            except Problem as problem:
                until = time.monotonic() + self._patience if until is None else until
                pause = problem.retry_after or (0.25 if problem.status is None else 1.0)
                if not problem._passes or time.monotonic() + pause > until:
                    raise
            time.sleep(pause)

    def _send(
        self, method: str, path: str, body: Any = None, *, within: float = _ANSWER_WITHIN, lines_before: Optional[int] = None
    ) -> Tuple[int, Any]:
        """One request: the status and the value of its answer. Of lines, the last one counts."""
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json" if lines_before is None else "application/x-ndjson"
            body = (_encode(body) if lines_before is None else body).encode()
        connection = self._connection(within)
        try:
            connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unreachable(f"{self.url} does not answer: {error or type(error).__name__}") from error
        self._idle.append((time.monotonic(), connection))
        try:
            value = json.loads(text.strip().rpartition(b"\n")[2], object_hook=_decoded)
        except ValueError:
            begin = text[:80].decode(errors="replace")
            raise Problem(response.status, f"{self.url} answers no JSON; is it `recruiter web`? It begins with {begin!r}") from None
        retry_after = response.headers.get("Retry-After", "")
        if response.status >= 300:
            detail = value.get("detail") if isinstance(value, dict) else None
            raise Problem(response.status, str(detail or value), float(retry_after) if retry_after.isdigit() else None)
        if lines_before is not None and "error" in value:
            line = value["error"]
            raise Problem(line["status"], f"job {lines_before + line['line']}: {line['detail']}")
        return response.status, value

    def _connection(self, within: float) -> http.client.HTTPConnection:
        """One that was used just now, or a new one."""
        with contextlib.suppress(IndexError):
            while True:
                used_at, connection = self._idle.pop()
                if connection.sock is not None and time.monotonic() - used_at < _IDLE:
                    connection.sock.settimeout(within)
                    return connection
                connection.close()
        return self._connects(*self._at, timeout=within)


class _Work:
    """Jobs that are being run."""

    def __init__(self, client: Client, wanted: Dict[str, Any], handler: Handler, lease: float, wait: float) -> None:
        self._client = client
        self._wanted = wanted
        self._handler = handler
        self._lease = lease
        self._within = wait + _ANSWER_WITHIN
        # No lock and no event: a signal handler sets it.
        self._is_stopping = False
        self._is_away = False
        self._error: Optional[BaseException] = None
        self._running: Set[_Reservation] = set()

    def stop(self) -> None:
        self._is_stopping = True

    def run(self, slots: int, grace: float) -> None:
        threads = [threading.Thread(target=self._slot, daemon=True) for _ in range(slots)]
        for thread in threads:
            thread.start()
        over = math.inf
        while any(thread.is_alive() for thread in threads):
            next(filter(threading.Thread.is_alive, threads), threads[0]).join(0.1)
            if self._is_stopping:
                over = min(over, time.monotonic() + grace)
            if time.monotonic() >= over:
                for reservation in list(self._running):
                    reservation.tell("worker-stopping")
            if time.monotonic() >= over + _STOP_WITHIN:
                self._roll_back()
                break
        if self._error is not None:
            raise self._error

    def _roll_back(self) -> None:
        """Rolls back all jobs that are running, at the same time. Each gives up a second earlier than all of them, so that its warning is logged."""
        late = {"class": "worker-stopping", "message": "the client stops, and the handler has not ended in time"}
        args = ("rollback", late, _STOP_WITHIN - 1.0)
        ends = [threading.Thread(target=reservation.end, args=args, daemon=True) for reservation in list(self._running)]
        until = time.monotonic() + _STOP_WITHIN
        for end in ends:
            end.start()
        for end in ends:
            end.join(max(0.0, until - time.monotonic()))

    def _slot(self) -> None:
        try:
            while not self._is_stopping:
                for reserved in self._reserve():
                    self._execute(reserved)
        except BaseException as error:
            self._error, self._is_stopping = error, True

    def _reserve(self) -> List[Dict[str, Any]]:
        try:
            jobs: List[Dict[str, Any]] = self._client._send("POST", "/work/reserve", self._wanted, within=self._within)[1]["jobs"]
        except Problem as problem:
            if not problem._passes and problem.status != 429:
                raise
            if not self._is_away:
                _log.warning("no jobs: %s; trying again", problem)
            self._is_away = True
            time.sleep(problem.retry_after or 1.0)
            return []
        self._is_away = False
        return jobs

    def _execute(self, reserved: Dict[str, Any]) -> None:
        reservation = _Reservation(self._client, reserved, self._lease)
        if self._is_stopping:
            # It has not begun: no attempt is counted.
            return reservation.end("rollback", {"class": "worker-stopping", "message": "the client stops", "snooze": "0s"})
        item = reserved.get("item") or {}
        line = {**reserved, "id": 0, "job": reserved["id"], "item": item.get("index"), "items": item.get("of")}
        self._running.add(reservation)
        try:
            try:
                answer = _answer_of(self._handler, reserved["parameters"], Job(reservation, line))
            except (KeyboardInterrupt, SystemExit) as error:
                answer = "error", _encode(_failure(error))
            reservation.end(*_end_of(*answer))
        finally:
            self._running.discard(reservation)


class _Reservation:
    """A job of this client until its end. The handler's `Job` reports to it."""

    def __init__(self, client: Client, reserved: Dict[str, Any], lease: float) -> None:
        self._client = client
        self._job: str = reserved["id"]
        self._path = f"/work/{reserved['reservation']}/"
        self._lease = lease
        # From the answer, which the server has sent at once: the request may have waited for the job.
        self._until = time.monotonic() + lease
        self._changed = threading.Condition()
        self._notes: Dict[str, Dict[str, Any]] = {}
        self._why: Optional[str] = None
        self._is_lost = False
        self._has_ended = False
        self._is_over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def write(self, number: int, field: str, value: str) -> None:
        """Of what is not sent yet, the last progress and checkpoint count, and all lines of the log."""
        said = json.loads(value)
        if field == "extend_ms":
            field, said = "log", "ignored `extend`: over HTTP, the time limit is that of the job"
        with self._changed:
            if field == "log" and "log" in self._notes:
                said = f"{self._notes['log']['log']}\n{said}"
            self._notes[field] = said if field == "progress" else {field: said}
            self._changed.notify()

    def cancellation(self, number: int) -> Optional[str]:
        return self._why

    def tell(self, why: str) -> None:
        """The handler should stop."""
        self._why = self._why or why

    def end(self, what: str, body: Dict[str, Any], within: Optional[float] = None) -> None:
        """Commits the job, or rolls it back, once: until its lease is over, or within so many seconds, half of them for its notes."""
        began = time.monotonic()
        with self._changed:
            has_ended, self._has_ended = self._has_ended, True
            self._changed.notify()
        if has_ended:
            if not self._is_over.wait(within):
                self._drop("no answer has come in time")
            return
        try:
            self._keeper.join(None if within is None else within / 2)
            self._send_end(what, body, self._until if within is None else began + within)
        finally:
            self._is_over.set()

    def _send_end(self, what: str, body: Dict[str, Any], until: float) -> None:
        if self._is_lost:
            return self._drop("its lease is over")
        try:
            self._client._call("POST", self._path + what, body, until)
        except Problem as problem:
            if problem.status == 410 or problem._passes:
                return self._drop(str(problem))
            # The work is done: another attempt would do it again.
            refused = {"class": "result" if what == "commit" else "error", "message": f"the {what} is refused: {_text(problem)}"}
            with contextlib.suppress(Problem):
                self._client._call("POST", self._path + "rollback", {**refused, "give_up": what == "commit"}, until)

    def _drop(self, why: str) -> None:
        _log.warning("job %s is no longer this client's, and its end is dropped: %s", self._job, why)

    def _keep(self) -> None:
        """Extends the lease and sends notes, until the end."""
        every = min(self._lease / 3, _ASK_EVERY)
        due = time.monotonic() + every
        while True:
            with self._changed:
                while not (self._notes or self._has_ended) and time.monotonic() < due:
                    self._changed.wait(due - time.monotonic())
                notes, self._notes = self._notes, {}
                has_ended = self._has_ended
            for field, body in notes.items():
                self._say("notes", body, field)
            if self._is_lost or (has_ended and not self._notes):
                return
            if time.monotonic() >= due:
                self._say("extend", {"lease": _duration(self._lease)})
                due = time.monotonic() + every

    def _say(self, what: str, body: Dict[str, Any], field: str = "lease") -> None:
        # The server counts the lease from when it reads the request, which is later.
        asked = time.monotonic()
        try:
            stop = self._client._call("POST", self._path + what, body, self._until)[1].get("stop")
        except Problem as problem:
            if problem.status == 410 or problem._passes:
                self._is_lost = True
                return self.tell("lost")
            _log.warning("`%s` of job %s is refused: %s", field, self._job, problem)
            if field in ("progress", "checkpoint"):
                self.write(0, "log", _encode(f"ignored `{field}`: {_text(problem.detail)}"))
            return
        if what == "extend":
            self._until = asked + self._lease
        if stop is not None:
            self.tell(stop)


def _end_of(field: str, value: str) -> Tuple[str, Dict[str, Any]]:
    """The request that ends a job, from the answer of its handler."""
    said = json.loads(value)
    if field == "result":
        return "commit", {"result": said}
    body = {name: said[name] for name in ("class", "message", "trace", "give_up", "at_most") if name in said}
    if field == "snooze":
        body["snooze"] = f"{said.get('after_ms', 30_000)}ms"
    elif "retry_after_ms" in said:
        body["delay"] = f"{said['retry_after_ms']}ms"
    return "rollback", body


@contextlib.contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` on SIGTERM and SIGINT, which only the main thread may handle."""
    signals = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda *_: stop()) for number in signals}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former or signal.SIG_DFL)


def _path_of(id: str) -> str:
    return f"/jobs/{quote(id, safe='')}"


def _new_id() -> str:
    return f"{int(time.time()) & 0xFFFFFFFF:08x}{os.urandom(8).hex()}"


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"
