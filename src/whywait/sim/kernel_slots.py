"""The life of a sequence at an engine: admit, compute its prompt, decode, preempt, leave."""

from __future__ import annotations

import math

from whywait.sim.cache import blocks_of, held_at, running
from whywait.sim.jit import jit
from whywait.sim.kernel_queue import push_event, push_front
from whywait.sim.kernel_state import ARRIVES, KINDS, NEVER, NOBODY, ONE, SHIFT, Clock, Engine, Slot, World
from whywait.sim.state import KEEP_FULL


@jit
def admit(w: World, eng: Engine, row: int, cached: int, take: int) -> None:
    """``row`` runs from now on; ``take`` of its prompt's tokens, after ``cached`` ones, are computed in this step."""
    place = w.room.order[eng.id, eng.running]
    eng.running += 1
    eng.prefilling += 1
    slot = w.room.slots[eng.id, place]
    one = w.requests[row]
    slot.row = row
    slot.prompt = one.prompt + one.made
    slot.done = cached
    slot.take = 0
    slot.decoding = 0
    slot.held = 0
    if eng.reserve == KEEP_FULL:
        slot.held = blocks_of(eng, one.prompt + one.output + eng.drafts)
        eng.free -= slot.held
    if math.isnan(one.scheduled_s):
        one.scheduled_s = eng.t
        one.cached = cached
        one.replica = eng.id
    else:
        one.recomputed -= cached
    chunk(eng, slot, take)


@jit
def chunk(eng: Engine, slot: Slot, take: int) -> None:
    """``take`` more tokens of its prompt are computed in this step."""
    slot.take = take
    if eng.reserve != KEEP_FULL:
        need = blocks_of(eng, slot.done + take) - slot.held
        eng.free -= need
        slot.held += need


@jit
def start_decoding(w: World, eng: Engine, slot: Slot) -> None:
    """Its prompt is computed and a token is out; the others come one decode step each, or faster with drafts."""
    slot.decoding = 1
    slot.start = eng.counter
    one = w.requests[slot.row]
    left = one.output - one.made - 1
    slot.grow = ONE
    slot.end = eng.counter + left
    slot.base = (slot.prompt << SHIFT) - slot.grow * eng.counter
    eng.prefilling -= 1
    eng.decoding += 1
    eng.ctx_base += slot.base
    eng.ctx_grow += slot.grow
    eng.next_end = min(eng.next_end, slot.end)
    if eng.drafts == 0:
        w.room.phase[eng.id, ((slot.base >> SHIFT) - 1) % eng.block] += 1


@jit
def stop(w: World, eng: Engine, slot: Slot) -> None:
    """Takes a sequence's weight out of the sums and frees its blocks; the caller takes it out of the order."""
    if slot.decoding == 1:
        eng.decoding -= 1
        eng.ctx_base -= slot.base
        eng.ctx_grow -= slot.grow
        if eng.drafts == 0:
            w.room.phase[eng.id, ((slot.base >> SHIFT) - 1) % eng.block] -= 1
            if eng.reserve != KEEP_FULL:
                slot.held = held_at(eng, slot, eng.counter)
    else:
        eng.prefilling -= 1
    eng.free += slot.held
    slot.held = 0
    slot.decoding = 0


@jit
def earliest_end(w: World, eng: Engine) -> None:
    best = NEVER
    for k in range(eng.running):
        slot = running(w.room, eng, k)
        if slot.decoding == 1 and slot.end < best:
            best = slot.end
    eng.next_end = best


@jit
def victim(w: World, eng: Engine) -> int:
    """Place in the order of whom to preempt: the last, or by priority the last of the lowest."""
    last = eng.running - 1
    if eng.priority == 0:
        return last
    worst = last
    for k in range(last - 1, -1, -1):
        row = running(w.room, eng, k).row
        if w.requests[row].level > w.requests[running(w.room, eng, worst).row].level:
            worst = k
    return worst


@jit
def preempt(w: World, eng: Engine, k: int) -> None:
    """The k-th running sequence loses its KV and waits again, first in its queue."""
    place = w.room.order[eng.id, k]
    slot = w.room.slots[eng.id, place]
    one = w.requests[slot.row]
    if slot.decoding == 1:
        steps = eng.counter - slot.start
        one.made += 1 + ((slot.grow * steps) >> SHIFT)
        one.recomputed += one.prompt + one.made
    else:
        one.recomputed += slot.done
    ends = slot.decoding == 1 and slot.end == eng.next_end
    stop(w, eng, slot)
    for j in range(k, eng.running - 1):
        w.room.order[eng.id, j] = w.room.order[eng.id, j + 1]
    eng.running -= 1
    w.room.order[eng.id, eng.running] = place
    if ends:
        earliest_end(w, eng)
    one.preempted += 1
    eng.preemptions += 1
    push_front(w.levels, w.requests, eng, slot.row)


@jit
def finish(w: World, eng: Engine, row: int) -> None:
    """The last token of ``row`` is out; whoever waited for that may come."""
    w.requests[row].last_s = eng.t + eng.reply_s
    ended(w, row, eng.t + eng.reply_s)


@jit
def ended(w: World, row: int, at: float) -> None:
    clock = w.clock[0]
    clock.left -= 1
    then = w.requests[row].child
    if then != NOBODY:
        while then != NOBODY:
            release(w, clock, then, at + w.requests[then].think_s)
            then = w.requests[then].sibling
    elif clock.closed == 1 and clock.next < clock.arrivals:
        then = w.due[clock.next].code
        clock.next += 1
        release(w, clock, then, at)


@jit
def release(w: World, clock: Clock, row: int, at: float) -> None:
    one = w.requests[row]
    one.sent_s = at
    push_event(w.heap, clock, at + clock.frontend_s + clock.frontend_token_s * one.prompt, row * KINDS + ARRIVES)
