"""Which candidate is best, and how sure that is: dominance, front, order and ties. Pure.

A candidate is a :class:`Row`: figures of the central prediction (or measurement), and the same figures in draws of what
is not known. Rows of one ``group`` (a machine under an engine) were drawn alike, draw by draw, so that what is unsure
of both cancels in their difference; rows of different groups are taken as independent, which makes their difference
wider than it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
#: Figures that decide, each with whether less is better. ``latency`` is the 95th percentile over its limit, of the
#: SLO's limits the worst; ``cost`` is of 1,000 good requests, ``energy`` J of one.
OBJECTIVES: Mapping[str, bool] = {"cost": True, "goodput": False, "latency": True, "energy": True}
SURE = 0.9  # probability from which one is called better than the other
SAME = 0.01  # central figures nearer than this are the same
TESTED = ("as published", "holds")  # states of quality that may rank first


@dataclass(frozen=True)
class Row:
    """``meets``: whether the share of good requests reaches what is asked (holds, undecided, fails); ``quality``: as
    published, holds, undecided, fails, untested; ``affordable``: what is paid for it is within the budget."""

    name: str
    group: str
    shape: str
    figures: Mapping[str, float | None]
    draws: Mapping[str, Floats] = field(default_factory=dict)
    meets: str = "holds"
    quality: str = "as published"
    affordable: bool = True

    @property
    def eligible(self) -> bool:
        """May be ranked first: keeps the SLO for sure, its answers are tested, its cost is known and within the
        budget."""
        known = self.figures.get("cost") is not None
        return self.meets == "holds" and self.quality in TESTED and known and self.affordable


def state_of(shares: Sequence[float] | Floats, asked: float) -> str:
    """``holds`` where ``SURE`` of the draws reach what is asked, ``fails`` where as many do not."""
    reached = np.asarray(shares, dtype=float) >= asked
    if not len(reached):
        return "undecided"
    return "holds" if reached.mean() >= SURE else "fails" if (~reached).mean() >= SURE else "undecided"


def better(a: Row, b: Row, key: str = "cost") -> float | None:
    """Probability that ``a`` is the better of the two by ``key``; None where either is not known."""
    x, y = a.draws.get(key), b.draws.get(key)
    if x is None or y is None or not len(x) or not len(y):
        return None
    paired = a.group == b.group and len(x) == len(y)
    diff = x - y if paired else (x[:, None] - y[None, :]).ravel()
    diff = diff[np.isfinite(diff)]
    if not len(diff):
        return None
    less = OBJECTIVES.get(key, True)
    wins = (diff < 0) if less else (diff > 0)
    return float(wins.mean() + (diff == 0).mean() / 2)


def dominates(a: Row, b: Row) -> bool:
    """``a`` is nowhere worse than ``b`` in its central figures, and surely better in one."""
    sure = False
    for key, less in OBJECTIVES.items():
        x, y = a.figures.get(key), b.figures.get(key)
        if x is None or y is None:
            continue
        worse = x > y * (1 + SAME) if less else x < y * (1 - SAME)
        if worse:
            return False
        sure = sure or (better(a, b, key) or 0.0) >= SURE
    return sure


def dominated(rows: Sequence[Row]) -> dict[str, str]:
    """Name of each row that another one dominates, and that one's name. What does not surely keep the SLO, or whose
    answers are not tested, takes nobody's place."""
    out: dict[str, str] = {}
    able = [r for r in rows if r.eligible]
    for b in rows:
        by = next((a for a in able if a is not b and dominates(a, b)), None)
        if by is not None:
            out[b.name] = by.name
    return out


def front(rows: Sequence[Row]) -> list[str]:
    """Names of those that nobody dominates, of those that may still keep the SLO."""
    lost = dominated(rows)
    return [r.name for r in rows if r.name not in lost and r.meets != "fails"]


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Those that may be first by cost, then what is undecided or untested, then what fails or has no price."""

    def key(r: Row) -> tuple[float, ...]:
        cost = r.figures.get("cost")
        held = ("holds", "undecided", "fails").index(r.meets)
        tested = 0 if r.quality in TESTED else 2 if r.quality == "fails" else 1
        late = r.figures.get("latency")
        return (not r.eligible, cost is None, held, tested, cost if cost is not None else 0.0,
                late if late is not None else np.inf)  # fmt: skip

    return sorted(rows, key=key)


def ties(rows: Sequence[Row]) -> list[str]:
    """Names of those that cost the same as the first within the error; the first itself is left out."""
    order = ranked(rows)
    if not order or not order[0].eligible:
        return []
    first, out = order[0], []
    for r in order[1:]:
        sure = better(first, r) if r.eligible and r.shape != first.shape else None
        if sure is not None and sure < SURE:
            out.append(r.name)
    return out


def interval(values: Floats | None) -> tuple[float | None, float | None]:
    """80 % of the draws; None where there are fewer than two."""
    seen = np.asarray([] if values is None else values, dtype=float)
    seen = seen[np.isfinite(seen)]
    if len(seen) < 2:
        return None, None
    low, high = np.quantile(seen, (0.1, 0.9), method="inverted_cdf")
    return float(low), float(high)
