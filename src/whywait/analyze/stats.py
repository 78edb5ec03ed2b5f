"""Percentiles that carry their own interval, for requests (independent) and for gaps (correlated within a request).

Percentiles of requests: the sample quantile (Hyndman & Fan type 7, numpy's default) with the distribution-free interval
between two order statistics whose ranks come from the exact binomial distribution (David & Nagaraja, *Order
Statistics*, 3rd ed., section 7.1), 2.5 % in each tail. Where no order statistic is far enough out the bound is None:
below 36 values for the upper bound of p90, 72 for p95, 368 for p99.

Percentiles of gaps: gaps of one request resemble each other, so requests are resampled, not gaps, and the interval is
the expanded percentile interval (Hesterberg, *What Teachers Should Know About the Bootstrap*, Am. Stat. 69 (2015),
section 5.2), which is widened for few requests. Same seed, same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from whywait.core.table import Array

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
LEVEL = 0.95
DRAWS = 1000
MIN_GROUPS = 4  # with fewer requests a bootstrap over requests says nothing
MAX_GROUPS = 2048  # more requests are bootstrapped as this many random bundles: the same variance, bounded memory
_ALL_VALUES = 1024  # with no more distinct values than this the bootstrap follows each of them
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)  # Student's t where its series is too coarse

Doubt = dict[str, str]
"""A doubt about a measurement: ``what`` is doubtful, ``why``, and what to do ``next``."""


class Estimate(NamedTuple):
    """A value and its two-sided 95 % interval, in the unit of the values; a bound that ``n`` cannot give is None."""

    value: float | None
    lo: float | None
    hi: float | None
    n: int


@lru_cache(maxsize=8192)
def order_ranks(n: int, q: float) -> tuple[int | None, int | None]:
    """Ranks (from 1) of the order statistics of ``n`` values that bound quantile ``q`` at two-sided 95 %.

    With B ~ Binomial(n, q) the number of values below the quantile, the lower rank is the largest ``l`` with
    P(B ≤ l − 1) ≤ 2.5 %, the upper the smallest ``u`` with P(B ≥ u) ≤ 2.5 %; None where there is no such rank.

    Raises:
        ValueError: ``q`` is not strictly between 0 and 1.
    """
    if not 0 < q < 1:
        raise ValueError(f"q must be between 0 and 1, not {q}")
    if n < 1:
        return None, None
    # 13 standard deviations hold all of the distribution that double precision can see, and keep this O(√n).
    reach = 13 * math.sqrt(n * q * (1 - q)) + 13
    k0, k1 = max(0, math.floor(n * q - reach)), min(n, math.ceil(n * q + reach))
    k = np.arange(k0, k1, dtype=np.float64)
    first = math.lgamma(n + 1) - math.lgamma(k0 + 1) - math.lgamma(n - k0 + 1)
    first += k0 * math.log(q) + (n - k0) * math.log1p(-q)
    steps = np.log((n - k) / (k + 1)) + math.log(q) - math.log1p(-q)
    cdf = np.cumsum(np.exp(first + np.concatenate(([0.0], np.cumsum(steps)))))
    tail = (1 - LEVEL) / 2
    lower = k0 + int(np.searchsorted(cdf, tail, side="right"))
    upper = k0 + int(np.searchsorted(cdf, 1 - tail, side="left")) + 1
    return (lower if lower >= 1 else None), (upper if upper <= n else None)


def percentile(values: Array, q: float) -> Estimate:
    """Quantile ``q`` (0 < q < 1) of ``values`` (any shape; NaN is left out), with its order-statistic interval.

    Raises:
        ValueError: ``q`` is not strictly between 0 and 1.
    """
    return _estimate(np.sort(_finite(values)), q)


def summary(values: Array) -> dict[str, Any]:
    """``{p50, p90, p95, p99, mean, n, ci: {p50: [lo, hi], …, mean: [lo, hi]}}`` in the unit of ``values`` (NaN out).

    The mean's interval is Student's t. None where unknown; with no values everything but ``n`` is None.
    """
    x = np.sort(_finite(values))
    found = {name: _estimate(x, q) for name, q in QUANTILES.items()}
    found["mean"] = _mean(x)
    return as_dict(found, len(x))


def as_dict(found: dict[str, Estimate], n: int) -> dict[str, Any]:
    """Estimates as the dict that :func:`summary` documents."""
    out: dict[str, Any] = {name: e.value for name, e in found.items()}
    return {**out, "n": n, "ci": {name: [e.lo, e.hi] for name, e in found.items()}}


def weighted_percentile(values: Array, q: float, weights: Array | None = None) -> float | None:
    """The smallest value with at least ``q`` of the weight at or below it (inverse of the distribution function).

    ``values`` and ``weights`` are 1-d and of one length; NaN values and weights that are not positive are left out.
    None when nothing is left.
    """
    x, w = _weighted(values, weights)
    if not len(x):
        return None
    order = np.argsort(x, kind="stable")
    return float(x[order][_inverse_cdf(np.cumsum(w[order]), q)])


def rank(q: float, n: int) -> int:
    """Of ``n`` ascending values that all weigh the same, the index of the first with ``q`` of all at or below it."""
    return min(max(math.ceil(q * float(n) * (1 - 1e-12)) - 1, 0), n - 1)


def ranked(values: Array, qs: Sequence[float]) -> list[float | None]:
    """:func:`weighted_percentile` at several ``qs`` of values (finite, at least one) that all weigh the same."""
    at = [rank(q, len(values)) for q in qs]
    part = np.partition(values, at)
    return [float(part[i]) for i in at]


def pooled_summary(
    values: Array, groups: Array, rng: np.random.Generator, weights: Array | None = None
) -> dict[str, Any]:
    """Like :func:`summary`, for values that are correlated within a group (gaps within a request).

    Args:
        values: 1-d, any unit; NaN is left out.
        groups: which group each value belongs to, integers, the same length.
        rng: makes the resampling reproducible.
        weights: what each value counts (tokens of a chunk), default 1.

    Returns:
        the keys of :func:`summary` and ``groups`` (how many have a value). A bound is None below 4 groups, and where
        the effective number of independent values (from the variance between groups) is too small by rule 5.
    """
    x, w = _weighted(values, weights)
    keep = np.isfinite(values) if weights is None else np.isfinite(values) & (weights > 0)
    _, group = np.unique(np.asarray(groups)[keep], return_inverse=True)
    n_groups = int(group.max()) + 1 if len(group) else 0
    out = as_dict({name: Estimate(None, None, None, 0) for name in [*QUANTILES, "mean"]}, len(x))
    out["groups"] = n_groups
    if not len(x):
        return out
    order = np.argsort(x, kind="stable")
    x, w, group = x[order], w[order], group[order]
    cum = np.cumsum(w)
    out.update({name: float(x[_inverse_cdf(cum, q)]) for name, q in QUANTILES.items()})
    out["mean"] = float((x * w).sum() / cum[-1])
    if n_groups >= MIN_GROUPS:
        out["ci"] = _pooled_ci(x, w, group, n_groups, rng)
    return out


def cluster_bootstrap(
    groups: int, stat: Callable[[Array], Array], rng: np.random.Generator, draws: int = DRAWS
) -> tuple[Array, Array]:
    """Two-sided 95 % interval of a statistic under resampling of whole groups (requests).

    Args:
        groups: how many groups there are, at least 2.
        stat: given how often each group was drawn (``draws`` × ``groups``), the statistic of every draw, (``draws``,)
            or (``draws``, k). Counts keep this vectorised: a pooled mean is ``(m @ sums) / (m @ counts)``.
        rng: makes it reproducible.
        draws: how many resamples.

    Returns:
        lower and upper bound, each of the shape of one statistic.

    Raises:
        ValueError: fewer than 2 groups.
    """
    if groups < 2:
        raise ValueError("a bootstrap over groups needs at least 2")
    drawn = rng.multinomial(groups, np.full(groups, 1 / groups), size=draws).astype(np.float64)
    found = stat(drawn)
    # Expanded percentile interval: the plain one is too narrow by √((G−1)/G) and uses z where t belongs.
    tail = 0.5 * math.erfc(math.sqrt(groups / (groups - 1)) * t975(groups - 1) / math.sqrt(2))
    lo = np.quantile(found, tail, axis=0, method="lower")
    return lo, np.quantile(found, 1 - tail, axis=0, method="higher")


def _pooled_ci(x: Array, w: Array, group: Array, n_groups: int, rng: np.random.Generator) -> dict[str, list[Any]]:
    if n_groups > MAX_GROUPS:
        group = (rng.permutation(n_groups) % MAX_GROUPS)[group]
        n_groups = MAX_GROUPS
    cum = np.cumsum(w)
    edges, coarse = _grid(x, cum)
    cell = group.astype(np.int64) * len(edges) + np.searchsorted(edges, x, side="left")
    below = np.bincount(cell, w, n_groups * len(edges)).reshape(n_groups, len(edges)).cumsum(axis=1)
    sums = np.bincount(group, x * w, n_groups)
    values = {q: float(x[_inverse_cdf(cum, q)]) for q in QUANTILES.values()}
    return resampled((edges, coarse), below, sums, (values, len(x)), rng)


def resampled(
    grid: tuple[Array, bool], below: Array, sums: Array, found: tuple[dict[float, float], int], rng: np.random.Generator
) -> dict[str, list[Any]]:
    """Intervals of pooled values, groups resampled.

    Args:
        grid: the values at which the distribution is followed, and whether they are some of many (see :func:`_grid`).
        below: weight at or below each of them, by group (groups × values).
        sums: of values × weights, by group.
        found: the quantiles of all values, and how many there are.
        rng: makes it reproducible.
    """
    (edges, coarse), (values, n) = grid, found
    total = below[:, -1].copy()

    def stat(drawn: Array) -> Array:
        cum, size = drawn @ below, drawn @ total
        found = [_quantile_of_counts(edges, cum, q * size, coarse) for q in QUANTILES.values()]
        return np.stack([*found, (drawn @ sums) / size], axis=1)

    lo, hi = cluster_bootstrap(len(below), stat, rng)
    ci: dict[str, list[Any]] = {"mean": [float(lo[-1]), float(hi[-1])]}
    for i, (name, q) in enumerate(QUANTILES.items()):
        at = int(np.searchsorted(edges, values[q]))
        low, high = order_ranks(_effective_n(below[:, at], total, q, n), q)
        ci[name] = [float(lo[i]) if low else None, float(hi[i]) if high else None]
    return ci


def _quantile_of_counts(edges: Array, cum: Array, goal: Array, coarse: bool) -> Array:
    """For each row of cumulated weights the value at which ``goal`` is reached; between edges when they are coarse."""
    # The slack keeps a sum that rounding left a hair short from skipping to the next value.
    at = np.minimum((cum < (goal * (1 - 1e-12))[:, None]).sum(axis=1), len(edges) - 1)
    out: Array = edges[at]
    if coarse:
        rows, left = np.arange(len(cum)), np.maximum(at - 1, 0)
        before, here = np.where(at > 0, cum[rows, left], 0.0), cum[rows, at]
        share = np.clip((goal - before) / np.maximum(here - before, 1e-300), 0, 1)
        out = edges[left] + share * (out - edges[left])
    return out


def _effective_n(below: Array, total: Array, q: float, n: int) -> int:
    """How many independent values would know the share below the quantile as well (Kish's design effect)."""
    residual = below - below.sum() / total.sum() * total
    variance = len(total) / (len(total) - 1) * float((residual**2).sum()) / float(total.sum()) ** 2
    return n if variance <= 0 else min(n, int(q * (1 - q) / variance))


def _grid(x: Array, cum: Array) -> tuple[Array, bool]:
    """Values at which the distribution is followed: all of them, or (True) about 770 spread over the ranks."""
    if few_distinct(x):
        return np.unique(x), False
    at = np.searchsorted(cum, grid_levels() * cum[-1] * (1 - 1e-12), side="left")
    return np.unique(np.append(x[np.minimum(at, len(x) - 1)], x[-1])), True


def few_distinct(x: Array) -> bool:
    """Whether the bootstrap follows each of these values (ascending)."""
    return bool(np.count_nonzero(x[1:] != x[:-1]) < _ALL_VALUES)


def grid_levels() -> Array:
    """The shares of all values at which the bootstrap follows their distribution, where it does not follow each."""
    return np.concatenate((np.linspace(0, 1, 513), np.linspace(0.98, 1, 257), list(QUANTILES.values())))


def _inverse_cdf(cum: Array, q: float) -> int:
    return min(int(np.searchsorted(cum, q * cum[-1] * (1 - 1e-12), side="left")), len(cum) - 1)


def _estimate(x: Array, q: float) -> Estimate:
    low, high = order_ranks(len(x), q)
    if not len(x):
        return Estimate(None, None, None, 0)
    lo = float(x[low - 1]) if low else None
    hi = float(x[high - 1]) if high else None
    return Estimate(float(np.quantile(x, q)), lo, hi, len(x))


def _mean(x: Array) -> Estimate:
    n = len(x)
    if not n:
        return Estimate(None, None, None, 0)
    mean = float(x.mean())
    if n < 2:
        return Estimate(mean, None, None, n)
    half = t975(n - 1) * float(x.std(ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def t975(df: int) -> float:
    """Student's t at 97.5 %: a table to 8 degrees of freedom, then Abramowitz & Stegun 26.7.5 (off by < 0.001)."""
    if df <= len(_T975):
        return _T975[df - 1]
    z = 1.959963985
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / df + g2 / df**2 + g3 / df**3


def _finite(values: Array) -> Array:
    x = np.asarray(values, dtype=np.float64).ravel()
    return x[np.isfinite(x)]


def _weighted(values: Array, weights: Array | None) -> tuple[Array, Array]:
    x = np.asarray(values, dtype=np.float64)
    w = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=np.float64)
    keep = np.isfinite(x) & (w > 0)
    return x[keep], w[keep]
