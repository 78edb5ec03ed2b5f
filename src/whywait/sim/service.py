"""A service of numbers under a load: ``simulate`` gives a Run, ``figures`` the numbers of one without making it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whywait.core.run import Run
from whywait.core.schedule import Schedule
from whywait.sim import kernel
from whywait.sim.deployment import Deployment
from whywait.sim.loads import Options, Prepared, prepare
from whywait.sim.state import Result

Floats = NDArray[np.float64]
MIN_REQUESTS, MIN_SHARE = 8, 1 / 3  # of a steady window, as the analysis has it


@dataclass(frozen=True)
class Times:
    """Stamps of the schedule's own requests, seconds from the start of the load; NaN: never. ``accepted`` is when the
    scheduler received it. ``ok`` ended with all its tokens and within the timeout. ``shift_s`` is where the load
    begins on the kernel's clock."""

    due: Floats
    sent: Floats
    accepted: Floats
    scheduled: Floats
    first: Floats
    last: Floats
    end: Floats
    ok: NDArray[np.bool_]
    closed: bool
    target: float
    shift_s: float = 0.0

    @property
    def origin(self) -> Floats:
        return self.sent if self.closed else self.due


def simulate(
    deployment: Deployment,
    schedule: Schedule,
    mode: str,
    target: float,
    seed: int = 0,
    *,
    options: Options | None = None,
) -> Run:
    """A Run of one load point: ``mode`` is concurrency (``target`` in flight), rate or trace (due times of the
    schedule).

    Raises:
        UsageError: what ``loads.prepare`` refuses.
    """
    from whywait.sim.result import Point, run_of

    point = run_point(deployment, schedule, mode, target, seed, options=options)
    return run_of(deployment, [Point(mode, target, *point)], options or Options())


def run_point(
    deployment: Deployment,
    schedule: Schedule,
    mode: str,
    target: float,
    seed: int = 0,
    *,
    options: Options | None = None,
) -> tuple[Prepared, Result, Times]:
    """One load point, as the kernel gives it, and the stamps of its requests."""
    o = options or Options()
    if o.send_s is not None and mode == "concurrency":
        schedule = _sent(deployment, schedule, target, seed, o)
    prepared = prepare(deployment, schedule, mode, target, seed, options=o)
    found = kernel.run(prepared.load, prepared.pools, prepared.costs, prepared.settings)
    return prepared, found, times(prepared, found, mode, target, o)


def _sent(d: Deployment, schedule: Schedule, target: float, seed: int, o: Options) -> Schedule:
    """The requests that a closed loop sends within ``o.send_s``. The plan of one bounded by time is longer than it can
    use: a beginning of it that is long enough tells the same."""
    assert o.send_s is not None
    bare, n = replace(o, keep="none", send_s=None), max(512, 8 * round(target))
    while True:
        part = schedule.take(np.arange(min(n, len(schedule))))
        t = run_point(d, part, "concurrency", target, seed, options=bare)[2]
        sent = t.sent < o.send_s
        if not sent.all() or len(part) == len(schedule):
            return part.take(sent)
        n *= 4


def figures(
    deployment: Deployment,
    schedule: Schedule,
    mode: str,
    target: float,
    seed: int = 0,
    *,
    options: Options | None = None,
) -> dict[str, Any]:
    """The same load in numbers, without a Run.

    Returns:
        Per request (arrays of seconds, NaN unknown): ``ttft_s, tpot_s, e2e_s, queue_s, prefill_s``; ``ok`` and
        ``inside`` (its origin lies in the steady window); ``progress``, how much of it was done in the window (0..1);
        ``cached`` tokens and ``preempted`` times. Of the window: ``output_tokens_per_s, requests_per_s, kv_use,
        running, waiting, cached_share, seconds, steady`` (False: the whole point was taken). Of the whole:
        ``preemptions, recomputed_tokens, acceptance`` (None without speculation), ``end_s``. Where steps were kept
        (``Options.keep``) also ``power_w`` of all devices and ``joules_per_token``.
    """
    o = options or Options(keep="none")
    prepared, found, t = run_point(deployment, schedule, mode, target, seed, options=o)
    return figures_of(prepared, found, t, deployment)


