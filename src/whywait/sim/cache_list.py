"""Idle KV blocks: which go first when room is needed. By age they are a list, by another key a heap."""

from __future__ import annotations

from typing import Any

from whywait.sim.jit import jit
from whywait.sim.kernel_access import heap_at, node_at
from whywait.sim.kernel_state import NOBODY, Engine, World
from whywait.sim.state import LFU, LRU


@jit
def append(w: World, ends: Any, e: int, node: int) -> None:
    """As the newest of a list whose ends ``ends`` (an engine or a tier) keeps."""
    one = node_at(w, e, node)
    one.before, one.behind = ends.newest, NOBODY
    if ends.newest == NOBODY:
        ends.oldest = node
    else:
        node_at(w, e, ends.newest).behind = node
    ends.newest = node


@jit
def unlink(w: World, ends: Any, e: int, node: int) -> None:
    one = node_at(w, e, node)
    if one.before == NOBODY:
        ends.oldest = one.behind
    else:
        node_at(w, e, one.before).behind = one.behind
    if one.behind == NOBODY:
        ends.newest = one.before
    else:
        node_at(w, e, one.behind).before = one.before


@jit
def rest(w: World, eng: Engine, node: int) -> None:
    """A shared block that nobody holds any more: it may be evicted."""
    eng.stamp += 1
    if eng.evict == LRU:
        append(w, eng, eng.id, node)
        return
    one = node_at(w, eng.id, node)
    if eng.evict == LFU:
        one.key = (one.hits << 40) + eng.stamp
    lift(w, eng, node, eng.idle)
    eng.idle += 1


@jit
def wake_block(w: World, eng: Engine, node: int) -> None:
    """An idle shared block is held again."""
    if eng.evict == LRU:
        unlink(w, eng, eng.id, node)
    else:
        drop(w, eng, node_at(w, eng.id, node).place)


@jit
def lift(w: World, eng: Engine, node: int, place: int) -> None:
    """Puts ``node`` into the heap at ``place`` or above."""
    e = eng.id
    key = node_at(w, e, node).key
    while place > 0:
        up = (place - 1) // 2
        if node_at(w, e, heap_at(w, e, up).n).key <= key:
            break
        heap_at(w, e, place).n = heap_at(w, e, up).n
        node_at(w, e, heap_at(w, e, place).n).place = place
        place = up
    heap_at(w, e, place).n = node
    node_at(w, e, node).place = place


@jit
def drop(w: World, eng: Engine, place: int) -> int:
    """Takes the node at ``place`` out of the heap; that node."""
    e = eng.id
    gone = heap_at(w, e, place).n
    eng.idle -= 1
    n = eng.idle
    if place == n:
        return gone
    node = heap_at(w, e, n).n
    key = node_at(w, e, node).key
    while True:
        down = 2 * place + 1
        if down >= n:
            break
        if down + 1 < n and node_at(w, e, heap_at(w, e, down + 1).n).key < node_at(w, e, heap_at(w, e, down).n).key:
            down += 1
        if node_at(w, e, heap_at(w, e, down).n).key >= key:
            break
        heap_at(w, e, place).n = heap_at(w, e, down).n
        node_at(w, e, heap_at(w, e, place).n).place = place
        place = down
    lift(w, eng, node, place)
    return gone
