"""The request account: every nanosecond of every request in exactly one phase, with how each phase is known.

Per request, from the client's stamps and what the engine says of the request itself; what is not evidenced is
``unknown``, never a guess. What only histograms show exists per point: :func:`point_account`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whywait.analyze.counters import delta, gauge
from whywait.analyze.first_token import Line, Split, before_first, kv_full_seen, line_of
from whywait.analyze.frontend import frontend_causes, frontend_ms
from whywait.analyze.latency import CLOSED
from whywait.analyze.stalls import NEIGHBOUR, Stalls, stalls, survey
from whywait.analyze.stats import Doubt
from whywait.analyze.streams import Content
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.units import NS_PER_MS, NS_PER_S

PHASES = ("client", "network", "frontend", "queue", "prefill", "decode", "stall", "tail", "unknown")
CLIENT, NETWORK, FRONTEND, QUEUE, PREFILL, DECODE, STALL, TAIL, UNKNOWN = range(len(PHASES))
SLOT_LIMIT, KV_SPACE, BUFFERING, SPECULATION = "slot limit", "kv space", "buffering", "rejected speculation"
INTERCONNECT = "interconnect"  # as a cause of stall: the KV is on its way between engines
CHANCE = 0.8  # prefills that cover this share of decode explain every gap and so none
OVERSHOOT = 0.05  # the engine's prefill may exceed the client's TTFT by this share of it before it is a doubt


@dataclass(frozen=True)
class RequestAccount:
    """The account of every request of a Run, in its order.

    ``phases`` is int64 nanoseconds (requests × ``PHASES``); its rows add up to ``total_ns``: end − origin, which for an
    ``ok`` request is end-to-end (last − origin) plus ``tail``. ``how[point][phase]`` is measured, inferred or unknown
    (:func:`point_account` adds derived). ``cause_ns[phase, cause]`` is int64 (requests,), the part of a phase that has
    that cause; ``causes[point][phase][cause]`` the same as a share of the phase's time in the point. What a phase rests
    on is in words in ``evidence[point][phase]``, where that needs words.
    """

    ids: Array
    point: Array
    phases: Array
    total_ns: Array
    how: dict[int, dict[str, str]]
    cause_ns: dict[tuple[str, str], Array]
    causes: dict[int, dict[str, dict[str, float]]]
    doubts: list[Doubt]
    evidence: dict[int, dict[str, str]] = field(default_factory=dict)


def account(run: Run, c: Content | None = None) -> RequestAccount:
    """The request account of ``run`` (any number of points); ``c`` is ``content(run)`` when the caller has it.

    Rules (DESIGN 3): client = sent − origin. Network = connect time + smallest round trip, at most the time to the
    first token. Prefill = the engine's own figure. Queue = the engine's own figure; else what is left before the first
    token if the engine was seen full: a ``waiting`` reading above 0 meanwhile, or, where none was read meanwhile, at
    least ``manifest.engine["slots"]`` other requests in flight when it was sent; else the part of it during which
    others were in prefill, if its own prefill began just when one of theirs ended. Frontend = what the engine's own
    stages (queue and prefill, or its time to first token) and the path leave of the wait. Decode = last − first less
    stalls; a first token that was held back on its way had decode behind it (cause *buffering*). Stall = the part of a
    gap beyond the request's median gap (for gaps above 1.5 ×) whose cause was seen (``stalls.stalls``); of coalesced
    chunks only the certain part of a gap counts; and the time in which a split service handed the KV over (cause
    *interconnect*), before the first token or after it, whichever engine makes that. All else is unknown.
    """
    return run.memo("account", lambda: _account(run, c))


def _account(run: Run, c: Content | None) -> RequestAccount:
    line, req, point = line_of(run), run.requests, run.requests["point"]
    typical, long = survey(run, line, c)
    wait, decode, after = line.first - line.sent, line.last - line.first, line.end - line.last
    split = before_first(run, line, np.where(np.isfinite(typical), typical / 2, 0))
    found = stalls(run, long, (line, split))
    later = _moved_later(run, split, decode)
    by, left = {}, decode - later
    for cause, ns in found.by.items():
        by[cause] = np.minimum(ns, left)
        left = left - by[cause]
    rest = wait - split.network - split.frontend - split.queue - split.prefill - split.held - split.moved
    phases = np.zeros((len(req), len(PHASES)), dtype=np.int64)
    phases[:, CLIENT] = line.sent - line.origin
    phases[:, NETWORK], phases[:, FRONTEND] = split.network, split.frontend
    phases[:, QUEUE], phases[:, PREFILL] = split.queue, split.prefill
    phases[:, DECODE], phases[:, STALL] = left + split.held, decode - left + split.moved
    phases[:, TAIL] = np.where(line.ok, after, 0)
    phases[:, UNKNOWN] = rest + np.where(line.ok, 0, after)
    unexplained = np.minimum(np.maximum(found.rest - later, 0), left)
    other = np.where(split.by_slots, 0, split.queue - split.behind)
    full = kv_full_seen(run, line, line.first - split.prefill)
    cause_ns = {
        ("queue", SLOT_LIMIT): np.where(split.by_slots, split.queue - split.behind, 0),
        ("queue", NEIGHBOUR): split.behind,
        ("queue", KV_SPACE): np.where(full, other, 0),
        ("queue", "unknown"): np.where(full, 0, other),
        **{("stall", cause): ns for cause, ns in by.items()},
        ("stall", INTERCONNECT): split.moved + later,
        ("decode", "unknown"): unexplained,
        ("decode", BUFFERING): split.held,
        ("decode", SPECULATION): _rejected(run, left - unexplained),
        **{("frontend", cause): ns for cause, ns in frontend_causes(run, line, split).items()},
    }
    how = {int(p): _how(run, point == p, line, split, found) for p in np.unique(point)}
    causes = {p: _shares(phases, cause_ns, point == p) for p in how}
    evidence = {p: _evidence(run, point == p, line, split, found) for p in how}
    doubts = _overshoot(split.overshoot, wait, split.has_prefill) + _chance(line, split, by.get(NEIGHBOUR))
    return RequestAccount(req["id"], point, phases, line.end - line.origin, how, cause_ns, causes, doubts, evidence)


def _moved_later(run: Run, split: Split, decode: Array) -> Array:
    """The hand-over of a request whose prefill engine made the first token, so after it (int64 ns)."""
    took = np.nan_to_num(run.requests["engine_handover_ms"]) * NS_PER_MS
    found: Array = np.where(split.moved > 0, 0, np.minimum(np.rint(took).astype(np.int64), decode))
    return found


def _rejected(run: Run, decode: Array) -> Array:
    """The part of ``decode`` spent on proposed tokens that were rejected, at most (int64 ns; 0 where none are counted).

    A round checks the token it would have made anyway and those proposed; with T proposed in D rounds and A of them
    accepted, (T − A) / (T + D) of the positions computed were for nothing. Where a step costs the same whatever its
    width (weights read once), the true loss is less.
    """
    out = np.zeros(len(decode), dtype=np.int64)
    for number, start, end in zip(*(run.points[k].tolist() for k in ("point", "start_ns", "end_ns")), strict=True):
        names = ("draft_tokens_total", "accepted_tokens_total", "draft_rounds_total")
        tokens, accepted, rounds = (delta(run.readings, n, (int(start), int(end))) for n in names)
        if tokens is None or accepted is None or rounds is None or tokens.value <= 0:
            continue
        share = max(tokens.value - accepted.value, 0.0) / (tokens.value + rounds.value)
        mine = run.requests["point"] == number
        out[mine] = np.floor(decode[mine] * min(share, 1.0)).astype(np.int64)
    return out


def point_account(run: Run, point: int, acc: RequestAccount | None = None) -> dict[str, Any] | None:
    """Mean phases of one point from what the engine says of all requests together, where it says less of each.

    Only phases that no request knows are ``derived``: queue from the histogram ``queue_seconds``, else by Little's law
    (mean number waiting = arrivals per second × mean wait; Little, Oper. Res. 9 (1961) 383) from the ``waiting``
    readings; prefill from ``prefill_seconds``, else from the growth of ``prefill_seconds_total``; decode from
    ``decode_seconds``, which ends in the engine and so leaves a buffering path in ``unknown``; frontend from what the
    queue and prefill histograms, else that of the engine's own TTFT, leave of the client's (``frontend.frontend_ms``).

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
    if "decode" in means:  # the engine's decode time holds its stalls; what the gaps show of them is taken out
        out["stall"]["ms"] = min(out["stall"]["ms"], means["decode"])
        out["decode"]["ms"] -= out["stall"]["ms"]
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
    waiting, spent = gauge(run.readings, "waiting", span), delta(run.readings, "prefill_seconds_total", span)
    mine = part & ~np.isnan(run.requests["first_ns"])
    stages = None if found["queue"] is None or found["prefill"] is None else found["queue"] + found["prefill"]
    if how["frontend"] == "unknown":
        found["frontend"] = frontend_ms(run, mine, stages, histogram_mean_ms(run, "ttft_seconds", span))
    if found["queue"] is None and waiting is not None and sent:
        found["queue"] = waiting.mean * (span[1] - span[0]) / sent / NS_PER_MS
    # Of the requests that began to answer while the counter was read: its source may have fallen silent midway.
    begun = 0 if spent is None else int((mine & spent.covers(run.requests["first_ns"])).sum())
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