def figures_of(p: Prepared, r: Result, t: Times, d: Deployment) -> dict[str, Any]:
    w, out_tokens = p.warmed, p.load.output[p.warmed :].astype(float)
    low, high, steady = window(t)
    inside = (t.origin >= low) & (t.origin <= high)
    span = max(high - low, 1e-12)
    ok = t.ok
    made = _overlap(t.first, t.last, low, high) * (out_tokens - 1) + _within(t.first, low, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(out_tokens > 1, (t.last - t.first) / (out_tokens - 1), np.nan)
    prompt, cached = p.load.prompt[w:].astype(float), r.cached[w:]
    # Closed loop: each request counts with the share of it that lies inside; open loop: those that end inside.
    progress = np.nan_to_num(_overlap(t.sent, t.end, low, high)) if t.closed else _within(t.end, low, high)
    stop = np.where(np.isnan(t.last), t.end, t.last)
    begun = np.where(np.isnan(t.scheduled), stop, t.scheduled)
    running = _time(t.scheduled, stop, low, high) / span
    out = {
        "ttft_s": np.where(ok, t.first - t.origin, np.nan), "tpot_s": np.where(ok, tpot, np.nan),
        "e2e_s": np.where(ok, t.last - t.origin, np.nan), "queue_s": t.scheduled - t.accepted,
        "prefill_s": t.first - t.scheduled, "ok": ok, "inside": inside, "cached": cached, "preempted": r.preempted[w:],
        "output_tokens_per_s": float(np.nansum(made[ok])) / span,
        "requests_per_s": float(np.nansum(progress[ok])) / span, "progress": progress,
        "running": running, "waiting": _time(t.accepted, begun, low, high) / span,
        "kv_use": _kv_use(p, r, t, low, high), "cached_share": float(cached.sum() / max(prompt.sum(), 1)),
        "seconds": span, "steady": steady, "preemptions": int(r.preempted[w:].sum()),
        "recomputed_tokens": int(r.recomputed[w:].sum()),
        "acceptance": r.accepted / r.drafted if r.drafted else None, "end_s": r.end_s - p.shift_s,
    }  # fmt: skip
    if len(r.steps.t_s):
        from whywait.sim.power import energy

        out |= energy(d, p, r, t, (low, high))
    return out


def times(p: Prepared, r: Result, mode: str, target: float, o: Options) -> Times:
    """Stamps from what the kernel gives; a request past its timeout is given up then (the engine, which does not look
    at that here, still finishes it)."""
    w = p.warmed
    closed = mode == "concurrency"
    # A warmed closed loop begins when the first request that is none of the warming is sent.
    shift = float(np.nanmin(r.sent_s[w:], initial=np.inf)) if closed and w else p.shift_s
    sent, accepted, scheduled, first, last = (
        x[w:] - shift for x in (r.sent_s, r.queued_s, r.scheduled_s, r.first_s, r.last_s)
    )
    due = sent  # the simulated client is never late
    stop = float(max(np.nanmax(last, initial=0.0), np.nanmax(sent, initial=0.0), min(r.end_s, o.limit_s) - shift))
    given_up = due + o.timeout_s
    late = ~(last <= given_up) & (given_up <= stop)
    end = np.where(late, given_up, np.where(np.isnan(last), stop, last))
    lost = late & ~(first <= given_up)
    first = np.where(lost, np.nan, first)
    return Times(due, sent, np.where(accepted <= end, accepted, np.nan), np.where(scheduled <= end, scheduled, np.nan),
                 first, np.where(late & ~lost, given_up, np.where(late, np.nan, last)), end, ~np.isnan(last) & ~late,
                 closed, target, shift)  # fmt: skip


def window(t: Times) -> tuple[float, float, bool]:
    """The steady window (s), by the rule of the analysis: see ``docs/metrics.md``; the whole point where it is too
    short."""
    sent, end = t.sent[~np.isnan(t.sent)], t.end[~np.isnan(t.sent)]
    if not len(sent):
        return 0.0, 0.0, False
    whole = (float(sent.min()), float(end.max()))
    if t.closed:
        n = round(t.target)
        if len(sent) < n:
            return *whole, False
        burst = np.argsort(np.where(np.isnan(t.sent), np.inf, t.sent), kind="stable")[:n]
        begun = np.where(np.isnan(t.first), t.end, t.first)[burst]
        # The loop stays at its target until the first end after the last send.
        low, last = max(float(np.sort(sent)[n - 1]), float(begun.max())), float(sent.max())
        high = float(end[end > last].min(initial=whole[1]))
    else:
        e2e = (t.last - t.origin)[t.ok]
        low = whole[0] + max(1.0, float(np.median(e2e)) if len(e2e) else 1.0)
        high = float(np.nanmax(t.due))
    inside = int(((t.origin >= low) & (t.origin <= high)).sum())
    needed = max(MIN_REQUESTS, t.target if t.closed or not np.isnan(t.target) else 0)
    if high - low < MIN_SHARE * (whole[1] - whole[0]) or inside < needed:
        return *whole, False
    return low, high, True


def _kv_use(p: Prepared, r: Result, t: Times, low: float, high: float) -> float:
    """Share of the KV space held by requests in work: each holds its prompt from its start and half its answer on
    average while it decodes. Of a split pair: of the decode engines, from the start of the hand-over (until then the KV
    is at the prefill engine). What is preempted counts on while it waits; the space is full then, and no more. What the
    client gave up holds its KV on: the engine finishes it (see ``times``)."""
    pool, engines = p.pools[-1], p.settings.engines[-1]
    w = p.warmed
    stop = np.where(np.isnan(r.last_s[w:]), r.end_s, r.last_s[w:]) - t.shift_s
    begin = r.scheduled_s[w:] - t.shift_s
    if len(p.pools) > 1:
        s = p.settings
        sent_s = s.handover_latency_s + s.handover_token_s * p.load.prompt[w:]
        begin = (
            r.first_s[w:] - t.shift_s - p.pools[0].reply_s + np.maximum(r.handover_s[w:] - sent_s, 0)
        )  # NaN: not handed over
    held = (p.load.prompt[w:] + p.load.output[w:] / 2) / pool.block
    a, b = np.maximum(begin, low), np.minimum(stop, high)
    area = np.nansum(np.maximum(b - a, 0) * held)
    return min(1.0, float(area / max(high - low, 1e-12) / max(pool.blocks * engines, 1)))


def _overlap(a: Floats, b: Floats, low: float, high: float) -> Floats:
    """The share of each a … b that lies in the window; of one without length whether it does."""
    length = b - a
    part = np.minimum(b, high) - np.maximum(a, low)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.where(length > 0, np.maximum(part, 0) / length, _within(b, low, high))
    return found


def _within(x: Floats, low: float, high: float) -> Floats:
    found: Floats = ((x >= low) & (x <= high)).astype(float)
    return found


def _time(a: Floats, b: Floats, low: float, high: float) -> float:
    return float(np.nansum(np.maximum(np.minimum(b, high) - np.maximum(a, low), 0)))
