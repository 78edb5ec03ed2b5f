"""The request account by part of the requests: by class, and by quantile of latency.

What the slowest request waits on is not what the median does; the mean of all hides both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whywait.analyze.latency import origin_ns, per_request
from whywait.analyze.phases import PHASES, RequestAccount
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.units import NS_PER_MS

BANDS = (("p0-50", 0.0, 0.5), ("p50-90", 0.5, 0.9), ("p90-99", 0.9, 0.99), ("p99+", 0.99, 1.0))
METRICS = ("e2e_ms", "ttft_ms")


def by_latency(one: Run, acc: RequestAccount, keep: Array) -> dict[str, list[dict[str, Any]]]:
    """The mean account of the ``ok`` requests in each band of ``e2e_ms`` and ``ttft_ms``, of a Run of one point.

    By rank, so that the bands hold each request once; ``keep`` (bool) are those that count. A band without a request is
    left out, so of few requests p99+ is the slowest one. For ``ttft_ms`` the account is of the time up to the first
    token only.

    Returns:
        metric → list of ``{"band", "requests", "from_ms", "to_ms", "mean_ms", "phases": {phase: ms}, "causes":
        {phase: {cause: ms}}}``; phases add up to the mean end − origin (of ``ttft_ms``: to the mean TTFT).
    """
    rows = np.flatnonzero(acc.point == int(one.points["point"][0]))
    spent, causes = acc.phases[rows], {k: v[rows] for k, v in acc.cause_ns.items()}
    lat = per_request(one)
    out = {}
    for metric in METRICS:
        value = getattr(lat, metric)
        mine = np.flatnonzero(keep & lat.ok & np.isfinite(value))
        mine = mine[np.argsort(value[mine], kind="stable")]
        parts = (spent, causes) if metric == "e2e_ms" else _until_first(one, spent, causes)
        n = len(mine)
        bands = ((name, mine[_cut(low, n) : _cut(high, n)]) for name, low, high in BANDS)
        out[metric] = [_band(name, part, value, parts) for name, part in bands if len(part)]
    return out


def by_class(one: Run, acc: RequestAccount, keep: Array) -> dict[str, dict[str, Any]]:
    """The mean account of each class of a Run of one point (see :func:`by_latency`), failed requests too; empty where
    all are of one class."""
    rows = np.flatnonzero(acc.point == int(one.points["point"][0]))
    names = np.array([str(v or "") for v in one.requests["class"]], dtype=object)
    found = sorted(set(names.tolist()))
    if len(found) < 2:
        return {}
    spent, causes = acc.phases[rows], {k: v[rows] for k, v in acc.cause_ns.items()}
    total = spent.sum(axis=1) / NS_PER_MS
    parts = ((name, np.flatnonzero(keep & (names == name))) for name in found)
    return {name: _band(name, part, total, (spent, causes)) for name, part in parts if len(part)}


def _cut(q: float, n: int) -> int:
    """Where the quantile ``q`` falls among ``n`` ranks: the slowest request is always in the last band."""
    return n if q >= 1 else min(int(np.ceil(q * n)), max(n - 1, 0))


def _band(name: str, part: Array, value: Array, parts: tuple[Array, dict[tuple[str, str], Array]]) -> dict[str, Any]:
    spent, cause_ns = parts
    mean = spent[part].mean(axis=0) / NS_PER_MS
    causes: dict[str, dict[str, float]] = {}
    for (phase, cause), ns in cause_ns.items():
        took = float(ns[part].mean()) / NS_PER_MS
        if took:
            causes.setdefault(phase, {})[cause] = took
    return {
        "band": name,
        "requests": len(part),
        "from_ms": float(value[part].min()),
        "to_ms": float(value[part].max()),
        "mean_ms": float(mean.sum()),
        "phases": {p: float(mean[i]) for i, p in enumerate(PHASES)},
        "causes": causes,
    }


def _until_first(
    one: Run, spent: Array, causes: dict[tuple[str, str], Array]
) -> tuple[Array, dict[tuple[str, str], Array]]:
    """The account up to the first token: without what is after it (stalls, decode but for what was held back, tail)."""
    out = spent.copy()
    held = causes.get(("decode", "buffering"), np.zeros(len(spent), dtype=np.int64))
    out[:, PHASES.index("decode")] = held
    for phase in ("stall", "tail"):
        out[:, PHASES.index(phase)] = 0
    first = one.requests["first_ns"] - origin_ns(one)
    known = np.where(np.isnan(first), out.sum(axis=1), first)
    out[:, PHASES.index("unknown")] = 0
    out[:, PHASES.index("unknown")] = np.maximum(np.rint(known).astype(np.int64) - out.sum(axis=1), 0)
    before = ("client", "network", "frontend", "queue", "prefill")
    return out, {k: v for k, v in causes.items() if k[0] in before or k == ("decode", "buffering")}
