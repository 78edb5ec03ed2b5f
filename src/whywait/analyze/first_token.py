"""The time from sent to the first token of each request, in its parts, and what each part rests on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whywait.analyze.counters import series
from whywait.analyze.latency import OK, origin_ns
from whywait.analyze.window import Spans
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run, laid_out
from whywait.core.table import Array
from whywait.units import NS_PER_MS

KV_FULL = 0.95  # KV space in use from which a request that waits may be waiting for it
HELD_SHARE, HELD_NS = 0.15, 20 * NS_PER_MS  # less than this is no held-back stream but the frontend or two clocks
_NEVER = OUTCOMES.index("never_sent")


@dataclass(frozen=True)
class Line:
    """The stamps of each request as an ordered int64 line (ns) that holds even where stamps are missing or disagree.

    One time line for all replicas: each is moved by a ``shift`` clear of the others, so that neighbours are of one."""

    origin: Array
    sent: Array
    first: Array
    last: Array
    end: Array
    has_first: Array
    ok: Array
    shift: Array


@dataclass(frozen=True)
class Split:
    """The time from sent to the first token in its parts (int64 ns), and what they rest on (bool).

    ``behind`` is the part of queue behind a neighbour's prefill; ``held`` the part in which tokens were made but held
    back on their way; ``moved`` that in which the KV went from one engine to another. ``told``: the engine's own queue
    time; ``judged``: evidence for or against a queue; ``fronted``:
    evidence of the frontend. ``windows`` are the prefills that the engine reports, ``guessed`` those between sent and
    first token of requests of which it reports none, all on one time line on which a request is moved by its ``shift``
    (a replica has its own stretch).
    """

    network: Array
    frontend: Array
    queue: Array
    prefill: Array
    held: Array
    moved: Array
    has_prefill: Array
    told: Array
    judged: Array
    fronted: Array
    by_slots: Array
    behind: Array
    overshoot: Array
    windows: Spans
    guessed: Spans
    shift: Array


def line_of(run: Run) -> Line:
    """The ordered stamps of every request of ``run``."""
    req = run.requests
    origin, sent, first, last, end = origin_ns(run), req["sent_ns"], req["first_ns"], req["last_ns"], req["end_ns"]
    # Not streamed: where the engine reports its decode time, that is the end of the response.
    decode = np.where((req["outcome"] == OK) & np.isnan(last), req["engine_decode_ms"] * NS_PER_MS, np.nan)
    first = np.where(np.isnan(first), end - decode, first)
    last = np.where(np.isnan(last), np.where(np.isnan(decode), last, end), last)
    known = np.stack([origin, sent, first, last, end])
    latest = np.where(np.isnan(known), -np.inf, known).max(axis=0, initial=-np.inf)
    stop = np.where(np.isnan(end), np.where(np.isfinite(latest), latest, 0.0), end)
    begin = np.where(np.isnan(origin), np.where(np.isnan(sent), stop, sent), origin)
    stop = np.maximum(stop, begin)
    # A request that was never sent waited in the client all along; another without the stamp gives no lateness.
    unsent = np.where(req["outcome"] == _NEVER, stop, begin)
    has_first = ~np.isnan(first)
    a = np.clip(np.where(np.isnan(sent), unsent, sent), begin, stop)
    b = np.clip(np.where(has_first, first, np.where(np.isnan(last), stop, last)), a, stop)
    z = np.clip(np.where(np.isnan(last), b, last), b, stop)
    i = [np.rint(v).astype(np.int64) for v in (begin, a, b, z, stop)]
    shift = req["replica"] * (int(i[4].max(initial=0)) + 1)
    return Line(i[0], i[1], i[2], i[3], i[4], has_first, req["outcome"] == OK, shift)


def before_first(run: Run, line: Line, slack: Array) -> Split:
    """The parts of the wait for the first token; ``slack`` (ns per request) is how near two events of one engine step
    lie at least. Rules in ``phases.account``."""
    req, wait = run.requests, line.first - line.sent
    network = np.minimum(_ns(req["connect_ns"]) + _ns(req["rtt_ns"]), wait)
    has_prefill = ~np.isnan(req["engine_prefill_ms"]) & line.has_first
    asked = np.where(has_prefill, _ns(req["engine_prefill_ms"] * NS_PER_MS), 0)
    prefill = np.minimum(asked, wait - network)
    told = ~np.isnan(req["engine_queue_ms"])
    rest = wait - network - prefill
    said = np.where(told, np.minimum(_ns(req["engine_queue_ms"] * NS_PER_MS), rest), 0)
    moved = _moved(run, rest - said)
    held = np.minimum(_held(run, line), rest - said - moved)
    rest, begin = rest - held - moved, line.first - held - moved - prefill
    shift = line.shift
    # What was computed by a prefill engine held nobody up that was with a decode engine.
    one = np.isnan(req["engine_handover_ms"])
    windows = Spans.of((begin + shift)[has_prefill & one], (line.first - held + shift)[has_prefill & one])
    unsaid = line.has_first & np.isnan(req["engine_prefill_ms"]) & one
    guessed = Spans.of((line.sent + network + shift)[unsaid], (line.first + shift)[unsaid])
    full, beyond, judged = _seen_full(run, line, begin)
    overlap = windows.covered(begin + shift) - windows.covered(line.sent + network + shift)
    # A tiny prefill ends as near to its own beginning as a neighbour's does.
    after_one = windows.ends_near(begin + shift, slack) & (prefill > slack)
    behind = np.where(has_prefill & ~beyond & after_one, overlap, 0)
    queue = np.where(full & has_prefill, rest, behind)
    queue = np.where(told, said, queue)
    behind = np.where(told & ~one, queue, np.minimum(behind, queue))  # a prefill engine works on nothing else
    judged = (judged & has_prefill) | (behind > 0)
    frontend, fronted = _frontend(run, wait - network - held - moved, rest - queue, told & has_prefill)
    # Of requests sent at about the same time nobody knows which came first: what tells is how many were there as it
    # waited.
    slots = run.manifest.engine.get("slots")
    crowd = _in_flight_at(line, (line.sent + begin) // 2, shift) > (np.inf if slots is None else slots)
    by_slots, over = beyond | (full & crowd), asked - (wait - network)
    return Split(network, frontend, queue, prefill, held, moved, has_prefill, told, judged, fronted, by_slots, behind,
                 over, windows, guessed, shift)  # fmt: skip


def _held(run: Run, line: Line) -> Array:
    """How long the first token was held back after it was made (int64 ns): the engine's decode is longer than ours.

    Both are durations, so no clock is compared. What buffers on the way delays the first token and not the last.
    """
    decode = run.requests["engine_decode_ms"] * NS_PER_MS
    streamed = line.has_first & ~np.isnan(run.requests["last_ns"]) & ~np.isnan(run.requests["first_ns"])
    excess = np.where(streamed, decode - (line.last - line.first), 0.0)
    return _ns(np.where(excess > np.maximum(HELD_SHARE * decode, HELD_NS), excess, 0.0))


def _moved(run: Run, rest: Array) -> Array:
    """The hand-over between engines, where it lies before the first token (int64 ns): if the service's own time to
    first token has room for it beside queue and prefill; else, if that is not told, the wait (``rest`` of it)."""
    req = run.requests
    took = _ns(req["engine_handover_ms"] * NS_PER_MS)
    own = _ns((req["engine_ttft_ms"] - np.nan_to_num(req["engine_queue_ms"]) - req["engine_prefill_ms"]) * NS_PER_MS)
    room = np.where(np.isnan(req["engine_ttft_ms"]), rest, own)
    return np.where(took <= 2 * room, np.minimum(took, rest), 0)


def _frontend(run: Run, at_engine: Array, left: Array, staged: Array) -> tuple[Array, Array]:
    """Time in which neither the path nor the engine's core had the request (int64 ns), and where that can be said.

    ``left`` is what queue and prefill leave. Where the engine tells both (``staged``) all of it; where it tells its
    time to first token, what is beyond that. A round trip must be known: it is what the path explains.
    """
    req = run.requests
    path = ~np.isnan(req["rtt_ns"])
    ttft = req["engine_ttft_ms"] * NS_PER_MS
    outside = np.where(np.isnan(ttft), 0, np.clip(at_engine - _ns(ttft), 0, left))
    found = np.where(staged, left, outside)
    fronted = path & (staged | ~np.isnan(ttft))
    return np.where(fronted, found, 0), fronted


def prefill_windows(run: Run) -> tuple[Array, Array]:
    """When each request was in prefill (start, end; ns, float64, NaN where the engine does not say): it ends with the
    first token (with the hand-over that came after it, if that came before the first token), lasts what the engine
    reports and does not begin before the request was sent."""
    first, sent = run.requests["first_ns"], run.requests["sent_ns"]
    asked = np.nan_to_num(run.requests["engine_prefill_ms"]) * NS_PER_MS
    moved = _moved(run, _ns(first - sent - asked))
    first = first - moved
    took = np.rint(run.requests["engine_prefill_ms"] * NS_PER_MS)
    return np.minimum(np.fmax(first - took, run.requests["sent_ns"]), first), np.where(np.isnan(took), np.nan, first)


def others_in_flight(run: Run) -> Array:
    """How many other requests to the same replica were in flight when each was sent (int64; −1 if it never was).

    Sweep line over sent → end; of requests sent at the same instant the earlier row counts for the later ones.
    """
    sent, end, replica = run.requests["sent_ns"], run.requests["end_ns"], run.requests["replica"]
    out = np.full(len(sent), -1, dtype=np.int64)
    for r in np.unique(replica):
        rows = np.flatnonzero((replica == r) & ~np.isnan(sent))
        rows = rows[np.argsort(sent[rows], kind="stable")]
        # One without an end never left; one that ended before it was sent (a broken Run) was never there.
        ends = np.sort(np.fmax(np.where(np.isnan(end[rows]), np.inf, end[rows]), sent[rows]))
        out[rows] = np.maximum(np.arange(len(rows)) - np.searchsorted(ends, sent[rows], side="right"), 0)
    return out


def waiting_seen(run: Run) -> tuple[Array, Array]:
    """Times (ns, ascending) of the ``waiting`` readings of all replicas, and whether each was above 0."""
    found = series(run.readings, "waiting")
    if not found:
        return np.zeros(0), np.zeros(0, dtype=bool)
    asked = np.concatenate([f.asked_ns for f in found])
    order = np.argsort(asked, kind="stable")
    return asked[order], np.concatenate([f.values for f in found])[order] > 0


def kv_full_seen(run: Run, line: Line, until: Array) -> Array:
    """Which requests waited while the KV space of any replica was read as full (bool; ``until`` in ns)."""
    found = series(run.readings, "kv_use")
    if not found:
        return np.zeros(len(until), dtype=bool)
    full = np.sort(np.concatenate([f.asked_ns[f.values >= KV_FULL] for f in found]))
    out: Array = np.searchsorted(full, until, "right") > np.searchsorted(full, line.sent, "left")
    return out


def _in_flight_at(line: Line, t: Array, shift: Array) -> Array:
    sent, end = np.sort(line.sent + shift), np.sort(line.end + shift)
    found: Array = np.searchsorted(sent, t + shift, "right") - np.searchsorted(end, t + shift, "right")
    return found


def _seen_full(run: Run, line: Line, until: Array) -> tuple[Array, Array, Array]:
    """Which requests waited while the engine was seen full, which of them were sent beyond its slots, and of which
    there is evidence either way (bool each)."""
    slots = run.manifest.engine.get("slots")
    placed = ~np.isin(run.requests["point"], laid_out(run))
    beyond = np.zeros(len(until), dtype=bool) if slots is None else (others_in_flight(run) >= int(slots)) & placed
    asked, positive = waiting_seen(run)
    counted = placed & (slots is not None)
    if not len(asked):
        return beyond, beyond, counted
    before = np.concatenate(([0], np.cumsum(positive)))
    a, b = np.searchsorted(asked, line.sent, side="left"), np.searchsorted(asked, until, side="right")
    read = b > a
    seen = read & (before[np.maximum(a, b)] > before[a])
    # Readings of the very interval outrank the count of requests: in flight is not the same as in the engine.
    full = np.where(read, seen, beyond)
    return full, beyond & full, counted | read


def _ns(values: Array) -> Array:
    out: Array = np.rint(np.maximum(np.nan_to_num(values), 0)).astype(np.int64)
    return out
