"""A run driven by several processes: one per shard, each with its own client, clock and spool; together one Run.

Run as ``python -m whywait.load.shards`` by :class:`Shards`: the job comes on stdin (pickled: both ends are the same
program, and the pipe is ours alone), then a point at a time; what a shard says goes back on stdout, a JSON object per
line. All shards keep the parent's zero and begin a point at the same moment. The end of stdin, however the parent came
to its end, ends a shard: what it had in flight is written down as censored. A shard that dies ends the run, by name.
How the bytes come and go is the link's affair (``load/link.py``): the shard may be on another machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import queue
import selectors
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import orjson

from whywait.core import secrets
from whywait.core.recorder import Recorder
from whywait.core.run import Manifest
from whywait.core.spool import Fold
from whywait.errors import WhywaitError
from whywait.load.crew import Report, Solo, Stop, Writer
from whywait.load.deal import split
from whywait.load.driver import Point, Progress, planned
from whywait.load.link import Job, Link
from whywait.load.progress import clients_together, together
from whywait.net.clock import Clock, bracket

END_S = 30.0  # a shard that was told to end writes down what it has; it does not wait for the service
WATCH_S = 0.5
SILENT_S = 30.0  # a shard tells how far it is twice a second
MOST_WORD = 16 << 20  # bytes of one thing that a shard says


def zero_of(clock: Clock) -> int:
    """The zero of a clock on CLOCK_MONOTONIC."""
    # Each is early by the time between its two looks.
    return max(time.monotonic_ns() - clock.now() for _ in range(20))


# In the shard


class _Inbox:
    """What the parent says, read by a thread that sleeps between two words; the loop sees ``reason`` at once."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.reason, self.orphaned = "", False
        self._stream = stream
        self._words: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def get(self) -> tuple[str, Any] | None:
        return self._words.get()

    def _read(self) -> None:
        while True:
            try:
                word = pickle.load(self._stream)  # noqa: S301 - from the process that started us
            except (EOFError, OSError, pickle.UnpicklingError):
                self.orphaned = True
                self.reason = self.reason or "the process that led the run ended"
                self._words.put(None)
                return
            if word[0] == "stop":
                self.reason = word[1]
            else:
                self._words.put(word)
            if word[0] == "finish":
                return  # a thread that reads while the interpreter ends would break it


