"""One measuring session: the service is found, the client knows its floor, a sampler watches, points are driven.

Part of the application layer (with ``app.py``): it joins producers, and only ``app`` adds the analysis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from whywait.core import secrets
from whywait.core.recorder import Recorder, discard_spool, full_disk, refuse_used
from whywait.core.run import Manifest, Run
from whywait.core.schedule import Workload
from whywait.errors import InternalError, UsageError
from whywait.lab.state import Engine
from whywait.load import calibrate, preflight, recount, tokens
from whywait.load.crew import Crew, Report, Solo, Writer, many_sockets, still_doubt
from whywait.load.driver import Point, Progress
from whywait.load.floor import floor_line, measure_floor
from whywait.load.prompts import Prompter
from whywait.load.recipe import Load, closed_schedule, schedule_of
from whywait.load.shards import Job, Shards, zero_of
from whywait.net.clock import Clock
from whywait.net.endpoint import Endpoint, parse_url, read_key
from whywait.net.reach import Reach
from whywait.probe import bench, host
from whywait.probe.listener import listening_pids
from whywait.probe.sampler import Config, SamplerProcess
from whywait.units import NS_PER_MS, NS_PER_S

Say = Callable[[str], None]
ERROR_SHARE_STOP = 0.05
HELD_NS = 5 * NS_PER_MS  # sent so late under max_in_flight, a request waited for a place


@dataclass(frozen=True)
class Options:
    """What a journey needs to know; every field is a flag of the command line."""

    url: str = ""
    model: str | None = None
    dialect: str = "chat"
    api_key_file: str | None = None
    workload: Workload = field(default_factory=Workload)
    stream: bool = True
    load_ok: bool = False
    out: str | None = None
    slo: dict[str, float] = field(default_factory=dict)
    seed: int = 1
    floor: bool = True
    metrics_hz: float = 4.0
    max_requests: int | None = None  # the ceiling printed before load, when known
    processes: int = 1
    loads: tuple[Load, ...] = ()  # what is to be measured, where that is known before
    single_stream_ok: bool = False  # the journey itself keeps to one stream where load is not allowed
    command: tuple[str, ...] = ()
    reach: Reach = field(default_factory=Reach)  # TLS, proxy, headers
    body: dict[str, Any] = field(default_factory=dict)  # fields merged into every request
    tokenizer: str = ""  # a tokenizer.json or its folder, where the service does not count prompts itself


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
        self._next_id = 0
        self._number = 0
        self._signal = 0
        self._doubts: list[dict[str, str]] = []
        self._warmed: dict[str, int] = {}
        self._recounts: dict[str, dict[str, Any]] = {}
        self._old_handlers: dict[int, Any] = {}
        self._sampler: SamplerProcess | None = None

    def __enter__(self) -> Session:
        o = self.options
        if o.out:
            refuse_used(Path(o.out))
        if o.tokenizer:
            tokens.load(o.tokenizer)  # what is wrong with it is said before anything is sent
        key = read_key(o.api_key_file)
        secrets.hide(key)
        endpoint = parse_url(o.url, o.dialect, key, o.workload.timeout_s, o.reach)
        _may_load(endpoint, o)
        self.target = dataclasses.replace(preflight.find(endpoint, o.model), extra=o.body, tokenizer=o.tokenizer)
        endpoint = self.target.endpoint  # a redirect may have moved it
        for said in preflight.aloud(endpoint):
            self._say(f"{said['what']}: {said['why']}")
            self._doubts.append(said)
        self._announce()
        preflight.fit_context(self.target, o.workload)
        first = preflight.first_request(self.target, o.workload, o.stream)
        self._salt = os.urandom(4).hex()
        prompter = Prompter(o.workload.seed, o.workload.cache, self._salt)
        self.prompter, doubts = calibrate.calibrate(self.target, o.workload, prompter)
        self._counter = calibrate.counter(self.target, o.workload, self.prompter)
        if o.tokenizer and self._counter is None:
            doubts = [*doubts, calibrate.tokenizer_doubt(o.tokenizer)]
        self._doubts += [*doubts, *self.target.notes]
        if "output_tokens" in first and first["output_tokens"] is None:
            next_ = "chunks are counted instead; TPOT becomes an interval"
            self.doubt("token counts are unknown", "the service sends no usage", next_)
        self._floor = self._measure_floor()
        self._rates = self._engine_rates()
        self.directory = _new_directory(o.out)
        self.clock = Clock()
        self.recorder = Recorder(self.directory, self._manifest())
        self._start_sampler(endpoint)
        many_sockets()
        self.crew = self._crew()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        if self._sampler is not None:
            self._sampler.stop()
        self.crew.close()
        self.recorder.close()

    def forget(self) -> None:
        """Nothing was measured and nothing will be: leave no folder behind."""
        self.__exit__(None, None, None)
        discard_spool(self.directory)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def go_on_from(self, point: int, next_id: int) -> None:
        """Number points and requests from here: those before are in another Run, which this one will be joined to."""
        self._number, self._next_id = point, next_id

    @property
    def interrupted(self) -> bool:
        return bool(self._signal)

    def point(self, load: Load) -> bool:
        """Drive one load point; False when the session was cut short and no further point should follow."""
        workload = load.workload or self.options.workload
        schedule, duration_s = schedule_of(load, workload, self._next_id, self._number)
        self.prompter = dataclasses.replace(
            self.prompter, salt=f"{self._salt}-{self._number}"
        )  # no point knows another's
        if self._counter is not None:
            self.prompter = calibrate.exact(self._counter, self.prompter, schedule, workload)
        writer = Writer(self.target, self.prompter, workload, self.options.stream)
        if workload.cache == "warm":
            warmed = writer.warm(schedule)
            self._warmed[str(self._number)] = warmed.answered
            self._say(str(warmed))
        point = Point(self._number, load.mode, load.target, schedule, duration_s, load.label)
        point.ramp_s, point.max_in_flight = workload.ramp_s, workload.max_in_flight
        reason = self.crew.run(point, writer)
        self._next_id += len(schedule)
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
        if self._sampler is not None:
            self._sampler.stop()
            if self._sampler.complaint:
                said = self._sampler.complaint.splitlines()[-1]
                self.doubt("the metrics sampler had trouble", said, "see whether the service's metrics answer")
        self.crew.close()
        report = self.crew.report()
        for lost in report.lost:
            self.reason = self.reason or lost
        still = still_doubt(report.still)
        if still:
            self._doubts.append(still)
        manifest = self._manifest()
        manifest = dataclasses.replace(manifest, partial=bool(self.reason), partial_reason=secrets.clean(self.reason))
        if report.disk:
            raise full_disk(self.directory, report.disk)
        return self.recorder.finish(manifest)

    # inside

    def _crew(self) -> Crew:
        n = self.options.processes
        if n == 1:
            return Solo(self.target, self.recorder, self.clock, self._watch, self._stop)
        zero, hidden = zero_of(self.clock), secrets.known()
        jobs = [Job(k, self.directory, zero, self.target, hidden) for k in range(n)]
        shards = Shards(jobs, self.recorder, self._watch, self._stop)
        if self._sampler is not None:
            self._sampler.add_pids("client", list(shards.pids))
        return shards

    def _stop(self, progress: Progress) -> str:
        if self._signal:
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

    def _measure_floor(self) -> dict[str, Any]:
        if not self.options.floor:
            return {}
        try:
            floor = measure_floor(16, seconds=1.0)
        except (InternalError, OSError) as exc:
            self.doubt("the client's own floor was not measured", str(exc), "")
            return {}
        self._say(floor_line(floor))
        return floor

    def _engine_rates(self) -> dict[str, Any] | None:
        """What the embedded engine's own CPUs can read and compute, while it is still idle: for the roofline."""
        e, size = self.engine, self.target.limits.get("model_bytes")
        if e is None or e.kind != "embedded" or not size:
            return None
        return bench.measure(e.threads or 1, size, e.cpus)

    def _start_sampler(self, endpoint: Endpoint) -> None:
        t = self.target
        pids: dict[str, tuple[int, ...]] = {"client": (os.getpid(),)}
        engine: tuple[int, ...] = (self.engine.pid,) if self.engine is not None else ()
        if not engine and endpoint.loopback and not endpoint.unix:
            engine = tuple(p for p in listening_pids(endpoint.port) if p != os.getpid())
        if engine:
            pids["engine"] = engine
        # Secrets reach the sampler by its environment, never by its configuration.
        env = {"WHYWAIT_SAMPLER_KEY": endpoint.api_key or "", "WHYWAIT_SAMPLER_REACH": endpoint.reach.as_json()}
        config = Config(
            zero_unix_ns=self.clock.zero_unix_ns,
            spool=str(self.directory / "spool" / "readings.jsonl"),
            hz=self.options.metrics_hz,
            metrics_urls=(t.metrics_url,) if t.metrics_url else (),
            slots_url=t.slots_url,
            engine=t.engine.name if t.engine else None,
            kv_unified=False if self.engine is not None and self.engine.kind == "embedded" else None,
            pids=pids,
            host=endpoint.loopback,
            gpu=endpoint.loopback,
            api_key_env="WHYWAIT_SAMPLER_KEY",
            reach_env="WHYWAIT_SAMPLER_REACH",
        )
        try:
            self._sampler = SamplerProcess(config, env)
            self._sampler.start()
        except (InternalError, OSError) as exc:
            self._sampler = None
            self.doubt("nothing was sampled beside the load", str(exc), "")

    def _manifest(self) -> Manifest:
        o, t = self.options, self.target
        engine: dict[str, Any] = {"name": t.engine.name if t.engine else None, "model": t.model, **t.limits}
        if self.engine is not None:
            e = self.engine
            engine.update(kind=e.kind, threads=e.threads, cpus=list(e.cpus), kv_tokens=e.kv_tokens)
            if e.slots or e.max_num_seqs:
                engine["slots"] = e.slots or e.max_num_seqs
        client = {
            "floor": self._floor,
            "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        }
        report = self.crew.report() if hasattr(self, "crew") else Report({}, [])
        client.update(report.client, warmed_by_point=self._warmed, recount_by_point=self._recounts)
        local = t.endpoint.loopback
        manifest = Manifest(
            zero_unix_ns=self.clock.zero_unix_ns,
            command=list(o.command),
            seed=o.seed,
            endpoint={"url": t.endpoint.url, "dialect": t.endpoint.dialect, "stream": o.stream, "loopback": local},
            engine=engine,
            machine={"client": host.facts(), "engine_is_local": local, "engine_rates": self._rates},
            workload=o.workload.as_dict(),
            client=client,
            clock=report.clock,
            slo=o.slo,
            journey=_journey(o),
            doubts=self._doubts,
        )
        return Manifest(**secrets.cleaned(dataclasses.asdict(manifest)))  # a service may echo what we sent it


#: Options that a resumed run takes from the first. Not what holds secrets (headers, proxy, keys), which are given anew.
KEPT = ("url", "model", "dialect", "stream", "slo", "seed", "metrics_hz", "processes", "body", "tokenizer")


def _journey(o: Options) -> dict[str, Any]:
    loads = [{k: getattr(x, k) for k in ("mode", "target", "requests", "duration_s", "label")} for x in o.loads]
    return {"options": {k: getattr(o, k) for k in KEPT}, "headers": [n for n, _ in o.reach.headers], "loads": loads}


def _may_load(endpoint: Endpoint, o: Options) -> None:
    if endpoint.loopback or o.load_ok or o.single_stream_ok:
        return
    ceiling = f"up to {o.max_requests} requests" if o.max_requests else "load"
    raise UsageError(
        f"{endpoint.netloc} is not this machine, and this would send it {ceiling}",
        "add --load if you may load that service",
    )


def _new_directory(out: str | None) -> Path:
    if out:
        return Path(out)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = Path("whywait-runs")
    for tail in ("", *(f"-{i}" for i in range(2, 100))):
        if not (base / f"{stamp}{tail}").exists():
            return base / f"{stamp}{tail}"
    raise UsageError(f"too many runs in {base} at this second", "give --out")


def stderr(line: str) -> None:
    print(secrets.clean(line), file=sys.stderr, flush=True)
