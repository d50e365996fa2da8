"""Talks to the processes of a system, one JSON object a line. What they say is described in `harness.mjs`."""

import contextlib
import json
import queue
import random
import subprocess
import tempfile
import threading
import time

from .servers import child, tail

READY_WITHIN = 60.0  # seconds
WARM_UP = 5  # jobs that are not counted: connections, code and cursors are not there yet
# An idle system, and not always at the same point of a poll.
PAUSE = (0.020, 0.060)


class Talking:
    """A running process that is told and tells lines."""

    def __init__(self, process, log):
        self.process, self.log, self.said = process, log, queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(ValueError):  # the pipe is closed under it when the process is stopped
            for line in self.process.stdout:
                self.said.put(json.loads(line))
        self.said.put(None)

    def tell(self, **message):
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"a process ended before it was told {message}:\n{tail(self.log)}") from None

    def hear(self, name, within):
        """The next message that has this name; others before it are passed over."""
        deadline = time.monotonic() + within
        while True:
            try:
                message = self.said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"a process did not say `{name}` within {within:.0f} s\n{tail(self.log)}") from None
            if message is None:
                raise RuntimeError(f"a process ended before it said `{name}`:\n{tail(self.log)}")
            if name in message:
                return message


@contextlib.contextmanager
def talking(command, cwd=None):
    log = tempfile.TemporaryFile("w+")
    with child(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=cwd) as process:
        yield Talking(process, log)


def burn_down(workers, jobs, within, counted=None):
    """Lets workers that are ready loose on jobs that are there; how many were completed in how many seconds.

    From the start of the workers until the last was completed. With `counted`, from the first entry of a handler until
    so many were completed; the others are completed all the same.
    """
    for worker in workers:
        worker.tell(go=True)
    start = min(worker.hear("started", READY_WITHIN)["started"] for worker in workers)
    done, last, until_counted = [0] * len(workers), start, None
    if counted:
        start = float("inf")
    deadline = time.monotonic() + within
    while sum(done) < jobs:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{sum(done)} of {jobs} jobs were completed within {within:.0f} s")
        for index, worker in enumerate(workers):
            with contextlib.suppress(queue.Empty):
                message = worker.said.get(timeout=0.005)
                if message is None:
                    raise RuntimeError(f"a worker ended after {done[index]} jobs:\n{tail(worker.log)}")
                done[index] = message["completed"]
                last = max(last, message["last"] or last)
                if counted:
                    start = min(start, message["first"] or start)
        if counted and until_counted is None and counted <= sum(done) < jobs:
            until_counted = sum(done), (last - start) / 1000
    workers[0].tell(settle=True)
    settled = workers[0].hear("settled", within)["settled"]
    seconds = (max(last, settled or last) - start) / 1000
    # A job that was completed twice would have ended the measurement too early.
    if sum(done) != jobs:
        raise RuntimeError(f"{jobs} jobs were completed {sum(done)} times")
    return until_counted or (jobs, seconds)


def latency(producer, worker, jobs):
    """Enqueues one job at a time on an idle system; milliseconds until each was entered."""
    from_acknowledged, from_call = [], []
    for number in range(-WARM_UP, jobs):
        producer.tell(next=number)
        acknowledged = producer.hear("acknowledged", READY_WITHIN)
        entered = worker.hear("entered", READY_WITHIN)
        if entered["entered"] != number:
            raise RuntimeError(f"job {entered['entered']} was entered when only {number} was enqueued")
        # It may well be entered before its enqueuer hears the acknowledgement.
        if number >= 0:
            from_acknowledged.append(max(0.0, entered["at"] - acknowledged["at"]))
            from_call.append(entered["at"] - acknowledged["called"])
        time.sleep(random.uniform(*PAUSE))
    return {"started_ms": percentiles(from_acknowledged), "from_call_ms": percentiles(from_call)}


def percentiles(values):
    ordered = sorted(values)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return {name: round(at(share), 3) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
