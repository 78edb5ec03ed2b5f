"""Sharing an amount among requests: by a named rule, in whole nano-units, so that the shares sum exactly.

A batch's joules have no owner: the weights are read once for all of it. Whoever shares them out follows a convention,
and says which. Three are here.

* ``output tokens``: every output token made in the window carries the same.
* ``all tokens``: every token computed in it does, those of prompts that were not cached, too.
* ``device time``: every instant is shared equally by the requests that are being computed then, in prefill or decode
  (as far as the request account can tell), so that a request pays for how long it held the device and with how many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.analyze.first_token import line_of
from whywait.analyze.latency import OK
from whywait.analyze.phases import CLIENT, FRONTEND, NETWORK, QUEUE, RequestAccount
from whywait.analyze.streams import Content
from whywait.analyze.window import UNCOUNTED, Window, sweep
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run
from whywait.core.table import Array

OUTPUT_TOKENS, ALL_TOKENS, DEVICE_TIME = "output tokens", "all tokens", "device time"
RULES = (DEVICE_TIME, OUTPUT_TOKENS, ALL_TOKENS)
NANO = 1_000_000_000
_FINE = 1 << 53
#: Outcomes of requests that the engine never worked on, as far as can be seen.
_TURNED_AWAY = [OUTCOMES.index(o) for o in ("http_error", "shed", "refused", "never_sent")]


@dataclass(frozen=True)
class Weights:
    """What each request of a point weighs under a rule (float64, ≥ 0); None with the reason where it cannot be said.
    ``prefill`` is the part of the whole that is prefill's, where the rule tells."""

    rule: str
    values: Array | None
    why: str = ""
    prefill: float | None = None


def apportion(total: int, weights: Array) -> list[int] | None:
    """``total`` (≥ 0, any unit) in whole parts in proportion to ``weights`` (finite, ≥ 0), by largest remainders.

    The parts sum to ``total`` exactly, each is within 1 of its exact share (of the weights to 53 bits), and a weight of
    0 gets 0. Ties go to the earlier. None where there is nobody to give it to.

    Raises:
        ValueError: a negative total or weight, or one that is not finite.
    """
    w = np.asarray(weights, dtype=np.float64)
    if total < 0 or not np.isfinite(w).all() or (w < 0).any():
        raise ValueError("amounts to share and weights are finite and not below 0")
    top = float(w.max(initial=0.0))
    if top == 0:
        return None
    whole = [int(x) for x in np.rint(w / top * _FINE).tolist()]
    sum_w = sum(whole)
    parts, rests = [], []
    for each in whole:
        q, r = divmod(total * each, sum_w)
        parts.append(q)
        rests.append(r)
    left = total - sum(parts)
    for i in sorted(range(len(rests)), key=lambda i: -rests[i])[:left]:
        parts[i] += 1
    return parts


def tokens_inside(run: Run, c: Content, w: Window, output: Array | None = None) -> Array:
    """Output tokens that each request made in the window, by its chunks (as ``window.token_bins``); NaN: not known.

    ``output`` replaces the requests' own count where there are no chunks (answer tokens). A request without a first
    token made none.
    """
    req = run.requests
    n = req["output_tokens"] if output is None else output
    out: Array
    if c.whole() and not len(c.unknown_rows()):
        rows, tokens = c.tokens_between(w.start_ns, w.end_ns)
        out = np.zeros(len(req))
        out[rows] = tokens
    else:
        inside = (c.spread > w.start_ns) & (c.spread <= w.end_ns)
        out = np.bincount(c.row, np.where(inside, c.tokens_spread, 0.0), minlength=len(req)).astype(np.float64)
    rest = np.ones(len(req), dtype=bool)
    rest[c.starts()[0]] = False
    none = np.isnan(req["first_ns"]) & np.isnan(n) & (req["outcome"] != OK)
    first = np.where(np.isnan(req["first_ns"]), req["end_ns"], req["first_ns"])  # not streamed: all at the end
    last = np.where(np.isnan(req["last_ns"]), first, req["last_ns"])
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.clip((np.minimum(last, w.end_ns) - np.maximum(first, w.start_ns)) / (last - first), 0, 1)
    share = np.where(last > first, share, (first > w.start_ns) & (first <= w.end_ns))
    out[rest] = np.where(none, 0.0, n * share)[rest]
    return out


