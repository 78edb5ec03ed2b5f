"""Which KV blocks the requests in flight have in common: room for chains that come and go in the kernel's tables.

The kernel knows shared blocks by small dense ids. Here such an id stands for a block's number for as long as that block
is in the cache or in the chain of a request in flight; then it may stand for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whywait.sim.jit import COMPILED
from whywait.sim.kernel_build import get, put
from whywait.sim.kernel_state import NOBODY, Link, Node, Whole, dtype_of, records

FIRST = 1 << 12


class Lazy:
    """A table, in the plain form, whose records are made when they are first looked at: most blocks of a large cache
    are never used."""

    dtype = np.dtype(object)

    def __init__(self, size: int, made: Callable[[int], Any]) -> None:
        self.shape, self._make = (1, size), made
        self._made: dict[int, Any] = {}

    def __getitem__(self, i: int) -> Any:
        record = self._made.get(i)
        if record is None:
            record = self._made[i] = self._make(i)
        return record

    def reshape(self, _size: int) -> Lazy:
        """It is flat already."""
        return self


def nodes_of(ids: int, runs: int) -> Any:
    """``ids`` shared blocks, none of them there, and a list of ``runs`` unused runs."""
    last = ids + runs - 1
    if not COMPILED:
        return Lazy(ids + runs, lambda i: Node(behind=i + 1 if ids <= i < last else NOBODY))
    nodes = records(Node, (1, ids + runs))
    put(nodes[0], slice(ids, None), {"behind": np.append(np.arange(ids + 1, ids + runs), NOBODY)})
    return nodes


def heap_of(ids: int) -> Any:
    """Room for ``ids`` idle blocks by key."""
    return records(Whole, (1, ids)) if COMPILED else Lazy(ids, lambda _: Whole())


def links_of(ids: Sequence[int]) -> Any:
    """The links of a chain of which nothing is held."""
    if not COMPILED:
        return [Link(id) for id in ids]
    links = records(Link, len(ids))
    links["id"] = ids
    return links


class Chains:
    """``links`` as in the kernel's tables; ``where`` is the part of each row: begin and length.

    With ``keep`` numbers are ids: of engines whose slots keep their own KV and have no table of blocks."""

    def __init__(self, nodes: Any, ids: int, keep: bool = False) -> None:
        self._nodes, self._keep = nodes, keep
        self.links = _empty(FIRST)
        self.where: dict[int, tuple[int, int]] = {}
        self.moved = False  # by the last add: the table is another, and the rows lie elsewhere
        self._end = 0
        self._ids: dict[int, int] = {}  # of block numbers, those used last at the end
        self._spare = ids  # ids from here down were never used …
        self._free: list[int] = []  # … and these are free again
        self._held: dict[int, int] = {}  # id -> requests in flight that have it

    def add(self, row: int, numbers: Sequence[int]) -> tuple[int, int]:
        """Room for a row's chain: where it begins, and its length (shorter where no ids are left)."""
        self.moved = False
        self.where.pop(row, None)
        ids = [n & 0x7FFFFFFF for n in numbers] if self._keep else self._ids_of(numbers)
        if not ids:
            return 0, 0
        if self._end + len(ids) > len(self.links):
            self._make_room(len(ids))
        at, self._end = self._end, self._end + len(ids)
        self.links[at : self._end] = links_of(ids)
        self.where[row] = at, len(ids)
        return at, len(ids)

    def drop(self, row: int) -> None:
        """Its request has ended. Slots that keep their KV still look at it, until the row is used again."""
        if self._keep:
            return
        at, n = self.where.pop(row, (0, 0))
        for id in get(self.links[at : at + n], "id").tolist():
            left = self._held[id] - 1
            if left:
                self._held[id] = left
            else:
                del self._held[id]

    def _ids_of(self, numbers: Sequence[int]) -> list[int]:
        known, held, out = self._ids, self._held, []
        for number in numbers:
            id = known.pop(number, NOBODY)
            if id == NOBODY:
                id = self._new_id()
                if id == NOBODY:
                    break
            known[number] = id  # at the end again
            held[id] = held.get(id, 0) + 1
            out.append(id)
        return out

    def _new_id(self) -> int:
        if self._spare > 0:
            self._spare -= 1
            return self._spare
        if not self._free:
            self._sweep()
        return self._free.pop() if self._free else NOBODY

    def _sweep(self) -> None:
        """Frees the ids of blocks that are neither in the cache nor in flight: many, as there are twice as many ids as
        blocks."""
        nodes, held = self._nodes, self._held
        if COMPILED:
            gone = (nodes["use"][0] < 0) & (nodes["tier"][0] == 0)
        for number, id in list(self._ids.items()):
            there = not gone[id] if COMPILED else nodes[id].use >= 0 or nodes[id].tier > 0
            if not there and id not in held:
                del self._ids[number]
                self._free.append(id)

    def _make_room(self, more: int) -> None:
        """Moves the chains in use together, into a table twice as large where they fill more than half."""
        need = sum(n for _, n in self.where.values()) + more
        size = len(self.links)
        while size < 2 * need:
            size *= 2
        links, end = _empty(size), 0
        for row, (at, n) in self.where.items():
            links[end : end + n] = self.links[at : at + n]
            self.where[row] = end, n
            end += n
        self.links, self._end, self.moved = links, end, True


def _empty(size: int) -> Any:
    return np.zeros(size, dtype_of(Link) if COMPILED else object)
