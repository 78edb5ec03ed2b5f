"""The request account: every nanosecond of every request in exactly one phase, with how each phase is known.

Per request, from the client's stamps and what the engine says of the request itself; what is not evidenced is
``unknown``, never a guess. What only histograms show exists per point: :func:`point_account`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.analyze.counters import delta, gauge, series
from whywait.analyze.latency import CLOSED, OK, Content, Gaps, content, gaps, origin_ns
from whywait.analyze.stats import Doubt
from whywait.analyze.window import Spans
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


@dataclass(frozen=True)
class _Split:
    """The time from sent to the first token in its parts (int64 ns; ``behind`` is the part of queue behind a
    neighbour's prefill), and what they rest on (bool); the prefill windows of all on one time line, on which each
    request is moved by its ``shift``."""

    network: Array
    prefill: Array
    queue: Array
    has_prefill: Array
    told: Array
    judged: Array
    by_slots: Array
    behind: Array
    overshoot: Array
    windows: Spans
    shift: Array


def account(run: Run, c: Content | None = None) -> RequestAccount:
    """The request account of ``run`` (any number of points); ``c`` is ``content(run)`` when the caller has it.

    Rules (DESIGN 3): client = sent − origin. Network = connect time + smallest round trip, at most the time to the
    first token. Prefill = the engine's own figure. Queue = the engine's own figure; else what is left before the first
    token if the engine was seen full: a ``waiting`` reading above 0 meanwhile, or, where none was read meanwhile, at
    least ``manifest.engine["slots"]`` other requests in flight when it was sent; else the part of it during which
    others were in prefill, if its own prefill began just when one of theirs ended. Decode = last − first less stalls.
    Stall = the part of a gap beyond the request's median gap (for gaps above 1.5 ×) during which another request was
    in prefill; of coalesced chunks only the certain part of a gap counts. All else is unknown.
    """
    line, req = _line(run), run.requests
    g = gaps(content(run) if c is None else c)
    typical = _typical(g, len(req), req["point"])
    wait, decode, after = line.first - line.sent, line.last - line.first, line.end - line.last
    split = _before_first(run, line, np.where(np.isfinite(typical), typical / 2, 0))
    stall, unexplained = _stalls(g, typical, split)
    stall = np.minimum(stall, decode)
    rest = wait - split.network - split.prefill - split.queue
    phases = np.zeros((len(req), len(PHASES)), dtype=np.int64)
    phases[:, CLIENT] = line.sent - line.origin
    phases[:, NETWORK], phases[:, QUEUE], phases[:, PREFILL] = split.network, split.queue, split.prefill
    phases[:, DECODE], phases[:, STALL] = decode - stall, stall
    phases[:, TAIL] = np.where(line.ok, after, 0)
    phases[:, UNKNOWN] = rest + np.where(line.ok, 0, after)
    cause_ns = {
        ("queue", SLOT_LIMIT): np.where(split.by_slots, split.queue - split.behind, 0),
        ("queue", NEIGHBOUR): split.behind,
        ("queue", "unknown"): np.where(split.by_slots, 0, split.queue - split.behind),
        ("stall", NEIGHBOUR): stall,
        ("decode", "unknown"): np.minimum(unexplained, decode - stall),
    }
    point = req["point"]
    evidence = (split.has_prefill, split.told, split.judged)
    how = {int(p): _how(run, point == p, line.has_first, evidence) for p in np.unique(point)}
    causes = {p: _shares(phases, cause_ns, point == p) for p in how}
    doubts = _overshoot(split.overshoot, wait, split.has_prefill)
    return RequestAccount(req["id"], point, phases, line.end - line.origin, how, cause_ns, causes, doubts)


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
    """Mean phases of one point from what the engine says of all requests together, where it says less of each.

    Only phases that no request knows are ``derived``: queue from the histogram ``queue_seconds``, else by Little's law
    (mean number waiting = arrivals per second × mean wait; Little, Oper. Res. 9 (1961) 383) from the ``waiting``
    readings; prefill from ``prefill_seconds``, else from the growth of ``prefill_seconds_total``; decode from
    ``decode_seconds``, which ends in the engine and so leaves a buffering path in ``unknown``.

    Returns:
        ``{"phases": {phase: {"ms": mean per request, "how": …}}, "requests": n, "doubts": […]}`` over the requests that
        have a last token; the phases add up to their mean end − origin. None where requests know queue and prefill
        themselves, or the engine says nothing.
    """
    acc = account(run) if acc is None else acc
    part = acc.point == point
    mine, how = part & ~np.isnan(run.requests["last_ns"]), acc.how.get(point, {})
    means = _engine_means(run, point, how) if mine.any() else {}
    if not means:
        return None
    known = acc.phases[mine].mean(axis=0) / NS_PER_MS
    out: dict[str, dict[str, Any]] = {p: {"ms": float(known[i]), "how": how[p]} for i, p in enumerate(PHASES)}
    out.update({name: {"ms": mean, "how": "derived"} for name, mean in means.items()})
    if "decode" in means:
        out["stall"] = {"ms": 0.0, "how": "unknown"}  # inside the engine's decode time
    inner = ("queue", "prefill", "decode", "stall", "frontend")
    left = available = float(known.sum() - known[CLIENT] - known[NETWORK] - known[TAIL])
    wanted = sum(out[name]["ms"] for name in inner)
    for name in inner:
        out[name]["ms"] = min(out[name]["ms"], left)
        left -= out[name]["ms"]
    out["unknown"]["ms"] = max(left, 0.0)
    doubts: list[Doubt] = []
    if wanted > available * (1 + OVERSHOOT):
        doubts.append(
            {
                "what": "the engine's own figures hold more time than our requests took",
                "why": f"{wanted:.1f} ms per request against {available:.1f} ms seen by the client",
                "next": "look for foreign traffic in the same counters",
            }
        )
    return {"phases": out, "requests": int(mine.sum()), "doubts": doubts}


def _engine_means(run: Run, point: int, how: dict[str, str]) -> dict[str, float]:
    """Mean ms per request of the phases that only the engine's counters and gauges know, where they were read."""
    if how["queue"] != "unknown" and how["prefill"] != "unknown":
        return {}
    row = int(np.flatnonzero(run.points["point"] == point)[0])
    span = (int(run.points["start_ns"][row]), int(run.points["end_ns"][row]))
    part = run.requests["point"] == point
    found = {name: histogram_mean_ms(run, f"{name}_seconds", span) for name in ("queue", "prefill", "decode")}
    sent = int((part & ~np.isnan(run.requests["sent_ns"])).sum())
    begun = int((part & ~np.isnan(run.requests["first_ns"])).sum())
    waiting, spent = gauge(run.readings, "waiting", span), delta(run.readings, "prefill_seconds_total", span)
    if found["queue"] is None and waiting is not None and sent:
        found["queue"] = waiting.mean * (span[1] - span[0]) / sent / NS_PER_MS
    if found["prefill"] is None and spent is not None and begun:
        found["prefill"] = spent.high * NS_PER_S / begun / NS_PER_MS
    return {k: v for k, v in found.items() if v is not None and (k == "decode" or how[k] == "unknown")}


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


def _before_first(run: Run, line: _Line, slack: Array) -> _Split:
    req, wait = run.requests, line.first - line.sent
    network = np.minimum(_ns(req["connect_ns"]) + _ns(req["rtt_ns"]), wait)
    has_prefill = ~np.isnan(req["engine_prefill_ms"]) & line.has_first
    asked = np.where(has_prefill, _ns(req["engine_prefill_ms"] * NS_PER_MS), 0)
    prefill = np.minimum(asked, wait - network)
    rest, begin = wait - network - prefill, line.first - prefill
    # One time line for all replicas: each is shifted clear of the others, so neighbours are of the same replica.
    shift = req["replica"] * (int(line.end.max(initial=0)) + 1)
    windows = Spans.of((begin + shift)[has_prefill], (line.first + shift)[has_prefill])
    full, beyond, judged = _seen_full(run, line, begin)
    told = ~np.isnan(req["engine_queue_ms"])
    overlap = windows.covered(begin + shift) - windows.covered(line.sent + network + shift)
    # A tiny prefill ends as near to its own beginning as a neighbour's does.
    after_one = windows.ends_near(begin + shift, slack) & (prefill > slack)
    behind = np.where(has_prefill & ~beyond & after_one, overlap, 0)
    queue = np.where(full & has_prefill, rest, behind)
    queue = np.where(told, np.minimum(_ns(req["engine_queue_ms"] * NS_PER_MS), rest), queue)
    behind = np.minimum(behind, queue)
    judged = (judged & has_prefill) | (behind > 0)
    # Of requests sent at about the same time nobody knows which came first: what tells is how many were there as it
    # waited.
    slots = run.manifest.engine.get("slots")
    crowd = _in_flight_at(line, (line.sent + begin) // 2, shift) > (np.inf if slots is None else slots)
    over = asked - (wait - network)
    return _Split(
        network, prefill, queue, has_prefill, told, judged, beyond | (full & crowd), behind, over, windows, shift
    )


def _in_flight_at(line: _Line, t: Array, shift: Array) -> Array:
    sent, end = np.sort(line.sent + shift), np.sort(line.end + shift)
    found: Array = np.searchsorted(sent, t + shift, "right") - np.searchsorted(end, t + shift, "right")
    return found


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


def _stalls(g: Gaps, typical: Array, split: _Split) -> tuple[Array, Array]:
    """Per request (int64 ns): excess of long gaps during a neighbour's prefill, and the excess with no such witness."""
    usual = typical[g.row]
    excess = np.where(g.low > STALL_FACTOR * usual, g.low - usual, 0.0)
    long = np.flatnonzero(excess >= 1)
    row, excess = g.row[long], np.floor(excess[long]).astype(np.int64)
    begin = np.rint(g.begin_ns[long]).astype(np.int64) + split.shift[row]
    covered = split.windows.covered
    overlap = covered(begin + np.rint(g.low[long]).astype(np.int64)) - covered(begin)
    stalled = np.minimum(excess, overlap)
    stall, rest = np.zeros(len(typical), dtype=np.int64), np.zeros(len(typical), dtype=np.int64)
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
