"""What thinking takes of a reasoning model: its share of the time, of the KV space and of the device's work."""

from __future__ import annotations

from typing import Any

import numpy as np

from whywait.analyze.goodput import answer_tokens
from whywait.analyze.latency import origin_ns
from whywait.analyze.stats import summary
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.units import NS_PER_MS


def thinking(one: Run, which: Array, decode_ns: Array | None = None) -> dict[str, Any]:
    """Reasoning and answer apart, over the requests ``which`` (bool) of a Run of one point.

    Tokens per request and the time from the first token of each to the next stage (``stats.summary``), and three shares
    over requests that tell their reasoning tokens and have a first and a last token (None where there are none):

    - ``time_share``: first token → first answer token, of origin → last token;
    - ``kv_share``: of the tokens × time held in the KV space, what would not have been held without thinking: the
      thoughts until the end, and the prompt for as long as it thought. Tokens come evenly;
    - ``cost_share``: of the time in prefill, decode and stall, the part of decode that made thoughts. It is what
      thinking costs where a device's time has a price. ``decode_ns`` is each request's (prefill, decode + stall) in ns
      by its account (requests × 2); where it is not given the tokens' share stands for it.
    """
    req = one.requests
    answers = answer_tokens(one)
    first, answer, last = req["first_ns"], req["first_answer_ns"], req["last_ns"]
    until = np.where(np.isnan(answer), last, answer)
    thoughts = req["output_tokens"] - answers
    out: dict[str, Any] = {
        "reasoning_tokens": summary(thoughts[which]),
        "answer_tokens": summary(answers[which]),
        "thinking_ms": summary(((until - first) / NS_PER_MS)[which]),
        "answering_ms": summary(((last - answer) / NS_PER_MS)[which]),
    }
    known = which & ~np.isnan(req["reasoning_tokens"]) & ~np.isnan(first) & ~np.isnan(last) & ~np.isnan(thoughts)
    if not known.any() or not thoughts[known].sum():
        return {**out, "time_share": None, "kv_share": None, "cost_share": None}
    a, b = (until - first)[known], (last - until)[known]
    r, n, p = thoughts[known], np.nan_to_num(answers[known]), req["prompt_tokens"][known]
    whole = (last - origin_ns(one))[known]
    spent = p * a + r * (a / 2 + b)
    held = p * (a + b) + r * (a / 2 + b) + n * b / 2
    out["time_share"] = float(a.sum() / whole.sum())
    out["kv_share"] = None if np.isnan(held).any() or not held.sum() else float(spent.sum() / held.sum())
    share = np.where(r + n > 0, r / np.maximum(r + n, 1), 0.0)
    if decode_ns is None:
        out["cost_share"] = float(r.sum() / (r + n).sum())
    else:
        work = decode_ns[known].astype(np.float64)
        out["cost_share"] = float((work[:, 1] * share).sum() / work.sum()) if work.sum() else None
    return out
