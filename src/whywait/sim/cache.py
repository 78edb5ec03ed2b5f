"""KV blocks of an engine: taken, given back, shared by content, kept while idle, moved down a tier.

Shared blocks are known by id and counted; private ones only by number. Freed blocks stay idle, last block first, until
their room is needed, so that private ones push shared ones out as they do in the engines.
"""

from __future__ import annotations

from whywait.sim.cache_list import append, drop, rest, unlink, wake_block
from whywait.sim.jit import jit
from whywait.sim.kernel_access import link_at, node_at, request, tier_at
from whywait.sim.kernel_state import NOBODY, Engine, Request, Slot, World
from whywait.sim.state import FIFO, LRU


@jit
def take(w: World, eng: Engine, blocks: int) -> None:
    """``blocks`` free blocks for new content; what they kept is gone, or goes down a tier. Who calls has seen
    that so many are free; where they are not nothing is written, and the run ends as a fault of the kernel."""
    if blocks > eng.free:
        w.fault = 1
        return
    eng.free -= blocks
    if eng.prefix_cache == 0:
        return
    blank = min(eng.blank, blocks)
    eng.blank -= blank
    blocks -= blank
    while blocks > 0:
        if (eng.oldest == NOBODY) if eng.evict == LRU else (eng.idle == 0):
            w.fault = 1
            return
        if eng.evict != LRU:
            evict(w, eng, drop(w, eng, 0))
            blocks -= 1
            continue
        node = eng.oldest
        if node < eng.shared:
            unlink(w, eng, eng.id, node)
            evict(w, eng, node)
            blocks -= 1
        else:
            run = node_at(w, eng.id, node)
            part = min(run.size, blocks)
            run.size -= part
            blocks -= part
            if run.size == 0:
                retire_run(w, eng, node)


@jit
def evict(w: World, eng: Engine, node: int) -> None:
    """An idle shared block loses its place on the device."""
    node_at(w, eng.id, node).use = -1
    if eng.tiers > 0:
        sink(w, eng, node, 1)


@jit
def sink(w: World, eng: Engine, node: int, level: int) -> None:
    """Into tier ``level``; what that pushes out goes one further, and past the last is gone."""
    e = eng.id
    while level <= eng.tiers:
        tier = tier_at(w, e, level - 1)
        if tier.blocks > 0:
            append(w, tier, e, node)
            node_at(w, e, node).tier = level
            tier.count += 1
            if tier.count <= tier.blocks:
                return
            node = tier.oldest
            rise(w, eng, node)
        level += 1


@jit
def rise(w: World, eng: Engine, node: int) -> None:
    """Out of its tier."""
    one = node_at(w, eng.id, node)
    tier = tier_at(w, eng.id, one.tier - 1)
    unlink(w, tier, eng.id, node)
    tier.count -= 1
    one.tier = 0


@jit
def retire_run(w: World, eng: Engine, node: int) -> None:
    """An idle run is used up or taken back."""
    run = node_at(w, eng.id, node)
    unlink(w, eng, eng.id, node)
    if run.owner != NOBODY:
        request(w, run.owner).run = NOBODY
        run.owner = NOBODY
    run.behind = eng.runs
    eng.runs = node


@jit
def idle_run(w: World, eng: Engine, blocks: int, owner: int) -> None:
    """Freed private blocks stay idle as a run; ``owner``, a preempted row, may take them back."""
    if blocks == 0:
        return
    if eng.evict != LRU:
        eng.blank += blocks
        return
    e = eng.id
    last = eng.newest
    if owner == NOBODY and last >= eng.shared and node_at(w, e, last).owner == NOBODY:
        node_at(w, e, last).size += blocks
        return
    node = eng.runs
    if node == NOBODY:  # more runs than were foreseen: their content is forgotten
        eng.blank += blocks
        return
    eng.runs = node_at(w, e, node).behind
    append(w, eng, e, node)
    node_at(w, e, node).size = blocks
    node_at(w, e, node).owner = owner
    if owner != NOBODY:
        request(w, owner).run = node


@jit
def give_back(w: World, eng: Engine, row: int, blocks: int, resumes: bool) -> None:
    """All ``blocks`` of a sequence, the last first; where it resumes it may find them again."""
    if eng.prefix_cache == 0:
        eng.free += blocks
        return
    one = request(w, row)
    known = min(one.chain_n, blocks)
    private = blocks - known
    owner = row if resumes else NOBODY
    for j in range(known - 1, -1, -1):
        at = one.chain_at + j
        if link_at(w, at).mine == 0:
            private += 1
            owner = NOBODY
            continue
        eng.free += private
        idle_run(w, eng, private, owner)
        private, owner = 0, NOBODY
        link_at(w, at).mine = 0
        shared = node_at(w, eng.id, link_at(w, at).id)
        shared.use -= 1
        if shared.use == 0:
            eng.free += 1
            rest(w, eng, link_at(w, at).id)
    eng.free += private
    idle_run(w, eng, private, owner)


@jit
def register(w: World, eng: Engine, one: Request, slot: Slot, tokens: int) -> None:
    """The first ``tokens`` of a sequence are (or will be with this step) computed: its whole blocks may be shared."""
    if eng.prefix_cache == 0:
        return
    for j in range(slot.own, min(one.chain_n, tokens // eng.block)):
        at = one.chain_at + j
        shared = node_at(w, eng.id, link_at(w, at).id)
        if shared.use < 0:
            if shared.tier > 0:
                rise(w, eng, link_at(w, at).id)
            shared.use = 1
            link_at(w, at).mine = 1
            if eng.evict == FIFO:
                eng.stamp += 1
                shared.key = eng.stamp
        slot.own = j + 1


@jit
def cached_blocks(w: World, eng: Engine, one: Request, tokens: int) -> tuple[int, int, int]:
    """Leading blocks of a prompt of ``tokens`` that need not be computed: on the device, of these idle ones, and
    after them in the tiers. The last token is always computed, and so all of its block."""
    if eng.prefix_cache == 0:
        return 0, 0, 0
    e = eng.id
    most = (tokens - 1) // eng.block
    found, idle, below = 0, 0, 0
    limit = min(most, one.chain_n)
    while found < limit and node_at(w, e, link_at(w, one.chain_at + found).id).use >= 0:
        idle += 1 if node_at(w, e, link_at(w, one.chain_at + found).id).use == 0 else 0
        found += 1
    if eng.tiers > 0:
        while found + below < limit and node_at(w, e, link_at(w, one.chain_at + found + below).id).tier > 0:
            below += 1
    if found == one.chain_n and one.run != NOBODY:
        back = min(node_at(w, e, one.run).size, most - found)
        found += back
        idle += back
    return found, idle, below


@jit
def hold(w: World, eng: Engine, row: int, found: int) -> None:
    """``row`` takes hold of its first ``found`` blocks, which cached_blocks gave."""
    one = request(w, row)
    e = eng.id
    known = min(found, one.chain_n)
    for j in range(known):
        node = link_at(w, one.chain_at + j).id
        shared = node_at(w, e, node)
        if shared.use == 0:
            wake_block(w, eng, node)
            eng.free -= 1
        shared.use += 1
        shared.hits += 1
        link_at(w, one.chain_at + j).mine = 1
    if found > known:
        run = node_at(w, e, one.run)
        eng.free -= found - known
        run.size -= found - known
        if run.size == 0:
            retire_run(w, eng, one.run)
    if one.run != NOBODY:
        node_at(w, e, one.run).owner = NOBODY
        one.run = NOBODY
