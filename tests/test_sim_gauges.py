"""Counters that the simulator shows: they never fall, or a reader takes them for a server that started anew."""

from __future__ import annotations

import numpy as np

from whywait.sim.gauges import _ramps


def test_a_counter_of_many_overlapping_ramps_never_falls() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        begin = np.sort(rng.uniform(0, 100, 300))
        end = begin + rng.uniform(0.01, 3, 300)
        amount = rng.integers(1, 200, 300).astype(float)
        at = np.sort(rng.uniform(0, 130, 2000))
        found = _ramps(begin, end, amount, at)
        assert (np.diff(found) >= 0).all()
        assert abs(found[-1] - amount.sum()) < 1e-6
