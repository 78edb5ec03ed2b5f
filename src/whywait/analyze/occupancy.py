"""The device account: wall time × devices, every nanosecond in one category, seen from the requests outside.

The engine's steps are not seen, so *busy* means that a request of ours was being computed as far as its stamps tell;
CPU time of the engine's process, where it is read, bounds it from above. Categories without any evidence stay 0 and
``unknown`` holds their time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from whywait.analyze.counters import delta, series
from whywait.analyze.device_evidence import UNCOVERED, apply, device_evidence
from whywait.analyze.first_token import KV_FULL, prefill_windows, waiting_seen
from whywait.analyze.pools import Pools, Span, clip, pools_of
from whywait.analyze.stats import Doubt
from whywait.core.run import Run, laid_out
from whywait.core.table import Array
from whywait.units import NS_PER_S

CATEGORIES = (
    "prefill_busy", "decode_busy", "communication", "idle_no_work", "idle_host", "idle_kv_blocked", "throttled",
    "unknown",
)  # fmt: skip
STALE = 3  # a reading speaks for at most this many usual sampling intervals


@dataclass(frozen=True)
class DeviceAccount:
    """Device time of a window in ns × devices; ``ns`` over ``CATEGORIES`` adds up to ``total_ns`` exactly.

    ``how`` is measured, derived, modelled, inferred or unknown for each. The true busy time lies between
    ``busy_low_ns`` and ``busy_high_ns``, as far as the evidence goes: high = all that may be busy, at most the engine's
    CPU time over its threads, or the GPU's own share of busy time, where that was read; low = what the account calls
    busy, at most high. ``kv_blocked_ns`` is the time in which requests waited while the KV space was full and fewer
    were in work than the engine takes, whatever the device did (None where that was not read); ``notes`` say in words
    what a category rests on. ``pool_idle_ns`` is the part of idle_no_work in which only one pool of a split service had
    no request.
    """

    start_ns: int
    end_ns: int
    devices: int
    ns: dict[str, int]
    how: dict[str, str]
    busy_low_ns: int
    busy_high_ns: int
    doubts: list[Doubt]
    kv_blocked_ns: int | None = None
    notes: dict[str, str] = field(default_factory=dict)
    pool_idle_ns: int = 0

    @property
    def total_ns(self) -> int:
        return (self.end_ns - self.start_ns) * self.devices


def device_account(run: Run, start_ns: int | None = None, end_ns: int | None = None) -> DeviceAccount:
    """The device account of ``run`` between two times (ns; default from the first point's start to the last's end).

    By sweep line, at every instant: a request in its prefill window → prefill_busy; else one between first and last
    token → decode_busy; else none in flight → idle_no_work; else, if ``waiting`` readings are above 0 and the prefill
    of every request in flight is known not to be now → idle_kv_blocked where the KV space was full too, else idle_host;
    else unknown. None of ours in flight while the engine says that it has some: unknown too. Of a split service each
    pool has its own requests (``pools``). Then the device's own readings take out of busy what they say it was not
    (``device_evidence``).
    ``manifest.engine["devices"]`` (1) are taken as one machine per replica, evenly.

    Raises:
        ValueError: no window given and no points, or it ends before it starts.
    """
    if (start_ns is None or end_ns is None) and not len(run.points):
        raise ValueError("a Run without points needs a window")
    start = int(run.points["start_ns"].min()) if start_ns is None else start_ns
    end = int(run.points["end_ns"].max()) if end_ns is None else end_ns
    if end < start:
        raise ValueError(f"the window ends at {end}, before it starts at {start}")
    devices = int(run.manifest.engine.get("devices") or 1)
    ns, blocked, pools = _all(run, devices, (start, end))
    seen = ns["prefill_busy"] + ns["decode_busy"]
    evidence = device_evidence(run, (start, end), devices, seen)
    apply(evidence, ns)
    may_be = sum(ns[k] for k in ("prefill_busy", "decode_busy", "communication", "unknown"))
    busy = ns["prefill_busy"] + ns["decode_busy"]
    cpu = _cpu_bound(run, start, end, devices)
    high = may_be if cpu is None else min(may_be, cpu)
    if evidence.busy is not None:
        high = min(high, max(evidence.busy[1], busy))
    how = _how(run, start, end) | {k: v for k, (n, v) in evidence.take.items() if n and ns[k]}
    known = _kv_full_spans(run) is not None and len(waiting_seen(run)[0]) > 0
    return DeviceAccount(start, end, devices, ns, how, min(busy, high), high, _starved(busy, cpu),
                         blocked if known else None, evidence.notes | _said(pools, ns),
                         0 if pools is None else pools.idle_ns)  # fmt: skip


def _all(run: Run, devices: int, window: Span) -> tuple[dict[str, int], int, Pools | None]:
    """``ns`` of all devices, how much of it ``blocked``, and the pools of a split service."""
    start, end = window
    replicas = int(run.requests["replica"].max(initial=0)) + 1
    parts = replicas if devices % replicas == 0 else 1
    ns = dict.fromkeys(CATEGORIES, 0)
    blocked = 0
    for r in range(parts):
        mine = run.requests["replica"] == r if parts > 1 else np.ones(len(run.requests), dtype=bool)
        found = _classify(run, mine, start, end)
        blocked += found.pop("blocked") * (devices // parts)
        for name, length in found.items():
            ns[name] += length * (devices // parts)
    pools = None if _unplaced(run, start, end) else pools_of(run, window, devices)
    return (ns if pools is None else {**dict.fromkeys(CATEGORIES, 0), **pools.ns}), blocked, pools


def _said(pools: Pools | None, ns: dict[str, int]) -> dict[str, str]:
    return {} if pools is None or not ns["idle_no_work"] else {"idle_no_work": pools.said}


def _unplaced(run: Run, start: int, end: int) -> bool:
    """Whether the window is of requests whose times another tool laid out, not measured."""
    out_of_place = run.points.where(np.isin(run.points["point"], laid_out(run)))
    return any(start < b and a < end for a, b in zip(out_of_place["start_ns"], out_of_place["end_ns"], strict=True))


def _classify(run: Run, mine: Array, start: int, end: int) -> dict[str, int]:
    req = run.requests.where(mine)
    if _unplaced(run, start, end):
        return {**dict.fromkeys(CATEGORIES, 0), "unknown": end - start, "blocked": 0}
    begin, until = (v[mine] for v in prefill_windows(run))
    unseen = np.isnan(req["engine_prefill_ms"])
    sent, first, last, stop = req["sent_ns"], req["first_ns"], req["last_ns"], req["end_ns"]
    stop = np.where(np.isnan(stop), end, stop)  # never seen to end: in flight as far as we know
    before = np.where(np.isnan(first), stop, first)
    spans = {
        "prefill": (begin, until),
        "decode": (first, np.where(np.isnan(last), stop, last)),
        "flight": (sent, stop),
        "dark": (sent[unseen], before[unseen]),
        "waiting": _waiting_spans(run),
        "full": _kv_full_spans(run) or (np.zeros(0), np.zeros(0)),
        "limited": _at_limit_spans(run),
        "others": _others_spans(run),
    }
    clipped = {k: clip(a, b, start, end) for k, (a, b) in spans.items()}
    times = np.unique(np.concatenate([[start, end], *(v for pair in clipped.values() for v in pair)]).astype(np.int64))
    at, length = times[:-1], np.diff(times)
    on = {k: np.searchsorted(a, at, "right") > np.searchsorted(b, at, "right") for k, (a, b) in clipped.items()}
    out: dict[str, int] = {}
    left = np.ones(len(at), dtype=bool)
    for name, when in (
        ("prefill_busy", on["prefill"]),
        ("decode_busy", on["decode"]),
        ("unknown", ~on["flight"] & on["others"]),  # somebody's request: what the device does with it is not seen
        ("idle_no_work", ~on["flight"]),
        ("idle_kv_blocked", on["waiting"] & ~on["dark"] & on["full"]),
        ("idle_host", on["waiting"] & ~on["dark"]),
        ("unknown", left.copy()),
    ):
        out[name] = out.get(name, 0) + int(length[left & when].sum())
        left &= ~when
    out["blocked"] = int(length[on["waiting"] & on["full"] & ~on["limited"]].sum())
    return out


def _waiting_spans(run: Run) -> tuple[Array, Array]:
    """When the engine's queue was read as not empty: from each such reading to the next, or until it is stale."""
    return _held_spans(*waiting_seen(run))


