"""An imported Run against the figures that the tool itself published: do ours, from its rows, come out the same?

Ours are by our definitions (``docs/metrics.md``). Where they differ by more than rounding, either the definitions do,
which is said, or something was read wrongly, which is said too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.analyze.latency import per_request
from whywait.analyze.stats import Doubt
from whywait.analyze.streams import Content, content, gaps
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.units import NS_PER_MS, NS_PER_S, number

ROUNDING = 0.005  # share by which a figure of the same definition may differ: rounding, and ends of two clocks
RATES = 0.03  # of rates: where the time begins and ends differs by a request or two
LEAST_MS = 0.02  # and never less than this, which is the work of a client's loop
_EXACT = ("requests", "output_tokens", "prompt_tokens")
_NAMED = {
    "ttft_ms": "TTFT", "tpot_ms": "TPOT", "tpot_by_token_ms": "ITL", "chunk_gap_ms": "ITL (chunk gaps)",
    "e2e_ms": "end to end", "latency_ms": "latency", "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s", "requests": "requests that ended well", "output_tokens": "output tokens",
    "prompt_tokens": "prompt tokens",
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One figure of a point: what the tool says (``theirs``) and what its rows give here (``ours``, None: nothing)."""

    point: int
    name: str
    theirs: float
    ours: float | None
    agrees: bool


def figures(run: Run, published: Mapping[int, Mapping[str, float]]) -> list[Figure]:
    """Every published figure of every point beside ours. Names are ``ttft_ms.mean``, ``tpot_ms.p99``,
    ``requests_per_s``, …; those that nothing of ours answers to are left out."""
    out = []
    for point, told in published.items():
        one = run.point(point)
        ours = _Ours(one)
        for name, theirs in told.items():
            found = ours.of(name)
            if found is not None:
                out.append(Figure(point, name, theirs, found[0], _agrees(name, theirs, found)))
    return out


def disagreements(found: list[Figure], definitions: Mapping[int, Mapping[str, str]]) -> list[Doubt]:
    """One doubt for each kind of figure that differs, with the definition (per point) that explains it where known."""
    by: dict[str, list[Figure]] = {}
    for f in found:
        if not f.agrees:
            by.setdefault(f.name.partition(".")[0], []).append(f)
    out: list[Doubt] = []
    for kind, those in by.items():
        worst = max(those, key=lambda f: abs((f.ours or 0.0) - f.theirs) / max(abs(f.theirs), 1e-9))
        what = worst.name.partition(".")[2]
        unit = "ms" if kind.endswith("_ms") else ""
        ours = "nothing" if worst.ours is None else number(worst.ours, unit)
        told = f"point {worst.point}: {what and f'{what} '}{ours} here, {number(worst.theirs, unit)} there"
        why = definitions.get(worst.point, {}).get(kind)
        out.append({
            "what": f"{_NAMED.get(kind, kind)} is not what the tool itself published",
            "why": f"{told}: {why or 'no difference of definitions is known that would explain it'}",
            "next": "none: compare only figures of one definition" if why else "was the file changed, or is it cut?",
        })  # fmt: skip
    return out


class _Ours:
    """Figures of one point by our definitions, over all of its ``ok`` requests, as tools publish them."""

    def __init__(self, one: Run) -> None:
        self.run, req = one, one.requests
        self.c: Content = content(one)
        lat = per_request(one)
        self.ok = lat.ok
        self.seconds = float(one.points["end_ns"][0] - one.points["start_ns"][0]) / NS_PER_S
        self.values: dict[str, Callable[[], tuple[Array, Array | None]]] = {
            "ttft_ms": lambda: (lat.ttft_ms[lat.ok], None),
            "tpot_ms": lambda: (lat.tpot_ms[lat.ok], None),
            "tpot_by_token_ms": lambda: (lat.tpot_ms[lat.ok], req["output_tokens"][lat.ok] - 1),
            "e2e_ms": lambda: (lat.e2e_ms[lat.ok], None),
            "latency_ms": lambda: ((req["end_ns"] - req["sent_ns"])[lat.ok] / NS_PER_MS, None),
            "chunk_gap_ms": self._gaps,
        }

    def _gaps(self) -> tuple[Array, Array | None]:
        g = gaps(self.c)
        return g.value[self.ok[g.row]] / NS_PER_MS, None

    def of(self, name: str) -> tuple[float, float, float] | None:
        """The figure and the bounds that rounding leaves it: a quantile lies between two of the values."""
        kind, _, which = name.partition(".")
        if kind in self.values and which:
            values, weights = self.values[kind]()
            known = ~np.isnan(values) if weights is None else ~np.isnan(values) & (weights > 0)
            values = values[known]
            if not len(values):
                return None
            if which == "mean":
                mean = float(np.average(values, weights=None if weights is None else weights[known]))
                return mean, mean, mean
            q = _quantile(which)
            return None if q is None else tuple(
                float(np.quantile(values, q, method=m)) for m in ("linear", "lower", "higher")
            )  # type: ignore[return-value]  # fmt: skip
        found = self._total(kind)
        return None if found is None else (found, found, found)

    def _total(self, name: str) -> float | None:
        req, ok = self.run.requests, self.ok
        if name == "requests":
            return float(ok.sum())
        if name == "requests_per_s":
            return float(ok.sum()) / self.seconds if self.seconds > 0 else None
        column = {"output_tokens": "output_tokens", "output_tokens_per_s": "output_tokens",
                  "prompt_tokens": "prompt_tokens"}.get(name)  # fmt: skip
        if column is None:
            return None
        counts = req[column][ok]
        if not len(counts) or np.isnan(counts).all():
            return None
        total = float(np.nansum(counts))
        if name.endswith("_per_s"):
            return total / self.seconds if self.seconds > 0 else None
        return total


def _quantile(which: str) -> float | None:
    try:
        q = float(which.removeprefix("p")) / 100
    except ValueError:
        return None
    return q if 0 <= q <= 1 else None


def _agrees(name: str, theirs: float, ours: tuple[float, float, float]) -> bool:
    if name in _EXACT:
        return theirs == ours[0]
    share = RATES if name.endswith("_per_s") else ROUNDING
    slack = max(share * abs(theirs), LEAST_MS if "_ms" in name else 0.0)
    return ours[1] - slack <= theirs <= ours[2] + slack


def table(found: list[Figure]) -> dict[str, Any]:
    """For ``summary.json``: how many agree, and every figure that does not."""
    return {
        "compared": len(found),
        "agree": sum(f.agrees for f in found),
        "differ": [
            {"point": f.point, "name": f.name, "theirs": f.theirs, "ours": f.ours} for f in found if not f.agrees
        ],
    }
