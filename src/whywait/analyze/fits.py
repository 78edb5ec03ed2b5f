"""Straight lines and parabolas through noisy times, robust to outliers, with intervals from a bootstrap over requests.

Huber's M-estimator (Huber, *Robust Estimation of a Location Parameter*, Ann. Math. Stat. 35 (1964)) by iteratively
reweighted least squares, started from least absolute deviations. Times spread more where they are longer, so each value
counts by the spread of its own length. Intervals are t · (bootstrap standard error), widened by √(n / (n − p)).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from whywait.analyze.stats import Estimate, t975
from whywait.core.table import Array

DRAWS = 400
HUBER = 1.345  # 95 % efficient where errors are Gaussian
MAD = 1.4826
LEAST_VALUES = 8


class Curve(NamedTuple):
    """``y = Σ coef[k] · x^k``: estimates in the unit of y per unit of x to the k, and how well the curve follows.

    ``noise`` is the robust spread of a value relative to the curve; ``misfit`` the largest relative distance of the
    median of a length from it; ``bent`` whether such distances are more than noise; ``drift`` the relative change from
    the first request to the last.
    """

    coef: tuple[Estimate, ...]
    noise: float
    misfit: float
    bent: bool
    drift: Estimate

    def at(self, x: float) -> float:
        return sum((c.value or 0.0) * x**k for k, c in enumerate(self.coef))


def curve(x: Array, y: Array, order: Array, rng: np.random.Generator, degrees: tuple[int, ...] = (1,)) -> Curve | None:
    """The simplest polynomial of ``degrees`` (rising) that the data demand; None where they are too few to tell.

    ``x`` lengths in tokens, ``y`` times (any unit), ``order`` when each was taken (any unit), all 1-d. A higher degree
    is demanded when its coefficient is surely above 0 and makes at least 3 % of the time at the greatest length.
    """
    keep = np.isfinite(x) & np.isfinite(y) & (y > 0)
    x, y, order = x[keep], y[keep], order[keep]
    best: Curve | None = None
    for degree in degrees:
        if len(x) < max(LEAST_VALUES, 2 * degree + 4) or len(lengths_of(x)) < degree + 2:
            break
        found = _fitted(x, y, order, degree, rng)
        top = found.coef[-1]
        share = (top.value or 0.0) * float(x.max()) ** degree / max(found.at(float(x.max())), 1e-300)
        if best is not None and not (top.lo is not None and top.lo > 0 and share >= 0.03):
            break
        best = found
    return best


def lengths_of(x: Array) -> list[Array]:
    """Masks of the groups of like lengths: a step of more than 5 % (and 4 tokens) begins a new one."""
    if not len(x):
        return []
    by_length = np.argsort(x, kind="stable")
    step = np.diff(x[by_length]) > np.maximum(4.0, 0.05 * x[by_length][:-1])
    group = np.empty(len(x), dtype=np.int64)
    group[by_length] = np.concatenate(([0], np.cumsum(step)))
    return [group == g for g in range(int(group.max()) + 1)]


def scaled(e: Estimate, by: float) -> Estimate:
    """The estimate in another unit; ``by`` is above 0."""
    value, lo, hi = (None if v is None else v * by for v in e[:3])
    return Estimate(value, lo, hi, e.n)


def ratio(values: Array) -> Estimate:
    """The typical value of positive ratios: geometric mean, with Student's t on their logarithms.

    From 6 values on a fifth is cut off at each end, and the spread is of the winsorised values (Tukey & McLaughlin,
    *Less Vulnerable Confidence and Significance Procedures*, Sankhyā A 25 (1963)): one pair that was disturbed does not
    spoil the others. No interval below 3 values.
    """
    logs = np.sort(np.log(values[np.isfinite(values) & (values > 0)]))
    n = len(logs)
    if not n:
        return Estimate(None, None, None, 0)
    cut = n // 5 if n >= 6 else 0
    mean = float(logs[cut : n - cut].mean())
    if n < 3:
        return Estimate(math.exp(mean), None, None, n)
    spread = float(np.clip(logs, logs[cut], logs[n - cut - 1]).std(ddof=1)) / (1 - 2 * cut / n)
    half = min(t975(n - 2 * cut - 1) * spread / math.sqrt(n), 300.0)
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)


def _fitted(x: Array, y: Array, order: Array, degree: int, rng: np.random.Generator) -> Curve:
    unit = float(x.max())
    design = np.stack([(x / unit) ** k for k in range(degree + 1)], axis=1)
    estimates, line = _robust(design, y, _spread(x, y), rng)
    coef = tuple(scaled(e, unit**-k) for k, e in enumerate(estimates))
    line = np.maximum(line, 1e-300)
    off = y / line - 1
    noise = MAD * float(np.median(np.abs(off)))
    groups = lengths_of(x)
    middle = np.array([np.median(off[g]) for g in groups])
    sizes = np.array([g.sum() for g in groups])
    within = [MAD * float(np.median(np.abs(off[g] - m))) for g, m in zip(groups, middle, strict=True)]
    # A median of n values spreads by about 1.25 σ / √n; small groups understate σ, hence the common one as a floor.
    sigma = 1.25 * np.maximum(within, max(float(np.median(within)), 1e-4)) / np.sqrt(sizes)
    df = max(1, len(groups) - degree - 1)
    bent = float((np.minimum(np.abs(middle / sigma), 8.0) ** 2).sum()) > df + 4 * math.sqrt(2 * df)
    return Curve(coef, noise, float(np.abs(middle).max()), bent, _drift(off, order, rng))


def _drift(off: Array, order: Array, rng: np.random.Generator) -> Estimate:
    span = float(np.ptp(order))
    if span <= 0 or len(off) < LEAST_VALUES:
        return Estimate(None, None, None, len(off))
    when = (order - order.min()) / span - 0.5
    estimates, _ = _robust(np.stack([np.ones(len(off)), when], axis=1), off, np.ones(len(off)), rng)
    return estimates[1]


def _spread(x: Array, y: Array) -> Array:
    """How much a value of each length spreads: a constant part and one in proportion, from the groups of lengths."""
    groups = lengths_of(x)
    middle = np.array([np.median(y[g]) for g in groups])
    mad = np.array([MAD * np.median(np.abs(y[g] - m)) for g, m in zip(groups, middle, strict=True)])
    half = (len(groups) + 1) // 2
    still, grows = float(np.median(mad[:half])), float(np.median(mad[-half:] / middle[-half:]))
    level = np.empty(len(y))
    for g, m in zip(groups, middle, strict=True):
        level[g] = m
    out: Array = np.hypot(max(still, 1e-6 * float(middle.min())), grows * level)
    return out


def _robust(design: Array, y: Array, spread: Array, rng: np.random.Generator) -> tuple[list[Estimate], Array]:
    """Coefficients with their intervals, and the fitted values."""
    n, p = design.shape
    z, u = design / spread[:, None], y / spread
    one = np.ones((1, n))
    coef = _solve(z, u, one)
    for _ in range(25):
        coef = _solve(z, u, 1 / np.maximum(np.abs(u - coef @ z.T), 1e-3))
    scale = max(MAD * float(np.median(np.abs(u - coef @ z.T))), 1e-9)
    coef = _reweighted(z, u, one, coef, scale)
    drawn = rng.multinomial(n, np.full(n, 1 / n), size=DRAWS).astype(np.float64)
    draws = _reweighted(z, u, drawn, np.repeat(coef, DRAWS, axis=0), scale)
    error = draws.std(axis=0, ddof=1) * math.sqrt(n / (n - p)) * t975(n - p)
    values = [Estimate(float(c), float(c - e), float(c + e), n) for c, e in zip(coef[0], error, strict=True)]
    return values, design @ coef[0]


def _reweighted(z: Array, u: Array, counts: Array, coef: Array, scale: float) -> Array:
    for _ in range(12):
        off = np.abs(u - coef @ z.T) / scale
        coef = _solve(z, u, counts * np.minimum(1.0, HUBER / np.maximum(off, 1e-9)))
    return coef


def _solve(z: Array, u: Array, weights: Array) -> Array:
    """Weighted least squares for every row of ``weights`` (draws × n) at once: draws × p."""
    normal = np.einsum("dn,ni,nj->dij", weights, z, z, optimize=True)
    # A hair of ridge: a draw that missed all but one length has no slope of its own.
    normal += 1e-9 * np.trace(normal, axis1=1, axis2=2)[:, None, None] * np.eye(z.shape[1])
    right = (weights * u) @ z
    out: Array = np.linalg.solve(normal, right[:, :, None])[:, :, 0]
    return out
