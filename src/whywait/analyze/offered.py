"""What was offered and what became of it: rates and lag of the sends, errors by kind, counts that contradict each
other, and how much of the speculation was accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from whywait.analyze.counters import delta
from whywait.analyze.latency import CLOSED, OK
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.units import NS_PER_MS, NS_PER_S, load_name, ms, number, percent

RATE = 0.02  # the achieved rate, or requests in flight, may differ by this share from the asked one
LAG_MS = 5.0  # sends may be late by this (p99), or by LAG_SHARE of the median end-to-end time
LAG_SHARE = 0.02
_NEVER_SENT = OUTCOMES.index("never_sent")


def offered(one: Run) -> dict[str, Any]:
    """How a load point was offered: ``asked_per_s`` by the timetable (open loop; of a run cut short as far as it came),
    ``sent_per_s``, ``lag_ms`` (due to sent: p99 and largest), ``client_lag_ms`` (its p99 without waiting for a place
    under ``max_in_flight``, which was asked for), ``lag_limit_ms``, ``idle_share`` (closed loop: of the time of the
    places, how much the client let pass before it sent) and ``valid``, null where the lag is not known, or
    a closed loop was cut short before a request ended.

    False in an open loop where lag or rate is past its bound; a single late send is an accident, not a p99. In a closed
    loop latencies count from the send, so a late one only takes load away: False where both lag and idle share are.
    """
    due, sent = one.requests["due_ns"], one.requests["sent_ns"]
    late, own, held = (sent - due) / NS_PER_MS, *_own_lag(one)
    late, own = late[~np.isnan(late)], own[~np.isnan(own)]
    lag = {"p99": float(np.quantile(late, 0.99)), "max": float(late.max())} if len(late) else {"p99": None, "max": None}
    took = (one.requests["last_ns"] - sent)[one.requests["outcome"] == OK] / NS_PER_MS
    took = took[~np.isnan(took)]
    limit = max(LAG_MS, LAG_SHARE * float(np.median(took)) if len(took) else 0.0)
    plan = _could_be_sent(one, limit)
    asked = _rate(plan) if one.points["mode"][0] != CLOSED else None
    got = _rate(sent)
    p99 = float(np.quantile(own, 0.99)) if len(own) else None
    idle = _idle_share(one)
    out = {"asked_per_s": asked, "sent_per_s": got, "lag_ms": lag, "client_lag_ms": p99, "lag_limit_ms": limit,
           "idle_share": idle, "valid": None}  # fmt: skip
    if p99 is None or (idle is not None and one.manifest.partial and not len(took)):
        return out
    if idle is not None:
        return {**out, "valid": p99 <= limit or idle <= RATE}
    on_time = p99 <= limit or int((own > limit).sum()) < 2
    return {**out, "valid": bool(on_time and (asked is None or held or _kept(plan, sent, limit)))}


def _could_be_sent(one: Run, limit_ms: float) -> Array:
    """When requests were due (ns), of a run cut short without those it never came to: due after the cut, or before it
    by no more than a send may be late."""
    req = one.requests
    came = req["due_ns"] <= float(one.points["end_ns"][0]) - limit_ms * NS_PER_MS
    cut = (req["outcome"] == _NEVER_SENT) & ~came if one.manifest.partial else np.zeros(len(req), dtype=bool)
    found: Array = req["due_ns"][~cut]
    return found


def _idle_share(one: Run) -> float | None:
    due, sent, end = one.requests["due_ns"], one.requests["sent_ns"], one.requests["end_ns"]
    whole = float(np.nansum(end - due))
    if one.points["mode"][0] != CLOSED or whole <= 0:
        return None
    return float(np.nansum(sent - due)) / whole


def _own_lag(one: Run) -> tuple[Array, bool]:
    """How late the client itself was (ms, per request), and whether ``max_in_flight`` held any request back.

    Under a cap of m the k-th send waits for the (k - m)-th end; only what comes after that is the client's. Where
    several processes share the cap, which one waited for which end is not known, nor is the client's part.
    """
    req, cap = one.requests, one.manifest.workload.get("max_in_flight")
    due, sent, end = req["due_ns"], req["sent_ns"], req["end_ns"]
    if cap is None or one.points["mode"][0] == CLOSED:
        return (sent - due) / NS_PER_MS, False
    order = np.argsort(np.where(np.isnan(sent), np.inf, sent), kind="stable")[: int((~np.isnan(sent)).sum())]
    free = np.full(len(sent), -np.inf)
    ends = np.sort(np.where(np.isnan(end), np.inf, end)[order])
    free[order[cap:]] = ends[: max(len(order) - cap, 0)]
    held = free > due
    if one.manifest.client.get("shards"):
        return np.full(len(sent), np.nan), True
    return np.maximum(sent - np.fmax(due, free), 0.0) / NS_PER_MS, bool(held.any())


def _kept(due: Array, sent: Array, limit_ms: float) -> bool:
    """The achieved rate is the asked one: within RATE, or all were sent and their span is off by no more than a lag."""
    asked, got = _rate(due), _rate(sent)
    if asked is None:
        return True
    if got is None:
        return False
    due, sent = due[~np.isnan(due)], sent[~np.isnan(sent)]
    off = abs(float(np.ptp(sent)) - float(np.ptp(due))) / NS_PER_MS
    return abs(got / asked - 1) <= RATE or (len(due) == len(sent) and off <= limit_ms)


def invalid(points: Sequence[dict[str, Any]]) -> list[str]:
    """Why points of the user's own load (those without a label) are no measurement of the service, a line for each."""
    out = []
    for p in points:
        o = p["offered"]
        if p["label"] or o["valid"] is not False:
            continue
        why = []
        if o["client_lag_ms"] > o["lag_limit_ms"]:
            why.append(f"sends were {ms(o['client_lag_ms'])} late (p99; at most {ms(o['lag_limit_ms'])})")
        if o["idle_share"] is not None:
            why.append(f"so that {percent(o['idle_share'])} of the load asked for was missing")
        if o["asked_per_s"] and abs((o["sent_per_s"] or 0.0) / o["asked_per_s"] - 1) > RATE:
            why.append(f"{number(o['sent_per_s'])} of {number(o['asked_per_s'])} requests/s were sent")
        out.append(f"at {load_name(p['mode'], p['target'])} {', '.join(why)}")
    return out


