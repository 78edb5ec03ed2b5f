"""Static batching: a batch is filled, runs until its longest answer is out, and only then the next one starts."""

from __future__ import annotations

from whywait.sim.jit import jit
from whywait.sim.kernel_access import request, running
from whywait.sim.kernel_blocks import blocks_of
from whywait.sim.kernel_queue import first_waiting, pop_waiting
from whywait.sim.kernel_slots import admit, chunk, whole
from whywait.sim.kernel_state import NOBODY, Engine, Request, World
from whywait.sim.state import KEEP_FULL


@jit
def grown(eng: Engine, one: Request, longest: int) -> int:
    """Blocks of a sequence at the end of its batch, whose longest answer has so many tokens: without drafts, and where
    nothing was kept at the start, those that have ended grow on with the others."""
    if eng.reserve == KEEP_FULL or eng.drafts > 0:
        return whole(eng, one)
    return blocks_of(eng, one.prompt + longest)


@jit
def needed(w: World, eng: Engine, longest: int) -> int:
    """The same of all that are in the batch so far."""
    total = 0
    for k in range(eng.running):
        total += grown(eng, request(w, running(w, eng, k).row), longest)
    return total


@jit
def plan_static(w: World, eng: Engine) -> None:
    """All prompts of the batch (by ``token_budget`` a step), then a token of each sequence per step, ended ones too."""
    eng.again = 0
    budget = eng.token_budget
    if eng.running == 0:
        longest, room = 0, eng.free
        while eng.running < eng.max_seqs and eng.waiting > 0:
            row = first_waiting(w, eng)
            if row == NOBODY:
                break
            longest = max(longest, request(w, row).output)
            if needed(w, eng, longest) + grown(eng, request(w, row), longest) > room:
                break
            pop_waiting(w, eng, row)
            part = min(budget, request(w, row).prompt)
            admit(w, eng, row, 0, part)
            budget -= part
    elif eng.prefilling > 0:
        for k in range(eng.running):
            slot = running(w, eng, k)
            if slot.decoding == 0:
                part = min(budget, slot.prompt - slot.done)
                chunk(w, eng, slot, part)
                budget -= part
    eng.decodes = 1 if eng.prefilling == 0 and eng.decoding > 0 else 0
    eng.blocked = 1 if eng.running > 0 else 0
