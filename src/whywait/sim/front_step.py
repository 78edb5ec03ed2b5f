"""One engine of the kernel, step by step, with requests that come and go."""

from __future__ import annotations

from whywait.sim.cache import give_back
from whywait.sim.jit import entry, jit
from whywait.sim.kernel import commit, start
from whywait.sim.kernel_blocks import running
from whywait.sim.kernel_queue import pop_event, push_back, push_front
from whywait.sim.kernel_slots import earliest_end, ended, stop, wanted
from whywait.sim.kernel_state import BUSY, KINDS, NEVER, NOBODY, READY, SHIFT, World
from whywait.sim.state import I8, STATIC

LEAVES, LEFT = 1, 2


@entry
def receive(w: World, row: int, at: float) -> None:
    """``row`` joins the queue."""
    w.requests[row].queued_s = at
    w.requests[row].replica = 0
    push_back(w.levels, w.requests, w.engines[0], row)


@entry
def begin_step(w: World, at: float, gone: I8) -> int:
    """Plans the step that begins ``at``; whether there is one. Loads from a tier that are there by then come first;
    ``gone`` (n,) marks rows that were dropped while they were loading."""
    clock, eng = w.clock[0], w.engines[0]
    clock.now, eng.t = at, at
    while clock.events > 0 and w.heap[0].at <= at:
        row = pop_event(w.heap, clock) // KINDS
        push_front(w.levels, w.requests, eng, row)
        if gone[row] == LEAVES:
            gone[row] = LEFT
            drop(w, row)
    eng.mode = READY
    start(w, clock, eng)
    return 1 if eng.mode == BUSY else 0


@entry
def tell(w: World, given: I8, rows: I8, tokens: I8, fresh: I8) -> tuple[int, int]:
    """Of the step in flight: ``rows`` that get ``tokens`` at its end, and rows that it schedules for the first time
    (``fresh``); how many of each. ``given`` (n,) are tokens that a row has had so far; kept here."""
    eng = w.engines[0]
    count, new = 0, 0
    for k in range(eng.running):
        slot = running(w.room, eng, k)
        one = w.requests[slot.row]
        if one.scheduled_s == eng.t:
            fresh[new] = slot.row
            new += 1
        total = given[slot.row]
        if slot.decoding == 1:
            if eng.decodes == 0 or slot.end == NEVER:
                continue
            total = one.output
            if slot.end > eng.counter + 1:
                total = min(one.output, one.made + 1 + ((slot.grow * (eng.counter + 1 - slot.start)) >> SHIFT))
        elif slot.take > 0 and slot.done + slot.take >= slot.prompt:
            total = one.made + 1
        if total > given[slot.row]:
            rows[count] = slot.row
            tokens[count] = total - given[slot.row]
            given[slot.row] = total
            count += 1
    return count, new


@entry
def end_step(w: World) -> None:
    commit(w, w.clock[0], w.engines[0])


@entry
def drop(w: World, row: int) -> int:
    """Its client has gone. 1: nothing of it is left; 0: it is loading, or part of a static batch, and leaves later."""
    eng = w.engines[0]
    for k in range(eng.running):
        if running(w.room, eng, k).row == row:
            if eng.policy == STATIC:
                return 0
            take_out(w, k)
            return 1
    one = w.requests[row]
    level = w.levels[0, one.level]
    before, at = NOBODY, level.head if eng.waiting > 0 else NOBODY
    while at != NOBODY and at != row:  # noqa: PLR1714 - to be compiled
        before, at = at, w.requests[at].follow
    if at == NOBODY:
        return 0
    if before == NOBODY:
        level.head = one.follow
    else:
        w.requests[before].follow = one.follow
    if level.tail == row:
        level.tail = before
    eng.waiting -= 1
    if one.loaded > 0:
        eng.promised -= wanted(eng, one) - one.loaded
        give_back(w.cache, w.requests, eng, row, one.loaded, False)
        one.loaded = 0
    if one.run != NOBODY:
        w.cache.nodes[0, one.run].owner = NOBODY
        one.run = NOBODY
    ended(w, row, eng.t)
    return 1


@jit
def take_out(w: World, k: int) -> None:
    """The k-th running sequence leaves before its end."""
    eng, order = w.engines[0], w.room.order
    place = order[0, k]
    slot = w.room.slots[0, place]
    stop(w, eng, slot, False)
    for j in range(k, eng.running - 1):
        order[0, j] = order[0, j + 1]
    eng.running -= 1
    order[0, eng.running] = place
    eng.full = 0
    earliest_end(w, eng)
    ended(w, slot.row, eng.t)