def presence(run: Run, w: Window, closed: bool) -> Array:
    """What each request counts for in the window, as ``window.request_rate`` has it: in a closed loop the share of sent
    … end that lies inside, in an open one whether it ended inside. One that was sent and whose end is not known (other
    tools do not tell it of failures) counts whole where it was sent: it is none of those that never were."""
    sent, end = run.requests["sent_ns"], run.requests["end_ns"]
    unended = np.isnan(end) & (sent >= w.start_ns) & (sent <= w.end_ns)
    done = (unended | ((end > w.start_ns) & (end <= w.end_ns))).astype(np.float64)
    if not closed:
        return done
    length = end - sent
    overlap = np.maximum(np.minimum(end, w.end_ns) - np.maximum(sent, w.start_ns), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        out: Array = np.where(length > 0, overlap / length, done)
    return out


def weights(run: Run, w: Window, c: Content, acc: RequestAccount, rule: str) -> Weights:
    """What each request of a Run of one load point weighs under ``rule``; ``acc`` are the account's rows of it."""
    if rule == DEVICE_TIME:
        return _device_time(run, w, acc)
    made = tokens_inside(run, c, w)
    made = failed_tokens(run, c, w, made)
    unknown = int(np.isnan(made).sum())
    if unknown > UNCOUNTED * max(len(made), 1):
        return Weights(rule, None, f"the tokens of {unknown} requests are not known")
    made = np.nan_to_num(made)
    if rule == OUTPUT_TOKENS:
        return Weights(rule, made)
    prompt = run.requests["prompt_tokens"] - np.nan_to_num(run.requests["cached_tokens"])
    first = run.requests["first_ns"]
    in_window = (first > w.start_ns) & (first <= w.end_ns)
    if (np.isnan(prompt) & in_window).sum() > UNCOUNTED * max(len(made), 1):
        return Weights(rule, None, "the prompt tokens of requests are not known")
    prompts = np.where(in_window, np.nan_to_num(np.maximum(prompt, 0.0)), 0.0)
    total = float(prompts.sum() + made.sum())
    return Weights(rule, prompts + made, prefill=float(prompts.sum()) / total if total else None)


def failed_tokens(run: Run, c: Content, w: Window, made: Array) -> Array:
    """Where a failed request's tokens are not known: its chunks in the window × the tokens per chunk of the others."""
    lost = np.isnan(made) & (run.requests["outcome"] != OK)
    if not lost.any() or not (known := ~np.isnan(c.tokens_spread)).any():
        return made
    per_chunk = float(c.tokens_spread[known].mean())
    inside = (c.spread > w.start_ns) & (c.spread <= w.end_ns)
    counted = np.bincount(c.row, inside.astype(np.float64), minlength=len(made))
    out: Array = np.where(lost & (counted > 0), counted * per_chunk, made)
    return out


def _device_time(run: Run, w: Window, acc: RequestAccount) -> Weights:
    begin, first, stop = work_spans(run, acc)
    a, m, z = (np.clip(t, w.start_ns, w.end_ns) for t in (begin, first, stop))
    known = ~np.isnan(a) & ~np.isnan(z) & (z > a)
    if not known.any():
        return Weights(DEVICE_TIME, None, "no request is known to have been in work in the window")
    times, count = sweep(np.where(known, a, np.nan), np.where(known, z, np.nan))
    each = np.concatenate(([0.0], np.cumsum(np.diff(times) / np.maximum(count[:-1], 1))))

    def spent(t: Array) -> Array:
        found: Any = np.interp(t, times, each)
        return np.asarray(found)

    a, m, z = (np.where(known, t, times[0]) for t in (a, m, z))
    values = np.where(known, spent(z) - spent(a), 0.0)
    middle = np.clip(np.where(np.isnan(m), z, m), a, z)
    prefill = float(np.where(known, spent(middle) - spent(a), 0.0).sum())
    total = float(values.sum())
    return Weights(DEVICE_TIME, np.maximum(values, 0.0), prefill=prefill / total if total else None)


def work_spans(run: Run, acc: RequestAccount) -> tuple[Array, Array, Array]:
    """When each request was being computed, as far as its account tells: after client, network, frontend and queue; to
    its first token is prefill, to its last decode. One that failed without a token counts to its end unless it was
    turned away (ns, float64, NaN: never)."""
    line, outcome = line_of(run), run.requests["outcome"]
    begin = (line.origin + acc.phases[:, [CLIENT, NETWORK, FRONTEND, QUEUE]].sum(axis=1)).astype(np.float64)
    away = np.isin(outcome, _TURNED_AWAY) & ~line.has_first
    stop = np.where(line.ok, line.last, line.end).astype(np.float64)
    first = np.where(line.has_first, line.first, np.nan)
    return np.where(away, np.nan, np.minimum(begin, stop)), first, stop
