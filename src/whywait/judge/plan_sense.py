"""What would turn the ranking over, and the cheapest experiment that could. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from whywait.judge.plan import TESTED, Floats, Row, ranked

NOTHING = 0.01  # of the first one's money: what saves less is no other decision
MATTERS = 0.05  # probability of another decision from which an experiment is worth naming


class Varied(NamedTuple):
    """An assumption that was moved: its name, by how much (``+30 %``), and the cost of 1,000 good requests of each
    shape then, the devices chosen anew (None: it keeps the SLO with no number of them that was tried)."""

    assumption: str
    by: str
    costs: Mapping[str, float | None]


class Flip(NamedTuple):
    assumption: str
    by: str
    first: str | None
    was: str | None
    margin: float | None  # how much dearer the next one is then, as a share
    flips: bool
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()


def flips(base: Mapping[str, float | None], varied: Sequence[Varied]) -> list[Flip]:
    """Which of the assumptions puts another shape first, all reckoned as ``base`` was."""
    was = _least(base)
    out = []
    for v in varied:
        first, margin = _least(v.costs), _margin(v.costs)
        note = "" if first is not None else "nothing that was tried keeps the SLO then"
        out.append(Flip(v.assumption, v.by, first, was, margin, first != was, note))
    return out


def priced(base: Mapping[str, float | None], machine_of: Mapping[str, str], by: float) -> list[Varied]:
    """The costs when one machine's price moves by ``by`` (a share) and the others' stay. Exact where all of the cost
    is rent; of owned machines the power is taken along."""
    out = []
    for machine in dict.fromkeys(machine_of[s] for s in base):
        for share in (by, -by):
            costs = {s: c if c is None or machine_of[s] != machine else c * (1 + share) for s, c in base.items()}
            out.append(Varied(f"price of {machine}", f"{share:+.0%}".replace("-", "−").replace("%", " %"), costs))
    return out


def break_even(base: Mapping[str, float | None], machine_of: Mapping[str, str]) -> list[dict[str, Any]]:
    """For every other machine: by what factor its price had to move for its best shape to cost as much as the first."""
    first = _least(base)
    if first is None or base[first] is None:
        return []
    best: dict[str, float] = {}
    for shape, cost in base.items():
        if cost is not None:
            best[machine_of[shape]] = min(cost, best.get(machine_of[shape], cost))
    top = best[machine_of[first]]
    return [{"machine": m, "factor": top / c} for m, c in sorted(best.items(), key=lambda x: x[1])
            if m != machine_of[first] and c > 0]  # fmt: skip


class Experiment(NamedTuple):
    """``change``: probability that it changes the decision; ``saves``: what knowing it saves on average, in money an
    hour; ``costs``: what the experiment takes (None: not known)."""

    what: str
    of: str
    change: float
    saves: float
    costs: float | None
    command: str = ""

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()


def experiments(
    rows: Sequence[Row], hourly: Mapping[str, Floats], price: Mapping[str, float | None]
) -> list[Experiment]:
    """One per group of rows: measuring it on its own hardware tells where in its draws it lies.

    The decision is the row of least mean money an hour among those that may be first (the service must do the same work
    with all of them). With a group known, another row may be least: how often that is, and what it saves on average, is
    the value of that knowledge (expected value of partial information: Raiffa and Schlaifer 1961).

    Args:
        rows: the candidates; of those without tests of quality, or undecided on the SLO, none counts.
        hourly: draws of money an hour by name, infinite where the draw does not keep the SLO.
        price: of the experiment by group.
    """
    able = [r for r in rows if r.quality in TESTED and r.name in hourly]
    known = {r.name: hourly[r.name] for r in able if np.isfinite(hourly[r.name]).any()}
    if not known:
        return []
    plain = {
        n: float(np.mean(np.where(np.isfinite(x), x, np.nan_to_num(x, posinf=_dear(x))))) for n, x in known.items()
    }
    first = min(plain, key=lambda n: plain[n])
    out = []
    for group in dict.fromkeys(r.group for r in able if r.name in known):
        mine = [r.name for r in able if r.group == group and r.name in known]
        n = min(len(known[m]) for m in mine)
        each = np.stack([known[m][:n] if m in mine else np.full(n, plain[m]) for m in known])
        names = list(known)
        at_first = np.minimum(each[names.index(first)], _dear(known[first]))
        gain = np.maximum(at_first - each.min(axis=0), 0.0)
        change = float((gain > NOTHING * plain[first]).mean())
        out.append(Experiment("measure one replica of it", group, change, float(gain.mean()), price.get(group)))
    return sorted(out, key=lambda e: (e.change < MATTERS, e.costs if e.costs is not None else np.inf))


def _dear(x: Floats) -> float:
    """What a draw counts in which it does not keep the SLO: half as much again as the dearest that does."""
    finite = x[np.isfinite(x)]
    return 1.5 * float(finite.max()) if len(finite) else np.inf


def untested(rows: Sequence[Row]) -> list[str]:
    """Names of those of narrower numbers that would cost less than the first if their answers were tested."""
    order = ranked(rows)
    first = order[0].figures.get("cost") if order and order[0].eligible else None
    found = [r for r in rows if r.quality in ("untested", "undecided") and r.meets == "holds" and r.affordable]
    cheap = [r for r in found if (c := r.figures.get("cost")) is not None and (first is None or c < first)]
    return [r.name for r in sorted(cheap, key=lambda r: r.figures["cost"] or 0.0)]


def _least(costs: Mapping[str, float | None]) -> str | None:
    known = {s: c for s, c in costs.items() if c is not None}
    return min(known, key=lambda s: known[s]) if known else None


def _margin(costs: Mapping[str, float | None]) -> float | None:
    known = sorted(c for c in costs.values() if c is not None)
    return known[1] / known[0] - 1 if len(known) > 1 and known[0] > 0 else None
