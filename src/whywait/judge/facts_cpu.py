"""Processor time of the engine at a load point: had its computing threads the cores they wanted?

A thread's run-queue wait over what it wanted (run + wait) is the loss. Only the threads that compute count: a scheduler
thread beside a spinning worker on one pinned core waits nearly all the time and does no harm.
"""

from __future__ import annotations

from typing import NamedTuple

from whywait.analyze.counters import delta, gauge, series
from whywait.core.run import Run
from whywait.judge.evidence import Cpu

HOT = 0.3  # threads that used this share of the busiest thread's time are those that compute
CHILD = 1.5  # times the client's own CPU time, and half a second: a thread beyond is none of its own
#: Parts of the process names that engines give themselves (comm is cut at 15 letters).
WORKERS, SCHEDULERS = ("worker",), ("enginecor", "apiserver", "detokenizer")
#: They wait for their worker in a busy loop: what they run, and what they wait to run, is no work.
SPINNERS = ("enginecor",)
Span = tuple[int, int]


class _Thread(NamedTuple):
    name: str
    process: str
    run: float
    wait: float


def engine_cpu(run: Run, span: Span) -> Cpu:
    """What the readings of the engine's processes say of ``span``; all None where it was not on this machine."""
    total = _rate(run, "cpu_seconds_total", span, "process/engine")
    if total is None:
        return Cpu()
    threads = _threads(run, span, "process/engine")
    hot = _computing(threads)
    run_s, wait_s = sum(t.run for t in hot), sum(t.wait for t in hot)
    if not hot:
        run_s, wait_s = total, _rate(run, "run_queue_wait_seconds_total", span, "process/engine") or 0.0
    cold = [t for t in threads if t not in hot]
    top = max((t for t in cold if not _named(t, SPINNERS)), key=lambda t: t.run, default=None)
    cores = gauge(run.readings, "cores_allowed", span, "process/engine")
    quota = gauge(run.readings, "cgroup_quota_cores", span, "process/engine", "mean")
    periods = delta(run.readings, "cgroup_periods_total", span, "process/engine")
    throttled = delta(run.readings, "cgroup_throttled_periods_total", span, "process/engine")
    busy = _rate(run, "engine_cores_busy_seconds_total", span, "host")
    if (
        busy is None
        and cores is not None
        and cores.mean >= (run.manifest.machine.get("client") or {}).get("cores", 1e9)
    ):
        busy = _rate(run, "cpu_busy_seconds_total", span, "host")
    mine = sum(t.run for t in _loops(run, span))  # if we run on its cores: what we take is not somebody else's doing
    stopped = _rate(run, "cgroup_throttled_seconds_total", span, "process/engine")
    return Cpu(
        run=total,
        lost=wait_s / (run_s + wait_s) if run_s + wait_s > 0 else None,
        wait=wait_s / max(len(hot), 1),
        others=None if busy is None else max(busy - total - mine, 0.0),
        serving=max(total - run_s, 0.0) if hot else None,
        serving_wait=sum(t.wait for t in cold),
        serving_top=None if top is None else (top.process, top.run, top.wait),
        quota=None if quota is None else quota.mean,
        throttled=stopped,
        throttled_periods=throttled.value / periods.value if throttled and periods and periods.value > 0 else None,
        neighbour=_neighbour(run, span),
        hot=max((t.run + t.wait for t in hot), default=run_s + wait_s) + (stopped or 0.0),
    )


def _computing(threads: list[_Thread]) -> list[_Thread]:
    """Those that compute: of engines that name their processes the workers, else the busiest."""
    workers = [t for t in threads if _named(t, WORKERS)]
    mine = workers or [t for t in threads if not _named(t, SCHEDULERS)]
    return [t for t in mine if t.run >= HOT * max(x.run for x in mine)]


def _named(t: _Thread, words: tuple[str, ...]) -> bool:
    return any(word in t.process.lower() for word in words)


def client_lost(run: Run, span: Span) -> float | None:
    """What the client's own busiest thread waited for a core, of the time it wanted one (0..1)."""
    loops = [t for t in _loops(run, span) if t.run + t.wait > 0.005]
    if not loops:
        run_s = _rate(run, "cpu_seconds_total", span, "process/client")
        wait_s = _rate(run, "run_queue_wait_seconds_total", span, "process/client")
        return None if run_s is None or wait_s is None or run_s + wait_s <= 0 else wait_s / (run_s + wait_s)
    return max(t.wait / (t.run + t.wait) for t in loops)


def _loops(run: Run, span: Span) -> list[_Thread]:
    """The client's threads. It says how much CPU time it used itself: a thread that used clearly more is of something
    else that the same process started."""
    found = _threads(run, span, "process/client")
    own = sum((run.manifest.client.get("cpu_ns_by_point") or {}).values()) / 1e9
    most = (CHILD * own + 0.5) / max((span[1] - span[0]) / 1e9, 1e-9)
    return [t for t in found if not own or t.run <= most]


def neighbours(run: Run, span: Span, engine: float | None) -> float | None:
    """Cores used by what is neither ``engine`` (the cores it used) nor client, anywhere on this machine."""
    busy, loops = _rate(run, "cpu_busy_seconds_total", span, "host"), _loops(run, span)
    if engine is None and run.manifest.machine.get("engine_is_local") is False:
        engine = 0.0
    if busy is None or engine is None or not loops:
        return None
    return max(busy - engine - sum(t.run for t in loops), 0.0)


def _threads(run: Run, span: Span, source: str) -> list[_Thread]:
    out = []
    for s in series(run.readings, "thread_cpu_seconds_total", source):
        ran = _rate(run, "thread_cpu_seconds_total", span, source, s.labels)
        waited = _rate(run, "thread_wait_seconds_total", span, source, s.labels)
        if ran is not None:
            out.append(_Thread(s.labels.get("thread", ""), s.labels.get("process", ""), ran, waited or 0.0))
    return out


def _rate(run: Run, name: str, span: Span, source: str, labels: dict[str, str] | None = None) -> float | None:
    """Growth per second of the span; a thread that lived a part of it counts by what it did in the whole."""
    found = delta(run.readings, name, span, source, labels)
    if found is None:
        return None
    seconds = (found.end_ns - found.start_ns if labels is None else span[1] - span[0]) / 1e9
    return found.value / seconds if seconds > 0 else None


def _neighbour(run: Run, span: Span) -> str:
    """Who else used most, by the name of the process."""
    used: dict[str, float] = {}
    for s in series(run.readings, "neighbour_cpu_seconds_total", "host"):
        grown = _rate(run, "neighbour_cpu_seconds_total", span, "host", s.labels) or 0.0
        used[s.labels.get("process", "")] = used.get(s.labels.get("process", ""), 0.0) + grown
    return max(used, key=lambda k: used[k], default="")
