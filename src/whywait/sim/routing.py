"""Which replica gets a request."""

from __future__ import annotations

from whywait.sim.cache import cached_blocks
from whywait.sim.jit import jit
from whywait.sim.kernel_access import engine, request
from whywait.sim.kernel_blocks import grow
from whywait.sim.kernel_record import record
from whywait.sim.kernel_state import BUSY, Engine, World
from whywait.sim.kernel_step import reached, took
from whywait.sim.state import LEAST_LOAD, PREFIX

MATCH = 0.5  # share of the prompt that must be cached for a replica to be chosen for it …
UNEVEN = 32  # … and by how many requests it may be ahead of the least loaded


@jit
def route(w: World, row: int, at: float) -> int:
    """Round robin; the one with the fewest requests; or the one that has most of the prompt in its cache, if that
    is much and it is not too busy, else the one with the fewest."""
    if w.first == 1:
        return 0
    if w.routing not in (LEAST_LOAD, PREFIX):
        e = w.turn
        w.turn = (e + 1) % w.first
        return e
    least = 0
    for e in range(1, w.first):
        if busy(engine(w, e)) < busy(engine(w, least)):
            least = e
    if w.routing == LEAST_LOAD:
        return least
    best, most = least, 0
    one = request(w, row)
    for e in range(w.first):
        eng = engine(w, e)
        settle(w, eng, at)
        found, _, _ = cached_blocks(w, eng, one, one.prompt)
        if found > most or (found == most and found > 0 and busy(eng) < busy(engine(w, best))):
            best, most = e, found
    if most * engine(w, best).block < MATCH * one.prompt or busy(engine(w, best)) - busy(engine(w, least)) > UNEVEN:
        return least
    return best


@jit
def busy(eng: Engine) -> int:
    return eng.running + eng.waiting + eng.inbox


@jit
def settle(w: World, eng: Engine, at: float) -> None:
    """Applies those of the steps in flight that have ended before ``at``, so that its cache is as it is then."""
    if eng.mode != BUSY or eng.n == 1:
        return
    n = reached(eng, at) - 1
    if n < 1:
        return
    end, whole = eng.end, eng.n
    eng.n, eng.end = n, eng.t + took(eng, n)
    record(w, eng)
    grow(w, eng, n)
    eng.made += eng.decoding * n
    eng.t, eng.end, eng.n = eng.end, end, whole - n
    eng.first_s += eng.slope_s * n
