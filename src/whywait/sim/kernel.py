"""The service of numbers: engines step, requests arrive, one event after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from whywait.physics.step import StepCost
from whywait.sim.cache import give_back, register
from whywait.sim.handover import enter_handed, grant, handed, park, wake
from whywait.sim.jit import jit
from whywait.sim.kernel_blocks import blocks_of, grow, running
from whywait.sim.kernel_build import put, result, steps, world
from whywait.sim.kernel_queue import pop_event, push_back, push_front
from whywait.sim.kernel_record import record
from whywait.sim.kernel_slots import earliest_end, ended, finish, start_decoding, stop
from whywait.sim.kernel_state import (
    ARRIVES,
    BUSY,
    DECODE,
    IDLE,
    KINDS,
    LOADED,
    NEVER,
    NOBODY,
    PREFILL,
    READY,
    Clock,
    Engine,
    Request,
    Slot,
    World,
)
from whywait.sim.kernel_step import begin, look_back
from whywait.sim.policies import plan
from whywait.sim.routing import route
from whywait.sim.state import KEEP_FULL, SGLANG, STATIC, Load, Pool, Result, Settings


@jit
def loop(w: World) -> int:
    """Runs until nothing is left to happen or the limit is reached (0), or the record of steps is full (1)."""
    clock = w.clock[0]
    while True:
        e, at = earliest(w, clock)
        due = next_arrival(w, clock)
        if min(at, due) > clock.limit_s or (e < 0 and due == math.inf):
            return 0
        if due <= at:
            clock.now = due
            arrive(w, clock, due)
            continue
        eng = w.engines[e]
        clock.now = at
        if eng.mode == READY:
            start(w, clock, eng)
            continue
        if clock.drain == 1 and clock.rows + clock.engines >= len(w.rows):
            return 1
        commit(w, clock, eng)


@jit
def earliest(w: World, clock: Clock) -> tuple[int, float]:
    """The engine whose steps end, or that may plan, first; −1: all are idle."""
    best, at = -1, math.inf
    ready = False
    for e in range(clock.engines):
        eng = w.engines[e]
        if eng.mode == BUSY and (eng.end < at or (eng.end == at and ready)):
            best, at, ready = e, eng.end, False
        elif eng.mode == READY and eng.t < at:
            best, at, ready = e, eng.t, True
    return best, at


@jit
def next_arrival(w: World, clock: Clock) -> float:
    due = math.inf
    if clock.events > 0:
        due = w.heap[0].at
    if clock.closed == 0 and clock.next < clock.arrivals:
        due = min(due, w.due[clock.next].at)
    return due


@jit
def arrive(w: World, clock: Clock, at: float) -> None:
    """The next arrival or other event, which is due ``at``."""
    if clock.closed == 0 and clock.next < clock.arrivals and w.due[clock.next].at <= at:
        row = w.due[clock.next].code
        clock.next += 1
        receive(w, clock, row, at)
        return
    code = pop_event(w.heap, clock)
    row = code // KINDS
    if code % KINDS == ARRIVES:
        receive(w, clock, row, at)
    elif code % KINDS == LOADED:
        eng = w.engines[w.requests[row].replica]
        push_front(w.levels, w.requests, eng, row)
        wake(eng, at, True)
    else:
        handed(w, clock, row, at)
        wake(w.engines[w.requests[row].decoder], at, True)
        wake(w.engines[w.requests[row].replica], at, True)


@jit
def receive(w: World, clock: Clock, row: int, at: float) -> None:
    one = w.requests[row]
    one.queued_s = at
    eng = w.engines[route(w, clock, row, at)]
    if never_fits(eng, one) or (clock.first < clock.engines and never_fits(w.engines[clock.first], one)):
        one.refused = 1
        ended(w, row, at)
        return
    one.replica = eng.id
    push_back(w.levels, w.requests, eng, row)
    wake(eng, at, False)


@jit
def never_fits(eng: Engine, one: Request) -> bool:
    whole = one.prompt + one.output
    if eng.max_context > 0 and whole > eng.max_context:
        return True
    if eng.chunked == 0 and eng.policy != SGLANG and eng.policy != STATIC:
        uncut = one.prompt if eng.reserve == KEEP_FULL else whole  # as a preempted one comes again
        if uncut > eng.token_budget:
            return True
    return blocks_of(eng, whole + eng.drafts) > eng.blocks  # type: ignore[no-any-return]


@jit
def start(w: World, clock: Clock, eng: Engine) -> None:
    """Plans the next step and sets it going, if there is anything to do."""
    eng.seqs, eng.tokens, eng.pairs, eng.window_pairs = 0, 0, 0, 0
    if eng.running + eng.waiting == 0:
        eng.mode = IDLE
        eng.ratio, eng.ratio_at = eng.ratio_start, eng.counter
        return
    if eng.role == DECODE:
        enter_handed(w, eng)
    plan(w, eng)
    if eng.prefilling > 0:
        count_prompts(w, eng)
    if eng.seqs == 0 and eng.decodes == 0:
        eng.mode = IDLE
        return
    begin(w.room, eng, clock.macro)


@jit
def count_prompts(w: World, eng: Engine) -> None:
    """Sums what the plan takes of prompts."""
    for k in range(eng.running):
        slot = running(w.room, eng, k)
        if slot.decoding == 0 and slot.take > 0:
            eng.seqs += 1
            eng.tokens += slot.take
            eng.pairs += look_back(slot.done, slot.take, 0)
            if eng.window > 0:
                eng.window_pairs += look_back(slot.done, slot.take, eng.window)


@jit
def commit(w: World, clock: Clock, eng: Engine) -> None:
    """The steps in flight have ended: tokens are out, prompts have moved on, some sequences leave."""
    record(w.rows, clock, eng)
    eng.t = eng.end
    if eng.decodes == 1:
        eng.made += eng.decoding * eng.n
        grow(w.room, w.cache, w.requests, eng, eng.n)
    if eng.seqs > 0 or eng.counter >= eng.next_end:
        advance(w, eng)
    eng.mode = READY
    if clock.parked > 0:
        grant(w, clock, eng.t)


@jit
def advance(w: World, eng: Engine) -> None:
    """Moves prompts on by what was taken of them; takes out what has its last token, keeping the order of the others."""
    e, keep, count = eng.id, 0, eng.running
    order = w.room.order
    gone, last = 0, NOBODY  # those that leave, chained by their places
    for k in range(count):
        place = order[e, k]
        slot = w.room.slots[e, place]
        leaves = slot.decoding == 1 and slot.end <= eng.counter
        if slot.decoding == 0 and slot.take > 0:
            leaves = prefilled(w, eng, slot)
        if leaves:
            leaves = leave(w, eng, slot)
        if leaves:
            gone += 1
            slot.own, last = last, place
        else:
            order[e, keep] = place
            keep += 1
    eng.running = keep
    for k in range(gone):
        order[e, keep + k] = last
        last = w.room.slots[e, last].own
    if gone > 0:
        eng.full = 0
    if gone > 0 or eng.policy == STATIC:
        earliest_end(w, eng)
    if eng.policy == STATIC and eng.gone == eng.running:
        clear_batch(w, eng)


@jit
def leave(w: World, eng: Engine, slot: Slot) -> bool:
    """A sequence has given all it gives here; whether it makes room (in a static batch it stays to the end of the batch)."""
    one = w.requests[slot.row]
    if eng.policy == STATIC:
        if slot.end < NEVER or slot.decoding == 0:
            finish(w, eng, slot.row)
            slot.end = NEVER
            eng.gone += 1
        if slot.decoding == 1:
            return False
        eng.gone -= 1
    elif eng.role == PREFILL and one.made + 1 < one.output:
        park(w, eng, slot)
    else:
        if eng.role == PREFILL:
            give_back(w.cache, w.requests, eng, slot.row, slot.held, False)
        finish(w, eng, slot.row)
    stop(w, eng, slot, False)
    return True


@jit
def clear_batch(w: World, eng: Engine) -> None:
    """The longest answer of a static batch is out."""
    for k in range(eng.running):
        stop(w, eng, running(w.room, eng, k), False)
    eng.running, eng.gone, eng.next_end = 0, 0, NEVER


@jit
def prefilled(w: World, eng: Engine, slot: Slot) -> bool:
    """A chunk of its prompt is computed; True where nothing is left to do for it here."""
    slot.done += slot.take
    slot.take = 0
    one = w.requests[slot.row]
    if eng.policy == SGLANG:
        register(w.cache, eng, one, slot, slot.done)
    if slot.done < slot.prompt:
        return False
    eng.made += 1
    if one.made == 0:
        one.first_s = eng.t + eng.reply_s
    if one.made + 1 >= one.output or eng.role == PREFILL:
        return True
    start_decoding(w, eng, slot)
    return False


def run(load: Load, pools: Sequence[Pool], costs: Sequence[StepCost], settings: Settings) -> Result:
    """Serves ``load`` by ``pools`` (one, or prefill and decode), whose steps cost ``costs``."""
    w = world(load, pools, costs, settings)
    full = []
    while loop(w) == 1:
        full.append(steps(w, settings))
        put(w.clock, 0, {"rows": 0})
    full.append(steps(w, settings))
    return result(w, full)
