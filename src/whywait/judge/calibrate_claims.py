"""What a change would do, claim by claim: paired draws of before and after in, better, worse or undecided out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from whywait.judge.calibrate import Calibration, Vector, family
from whywait.judge.calibrate_check import Check, Interval, spread
from whywait.judge.calibrate_doubt import doubt
from whywait.units import ms, number

BETTER, WORSE, SAME, UNDECIDED = "better", "worse", "same", "undecided"
MORE, LESS = "more", "less"  # of what is neither good nor bad
#: Which way is better: +1 more, −1 less, 0 neither.
GOOD: Mapping[str, int] = {
    "ttft_ms": -1, "tpot_ms": -1, "e2e_ms": -1, "output_tokens_per_s": 1, "requests_per_s": 1,
    "goodput_requests_per_s": 1, "kv_use": 0, "energy_j_per_token": -1, "usd_per_million_tokens": -1,
}  # fmt: skip
#: What a headline names, in that order.
NAMES: Mapping[str, str] = {"ttft_ms.p50": "TTFT", "tpot_ms.p50": "TPOT", "output_tokens_per_s": "tokens/s",
                            "goodput_requests_per_s": "goodput", "usd_per_million_tokens": "cost"}  # fmt: skip
_SHOW: Mapping[str, Callable[[float], str]] = {
    "ttft_ms.p50": ms, "tpot_ms.p50": ms, "usd_per_million_tokens": lambda x: number(x, "$ per M"),
    "goodput_requests_per_s": lambda x: number(x, "requests/s"),
}  # fmt: skip
MATTERS = 0.03  # a change whose whole interval lies within this share of nothing is no change
SMALL = 0.05  # an effect smaller than this (log) brings its share of the error of a change only
OF_EFFECT = 0.15  # error of an effect as a share of it, whatever else is known …
OF_EFFECT_TWO = (
    0.3  # … and where two loads were all there was: changes of the exam's runs were a third larger or smaller
)
FEW = 1 / 3  # of the draws: a figure that more of them could not give is not claimed


@dataclass(frozen=True)
class Claim:
    """One figure at one load. ``measured`` is None where it was not measured (another load, or no reading);
    ``simulated`` the baseline as simulated; ``after`` what measuring the what-if would show: measured × change where
    there is a measurement, else as simulated with what is known of the discrepancy. ``change`` is the ratio after /
    before with its 80 % interval. ``why`` says why it is undecided, where that is not the interval."""

    load: str
    metric: str
    measured: float | None
    simulated: Interval | None
    after: Interval | None
    change: Interval | None
    state: str
    why: str = ""

    def as_dict(self) -> dict[str, object]:
        def plain(x: Interval | None) -> dict[str, float] | None:
            return None if x is None else {"median": x.median, "low": x.low, "high": x.high}

        return {"load": self.load, "metric": self.metric, "measured": self.measured,
                "simulated": plain(self.simulated), "after": plain(self.after), "change": plain(self.change),
                "state": self.state, "why": self.why or None}  # fmt: skip


@dataclass(frozen=True)
class Pairs:
    """Outcomes of the same draws before and after: a mapping per draw. ``theta`` (draws × parameters) are theirs, and
    ``at`` says where the load lies. ``noise`` is the sampling error of what was measured there, log-sd by family."""

    load: str
    at: tuple[float, ...]
    theta: Vector
    before: Sequence[Mapping[str, float]]
    after: Sequence[Mapping[str, float]]
    noise: Mapping[str, float] = field(default_factory=dict)


def claims(
    found: Calibration, pairs: Pairs, measured: Mapping[str, float], refused: str = "", changed: bool = True
) -> list[Claim]:
    """A claim per figure that was simulated. ``refused``: why nothing may be claimed, if so. ``changed``: whether the
    deployment changed at all, and not only the load."""
    names = list(dict.fromkeys(k for said in pairs.before for k in said))
    out = []
    for name in names:
        claim = _claim(found, pairs, name, measured.get(name), changed)
        if claim is not None:
            if refused and claim.state != UNDECIDED:
                claim = Claim(**{**claim.__dict__, "state": UNDECIDED, "why": refused})
            out.append(claim)
    return out


def state_of(metric: str, change: Interval) -> tuple[str, str]:
    """The state a change is in, and why where it is undecided."""
    if max(abs(change.low - 1), abs(change.high - 1)) < MATTERS:
        return SAME, ""
    if change.low <= 1 <= change.high:
        return UNDECIDED, "the interval of the change includes none at all"
    up = change.low > 1
    way = GOOD.get(metric.partition(".")[0], 0) * (1 if up else -1)
    return (BETTER if way > 0 else WORSE if way < 0 else MORE if up else LESS), ""


def error_of_change(effect: Vector, least: float, share: float = OF_EFFECT) -> float:
    """Log-sd of what the simulator has wrong in an effect (draws of log after / before) beside its parameters:
    ``least`` and a share of it. A change that does nothing in any draw is no change, and has no error."""
    mean = abs(float(effect.mean()))
    size = mean + float(effect.std())
    return math.hypot(least * min(1.0, size / SMALL), share * mean)


def _claim(found: Calibration, pairs: Pairs, name: str, measured: float | None, changed: bool) -> Claim | None:
    before = np.array([s.get(name, math.nan) for s in pairs.before])
    after = np.array([s.get(name, math.nan) for s in pairs.after])
    known = np.isfinite(before) & np.isfinite(after) & (before > 0) & (after > 0)
    metric = _like(name)
    if known.mean() < 1 - FEW:
        return _nothing(pairs.load, name, measured, before, after)
    b, a = np.log(before[known]), np.log(after[known])
    off, sd = found.offset(metric, pairs.at, pairs.theta[known])
    share = OF_EFFECT if len(found.points) > 2 else OF_EFFECT_TWO
    wrong = error_of_change(a - b, found.knobs.change(metric), share) if changed else 0.0
    simulated, change = spread(b, 0.0, found.knobs.tail), spread(a - b, wrong, found.knobs.tail)
    again = found.knobs.again
    if measured:  # as measured, and then measured again
        sampling = math.hypot(pairs.noise.get(family(name), again), pairs.noise.get(family(name), again))
        absolute = spread(a - b + math.log(measured), math.hypot(wrong, sampling, again), found.knobs.tail)
    else:
        absolute = spread(a + off, math.hypot(sd, wrong, again), found.knobs.tail)
    state, why = state_of(name, change)
    return Claim(pairs.load, name, measured, simulated, absolute, change, state, why)


def _nothing(load: str, name: str, measured: float | None, before: Vector, after: Vector) -> Claim | None:
    """Where a logarithm makes no sense: nothing before, nothing after, or not known in too many draws."""
    none = Interval(0.0, 0.0, 0.0)
    if (np.isnan(before) | np.isnan(after)).all():
        return None if measured is None else Claim(load, name, measured, None, None, None, UNDECIDED, "not simulated")
    if not (after > 0).any() and not np.isnan(after).any():
        if not (before > 0).any():
            return Claim(load, name, measured, none, none, None, SAME)
        if (before > 0).all() and GOOD.get(name.partition(".")[0], 0) > 0:
            return Claim(load, name, measured, spread(np.log(before), 0.0, 9.0), none, None, WORSE)
    if not (before > 0).any() and (after > 0).all() and GOOD.get(name.partition(".")[0], 0) > 0:
        return Claim(load, name, measured, none, spread(np.log(after), 0.0, 9.0), None, BETTER)
    return Claim(load, name, measured, None, None, None, UNDECIDED, "it is zero in some draws and not in others")


def _like(name: str) -> str:
    """The calibrated metric whose discrepancy a figure has: percentiles that were not calibrated have that of the
    nearest that was; what follows from tokens per second has that of tokens per second."""
    head, _, stat = name.partition(".")
    if head in ("usd_per_million_tokens", "energy_j_per_token", "requests_per_s", "goodput_requests_per_s"):
        return "output_tokens_per_s"
    return f"{head}.{'p90' if stat in ('p99', 'p95') else stat}" if stat else head


def doubted(found: Sequence[Claim], checked: Check, changed: bool = True, slo: Collection[str] = ()) -> list[Claim]:
    """The claims, those undecided that the loads left out contradict. Where the service is not ``changed`` the claim is
    the figure itself, which a load that was measured needs no simulator for. ``slo``: the keys that goodput is made
    by."""
    out = []
    for c in found:
        sizes = (c.measured, c.after.median if c.after else None)
        told = c.state not in (UNDECIDED, SAME) if changed else c.state != UNDECIDED and c.measured is None
        why = doubt(checked, c.load, c.metric, sizes, slo) if told else ""
        out.append(replace(c, state=UNDECIDED, why=why) if why else c)
    return out


def scaled(claim: Claim, before: tuple[float, float], after: tuple[float, float], cancels: bool) -> Claim:
    """A claim of a figure that is a multiple of something known as a range only, such as a price: ``before`` and
    ``after`` are its least and most over its middle. Where it is the very same thing before and after it ``cancels`` in
    the change."""

    def wide(x: Interval | None, low: float, high: float) -> Interval | None:
        return None if x is None else Interval(x.median, x.low * low, x.high * high)

    change = claim.change if cancels else wide(claim.change, after[0] / before[1], after[1] / before[0])
    out = replace(claim, after=wide(claim.after, *after), simulated=wide(claim.simulated, *before), change=change)
    if cancels or change is None or claim.state == UNDECIDED:
        return out
    state, why = state_of(claim.metric, change)
    return replace(out, state=state, why=why and "the price is known as a range only, and the interval holds it")


def _percent(change: Interval | None, after: Interval | None = None) -> str:
    if change is None:  # no ratio: there was none before, or there is none after
        return "from none" if after is not None and after.median > 0 else "falls to none"
    if change.median > 3:
        return f"× {change.median:.1f} ({change.low:.1f} … {change.high:.1f})"
    low, high = 100 * (change.low - 1), 100 * (change.high - 1)
    return f"{100 * (change.median - 1):+.0f} % ({low:+.0f} … {high:+.0f})"


def headline(what: str, found: Sequence[Claim], refused: str, changed: bool = True) -> str:
    """One sentence: what changes for sure, at which load; where only the load is another, what is predicted there."""
    if refused:
        return f"{what}: undecided, {refused}"
    if not changed:
        return f"{what}: {_predicted(found)}"
    sure = [c for c in found if c.state in (BETTER, WORSE)]
    if not sure:
        same = bool(found) and all(c.state == SAME for c in found if GOOD.get(c.metric.partition(".")[0], 0))
        why = next((c.why for c in reversed(found) if c.state == UNDECIDED and c.metric in NAMES and c.why), "")
        return f"{what}: no change that matters" if same else f"{what}: undecided{f', {why}' if why else ''}"
    heaviest = sure[-1].load  # loads come in the order they were measured in
    here = [c for c in sure if c.load == heaviest]
    said = [f"{NAMES[c.metric]} {_percent(c.change, c.after)}" for c in here if c.metric in NAMES]
    said = said or [f"{c.metric} {_percent(c.change, c.after)}" for c in here[:3]]
    open_ = [NAMES[c.metric] for c in found if c.load == heaviest and c.state == UNDECIDED and c.metric in NAMES]
    rest = f"; undecided: {', '.join(open_)}" if open_ else ""
    above = {c.load: None for c in found[found.index(sure[-1]) :] if c.load != heaviest and c.state == UNDECIDED}
    rest += f"; undecided at {', '.join(above)}" if above else ""
    return f"{what}: at {heaviest} {', '.join(said)}{rest}"


def _predicted(found: Sequence[Claim]) -> str:
    said, open_ = [], []
    for c in found:
        if c.metric in NAMES and c.after is not None and found[-1].load == c.load:
            if c.state == UNDECIDED:
                open_.append(NAMES[c.metric])
                continue
            show = _SHOW.get(c.metric, number)
            said.append(f"{NAMES[c.metric]} {show(c.after.median)} ({number(c.after.low)} … {number(c.after.high)})")
    said += [f"undecided: {', '.join(open_)}"] if open_ else []
    return ", ".join(said) or "no figure could be predicted"
