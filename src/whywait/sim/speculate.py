"""Speculative decoding: how many steps the rest of an answer takes."""

from __future__ import annotations

from whywait.sim.jit import jit
from whywait.sim.kernel_access import accept
from whywait.sim.kernel_state import Engine, World
from whywait.sim.rng import draw, seeded


@jit
def iterations(w: World, eng: Engine, seed: int, row: int, left: int) -> int:
    """Steps until ``left`` more tokens are out. A step gives one token, and one more for each draft up to the first
    that is rejected; a draft is accepted with the probability of its position."""
    if eng.drafts == 0:
        return left
    one, two = seeded(seed, row, left)
    steps = 0
    while left > 0:
        steps += 1
        left -= 1
        for k in range(eng.drafts):
            u, one, two = draw(one, two)
            if u >= accept(w, eng.kind, k).x:
                break
            left -= 1
    return steps
