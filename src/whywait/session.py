"""One measuring session: the service is found, the client knows its floor, a sampler watches, points are driven.

Part of the application layer (with ``app.py``): it joins producers, and only ``app`` adds the analysis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from whywait.core import secrets
from whywait.core.recorder import Recorder, discard_spool, full_disk, refuse_used
from whywait.core.run import Manifest, Run
from whywait.core.schedule import Schedule, Workload
from whywait.core.table import Table
from whywait.counting import devices_of
from whywait.errors import WhywaitError
from whywait.lab.state import Engine
from whywait.load import calibrate, preflight, recount, tokens
from whywait.load.crew import Report, Writer, still_doubt
from whywait.load.driver import Point, Progress
from whywait.load.prompts import Prompter
from whywait.load.recipe import Load, closed_schedule, schedule_of
from whywait.net.clock import Clock
from whywait.net.endpoint import parse_url, read_key
from whywait.net.limits import many_sockets
from whywait.options import KEPT, Options, Say, journey_of, may_load, new_directory, stderr
from whywait.placing import Place
from whywait.probe import bench, host
from whywait.probe.gpu import device_names
from whywait.reading import read_elsewhere, too_few
from whywait.units import NS_PER_MS, NS_PER_S
from whywait.watching import Watching

__all__ = ["KEPT", "Options", "Say", "Session", "new_directory", "stderr"]

ERROR_SHARE_STOP = 0.05
#: Set by who waits for a journey that runs in another thread (the asynchronous API), to end it as Ctrl-C would.
CANCELLED: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)
HELD_NS = 5 * NS_PER_MS  # sent so late under max_in_flight, a request waited for a place


class Session:
    """``with Session(options, say) as s: s.point(...); run = s.finish()``. Leaves a loadable folder however it ends."""

    def __init__(
        self, options: Options, say: Say, watch: Callable[[Progress], None] | None = None, engine: Engine | None = None
    ) -> None:
        self.options, self._say, self.engine = options, say, engine
        self._watch = watch or (lambda _p: None)
        self.target: preflight.Target
        self.directory: Path
        self.reason = ""
        self.last_e2e_s: float | None = None
        self.last_tokens_per_s: float | None = None
        self.next_id = 0
        self._number = 0
        self._signal = 0
        self._doubts: list[dict[str, str]] = []
        self._warmed: dict[str, int] = {}
        self._recounts: dict[str, dict[str, Any]] = {}
        self._old_handlers: dict[int, Any] = {}
        self._watching: Watching

    def __enter__(self) -> Session:
        if self.options.out:
            refuse_used(Path(self.options.out))
        self._watching = Watching(self.options.probes, self.options.reach)
        try:
            self._begin()
        except BaseException:
            self._watching.stop()
            if hasattr(self, "_place"):
                self._place.close()
            raise
        main = threading.current_thread() is threading.main_thread()  # no other may take signals
        for number in (signal.SIGINT, signal.SIGTERM) if main else ():
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def _begin(self) -> None:
        o = self.options
        if o.tokenizer:
            tokens.load(o.tokenizer)  # what is wrong with it is said before anything is sent
        key = read_key(o.api_key_file)
        secrets.hide(key)
        endpoint = parse_url(o.url, o.dialect, key, o.workload.timeout_s, o.reach)
        may_load(endpoint, o)
        endpoint = self._watching.addressed(endpoint)
        found = preflight.find(endpoint, o.model)
        self.target = dataclasses.replace(found, extra=o.body, tokenizer=o.tokenizer)
        endpoint = self.target.endpoint  # a redirect may have moved it
        self._place = Place(o, endpoint)
        self.target = read_elsewhere(self.target, o.metrics_urls, o.prometheus)
        for said in preflight.aloud(endpoint):
            self._say(f"{said['what']}: {said['why']}")
            self._doubts.append(said)
        if self._place.words:
            self._say(self._place.words)
        self._announce()
        preflight.fit_context(self.target, o.workload)
        first = preflight.first_request(self.target, o.workload, o.stream)
        self._salt = o.salt or os.urandom(4).hex()
        seed = o.workload.seed if o.text_seed is None else o.text_seed
        prompter = Prompter(seed, o.workload.cache, self._salt)
        self.prompter, doubts = calibrate.calibrate(self.target, o.workload, prompter)
        self._counter = calibrate.counter(self.target, o.workload, self.prompter)
        if o.tokenizer and self._counter is None:
            doubts = [*doubts, calibrate.tokenizer_doubt(o.tokenizer)]
        self._doubts += [*doubts, *self.target.notes]
        if "output_tokens" in first and first["output_tokens"] is None:
            next_ = "chunks are counted instead; TPOT becomes an interval"
            self.doubt("token counts are unknown", "the service sends no usage", next_)
        self._floor = self._place.floor(self._say) if o.floor else {}
        self._rates = self._engine_rates()
        self._devices, doubts = devices_of(self.target, self.engine)
        self._doubts += doubts
        self.directory = new_directory(o.out)
        self.clock = Clock()
        self.recorder = Recorder(self.directory, self._manifest())
        spool = self.directory / "spool" / "readings.jsonl"
        self._watching.start(self.target, self.engine, self.clock, spool, o.metrics_hz)
        many_sockets()
        loaded = self._watching.loaded(self.target)
        self.crew = self._place.crew(loaded, self.recorder, self.clock, self._watch, self._stop)
        self._watching.add_client(list(self._place.pids(self.crew)))

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._watching.stop()
        self.crew.close()
        self._place.close()
        self.recorder.close()

    def forget(self) -> None:
        """Nothing was measured and nothing will be: leave no folder behind."""
        self.__exit__(None, None, None)
        discard_spool(self.directory)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def go_on_from(self, point: int, next_id: int) -> None:
        """Number points and requests from here: those before are in another Run, which this one will be joined to."""
        self._number, self.next_id = point, next_id

    @property
    def interrupted(self) -> bool:
        return bool(self._signal)

    def point(self, load: Load) -> bool:
        """Drive one load point; False when the session was cut short and no further point should follow."""
        workload = load.workload or self.options.workload
        schedule, duration_s = schedule_of(load, workload, self.next_id, self._number)
        salt = f"{self._salt}-{self._number}"  # no point knows another's
        self.prompter = dataclasses.replace(self.prompter, salt=salt)
        if self._counter is not None:
            self.prompter = calibrate.exact(self._counter, self.prompter, schedule, workload)
        return self.drive(schedule, dataclasses.replace(load, duration_s=duration_s))

    def drive(self, schedule: Schedule, load: Load) -> bool:
        """As :meth:`point`, with rows made elsewhere; their ids go on from ``next_id``."""
        workload = load.workload or self.options.workload
        writer = Writer(self.target, self.prompter, workload, self.options.stream)
        if workload.cache == "warm":
            warmed = writer.warm(schedule)
            self._warmed[str(self._number)] = warmed.answered
            self._say(str(warmed))
        point = Point(self._number, load.mode, load.target, schedule, load.duration_s, load.label)
        point.ramp_s, point.max_in_flight = workload.ramp_s, workload.max_in_flight
        reason = self.crew.run(point, writer)
        self.next_id += len(schedule)
        self._number += 1
        self.reason = self.reason or reason
        self._last(point, workload)
        return not self.reason

    @property
    def slots(self) -> int | None:
        """How many requests the engine works on at once, where that is known."""
        own = (self.engine.slots or self.engine.max_num_seqs) if self.engine is not None else None
        return own or self.target.limits.get("slots")

    def snapshot(self) -> Run:
        """The run so far as recorded, without its chunks, with what the sampler has read."""
        return self.recorder.peek()

    def stop(self, reason: str) -> None:
        """No further point; the Run is labelled PARTIAL with this reason."""
        self.reason = self.reason or reason

    def doubt(self, what: str, why: str, next_: str) -> None:
        self._doubts.append({"what": what, "why": why, "next": next_})

    def _last(self, point: Point, workload: Workload) -> None:
        """Rough figures of the point just driven, for deciding what to measure next, and how long prompts came out."""
        run = self.recorder.peek().point(self._number - 1)
        ok = run.requests.where(run.requests["outcome"] == 0)
        took = ok["end_ns"] - ok["sent_ns"]
        self.last_e2e_s = float(np.median(took)) / NS_PER_S if len(ok) else None
        content = float(np.nansum(run.requests["content_chunks"]))
        wall = float(run.points["end_ns"][0] - run.points["start_ns"][0]) / NS_PER_S
        tokens = float(np.nansum(ok["output_tokens"])) or content
        self.last_tokens_per_s = tokens / wall if wall > 0 else None
        if self._counter is None:
            known = ok.where(~np.isnan(ok["prompt_tokens"]))
            counts = zip(known["id"].tolist(), known["prompt_tokens"].astype(int).tolist(), strict=True)
            self.prompter = calibrate.refined(self.prompter, point.schedule, workload, counts)
        usage = dict(zip(ok["id"].tolist(), ok["output_tokens"].tolist(), strict=True))
        found = recount.compared(self.crew.report().recounts.get(str(point.number), ()), usage)
        if found:
            self._recounts[str(point.number)] = found
            self._doubts += filter(None, [recount.doubt_of(point.number, found)])
        late = run.requests["sent_ns"] - run.requests["due_ns"] > HELD_NS
        if point.max_in_flight is not None and not point.closed and late.any():
            what = f"{int(late.sum())} of {len(late)} requests waited in the client for a place in flight"
            why = f"max_in_flight is {point.max_in_flight}; their wait counts from when they were due (client phase)"
            self.doubt(what, f"point {point.number}: {why}", "raise --max-in-flight, or read it as the service's queue")

    def finish(self) -> Run:
        """Stop sampling and make the Run (in memory; the spool stays until it is saved)."""
        extra = self._from_prometheus()
        self._watching.stop(self.crew.report().succeeded, hurry=self.interrupted)
        self.crew.close()
        report = self.crew.report()
        for lost in report.lost:
            self.reason = self.reason or lost
        still = still_doubt(report.still)
        if still:
            self._doubts.append(still)
        self._doubts += [*self._watching.complaints, *self._place.doubts, *self._place.told(self.crew, report)]
        manifest = self._manifest()
        manifest = dataclasses.replace(manifest, partial=bool(self.reason), partial_reason=secrets.clean(self.reason))
        if report.disk:
            raise full_disk(self.directory, report.disk)
        return self._watching.finished(self.recorder.finish(manifest, extra))

    def _from_prometheus(self) -> list[dict[str, Any]]:
        """What a Prometheus has of the time since the first point; what it cannot tell becomes a doubt."""
        source, table, zero = self.options.prometheus, self.target.engine, self.clock.zero_unix_ns
        if source is None or table is None or not len(points := self.recorder.peek().points):
            return []
        try:
            now = self.clock.now()
            rows = source.readings(table, (int(points["start_ns"].min()) + zero, now + zero), zero)
            shortest = float((points["end_ns"] - points["start_ns"]).min())
            self._doubts += filter(None, [too_few(Table.from_rows("readings", rows), shortest)])
            return rows
        except WhywaitError as exc:
            self.doubt("the Prometheus gave no readings", exc.message, exc.hint or "")
            return []

    # inside

    def _stop(self, progress: Progress) -> str:
        if self._signal or ((cancelled := CANCELLED.get()) is not None and cancelled.is_set()):
            self._signal = self._signal or signal.SIGINT
            return "interrupted"
        if not self.target.endpoint.loopback and progress.ended >= 40:
            seen = self.crew.report()
            failed = seen.failed / max(1, seen.failed + seen.succeeded)
            if failed > ERROR_SHARE_STOP:
                return f"{failed:.0%} of the requests failed (limit {ERROR_SHARE_STOP:.0%} on a service not our own)"
        return ""

    def _announce(self) -> None:
        """Before load on a service that is not here: the most it will be sent."""
        if self.target.endpoint.loopback or not self.options.load_ok:
            return
        o, n = self.options, self.options.max_requests
        like = closed_schedule(o.workload, min(n or 200, 1000))  # histories, thinking and traces included
        tokens = float(np.mean(like.prompt_tokens + like.output_tokens))
        most = (
            f"at most {n} requests, about {n * tokens:,.0f} tokens" if n else f"requests of some {tokens:,.0f} tokens"
        )
        where = self.target.endpoint.netloc
        self._say(f"load on {where}: {most}; it stops at {ERROR_SHARE_STOP:.0%} errors or foreign traffic")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal:  # the second time: leave at once
            raise KeyboardInterrupt
        self._signal = number

    def _engine_rates(self) -> dict[str, Any] | None:
        """What the embedded engine's own CPUs can read and compute, while it is still idle: for the roofline."""
        e, size = self.engine, self.target.limits.get("model_bytes")
        if e is None or e.kind != "embedded" or not size:
            return None
        return bench.measure(e.threads or 1, size, e.cpus)

    def _manifest(self) -> Manifest:
        o, t = self.options, self.target
        engine: dict[str, Any] = {"name": t.engine.name if t.engine else None, "model": t.model, **t.limits}
        engine.update(self._devices)
        if self.engine is not None:
            e = self.engine
            engine.update(kind=e.kind, threads=e.threads, cpus=list(e.cpus), kv_tokens=e.kv_tokens)
            if e.slots or e.max_num_seqs:
                engine["slots"] = e.slots or e.max_num_seqs
        client = {
            "floor": self._floor,
            **({"floors": self._place.floors} if self._place.floors else {}),
            "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        }
        report = self.crew.report() if hasattr(self, "crew") else Report({}, [])
        client.update(report.client, warmed_by_point=self._warmed, recount_by_point=self._recounts)
        client["trace_prefix"] = self._watching.trace_prefix
        local = t.endpoint.loopback
        here = None if t.simulated else local  # no machine is the simulated one's
        machine: dict[str, Any] = {"client": host.facts(), "engine_is_local": here, "engine_rates": self._rates}
        machine.update(agents=self._watching.agents, gpus=device_names() if here else [])
        manifest = Manifest(
            zero_unix_ns=self.clock.zero_unix_ns,
            command=list(o.command),
            seed=o.seed,
            endpoint={"url": t.endpoint.url, "dialect": t.endpoint.dialect, "stream": o.stream, "loopback": local},
            engine=engine,
            machine=machine,
            workload=o.workload.as_dict(),
            client=client,
            clock=report.clock,
            slo=o.slo,
            journey=journey_of(o),
            doubts=self._doubts,
        )
        return Manifest(**secrets.cleaned(dataclasses.asdict(manifest)))  # a service may echo what we sent it
