"""Doubt the measurement first: everything about a Run that makes its figures worth less, each with what to do next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.analyze.counters import SHARES, delta, no_share
from whywait.analyze.integrity import unasked
from whywait.analyze.latency import CLOSED, OK, Latency, per_request
from whywait.analyze.offered import RATE, offered
from whywait.analyze.passive import is_passive
from whywait.analyze.phases import histogram_mean_ms
from whywait.analyze.stats import Doubt, order_ranks
from whywait.analyze.window import Window, in_flight, starts_inside, window_of
from whywait.core.columns import CLOCKS, KINDS
from whywait.core.run import Run, doubt
from whywait.core.table import Array
from whywait.units import NS_PER_MS, NS_PER_S, load_name, number, percent

STILL_MS = 500.0  # a sampler that wakes so late was not merely slow: a tick is a few ms late
LAG = (0.02, 5.0)  # the client's sends or reads may be late (p99) by this share of end-to-end time, and this many ms
BUSY = 0.9  # share of a core from which on the client is its own bottleneck
COALESCED = 0.05
LENGTHS = 0.02  # realised against asked lengths
CACHED = 0.05
FOREIGN = 0.02
ENGINE_TTFT = (0.2, 5.0)  # client's mean TTFT beyond the engine's: by this share and by this many ms
FLOOR = 0.1  # the client's own error may be this share of what is measured
_USER = CLOCKS.index("user")
_ROLE = KINDS.index("role")


@dataclass(frozen=True)
class Foreign:
    """Growth of a service's counter over a span, surely within ``seen_low`` … ``seen_high``, against what we sent then,
    surely within ``sent_low`` (requests wholly inside) … ``sent_high`` (all that touch it); tokens or requests."""

    name: str
    seen_low: float
    seen_high: float
    sent_low: float
    sent_high: float

    @property
    def excess(self) -> float:
        """Growth that cannot be ours (positive), or of ours that the counter surely missed (negative), else 0."""
        return max(self.seen_low - self.sent_high, 0.0) + min(self.seen_high - self.sent_low, 0.0)


@dataclass(frozen=True)
class _Part:
    """One load point as the checks see it."""

    number: int
    whole: Run
    run: Run
    window: Window
    lat: Latency
    inside: Array


def _partial(run: Run) -> Doubt:
    """With the load points that were never begun, where the run says which it was to have."""
    why = run.manifest.partial_reason or "it was cut short"
    loads = run.manifest.journey.get("loads") or ()
    names = [load_name(str(x.get("mode")), x.get("target"), str(x.get("label") or "")) for x in loads
             if isinstance(x, dict)]  # fmt: skip
    if missing := names[len(run.points) :]:
        why += f"; not measured: {', '.join(missing)}"
    return doubt("the run is PARTIAL", why, "whywait resume RUN measures the rest" if names else "run it again")


def doubts(run: Run) -> list[Doubt]:
    """Every doubt about ``run`` as ``{what, why, next}``, those of the manifest first; each kind at most once, naming
    the points it concerns.

    Looked at: client lag and CPU, coalesced reads and whose fault they are, realised lengths, rate and requests in
    flight, cached prompts, foreign traffic, client TTFT against the engine's, points without a steady window, too few
    samples, user clock, clock steps, the client's floor, probes that did not answer,
    a sampler that stood still, a partial Run.
    """
    parts = [p for p in (_part(run, int(p)) for p in run.points["point"]) if not is_passive(p.run)]
    found = [dict(d) for d in run.manifest.doubts]
    if run.manifest.partial:
        found.append(_partial(run))
    whole: tuple[Callable[[Run], Doubt | None], ...] = (
        _client_lag, _coalesced, unasked, _user_clock, _clock_steps, _lost_probes, _sampler_still, _no_shares,
    )  # fmt: skip
    found += [d for check in whole if (d := check(run))]
    pointwise: tuple[Callable[[list[_Part]], Doubt | None], ...] = (
        _lengths, _rate, _load, _cache, _foreign, _engine_ttft, _no_window, _few, _floor,
    )  # fmt: skip
    return found + [d for each in pointwise if (d := each(parts))]


def foreign(run: Run, point: int | None = None) -> list[Foreign]:
    """The service's counters against what we sent, for one load point or (None) the whole Run; empty without counters.

    Tokens of requests that failed or lie across an end of the span are bounded by 0 and the length asked for, infinite
    where that is not known. ``run`` must be whole: requests of neighbouring points count too.
    """
    pts = run.points if point is None else run.points.where(run.points["point"] == point)
    if not len(pts):
        return []
    span = (int(pts["start_ns"].min()), int(pts["end_ns"].max()))
    req = run.requests
    one = np.where(np.isnan(req["sent_ns"]), 0.0, 1.0)
    prompt, output = req["prompt_tokens"], req["output_tokens"]
    most_prompt = np.fmax(prompt, req["asked_prompt_tokens"])
    computed = np.where(np.isnan(req["cached_tokens"]), req["engine_prefill_tokens"], prompt - req["cached_tokens"])
    what: tuple[tuple[str, Array, Array], ...] = (
        ("requests_total", one, one),
        ("output_tokens_total", output, np.fmax(output, req["asked_output_tokens"])),
        ("prompt_tokens_total", prompt, most_prompt),
        ("prompt_tokens_computed_total", computed, most_prompt),
    )
    sent, end = req["sent_ns"], np.where(np.isnan(req["end_ns"]), np.inf, req["end_ns"])
    out = []
    for name, sure, most in what:
        grown = delta(run.readings, name, span)
        if grown is not None:
            touches = (sent <= grown.end_ns) & (end >= grown.start_ns)
            within = touches & (sent >= grown.start_ns) & (end <= grown.end_ns)
            surely = within & (req["outcome"] == OK) & ~np.isnan(sure)
            high = np.where(surely, sure, np.where(np.isnan(most), np.inf, most))
            sums = float(sure[surely].sum()), float(high[touches].sum())
            out.append(Foreign(name, grown.low, grown.high, *sums))
    return out


def _part(run: Run, number_: int) -> _Part:
    one = run.point(number_)
    window = window_of(one)
    inside = (
        starts_inside(one, window.start_ns, window.end_ns) if not window.whole else np.ones(len(one.requests), bool)
    )
    return _Part(number_, run, one, window, per_request(one), inside)


def _at(parts: list[tuple[int, str]]) -> str:
    return "; ".join(f"point {n}: {text}" for n, text in parts[:4]) + ("; …" if len(parts) > 4 else "")


def _client_lag(run: Run) -> Doubt | None:
    client, found = run.manifest.client, []
    took = per_request(run).e2e_ms
    limit = max(LAG[1], LAG[0] * float(np.median(took[~np.isnan(took)]))) if not np.isnan(took).all() else LAG[1]
    late = (run.requests["sent_ns"] - run.requests["due_ns"]) / NS_PER_MS
    if run.manifest.workload.get("max_in_flight") is not None:
        # Under a cap waiting is meant, and told by itself; only a closed loop's sends still show the client's lag.
        late = late[np.isin(run.requests["point"], run.points["point"][run.points["mode"] == CLOSED])]
    late = late[~np.isnan(late)]
    if len(late) and (p99 := float(np.quantile(late, 0.99))) > limit:
        found.append(f"sends were {number(p99, 'ms')} late (p99)")
    if (read := _number(client.get("read_lag_ms"), "p99")) is not None and read > limit:
        found.append(f"reads were {number(read, 'ms')} late (p99)")
    if (cpu := _cpu_share(run)) is not None and cpu > BUSY:
        found.append(f"it used {percent(cpu)} of a core")
    if not found:
        return None
    return doubt("the client did not keep up", ", ".join(found), "free a core for it, or use more processes")


def _cpu_share(run: Run) -> float | None:
    """The share of one core that the client's loop used at its busiest point."""
    used, shares = run.manifest.client.get("cpu_ns_by_point"), []
    for row in run.points.rows():
        ns = _number(used, str(row["point"]))
        if ns is not None and row["end_ns"] > row["start_ns"]:
            shares.append(ns / (row["end_ns"] - row["start_ns"]))
    return max(shares, default=None)


