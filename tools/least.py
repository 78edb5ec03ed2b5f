"""Least squares between bounds, for a handful of unknowns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def bounded(terms: Floats, target: Floats, most: float = np.inf) -> Floats:
    """The x in 0 … ``most`` with the least ``|terms x − target|²``: coordinate descent on the normal equations, which
    converges as they are convex."""
    scale = np.maximum(np.sqrt((terms**2).sum(axis=0)), 1e-300)
    normal = (terms / scale).T @ (terms / scale)
    right = (terms / scale).T @ target
    x = np.zeros(terms.shape[1])
    for _ in range(5000):
        before = x.copy()
        for i in range(len(x)):
            rest = right[i] - normal[i] @ x + normal[i, i] * x[i]
            x[i] = min(max(rest / max(normal[i, i], 1e-300), 0.0), most * scale[i])
        if np.abs(x - before).max() <= 1e-12 * max(np.abs(x).max(), 1e-300):
            break
    return np.asarray(x / scale, dtype=float)
