"""When requests come. Every shape is a process of rate one, read off at the running total of the asked rate.

So a ramp or a change of stage keeps the character of the process: constant stays really constant, Poisson stays
Poisson, and points of one sweep see the same bursts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whywait.core.workload import Stage, Workload

Floats = NDArray[np.float64]


def unit_times(workload: Workload, n: int, salt: int = 0) -> Floats:
    """``n`` arrivals at a mean rate of one, by the workload's ``arrivals``."""
    rng = np.random.default_rng([workload.seed, salt, 7])
    if workload.arrivals == "constant":
        return np.arange(n, dtype=np.float64)
    if workload.arrivals == "burst":
        return (np.arange(n) // workload.burst * workload.burst).astype(np.float64)
    if workload.arrivals == "gamma":
        shape = 1 / workload.cv**2
        return np.cumsum(rng.gamma(shape, 1 / shape, n))
    return np.cumsum(rng.exponential(1, n))


def at_rate(units: Floats, rate: float) -> Floats:
    """Seconds at which a constant ``rate`` has brought so many requests."""
    return units / rate


def at_stages(units: Floats, stages: Sequence[Stage]) -> Floats:
    """Seconds at which the stages, one after another, have brought so many requests; later ones are left out."""
    ends = np.cumsum([s.requests for s in stages])
    starts = ends - [s.requests for s in stages]
    began = np.cumsum([s.duration_s for s in stages]) - [s.duration_s for s in stages]
    inside = units[units < ends[-1]]
    which = np.searchsorted(ends, inside, side="right")
    rate, slope = (np.array(x) for x in ([s.rate for s in stages], [(s.end - s.rate) / s.duration_s for s in stages]))
    # From the start of its stage: rate · t + slope · t² / 2 = so many requests, solved without cancellation.
    want, r, m = inside - starts[which], rate[which], slope[which]
    root = np.sqrt(np.maximum(r * r + 2 * m * want, 0))
    t = np.divide(2 * want, r + root, out=np.zeros_like(want), where=want > 0)
    out: Floats = began[which] + t
    return out


def scaled(stages: Sequence[Stage], mean: float | None) -> tuple[Stage, ...]:
    """The stages with all rates scaled so that their mean is ``mean`` requests per second; as they are when None."""
    if mean is None:
        return tuple(stages)
    k = mean / mean_rate(stages)
    return tuple(Stage(s.rate * k, s.duration_s, None if s.to is None else s.to * k) for s in stages)


def mean_rate(stages: Sequence[Stage]) -> float:
    return sum(s.requests for s in stages) / sum(s.duration_s for s in stages)