def _coalesced(run: Run) -> Doubt | None:
    content = some = 0
    for part in run.chunks.pieces():
        mine = part["kind"] != _ROLE
        content, some = content + int(mine.sum()), some + int((~np.isnan(part["t_low_ns"]) & mine).sum())
    if not content:
        return None
    share = some / content
    if share <= COALESCED:
        return None
    reads = _number(run.manifest.client.get("coalesced_reads"))
    late = _number(run.manifest.client.get("coalesced_reads_while_late"))
    if reads is None or late is None or reads <= 0:
        whose, next_ = "whose doing is not known", "watch the client's CPU, and ask without the proxy"
    elif late > reads / 2:
        whose, next_ = f"mostly ({percent(late / reads)}) while our own loop was late", "free a core for the client"
    else:
        whose, next_ = "while our own loop was on time, so a proxy or the server buffers", "ask without the proxy"
    return doubt(f"{percent(share)} of the chunks came with others in one read", whose, next_)


def _user_clock(run: Run) -> Doubt | None:
    user = sum(int((part["clock"] == _USER).sum()) for part in run.chunks.pieces())
    if not user:
        return None
    share = percent(user / len(run.chunks))
    if run.manifest.made_by == "imported":
        why = "the tool stamps chunks in its own loop, and how late that was is not in its files"
        return doubt(f"{share} of the chunks are timed by another tool's loop", why, "measure beside it with whywait")
    why = "there was no kernel receive stamp (macOS, Unix sockets, some sandboxes), so our own lateness is in the times"
    return doubt(f"{share} of the chunks are timed by the client's own clock", why, "measure on Linux over TCP")


