"""The content chunks of requests, in order, with their intervals and tokens; and the gaps between them.

The one place that goes through all chunks of a load point. What is made here is made once (``Run.memo``), and what is
of every request and not of every chunk is kept by request, since chunks are hundreds of times as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from whywait.core import run as core
from whywait.core.columns import KINDS
from whywait.core.run import Run, runs_of
from whywait.core.table import Array, once
from whywait.units import NS_PER_MS

_ROLE = KINDS.index("role")
_T = TypeVar("_T")
_EXACT = float(1 << 53)  # sums of whole numbers below this are the same in any order


@dataclass(frozen=True)
class Content:
    """The content chunks (not role) of a Run in order of (request, time); all arrays (chunks,).

    ``row`` is the row in ``run.requests``; ``t`` the latest and ``low`` the earliest possible arrival (ns, float64;
    equal when exact), ``coalesced`` tells the intervals; ``spread`` is the time with the chunks of one read spread
    evenly over their interval; ``tokens`` is NaN where unknown; ``tokens_spread`` shares the request's unexplained
    tokens evenly over its unknown chunks. Nobody may write to them: where all are alike they are views of one value.
    """

    row: Array
    t: Array
    low: Array
    coalesced: Array
    spread: Array
    kind: Array
    tokens: Array
    tokens_spread: Array
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def memo(self, what: Any, make: Callable[[], _T]) -> _T:
        """What ``make`` gives, made at the first call only."""
        return once(self._made, what, make)

    def starts(self) -> tuple[Array, Array]:
        """(Row of each request that has chunks, where its chunks begin; with the number of chunks at the end)."""

        def make() -> tuple[Array, Array]:
            begin = np.flatnonzero(np.append(len(self.row) > 0, self.row[1:] != self.row[:-1]))
            return self.row[begin], np.append(begin, len(self.row))

        return self.memo("starts", make)

    def counts(self, n: int) -> Array:
        """Chunks of each of ``n`` requests (int64)."""
        rows, edges = self.starts()
        out = np.zeros(n, dtype=np.int64)
        out[rows] = np.diff(edges)
        return out

    def unknown_rows(self) -> Array:
        """Rows of the requests with a chunk of which not even a share of the usage is known."""
        return self.memo("unknown", lambda: np.unique(self.row[np.isnan(self.tokens_spread)]))

    def whole(self) -> bool:
        """Whether all tokens (unknown ones taken for none) are whole numbers: their sums are exact in any order."""

        def make() -> bool:
            each = np.nan_to_num(alike(self.tokens_spread))
            return bool((each == np.floor(each)).all()) and float(np.abs(each).max(initial=0)) * len(self.row) < _EXACT

        return self.memo("whole", make)

    def upto(self, t_ns: float) -> Array:
        """How many chunks of each request of :meth:`starts` came up to a time (ns), by ``spread``: a search by halves
        in all of them at once."""
        _, edges = self.starts()
        low, high = edges[:-1].copy(), edges[1:].copy()
        while (open_ := low < high).any():
            middle = (low + high) // 2
            before = open_ & (self.spread[np.minimum(middle, len(self.spread) - 1)] <= t_ns)
            low = np.where(before, middle + 1, low)
            high = np.where(open_ & ~before, middle, high)
        out: Array = low - edges[:-1]
        return out

    def tokens_between(self, start_ns: float, end_ns: float) -> tuple[Array, Array]:
        """(Rows of :meth:`starts`, their tokens in (start, end] by ``spread``); only where :meth:`whole`."""
        rows, edges = self.starts()
        a, b = self.upto(start_ns), self.upto(end_ns)
        b = np.maximum(a, b)
        if is_alike(self.tokens_spread) and len(rows):
            return rows, (b - a) * float(np.nan_to_num(self.tokens_spread[0]))
        so_far = self.memo("so far", lambda: np.append(0.0, np.cumsum(np.nan_to_num(self.tokens_spread))))
        return rows, so_far[edges[:-1] + b] - so_far[edges[:-1] + a]


@dataclass(frozen=True)
class Gaps:
    """Gaps between consecutive content chunks of one request; (gaps,) ns float64, low ≤ value ≤ high.

    ``value`` is between evenly spread chunks. The gap surely covers ``begin_ns`` … ``begin_ns + low``; ``tokens`` are
    those of the chunk that ends it. As with :class:`Content`, nobody may write to them.
    """

    row: Array
    value: Array
    low: Array
    high: Array
    begin_ns: Array
    tokens: Array
    coalesced: Array


def is_alike(values: Array) -> bool:
    """Whether an array is a view of one value (as those of tokens are where every chunk has one)."""
    return values.ndim == 1 and len(values) > 0 and values.strides == (0,)


def alike(values: Array) -> Array:
    """One of the values, where all are a view of it; else all of them."""
    return values[:1] if is_alike(values) else values


def chosen(values: Array, mask: Array) -> Array:
    """``values[mask]``, still a view of one value where it was one."""
    return np.broadcast_to(values[0], (int(np.count_nonzero(mask)),)) if is_alike(values) else values[mask]


def content(run: Run) -> Content:
    """The content chunks of ``run``, sorted, with their intervals and tokens; see :class:`Content`."""
    return run.memo("content", lambda: _content(run))


def _content(run: Run) -> Content:
    req, chunks = run.requests, run.chunks
    ids, counts = run.memo("runs", lambda: runs_of(chunks, "id"))
    by_id = np.argsort(req["id"], kind="stable")
    at = np.minimum(np.searchsorted(req["id"][by_id], ids), max(len(by_id) - 1, 0))
    rows = by_id[at] if len(by_id) else np.zeros(len(ids), dtype=np.int64)
    known = req["id"][rows] == ids if len(by_id) else np.zeros(len(ids), dtype=bool)
    kind = chunks["kind"]
    keep = kind != _ROLE
    if not known.all():
        keep &= np.repeat(known, counts)
    row, kind = np.repeat(rows, counts)[keep], kind[keep]
    t = chunks["t_ns"][keep].astype(np.float64)
    low = _lows(run, keep)
    tokens = _column(run, "tokens", keep)
    row_changes, later = row[1:] != row[:-1], t[1:] >= t[:-1]
    if not ((row[1:] > row[:-1]) | (later & ~row_changes)).all():
        order = np.lexsort((t, row))
        row, t, kind = row[order], t[order], kind[order]
        low, tokens = low if low is None else low[order], tokens if is_alike(tokens) else tokens[order]
        row_changes = row[1:] != row[:-1]
    exact, spread_tokens = _tokens(run, row, tokens)
    if low is None:
        return Content(row, t, t, np.broadcast_to(False, row.shape), t, kind, exact, spread_tokens)
    coalesced = ~np.isnan(low)
    few = np.flatnonzero(coalesced)
    earliest, spread = t.copy(), t.copy()
    earliest[few] = np.minimum(low[few], t[few])
    place, size = _places(np.flatnonzero(~row_changes & (t[1:] == t[:-1])) + 1, few)
    spread[few] = earliest[few] + (t[few] - earliest[few]) * (place / size)
    return Content(row, t, earliest, coalesced, spread, kind, exact, spread_tokens)


def _lows(run: Run, keep: Array) -> Array | None:
    """``t_low_ns`` of the chunks ``keep``; None where none has one."""
    packed = run.chunks.packed("t_low_ns")
    if packed is not None and packed.all_null():
        return None
    low: Array = run.chunks["t_low_ns"][keep]
    return None if np.isnan(low).all() else low


def _column(run: Run, name: str, keep: Array) -> Array:
    values: Array = run.chunks[name][keep]
    if len(values) and (values == values[0]).all():
        return np.broadcast_to(values[0].copy(), values.shape)
    return values


def _places(again: Array, some: Array) -> tuple[Array, Array]:
    """Of chunks of one read, which lie beside each other: the place of each of ``some`` in its read, from 1, and how
    many it holds. ``again`` (ascending) are those of the time of the one before."""
    place, size = np.ones(len(some), dtype=np.int64), np.ones(len(some), dtype=np.int64)
    if len(again):
        new = np.flatnonzero(np.append(True, np.diff(again) != 1))
        begin, many = again[new] - 1, np.diff(np.append(new, len(again))) + 1
        g = np.maximum(np.searchsorted(begin, some, side="right") - 1, 0)
        inside = (some >= begin[g]) & (some < begin[g] + many[g])
        place, size = np.where(inside, some - begin[g] + 1, 1), np.where(inside, many[g], 1)
    return place, size


def gaps(c: Content) -> Gaps:
    """Gaps of the content chunks; for intervals the gap's certain bounds (see :class:`Gaps`)."""
    return c.memo("gaps", lambda: _gaps(c))


