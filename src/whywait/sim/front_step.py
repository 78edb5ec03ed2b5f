"""One engine of the kernel, step by step, with requests that come and go."""

from __future__ import annotations

from typing import Any

from whywait.sim.cache import give_back
from whywait.sim.jit import entry, jit
from whywait.sim.kernel import arrive, commit, receive, start
from whywait.sim.kernel_access import engine, event_at, level_at, node_at, order, request, running, seat
from whywait.sim.kernel_slots import earliest_end, ended, stop, wanted
from whywait.sim.kernel_state import BUSY, KINDS, NEVER, NOBODY, READY, SHIFT, Engine, Request, World
from whywait.sim.state import I8, STATIC

LEAVES, LEFT = 1, 2
NOWHERE = -2


@entry
def come(worlds: Any, row: int, at: float) -> int:
    """``row`` has come ``at``; 0: it can never fit, and is gone."""
    w = worlds[0]
    receive(w, row, at)
    return 1 - request(w, row).refused


@entry
def begin_step(worlds: Any, at: float, gone: I8) -> int:
    """Plans the step that begins ``at``; whether there is one. Loads from a tier that are there by then come first;
    ``gone`` (n,) marks rows that were dropped while they were loading."""
    w = worlds[0]
    eng = engine(w, 0)
    while w.events > 0 and event_at(w, 0).at <= at:
        row = event_at(w, 0).code // KINDS
        arrive(w, event_at(w, 0).at)
        if gone[row] == LEAVES:
            gone[row] = LEFT
            leave_queue(w, eng, row)
    eng.t = at
    eng.mode = READY
    start(w, eng)
    return 1 if eng.mode == BUSY else 0


@entry
def tell(worlds: Any, given: I8, rows: I8, tokens: I8, fresh: I8) -> tuple[int, int]:
    """Of the step in flight: ``rows`` that get ``tokens`` at its end, and rows that it schedules for the first time
    (``fresh``); how many of each. ``given`` (n,) are tokens that a row has had so far; kept here."""
    w = worlds[0]
    eng = engine(w, 0)
    count, new = 0, 0
    for k in range(eng.running):
        slot = running(w, eng, k)
        one = request(w, slot.row)
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
def end_step(worlds: Any) -> None:
    w = worlds[0]
    commit(w, engine(w, 0))


@entry
def drop(worlds: Any, row: int) -> int:
    """Its client has gone. 1: nothing of it is left; 0: it is loading, or part of a static batch, and leaves later."""
    w = worlds[0]
    eng = engine(w, 0)
    for k in range(eng.running):
        if running(w, eng, k).row == row:
            if eng.policy == STATIC:
                return 0
            take_out(w, eng, k)
            return 1
    if leave_inbox(w, eng, row) or leave_queue(w, eng, row):
        return 1
    return 0


@jit
def take_out(w: World, eng: Engine, k: int) -> None:
    """The k-th running sequence leaves before its end."""
    place = order(w, eng.id, k).n
    slot = seat(w, eng.id, place)
    stop(w, eng, slot, False)
    for j in range(k, eng.running - 1):
        order(w, eng.id, j).n = order(w, eng.id, j + 1).n
    eng.running -= 1
    order(w, eng.id, eng.running).n = place
    eng.full = 0
    earliest_end(w, eng)
    ended(w, slot.row, eng.t)


@jit
def before_in(w: World, head: int, row: int) -> int:
    """Whom ``row`` follows in the queue that begins with ``head``: NOBODY where it is the first, NOWHERE where it is
    not in it."""
    before = NOBODY
    while head != NOBODY:
        if head == row:
            return before
        before, head = head, request(w, head).follow
    return NOWHERE


@jit
def leave_inbox(w: World, eng: Engine, row: int) -> bool:
    """Takes out of what the engine has not seen yet; whether it was there."""
    before = before_in(w, eng.inbox_head, row) if eng.inbox > 0 else NOWHERE
    if before == NOWHERE:
        return False
    if before == NOBODY:
        eng.inbox_head = request(w, row).follow
    else:
        request(w, before).follow = request(w, row).follow
    if eng.inbox_tail == row:
        eng.inbox_tail = before
    eng.inbox -= 1
    ended(w, row, eng.t)
    return True


@jit
def leave_queue(w: World, eng: Engine, row: int) -> bool:
    """Takes out of those that wait; whether it was there."""
    one = request(w, row)
    level = level_at(w, eng.id, one.level if one.loaded == 0 else w.levels - 2)
    before = before_in(w, level.head, row) if eng.waiting > 0 else NOWHERE
    if before == NOWHERE:
        return False
    if before == NOBODY:
        level.head = one.follow
    else:
        request(w, before).follow = one.follow
    if level.tail == row:
        level.tail = before
    eng.waiting -= 1
    let_go(w, eng, row, one)
    ended(w, row, eng.t)
    return True


@jit
def let_go(w: World, eng: Engine, row: int, one: Request) -> None:
    """Of the blocks that it was loaded into, and those it might have taken back after a preemption."""
    if one.loaded > 0:
        eng.promised -= wanted(eng, one) - one.loaded
        give_back(w, eng, row, one.loaded, False)
        one.loaded = 0
    if one.run != NOBODY:
        node_at(w, eng.id, one.run).owner = NOBODY
        one.run = NOBODY