def _rate(t: Any) -> float | None:
    t = t[~np.isnan(t)]
    span = float(np.ptp(t)) if len(t) > 1 else 0.0
    return (len(t) - 1) / span * NS_PER_S if span > 0 else None


def errors(one: Run) -> list[dict[str, Any]]:
    """What went wrong, grouped by outcome, whose fault, HTTP status and what the service calls it; most frequent first.
    ``detail`` holds types and codes only: a message may echo the prompt."""
    req = one.requests
    texts = (req.text("outcome"), req.text("fault"), req["status"].tolist(), list(req["detail"]))
    rows = zip(*texts, strict=True)
    found = Counter((o, f, None if np.isnan(s) else int(s), d or "") for o, f, s, d in rows if o != "ok")
    order = sorted(found.items(), key=lambda x: (-x[1], str(x[0])))
    return [{"outcome": o, "fault": f, "status": s, "detail": d, "n": n} for (o, f, s, d), n in order]


def acceptance(run: Run, span: tuple[int, int]) -> float | None:
    """Share of the tokens proposed by speculation that was accepted; None where nothing was proposed or said."""
    drafted, accepted = (delta(run.readings, name, span) for name in ("draft_tokens_total", "accepted_tokens_total"))
    if drafted is None or accepted is None or drafted.value <= 0:
        return None
    return min(1.0, accepted.value / drafted.value)
