"""The request account: every nanosecond of every request in exactly one phase, with how each phase is known.

Per request, from the client's stamps and what the engine says of the request itself; what is not evidenced is
``unknown``, never a guess. What only histograms show exists per point: :func:`point_account`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.analyze.counters import delta, series
from whywait.analyze.latency import CLOSED, OK, Content, Gaps, content, gaps, origin_ns
from whywait.analyze.stats import Doubt
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.units import NS_PER_MS, NS_PER_S

PHASES = ("client", "network", "frontend", "queue", "prefill", "decode", "stall", "tail", "unknown")
CLIENT, NETWORK, FRONTEND, QUEUE, PREFILL, DECODE, STALL, TAIL, UNKNOWN = range(len(PHASES))
SLOT_LIMIT, NEIGHBOUR = "slot limit", "neighbour's prefill"
STALL_FACTOR = 1.5  # a gap beyond this multiple of the typical one is looked at
OVERSHOOT = 0.05  # the engine's prefill may exceed the client's TTFT by this share of it before it is a doubt
_NEVER = OUTCOMES.index("never_sent")
_MIN_GAPS = 8  # fewer gaps than this do not say what is typical of a request; the point's median does


@dataclass(frozen=True)
class RequestAccount:
    """The account of every request of a Run, in its order.

    ``phases`` is int64 nanoseconds (requests × ``PHASES``); its rows add up to ``total_ns``: end − origin, which for an
    ``ok`` request is end-to-end (last − origin) plus ``tail``. ``how[point][phase]`` is measured, inferred or unknown
    (:func:`point_account` adds derived). ``cause_ns[phase, cause]`` is int64 (requests,), the part of a phase that has
    that cause; ``causes[point][phase][cause]`` the same as a share of the phase's time in the point.
    """

    ids: Array
    point: Array
    phases: Array
    total_ns: Array
    how: dict[int, dict[str, str]]
    cause_ns: dict[tuple[str, str], Array]
    causes: dict[int, dict[str, dict[str, float]]]
    doubts: list[Doubt]


@dataclass(frozen=True)
class _Line:
    """The stamps of each request as an ordered int64 line (ns) that holds even where stamps are missing or disagree."""

    origin: Array
    sent: Array
    first: Array
    last: Array
    end: Array
    has_first: Array
    ok: Array


def account(run: Run, c: Content | None = None) -> RequestAccount:
    """The request account of ``run`` (any number of points); ``c`` is ``content(run)`` when the caller has it.

    Rules (DESIGN 3): client = sent − origin. Network = connect time + smallest round trip, at most the time to the
    first token. Prefill = the engine's own figure. Queue = the engine's own figure; else what is left before the first
    token if the engine was seen full: a ``waiting`` reading above 0 meanwhile, or, where none was read meanwhile, at
    least ``manifest.engine["slots"]`` other requests in flight when it was sent. Decode = last − first less stalls.
    Stall = the part of a gap beyond the request's median gap (for gaps above 1.5 ×) during which another request was
    in prefill; of coalesced chunks only the certain part of a gap counts. All else is unknown.
    """
    line = _line(run)
    phases = np.zeros((len(line.end), len(PHASES)), dtype=np.int64)
    client = line.sent - line.origin
    phases[:, CLIENT] = client
    wait = line.first - line.sent
    network = np.minimum(_ns(run.requests["connect_ns"]) + _ns(run.requests["rtt_ns"]), wait)
    phases[:, NETWORK] = network
    said = run.requests["engine_prefill_ms"]
    has_prefill = ~np.isnan(said) & line.has_first
    asked = np.where(has_prefill, _ns(said * NS_PER_MS), 0)
    prefill = np.minimum(asked, wait - network)
    phases[:, PREFILL] = prefill
    rest = wait - network - prefill
    full, slots, judged = _seen_full(run, line, line.first - prefill)
    told = ~np.isnan(run.requests["engine_queue_ms"])
    queue = np.where(full & has_prefill, rest, 0)
    queue = np.where(told, np.minimum(_ns(run.requests["engine_queue_ms"] * NS_PER_MS), rest), queue)
    phases[:, QUEUE] = queue
    decode = line.last - line.first
    stall, unexplained = _stalls(run, line, np.where(has_prefill, prefill, -1), content(run) if c is None else c)
    phases[:, STALL] = np.minimum(stall, decode)
    phases[:, DECODE] = decode - phases[:, STALL]
    after = line.end - line.last
    phases[:, TAIL] = np.where(line.ok, after, 0)
    phases[:, UNKNOWN] = rest - queue + np.where(line.ok, 0, after)
    cause_ns = {
        ("queue", SLOT_LIMIT): np.where(slots, queue, 0),
        ("queue", "unknown"): np.where(slots, 0, queue),
        ("stall", NEIGHBOUR): phases[:, STALL].copy(),
        ("decode", "unknown"): np.minimum(unexplained, phases[:, DECODE]),
    }
    point = run.requests["point"]
    judged &= has_prefill
    how = {int(p): _how(run, point == p, line.has_first, (has_prefill, told, judged)) for p in np.unique(point)}
    causes = {p: _shares(phases, cause_ns, point == p) for p in how}
    doubts = _overshoot(asked - (wait - network), wait, has_prefill)
    return RequestAccount(run.requests["id"], point, phases, line.end - line.origin, how, cause_ns, causes, doubts)


def prefill_windows(run: Run) -> tuple[Array, Array]:
    """When each request was in prefill (start, end; ns, float64, NaN where the engine does not say): it ends with the
    first token, lasts what the engine reports and does not begin before the request was sent."""
    first = run.requests["first_ns"]
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


def point_account(run: Run, point: int, acc: RequestAccount | None = None) -> dict[str, Any] | None:
    """Mean phases of one point where the engine has only histograms (``*_seconds_sum`` and ``_count`` readings).

    Returns:
        ``{"phases": {phase: {"ms": mean per request, "how": …}}, "requests": n, "doubts": […]}`` over the requests that
        have a last token; the phases add up to their mean end − origin. Queue, prefill and decode are ``derived``
        from the growth of the histograms' sums over the point. None where the engine has no such histogram.
    """
    part = run.requests["point"] == point
    acc = account(run) if acc is None else acc
    mine = part & ~np.isnan(run.requests["last_ns"])
    row = int(np.flatnonzero(run.points["point"] == point)[0])
    span = (int(run.points["start_ns"][row]), int(run.points["end_ns"][row]))
    means = {name: histogram_mean_ms(run, f"{name}_seconds", span) for name in ("queue", "prefill", "decode")}
    if all(v is None for v in means.values()) or not mine.any():
        return None
    known = acc.phases[mine].mean(axis=0) / NS_PER_MS
    left = float(known.sum() - known[CLIENT] - known[NETWORK] - known[TAIL])
    available = left
    out: dict[str, dict[str, Any]] = {
        p: {"ms": float(known[i]), "how": acc.how[point][p]} for i, p in enumerate(PHASES)
    }
    if means["decode"] is not None:
        out["stall"] = {"ms": 0.0, "how": "unknown"}  # inside the engine's decode time
    for name in ("queue", "prefill", "decode", "stall", "frontend"):
        if name in means and (means[name] is not None or name != "decode"):
            mean = means[name]
            out[name] = {"ms": mean or 0.0, "how": "unknown" if mean is None else "derived"}
        out[name]["ms"] = min(out[name]["ms"], left)
        left -= out[name]["ms"]
    out["unknown"] = {"ms": max(left, 0.0), "how": "unknown"}
    engine = sum(v for v in means.values() if v is not None)
    doubts: list[Doubt] = []
    if engine > available * (1 + OVERSHOOT):
        doubts.append(
            {
                "what": f"point {point}: the engine's histograms hold more time than our requests took",
                "why": f"{engine:.1f} ms per request against {available:.1f} ms seen by the client",
                "next": "look for foreign traffic in the same histograms",
            }
        )
    return {"phases": out, "requests": int(mine.sum()), "doubts": doubts}


def histogram_mean_ms(run: Run, name: str, span: tuple[int, int]) -> float | None:
    """Mean (ms) of what a histogram of seconds took in around ``span`` (ns); None without its sum and count."""
    # From the last reading before the point to the first after it: sum and count are read together, so both are whole.
    total, count = delta(run.readings, f"{name}_sum", span), delta(run.readings, f"{name}_count", span)
    if total is None or count is None or count.high <= 0:
        return None
    return total.high / count.high * NS_PER_S / NS_PER_MS


def _line(run: Run) -> _Line:
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
    return _Line(i[0], i[1], i[2], i[3], i[4], has_first, req["outcome"] == OK)


def _seen_full(run: Run, line: _Line, until: Array) -> tuple[Array, Array, Array]:
    """Which requests waited while the engine was seen full, which of them were sent beyond its slots, and of which
    there is evidence either way (bool each)."""
    slots = run.manifest.engine.get("slots")
    beyond = np.zeros(len(until), dtype=bool) if slots is None else others_in_flight(run) >= int(slots)
    asked, positive = waiting_seen(run)
    counted = np.full(len(until), slots is not None)
    if not len(asked):
        return beyond, beyond, counted
    before = np.concatenate(([0], np.cumsum(positive)))
    a, b = np.searchsorted(asked, line.sent, side="left"), np.searchsorted(asked, until, side="right")
    read = b > a
    seen = read & (before[np.maximum(a, b)] > before[a])
    # Readings of the very interval outrank the count of requests: in flight is not the same as in the engine.
    full = np.where(read, seen, beyond)
    return full, beyond & full, counted | read


def waiting_seen(run: Run) -> tuple[Array, Array]:
    """Times (ns, ascending) of the ``waiting`` readings of all replicas, and whether each was above 0."""
    found = series(run.readings, "waiting")
    if not found:
        return np.zeros(0), np.zeros(0, dtype=bool)
    asked = np.concatenate([f.asked_ns for f in found])
    order = np.argsort(asked, kind="stable")
    return asked[order], np.concatenate([f.values for f in found])[order] > 0


def _stalls(run: Run, line: _Line, prefill: Array, c: Content) -> tuple[Array, Array]:
    """Per request (int64 ns): excess of long gaps during a neighbour's prefill, and the excess with no such witness."""
    g = gaps(c)
    n = len(prefill)
    typical = _typical(g, n, run.requests["point"])[g.row]
    excess = np.where(g.low > STALL_FACTOR * typical, g.low - typical, 0.0)
    long = np.flatnonzero(excess >= 1)
    row, excess = g.row[long], np.floor(excess[long]).astype(np.int64)
    has = prefill >= 0
    # One time line for all replicas: each is shifted clear of the others, so neighbours are of the same replica.
    shift = run.requests["replica"] * (int(line.end.max(initial=0)) + 1)
    starts, ends = _merged((line.first - prefill + shift)[has], (line.first + shift)[has])
    covered = np.concatenate(([0], np.cumsum(ends - starts)))

    def coverage(t: Array) -> Array:
        i = np.searchsorted(starts, t, side="right")
        into = np.minimum(t - starts[i - 1], (ends - starts)[i - 1]) if len(starts) else np.zeros_like(t)
        out: Array = np.where(i > 0, covered[np.maximum(i - 1, 0)] + into, 0)
        return out

    begin = np.rint(g.begin_ns[long]).astype(np.int64) + shift[row]
    overlap = coverage(begin + np.rint(g.low[long]).astype(np.int64)) - coverage(begin)
    stalled = np.minimum(excess, overlap)
    stall, rest = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    np.add.at(stall, row, stalled)
    np.add.at(rest, row, excess - stalled)
    return stall, rest


