"""How many KV blocks sequences hold, and how many decoding will take."""

from __future__ import annotations

from typing import Any

from whywait.sim.cache import take
from whywait.sim.jit import jit
from whywait.sim.kernel_state import SHIFT, Cache, Engine, Room, Slot
from whywait.sim.state import KEEP_FULL


@jit
def running(room: Room, eng: Engine, k: int) -> Slot:
    """The k-th sequence in order of admission."""
    return room.slots[eng.id, room.order[eng.id, k]]  # type: ignore[no-any-return]


@jit
def blocks_of(eng: Engine, tokens: int) -> int:
    return (tokens + eng.block - 1) // eng.block


@jit
def held_at(eng: Engine, slot: Slot, counter: int) -> int:
    """Blocks of a decoder after that many decode steps, those for drafts included."""
    return blocks_of(eng, ((slot.base + slot.grow * counter) >> SHIFT) + eng.drafts)  # type: ignore[no-any-return]


@jit
def growth(room: Room, eng: Engine, n: int) -> int:
    """Blocks that all decoders need for their next ``n`` steps."""
    if eng.decoding == 0 or eng.reserve == KEEP_FULL:
        return 0
    if eng.drafts > 0:
        total = 0
        for k in range(eng.running):
            slot = running(room, eng, k)
            if slot.decoding == 1:
                total += max(0, held_at(eng, slot, eng.counter + n) - slot.held)
        return total
    whole, rest = n // eng.block, n % eng.block
    total = whole * eng.decoding
    if rest > 0:
        at = eng.block - 1 - eng.counter % eng.block
        for _ in range(rest):
            total += room.phase[eng.id, at]
            at = at - 1 if at > 0 else eng.block - 1
    return total


@jit
def grow(room: Room, cache: Cache, requests: Any, eng: Engine, n: int) -> None:
    """Takes those blocks; the counter moves on by ``n``."""
    need = growth(room, eng, n)
    eng.counter += n
    if need > 0:
        take(cache, requests, eng, need)
        if eng.drafts > 0:
            for k in range(eng.running):
                slot = running(room, eng, k)
                if slot.decoding == 1:
                    slot.held = max(slot.held, held_at(eng, slot, eng.counter))
