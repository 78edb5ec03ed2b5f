"""Which replica gets a request."""

from __future__ import annotations

from whywait.sim.jit import jit
from whywait.sim.kernel_state import Clock, World
from whywait.sim.state import LEAST_LOAD


@jit
def route(w: World, clock: Clock, row: int) -> int:
    """Round robin, or the one with the fewest requests (the first of several)."""
    if clock.first == 1:
        return 0
    if clock.routing == LEAST_LOAD:
        best = 0
        for e in range(1, clock.first):
            if w.engines[e].running + w.engines[e].waiting < w.engines[best].running + w.engines[best].waiting:
                best = e
        return best
    e = clock.turn
    clock.turn = (e + 1) % clock.first
    return e
