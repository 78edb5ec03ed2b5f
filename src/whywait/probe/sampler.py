"""The sampler: a process of its own that asks every source some times a second and keeps what it hears on disk.

It is its own process because parsing under the client's interpreter lock would delay sends. Each source has its own
thread, so a slow one holds up no other. Readings are written as they come (``spool.py``). A source that does not answer
gives ``answered`` = 0, with the reason as its label, and nothing else; one that does gives ``answered`` = 1 first. How
late each thread woke is a reading too (``sampler`` / ``lateness_ms``), and a source whose samples cost more than 2 % of
a core is asked less often.

Histograms are written only when they grew (and once before they did), so straight lines between what is written are
exact; gauges and counters are written every time.

Run as ``python -m whywait.probe.sampler``: the configuration is the first line on stdin (see :class:`Config`), further
lines may add processes (``{"pids": {"client": [123]}}``), and the end of stdin, or SIGTERM, ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from whywait.core.secrets import hide_header
from whywait.errors import InternalError, UsageError
from whywait.net.clock import Clock
from whywait.net.reach import Reach
from whywait.probe import Row
from whywait.probe.pages import Fetcher, MetricsPage, SlotsPage
from whywait.probe.prometheus import label_json
from whywait.probe.spool import Spool, Thinner, read_spool
from whywait.units import NS_PER_MS, NS_PER_S

__all__ = ["Config", "SamplerProcess", "read_spool"]

MAX_SHARE = 0.02  # of a core, per source
READY = b"ready\n"


@dataclass(frozen=True)
class Config:
    """``pids`` maps a group (``engine``, ``client``) to process numbers; their children are found. ``api_key_env``,
    ``headers_env`` and ``reach_env`` (a :class:`whywait.net.reach.Reach` as JSON) name environment variables: secrets
    are never in a configuration or on a command line.
    ``kv_unified`` is for llama.cpp, see :func:`whywait.engines.llama_cpp.slot_gauges`."""

    zero_unix_ns: int
    spool: str
    hz: float = 4.0
    metrics_urls: tuple[str, ...] = ()
    slots_url: str | None = None
    engine: str | None = None
    kv_unified: bool | None = None
    pids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    host: bool = True
    gpu: bool = True
    api_key_env: str | None = None
    headers_env: Mapping[str, str] = field(default_factory=dict)
    reach_env: str | None = None
    cpus: tuple[int, ...] = ()
    timeout_s: float = 2.0

    @classmethod
    def from_json(cls, raw: bytes) -> Config:
        """Raises ``UsageError`` when it is not a configuration."""
        try:
            values = dict(orjson.loads(raw))
            unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
            if unknown:
                raise ValueError(f"unknown keys {sorted(unknown)}")
            for name in ("metrics_urls", "cpus"):
                values[name] = tuple(values.get(name, ()))
            config = cls(**values)
            if not 0.01 <= config.hz <= 100:
                raise ValueError("hz must lie between 0.01 and 100")
        except (ValueError, TypeError) as exc:
            raise UsageError(f"not a sampler configuration: {exc}") from None
        return config

    def headers(self) -> dict[str, str]:
        """HTTP headers, with the secrets filled in from the environment."""
        out = {name: os.environ[var] for name, var in self.headers_env.items() if var in os.environ}
        if self.api_key_env and os.environ.get(self.api_key_env):
            out["Authorization"] = f"Bearer {os.environ[self.api_key_env]}"
        for name, value in out.items():
            hide_header(name, value)
        return out


class Source(Protocol):
    """``sample`` gives rows, or None when there was no answer; then ``why`` says in a word or two what went wrong."""

    name: str

    @property
    def why(self) -> str: ...

    def sample(self) -> list[Row] | None: ...

    def close(self) -> None: ...


class _Timed:
    """A source that is a function of the time; no rows means no answer."""

    why = "nothing to read"

    def __init__(self, name: str, get: Callable[[float], list[Row]], close: Callable[[], None] = lambda: None) -> None:
        self.name, self._get, self.close = name, get, close

    def sample(self) -> list[Row] | None:
        return self._get(time.monotonic()) or None


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


class _Groups:
    """Process groups by name; new ones may come while we run."""

    def __init__(self, start: Callable[[Source], None]) -> None:
        from whywait.probe.process import Group

        self._make, self._start = Group, start
        self._groups: dict[str, Any] = {}
        self._named = {os.getpid()}  # ourselves, and every process that was named: each belongs to its own group only

    def add(self, pids: Mapping[str, Iterable[int]]) -> None:
        self._named |= {p for numbers in pids.values() for p in numbers}
        for name, numbers in pids.items():
            if name in self._groups:
                self._groups[name].add(numbers)
            else:
                group = self._groups[name] = self._make(numbers, strangers=self._named)
                self._start(_Timed(f"process/{name}", group.sample))


def _sources(config: Config) -> list[Source]:
    headers, reach = config.headers(), Reach.from_json(os.environ.get(config.reach_env or "", "{}"))
    for name, value in reach.headers:
        hide_header(name, value)
    out: list[Source] = [
        MetricsPage(f"metrics/{i}", Fetcher(url, headers, config.timeout_s, reach), config.engine)
        for i, url in enumerate(config.metrics_urls)
    ]
    if config.slots_url:
        out.append(SlotsPage("slots/0", Fetcher(config.slots_url, headers, config.timeout_s, reach), config.kv_unified))
    if config.host and sys.platform.startswith("linux"):  # elsewhere there is nothing to read: not a lost probe
        from whywait.probe.host import System

        out.append(_Timed("host", System().sample))
    if config.gpu:
        from whywait.probe.gpu import Nvml

        nvml = Nvml.open()
        if nvml is not None:
            out.append(_Timed("gpu", nvml.sample, nvml.close))
    return out


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

    with contextlib.suppress(_Stop):
        signal.signal(signal.SIGTERM, _on_term)
        now = clock.now()
        spool.write(now, now, "sampler", [("clock_error_ns", None, float(clock.error_ns))])
        for source in _sources(config):
            start(source)
        groups = _Groups(start)
        groups.add(config.pids)
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        while line := sys.stdin.buffer.readline():
            groups.add(orjson.loads(line)["pids"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # we are ending: a second word changes nothing
    for loop in loops:
        loop.stop.set()
    end = time.monotonic() + config.timeout_s + 1
    for loop in loops:
        loop.join(max(0.0, end - time.monotonic()))
    spool.close()
    return 0


class SamplerProcess:
    """Starts the sampler, ends it, and hands over its readings::

    with SamplerProcess(config) as sampler:
        ...
    rows = sampler.rows
    """

    def __init__(self, config: Config, env: Mapping[str, str] | None = None) -> None:
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
        process = self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=self._env)
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
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(orjson.dumps({"pids": {group: pids}}, option=orjson.OPT_APPEND_NEWLINE))
            self._process.stdin.flush()

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
