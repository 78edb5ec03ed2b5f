"""The service of numbers: engines step, requests arrive, one event after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from whywait.physics.step import StepCost
from whywait.sim.cache import give_back, register
from whywait.sim.handover import enter_handed, grant, handed, park, wake
from whywait.sim.inbox import lay_by, note_steps, take_in
from whywait.sim.jit import entry, jit
from whywait.sim.kernel_access import due_at, engine, event_at, level_at, order, request, running, seat
from whywait.sim.kernel_blocks import blocks_of, grow
from whywait.sim.kernel_build import put, result, steps, world
from whywait.sim.kernel_queue import pop_event, push_back, push_last
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
    Engine,
    Request,
    Slot,
    World,
)
from whywait.sim.kernel_step import begin, look_back
from whywait.sim.policies import plan
from whywait.sim.routing import route
from whywait.sim.state import KEEP_FULL, SGLANG, STATIC, Load, Pool, Result, Settings


@entry
def loop(worlds: Any) -> int:
    """Runs until nothing is left to happen or the limit is reached (0), or the record of steps is full (1); 2: blocks
    were taken that are not free."""
    w = worlds[0]
    while True:
        if w.fault == 1:
            return 2
        e, at = earliest(w)
        due = next_arrival(w)
        if min(at, due) > w.limit_s or (e < 0 and due == math.inf):
            return 0
        if due <= at:
            w.now = due
            arrive(w, due)
            continue
        eng = engine(w, e)
        w.now = at
        if eng.mode == READY:
            start(w, eng)
            continue
        if w.drain == 1 and w.rows + w.engines >= w.size:
            return 1
        commit(w, eng)


@jit
def earliest(w: World) -> tuple[int, float]:
    """The engine whose steps end, or that may plan, first; −1: all are idle."""
    best, at = -1, math.inf
    ready = False
    for e in range(w.engines):
        eng = engine(w, e)
        if eng.mode == BUSY and (eng.end < at or (eng.end == at and ready)):
            best, at, ready = e, eng.end, False
        elif eng.mode == READY and eng.t < at:
            best, at, ready = e, eng.t, True
    return best, at


@jit
def next_arrival(w: World) -> float:
    due = math.inf
    if w.events > 0:
        due = event_at(w, 0).at
    if w.closed == 0 and w.next < w.arrivals:
        due = min(due, due_at(w, w.next).at)
    return due


@jit
def arrive(w: World, at: float) -> None:
    """The next arrival or other event, which is due ``at``."""
    if w.closed == 0 and w.next < w.arrivals and due_at(w, w.next).at <= at:
        row = due_at(w, w.next).code
        w.next += 1
        receive(w, row, at)
        return
    code = pop_event(w)
    row = code // KINDS
    if code % KINDS == ARRIVES:
        receive(w, row, at)
    elif code % KINDS == LOADED:
        one = request(w, row)
        eng = engine(w, one.replica if one.decoder == NOBODY else one.decoder)
        push_last(w, level_at(w, eng.id, w.levels - 2), row)
        eng.waiting += 1
        eng.loading -= 1
        eng.full = 0
        wake(eng, at, True)
    else:
        handed(w, row, at)
        wake(engine(w, request(w, row).decoder), at, True)
        wake(engine(w, request(w, row).replica), at, True)


@jit
def receive(w: World, row: int, at: float) -> None:
    one = request(w, row)
    one.queued_s = at
    eng = engine(w, route(w, row, at))
    if never_fits(eng, one) or (w.first < w.engines and never_fits(engine(w, w.first), one)):
        one.refused = 1
        ended(w, row, at)
        return
    one.replica = eng.id
    if eng.ahead == 1 or eng.receive_every > 1:
        lay_by(w, eng, row)
    else:
        push_back(w, eng, row)
    wake(eng, at, False)


@jit
def never_fits(eng: Engine, one: Request) -> bool:
    whole = one.prompt + one.output
    if eng.max_context > 0 and whole > eng.max_context:
        return True
    if eng.chunked == 0 and eng.policy not in (SGLANG, STATIC):
        uncut = one.prompt if eng.reserve == KEEP_FULL else whole  # as a preempted one comes again
        if uncut > eng.token_budget:
            return True
    return blocks_of(eng, whole + eng.drafts) > eng.blocks


@jit
def start(w: World, eng: Engine) -> None:
    """Plans the next step and sets it going, if there is anything to do."""
    eng.seqs, eng.tokens, eng.pairs, eng.window_pairs = 0, 0, 0, 0
    if eng.inbox > 0:
        take_in(w, eng)
    if eng.running + eng.waiting == 0:
        eng.mode = IDLE
        eng.ratio, eng.ratio_at = eng.ratio_start, eng.counter
        return
    if eng.role == DECODE:
        enter_handed(w, eng)
    room = eng.free - eng.promised
    plan(w, eng)
    if eng.inbox > 0:
        eng.again = 1
    if eng.prefilling > 0:
        count_prompts(w, eng)
    if eng.seqs == 0 and eng.decodes == 0:
        eng.mode = IDLE
    else:
        begin(w, eng)
    if w.parked > 0 and eng.free - eng.promised > room:
        grant(w, eng.t)


@jit
def count_prompts(w: World, eng: Engine) -> None:
    """Sums what the plan takes of prompts."""
    for k in range(eng.running):
        slot = running(w, eng, k)
        if slot.decoding == 0 and slot.take > 0:
            eng.seqs += 1
            eng.tokens += slot.take
            eng.pairs += look_back(slot.done, slot.take, 0)
            if eng.window > 0:
                eng.window_pairs += look_back(slot.done, slot.take, eng.window)


@jit
def commit(w: World, eng: Engine) -> None:
    """The steps in flight have ended: tokens are out, prompts have moved on, some sequences leave."""
    record(w, eng)
    if eng.ahead == 1 or eng.receive_every > 1:
        note_steps(eng)
    eng.t = eng.end
    if eng.decodes == 1:
        eng.made += eng.decoding * eng.n
        grow(w, eng, eng.n)
    if eng.seqs > 0 or eng.counter >= eng.next_end:
        advance(w, eng)
    eng.mode = READY
    if w.parked > 0:
        grant(w, eng.t)


@jit
def advance(w: World, eng: Engine) -> None:
    """Moves prompts on by what was taken of them; takes out what has its last token."""
    e, keep, count = eng.id, 0, eng.running
    gone, last = 0, NOBODY  # those that leave, chained by their places
    for k in range(count):
        place = order(w, e, k).n
        slot = seat(w, e, place)
        leaves = slot.decoding == 1 and slot.end <= eng.counter
        if slot.decoding == 0 and slot.take > 0:
            leaves = prefilled(w, eng, slot)
        if leaves:
            leaves = leave(w, eng, slot)
        if leaves:
            gone += 1
            slot.own, last = last, place
        else:
            order(w, e, keep).n = place
            keep += 1
    eng.running = keep
    for k in range(gone):
        order(w, e, keep + k).n = last
        last = seat(w, e, last).own
    if gone > 0:
        eng.full = 0
    if gone > 0 or eng.policy == STATIC:
        earliest_end(w, eng)
    if eng.policy == STATIC and eng.gone == eng.running:
        clear_batch(w, eng)


@jit
def leave(w: World, eng: Engine, slot: Slot) -> bool:
    """A sequence has given all it gives here; whether it makes room (in a static batch it stays to the end of the
    batch)."""
    one = request(w, slot.row)
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
            give_back(w, eng, slot.row, slot.held, False)
        finish(w, eng, slot.row)
    stop(w, eng, slot, False)
    return True


@jit
def clear_batch(w: World, eng: Engine) -> None:
    """The longest answer of a static batch is out."""
    for k in range(eng.running):
        stop(w, eng, running(w, eng, k), False)
    eng.running, eng.gone, eng.next_end = 0, 0, NEVER


@jit
def prefilled(w: World, eng: Engine, slot: Slot) -> bool:
    """A chunk of its prompt is computed; True where nothing is left to do for it here."""
    slot.done += slot.take
    slot.take = 0
    one = request(w, slot.row)
    if eng.policy == SGLANG:
        register(w, eng, one, slot, slot.done)
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
    """Serves ``load`` by ``pools`` (one, or prefill and decode), whose steps cost ``costs``.

    Raises:
        AssertionError: a defect of the kernel: it took KV blocks that are not free.
    """
    w = world(load, pools, costs, settings)
    full = []
    while (state := loop(w.world)) == 1:
        full.append(steps(w))
        put(w.world, 0, {"rows": 0})
    if state == 2:
        raise AssertionError("the simulator's kernel took KV blocks that are not free")
    full.append(steps(w))
    return result(w, full)
