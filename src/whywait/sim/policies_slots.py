"""llama.cpp's server: a slot keeps the KV of its last request, and a new one goes where most of its prompt is."""

from __future__ import annotations

from whywait.sim.jit import jit
from whywait.sim.kernel_blocks import blocks_of
from whywait.sim.kernel_state import NOBODY, Cache, Engine, Request, World

SIMILAR = 0.1  # share of the prompt that must be there (--slot-prompt-similarity)


@jit
def choose_place(w: World, eng: Engine, row: int) -> int:
    """Moves the best empty slot to the front of the empty ones: the one with the longest common beginning, else the one that
    was left longest ago. The blocks that are there (held by the slot, to be taken over)."""
    order, slots, e = w.room.order, w.room.slots, eng.id
    one = w.requests[row]
    best, found, oldest, left = NOBODY, 0, eng.running, 0
    for k in range(eng.running, eng.max_seqs):
        slot = slots[e, order[e, k]]
        if k == eng.running or slot.left < left:
            oldest, left = k, slot.left
        if eng.slot_cache == 1 and slot.row != NOBODY and one.made == 0:
            common = common_blocks(w.cache, eng, one, w.requests[slot.row])
            if common > found and common * eng.block > SIMILAR * one.prompt:
                best, found = k, common
    if best == NOBODY:
        best, found = oldest, 0
    order[e, best], order[e, eng.running] = order[e, eng.running], order[e, best]
    return found


@jit
def common_blocks(cache: Cache, eng: Engine, one: Request, other: Request) -> int:
    """Leading blocks that two chains have in common; the last token of a prompt is always computed."""
    most = min((one.prompt - 1) // eng.block, min(one.chain_n, other.chain_n))
    n = 0
    while n < most and cache.chain[one.chain_at + n] == cache.chain[other.chain_at + n]:
        n += 1
    return n


@jit
def purge_places(w: World, eng: Engine) -> None:
    """Empty slots lose what they keep, by number, until what is left is no more than the free blocks."""
    kept = 0
    for k in range(eng.running, eng.max_seqs):
        row = w.room.slots[eng.id, w.room.order[eng.id, k]].row
        if row != NOBODY:
            kept += blocks_of(eng, w.requests[row].prompt + w.requests[row].output)
    for place in range(eng.max_seqs):
        if kept <= eng.free:
            return
        slot = w.room.slots[eng.id, place]
        if slot.row != NOBODY and slot.busy == 0:
            kept -= blocks_of(eng, w.requests[slot.row].prompt + w.requests[slot.row].output)
            slot.row = NOBODY
