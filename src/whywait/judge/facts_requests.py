"""What the client's own stamps and the workload say of a load point: arrival of chunks, unequal work, growth, reuse."""

from __future__ import annotations

from typing import Any

import numpy as np

from whywait.analyze.counters import delta, series
from whywait.analyze.latency import OK
from whywait.analyze.phases import FRONTEND, NETWORK, UNKNOWN, RequestAccount, histogram_mean_ms
from whywait.analyze.streams import arrivals
from whywait.core.run import Run, laid_out
from whywait.core.table import Array
from whywait.judge.evidence import Draft, Reuse, Streams, Work
from whywait.units import NS_PER_MS

LONG = 4.0  # times the median
Span = tuple[int, int]


def streams(run: Run, one: Run, acc: RequestAccount, span: Span, derived_ms: float = 0.0) -> Streams:
    """``derived_ms``: mean queue and prefill of the point that no single request knows."""
    req, came = one.requests, arrivals(run, int(one.points["point"][0]))
    count, bursts = came.chunks, came.bursts
    ok = (req["outcome"] == OK) & (count > 1)
    begun = ok & ~np.isnan(req["first_ns"]) & ~np.isnan(req["last_ns"])
    e2e = (req["last_ns"] - req["sent_ns"])[begun]
    first = (req["first_ns"] - req["sent_ns"])[begun]
    chunks = int(count.sum())
    engine_gap = histogram_mean_ms(run, "itl_seconds", span)
    decode = req["engine_decode_ms"] / np.maximum(req["output_tokens"] - 1, 1)
    if engine_gap is None and (~np.isnan(decode[ok])).any():
        engine_gap = float(np.nanmedian(decode[ok]))
    return Streams(
        together=float(came.together / max(chunks - (count > 0).sum(), 1)) if chunks else None,
        bursts=float(np.median(bursts[ok])) if ok.any() else None,
        chunks=float(np.median(count[ok])) if ok.any() else None,
        first_share=float(np.median(first / np.maximum(e2e, 1))) if begun.any() else None,
        outside_ms=_outside(acc, one, begun, derived_ms),
        engine_gap_ms=engine_gap,
        client_gap_ms=None if np.isnan(came.gap_ms) else came.gap_ms,
        with_first=float(came.second[ok].mean()) if ok.any() else None,
    )


def _outside(acc: RequestAccount, one: Run, begun: Array, derived_ms: float) -> tuple[float, float, float] | None:
    """Network, frontend and unknown of each request (ms): 5th percentile, median, 95th."""
    rows = np.flatnonzero(np.isin(acc.ids, one.requests["id"][begun]))
    if not len(rows):
        return None
    spent = acc.phases[rows][:, [NETWORK, FRONTEND, UNKNOWN]].sum(axis=1) / NS_PER_MS
    low, mid, high = np.quantile(np.maximum(spent - derived_ms, 0.0), [0.05, 0.5, 0.95])
    return float(low), float(mid), float(high)


def work(one: Run, span: Span) -> Work:
    req = one.requests
    ok = req["outcome"] == OK
    answer, prompt = req["output_tokens"][ok], req["prompt_tokens"][ok]
    answer, prompt = answer[~np.isnan(answer)], prompt[~np.isnan(prompt)]
    long_share, long_n, long_answer = _long(req, ok)
    told = req["engine_prefill_tokens"]
    computed_of = np.where(np.isnan(told), req["prompt_tokens"] - np.nan_to_num(req["cached_tokens"]), told)
    computed = computed_of[ok & ~np.isnan(computed_of)]
    big = 0.0
    if len(computed) and computed.sum() > 0:
        # Of another kind is what was sent, not what a cold cache left to compute.
        size = req["prompt_tokens"][ok & ~np.isnan(computed_of)]
        size = np.where(np.isnan(size), computed, size)
        big = float(computed[size >= LONG * max(np.median(size), 1)].sum() / computed.sum())
    sent, end = req["sent_ns"], req["end_ns"]
    placed = not np.isin(laid_out(one), req["point"]).any()
    return Work(
        prompt=float(np.median(prompt)) if len(prompt) else None,
        output=float(np.median(answer)) if len(answer) else None,
        long_share=long_share,
        long_n=long_n,
        long_answer=long_answer,
        big_prompts=big,
        pending=_pending(np.where(np.isnan(req["due_ns"]), sent, req["due_ns"]), end, span) if placed else None,
        ttft_growth=_growth(req, sent),
    )


