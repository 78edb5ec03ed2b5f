"""Empirical quantile functions: learnt with few knots, drawn from evenly, and read back from a file with care."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whywait.errors import UsageError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: A quantile function: where (0 to 1, growing) and how much there; a straight line in between.
Curve = tuple[tuple[float, ...], tuple[float, ...]]
TOLERANCE, MOST_KNOTS = 0.01, 64


def curve(values: Floats | Ints, floor: float) -> Curve:
    """The quantile function of ``values`` by as few knots as keep it within 1 % (of at least ``floor``), at most 64.

    Knots go where they are needed: a value that is there many times gets two, so it is not smeared, and so do the few
    largest, which make up much of the sum in a log with long pauses.
    """
    x = np.sort(np.asarray(values, np.float64))
    n = len(x)
    knots = {0, n - 1}
    work = [_worst(x, 0, n - 1, floor)]
    while work and len(knots) < MOST_KNOTS:
        work.sort()
        error, at, low, high = work.pop()
        if error <= TOLERANCE:
            break
        knots.add(at)
        work += [_worst(x, low, at, floor), _worst(x, at, high, floor)]
    index = sorted(knots)
    where = (float(f"{(i + 0.5) / n:.7g}") for i in index)
    return tuple(where), tuple(float(f"{x[i]:.6g}") for i in index)


def _worst(x: Floats, low: int, high: int, floor: float) -> tuple[float, int, int, int]:
    """(error, index) of the value that the line from ``low`` to ``high`` misses most, and the two ends."""
    if high - low < 2:
        return 0.0, low, low, high
    line = np.linspace(x[low], x[high], high - low + 1)
    off = np.abs(line - x[low : high + 1]) / np.maximum(x[low : high + 1], floor)
    at = int(np.argmax(off[1:-1])) + 1
    return float(off[at]), low + at, low, high


def draw(c: Curve, u: Floats) -> Floats:
    out: Floats = np.interp(u, *c)
    return out


def even(n: int, rng: np.random.Generator, lag1: float = 0.0) -> Floats:
    """``n`` numbers spread evenly over (0, 1) in random order: their quantiles are exact at any ``n``.

    With ``lag1`` the order is that of a Gaussian chain, so like follows like.
    """
    if n == 0:
        return np.zeros(0)
    noise = rng.standard_normal(n)
    if lag1:
        rho = 2 * math.sin(math.pi / 6 * max(-0.95, min(0.95, lag1)))  # rank correlation to that of the Gaussian
        keep = math.sqrt(max(0.0, 1 - rho * rho))
        for i in range(1, n):
            noise[i] = rho * noise[i - 1] + keep * noise[i]
    return ranked(noise)


def ranked(x: Floats) -> Floats:
    """The rank of each value among all, as a number in (0, 1); of equal ones the earlier is the lower."""
    out = np.empty(len(x))
    out[np.argsort(x, kind="stable")] = (np.arange(len(x)) + 0.5) / max(1, len(x))
    return out


def deal(shares: Floats, n: int, rng: np.random.Generator) -> Ints:
    """Buckets in their proportions to within one request, in random order."""
    bounds = np.rint(np.cumsum(shares / shares.sum()) * n).astype(int)
    kind = np.minimum(np.searchsorted(bounds, np.arange(n), side="right"), len(shares) - 1)
    return rng.permutation(kind).astype(np.int64)


def tables(raw: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    value = raw.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        raise UsageError(f"{where}: needs at least one [[{where}.{key}]]", "whywait workload fit writes them")
    return value


def number(raw: Mapping[str, Any], key: str, where: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(f"{where}: {key} must be a number, not {value!r}")
    return float(value)


def curve_of(raw: Mapping[str, Any], key: str, where: str) -> Curve:
    value = raw.get(key)
    bad = UsageError(f"{where}: {key} must be two lists of equal length, shares from 0 to 1 and values from 0 up, "
                     "neither decreasing")  # fmt: skip
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, list) and part for part in value):
        raise bad
    if any(isinstance(v, bool) or not isinstance(v, (int, float)) for part in value for v in part):
        raise bad
    at, amount = (np.array(part, np.float64) for part in value)
    if len(at) != len(amount) or not (np.isfinite(amount).all() and at[0] >= 0 and at[-1] <= 1 and amount[0] >= 0):
        raise bad
    if (np.diff(at) < 0).any() or (np.diff(amount) < 0).any():
        raise bad
    return tuple(at.tolist()), tuple(amount.tolist())