def _kv_full_spans(run: Run) -> tuple[Array, Array] | None:
    """When the KV space was read as full, of any replica; None where it was not read."""
    found = series(run.readings, "kv_use")
    return _held_spans(*_merged([(s.asked_ns, s.values >= KV_FULL) for s in found])) if found else None


def _at_limit_spans(run: Run) -> tuple[Array, Array]:
    """When as many requests were read to be in work as the engine takes at once: what waits then waits for a place."""
    slots = run.manifest.engine.get("slots")
    found = series(run.readings, "running")
    if not slots or not found:
        return np.zeros(0), np.zeros(0)
    return _held_spans(*_merged([(s.asked_ns, s.values >= float(slots)) for s in found]))


def _others_spans(run: Run) -> tuple[Array, Array]:
    """When the engine was read as having requests, twice in a row, while none of ours was in flight in between."""
    parts = [(s.asked_ns, s.values > 0) for name in ("running", "waiting") for s in series(run.readings, name)]
    if not parts:
        return np.zeros(0), np.zeros(0)
    asked, some = _merged(parts)
    at, first = np.unique(asked, return_index=True)
    some = np.logical_or.reduceat(some, first)
    if len(at) < 2:
        return np.zeros(0), np.zeros(0)
    sent, stop = run.requests["sent_ns"], run.requests["end_ns"]
    stop = np.sort(np.where(np.isnan(stop), np.inf, stop)[~np.isnan(sent)])
    sent = np.sort(sent[~np.isnan(sent)])
    own = np.searchsorted(sent, at[1:], "right") > np.searchsorted(stop, at[:-1], "left")
    step = np.diff(at)
    both = some[:-1] & some[1:] & ~own & (step <= STALE * float(np.median(step)))
    return at[:-1][both], at[1:][both]


