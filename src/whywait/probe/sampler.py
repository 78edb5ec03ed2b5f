"""The sampler: a process of its own that asks every source some times a second and keeps what it hears on disk.

It is its own process because parsing under the client's interpreter lock would delay sends. Each source has its own
thread, so a slow one holds up no other. Readings are written as they come (``spool.py``). A source that does not answer
gives ``answered`` = 0, with the reason as its label, and nothing else; one that does gives ``answered`` = 1 first. How
late each thread woke is a reading too (``sampler`` / ``lateness_ms``), and a source whose samples cost more than 2 % of
a core is asked less often.

Histograms are written only when they grew (and once before they did), so straight lines between what is written are
exact; gauges and counters are written every time.

Run as ``python -m whywait.probe.sampler``: the configuration is the first line on stdin (see :class:`Config`), further
lines may add processes (``{"pids": {"client": [123]}}``) or ask to wait for the spans of so many requests
(``{"spans": 100, "patience_s": 6}``; answered by their count), and the end of stdin, or SIGTERM, ends it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from whywait.errors import InternalError
from whywait.net.clock import Clock
from whywait.probe import Row
from whywait.probe.config import Config
from whywait.probe.prometheus import label_json
from whywait.probe.sources import Groups, Source, sources_of
from whywait.probe.spool import Spool, Thinner, read_spool
from whywait.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from whywait.probe.otlp import Receiver

__all__ = ["Config", "SamplerProcess", "read_spool"]

MAX_SHARE = 0.02  # of a core, per source
SPAN_WAIT_S = 60.0  # at most, however they trickle in
SPAN_PATIENCE_S = 7.0  # OpenTelemetry's exporters hand over every 5 s unless told otherwise
READY = b"ready\n"


class _Loop(threading.Thread):
    """Asks one source again and again; ticks missed because an answer came late are skipped and counted."""

    def __init__(self, source: Source, clock: Clock, spool: Spool, config: Config) -> None:
        super().__init__(name=source.name, daemon=True)
        self.source, self.clock, self.spool = source, clock, spool
        self.period = round(NS_PER_S / config.hz)
        self.stop = threading.Event()
        self._thin = Thinner()
        self._labels = label_json({"source": source.name})
        self._skipped = 0
        self._complained = False

    def run(self) -> None:
        due = self.clock.now()
        while True:
            last = self.stop.wait(max(0, due - self.clock.now()) / NS_PER_S)
            woke = self.clock.now()
            cost = self._once()
            if last:  # one more look after the end was asked for, so that counters cover the end of the load
                break
            self._about_us(woke, (woke - due) / NS_PER_MS)
            due += max(self.period, round(cost / MAX_SHARE * NS_PER_S))
            missed = max(0, (self.clock.now() - due) // self.period + 1)
            self._skipped += missed
            due += missed * self.period
        for asked, answered, rows in self._thin.rest():
            self.spool.write(asked, answered, self.source.name, rows)
        self.source.close()

    def _once(self) -> float:
        """One look; its cost in CPU seconds."""
        cpu = time.thread_time()
        asked = self.clock.now()
        try:
            rows = self.source.sample()
            why = "" if rows is not None else self.source.why
        except Exception as exc:
            rows, why = None, type(exc).__name__
            if not self._complained:
                self._complained = True
                traceback.print_exc()
        answered = self.clock.now()
        status: Row = ("answered", label_json({"why": why}) if why else None, 0.0 if rows is None else 1.0)
        for at, done, part in self._thin.split(asked, answered, [status, *(rows or [])]):
            self.spool.write(at, done, self.source.name, part)
        return time.thread_time() - cpu

    def _about_us(self, now: int, late_ms: float) -> None:
        rows: list[Row] = [
            ("lateness_ms", self._labels, round(late_ms, 3)),
            ("cpu_seconds_total", self._labels, time.thread_time()),
        ]
        if self._skipped:
            rows.append(("skipped_ticks_total", self._labels, float(self._skipped)))
        self.spool.write(now, now, "sampler", rows)


class _Stop(Exception):
    pass


def _on_term(_signal: int, _frame: object) -> None:
    raise _Stop


def main() -> int:
    """Sample until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; whoever started us decides
    config = Config.from_json(sys.stdin.buffer.readline())
    if config.cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, config.cpus)
    clock = Clock(config.zero_unix_ns)
    spool = Spool(config.spool)
    loops: list[_Loop] = []

    def start(source: Source) -> None:
        loop = _Loop(source, clock, spool, config)
        loops.append(loop)
        loop.start()

    receiver: Receiver | None = None
    with contextlib.suppress(_Stop):
        signal.signal(signal.SIGTERM, _on_term)
        now = clock.now()
        spool.write(now, now, "sampler", [("clock_error_ns", None, float(clock.error_ns))])
        groups = Groups(start)
        for source in sources_of(config, groups):
            start(source)
        groups.add(config.pids)
        receiver = _receiver(config, clock, spool)
        _say(READY)
        while line := sys.stdin.buffer.readline():
            order = orjson.loads(line)
            groups.add(order.get("pids", {}))
            if "spans" in order:
                _say(b"%d\n" % _wait_for_spans(receiver, order["spans"], order["patience_s"]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # we are ending: a second word changes nothing
    for loop in loops:
        loop.stop.set()
    end = time.monotonic() + config.timeout_s + 1
    for loop in loops:
        loop.join(max(0.0, end - time.monotonic()))
    if receiver is not None:
        receiver.close()
    spool.close()
    return 0


def _say(word: bytes) -> None:
    sys.stdout.buffer.write(word)
    sys.stdout.buffer.flush()


def _receiver(config: Config, clock: Clock, spool: Spool) -> Receiver | None:
    if config.otlp_fd is None and config.otlp_grpc is None:
        return None
    from whywait.probe.otlp import Receiver

    receiver = Receiver(spool, clock.now, config.trace_prefix, config.secret(config.otlp_token_env))
    if config.otlp_fd is not None:
        receiver.serve(socket.socket(fileno=config.otlp_fd))
    if config.otlp_grpc is not None:
        receiver.serve_grpc(config.otlp_grpc)
    return receiver


def _wait_for_spans(receiver: Receiver | None, enough: int, patience_s: float) -> int:
    """Until the spans of so many requests have come, or none has for ``patience_s``; how many there are."""
    if receiver is None:
        return 0
    seen, since = receiver.requests, time.monotonic()
    end = since + SPAN_WAIT_S
    while seen < enough and time.monotonic() < min(end, since + patience_s):
        time.sleep(0.05)
        if receiver.requests != seen:
            seen, since = receiver.requests, time.monotonic()
    return seen


class SamplerProcess:
    """Starts the sampler, ends it, and hands over its readings::

    with SamplerProcess(config) as sampler:
        ...
    rows = sampler.rows
    """

    def __init__(self, config: Config, env: Mapping[str, str] | None = None) -> None:
        """``config.otlp_fd``, if any, is handed over to the sampler; our own end stays open."""
        self.config = config
        self._env = {**os.environ, **(env or {})}  # what ``*_env`` of the configuration name, beside our own
        self.complaint = ""  # what it said on stderr; a doubt when not empty
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SamplerProcess:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What it has written so far, read from disk: a long run's readings are not kept in memory as rows."""
        return read_spool(self.config.spool)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Returns when it samples.

        Raises:
            InternalError: it did not start.
        """
        command = [sys.executable, "-m", "whywait.probe.sampler"]
        pipe = subprocess.PIPE
        fds = () if self.config.otlp_fd is None else (self.config.otlp_fd,)
        process = self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=self._env, pass_fds=fds
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(orjson.dumps(self.config, option=orjson.OPT_APPEND_NEWLINE))
            process.stdin.flush()
        if process.stdout.readline() != READY:
            self.stop()
            raise InternalError(f"the sampler did not start: {(self.complaint or 'no word').splitlines()[-1]}")

    def add_pids(self, group: str, pids: list[int]) -> None:
        """Watch more processes; does nothing when the sampler has ended."""
        self._order({"pids": {group: pids}})

    def wait_for_spans(self, requests: int, patience_s: float = SPAN_PATIENCE_S) -> None:
        """Let the engine hand over the spans of so many requests; gives up when none has come for ``patience_s``."""
        process = self._process
        if process is None or process.stdout is None or not self._order({"spans": requests, "patience_s": patience_s}):
            return
        # Its answer, its end, or nothing where it was stopped itself.
        if select.select([process.stdout], [], [], SPAN_WAIT_S + self.config.timeout_s)[0]:
            process.stdout.readline()

    def _order(self, order: dict[str, Any]) -> bool:
        if self._process is None or self._process.stdin is None:
            return False
        try:
            self._process.stdin.write(orjson.dumps(order, option=orjson.OPT_APPEND_NEWLINE))
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def stop(self) -> None:
        """End it (gently, then not); ``complaint`` says what went wrong, a death before its time too. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            try:
                _, err = process.communicate(timeout=self.config.timeout_s + 3)
            except subprocess.TimeoutExpired:
                process.kill()
                _, err = process.communicate()
            self.complaint = err.decode(errors="replace").strip()
            if process.returncode and not self.complaint:
                self.complaint = f"it ended before its time (exit code {process.returncode})"


if __name__ == "__main__":
    sys.exit(main())