def _gaps(c: Content) -> Gaps:
    same = c.row[1:] == c.row[:-1]
    value = low = high = np.diff(c.t)
    either = np.broadcast_to(False, same.shape)
    if not is_alike(c.coalesced):
        either = c.coalesced[1:] | c.coalesced[:-1]
        few = np.flatnonzero(either)
        value, low, high = value.copy(), value.copy(), value
        low[few] = np.maximum(c.low[few + 1] - c.t[few], 0.0)
        high[few] = c.t[few + 1] - c.low[few]
        value[few] = np.clip(c.spread[few + 1] - c.spread[few], low[few], high[few])
        value, low, high, either = value[same], low[same], high[same], either[same]
    else:
        value = low = high = value[same]
        either = chosen(either, same)
    return Gaps(c.row[1:][same], value, low, high, c.t[:-1][same], chosen(c.tokens[1:], same), either)


def _tokens(run: Run, row: Array, tokens: Array) -> tuple[Array, Array]:
    """Tokens of each content chunk: as known (NaN not), and with the rest of the usage spread over the unknown ones.

    One token per chunk is inferred where the unexplained tokens equal the unexplained chunks; also where one more was
    counted and the answer ended with a stop token, which is counted but has no text and so no chunk.
    """
    if not np.isnan(alike(tokens)).any():
        return tokens, tokens
    n = run.requests["output_tokens"]
    unknown = np.isnan(tokens)
    size = len(n)
    rest = n - np.bincount(row[~unknown], tokens[~unknown], size)
    missing = np.bincount(row[unknown], minlength=size).astype(np.float64)
    stopped = np.array([r in ("stop", "completed") for r in run.requests["finish_reason"]], dtype=bool)
    one_each = (rest == missing) | ((rest == missing + 1) & stopped)
    exact: Array = np.where(unknown & one_each[row], 1.0, tokens)
    with np.errstate(divide="ignore", invalid="ignore"):
        share: Array = np.maximum(rest, 0.0) / missing
    return exact, np.where(unknown, share[row], tokens)


