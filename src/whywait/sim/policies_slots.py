"""llama.cpp's server: a slot keeps the KV of its last request, and a new one goes where most of its prompt is."""

from __future__ import annotations

from whywait.sim.jit import jit
from whywait.sim.kernel_access import link_at, order, request, running, seat
from whywait.sim.kernel_blocks import blocks_of
from whywait.sim.kernel_state import NOBODY, Engine, Request, World

SIMILAR = 0.1  # share of the prompt that must be there (--slot-prompt-similarity)


@jit
def choose_place(w: World, eng: Engine, row: int) -> int:
    """Moves the best empty slot to the front of the empty ones: the one with the longest common beginning, else the
    one that was left longest ago. The blocks that are there (held by the slot, to be taken over)."""
    e = eng.id
    one = request(w, row)
    best, found, oldest, left = NOBODY, 0, eng.running, 0
    for k in range(eng.running, eng.max_seqs):
        slot = seat(w, e, order(w, e, k).n)
        if k == eng.running or slot.left < left:
            oldest, left = k, slot.left
        if eng.slot_cache == 1 and slot.row != NOBODY and one.made == 0:
            common = common_blocks(w, eng, one, request(w, slot.row))
            if common > found and common * eng.block > SIMILAR * one.prompt:
                best, found = k, common
    if best == NOBODY:
        best, found = oldest, 0
    order(w, e, best).n, order(w, e, eng.running).n = order(w, e, eng.running).n, order(w, e, best).n
    return found


@jit
def common_blocks(w: World, eng: Engine, one: Request, other: Request) -> int:
    """Leading blocks that two chains have in common; the last token of a prompt is always computed."""
    most = min((one.prompt - 1) // eng.block, one.chain_n, other.chain_n)
    n = 0
    while n < most and link_at(w, one.chain_at + n).id == link_at(w, other.chain_at + n).id:
        n += 1
    return n


@jit
def purge_places(w: World, eng: Engine) -> None:
    """Empty slots lose what they keep, by number, until what is left is no more than the free blocks."""
    kept = 0
    for k in range(eng.running, eng.max_seqs):
        row = running(w, eng, k).row
        if row != NOBODY:
            kept += blocks_of(eng, request(w, row).prompt + request(w, row).output)
    for place in range(eng.max_seqs):
        if kept <= eng.free:
            return
        slot = seat(w, eng.id, place)
        if slot.row != NOBODY and slot.busy == 0:
            kept -= blocks_of(eng, request(w, slot.row).prompt + request(w, slot.row).output)
            slot.row = NOBODY