def _how(run: Run, part: Array, line: Line, split: Split, found: Stalls) -> dict[str, str]:
    req = run.requests
    prefill, told, judged = (bool(e[part].any()) for e in (split.has_prefill, split.told, split.judged))
    mode = run.points["mode"][run.points["point"] == req["point"][part][0]]
    late_known = bool((mode == CLOSED).any()) or not np.isnan(req["due_ns"][part]).all()
    path = ~np.isnan(req["rtt_ns"][part]) | (req["connect_ns"][part] > 0)
    tokens = "measured" if line.has_first[part].any() else "unknown"
    watched = (prefill or bool(found.looked[part].any())) and len(run.chunks) > 0
    return {
        "client": "measured" if late_known else "unknown",
        "network": "measured" if path.any() else "unknown",
        "frontend": "inferred" if split.fronted[part].any() else "unknown",
        "queue": "measured" if told else "inferred" if judged else "unknown",
        "prefill": "measured" if prefill else "unknown",
        "decode": tokens,
        "stall": "inferred" if watched else "unknown",
        "tail": tokens,
        "unknown": "unknown",
    }


def _evidence(run: Run, part: Array, line: Line, split: Split, found: Stalls) -> dict[str, str]:
    """What a phase rests on, in words, where that is more or less than its ``how`` says."""
    out = {}
    if found.guessed[part].any():
        out["stall"] = ("weaker: the engine does not say when it prefills; these gaps of all streams end with another "
                        "request's first token")  # fmt: skip
    headers = run.requests["accepted_ns"] - line.sent - split.network
    ahead = line.first - run.requests["accepted_ns"]
    mine = part & split.fronted & ~np.isnan(headers)
    if mine.any() and np.median(ahead[mine]) > 0.1 * np.median((line.first - line.sent)[mine]):
        spent, took = np.median(split.frontend[mine]), np.median(headers[mine])
        out["frontend"] = (f"median {spent / NS_PER_MS:.1f} ms outside queue, prefill and round trip; response headers "
                           f"{took / NS_PER_MS:.1f} ms after sending")  # fmt: skip
    return out


def _chance(line: Line, split: Split, stalled: Array | None) -> list[Doubt]:
    """Where prefills fill nearly all the time, that a gap lies in one says little."""
    decode = int((line.last - line.first).sum())
    covered = split.windows.covered(line.last + split.shift) - split.windows.covered(line.first + split.shift)
    if stalled is None or not decode or covered.sum() < CHANCE * decode or stalled.sum() < 0.05 * decode:
        return []
    return [
        {
            "what": "stalls by a neighbour's prefill may be chance",
            "why": f"prefills cover {covered.sum() / decode:.0%} of the decode time, so any gap lies in one",
            "next": "look at a point of less load, or compare with smaller prefill pieces",
        }
    ]


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
