"""KV that comes over a link: from a tier below the device, or from a prefill engine."""

from __future__ import annotations

from whywait.sim.cache import give_back, hold, rise, take
from whywait.sim.jit import jit
from whywait.sim.kernel_access import engine, level_at, link_at, node_at, request, running, tier_at
from whywait.sim.kernel_blocks import blocks_of, growth
from whywait.sim.kernel_queue import first_waiting, push_event, push_last
from whywait.sim.kernel_slots import start_decoding, wanted
from whywait.sim.kernel_state import (
    BUSY,
    HANDED,
    IDLE,
    KINDS,
    LOADED,
    NOBODY,
    READY,
    Engine,
    Request,
    Slot,
    World,
)
from whywait.sim.kernel_step import cut
from whywait.sim.state import KEEP_FULL


@jit
def load_below(w: World, eng: Engine, row: int, found: int, below: int) -> None:
    """``row`` waits, holding its blocks, until those in the tiers have come up. A link carries one load after the
    other."""
    one = request(w, row)
    hold(w, eng, row, found)
    there = eng.t
    for level in range(1, eng.tiers + 1):
        tier = tier_at(w, eng.id, level - 1)
        count = 0
        for j in range(found, found + below):
            if node_at(w, eng.id, link_at(w, one.chain_at + j).id).tier == level:
                count += 1
        if count > 0:
            tier.idle_s = max(tier.idle_s, eng.t) + tier.latency_s + count * tier.block_s
            there = max(there, tier.idle_s)
    for j in range(found, found + below):
        node = link_at(w, one.chain_at + j).id
        rise(w, eng, node)
        node_at(w, eng.id, node).use = 1
        node_at(w, eng.id, node).hits += 1
        link_at(w, one.chain_at + j).mine = 1
    take(w, eng, below)
    one.loaded = found + below
    eng.loading += 1
    eng.promised += wanted(eng, one) - one.loaded
    push_event(w, there, row * KINDS + LOADED)


@jit
def park(w: World, eng: Engine, slot: Slot) -> None:
    """Its prompt is computed here and the first token is out; its KV stays until a decode engine has it."""
    one = request(w, slot.row)
    one.parked = slot.held
    one.parked_s = eng.t
    push_last(w, level_at(w, eng.id, w.levels - 1), slot.row)
    w.parked += 1


@jit
def grant(w: World, at: float) -> None:
    """Reserves room at decode engines for parked requests, longest parked first; hand-overs begin."""
    queue_of = w.levels - 1
    while w.parked > 0:
        first = NOBODY
        for e in range(w.first):
            row = level_at(w, e, queue_of).head
            if row != NOBODY and (first == NOBODY or request(w, row).parked_s < request(w, first).parked_s):
                first = row
        one = request(w, first)
        d = reserve(w, one, at)
        if d == NOBODY:
            return
        source = engine(w, one.replica)
        level_at(w, source.id, queue_of).head = one.follow
        w.parked -= 1
        one.decoder = d
        source.link_s = max(source.link_s, at) + w.latency_s + w.token_s * one.prompt
        push_event(w, source.link_s, first * KINDS + HANDED)


@jit
def reserve(w: World, one: Request, at: float) -> int:
    """The decode engine with the fewest requests that has a place, the blocks, and is below the cap; NOBODY: none. One
    where preempted requests wait for their blocks takes no more: they came before (vLLM's queue is in order, SGLang
    resumes what it retracted before it allocates)."""
    best, fewest = NOBODY, 0
    for d in range(w.first, w.engines):
        eng = engine(w, d)
        load = eng.running + eng.waiting + eng.loading + eng.in_flight
        if (best != NOBODY and load >= fewest) or (w.cap > 0 and eng.in_flight >= w.cap) or load >= eng.max_seqs:
            continue
        if first_waiting(w, eng) != NOBODY:
            continue
        if eng.mode == BUSY and eng.n > 1:
            cut(eng, at)
        steps = eng.n if eng.mode == BUSY and eng.decodes == 1 else 0
        if arriving(eng, one) <= eng.free - eng.promised - growth(w, eng, steps):
            best, fewest = d, load
    if best != NOBODY:
        eng = engine(w, best)
        eng.in_flight += 1
        one.loaded = arriving(eng, one)
        take(w, eng, one.loaded)
    return best


@jit
def arriving(eng: Engine, one: Request) -> int:
    """Blocks to reserve at a decode engine: those of the prompt and of the next token."""
    return max(wanted(eng, one), blocks_of(eng, one.prompt + 1 + eng.drafts))


@jit
def handed(w: World, row: int, at: float) -> None:
    """The KV has come: the prefill engine is rid of it, the decode engine may go on."""
    one = request(w, row)
    source, eng = engine(w, one.replica), engine(w, one.decoder)
    one.handover_s = at - one.parked_s
    give_back(w, source, row, one.parked, False)
    one.parked = 0
    eng.in_flight -= 1
    push_last(w, level_at(w, eng.id, w.levels - 1), row)
    eng.waiting += 1
    grant(w, at)


@jit
def enter_handed(w: World, eng: Engine) -> None:
    """Requests whose KV has come start to decode, in order, while there are places."""
    queue = level_at(w, eng.id, w.levels - 1)
    while queue.head != NOBODY and eng.running < eng.max_seqs:
        row = queue.head
        one = request(w, row)
        queue.head = one.follow
        eng.waiting -= 1
        slot = running(w, eng, eng.running)
        eng.running += 1
        eng.prefilling += 1
        slot.row, slot.busy = row, 1
        slot.prompt, slot.done, slot.take = one.prompt, one.prompt, 0
        slot.held, slot.own = one.loaded, one.chain_n
        one.loaded = 0
        if eng.drafts == 0 and eng.reserve != KEEP_FULL:  # the block of the next token is taken with its step
            spare = slot.held - blocks_of(eng, one.prompt)
            slot.held -= spare
            eng.free += spare
            eng.blank += spare if eng.prefix_cache == 1 else 0
        start_decoding(w, eng, slot)


@jit
def wake(eng: Engine, at: float, sure: bool) -> None:
    """Something came for this engine: it plans now, or after the step in flight, unless that would not help."""
    if eng.mode == IDLE:
        eng.t = at
        eng.mode = READY
    elif eng.mode == BUSY and eng.n > 1 and (sure or eng.blocked == 0 or eng.priority == 1):
        cut(eng, at)
