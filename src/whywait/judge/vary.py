"""How the claims of a trial change with a setting of B: gain or loss at each value, and between which values it turns.

A gain (loss) at a value is one that the value's own trial is sure of, by its always-valid intervals. It turns between
the last value of a sure gain and the first of a sure loss (or the other way round); values that decide nothing may lie
in between. Pure, and from plain values (``trying.Trial.result()``).
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
    """``trials`` are (value, result) → one row per claim: ``metric, load, kind, claim, at, turn, near``.

    ``at`` has the effect at each value in the order of the values (numbers in their order, others as given): ``value,
    a, b, effect, low, high, scale, unit, outcome, pairs``. ``turn`` is ``{"from", "to", "between": [v, w]}`` or None;
    ``near`` is where straight lines between the effects (logarithms of ratios) cross no change, for values that are
    numbers: an estimate without an error.
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
        row["turn"], row["near"] = _turn(row["at"]), _near(row["at"])
    return list(rows.values())


def said_of(row: Mapping[str, Any]) -> str:
    """A row's turn in words."""
    seen = {x["outcome"] for x in row["at"]}
    if row["turn"]:
        a, b = row["turn"]["between"]
        near = "" if row["near"] is None else f" (the effects cross no change near {row['near']:.4g})"
        return f"{row['turn']['from']} turns to {row['turn']['to']} between {a} and {b}{near}"
    if seen == {OPEN} or not seen:
        near = "" if row["near"] is None else f"; unsure as they are, they cross no change near {row['near']:.4g}"
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


def _turn(at: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    sure = [x for x in at if x["outcome"] in (GAIN, LOSS)]
    for x, y in pairwise(sure):
        if x["outcome"] != y["outcome"]:
            return {"from": x["outcome"], "to": y["outcome"], "between": [x["value"], y["value"]]}
    return None


def _near(at: Sequence[Mapping[str, Any]]) -> float | None:
    known = [(n, e) for x in at if (n := as_number(x["value"])) is not None and (e := _log(x)) is not None]
    for (u, a), (v, b) in pairwise(known):
        if a * b < 0:
            return u + (v - u) * a / (a - b)
    return None


def _log(x: Mapping[str, Any]) -> float | None:
    effect = x["effect"]
    if effect is None:
        return None
    return float(effect) if x["scale"] != RATIO else math.log(effect) if effect > 0 else None
