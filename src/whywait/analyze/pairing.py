"""Which request of one run is which of another: the same place in one schedule, with the same lengths and class."""

from __future__ import annotations

import numpy as np

from whywait.analyze.digest import Point
from whywait.core.table import Array

LEAST_MATCHED = 0.9  # of the requests that both got to: fewer are another schedule


def pairing(a: Point, b: Point) -> tuple[Array, Array, str]:
    """Rows of A and of B that are the same request of the same schedule, in its order; else why there are none."""
    none = np.zeros(0, dtype=np.int64)
    if a.rows is None or b.rows is None:
        return none, none, "a summary alone has no requests"
    if not len(a.rows["rank"]) or not len(b.rows["rank"]):
        return none, none, "a side has no request"
    _, i, j = np.intersect1d(a.rows["rank"], b.rows["rank"], return_indices=True)
    if np.isnan(a.rows["asked_out"]).all() and np.isnan(a.rows["asked_in"]).all():
        return none, none, "what was asked for is not known"
    kinds = [np.array([*p.classes, ""], dtype=object)[p.rows["klass"]] for p in (a, b) if p.rows is not None]
    same = kinds[0][i] == kinds[1][j]
    for name in ("asked_in", "asked_out"):
        x, y = a.rows[name][i], b.rows[name][j]
        same &= (x == y) | (np.isnan(x) & np.isnan(y))
    both = min(a.rows["rank"].max(), b.rows["rank"].max())  # one may have got further in the schedule than the other
    within = min(int((p["rank"] <= both).sum()) for p in (a.rows, b.rows))
    if not len(i) or same.mean() < LEAST_MATCHED or len(i) < LEAST_MATCHED * within:
        return none, none, "the requests are not the same (lengths or classes differ)"
    return i[same], j[same], ""
