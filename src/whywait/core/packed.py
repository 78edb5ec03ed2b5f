"""Columns of a long table in less memory than their dense arrays: by stretches, each kept in the shortest form it has.

A hundred million chunks are 4.4 GB as plain arrays. Yet ids come in runs, most chunks have an exact time (no lower
bound), tokens are small numbers and the clock is the same one throughout: 1 GB. What comes out is bit for bit what
went in; a stretch that fits no short form is kept as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_NONE = 255  # of small whole numbers in a byte: null
_RUN, _RARE = 8, 16  # runs at least so long on average; one value in so many that is not null


class Same(NamedTuple):
    """One value ``n`` times."""

    value: Array
    n: int

    def dense(self, a: int, b: int) -> Array:
        return np.broadcast_to(self.value, (b - a,))


class Runs(NamedTuple):
    """``values[i]`` from row ``ends[i - 1]`` to ``ends[i]``."""

    values: Array
    ends: Array

    def dense(self, a: int, b: int) -> Array:
        values, counts = self.runs(a, b)
        return np.repeat(values, counts)

    def runs(self, a: int, b: int) -> tuple[Array, Array]:
        first, last = np.searchsorted(self.ends, [a, b - 1], side="right")
        edges = self.ends[first : last + 1].clip(max=b)
        return self.values[first : last + 1], np.diff(edges, prepend=a)


class Rare(NamedTuple):
    """NaN but at rows ``at``."""

    at: Array
    values: Array

    def dense(self, a: int, b: int) -> Array:
        out = np.full(b - a, np.nan)
        first, last = np.searchsorted(self.at, [a, b])
        out[self.at[first:last] - a] = self.values[first:last]
        return out


class Small(NamedTuple):
    """Whole numbers 0 … 254 or NaN, in a byte each."""

    codes: Array

    def dense(self, a: int, b: int) -> Array:
        return _SMALL[self.codes[a:b]]


class Plain(NamedTuple):
    """As they are."""

    values: Array

    def dense(self, a: int, b: int) -> Array:
        return self.values[a:b]


_SMALL = np.append(np.arange(_NONE, dtype=np.float64), np.nan)
Stretch = Same | Runs | Rare | Small | Plain


class Packed:
    """A column, immutable: consecutive stretches. ``len(p)`` rows; ``p.dense()`` is the array; ``p[a:b]`` is packed."""

    __slots__ = ("_ends", "_parts", "dtype", "start", "stop")

    def __init__(self, parts: Sequence[Stretch], sizes: Sequence[int], dtype: Any) -> None:
        self._parts, self._ends, self.dtype = list(parts), np.cumsum([0, *sizes]), np.dtype(dtype)
        self.start, self.stop = 0, int(self._ends[-1])

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, rows: slice) -> Packed:
        a, b, step = rows.indices(len(self))
        if step != 1:
            raise ValueError("a packed column is cut in one piece")
        out = Packed.__new__(Packed)
        out._parts, out._ends, out.dtype = self._parts, self._ends, self.dtype
        out.start, out.stop = self.start + a, self.start + max(a, b)
        return out

    def _cuts(self) -> list[tuple[Stretch, int, int]]:
        """The stretches of this part of the column, and from which to which of their rows."""
        first = int(np.searchsorted(self._ends, self.start, side="right")) - 1
        out = []
        for part, base, end in zip(self._parts[first:], self._ends[first:-1], self._ends[first + 1 :], strict=True):
            if base >= self.stop:
                break
            a, b = max(self.start - int(base), 0), min(self.stop, int(end)) - int(base)
            if b > a:
                out.append((part, a, b))
        return out

    def dense(self) -> Array:
        """The column as an array. Of one value throughout it takes no memory (and cannot be written to)."""
        cuts = self._cuts()
        if not cuts:
            return np.empty(0, dtype=self.dtype)
        if len(cuts) == 1:
            return cuts[0][0].dense(*cuts[0][1:])
        first = cuts[0][0]
        if isinstance(first, Same) and all(isinstance(p, Same) and _alike(p.value, first.value) for p, _, _ in cuts):
            return np.broadcast_to(first.value, (len(self),))
        out = np.empty(len(self), dtype=self.dtype)
        n = 0
        for part, a, b in cuts:
            out[n : n + b - a] = part.dense(a, b)
            n += b - a
        return out

    def runs(self) -> tuple[Array, Array]:
        """(values, how many of each in a row), neighbours unequal."""
        found = []
        for part, a, b in self._cuts():
            if isinstance(part, Runs):
                found.append(part.runs(a, b))
            elif isinstance(part, Same):
                found.append((part.value.reshape(1), np.array([b - a])))
            else:
                found.append(_runs_of(part.dense(a, b)))
        if not found:
            return np.empty(0, dtype=self.dtype), np.zeros(0, dtype=np.int64)
        values, counts = (np.concatenate(v) for v in zip(*found, strict=True))
        new = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
        return values[new], np.add.reduceat(counts, new)

    def all_null(self) -> bool:
        """Whether it is known without a look at the rows that none has a value."""
        return all((isinstance(p, Same) and np.isnan(p.value)) or (isinstance(p, Rare) and
                   not len(p.at)) for p, _, _ in self._cuts())  # fmt: skip


def pack(values: Array) -> Stretch:
    """The shortest form of ``values`` (1-d, at least one; integers or float64)."""
    if values.dtype.kind == "f":
        null = np.isnan(values)
        nulls = int(null.sum())
        if nulls == len(values):
            return Same(np.array(np.nan), len(values))
        if not nulls and (values.view(np.int64) == values[:1].view(np.int64)).all():  # 0.0 is not -0.0
            return Same(np.array(values[0]), len(values))
        if (len(values) - nulls) * _RARE <= len(values):
            at = np.flatnonzero(~null)
            return Rare(at, values[at].copy())
        with np.errstate(invalid="ignore"):
            codes = np.where(null, _NONE, values).astype(np.uint8) if nulls else values.astype(np.uint8)
        same = _SMALL[codes].view(np.int64) == values.view(np.int64)
        return Small(codes) if (same | (null & (codes == _NONE))).all() else Plain(values)
    if values[0] == values[-1] and (values == values[0]).all():
        return Same(values[:1].copy()[0:1].reshape(()), len(values))
    if values.itemsize == 1:
        return Plain(values)
    found, counts = _runs_of(values[: 64 * _RUN])
    if len(found) * _RUN > len(values[: 64 * _RUN]):
        return Plain(values)
    found, counts = _runs_of(values)
    return Runs(found, np.cumsum(counts)) if len(found) * _RUN <= len(values) else Plain(values)


def _runs_of(values: Array) -> tuple[Array, Array]:
    new = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    return values[new], np.diff(np.append(new, len(values)))


def _alike(a: Array, b: Array) -> bool:
    return a.tobytes() == b.tobytes()
