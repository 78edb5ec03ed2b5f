"""Where along a load the effect of a technique turns: from gain to loss, or from loss to gain. Pure.

A trial with several load points of one kind (1, 2, 4, 8 in flight) shows an effect at each. Where its 95 % interval
lies on the better side of no change that point gains, on the worse side it loses, else it is open. A turn lies between
two points that are sure and of opposite sides; what is open between them belongs to the turn, and what is open beside
them to nobody. The intervals are one at a time and for a fixed number of pairs: a description, no claim.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from whywait.analyze.compare import HIGHER, LOWER, RATIO, Effect, metric_of

GAIN, LOSS, OPEN = "gain", "loss", "open"
AXES = ("concurrency", "rate")


class At(NamedTuple):
    """The effect at one target of the axis."""

    target: float
    way: str


def axis(loads: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The load points (``mode, target, label, workload``) that lie on the axis of the first, by rising target: those of
    its mode that send what it sends. Fewer than two different targets are no axis: empty.

    Of several points at one target only the first is on it; it has no label, or the earlier one.
    """
    if not loads or loads[0].get("mode") not in AXES:
        return []
    found: dict[float, Mapping[str, Any]] = {}
    for x in loads:
        if x["mode"] == loads[0]["mode"] and not x.get("workload") and x["target"] is not None:
            found.setdefault(float(x["target"]), x)
    return [found[t] for t in sorted(found)] if len(found) > 1 else []


def way(e: Effect | None) -> str:
    """Of an effect on a figure that is better high or low; open where there is none, or neither side is better."""
    if e is None or not e.n or e.metric.better not in (HIGHER, LOWER) or not e.moved:
        return OPEN
    return GAIN if (e.moved > 0) == (e.metric.better == HIGHER) else LOSS


def turns(points: Sequence[At]) -> list[tuple[float, float]]:
    """Each pair of neighbouring sure points (open ones left out) of opposite sides, as their targets."""
    sure = [p for p in points if p.way != OPEN]
    return [(a.target, b.target) for a, b in itertools.pairwise(sure) if a.way != b.way]


def sentence(points: Sequence[At]) -> str:
    """What the points say together, in words."""
    found, sure = turns(points), [p for p in points if p.way != OPEN]
    if not sure:
        return "no point is sure, so whether it turns is undecided"
    if found:
        spans = "; ".join(f"turns between {a:g} and {b:g}" for a, b in found)
        return f"{sure[0].way} at {sure[0].target:g}, {spans}"
    open_ = [f"{p.target:g}" for p in points if p.way == OPEN]
    rest = f"; open at {', '.join(open_)}" if open_ else ""
    return f"{sure[0].way} at {', '.join(f'{p.target:g}' for p in sure)}, no turn seen{rest}"


def against(
    loads: Sequence[Mapping[str, Any]], effects: Mapping[str, Mapping[str, Effect]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Per figure of ``names`` along the axis of the loads: ``metric, title, unit, mode, points`` (``target, load, a, b,
    scale, value, low, high, way``), ``turns`` (pairs of targets) and ``said``. Empty where there is no axis."""
    line, out = axis(loads), []
    for name in dict.fromkeys(names) if line else ():
        found = [effects.get(x["label"] or "", {}).get(name) for x in line]
        points = [At(float(x["target"]), way(e)) for x, e in zip(line, found, strict=True)]
        rows = [
            {"target": p.target, "load": x["label"] or "", "way": p.way, **_amounts(e, name)}
            for x, p, e in zip(line, points, found, strict=True)
        ]
        metric = metric_of(name)
        out.append({"metric": name, "title": metric.title, "unit": metric.unit, "mode": line[0]["mode"], "points": rows,
                    "turns": [list(t) for t in turns(points)], "said": sentence(points)})  # fmt: skip
    return out


def _amounts(e: Effect | None, name: str) -> dict[str, Any]:
    if e is None:
        return {**dict.fromkeys(("a", "b", "value", "low", "high")), "scale": metric_of(name).scale}
    value, low, high = (e.ratio if e.scale == RATIO else e.difference)[:3]
    return {"a": e.a, "b": e.b, "scale": e.scale, "value": value, "low": low, "high": high}
