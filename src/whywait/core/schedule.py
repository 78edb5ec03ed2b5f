"""Schedule: one row per request, of every load shape. Pure; the same seed gives the same bytes."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whywait.core.lengths import Lengths
from whywait.core.workload import (
    ARRIVALS,
    CACHE_MODES,
    LANGUAGES,
    SLO_KEYS,
    RequestClass,
    Stage,
    Workload,
    parse_stages,
)

__all__ = [
    "ARRIVALS", "CACHE_MODES", "LANGUAGES", "SLO_KEYS", "Lengths", "RequestClass", "Schedule", "Stage", "Workload",
    "parse_stages",
]  # fmt: skip

Ints = NDArray[np.int64]

# Columns beyond the first five, with the value that means: no such thing.
NOTHING = {"session_id": -1, "turn": 0, "after_id": -1, "think_ns": 0, "prefix_group": -1, "prefix_tokens": 0,
           "thinking_tokens": 0, "tool": 0}  # fmt: skip
PLAIN = ("id", "klass", "prompt_tokens", "output_tokens", "due_ns")


def _absent() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Schedule:
    """One row per request, as columns of equal length; a column that is left out means: no such thing.

    ``due_ns`` is when to send it, from 0; −1 in closed loop (due when a place is free). A row with ``after_id`` (−1:
    none) is due ``think_ns`` after that request ended, and not before its own ``due_ns`` where it has one.
    ``prompt_tokens`` is the whole prompt, the history included; ``output_tokens`` is what is asked for, thinking
    included. ``session_id`` is the id of the session's first row. ``prefix_tokens`` of the prompt are the system prompt
    ``prefix_group``. ``tool`` is 1 where the prompt ends with a tool's result. ``blocks`` (one row each, or none at
    all) name the pieces of ``block_tokens`` a prompt is made of: equal names are equal text.
    """

    id: Ints
    klass: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    due_ns: Ints
    class_names: tuple[str, ...] = ("default",)
    session_id: Ints = field(default_factory=_absent)
    turn: Ints = field(default_factory=_absent)
    after_id: Ints = field(default_factory=_absent)
    think_ns: Ints = field(default_factory=_absent)
    prefix_group: Ints = field(default_factory=_absent)
    prefix_tokens: Ints = field(default_factory=_absent)
    thinking_tokens: Ints = field(default_factory=_absent)
    tool: Ints = field(default_factory=_absent)
    blocks: tuple[tuple[int, ...], ...] = ()
    block_tokens: int = 0

    def __post_init__(self) -> None:
        n = len(self.id)
        for name, nothing in NOTHING.items():
            if n and not len(getattr(self, name)):
                object.__setattr__(self, name, np.full(n, nothing, np.int64))
        sizes = {len(getattr(self, name)) for name in (*PLAIN, *NOTHING)}
        if len(sizes) > 1 or (self.blocks and len(self.blocks) != n):
            raise ValueError("columns of a schedule differ in length")

    def __len__(self) -> int:
        return len(self.id)

    @property
    def has_sessions(self) -> bool:
        return bool((self.after_id >= 0).any())

    def after_rows(self) -> Ints:
        """The row each row comes after; −1 for none, and where that row is not in this schedule."""
        return self._after

    def block_counts(self) -> Mapping[int, int]:
        """How many requests have each block."""
        return self._block_counts

    @functools.cached_property
    def _block_counts(self) -> Mapping[int, int]:
        return Counter(name for blocks in self.blocks for name in set(blocks))

    @functools.cached_property
    def _after(self) -> Ints:
        order = np.argsort(self.id, kind="stable")
        at = np.searchsorted(self.id[order], self.after_id)
        found = order[np.minimum(at, len(order) - 1)] if len(order) else _absent()
        return np.where((self.after_id >= 0) & (self.id[found] == self.after_id), found, -1) if len(order) else found

    def to_bytes(self) -> bytes:
        """Canonical bytes: equal schedules are equal bytes (invariant 5)."""
        head = "\0".join(self.class_names).encode()
        body = b"".join(getattr(self, c).astype("<i8").tobytes() for c in (*PLAIN, *NOTHING))
        sizes = np.array([self.block_tokens, len(self), *(len(b) for b in self.blocks)], "<i8")
        names = np.array([x for b in self.blocks for x in b], "<i8")
        return head + b"\1" + body + sizes.tobytes() + names.tobytes()

    def take(self, rows: Sequence[int] | NDArray[Any]) -> Schedule:
        """Those rows (indices or a mask), in that order."""
        at = np.arange(len(self))[np.asarray(rows)]
        cols = {c: getattr(self, c)[at] for c in (*PLAIN, *NOTHING)}
        return dataclasses.replace(self, **cols, blocks=tuple(self.blocks[i] for i in at) if self.blocks else ())

    def shard(self, k: int, n: int) -> Schedule:
        """Every ``n``-th session from ``k``; a request without one counts as a session of its own.

        The shards together are the whole (invariant 7), and none has to wait for another's completions.
        """
        own = np.where(self.session_id < 0, -2 - np.arange(len(self)), self.session_id)
        _, first, which = np.unique(own, return_index=True, return_inverse=True)
        number = np.argsort(np.argsort(first))[which.ravel()]  # sessions in order of their first row
        return self.take(number % n == k)
