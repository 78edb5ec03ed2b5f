"""The life of a sequence at an engine: admit, compute its prompt, decode, preempt, leave."""

from __future__ import annotations

import math

from whywait.sim.cache import blocks_of, held_at
from whywait.sim.jit import jit
from whywait.sim.kernel_queue import NOBODY, push_event, push_front
from whywait.sim.kernel_state import ARRIVES, KINDS, NEVER, ONE, SHIFT, Clock, Engine, Events, Slot, World
from whywait.sim.state import F8, KEEP_FULL


@jit
def admit(w: World, eng: Engine, row: int, cached: int, take: int) -> None:
    """``row`` runs from now on; ``take`` of its prompt's tokens, after ``cached`` ones, are computed in this step."""
    place = w.room.spare[eng.id, eng.running]
    w.room.order[eng.id, eng.running] = place
    eng.running += 1
    eng.prefilling += 1
    slot = w.room.slots[eng.id, place]
    made = w.queue.made[row]
    slot.row = row
    slot.prompt = w.load.prompt[row] + made
    slot.done = cached
    slot.take = 0
    slot.decoding = 0
    slot.held = 0
    if eng.reserve == KEEP_FULL:
        slot.held = blocks_of(eng, w.load.prompt[row] + w.load.output[row] + eng.drafts)
        eng.free -= slot.held
    if math.isnan(w.out.scheduled_s[row]):
        w.out.scheduled_s[row] = eng.t
        w.out.cached[row] = cached
        w.out.replica[row] = eng.id
    else:
        w.out.recomputed[row] -= cached
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
    left = w.load.output[slot.row] - w.queue.made[slot.row] - 1
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
        slot = w.room.slots[eng.id, w.room.order[eng.id, k]]
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
        row = w.room.slots[eng.id, w.room.order[eng.id, k]].row
        other = w.room.slots[eng.id, w.room.order[eng.id, worst]].row
        if w.load.priority[row] > w.load.priority[other]:
            worst = k
    return worst


@jit
def preempt(w: World, eng: Engine, k: int) -> None:
    """The k-th running sequence loses its KV and waits again, first in its queue."""
    place = w.room.order[eng.id, k]
    slot = w.room.slots[eng.id, place]
    row = slot.row
    if slot.decoding == 1:
        steps = eng.counter - slot.start
        w.queue.made[row] += 1 + ((slot.grow * steps) >> SHIFT)
        w.out.recomputed[row] += w.load.prompt[row] + w.queue.made[row]
    else:
        w.out.recomputed[row] += slot.done
    ends = slot.decoding == 1 and slot.end == eng.next_end
    stop(w, eng, slot)
    for j in range(k, eng.running - 1):
        w.room.order[eng.id, j] = w.room.order[eng.id, j + 1]
    eng.running -= 1
    w.room.spare[eng.id, eng.running] = place
    if ends:
        earliest_end(w, eng)
    w.out.preempted[row] += 1
    eng.preemptions += 1
    push_front(w.queue, eng, row)


@jit
def finish(w: World, eng: Engine, row: int) -> None:
    """The last token of ``row`` is out; whoever waited for that may come."""
    w.out.last_s[row] = eng.t + eng.reply_s
    ended(w, w.clock[0], row, eng.t + eng.reply_s)


@jit
def ended(w: World, clock: Clock, row: int, at: float) -> None:
    clock.left -= 1
    events = w.events
    if len(events.child) > 0 and events.child[row] != NOBODY:
        then = events.child[row]
        while then != NOBODY:
            release(w.out.sent_s, events, clock, then, at + w.load.think_s[then], w.load.prompt[then])
            then = events.sibling[then]
    elif clock.closed == 1 and clock.next < clock.arrivals:
        then = events.order[clock.next]
        clock.next += 1
        release(w.out.sent_s, events, clock, then, at, w.load.prompt[then])


@jit
def release(sent_s: F8, events: Events, clock: Clock, row: int, at: float, prompt: int) -> None:
    sent_s[row] = at
    push_event(events, clock, at + clock.frontend_s + clock.frontend_token_s * prompt, row * KINDS + ARRIVES)
