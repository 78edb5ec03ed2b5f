"""Functions given at knots and linear in the logarithms between: what fits and their use agree on. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def weights(features: Sequence[Floats], knots: Sequence[Sequence[float]]) -> tuple[NDArray[np.int64], Floats]:
    """Of every row: which cells of the grid (flat index, 2^d of them) and with what weight. Outside the knots the
    nearest value holds."""
    rows = np.broadcast_shapes(*(np.shape(f) for f in features))
    at, share = [], []
    for feature, knot in zip(features, knots, strict=True):
        log = np.log(np.asarray(knot, dtype=float))
        value = np.clip(np.log(np.maximum(np.broadcast_to(feature, rows), 1e-12)), log[0], log[-1])
        i = np.clip(np.searchsorted(log, value, side="right") - 1, 0, max(len(log) - 2, 0))
        at.append(i)
        share.append((value - log[i]) / (log[i + 1] - log[i]))
    cells, found = [], []
    for corner in itertools.product((0, 1), repeat=len(at)):
        cell = np.zeros(rows, dtype=np.int64)
        weight = np.ones(rows)
        for up, i, w, knot in zip(corner, at, share, knots, strict=True):
            cell = cell * len(knot) + i + up
            weight = weight * (w if up else 1 - w)
        cells.append(cell)
        found.append(weight)
    return np.stack(cells, axis=-1), np.stack(found, axis=-1)


def evaluate(values: Floats, features: Sequence[Floats], knots: Sequence[Sequence[float]]) -> Floats:
    """The function of ``values`` (flat, in the order of ``knots``) at ``features``."""
    cells, found = weights(features, knots)
    return np.asarray((np.asarray(values)[cells] * found).sum(axis=-1), dtype=float)
