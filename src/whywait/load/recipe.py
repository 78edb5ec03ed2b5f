"""Workload → Schedule: lengths, classes and arrival times from one seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from whywait.core.schedule import Schedule, Workload
from whywait.units import NS_PER_S


def closed_schedule(workload: Workload, n: int, first_id: int = 0, salt: int = 0) -> Schedule:
    """``n`` requests without due times, for a closed loop."""
    return _rows(workload, np.full(n, -1, np.int64), first_id, salt)


def open_schedule(workload: Workload, rate: float, n: int, first_id: int = 0, salt: int = 0) -> Schedule:
    """``n`` requests at ``rate`` per second: really constant, or Poisson (exponential gaps), from time 0."""
    if workload.arrivals == "constant":
        due = np.arange(n) / rate
    else:
        rng = np.random.default_rng([workload.seed, salt, 7])
        due = np.cumsum(rng.exponential(1 / rate, n))
    return _rows(workload, np.rint(due * NS_PER_S).astype(np.int64), first_id, salt)


def _rows(workload: Workload, due_ns: NDArray[np.int64], first_id: int, salt: int) -> Schedule:
    n = len(due_ns)
    rng = np.random.default_rng([workload.seed, salt, 3])
    shares = np.array([c.share for c in workload.classes])
    klass = _deal(shares / shares.sum(), n, rng)
    prompt, output = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for i, c in enumerate(workload.classes):
        mine = klass == i
        prompt[mine] = c.prompt_tokens.sample(int(mine.sum()), rng)
        output[mine] = c.output_tokens.sample(int(mine.sum()), rng)
    names = tuple(c.name for c in workload.classes)
    return Schedule(np.arange(first_id, first_id + n, dtype=np.int64), klass, prompt, output, due_ns, names)


def _deal(shares: NDArray[np.float64], n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Classes in the asked proportions to within one request, in random order.

    Independent draws would miss small shares in short runs: 10 % of 30 requests is none at all in 4 % of seeds.
    """
    bounds = np.rint(np.cumsum(shares) * n).astype(int)
    klass = np.searchsorted(bounds, np.arange(n), side="right").astype(np.int64)
    return rng.permutation(np.minimum(klass, len(shares) - 1))
