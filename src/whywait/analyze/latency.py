"""Latency by the definitions of DESIGN 3: per request TTFT, TTFA, end-to-end, tail, TPOT; pooled chunk gaps and ITL.

What the stream does not tell is kept apart from what it does: chunks that came in one read have intervals, not times,
so their gaps are intervals; tokens per chunk come from the service or are unknown. Nothing here is a zero gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.analyze.pooled import Pool
from whywait.analyze.stats import QUANTILES, Doubt, pooled_summary, ranked, summary, weighted_percentile
from whywait.analyze.streams import Content, Gaps, alike, chosen, content, ends_low, gaps, is_alike
from whywait.core.columns import MODES, OUTCOMES
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.units import NS_PER_MS

OK = OUTCOMES.index("ok")
CLOSED = MODES.index("concurrency")
WITHHOLD = 0.5  # above this share of coalesced gaps their percentiles are not printed


@dataclass(frozen=True)
class Latency:
    """One value per request, in the order of ``run.requests``; milliseconds as float64, NaN where unknown.

    ``*_low_ms`` and ``*_high_ms`` are the certain bounds of an interval (equal to the value when it is exact).
    ``tpot_applies`` is False where all tokens came in the first chunk, so there is no time per further token. The e2e
    of an ``ok`` response that was not streamed (no token has a time) is to its end.
    """

    ids: Array
    ok: Array
    origin_ns: Array
    ttft_ms: Array
    ttft_low_ms: Array
    ttfa_ms: Array
    e2e_ms: Array
    e2e_low_ms: Array
    tail_ms: Array
    tpot_ms: Array
    tpot_low_ms: Array
    tpot_high_ms: Array
    tpot_applies: Array


def origin_ns(run: Run) -> Array:
    """When each request's clock starts (ns, NaN unknown): due in open loop (rate, trace), sent in closed loop.

    An open-loop request without a due time (another tool's file) falls back to its sent time.
    """
    modes = {int(p): int(m) for p, m in zip(run.points["point"], run.points["mode"], strict=True)}
    numbers, where = np.unique(run.requests["point"], return_inverse=True)
    closed = np.array([modes.get(int(p), CLOSED) == CLOSED for p in numbers], dtype=bool)[where.ravel()]
    due, sent = run.requests["due_ns"], run.requests["sent_ns"]
    found: Array = np.where(closed | np.isnan(due), sent, due)
    return found


def per_request(run: Run) -> Latency:
    """Latencies of every request by the definitions of DESIGN 3, whatever its outcome, where the stamps exist."""
    return run.memo("latency", lambda: _per_request(run))


def _per_request(run: Run) -> Latency:
    req = run.requests
    origin, first, last = origin_ns(run), req["first_ns"], req["last_ns"]
    first_low, last_low = ends_low(run)
    # Not streamed: no token has a time of its own, all are there at the end.
    whole = np.where((req["outcome"] == OK) & np.isnan(last), req["end_ns"], last)
    tpot, low, high, applies = _tpot(run, last - first, (last_low - first, last - first_low))
    ms = float(NS_PER_MS)
    return Latency(
        ids=req["id"],
        ok=req["outcome"] == OK,
        origin_ns=origin,
        ttft_ms=(first - origin) / ms,
        ttft_low_ms=(first_low - origin) / ms,
        ttfa_ms=(req["first_answer_ns"] - origin) / ms,
        e2e_ms=(whole - origin) / ms,
        e2e_low_ms=(np.where(np.isnan(last), whole, last_low) - origin) / ms,
        tail_ms=(req["end_ns"] - last) / ms,
        tpot_ms=tpot / ms,
        tpot_low_ms=low / ms,
        tpot_high_ms=high / ms,
        tpot_applies=applies,
    )


def worst_itl_ms(run: Run, c: Content) -> Array:
    """The largest gap per token of each request (ms, NaN without a gap), for an SLO on every token.

    Gaps are those of :func:`gaps`; a chunk of unknown tokens counts as one token, which gives an upper bound.
    """
    g = gaps(c)
    worst = np.full(len(run.requests), -np.inf)
    np.maximum.at(worst, g.row, g.value / np.where(g.tokens >= 1, g.tokens, 1.0))
    out: Array = np.where(np.isfinite(worst), worst, np.nan) / NS_PER_MS
    return out


def latency_summary(
    run: Run, keep: Array | None = None, c: Content | None = None
) -> tuple[dict[str, Any], list[Doubt]]:
    """Summaries (``stats.summary``, ms) of the ``ok`` requests of ``run``, with a doubt for what had to be withheld.

    Args:
        run: usually one load point.
        keep: which requests count (bool per request), for example those of the steady window.
        c: ``content(run)`` when the caller has it.

    Returns:
        ``first_byte_ms`` (headers complete), ``ttft_ms, ttfa_ms, e2e_ms, tail_ms, tpot_ms`` (one value per request)
        and ``chunk_gap_ms, itl_ms`` (pooled;
        itl is each gap divided by the tokens of its chunk, weighted by them). Where some values are intervals,
        ``bounds`` holds for each percentile and the mean certain bounds ``[lo, hi]``; the value itself is then computed
        with chunks of one read spread evenly over their interval (gaps, itl), at the latest arrival (ttft, e2e), or
        with the tokens spread evenly over the chunks (tpot).
    """
    c = content(run) if c is None else c
    lat = per_request(run)
    ok = lat.ok if keep is None else lat.ok & keep
    accepted = (run.requests["accepted_ns"] - lat.origin_ns) / NS_PER_MS
    pooled, doubts = _pooled(run, gaps(c), ok)
    return {"first_byte_ms": summary(accepted[ok]), **request_summaries(lat, ok), **pooled}, doubts


def request_summaries(lat: Latency, which: Array) -> dict[str, Any]:
    """Those of :func:`latency_summary` that have one value per request, of the requests ``which`` (bool)."""
    return {
        "ttft_ms": _with_bounds(lat.ttft_ms[which], lat.ttft_low_ms[which], lat.ttft_ms[which]),
        "ttfa_ms": summary(lat.ttfa_ms[which]),
        "e2e_ms": _with_bounds(lat.e2e_ms[which], lat.e2e_low_ms[which], lat.e2e_ms[which]),
        "tail_ms": summary(lat.tail_ms[which]),
        "tpot_ms": _with_bounds(lat.tpot_ms[which], lat.tpot_low_ms[which], lat.tpot_high_ms[which]),
    }


def _pooled(run: Run, g: Gaps, ok: Array) -> tuple[dict[str, Any], list[Doubt]]:
    mine = ok[g.row]
    seed = [run.manifest.seed & 0xFFFFFFFF, int(run.points["point"][0]) if len(run.points) else 0]
    rng = np.random.default_rng(seed)
    ms = float(NS_PER_MS)
    row, tokens, coalesced, value = g.row[mine], chosen(g.tokens, mine), chosen(g.coalesced, mine), g.value[mine] / ms
    known = ~np.isnan(alike(tokens))
    singly = bool((alike(tokens) == 1).all()) and bool((row[1:] >= row[:-1]).all())
    if singly:  # a token in each: the ITL are the gaps
        pool = Pool(value, row)
        gap, itl = pool.summary(rng), pool.summary(rng)
        del pool
    else:
        told = np.broadcast_to(known, tokens.shape)
        gap = pooled_summary(value, row, rng)
        with np.errstate(invalid="ignore"):
            itl = pooled_summary((value / tokens)[told], row[told], rng, tokens[told])
    doubts: list[Doubt] = []
    if coalesced.any():
        low, high = g.low[mine] / ms, g.high[mine] / ms
        gap["bounds"] = _bounds(low, high, None)
        if singly:
            itl["bounds"] = _bounds(low, high, np.broadcast_to(1.0, low.shape))
        else:
            itl["bounds"] = _bounds((low / tokens)[told], (high / tokens)[told], tokens[told])
    share = float(coalesced.mean()) if len(coalesced) else 0.0
    if share > WITHHOLD:
        gap, itl = _withheld(gap), _withheld(itl)
        doubts.append(
            {
                "what": "chunk gaps and ITL are withheld",
                "why": f"{share:.0%} of the gaps touch chunks that came several in one read, so only bounds are known",
                "next": "look for a buffering proxy, or for a client or server short of CPU",
            }
        )
    if len(known) and not known.all():
        doubts.append(
            {
                "what": f"ITL leaves out {1 - float(known.mean()):.0%} of the gaps",
                "why": "the service does not say how many tokens those chunks carry, and a chunk is not a token",
                "next": "ask it for token ids or usage per chunk (return_token_ids, continuous_usage_stats)",
            }
        )
    return {"chunk_gap_ms": gap, "itl_ms": itl}, doubts


def _withheld(found: dict[str, Any]) -> dict[str, Any]:
    names = [*QUANTILES, "mean"]
    return {**found, **dict.fromkeys(names), "ci": {name: [None, None] for name in names}}


def _with_bounds(value: Array, low: Array, high: Array) -> dict[str, Any]:
    found = summary(value)
    # A value may be withheld (NaN) while its bounds are known; those with no bound at all say nothing.
    known = ~np.isnan(low) & ~np.isnan(high)
    if (low[known] != high[known]).any():
        found["bounds"] = _bounds(low[known], high[known], None)
    return found


def _bounds(low: Array, high: Array, weights: Array | None) -> dict[str, list[float | None]]:
    """Each value lies in [low, high], so each percentile lies between the same percentile of the lows and the highs."""
    qs = list(QUANTILES.values())
    found: list[list[float | None]] = []
    for v in (low, high):
        if not len(v):
            found.append([None] * len(qs))
        elif weights is None:
            found.append(np.quantile(v, qs).tolist())
        else:
            each = ranked(v, qs) if is_alike(weights) else [weighted_percentile(v, q, weights) for q in qs]
            found.append(each)
    pairs = zip(QUANTILES, *found, strict=True)
    out: dict[str, list[float | None]] = {name: [low_, high_] for name, low_, high_ in pairs}
    out["mean"] = [float(np.average(v, weights=weights)) if len(v) else None for v in (low, high)]
    return out


def _tpot(run: Run, span: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array, Array, Array]:
    """(last − first) / (n − k_first) in ns: value, certain low, certain high, and where it applies.

    When the tokens of the first chunk are unknown, k_first lies in [1, n − chunks + 1] (DESIGN 3) and the value takes
    n / chunks, tokens spread evenly. A value whose first and last token cannot be told apart in time is withheld.
    """
    n, chunks = run.requests["output_tokens"], run.requests["content_chunks"]
    first = run.requests["first_chunk_tokens"]
    first = np.where(np.isnan(first) & (n == chunks), 1.0, first)
    first = np.where(np.isnan(first) & (chunks == 1), n, first)
    known = ~np.isnan(first)
    most = np.where(known, first, np.maximum(n - chunks + 1, 1))
    least = np.where(known, first, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        even = np.where(np.isnan(chunks), 1.0, np.clip(n / chunks, least, most))
        likely = np.where(known, first, even)
        applies = ~(n <= likely)
        value = np.where(applies & (span > 0) & (bounds[0] > 0), span / (n - likely), np.nan)
        low = np.where(applies, np.maximum(bounds[0], 0.0) / (n - least), np.nan)
        high = np.where(applies & (n > most), bounds[1] / (n - most), np.nan)
    return value, low, high, applies