def _long(req: Any, ok: Array) -> tuple[float, float, float | None]:
    """Of the service time, the part of requests with answers far above the median; their part of all; their median."""
    first = np.where(np.isnan(req["first_ns"]), np.inf, req["first_ns"])
    held = req["last_ns"] - first + np.nan_to_num(req["engine_prefill_ms"]) * NS_PER_MS
    mine = ok & ~np.isnan(held) & (held > 0) & ~np.isnan(req["output_tokens"])
    if mine.sum() < 4:
        return 0.0, 0.0, None
    answer, held = req["output_tokens"][mine], held[mine]
    long = answer >= LONG * max(float(np.quantile(answer, 0.4)), 1.0)
    if not long.any():
        return 0.0, 0.0, None
    return float(held[long].sum() / held.sum()), float(long.mean()), float(np.median(answer[long]))


def _pending(sent: Array, end: Array, span: Span) -> tuple[float, float] | None:
    """Mean requests due and not ended, in the first and last third of the arrivals; None where there is none. At first
    the number grows with any service: until as long as a quick request takes has passed it says nothing."""
    known = ~np.isnan(sent)
    if not known.any() or span[1] <= span[0]:
        return None
    stop = np.where(np.isnan(end), span[1], end)[known]
    last_sent = float(sent[known].max())
    quick = float(np.quantile(stop - sent[known], 0.1))
    begin = min(span[0] + quick, (span[0] + last_sent) / 2)
    width = (last_sent - begin) / 3

    def mean(low: float, high: float) -> float:
        overlap = np.clip(np.minimum(stop, high) - np.maximum(sent[known], low), 0, None)
        return float(overlap.sum() / (high - low)) if high > low else 0.0

    return mean(begin, begin + width), mean(last_sent - width, last_sent)


def _growth(req: Any, sent: Array) -> tuple[float, float] | None:
    ttft = (req["first_ns"] - np.where(np.isnan(req["due_ns"]), sent, req["due_ns"])) / NS_PER_MS
    known = ~np.isnan(ttft)
    order = np.argsort(sent[known])
    ttft = ttft[known][order]
    if len(ttft) < 9:
        return None
    k = len(ttft) // 3
    return float(np.median(ttft[:k])), float(np.median(ttft[-k:]))


def reuse(run: Run, one: Run, span: Span) -> Reuse:
    """Prefix reuse that the workload offered, by its own description, and what the engine made of it."""
    req = one.requests
    prompt, cached = req["prompt_tokens"], req["cached_tokens"]
    looked_up, hits = (delta(run.readings, k, span) for k in ("prefix_queries_total", "prefix_hits_total"))
    known = ~np.isnan(prompt) & ~np.isnan(cached)
    hit, any_hit = None, False
    if known.any() and prompt[known].sum() > 0:
        hit, any_hit = float(cached[known].sum() / prompt[known].sum()), bool((cached[known] > 0).any())
    if looked_up is not None and hits is not None and looked_up.value > 0:
        hit, any_hit = hits.value / looked_up.value, any_hit or hits.value > 0
    elif hit is None:
        total, some = (delta(run.readings, k, span) for k in ("prompt_tokens_total", "cached_tokens_total"))
        if total is not None and some is not None and total.value > 0:
            hit, any_hit = some.value / total.value, some.value > 0
    looked: bool | None = None
    if series(run.readings, "prefix_queries_total"):
        looked = looked_up is not None and looked_up.value > 0
    told = run.manifest.engine.get("enable_prefix_caching")
    if isinstance(told, (bool, str)):
        looked = str(told).lower() == "true"
    offered, groups = _offered(run.manifest.workload, len(req), int((run.requests["sent_ns"] < span[0]).sum()))
    return Reuse(offered, hit, looked, any_hit, groups)


def _offered(workload: dict[str, Any], n: int, before: int) -> tuple[float | None, int]:
    """The part of the prompt tokens of ``n`` requests that some earlier one began with too, ``before`` of which came
    already: of G beginnings drawn evenly, request i finds its own among them with chance 1 - (1 - 1/G)^i."""
    classes = workload.get("classes") or []
    if not classes or not n:
        return None, 1
    if workload.get("cache") == "warm":
        return 1.0, 1
    total, share, most = 0.0, 0.0, 1
    for c in classes:
        if str(c.get("turns", "1")) not in ("1", "None"):
            return None, 1  # turns repeat their history: how much depends on what was said
        weight, groups = float(c.get("share", 1.0)), max(int(c.get("groups") or 1), 1)
        again = float(np.mean(1 - (1 - 1 / groups) ** np.arange(before, before + n)))
        total, most = total + weight, max(most, groups)
        share += weight * float(c.get("shared") or 0.0) * again
    return (share / total if total else None), most


def draft(run: Run, span: Span) -> Draft | None:
    proposed, accepted, rounds = (
        delta(run.readings, k, span) for k in ("draft_tokens_total", "accepted_tokens_total", "draft_rounds_total")
    )
    if proposed is None or accepted is None or proposed.value <= 0:
        return None
    made = delta(run.readings, "output_tokens_total", span)
    return Draft(proposed.value, accepted.value, None if rounds is None else rounds.value,
                 made.value if made and made.value > 0 else None)  # fmt: skip
