"""Percentiles of values that are correlated within a group (gaps within a request), of hundreds of millions of them.

The same figures as those of a table sorted with its weights and groups, to the last bit, without that table: where
every value counts the same, sorting needs no companions, and the groups, which lie together, are sorted one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whywait.analyze import stats
from whywait.analyze.stats import MIN_GROUPS, QUANTILES, Estimate
from whywait.core.table import Array


class Pool:
    """Values that each count 1, with the group of each (ascending); what sorting them takes is done once."""

    def __init__(self, values: Array, groups: Array) -> None:
        """``values`` finite, ``groups`` ascending integers of the same length."""
        self.values, self.groups = values, groups
        self.sorted = sort(values)
        self.begin = np.flatnonzero(np.append(len(groups) > 0, groups[1:] != groups[:-1]))
        self.many = len(self.begin)

    def at(self, q: float) -> float:
        """The smallest value with at least ``q`` of all at or below it."""
        return float(self.sorted[stats.rank(q, len(self.sorted))])

    def summary(self, rng: np.random.Generator) -> dict[str, Any]:
        """See :func:`whywait.analyze.stats.pooled_summary`."""
        n = len(self.values)
        out = stats.as_dict({name: Estimate(None, None, None, 0) for name in [*QUANTILES, "mean"]}, n)
        out["groups"] = self.many
        if not n:
            return out
        out.update({name: self.at(q) for name, q in QUANTILES.items()})
        out["mean"] = float(self.sorted.sum() / float(n))
        if self.many >= MIN_GROUPS:
            out["ci"] = self._ci(rng)
        return out

    def _ci(self, rng: np.random.Generator) -> dict[str, list[Any]]:
        edges, coarse = self._grid()
        bundles = [np.array([i]) for i in range(self.many)]
        if self.many > stats.MAX_GROUPS:
            of = rng.permutation(self.many) % stats.MAX_GROUPS
            order = np.argsort(of, kind="stable")
            bundles = np.split(order, np.flatnonzero(np.diff(of[order])) + 1)
        below, sums = np.empty((len(bundles), len(edges))), np.empty(len(bundles))
        ends = np.append(self.begin[1:], len(self.values))
        for i, bundle in enumerate(bundles):
            mine = [self.values[a:b] for a, b in zip(self.begin[bundle].tolist(), ends[bundle].tolist(), strict=True)]
            x = sort(np.concatenate(mine))
            below[i] = np.searchsorted(x, edges, side="right")
            sums[i] = np.add.accumulate(x)[-1]
        found = {q: self.at(q) for q in QUANTILES.values()}
        return stats.resampled((edges, coarse), below, sums, (found, len(self.values)), rng)

    def _grid(self) -> tuple[Array, bool]:
        """As ``stats._grid`` has it."""
        x = self.sorted
        if stats.few_distinct(x):
            return np.unique(x), False
        at = [stats.rank(level, len(x)) for level in stats.grid_levels().tolist()]
        return np.unique(np.append(x[at], x[-1])), True


def sort(values: Array) -> Array:
    """Ascending copy of finite float64 values. Those that are not negative sort as the integers of their bits, which
    is several times as fast where the machine has no instructions for floats."""
    out = np.array(values, dtype=np.float64)
    bits = out.view(np.int64)
    if len(out) and bits.min() >= 0:
        bits.sort()
    else:
        out.sort()
    return out