def in_parts(run: Run) -> bool:
    """Whether a run is gone through one load point after another, since its chunks are too many to hold all that is
    made of them at once."""
    return len(run.points) > 1 and len(run.chunks) > core.MOST_KEPT


def ends_low(run: Run) -> tuple[Array, Array]:
    """The earliest possible first and last token of each request (ns): as its stamps say, earlier where the chunk came
    with others in one read."""

    def make() -> tuple[Array, ...]:
        first, last = run.requests["first_ns"].copy(), run.requests["last_ns"].copy()
        if in_parts(run):
            for number in run.points["point"].tolist():
                mine = run.requests["point"] == number
                first[mine], last[mine] = ends_low(run.point(number))
        elif len((c := content(run)).row):
            rows, edges = c.starts()
            first[rows] = np.minimum(c.low[edges[:-1]], first[rows])
            last[rows] = np.minimum(c.low[edges[1:] - 1], last[rows])
        return first, last

    first, last = run.by_request("earliest ends", make)
    return first, last


class Arrivals(NamedTuple):
    """How the chunks of a load point came. Per request ``chunks``, ``bursts`` (those that came within 0.1 ms of
    the one before are one), and whether its ``second`` came with the first; over all: ``together``, how many came in
    the burst of the one before, and ``gap_ms``, the mean gap (NaN: there is none)."""

    chunks: Array
    bursts: Array
    second: Array
    together: int
    gap_ms: float


def arrivals(run: Run, number: int) -> Arrivals:
    """See :class:`Arrivals`; kept for every load point of ``run``, whatever becomes of its chunks."""
    return run.memo(f"arrivals {number}", lambda: _arrivals(run.point(number)))


def _arrivals(one: Run) -> Arrivals:
    c, n = content(one), len(one.requests)
    count, row, t = c.counts(n), c.row, c.t  # by request, each in the order of time
    again = row[1:] == row[:-1]
    gap = t[1:] - t[:-1]
    same = np.append(np.zeros(min(len(row), 1), dtype=bool), again & (gap < NS_PER_MS / 10))
    second = np.zeros(n, dtype=bool)
    rows, edges = c.starts()
    follows = edges[:-1] + 1 < edges[1:]
    second[rows[follows]] = same[edges[:-1][follows] + 1]
    gap_ms = float((gap[again] / NS_PER_MS).mean()) if again.any() else math.nan
    bursts = count - np.bincount(row[same], minlength=n)
    return Arrivals(count, bursts.astype(np.float64), second, int(same.sum()), gap_ms)
