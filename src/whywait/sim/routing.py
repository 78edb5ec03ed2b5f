"""Which replica gets a request."""

from __future__ import annotations

from whywait.sim.cache import cached_blocks
from whywait.sim.jit import jit
from whywait.sim.kernel_blocks import grow
from whywait.sim.kernel_record import record
from whywait.sim.kernel_state import BUSY, Clock, Engine, World
from whywait.sim.kernel_step import reached, took
from whywait.sim.state import LEAST_LOAD, PREFIX

MATCH = 0.5  # share of the prompt that must be cached for a replica to be chosen for it …
UNEVEN = 32  # … and by how many requests it may be ahead of the least loaded


@jit
def route(w: World, clock: Clock, row: int, at: float) -> int:
    """Round robin; the one with the fewest requests; or the one that has most of the prompt in its cache, if that is much and
    it is not too busy, else the one with the fewest."""
    if clock.first == 1:
        return 0
    if clock.routing != LEAST_LOAD and clock.routing != PREFIX:
        e = clock.turn
        clock.turn = (e + 1) % clock.first
        return e
    least = 0
    for e in range(1, clock.first):
        if busy(w.engines[e]) < busy(w.engines[least]):
            least = e
    if clock.routing == LEAST_LOAD:
        return least
    best, most = least, 0
    one = w.requests[row]
    for e in range(clock.first):
        eng = w.engines[e]
        settle(w, clock, eng, at)
        found, _, _ = cached_blocks(w.cache, eng, one, one.prompt)
        if found > most or (found == most and found > 0 and busy(eng) < busy(w.engines[best])):
            best, most = e, found
    if most * w.engines[best].block < MATCH * one.prompt or busy(w.engines[best]) - busy(w.engines[least]) > UNEVEN:
        return least
    return best


@jit
def busy(eng: Engine) -> int:
    return eng.running + eng.waiting


@jit
def settle(w: World, clock: Clock, eng: Engine, at: float) -> None:
    """Applies those of the steps in flight that have ended before ``at``, so that its cache is as it is then."""
    if eng.mode != BUSY or eng.n == 1:
        return
    n = reached(eng, at) - 1
    if n < 1:
        return
    end, whole = eng.end, eng.n
    eng.n, eng.end = n, eng.t + took(eng, n)
    record(w.rows, clock, eng)
    grow(w.room, w.cache, w.requests, eng, n)
    eng.made += eng.decoding * n
    eng.t, eng.end, eng.n = eng.end, end, whole - n
    eng.first_s += eng.slope_s * n