def _clock_steps(run: Run) -> Doubt | None:
    steps = sum(_number(c.get("steps")) or 0 for c in run.manifest.clock)
    if not steps:
        return None
    why = "stamps taken across a step were refused and replaced by the client's own clock"
    return doubt(f"the system clock stepped {steps:.0f} times during the run", why, "run again while NTP is settled")


def _lost_probes(run: Run) -> Doubt | None:
    rd = run.readings
    bad = np.isnan(rd["value"]) | ((rd["name"] == "answered") & (rd["value"] == 0))
    if not bad.any():
        return None
    names = ", ".join(sorted({str(s) for s in rd["source"][bad]})[:4])
    return doubt(f"{int(bad.sum())} readings were not answered", f"source: {names}", "see whether it is overloaded")


def _sampler_still(run: Run) -> Doubt | None:
    rd = run.readings
    woke = rd.rows_with("name", "lateness_ms")
    woke = woke[[s == "sampler" for s in rd["source"][woke].tolist()]]
    if not len(woke) or not (late := float(rd["value"][woke].max())) > STILL_MS:
        return None
    at = float(rd["asked_ns"][woke[int(np.argmax(rd["value"][woke]))]]) / NS_PER_S
    why = f"for {late / 1e3:.1f} s until {at:.1f} s it was suspended, or got no CPU; nothing was read meanwhile"
    return doubt("the sampler stood still", why, "do not trust gauges of that time; free a core for it")


def _no_shares(run: Run) -> Doubt | None:
    rd = run.readings
    for name in SHARES:
        values = rd["value"][rd["name"] == name]
        if len(bad := values[no_share(name, values)]):
            why = f"{len(bad)} readings from {number(float(bad.min()))} to {number(float(bad.max()))} are left out"
            return doubt(f"{name} is not a share between 0 and 1", why, "percent? scale = 0.01 in the engine file")
    return None


def _lengths(parts: list[_Part]) -> Doubt | None:
    found = []
    for p in parts:
        req = p.run.requests
        for what in ("prompt", "output"):
            real, asked = req[f"{what}_tokens"][p.lat.ok], req[f"asked_{what}_tokens"][p.lat.ok]
            known = ~np.isnan(real) & ~np.isnan(asked)
            if known.any() and (want := float(asked[known].mean())) > 0:
                off = float(real[known].mean()) / want - 1
                if abs(off) > LENGTHS:
                    found.append((p.number, f"{what} {off:+.0%} of {number(want)} tokens"))
    if not found:
        return None
    return doubt("lengths are not what was asked for", _at(found), "use ignore_eos, or calibrate the prompts")


def _rate(parts: list[_Part]) -> Doubt | None:
    found = []
    for p in parts:
        if p.run.points["mode"][0] == CLOSED:
            continue
        o = offered(p.run)
        want, got = o["asked_per_s"], o["sent_per_s"] or 0.0
        if want and abs(got / want - 1) > RATE:
            found.append((p.number, f"{number(got)} of {number(want)} requests/s were sent"))
    if not found:
        return None
    return doubt("the load was not offered as planned", _at(found), "see client lag and requests never sent")


def _load(parts: list[_Part]) -> Doubt | None:
    found = []
    for p in parts:
        target = float(p.run.points["target"][0])
        if p.run.points["mode"][0] == CLOSED and target > 0:
            mean = in_flight(p.run, p.window.start_ns, p.window.end_ns)[1]
            if abs(mean / target - 1) > RATE:
                found.append((p.number, f"{number(mean)} of {target:.0f}"))
    if not found:
        return None
    return doubt("requests in flight were not the target on average", _at(found), "send more requests per point")


