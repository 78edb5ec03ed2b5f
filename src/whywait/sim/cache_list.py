"""Idle KV blocks: which go first when room is needed. By age they are a list, by another key a heap."""

from __future__ import annotations

from typing import Any

from whywait.sim.jit import jit
from whywait.sim.kernel_state import NOBODY, Cache, Engine
from whywait.sim.state import LFU, LRU


@jit
def append(nodes: Any, ends: Any, e: int, node: int) -> None:
    """As the newest of a list whose ends ``ends`` (an engine or a tier) keeps."""
    one = nodes[e, node]
    one.before, one.behind = ends.newest, NOBODY
    if ends.newest == NOBODY:
        ends.oldest = node
    else:
        nodes[e, ends.newest].behind = node
    ends.newest = node


@jit
def unlink(nodes: Any, ends: Any, e: int, node: int) -> None:
    one = nodes[e, node]
    if one.before == NOBODY:
        ends.oldest = one.behind
    else:
        nodes[e, one.before].behind = one.behind
    if one.behind == NOBODY:
        ends.newest = one.before
    else:
        nodes[e, one.behind].before = one.before


@jit
def rest(cache: Cache, eng: Engine, node: int) -> None:
    """A shared block that nobody holds any more: it may be evicted."""
    eng.stamp += 1
    if eng.evict == LRU:
        append(cache.nodes, eng, eng.id, node)
        return
    one = cache.nodes[eng.id, node]
    if eng.evict == LFU:
        one.key = (one.hits << 40) + eng.stamp
    lift(cache, eng, node, eng.idle)
    eng.idle += 1


@jit
def wake_block(cache: Cache, eng: Engine, node: int) -> None:
    """An idle shared block is held again."""
    if eng.evict == LRU:
        unlink(cache.nodes, eng, eng.id, node)
    else:
        drop(cache, eng, cache.nodes[eng.id, node].place)


@jit
def lift(cache: Cache, eng: Engine, node: int, place: int) -> None:
    """Puts ``node`` into the heap at ``place`` or above."""
    heap, nodes, e = cache.heap, cache.nodes, eng.id
    key = nodes[e, node].key
    while place > 0:
        up = (place - 1) // 2
        if nodes[e, heap[e, up]].key <= key:
            break
        heap[e, place] = heap[e, up]
        nodes[e, heap[e, place]].place = place
        place = up
    heap[e, place] = node
    nodes[e, node].place = place


@jit
def drop(cache: Cache, eng: Engine, place: int) -> int:
    """Takes the node at ``place`` out of the heap; that node."""
    heap, nodes, e = cache.heap, cache.nodes, eng.id
    gone = heap[e, place]
    eng.idle -= 1
    n = eng.idle
    if place == n:
        return gone  # type: ignore[no-any-return]
    node = heap[e, n]
    key = nodes[e, node].key
    while True:
        down = 2 * place + 1
        if down >= n:
            break
        if down + 1 < n and nodes[e, heap[e, down + 1]].key < nodes[e, heap[e, down]].key:
            down += 1
        if nodes[e, heap[e, down]].key >= key:
            break
        heap[e, place] = heap[e, down]
        nodes[e, heap[e, place]].place = place
        place = down
    lift(cache, eng, node, place)
    return gone  # type: ignore[no-any-return]
