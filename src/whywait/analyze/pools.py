"""The device time of a split service: prefill and decode have devices of their own, and a request is in one at a time.

While one pool works, the other may have no request at all; that is no lack of a host that feeds it, but a want of load
of that pool. How many engines a pool has, and devices each, ``manifest.engine["pools"]`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.analyze.first_token import prefill_windows
from whywait.analyze.stats import Doubt
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.units import percent

Span = tuple[int, int]
POOLS = ("prefill", "decode")
MUCH = 0.2  # of the devices' time


@dataclass(frozen=True)
class Pools:
    """``ns`` (ns × devices) by category, adding up to the window's; ``idle`` the share of each pool's time in which it
    had no request at all while the other worked; ``idle_ns`` the same of all devices. An engine without a request in a
    pool that has some is idle for want of load, as of any service."""

    ns: dict[str, int]
    idle: dict[str, float]
    idle_ns: int

    @property
    def said(self) -> str:
        each = ", ".join(f"the {k} pool {percent(v)} of its time" for k, v in self.idle.items())
        return f"without any request while the other worked: {each}"


def pools_of(run: Run, window: Span, devices: int) -> Pools | None:
    """The account of each pool; None where the service is not split, or its pools do not make up its devices.

    With n requests in a pool's phase at most n of its engines have work. An engine is without any when no request is
    on its way to its pool either; while one is, it is unknown.
    """
    told = run.manifest.engine.get("pools") or {}
    if set(told) != set(POOLS) or sum(int(n) * int(each) for n, each in told.values()) != devices:
        return None
    req = run.requests
    begin, until = prefill_windows(run)
    stop = np.where(np.isnan(req["end_ns"]), window[1], req["end_ns"])
    first, sent = req["first_ns"], req["sent_ns"]
    before = np.where(np.isnan(first), stop, first)
    spans = {
        "prefill": (begin, until),
        "decode": (first, np.where(np.isnan(req["last_ns"]), stop, req["last_ns"])),
        # On the way to a pool; of a request that nobody saw in prefill, to either.
        "to prefill": (sent, np.where(np.isnan(begin), before, begin)),
        "to decode": (np.where(np.isnan(until), sent, until), before),
    }
    clipped = {k: clip(a, b, *window) for k, (a, b) in spans.items()}
    times = np.unique(np.concatenate([window, *(v for pair in clipped.values() for v in pair)]).astype(np.int64))
    at, length = times[:-1], np.diff(times)
    n = {k: np.searchsorted(a, at, "right") - np.searchsorted(b, at, "right") for k, (a, b) in clipped.items()}
    ns = dict.fromkeys(("prefill_busy", "decode_busy", "idle_no_work", "unknown"), 0)
    idle, idle_ns = {}, 0
    for pool, other in (POOLS, POOLS[::-1]):
        engines, each = (int(x) for x in told[pool])
        at_work = np.minimum(n[pool], engines)
        free = (engines - at_work) * length * each
        none = n[f"to {pool}"] == 0
        ns[f"{pool}_busy"] = int((at_work * length).sum()) * each
        ns["idle_no_work"] += int(free[none].sum())
        ns["unknown"] += int(free[~none].sum())
        alone = int(free[none & (n[pool] == 0) & (n[other] > 0)].sum())
        idle[pool] = alone / max(int(length.sum()) * engines * each, 1)
        idle_ns += alone
    return Pools(ns, idle, idle_ns)


def unbalanced(account: Mapping[str, Any]) -> list[Doubt]:
    """That one pool stands idle while the other works, from ``occupancy`` of the summary."""
    if (account.get("pool_idle") or 0.0) < MUCH:
        return []
    return [{"what": "a pool of the split service had no request while the other worked",
             "why": account["notes"]["idle_no_work"],
             "next": "another ratio of prefill to decode engines: whywait what-if RUN --layout pd=P:D"}]  # fmt: skip


def clip(starts: Array, ends: Array, low: int, high: int) -> tuple[Array, Array]:
    """Starts and ends (int64, each ascending) of the intervals, cut to the window; the empty ones left out."""
    known = ~(np.isnan(starts) | np.isnan(ends))
    a = np.rint(np.clip(starts[known], low, high)).astype(np.int64)
    b = np.rint(np.clip(ends[known], low, high)).astype(np.int64)
    some = b > a
    return np.sort(a[some]), np.sort(b[some])
