"""What happens in a stretch of time: the steady window of a load point, requests in flight, rates.

Requests in flight are counted by a sweep line over exact intervals sent → end; tokens count at the times of their
chunks. Nothing is sampled on our side, so the peak is never below the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whywait.analyze.latency import CLOSED, OK, origin_ns
from whywait.analyze.streams import Content, is_alike
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.units import NS_PER_S

MIN_REQUESTS = 8
MIN_SHARE = 1 / 3  # a window shorter than this share of its point is not representative of it
UNCOUNTED = 0.01  # share of requests without a token count up to which a token rate is still printed
MOST_BINS = 1_000_000  # of a second, for the peak token rate: of a window of more than 11 days they are longer


@dataclass(frozen=True)
class Window:
    """The part of a load point that is measured; ns. ``whole`` is True when no steady part was found, ``why`` then says
    why; ``requests`` have their origin inside, ``dropped`` outside."""

    start_ns: int
    end_ns: int
    whole: bool
    requests: int
    dropped: int
    why: str = ""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_S


@dataclass(frozen=True)
class Spans:
    """Intervals of time (int64 ns): their union as disjoint ``starts`` … ``stops``; the ``ends`` of each, ascending."""

    starts: Array
    stops: Array
    ends: Array

    @classmethod
    def of(cls, begin: Array, end: Array) -> Spans:
        """From the begin and end of each; no end may come before its begin."""
        order = np.argsort(begin, kind="stable")
        a, z = begin[order], np.maximum.accumulate(end[order]) if len(end) else end
        fresh = np.ones(len(a) + 1, dtype=bool)
        fresh[1:-1] = a[1:] > z[:-1]
        return cls(a[fresh[:-1]], z[fresh[1:]], np.sort(end))

    def covered(self, t: Array) -> Array:
        """How much of the time before each ``t`` (ns) lies in an interval; differences are exact overlaps."""
        if not len(self.starts):
            return np.zeros_like(t)
        length = self.stops - self.starts
        i = np.searchsorted(self.starts, t, side="right")
        at = np.maximum(i - 1, 0)
        before = (np.cumsum(length) - length)[at]
        out: Array = np.where(i > 0, before + np.minimum(t - self.starts[at], length[at]), 0)
        return out

    def ends_near(self, t: Array, slack: Array) -> Array:
        """Whether an interval ends within ``slack`` of each ``t`` (ns; bool)."""
        found: Array = np.searchsorted(self.ends, t - slack, "left") < np.searchsorted(self.ends, t + slack, "right")
        return found


def sweep(starts: Array, ends: Array) -> tuple[Array, Array]:
    """Times (ns, ascending, distinct) and how many intervals [start, end) are open from each time to the next.

    Pairs with a NaN are left out; an interval of no length is never open.
    """
    known = ~(np.isnan(starts) | np.isnan(ends))
    s, e = starts[known].astype(np.int64), ends[known].astype(np.int64)
    times = np.unique(np.concatenate((s, e)))
    opened = np.searchsorted(np.sort(s), times, side="right")
    return times, opened - np.searchsorted(np.sort(e), times, side="right")


def in_flight(run: Run, start_ns: int, end_ns: int) -> tuple[int, float]:
    """Peak and time-weighted mean of the requests in flight between two times (ns)."""
    if end_ns <= start_ns:
        return 0, 0.0
    times, counts = sweep(run.requests["sent_ns"], run.requests["end_ns"])
    if not len(times):
        return 0, 0.0
    begin = np.clip(times, start_ns, end_ns)
    length = np.diff(np.append(begin, begin[-1]))  # after the last time nothing is in flight
    seen = length > 0
    area = int((length * counts).sum())
    return int(counts[seen].max(initial=0)), area / (end_ns - start_ns)


def window_of(run: Run) -> Window:
    """The steady window of a Run of one load point; as the points table states it, else found.

    Closed loop: from when the requests in flight first reached the target and each of the first ``target`` requests had
    its first token (the start burst is over) to the last instant at the target (the drain begins). Open loop: from the
    first max(1 s, median end-to-end) to the last due time. The whole point is used when the window holds less than a
    third of its time or fewer than max(8, target) requests.
    """
    pts = run.points
    start, end = int(pts["start_ns"][0]), int(pts["end_ns"][0])
    low, high = float(pts["steady_start_ns"][0]), float(pts["steady_end_ns"][0])
    stated = not (np.isnan(low) or np.isnan(high))
    if stated and (low, high) != (start, end):
        return _steady(run, int(low), int(high))
    if not len(run.requests) and not pts["planned"].any():  # only watched: nothing warms up or drains
        return Window(start, end, False, 0, 0)
    found, why = _closed(run) if pts["mode"][0] == CLOSED else _open(run, start)
    if found is not None:
        steady = _steady(run, *found)
        target = float(pts["target"][0])
        needed = max(MIN_REQUESTS, 0 if np.isnan(target) else target)
        share = max(found[1] - found[0], 0) / max(end - start, 1)
        if share < MIN_SHARE:
            why = f"the steady part is only {share:.0%} of the point"
        elif steady.requests < needed:
            why = f"only {steady.requests} requests began in the steady part, {needed:.0f} are needed"
        elif stated:
            why = "the points table says so"
        else:
            return steady
    return Window(start, end, True, len(run.requests), 0, why)


def with_windows(run: Run) -> Run:
    """``run`` with ``steady_start_ns`` and ``steady_end_ns`` filled where null (with the whole point if need be)."""
    pts = run.points
    low, high = pts["steady_start_ns"].copy(), pts["steady_end_ns"].copy()
    for i, number in enumerate(pts["point"].tolist()):
        found = window_of(_bare_point(run, number))
        low[i], high[i] = found.start_ns, found.end_ns
    pts = pts.replace(steady_start_ns=low, steady_end_ns=high)
    return Run(run.manifest, pts, run.requests, run.chunks, run.steps, run.readings)


def _steady(run: Run, start_ns: int, end_ns: int) -> Window:
    inside = int(starts_inside(run, start_ns, end_ns).sum())
    return Window(start_ns, end_ns, False, inside, len(run.requests) - inside)


def starts_inside(run: Run, start_ns: int, end_ns: int) -> Array:
    """Which requests have their origin in [start, end] (bool); choosing by completion would favour short ones."""
    origin = origin_ns(run)
    inside: Array = (origin >= start_ns) & (origin <= end_ns)
    return inside


def request_rate(run: Run, w: Window, which: Array) -> float | None:
    """Requests per second of those in ``which`` (bool) over the window; None for an empty window.

    Closed loop: each request counts with the share of sent → end that lies inside, which is exact in a steady state
    even when requests move in waves. Open loop: completions inside, since under overload queueing is no progress.
    """
    if w.end_ns <= w.start_ns:
        return None
    sent, end = run.requests["sent_ns"][which], run.requests["end_ns"][which]
    done = (end > w.start_ns) & (end <= w.end_ns)
    if run.points["mode"][0] != CLOSED:
        return float(done.sum()) / w.seconds
    length = end - sent
    overlap = np.maximum(np.minimum(end, w.end_ns) - np.maximum(sent, w.start_ns), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(length > 0, overlap / length, done).sum()) / w.seconds


def token_rate(run: Run, c: Content, w: Window, which: Array) -> tuple[float | None, float | None, int]:
    """Output tokens per second of the requests in ``which`` (bool): mean over the window and peak over bins of 1 s.

    Tokens count as in :func:`token_bins`, which also gives the third value. The bins divide the window evenly into
    pieces of at least 1 s, ``MOST_BINS`` at most, so peak ≥ mean.
    """
    bins = min(max(1, (w.end_ns - w.start_ns) // NS_PER_S), MOST_BINS)
    per_bin, missing = token_bins(run, c, w, which, bins)
    if per_bin is None:
        return None, None, missing
    mean = float(per_bin.sum()) / w.seconds
    return mean, max(mean, float(per_bin.max()) * bins / w.seconds), missing


def token_bins(run: Run, c: Content, w: Window, which: Array, bins: int) -> tuple[Array | None, int]:
    """Output tokens of the requests in ``which`` (bool) in each of ``bins`` equal pieces of the window.

    Tokens count when their chunk came; where a chunk's tokens are unknown the request's usage is spread over its
    unknown chunks, and over first … last when the Run keeps no chunks of it. The second value is how many requests
    could not be counted: some tokens but no usage or time; past 1 % of them, or in an empty window, the first is None.
    """
    req = run.requests
    has = np.zeros(len(req), dtype=bool)
    has[c.starts()[0]] = True
    lost = np.zeros(len(req), dtype=bool)
    lost[c.unknown_rows()] = True
    n = req["output_tokens"]
    rest = which & ~has & (~np.isnan(req["first_ns"]) | ~np.isnan(n) | (req["outcome"] == OK))
    first = np.where(np.isnan(req["first_ns"]), req["end_ns"], req["first_ns"])  # not streamed: all at the end
    lost |= rest & (np.isnan(n) | np.isnan(first))
    missing = int((lost & which).sum())
    if w.end_ns <= w.start_ns or missing > UNCOUNTED * int(which.sum()):
        return None, missing
    edges = np.linspace(w.start_ns, w.end_ns, bins + 1)
    so_far = _tokens_at(c, which, edges)
    rest &= ~lost
    so_far += _ramps_at(first[rest], req["last_ns"][rest], n[rest], edges)
    return np.diff(so_far), missing


def _closed(run: Run) -> tuple[tuple[int, int] | None, str]:
    req, target = run.requests, float(run.points["target"][0])
    if np.isnan(target) or target < 1:
        return None, "the target of the point is not known"
    times, counts = sweep(req["sent_ns"], req["end_ns"])
    full = np.flatnonzero(counts >= target)
    if not len(full):
        return None, f"the requests in flight never reached {target:.0f}"
    sent = req["sent_ns"]
    burst = np.argsort(np.where(np.isnan(sent), np.inf, sent), kind="stable")[: int(target)]
    begun = np.where(np.isnan(req["first_ns"]), req["end_ns"], req["first_ns"])[burst]
    start = max(int(times[full[0]]), int(np.nan_to_num(begun).max()))
    return (start, int(times[full[-1] + 1])), ""


def _open(run: Run, start: int) -> tuple[tuple[int, int] | None, str]:
    req = run.requests
    e2e = (req["last_ns"] - origin_ns(run))[req["outcome"] == OK]
    e2e = e2e[~np.isnan(e2e)]
    due = origin_ns(run)
    due = due[due <= run.points["end_ns"].max()]  # of a run cut short, not those still to come
    if not len(due) or not len(e2e):
        return None, "no request with a due time ended well"
    return (start + max(NS_PER_S, round(float(np.median(e2e)))), int(due.max())), ""


def _bare_point(run: Run, number: int) -> Run:
    """A point without chunks and readings, which the windows do not need and are slow to slice."""
    pts = run.points.where(run.points["point"] == number)
    none = np.zeros(0, dtype=np.int64)
    req = run.requests.where(run.requests["point"] == number)
    return Run(run.manifest, pts, req, run.chunks.where(none), run.steps.where(none), run.readings.where(none))


def _tokens_at(c: Content, which: Array, edges: Array) -> Array:
    """Tokens of the requests in ``which`` (bool) that had come by each of ``edges`` (ns, ascending)."""
    if not c.whole():
        mine = which[c.row]
        return _steps_at(c.spread[mine], np.nan_to_num(c.tokens_spread[mine]), edges)

    def runs() -> tuple[Array, Array, Array]:  # chunks of one request between two edges: many; so once for all
        at = np.searchsorted(edges, c.spread, side="left")
        new = np.flatnonzero(np.append(len(at) > 0, (at[1:] != at[:-1]) | (c.row[1:] != c.row[:-1])))
        if is_alike(c.tokens_spread):
            return c.row[new], at[new], np.diff(np.append(new, len(at))) * float(np.nan_to_num(c.tokens_spread[0]))
        each = np.nan_to_num(c.tokens_spread)
        return c.row[new], at[new], np.add.reduceat(each, new) if len(new) else np.zeros(0)

    row, at, amount = c.memo(("tokens between", edges.tobytes()), runs)
    mine = which[row]
    out: Array = np.cumsum(np.bincount(at[mine], amount[mine], len(edges) + 1), dtype=np.float64)[: len(edges)]
    return out


def _steps_at(times: Array, amounts: Array, edges: Array) -> Array:
    order = np.argsort(times, kind="stable")
    total = np.concatenate(([0.0], np.cumsum(amounts[order])))
    out: Array = total[np.searchsorted(times[order], edges, side="right")]
    return out


def _ramps_at(first: Array, last: Array, amounts: Array, edges: Array) -> Array:
    """Amounts accrued by ``edges`` when each is spread evenly over first … last (ns)."""
    last = np.where(np.isnan(last), first, last)
    point = last <= first
    out = _steps_at(first[point], amounts[point], edges)
    first, last, amounts = first[~point], last[~point], amounts[~point]
    if len(first):
        rate = amounts / (last - first)
        times = np.concatenate((first, last))
        order = np.argsort(times, kind="stable")
        slope = np.cumsum(np.concatenate((rate, -rate))[order])
        total = np.concatenate(([0.0], np.cumsum(slope[:-1] * np.diff(times[order]))))
        out = out + np.interp(edges, times[order], total)
    return out