def _typical(g: Gaps, n: int, point: Array) -> Array:
    """The median gap of each request (ns; of its point where it has few gaps; infinite where there is none)."""
    own, count = _group_median(g.value, g.row, n)
    _, number = np.unique(point, return_inverse=True)
    number = number.ravel()
    whole, some = _group_median(g.value, number[g.row], int(number.max(initial=-1)) + 1)
    of_point = np.where(some > 0, whole, np.inf)[number]
    out: Array = np.where(count >= _MIN_GAPS, own, of_point)
    return out


def _group_median(values: Array, group: Array, n: int) -> tuple[Array, Array]:
    order = np.lexsort((values, group))
    count = np.bincount(group, minlength=n)
    start = np.cumsum(count) - count
    out = np.full(n, np.nan)
    some = count > 0
    out[some] = values[order][(start + (count - 1) // 2)[some]]
    return out, count


def _merged(starts: Array, ends: Array) -> tuple[Array, Array]:
    """The union of intervals as disjoint ones, ascending."""
    order = np.argsort(starts, kind="stable")
    s, e = starts[order], np.maximum.accumulate(ends[order]) if len(ends) else ends
    fresh = np.ones(len(s), dtype=bool)
    fresh[1:] = s[1:] > e[:-1]
    return s[fresh], e[np.append(fresh[1:], True)] if len(e) else e


def _how(run: Run, part: Array, has_first: Array, evidence: tuple[Array, Array, Array]) -> dict[str, str]:
    req = run.requests
    prefill, told, judged = (bool(e[part].any()) for e in evidence)
    mode = run.points["mode"][run.points["point"] == req["point"][part][0]]
    late_known = bool((mode == CLOSED).any()) or not np.isnan(req["due_ns"][part]).all()
    path = ~np.isnan(req["rtt_ns"][part]) | (req["connect_ns"][part] > 0)
    tokens = "measured" if has_first[part].any() else "unknown"
    return {
        "client": "measured" if late_known else "unknown",
        "network": "measured" if path.any() else "unknown",
        "frontend": "unknown",
        "queue": "measured" if told else "inferred" if judged else "unknown",
        "prefill": "measured" if prefill else "unknown",
        "decode": tokens,
        "stall": "inferred" if prefill and len(run.chunks) else "unknown",
        "tail": tokens,
        "unknown": "unknown",
    }


def _shares(phases: Array, cause_ns: dict[tuple[str, str], Array], part: Array) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    for (phase, cause), ns in cause_ns.items():
        total, mine = int(phases[part, PHASES.index(phase)].sum()), int(ns[part].sum())
        if mine:
            out.setdefault(phase, {})[cause] = mine / total
    return out


def _overshoot(over: Array, wait: Array, has: Array) -> list[Doubt]:
    bad = has & (over > OVERSHOOT * wait)
    if not bad.any():
        return []
    return [
        {
            "what": f"prefill of {int(bad.sum())} of {int(has.sum())} requests was cut to fit",
            "why": "the engine reports more prefill time than the client waited for the first token",
            "next": "check the clocks, and whether the engine's prefill figure includes other work",
        }
    ]


def _ns(values: Array) -> Array:
    out: Array = np.rint(np.maximum(np.nan_to_num(values), 0)).astype(np.int64)
    return out