def _cache(parts: list[_Part]) -> Doubt | None:
    asked = str(parts[0].run.manifest.workload.get("cache", "unknown")) if parts else ""
    found = []
    for p in parts:
        cached, prompt = p.run.requests["cached_tokens"], p.run.requests["prompt_tokens"]
        known = ~np.isnan(cached) & ~np.isnan(prompt)
        total = float(prompt[known].sum())
        if total and (share := float(cached[known].sum()) / total) > CACHED:
            found.append((p.number, f"{percent(share)} of the prompt tokens"))
    if not found or asked == "warm":
        return None
    why = f"{_at(found)} were read from the prefix cache, while the workload's cache is {asked}"
    return doubt("times to first token are those of a warm cache", why, "use --cache cold for the cost of a prompt")


def _foreign(parts: list[_Part]) -> Doubt | None:
    more: list[tuple[int, str]] = []
    less: list[tuple[int, str]] = []
    for p in parts:
        for f in foreign(p.whole, p.number):
            # A counter may differ by a start or stop token per request; that is no stranger.
            slack = FOREIGN * f.sent_low + (len(p.run.requests) if "tokens" in f.name else 1)
            if f.excess > slack:
                more.append((p.number, f"{f.name} grew by {number(f.seen_low)}, we sent {number(f.sent_high)}"))
            elif f.excess < -slack:
                less.append((p.number, f"{f.name} grew by {number(f.seen_high)}, we sent {number(f.sent_low)}"))
    if more:
        why = f"{_at(more)}: what is derived from the engine's counters and histograms is not ours alone"
        return doubt("others use the service too", why, "measure an idle replica, or at a quiet hour")
    if less:
        why = f"{_at(less)}: the metrics do not cover all that answered us"
        return doubt("the service's counters saw less than we sent", why, "read the metrics of every replica")
    return None


def _engine_ttft(parts: list[_Part]) -> Doubt | None:
    found = []
    for p in parts:
        span = (int(p.run.points["start_ns"][0]), int(p.run.points["end_ns"][0]))
        theirs = histogram_mean_ms(p.whole, "ttft_seconds", span)
        ours = (p.run.requests["first_ns"] - p.run.requests["sent_ns"]) / NS_PER_MS
        ours = ours[~np.isnan(ours)]
        if theirs is None or not len(ours):
            continue
        mine = float(ours.mean())
        if abs(mine - theirs) > max(ENGINE_TTFT[0] * theirs, ENGINE_TTFT[1]):
            found.append((p.number, f"{number(mine, 'ms')} at the client, {number(theirs, 'ms')} in the engine"))
    if not found:
        return None
    next_ = "look at the path: network, proxy, the engine's front end, the client itself"
    return doubt("the engine's time to first token is not the client's", _at(found), next_)


def _no_window(parts: list[_Part]) -> Doubt | None:
    found = [(p.number, p.window.why) for p in parts if p.window.whole]
    if not found:
        return None
    what = "figures are over whole points, warm-up and drain included"
    return doubt(what, _at(found), "send more requests per point")


def _few(parts: list[_Part]) -> Doubt | None:
    found = []
    for p in parts:
        n = int((p.lat.ok & p.inside).sum())
        lacking = [name for name, q in (("p90", 0.9), ("p95", 0.95), ("p99", 0.99)) if order_ranks(n, q)[1] is None]
        if lacking:
            found.append((p.number, f"{n} requests, no upper bound for {', '.join(lacking)}"))
    if not found:
        return None
    return doubt("high percentiles are not bounded", _at(found), "36 requests bound p90, 72 p95, 368 p99")


def _floor(parts: list[_Part]) -> Doubt | None:
    floor = parts[0].run.manifest.client.get("floor") if parts else None
    error = _number(floor.get("stamp_error_ms"), "p99") if isinstance(floor, dict) else None
    if error is None:
        return None
    found = []
    for p in parts:
        for name, values in (("TTFT", p.lat.ttft_ms), ("TPOT", p.lat.tpot_ms)):
            known = values[p.lat.ok & ~np.isnan(values)]
            if len(known) and error > FLOOR * (middle := float(np.median(known))):
                found.append((p.number, f"{name} {number(middle, 'ms')}"))
    if not found:
        return None
    why = f"its stamps are off by {number(error, 'ms')} (p99), measured against a known service: {_at(found)}"
    return doubt("the client's own error is more than a tenth of what it measures", why, "free a core for the client")


def _number(value: Any, key: str | None = None) -> float | None:
    if key is not None:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
