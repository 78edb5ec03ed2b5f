"""How many KV blocks sequences hold, and how many decoding will take."""

from __future__ import annotations

from whywait.sim.cache import take
from whywait.sim.jit import jit
from whywait.sim.kernel_access import phase, running
from whywait.sim.kernel_state import NEVER, SHIFT, Engine, Slot, World
from whywait.sim.state import KEEP_FULL


@jit
def blocks_of(eng: Engine, tokens: int) -> int:
    return (tokens + eng.block - 1) // eng.block


@jit
def held_at(eng: Engine, slot: Slot, counter: int) -> int:
    """Blocks of a decoder after that many decode steps, those for drafts included."""
    return blocks_of(eng, ((slot.base + slot.grow * counter) >> SHIFT) + eng.drafts)


@jit
def growth(w: World, eng: Engine, n: int) -> int:
    """Blocks that all decoders need for their next ``n`` steps."""
    if eng.decoding == 0 or eng.reserve == KEEP_FULL:
        return 0
    if eng.drafts > 0:
        total = 0
        for k in range(eng.running):
            slot = running(w, eng, k)
            if slot.decoding == 1 and slot.end < NEVER:  # those ended in a static batch stay, and grow no more
                total += max(0, held_at(eng, slot, eng.counter + n) - slot.held)
        return total
    whole, rest = n // eng.block, n % eng.block
    total = whole * eng.decoding
    if rest > 0:
        at = eng.block - 1 - eng.counter % eng.block
        for _ in range(rest):
            total += phase(w, eng.id, at).n
            at = at - 1 if at > 0 else eng.block - 1
    return total


@jit
def grow(w: World, eng: Engine, n: int) -> None:
    """Takes those blocks; the counter moves on by ``n``."""
    need = growth(w, eng, n)
    eng.counter += n
    if need > 0:
        take(w, eng, need)
        if eng.drafts > 0:
            for k in range(eng.running):
                slot = running(w, eng, k)
                if slot.decoding == 1 and slot.end < NEVER:
                    slot.held = max(slot.held, held_at(eng, slot, eng.counter))
