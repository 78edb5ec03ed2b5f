"""How the claims of a trial change with a setting of B: gain or loss at each value, and between which values it turns.

A gain (loss) at a value is one that the value's own trial is sure of, by its always-valid intervals. It turns between
the last value of a sure gain and the first of a sure loss (or the other way round); values that decide nothing may lie
in between, and sure ones of no change, which are then named. It may turn more than once. Pure, and from plain values
(``trying.Trial.result()``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from whywait.analyze.compare import HIGHER, LOWER, RATIO, metric_of
from whywait.judge.paired import ALPHA

GAIN, LOSS, NONE, OPEN = "gain", "loss", "no change", "undecided"


def outcome(claim: Mapping[str, Any]) -> str:
    """Of a claim as it stands: whether its figure surely became better or worse."""
    good = {HIGHER: "above", LOWER: "below"}.get(metric_of(claim["metric"]).better)
    if good is None or claim["way"] == "open":
        return OPEN
    return NONE if claim["way"] == "same" else GAIN if claim["way"] == good else LOSS


def turns(trials: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """``trials`` are (value, result) → one row per claim: ``metric, load, kind, claim, at, turns, turn, crossings,
    near``.

    ``at`` has the effect at each value in the order of the values (numbers in their order, others as given): ``value,
    a, b, effect, low, high, scale, unit, outcome, pairs``. ``turns`` are all of ``{"from", "to", "between": [v, w],
    "through": [values of no change], "near"}`` in that order, ``turn`` the first or None. ``crossings`` are where
    straight lines between the effects (logarithms of ratios) cross no change, for values that are numbers: estimates
    without an error; ``near`` of a row is the first, of a turn the only one between its values.
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for value, result in in_order(trials):
        for c in result["claims"]:
            key = (c["metric"], c["load"], c["kind"])
            row = rows.setdefault(key, {**{k: c[k] for k in ("metric", "load", "kind", "claim")}, "at": []})
            row["at"].append({
                "value": value, "a": c["a"], "b": c["b"], "effect": c["value"], "low": c["low"], "high": c["high"],
                "scale": c["scale"], "unit": c["unit"], "outcome": outcome(c), "pairs": c["pairs"],
            })  # fmt: skip
    for row in rows.values():
        row["crossings"] = _crossings(row["at"])
        row["turns"] = _turns(row["at"], row["crossings"])
        row["turn"], row["near"] = next(iter(row["turns"]), None), next(iter(row["crossings"]), None)
    return list(rows.values())


def said_of(row: Mapping[str, Any]) -> str:
    """A row's turns in words."""
    seen = {x["outcome"] for x in row["at"]}
    if row["turns"]:
        return ", then ".join(map(_turn_said, row["turns"]))
    if seen == {OPEN} or not seen:
        at = " and ".join(f"{x:.4g}" for x in row["crossings"])
        near = f"; unsure as they are, they cross no change near {at}" if at else ""
        return f"undecided at every value{near}"
    kinds = [k for k in (GAIN, LOSS, NONE) if k in seen]
    where = "wherever it is decided" if OPEN in seen or len(kinds) > 1 else "throughout"
    return f"does not turn here: {' or '.join(kinds)} {where}"


def in_order(trials: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """By size where every value is a number, else as they are."""
    numbers = [as_number(v) for v, _ in trials]
    if any(n is None for n in numbers):
        return list(trials)
    order = sorted(range(len(trials)), key=lambda i: numbers[i] or 0.0)
    return [trials[i] for i in order]


def as_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def error_of(values: int) -> float:
    """At most this is the probability that any claim of a table of so many values is wrong."""
    return min(1.0, ALPHA * values)


def _turns(at: Sequence[Mapping[str, Any]], crossings: Sequence[float]) -> list[dict[str, Any]]:
    sure = [x for x in at if x["outcome"] != OPEN]
    signs = [i for i, x in enumerate(sure) if x["outcome"] in (GAIN, LOSS)]
    found = []
    for i, j in pairwise(signs):
        x, y = sure[i], sure[j]
        if x["outcome"] != y["outcome"]:
            low, high = as_number(x["value"]), as_number(y["value"])
            near = [] if low is None or high is None else [c for c in crossings if low <= c <= high]
            found.append({
                "from": x["outcome"], "to": y["outcome"], "between": [x["value"], y["value"]],
                "through": [z["value"] for z in sure[i + 1 : j]], "near": near[0] if len(near) == 1 else None,
            })  # fmt: skip
    return found


def _turn_said(turn: Mapping[str, Any]) -> str:
    a, b = turn["between"]
    through = f", with no change at {', '.join(turn['through'])}" if turn["through"] else ""
    near = "" if turn["near"] is None else f" (the effects cross no change near {turn['near']:.4g})"
    return f"{turn['from']} turns to {turn['to']} between {a} and {b}{through}{near}"


def _crossings(at: Sequence[Mapping[str, Any]]) -> list[float]:
    """Between neighbours on two sides of no change; effects of exactly none in between are where it is crossed."""
    known = [(n, e) for x in at if (n := as_number(x["value"])) is not None and (e := _log(x)) is not None]
    sides = [i for i, (_, e) in enumerate(known) if e]
    out = []
    for i, j in pairwise(sides):
        (u, a), (v, b) = known[i], known[j]
        if (a > 0) == (b > 0):
            continue
        level = [n for n, _ in known[i + 1 : j]]
        out.append((level[0] + level[-1]) / 2 if level else u + (v - u) * a / (a - b))
    return out


def _log(x: Mapping[str, Any]) -> float | None:
    effect = x["effect"]
    if effect is None:
        return None
    return float(effect) if x["scale"] != RATIO else math.log(effect) if effect > 0 else None
