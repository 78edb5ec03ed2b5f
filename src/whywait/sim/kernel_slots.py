"""The life of a sequence at an engine: admit, compute its prompt, decode, preempt, leave."""

from __future__ import annotations

import math

from whywait.sim.cache import give_back, hold, register, take
from whywait.sim.jit import jit
from whywait.sim.kernel_access import due_at, order, phase, request, running, seat
from whywait.sim.kernel_blocks import blocks_of, held_at
from whywait.sim.kernel_queue import push_back, push_event, push_front
from whywait.sim.kernel_state import (
    ARRIVES,
    KINDS,
    NEVER,
    NOBODY,
    ONE,
    PREFILL,
    SHIFT,
    Engine,
    Request,
    Slot,
    World,
)
from whywait.sim.speculate import iterations
from whywait.sim.state import KEEP_FULL, SGLANG


@jit
def answer(eng: Engine, one: Request) -> int:
    """Tokens of its answer that come at this engine, with those before a preemption: of a split pair the prefill
    engine gives the first only (the router asks it for one token)."""
    return 1 if eng.role == PREFILL else one.output


@jit
def whole(eng: Engine, one: Request) -> int:
    """Blocks of a request with all of its answer."""
    return blocks_of(eng, one.prompt + answer(eng, one) + eng.drafts)


@jit
def wanted(eng: Engine, one: Request) -> int:
    """Blocks that admission wants to have for it."""
    if eng.reserve == KEEP_FULL:
        return whole(eng, one)
    return blocks_of(eng, one.prompt + one.made)


@jit
def admit(w: World, eng: Engine, row: int, found: int, tokens: int) -> None:
    """``row`` runs from now on; its first ``found`` blocks are in the cache, and ``tokens`` more of its prompt are
    computed in this step."""
    slot = running(w, eng, eng.running)
    eng.running += 1
    eng.prefilling += 1
    one = request(w, row)
    slot.row = row
    slot.busy = 1
    slot.prompt = one.prompt + one.made
    slot.done = found * eng.block
    slot.take = 0
    slot.decoding = 0
    slot.held = found if eng.slot_cache == 0 else 0
    slot.own = found
    if one.loaded > 0:
        eng.promised -= wanted(eng, one) - one.loaded
        one.loaded = 0
    elif eng.prefix_cache == 1:
        hold(w, eng, row, found)
    if eng.reserve == KEEP_FULL:
        take(w, eng, whole(eng, one) - slot.held)
        slot.held = whole(eng, one)
    if math.isnan(one.scheduled_s):
        one.scheduled_s = eng.t
        one.cached = slot.done
    else:
        one.recomputed -= slot.done
    chunk(w, eng, slot, tokens)


@jit
def chunk(w: World, eng: Engine, slot: Slot, tokens: int) -> None:
    """``tokens`` more of its prompt are computed in this step."""
    slot.take = tokens
    need = blocks_of(eng, slot.done + tokens) - slot.held
    if need > 0:
        take(w, eng, need)
        slot.held += need
    if eng.policy != SGLANG:
        register(w, eng, request(w, slot.row), slot, slot.done + tokens)


@jit
def start_decoding(w: World, eng: Engine, slot: Slot) -> None:
    """Its prompt is computed and a token is out; the others come one decode step each, or faster with drafts."""
    one = request(w, slot.row)
    left = one.output - one.made - 1
    steps = iterations(w, eng, w.seed, slot.row, left)
    slot.decoding = 1
    slot.start = eng.counter
    slot.end = eng.counter + steps
    slot.grow = ONE if steps == left else left * ONE // steps
    slot.base = (slot.prompt << SHIFT) - slot.grow * eng.counter
    eng.prefilling -= 1
    eng.decoding += 1
    eng.ctx_base += slot.base
    eng.ctx_grow += slot.grow
    eng.next_end = min(eng.next_end, slot.end)
    if eng.drafts == 0:
        phase(w, eng.id, ((slot.base >> SHIFT) - 1) % eng.block).n += 1


@jit
def emitted(eng: Engine, slot: Slot) -> int:
    """Tokens that a decoder has given in this life."""
    return 1 + ((slot.grow * (eng.counter - slot.start)) >> SHIFT)


@jit
def stop(w: World, eng: Engine, slot: Slot, resumes: bool) -> None:
    """Takes a sequence's weight out of the sums and frees its blocks; the caller takes it out of the order."""
    if slot.decoding == 1:
        eng.decoding -= 1
        eng.ctx_base -= slot.base
        eng.ctx_grow -= slot.grow
        if eng.drafts == 0:
            phase(w, eng.id, ((slot.base >> SHIFT) - 1) % eng.block).n -= 1
            if eng.reserve != KEEP_FULL:
                slot.held = held_at(eng, slot, eng.counter)
        else:
            steps = eng.counter - slot.start
            eng.drafted += steps * eng.drafts
            eng.accepted += max(0, emitted(eng, slot) - 1 - steps)
        register(w, eng, request(w, slot.row), slot, (slot.base + slot.grow * eng.counter) >> SHIFT)
    else:
        eng.prefilling -= 1
    if resumes or eng.role != PREFILL:
        give_back(w, eng, slot.row, slot.held, resumes)
    slot.decoding = 0
    eng.stamp += 1
    slot.left = eng.stamp
    slot.busy = 0


@jit
def earliest_end(w: World, eng: Engine) -> None:
    best = NEVER
    for k in range(eng.running):
        slot = running(w, eng, k)
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
        if request(w, running(w, eng, k).row).level > request(w, running(w, eng, worst).row).level:
            worst = k
    return worst


@jit
def preempt(w: World, eng: Engine, k: int) -> None:
    """The k-th running sequence loses its KV and waits again: first in its queue, with SGLang last."""
    place = order(w, eng.id, k).n
    slot = seat(w, eng.id, place)
    one = request(w, slot.row)
    if slot.decoding == 1:
        one.made += emitted(eng, slot)
        one.recomputed += one.prompt + one.made
    else:
        one.recomputed += slot.done
    ends = slot.decoding == 1 and slot.end == eng.next_end
    stop(w, eng, slot, True)
    for j in range(k, eng.running - 1):
        order(w, eng.id, j).n = order(w, eng.id, j + 1).n
    eng.running -= 1
    order(w, eng.id, eng.running).n = place
    if ends:
        earliest_end(w, eng)
    one.preempted += 1
    eng.preemptions += 1
    if eng.policy == SGLANG:
        push_back(w, eng, slot.row)
    else:
        push_front(w, eng, slot.row)


@jit
def finish(w: World, eng: Engine, row: int) -> None:
    """The last token of ``row`` is out; whoever waited for that may come."""
    request(w, row).last_s = eng.t + eng.reply_s
    ended(w, row, eng.t + eng.reply_s)


@jit
def ended(w: World, row: int, at: float) -> None:
    w.left -= 1
    then = request(w, row).child
    if then != NOBODY:
        while then != NOBODY:
            release(w, then, at + request(w, then).think_s)
            then = request(w, then).sibling
    elif w.closed == 1 and w.next < w.arrivals:
        then = due_at(w, w.next).code
        w.next += 1
        release(w, then, at)


@jit
def release(w: World, row: int, at: float) -> None:
    one = request(w, row)
    one.sent_s = at
    push_event(w, at + w.frontend_s + w.frontend_token_s * one.prompt, row * KINDS + ARRIVES)
