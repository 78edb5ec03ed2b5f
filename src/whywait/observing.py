"""The journeys that send no load: ``whywait watch``, and ``whywait diagnose --prometheus URL --last 1h``.

Part of the application layer. What is read becomes a Run without requests, whose windows of time are its points;
``analyze/passive.py`` makes both accounts of it, and the same rules judge it as any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whywait import app
from whywait.analyze.counters import gauge
from whywait.analyze.passive import load
from whywait.core import secrets
from whywait.core.recorder import Recorder, discard_spool, refuse_used
from whywait.core.run import Manifest, Run
from whywait.core.table import Table
from whywait.counting import devices_of
from whywait.engines import EngineTable
from whywait.errors import UsageError, WhywaitError, WrongModel
from whywait.load import preflight
from whywait.net.clock import Clock
from whywait.net.endpoint import parse_url, read_key
from whywait.net.reach import Reach
from whywait.probe import host
from whywait.probe.options import Probes
from whywait.probe.promql import Prometheus
from whywait.probe.spool import Tail
from whywait.reading import SCRAPES, read_elsewhere, scrape_ns, too_few
from whywait.session import CANCELLED, Say, new_directory, stderr
from whywait.units import NS_PER_S
from whywait.watching import Watching

POINTS = 12  # windows of a kept or past Run at most
SHORTEST_S = 60.0  # of a past Run
LOOK_S = 0.1  # between looks at whether to end
SLACK_NS = 15 * NS_PER_S  # readings kept before a window: an unchanged histogram is written every 10 s
OUTSIDE = {
    "what": "client, network and front end are not seen",
    "why": "nothing was sent: all figures are the engine's own, from when a request reached it",
    "next": "measure from where the users are: whywait run URL (one request at a time)",
}


@dataclass(frozen=True)
class Watch:
    """What ``watch`` needs to know; every field is a flag. ``url`` may be '' with a Prometheus."""

    url: str = ""
    model: str | None = None
    api_key_file: str | None = None
    window_s: float = 30.0
    length_s: float | None = None
    hz: float = 1.0
    out: str | None = None
    slo: dict[str, float] = field(default_factory=dict)
    reach: Reach = field(default_factory=Reach)
    metrics_urls: tuple[str, ...] = ()
    prometheus: Prometheus | None = None
    probes: Probes = field(default_factory=Probes)
    command: tuple[str, ...] = ()


def past(
    source: Prometheus, seconds: float, slo: dict[str, float], out: str | None, command: tuple[str, ...]
) -> app.Result:
    """Judge the last ``seconds`` by what a Prometheus has of them; nothing is sent to the service. Keeps a Run.

    Raises:
        UsageError: it has nothing of that time.
        Unreachable, Unauthorized, NotAnEndpoint: of the Prometheus.
    """
    if out:
        refuse_used(Path(out))
    end = time.time_ns()
    start = end - round(seconds * NS_PER_S)
    table = source.table(start / NS_PER_S, end / NS_PER_S)
    readings = Table.from_rows("readings", source.readings(table, (start, end), start))
    if not len(readings):
        raise UsageError(f"{source.url} has no readings of {table.title} in that time", "a longer --last")
    manifest = Manifest(
        zero_unix_ns=start, command=list(command), endpoint={"url": "", "prometheus": source.url, "loopback": False},
        engine={"name": table.name}, slo=slo, journey={"verb": "past", "seconds": seconds, "match": source.match},
        doubts=[OUTSIDE],
    )  # fmt: skip
    manifest = Manifest(**secrets.cleaned(dataclasses.asdict(manifest)))
    run = with_points(
        _bare(manifest, readings), (0, end - start), max(SHORTEST_S, SCRAPES * scrape_ns(readings) / NS_PER_S)
    )
    return app.keep(run, new_directory(out))


class Watcher:
    """``with Watcher(options) as w: for result in w.windows(every_s): …``; ``finish`` keeps the Run, if asked to."""

    def __init__(self, options: Watch, say: Say = stderr) -> None:
        self.options, self._say = options, say
        self._cancelled = CANCELLED.get()
        self._signalled = False
        self._handlers: dict[int, Any] = {}
        self._stack = contextlib.ExitStack()
        self._recorder: Recorder | None = None
        self._watching = Watching(options.probes, options.reach)
        self._target: preflight.Target | None = None
        self._doubts: list[dict[str, str]] = [OUTSIDE]
        self._number = 0

    def __enter__(self) -> Watcher:
        o = self.options
        if o.out:
            refuse_used(Path(o.out))
        try:
            return self._enter(o)
        except BaseException:
            self.__exit__()
            raise

    def _enter(self, o: Watch) -> Watcher:
        self.clock = Clock()
        self.table = self._find()
        if o.out:
            self._recorder = Recorder(Path(o.out), self._manifest())
            spool = Path(o.out) / "spool"
        else:
            spool = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="whywait-watch-")))
        self._tail = Tail(spool / "readings.jsonl", keep=bool(o.out))
        if self._target is not None:
            self._watching.start(self._target, None, self.clock, spool / "readings.jsonl", o.hz)
        main = threading.current_thread() is threading.main_thread()  # no other may take signals
        for number in (signal.SIGINT, signal.SIGTERM) if main else ():
            self._handlers[number] = signal.signal(number, self._signal)
        self._began = self.clock.now()
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._watching.stop()
        if self._recorder is not None:
            self._recorder.close()
        self._stack.close()

    @property
    def spans_at(self) -> str:
        """Where the engine's spans are waited for; '' where they are not."""
        return self._watching.where

    def windows(self, every_s: float) -> Iterator[app.Result]:
        """The last window judged, again and again, until it is time to end. Whole windows are kept as they end."""
        o, due = self.options, self._began
        whole = self._began  # up to here windows were kept
        last = None if o.length_s is None else self._began + round(o.length_s * NS_PER_S)
        while True:
            due = max(due + round(every_s * NS_PER_S), self.clock.now())  # what was missed is not made up for
            if last is not None:
                due = min(due, last)
            if self._told_to_end(due):
                return
            now = self.clock.now()
            run = self._run((max(self._began, now - round(o.window_s * NS_PER_S)), now))
            yield app.analysed(run, Path(o.out or "."))
            if now - whole >= round(o.window_s * NS_PER_S) * 0.99:
                self._keep_point((whole, now))
                whole = now
            if last is not None and now >= last:
                return

    def _signal(self, *_: Any) -> None:
        self._signalled = True  # no event: setting one that this very thread is about to wait for would wait for ever

    def _told_to_end(self, due_ns: int) -> bool:
        """Wait until then; True as soon as a signal or the caller ends it."""
        while not (self._signalled or (self._cancelled is not None and self._cancelled.is_set())):
            left = (due_ns - self.clock.now()) / NS_PER_S
            if left <= 0:
                return False
            time.sleep(min(left, LOOK_S))
        return True

    def finish(self) -> app.Result | None:
        """Stop reading, and make the Run that was asked for; None where none was."""
        end = self.clock.now()
        extra = self._prometheus((self._began, end)) if self.options.out else []
        self._watching.stop(hurry=True)
        self._doubts += self._watching.complaints
        if self._recorder is None:
            return None
        run = self._recorder.finish(self._manifest(), extra)
        run = with_points(run, (self._began, end), self.options.window_s)
        result = app.keep(run, Path(str(self.options.out)))
        discard_spool(Path(str(self.options.out)))
        return result

    def _find(self) -> EngineTable:
        """What is there, by its pages alone.

        Raises:
            UsageError: nothing can be read of it.
        """
        o = self.options
        if not o.url:
            if o.prometheus is None:
                raise UsageError("which service?", "give a URL, or --prometheus URL")
            now = time.time()
            self._endpoint: dict[str, Any] = {"url": "", "loopback": False, "prometheus": o.prometheus.url}
            return o.prometheus.table(now - max(300.0, o.window_s), now)
        key = read_key(o.api_key_file)
        secrets.hide(key)
        endpoint = parse_url(o.url, "chat", key, 10.0, o.reach)
        try:
            target = preflight.find(endpoint, o.model)
        except WrongModel:
            if o.model:
                raise
            target = preflight.find(endpoint, "")  # a page of metrics is all that is needed
        target = read_elsewhere(target, o.metrics_urls, o.prometheus)
        if target.engine is None or not (target.metrics_urls or o.prometheus):
            hint = "name the page by --metrics-url, another engine by --engine-file; or whywait run URL"
            raise UsageError(f"{endpoint.netloc} publishes no metrics that whywait knows", hint)
        self._endpoint = {"url": endpoint.url, "loopback": endpoint.loopback, "model": target.model}
        serving, doubts = devices_of(target, None)
        self._limits = {**target.limits, **serving}
        self._target = target
        self._doubts += [*(n for n in target.notes if target.simulated), *doubts]
        return target.engine

    def _run(self, span: tuple[int, int]) -> Run:
        rows = self._tail.rows(span[0] - SLACK_NS)
        rows += self._prometheus((span[0] - SLACK_NS, span[1]))
        return with_points(_bare(self._manifest(), Table.from_rows("readings", rows)), span, self.options.window_s)

    def _prometheus(self, span: tuple[int, int]) -> list[dict[str, Any]]:
        source, zero = self.options.prometheus, self.clock.zero_unix_ns
        if source is None:
            return []
        try:
            return source.readings(self.table, (span[0] + zero, span[1] + zero), zero)
        except WhywaitError as exc:  # it did answer when we began: a lost look, not the end of the watch
            lost = {"what": "the Prometheus did not answer all the time", "why": exc.message, "next": exc.hint}
            self._doubts = [d for d in self._doubts if d["what"] != lost["what"]] + [lost]
            return []

    def _keep_point(self, span: tuple[int, int]) -> None:
        """Into the log, so that what was watched is a Run with points even if we are killed."""
        if self._recorder is None:
            return
        row = _point(self._run(span), self._number, span)
        self._recorder.begin_point({**row, "elastic": False}, [])
        self._recorder.end_point(self._number, span[1])
        self._number += 1

    def _manifest(self) -> Manifest:
        o = self.options
        engine = {"name": self.table.name, **getattr(self, "_limits", {})}
        simulated = self._target is not None and self._target.simulated
        local = None if simulated else bool(self._endpoint["loopback"])
        manifest = Manifest(
            zero_unix_ns=self.clock.zero_unix_ns, command=list(o.command), endpoint=self._endpoint, engine=engine,
            machine={"client": host.facts(), "engine_is_local": local}, slo=o.slo,
            journey={"verb": "watch", "window_s": o.window_s, "hz": o.hz}, doubts=list(self._doubts),
        )  # fmt: skip
        return Manifest(**secrets.cleaned(dataclasses.asdict(manifest)))