class _Gone(Exception):
    """The parent ended."""


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; whoever started us decides
        signal.signal(number, signal.SIG_IGN)
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing else may come between our lines

    def say(what: str, value: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            out.write(orjson.dumps([what, value], option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))
            out.flush()

    job: Job = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started us
    secrets.hide(*job.hidden)
    inbox = _Inbox(sys.stdin.buffer)
    clock = Clock(job.zero_mono_ns + bracket()[0])
    try:
        recorder = Recorder(job.directory, Manifest(zero_unix_ns=clock.zero_unix_ns), f"spool-{job.shard}")
    except WhywaitError as exc:
        say("failed", exc.message)
        return exc.exit_code

    def begin(start_ns: int) -> int:
        say("ready", start_ns)
        word = inbox.get()
        if word is None:
            raise _Gone
        agreed: int = word[1]
        return agreed

    def watch(p: Progress) -> None:
        about = _facts(solo, clock, job)
        say("progress", [p.sent, p.ended, p.in_flight, p.chunks, p.elapsed_s, about, dataclasses.asdict(p.so_far)])

    solo = Solo(job.target, recorder, clock, watch, lambda _p: inbox.reason)
    solo.begin = begin
    say("hello", os.getpid())
    with contextlib.suppress(_Gone):
        while (word := inbox.get()) is not None and word[0] != "finish":
            if word[0] == "zero":
                job = dataclasses.replace(job, zero_mono_ns=word[1])
                clock.zero_at(job.zero_mono_ns)
                continue
            reason = solo.run(*word[1])
            say("ended", [reason, solo.client.chunks, _facts(solo, clock, job)])
    solo.close()
    recorder.close()
    say("bye", _facts(solo, clock, job))
    if job.passing and inbox.orphaned:  # nobody is left to fetch it
        shutil.rmtree(job.directory, ignore_errors=True)
    return 0


def _facts(solo: Solo, clock: Clock, job: Job) -> dict[str, Any]:
    """The shard's report; its clock with how far it lies from the parent's."""
    report = solo.report()
    offset = zero_of(clock) - job.zero_mono_ns
    report.clock = [{"shard": job.shard, "offset_ns": offset, **clock.facts()}]
    return dataclasses.asdict(report)


# In the parent


class _Shard:
    """One child as the parent sees it."""

    def __init__(self, job: Job, link: Link) -> None:
        self.job, self.link = job, link
        self.report: Report | None = None
        self.progress = [0, 0, 0, 0, 0.0]
        self.so_far: dict[str, Any] = {}
        self.points: list[tuple[dict[str, Any], Point]] = []
        self.lost = ""
        self.ended = True  # it has nothing to do
        self.reason = ""
        self.start_ns = 0
        self.silent_s = 0.0  # by our own clock while we listened: when all stood still it is nobody's silence
        self._tail = b""
        link.begin(job)

    @property
    def name(self) -> str:
        return f"shard {self.job.shard}" + (f" on {self.link.where}" if self.link.where else "")

    def tell(self, word: Any) -> None:
        try:
            self.link.tell(pickle.dumps(word))
        except TimeoutError as exc:
            self.give_up(str(exc))

    def hear(self) -> list[tuple[str, Any]] | None:
        """What it said; None when it has ended. Call it when there is something to read."""
        data = os.read(self.link.out, 1 << 16)
        if not data:
            return None
        *lines, self._tail = (self._tail + data).split(b"\n")
        if len(self._tail) > MOST_WORD:
            self._tail = b""
            self.give_up("said what has no end")
        try:
            return [(word[0], word[1]) for word in map(orjson.loads, lines)]
        except (ValueError, TypeError, LookupError):
            self.give_up("said what makes no sense")
            return []

    def understand(self, what: str, value: Any) -> None:
        if what == "progress":
            self.progress, facts, self.so_far = value[:5], value[5], value[6]
            self.report = Report(**facts)
        elif what == "ended":
            self.reason, self.report, self.ended = value[0], Report(**value[2]), True
            self.progress[2:4] = [0, value[1]]
        elif what == "bye":
            self.report, self.ended = Report(**value), True
        elif what == "ready":
            self.start_ns = value
        elif what == "failed":
            self.lost = value

    def give_up(self, why: str) -> None:
        """End it and go on without it: what it had recorded is in its spool."""
        self.lost = self.lost or " ".join(filter(None, (self.name, self.link.process, why)))
        self.link.kill()

    def died(self) -> None:
        self.lost = self.lost or f"{self.name} {self.link.fate()}"
        self.ended = True

    def said(self) -> Report | None:
        """Its report, told apart from those of other machines."""
        r, where = self.report, self.link.where
        if r is None or not where:
            return r
        client = {**r.client, "shard": self.job.shard, "where": where}
        disk = f"{where}: {r.disk}" if r.disk else ""
        return dataclasses.replace(r, client=client, clock=[_with(c, self.link.clock()) for c in r.clock], disk=disk)


class Shards:
    """A :class:`~whywait.load.crew.Crew` of several processes, of this machine unless there are ``links`` to them.
    ``recorder`` is the parent's: it records no request but those a dead shard could not even plan."""

    def __init__(
        self, jobs: Sequence[Job], recorder: Recorder, watch: Callable[[Progress], None], stop: Stop,
        links: Sequence[Link] = (),
    ) -> None:  # fmt: skip
        self._recorder, self._watch, self._stop = recorder, watch, stop
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._shards = [_Shard(job, link) for job, link in zip(jobs, links or [Link() for _ in jobs], strict=True)]
        self.kept_ns: dict[str, int] = {}  # of shards that died: the last time that their spool speaks of
        for shard in self._shards:
            self._selector.register(shard.link.out, selectors.EVENT_READ, shard)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of those on this machine."""
        return tuple(pid for s in self._shards if (pid := s.link.pid) is not None)

    def run(self, point: Point, writer: Writer) -> str:
        busy: list[_Shard] = []
        for shard, zero in zip(self._shards, self._zeros(), strict=True):
            if zero is not None:
                shard.tell(("zero", zero))
        for shard, part in zip(self._shards, split(point, len(self._shards)), strict=True):
            if part is None:
                continue
            shard.ended, shard.reason, shard.start_ns, shard.progress = False, "", 0, [0, 0, 0, 0, 0.0]
            shard.so_far, shard.silent_s = {}, 0.0
            shard.points.append(({"point": point.number, "mode": point.mode, "target": part.target,
                                  "label": point.label}, part))  # fmt: skip
            busy.append(shard)
            shard.tell(("point", (part, writer)))
        for shard in self._until(lambda s: bool(s.start_ns or s.ended), busy):
            shard.give_up(f"did not answer within {END_S:g} s")
        start = max((s.start_ns for s in busy), default=0) + max((s.link.lead_ns for s in busy), default=0)
        for shard in busy:
            shard.start_ns = start
            shard.tell(("go", start))
        return self._drive(point, busy)

    def _zeros(self) -> list[int | None]:
        """Of shards whose clock went astray, a new zero. A look at a clock far away takes a while: all at once."""
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda s: None if s.lost else s.link.zero(), self._shards))

    def _drive(self, point: Point, busy: list[_Shard]) -> str:
        progress, told, next_watch = Progress(point), "", time.monotonic() + WATCH_S
        while not all(s.ended for s in busy):
            self._hear(0.1)
            for shard in busy:
                if shard.silent_s > SILENT_S and not shard.ended and not shard.lost:
                    shard.give_up(f"said nothing for {SILENT_S:g} s")
            sums = [sum(s.progress[i] for s in busy) for i in range(4)]
            progress.sent, progress.ended, progress.in_flight, progress.chunks = (int(x) for x in sums)
            progress.elapsed_s = max(s.progress[4] for s in busy)
            if time.monotonic() >= next_watch:
                next_watch += WATCH_S
                progress.so_far = together(s.so_far for s in busy)
                self._watch(progress)
            reason = next((s.lost or s.reason for s in busy if s.lost or s.reason), "") or self._stop(progress)
            if reason and not told:
                told = reason
                for shard in self._shards:
                    shard.tell(("stop", reason))
        return told or next((s.lost or s.reason for s in busy if s.lost or s.reason), "")

    def report(self) -> Report:
        known = [r for s in self._shards if (r := s.said()) is not None]
        out = Report(clients_together([r.client for r in known]), [c for r in known for c in r.clock])
        out.failed, out.succeeded = sum(r.failed for r in known), sum(r.succeeded for r in known)
        out.still = [(at, long) for r in known for at, long in r.still]
        out.disk = next((x for x in (*(s.link.complaint for s in self._shards), *(r.disk for r in known)) if x), "")
        out.lost = [s.lost for s in self._shards if s.lost]
        for r in known:
            for number, counts in r.recounts.items():
                out.recounts[number] = [*out.recounts.get(number, []), *counts]
        return out

    def close(self) -> None:
        """End all; afterwards their spools are whole. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._zeros()  # how far the clocks are apart in the end
        for shard in self._shards:
            shard.ended = bool(shard.lost)
            shard.tell(("finish", None))
        self._until(lambda s: s.ended, self._shards)
        for shard in self._shards:
            shard.link.close(kill=not shard.ended)
        self._selector.close()
        for shard in self._shards:
            if shard.lost:
                self._plan_for(shard)

    def _plan_for(self, shard: _Shard) -> None:
        """Requests that a shard was given and died before it wrote them down: never sent, and counted."""
        fold = Fold()
        fold.log(shard.job.directory / f"spool-{shard.job.shard}" / "log.jsonl")
        self.kept_ns[shard.name] = fold.last_ns
        for row, part in shard.points:
            have = fold.points.get(part.number)
            ended = have is not None and part.number not in fold.open_points
            missing = [] if ended else [r for r in planned(part, shard.start_ns) if r["id"] not in fold.requests.at]
            if missing:
                now = max(shard.start_ns, fold.last_ns)
                self._recorder.begin_point({**row, "start_ns": shard.start_ns or now}, missing)
                self._recorder.end_point(part.number, now)

    def _until(self, done: Callable[[_Shard], bool], those: Sequence[_Shard]) -> list[_Shard]:
        """Listen until all of them are done; those that are not, END_S later."""
        end = time.monotonic() + END_S
        while (left := [s for s in those if not done(s)]) and time.monotonic() < end:
            self._hear(0.5)
        return left

    def _hear(self, wait_s: float) -> None:
        began = time.monotonic()
        ready = self._selector.select(wait_s)
        for shard in self._shards:
            shard.silent_s += min(time.monotonic() - began, wait_s)
        for key, _ in ready:
            shard = key.data
            shard.silent_s = 0.0
            words = shard.hear()
            if words is None:
                self._selector.unregister(shard.link.out)
                if not self._closed or not shard.ended:
                    shard.died()
                continue
            for what, value in words:
                try:
                    shard.understand(what, value)
                except (ValueError, TypeError, LookupError):
                    shard.give_up("said what makes no sense")


def _with(own: dict[str, Any], link: dict[str, Any]) -> dict[str, Any]:
    """A shard's clock, with what the way to it adds: differences and errors add up."""
    sums: dict[str, Any] = {k: own.get(k, 0) + link[k] for k in ("offset_ns", "offset_error_ns") if k in link}
    return {**own, **link, **sums}


if __name__ == "__main__":
    sys.exit(main())
