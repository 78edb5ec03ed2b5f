"""What was offered and what became of it: rates and lag of the sends, errors by kind, counts that contradict each
other, and how much of the speculation was accepted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from whywait.analyze.counters import delta
from whywait.analyze.latency import CLOSED, OK, Content
from whywait.analyze.stats import Doubt
from whywait.core.run import Run
from whywait.units import NS_PER_MS, NS_PER_S

RATE = 0.02  # the achieved rate may differ by this share from the asked one
LAG_MS = 5.0  # sends may be late by this (p99), or by LAG_SHARE of the median end-to-end time
LAG_SHARE = 0.02


def offered(one: Run) -> dict[str, Any]:
    """How a load point was offered: ``asked_per_s`` by the timetable (open loop), ``sent_per_s``, ``lag_ms`` (due to
    sent: p99 and largest), and ``valid``: False where either is past its bound, null where neither is known."""
    due, sent = one.requests["due_ns"], one.requests["sent_ns"]
    late = (sent - due) / NS_PER_MS
    late = late[~np.isnan(late)]
    lag = {"p99": float(np.quantile(late, 0.99)), "max": float(late.max())} if len(late) else {"p99": None, "max": None}
    took = (one.requests["last_ns"] - sent)[one.requests["outcome"] == OK] / NS_PER_MS
    took = took[~np.isnan(took)]
    limit = max(LAG_MS, LAG_SHARE * float(np.median(took)) if len(took) else 0.0)
    asked = _rate(due) if one.points["mode"][0] != CLOSED else None
    got = _rate(sent)
    fair = asked is None or (got is not None and abs(got / asked - 1) <= RATE)
    valid = None if lag["p99"] is None else bool(lag["p99"] <= limit and fair)
    return {"asked_per_s": asked, "sent_per_s": got, "lag_ms": lag, "valid": valid}


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


def miscounted(one: Run, c: Content) -> list[Doubt]:
    """A doubt when the tokens the service counted in the chunks do not add up to its usage.

    Only a cross-check: the usage is what every figure uses. One token more is a stop token, which has no text; where
    tokens of chunks are inferred they add up by themselves.
    """
    n = one.requests["output_tokens"]
    seen = np.bincount(c.row, c.tokens, len(n))  # NaN where a chunk's tokens are unknown
    has = np.bincount(c.row, minlength=len(n)) > 0
    mine = has & ~np.isnan(seen) & (one.requests["outcome"] == OK) & (n > 0)
    off = np.abs(n - seen)[mine]
    if not (off > 1).any():
        return []
    share = float((off / n[mine]).max())
    what = f"{int((off > 1).sum())} requests: the tokens counted in their chunks are not their usage"
    why = f"they differ by up to {share:.0%}; the usage is what all figures use"
    return [{"what": what, "why": why, "next": "ask whose count is right: the usage or the counts per chunk"}]


def acceptance(run: Run, span: tuple[int, int]) -> float | None:
    """Share of the tokens proposed by speculation that was accepted; None where nothing was proposed or said."""
    drafted, accepted = (delta(run.readings, name, span) for name in ("draft_tokens_total", "accepted_tokens_total"))
    if drafted is None or accepted is None or drafted.value <= 0:
        return None
    return min(1.0, accepted.value / drafted.value)
