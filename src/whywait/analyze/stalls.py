"""Why decode stood still: gaps beyond a request's usual one, told apart by what else happened at that instant.

An engine step serves all sequences in work, so a long step is a gap in every stream at once (*silence*), while a
request that was pushed out of work is silent alone. What grew or began meanwhile says which step it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from whywait.analyze.counters import Series, series
from whywait.analyze.first_token import Line, Split
from whywait.analyze.streams import Content, Gaps, arrivals, content, ends_low, gaps
from whywait.analyze.window import Spans
from whywait.core import run as core
from whywait.core.run import Run, laid_out
from whywait.core.table import Array
from whywait.units import NS_PER_MS, NS_PER_S

NEIGHBOUR, PREEMPTION, QUOTA, NOISE = (
    "neighbour's prefill", "preemption/recompute", "cpu quota", "noisy neighbour",
)  # fmt: skip
STALL_FACTOR = 1.5  # a gap beyond this multiple of the typical one is looked at
VICTIM = 4  # a request pushed out of work is silent for at least this many usual gaps
FLOWING = 0.3  # streams beside a gap that sent this share of their usual tokens in it were not held up by the same step
READY_CORES = 0.5  # engine threads ready without a core for this much of an interval are short of cores
_BLOCK = 1 << 20  # values that are put in order at once
_MIN_GAPS = 8  # fewer gaps than this do not say what is typical of a request; the point's median does
_COUNTERS = (
    (QUOTA, "cgroup_throttled_seconds_total", 0.0),
    (NOISE, "run_queue_wait_seconds_total", READY_CORES),
)


@dataclass(frozen=True)
class Stalls:
    """Per request (int64 ns): the excess of long gaps ``by`` cause, and what none explains (``rest``). ``guessed``
    (bool) tells where a neighbour's prefill rests on its first token alone; ``looked`` where any cause could be seen.
    """

    by: dict[str, Array]
    rest: Array
    guessed: Array
    looked: Array


@dataclass(frozen=True)
class Long:
    """The long gaps (int64 ns on the shifted line); ``chain`` numbers runs of long gaps with no usual one between."""

    row: Array
    begin: Array
    end: Array
    excess: Array
    usual: Array
    chain: Array
    alone: Array


def stalls(run: Run, long: Long, parts: tuple[Line, Split]) -> Stalls:
    """The excess of long gaps by cause. In this order, each from what the ones before leave:

    1. *preemption/recompute*: others' tokens kept coming during the gap, and the engine's preemption counter grew in it
       or in the gap of a request that was pushed out meanwhile;
    2. *neighbour's prefill*: the overlap with prefills that the engine reports;
    3. the same where it reports none: the overlap with sent → first token of a request whose first token ended the gap
       (or the run of long gaps it is in) while all streams of the replica were silent;
    4. *preemption/recompute* again, for gaps of all streams (KV being freed or computed anew);
    5. *cpu quota* and *noisy neighbour*: silence while the engine's throttled time, or its threads' time ready without
       a core, grew; at most by that growth.
    """
    line, split = parts
    n = len(line.sent)
    unplaced = np.isin(run.requests["point"], laid_out(run))  # what happened beside their gaps is not known
    left = np.where(unplaced[long.row], 0, long.excess)
    by: dict[str, Array] = {}

    def take(cause: str, amount: Array) -> None:
        nonlocal left
        amount = np.minimum(amount, left)
        by.setdefault(cause, np.zeros(n, dtype=np.int64))
        np.add.at(by[cause], long.row, amount)
        left = left - amount

    pushed, counted = _pushed(run, long, split.shift)
    take(PREEMPTION, np.where(pushed & long.alone, left, 0))
    covered = split.windows.covered
    take(NEIGHBOUR, covered(long.end) - covered(long.begin))
    ended = _ended_by_first(long, split)
    covered = split.guessed.covered
    before = left
    take(NEIGHBOUR, np.where(ended & ~long.alone, covered(long.end) - covered(long.begin), 0))
    guessed = np.zeros(n, dtype=bool)
    guessed[long.row[left < before]] = True
    take(PREEMPTION, np.where(pushed, left, 0))
    for cause, name, least in _COUNTERS:
        spans = _grown(series(run.readings, name, "process/engine"), least)
        take(cause, np.where(long.alone, 0, _growth_in(spans, long, split.shift)))
    rest = np.zeros(n, dtype=np.int64)
    np.add.at(rest, long.row, np.where(unplaced[long.row], long.excess, left))
    others = np.zeros(n, dtype=bool) if not len(run.chunks) else _has_neighbours(line, split)
    looked = (others | counted) & bool(len(run.chunks)) & ~unplaced
    return Stalls({k: v for k, v in by.items() if v.any()}, rest, guessed, looked)


def typical_gaps(g: Gaps, n: int, point: Array) -> Array:
    """The median gap of each request (ns; of its point where it has few gaps; infinite where there is none)."""
    own, count = _group_median(g.value, g.row, n)
    if (count >= _MIN_GAPS).all():
        return own
    _, number = np.unique(point, return_inverse=True)
    number = number.ravel()
    whole, some = _group_median(g.value, number[g.row], int(number.max(initial=-1)) + 1)
    of_point = np.where(some > 0, whole, np.inf)[number]
    out: Array = np.where(count >= _MIN_GAPS, own, of_point)
    return out


def _group_median(values: Array, group: Array, n: int) -> tuple[Array, Array]:
    """The lower median of the values of each of ``n`` groups (NaN: it has none), and how many it has."""
    count = np.bincount(group, minlength=n)
    start = np.cumsum(count) - count
    out = np.full(n, np.nan)
    if not (group[1:] >= group[:-1]).all():
        values = values[np.argsort(group, kind="stable")]
    # Groups of equally many are the rows of one array.
    order = np.argsort(count, kind="stable")
    sizes, edges = np.unique(count[order], return_index=True)
    for size, a, b in zip(sizes.tolist(), edges.tolist(), np.append(edges, n)[1:].tolist(), strict=True):
        most = _BLOCK // max(size, 1) + 1
        for at in range(a, b, most) if size else ():
            rows = order[at : min(at + most, b)]
            block = values[start[rows, None] + np.arange(size)]
            out[rows] = np.partition(block, (size - 1) // 2, axis=1)[:, (size - 1) // 2]
    return out, count


def long_gaps(c: Content, typical: Array, line: Line, rows: Array | None = None) -> Long:
    """The gaps of ``c`` that are longer than is typical of their request (``typical``: ns). ``line`` is of all
    requests of the run; ``rows`` says which of them those of ``c`` are, where they are not all."""
    g, shift = gaps(c), line.shift if rows is None else line.shift[rows]
    usual = typical[g.row]
    at = np.flatnonzero(g.low > STALL_FACTOR * usual)
    at = at[g.low[at] - usual[at] >= 1]
    row, usual = g.row[at], usual[at]
    excess = g.low[at] - usual
    begin = np.rint(g.begin_ns[at]).astype(np.int64) + shift[row]
    end = begin + np.rint(g.low[at]).astype(np.int64)
    joined = (np.diff(at) == 1) & (row[1:] == row[:-1])
    chain = np.concatenate(([0], np.cumsum(~joined))) if len(at) else np.zeros(0, dtype=np.int64)
    # Tokens of others well inside the gap: its own stream has none there.
    times = np.rint(c.t).astype(np.int64)
    if shift.any():
        times += shift[c.row]
    times.sort()
    edge = np.rint(np.minimum(usual / 2, (end - begin) / 4)).astype(np.int64)
    inside = np.searchsorted(times, end - edge, "left") - np.searchsorted(times, begin + edge, "right")
    first, last = (np.sort(v[line.has_first]) for v in (line.first + line.shift, line.last + line.shift))
    beside = np.searchsorted(first, begin, "right") - np.searchsorted(last, end, "left") - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        flowing = np.maximum(beside, 0) * np.where(usual > 0, (end - begin - 2 * edge) / usual, 0.0)
    alone = inside > FLOWING * flowing
    row = row if rows is None else rows[row]
    return Long(row, begin, end, np.floor(excess).astype(np.int64), usual, chain, alone & (inside > 0))


def survey(run: Run, line: Line, c: Content | None = None) -> tuple[Array, Long]:
    """The typical gap of each request (see :func:`typical_gaps`) and the long gaps of all: what the request account
    takes of the chunks. Of a run of many chunks one load point after another, if they lay apart in time."""
    point = run.requests["point"]
    if c is not None or len(run.chunks) <= core.MOST_KEPT:
        c = content(run) if c is None else c
        typical = typical_gaps(gaps(c), len(point), point)
        return typical, long_gaps(c, typical, line)
    typical, found, spans, chains = np.full(len(point), np.inf), [], [], 0
    low, high = (v.copy() for v in (run.requests["first_ns"], run.requests["last_ns"]))
    for number in run.points["point"].tolist()[::-1]:  # what is made of the first is at hand when that is told of
        rows = np.flatnonzero(point == number)
        one = run.point(number)
        c = content(one)
        typical[rows] = typical_gaps(gaps(c), len(rows), point[rows])
        low[rows], high[rows] = ends_low(one)
        arrivals(run, number)
        part = long_gaps(c, typical[rows], line, rows)
        found.append(dataclasses.replace(part, chain=part.chain + chains))
        chains += int(part.chain.max(initial=-1)) + 1
        if len(c.t):
            spans.append((float(c.t.min()), float(c.t.max())))
    spans.sort()
    if any(b[0] <= a[1] for a, b in pairwise(spans)):  # tokens of another point may lie in a gap
        return survey(run, line, content(run))
    run.by_request("earliest ends", lambda: (low, high))
    names = [f.name for f in dataclasses.fields(Long)]
    return typical, Long(**{k: np.concatenate([getattr(x, k) for x in found]) for k in names})


def _pushed(run: Run, long: Long, shift: Array) -> tuple[Array, Array]:
    """Which long gaps lie where requests were pushed out of work (bool), and whether that could be seen (per request).

    The counter is read a few times a second. A request's gap that began while it grew, and is of several usual gaps,
    is taken for one that was pushed out; what happens up to its end is of the same cause.
    """
    found = series(run.readings, "preemptions_total", "metrics") or series(run.readings, "preemptions_total")
    counted = np.full(len(shift), bool(found))
    shifts = np.unique(shift).tolist()
    spans = [(a + s, b + s) for a, b, _ in _grown(found, 0.0) for s in shifts]
    if not spans or not len(long.row):
        return np.zeros(len(long.row), dtype=bool), counted
    grew = Spans.of(*(np.array(v, dtype=np.int64) for v in zip(*sorted(spans), strict=True)))
    slack = np.rint(np.where(np.isfinite(long.usual), long.usual, 0)).astype(np.int64)
    began = grew.covered(long.begin + slack) > grew.covered(long.begin - slack)
    victim = began & (long.end - long.begin >= VICTIM * long.usual)
    reach = Spans.of(np.concatenate((grew.starts, long.begin[victim])), np.concatenate((grew.stops, long.end[victim])))
    return reach.covered(long.end) > reach.covered(long.begin), counted


def _grown(found: Iterable[Series], least_per_s: float) -> list[tuple[int, int, float]]:
    """(asked, next answer, growth) of each pair of readings of counters between which they grew faster than that."""
    out = []
    for s in found:
        steps, asked, answered = np.diff(s.values), s.asked_ns[:-1], s.answered_ns[1:]
        fast = (steps > 0) & (steps >= least_per_s * (answered - asked) / NS_PER_S)
        out += list(zip(asked[fast].astype(np.int64).tolist(), answered[fast].astype(np.int64).tolist(),
                        steps[fast].tolist(), strict=True))  # fmt: skip
    return sorted(out)


def _growth_in(spans: list[tuple[int, int, float]], long: Long, shift: Array) -> Array:
    """By how much a counter of seconds grew at most during each gap (int64 ns)."""
    if not spans:
        return np.zeros(len(long.row), dtype=np.int64)
    a, b, grew = (np.array(v, dtype=np.float64) for v in zip(*spans, strict=True))
    total = np.concatenate(([0.0], np.cumsum(grew)))
    begin, end = long.begin - shift[long.row], long.end - shift[long.row]
    high = total[np.searchsorted(a, end, "left")] - total[np.searchsorted(b, begin, "right")]
    out: Array = np.rint(np.maximum(high, 0) * NS_PER_S).astype(np.int64)
    return out


def _ended_by_first(long: Long, split: Split) -> Array:
    """Whether another request's first token came in the step that ended the gap, or the run of long gaps it is in."""
    if not len(long.row):
        return np.zeros(0, dtype=bool)
    usual = np.where(np.isfinite(long.usual), long.usual, 0)
    # Half a step, since a first token takes a little longer through the frontend than those that follow.
    slack = np.rint(np.maximum(usual / 2, NS_PER_MS)).astype(np.int64)
    near = split.guessed.ends_near(long.end, slack)
    any_near = np.zeros(int(long.chain[-1]) + 1, dtype=bool)
    any_near[long.chain[near]] = True
    # Only up to the gap that the first token ended: what follows it in a run is of something else.
    last = np.full(len(any_near), -1, dtype=np.int64)
    np.maximum.at(last, long.chain[near], np.flatnonzero(near))
    found: Array = any_near[long.chain] & (np.arange(len(long.chain)) <= last[long.chain])
    return found


def _has_neighbours(line: Line, split: Split) -> Array:
    """Whether another request of the replica got its first token while each one decoded (bool): its prefill, if it
    held anything up, could be seen."""
    firsts = np.sort((line.first + split.shift)[line.has_first])
    inside = np.searchsorted(firsts, line.last + split.shift, "left") - np.searchsorted(
        firsts, line.first + split.shift, "right"
    )
    out: Array = inside > 0
    return out