def _merged(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    asked = np.concatenate([a for a, _ in parts])
    order = np.argsort(asked, kind="stable")
    return asked[order], np.concatenate([v for _, v in parts])[order]


def _held_spans(asked: Array, positive: Array) -> tuple[Array, Array]:
    """From each reading that is positive to the next reading, or until it is stale."""
    if len(asked) < 2:
        return np.zeros(0), np.zeros(0)
    step = np.diff(asked)
    usual = float(np.median(step))
    until = asked + np.minimum(np.append(step, usual), STALE * usual)
    return asked[positive], until[positive]


def _cpu_bound(run: Run, start: int, end: int, devices: int) -> int | None:
    """The most the devices can have been busy by the engine's CPU time (ns × devices); None where it was not read."""
    threads = run.manifest.engine.get("threads")
    if not threads or end <= start:
        return None
    window = (start, end)
    found = delta(run.readings, "cpu_seconds_total", window, "process/engine") or delta(
        run.readings, "cpu_seconds_total", window, "host", {"role": "engine"}
    )
    if found is None:
        return None
    uncovered = end - start - (found.end_ns - found.start_ns)
    if uncovered > UNCOVERED * (end - start):
        return None
    return int(found.high * NS_PER_S / float(threads) + uncovered) * devices


def _how(run: Run, start: int, end: int) -> dict[str, str]:
    how = dict.fromkeys(CATEGORIES, "unknown")
    req = run.requests
    ours = (req["sent_ns"] < end) & ~(req["end_ns"] < start)
    if (~np.isnan(req["engine_prefill_ms"]) & ours).any():
        how["prefill_busy"] = "measured"
    if not len(laid_out(run)):
        how["decode_busy"] = how["idle_no_work"] = "inferred"
    asked, _ = waiting_seen(run)
    if ((asked >= start) & (asked <= end)).any():
        how["idle_host"] = "inferred"
        if _kv_full_spans(run) is not None:
            how["idle_kv_blocked"] = "inferred"
    return how


def _starved(busy: int, cpu: int | None) -> list[Doubt]:
    if cpu is None or busy <= cpu * 1.1:
        return []
    return [
        {
            "what": "the device account calls more time busy than the engine had CPU",
            "why": f"{busy / NS_PER_S:.1f} s by the stamps, at most {cpu / NS_PER_S:.1f} s by its CPU time and threads",
            "next": "look whether the engine waits for a core (run-queue wait, quota, another process)",
        }
    ]