def with_points(run: Run, span: tuple[int, int], least_s: float) -> Run:
    """``run`` cut into at most ``POINTS`` equal windows of at least ``least_s``; those without a reading are left out.

    The limit of places, where the engine publishes it, goes into the manifest, as for a Run of requests.
    """
    n = max(1, min(POINTS, int((span[1] - span[0]) / NS_PER_S / least_s + 0.01)))
    edges = np.linspace(span[0], span[1], n + 1).astype(np.int64).tolist()
    rows: list[dict[str, Any]] = []
    doubts = list(run.manifest.doubts)
    asked = run.readings["asked_ns"][run.readings["name"] != "answered"]
    for a, b in itertools.pairwise(edges):
        if ((asked >= a) & (asked <= b)).any():
            rows.append(_point(run, len(rows), (a, b)))
    if len(rows) < n:
        doubts.append({"what": f"{n - len(rows)} of {n} windows have no readings", "why": "nothing answered then",
                       "next": "was the service up, and scraped?"})  # fmt: skip
    doubts += filter(None, [too_few(run.readings, edges[1] - edges[0])])
    engine = dict(run.manifest.engine)
    slots = gauge(run.readings, "slots_total", span, combine="max")
    if slots is not None and not engine.get("slots"):
        engine["slots"] = round(slots.high)
    manifest = dataclasses.replace(run.manifest, doubts=doubts, engine=engine)
    return Run(manifest, Table.from_rows("points", rows), run.requests, run.chunks, run.steps, run.readings)


def _point(run: Run, number: int, span: tuple[int, int]) -> dict[str, Any]:
    mode, target = load(run, span)
    edges = {"start_ns": span[0], "end_ns": span[1], "steady_start_ns": span[0], "steady_end_ns": span[1]}
    return {"point": number, "mode": mode, "target": target, "planned": 0, "label": None, **edges}


def _bare(manifest: Manifest, readings: Table) -> Run:
    empty = {name: Table.empty(name) for name in ("points", "requests", "chunks", "steps")}
    return Run(manifest, **empty, readings=readings)
