"""What a paired trial shows: a claim per figure that was named beforehand, ``holds / fails / undecided``.

The trial is looked at after every whole A B B A (or B A A B) and may stop at any look, so its intervals are
always-valid ones (``judge/sequential.py``), and all claims of a trial share one error of ``ALPHA``: with k claims each
interval misses with ALPHA / k at most. Which order a block of four takes is tossed up, so that under no effect at all
whatever drifts falls on both arms alike. What was not named beforehand is described (``analyze/compare.py``), never
claimed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from whywait.analyze.compare import CAUSE, DEVICE, HIGHER, LOWER, PHASE, RATIO, Effect, metric_of
from whywait.analyze.occupancy import CATEGORIES
from whywait.analyze.phases import PHASES
from whywait.core.table import Array
from whywait.errors import UsageError
from whywait.judge.sequential import mean_half_width
from whywait.judge.vocabulary import CAUSES
from whywait.units import ms, number, percent

ALPHA = 0.05  # that any claim of a trial is wrong, however often it is looked at
MARGIN = 0.05  # a change below this is none
LEAST_WAIT = 0.01  # of a request's time: what A does not wait for cannot be cut
MANY = 1000  # times: what lies beyond is not told apart
WORTH = 0.005  # of a request's time, or of the device's: less is not worth a line
MUCH = 0.1  # … from which a phase is listed though it is not sure to have moved
FAR = 400  # pairs: what would take more is not promised
ABOVE, BELOW, SAME, OPEN = 1, -1, 0, 2

#: Where the time that a cause takes is seen: in a phase of the requests (its own part of it, where the account names
#: that), or in a category of the device. What is not here shows in no account.
SEEN_IN: dict[str, str] = {
    "slot limit": "causes.queue.slot limit",
    "kv space": "causes.queue.kv space",
    "neighbour's prefill": "causes.stall.neighbour's prefill",
    "poor speculation": "causes.decode.rejected speculation",
    "buffering proxy": "causes.decode.buffering",
    "weight-read-bound decode": "phases.decode",
    "KV-read-bound decode": "phases.decode",
    "compute-bound decode": "phases.decode",
    "compute-bound prefill": "phases.prefill",
    "prefix cache off": "phases.prefill",
    "prefix-cache thrash": "phases.prefill",
    "rate beyond capacity": "phases.queue",
    "long requests": "phases.queue",
    "host CPU": "occupancy.idle_host",
    "want of load": "occupancy.idle_no_work",
    "network latency": "phases.network",
    "the client itself": "phases.client",
    "interconnect": "occupancy.communication",
    "throttling": "occupancy.throttled",
    "unexplained": "phases.unknown",
}


@dataclass(frozen=True)
class Asked:
    """A claim to be tested: B moves ``metric`` at the load point labelled ``load`` ('' the main one) ``up`` or down."""

    metric: str
    up: bool
    load: str = ""
    price: bool = False  # what the technique is expected to cost, not what it is for


@dataclass(frozen=True)
class Claim:
    """``low`` and ``high`` bound the effect (``value``) always-validly, as a ratio B / A or, by ``scale``, a difference
    in ``unit``; infinite bounds are None. ``way`` is what the interval says: above, below, same (no change of the
    margin or more) or open. ``kind`` is metric, price or promise."""

    metric: str
    load: str
    claim: str
    state: str
    way: str
    scale: str
    unit: str
    a: float | None
    b: float | None
    value: float | None
    low: float | None
    high: float | None
    pairs: int
    kind: str
    evidence: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    next_step: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "evidence": list(self.evidence), "against": list(self.against)}


WAYS = {ABOVE: "above", BELOW: "below", SAME: "same", OPEN: "open"}


def asked_of(name: str) -> Asked:
    """``--metric``: that B makes this figure better (more of one that is neither good nor bad).

    Raises:
        UsageError: there is no such figure.
    """
    try:
        metric = metric_of(name)
    except KeyError:
        hint = "such as output_tokens_per_s, ttft_ms.p90, goodput_share or phases.queue; docs/ab.md has all"
        raise UsageError(f"--metric: there is no figure {name!r}", hint) from None
    return Asked(name, metric.better != LOWER)


def promise_of(name: str) -> Asked:
    """``--promise``: a cause, a phase of the requests or a category of the device, that B is to cut.

    Raises:
        UsageError: none of these, or a cause that shows in no account.
    """
    if name in PHASES:
        return Asked(PHASE + name, False)
    if name in CATEGORIES:
        return Asked(DEVICE + name, False)
    if name in SEEN_IN:
        return Asked(SEEN_IN[name], False)
    what = "shows in no account of time" if name in CAUSES else "is not a wait that is known"
    raise UsageError(f"--promise: {name!r} {what}", f"one of {', '.join((*PHASES, *CATEGORIES, *SEEN_IN))}")


def _promised(name: str, effects: Mapping[str, Effect]) -> Asked:
    """Where the promise shows in these rounds. An engine that tells only sums (vLLM without its per-request metrics)
    gives the time of a phase and no cause in it: then the whole phase stands for its cause."""
    asked = promise_of(name)
    phase = asked.metric.removeprefix(CAUSE).partition(".")[0]
    if not asked.metric.startswith(CAUSE) or any(n.startswith(f"{CAUSE}{phase}.") and e.n for n, e in effects.items()):
        return asked
    whole = effects.get(PHASE + phase)
    return Asked(PHASE + phase, False) if whole is not None and whole.n else asked


def ways(d: Array, alpha: float, margin: Array | float, floor: Array | float = 0.0) -> Array:
    """What differences of pairs along the last axis of ``d`` (..., n) show of their mean, by the always-valid interval
    at ``alpha``: ``ABOVE``, ``BELOW`` zero, ``SAME`` (wholly within ± ``margin``) or ``OPEN``."""
    mean, half = d.mean(axis=-1), mean_half_width(d, alpha, floor)
    out: Array = np.where(
        mean - half > 0, ABOVE, np.where(mean + half < 0, BELOW, np.where(np.abs(mean) + half < margin, SAME, OPEN))
    )
    return out


def claims(
    effects: Mapping[str, Mapping[str, Effect]], asked: Sequence[Asked], promise: str = "", margin: float = MARGIN
) -> list[Claim]:
    """Every claim of a trial as far as it is decided by now. ``effects`` are by load label, then by figure."""
    todo = [(a, "price" if a.price else "metric") for a in asked]
    if promise:
        todo.append((_promised(promise, effects.get("", {})), "promise"))
    alpha = ALPHA / max(1, len(todo))
    return [_claim(a, effects.get(a.load, {}), (alpha, margin), kind, promise) for a, kind in todo]


def decided(found: Sequence[Claim]) -> bool:
    return bool(found) and all(c.state != "undecided" for c in found)


def _claim(asked: Asked, effects: Mapping[str, Effect], rule: tuple[float, float], kind: str, promise: str) -> Claim:
    metric = metric_of(asked.metric)
    text = f"B {'raises' if asked.up else 'lowers'} {metric.title}"
    if kind == "promise":
        seen = "" if metric.title == promise else f" ({metric.title})"
        text = f"B cuts what it promises to cut: {promise}{seen}"
    text += f" at {asked.load}" if asked.load else ""
    e = effects.get(asked.metric)
    none = Claim(asked.metric, asked.load, text, "undecided", "open", metric.scale, metric.unit, None, None, None, None,
                 None, e.n if e else 0, kind)  # fmt: skip
    if e is None or not e.n:
        why = "no round knows this figure: give the engine's metrics, or an --slo for goodput"
        return replace(none, next_step=why if effects else "no pair of rounds is whole yet")
    alpha, share = rule
    d, margin = np.array(e.deltas), _margin(e, share, effects)
    mean, half = float(d.mean()), float(mean_half_width(d, alpha, e.floor))
    way = int(ways(d, alpha, margin, e.floor))
    if kind == "promise" and way in (SAME, OPEN) and (little := _hardly_waits(e, effects)):
        filled = _filled(none, e, mean, half)
        return replace(filled, evidence=(little,), next_step="choose a load at which A waits for it")
    wanted = ABOVE if asked.up else BELOW
    state = "undecided" if way == OPEN else "holds" if way == wanted else "fails"
    found = _filled(none, e, mean, half)
    return replace(
        found,
        state=state,
        way=WAYS[way],
        evidence=_evidence(e, found, way, share),
        against=_against(e, mean, way, margin),
        next_step=_more(e, alpha, margin) if way == OPEN else "",
    )


def _filled(none: Claim, e: Effect, mean: float, half: float) -> Claim:
    out = [mean, mean - half, mean + half] if math.isfinite(half) else [mean, None, None]
    if e.scale == RATIO:
        out = [None if v is None else math.exp(min(v, 700.0)) for v in out]
    value, low, high = out
    return replace(none, scale=e.scale, a=e.a, b=e.b, value=value, low=low, high=high)


def _margin(e: Effect, share: float, effects: Mapping[str, Effect]) -> float:
    """The least change that counts, on the scale of the deltas: of a wait as a part of the request's time."""
    usual = abs(e.a or 0.0)
    least = share * (_request_ms(effects) if e.name.startswith((PHASE, CAUSE)) else usual)
    if e.scale == RATIO:
        return math.log1p(least / usual)
    return share if e.metric.unit == "share" else least


def _request_ms(effects: Mapping[str, Effect]) -> float:
    """What a request of A takes, by its account."""
    return sum(x.a or 0.0 for n, x in effects.items() if n.startswith(PHASE) and x.n)


def _hardly_waits(e: Effect, effects: Mapping[str, Effect]) -> str:
    whole = 1.0 if e.metric.unit == "share" else _request_ms(effects)
    share = (e.a or 0.0) / whole if whole else 0.0
    if share >= LEAST_WAIT:
        return ""
    return f"A hardly waits for it at this load: {percent(share)} of its time"


def said(value: float | None, scale: str, unit: str) -> str:
    """An effect for people: ``+12.5 %`` or ``×12.5`` of a ratio, ``−3.2 ms`` of a difference."""
    if value is None:
        return "–"
    if scale == RATIO and not 1 / MANY < value < MANY:
        return f"over ×{MANY}" if value > 1 else f"under ÷{MANY}"
    if scale == RATIO and value > 10:
        return f"×{number(value)}"
    amount = (value - 1) * 100 if scale == RATIO else value * 100 if unit == "share" else value
    sign = "+" if amount > 0 else "−" if amount < 0 else "±"
    size = number(abs(amount)) if scale == RATIO or unit == "share" else (ms if unit == "ms" else number)(abs(amount))
    name = " %" if scale == RATIO else " points" if unit == "share" else "" if unit == "ms" else f" {unit}"
    return f"{sign}{size}{name}"


def _evidence(e: Effect, c: Claim, way: int, share: float) -> tuple[str, ...]:
    if c.low is None:
        return (f"{said(c.value, c.scale, c.unit)} in {e.n} pairs, too few for any interval",)
    between = f"{said(c.low, c.scale, c.unit)} … {said(c.high, c.scale, c.unit)}"
    out = [f"{said(c.value, c.scale, c.unit)}, surely {between}, from {e.n} pairs"]
    if way == SAME:
        out.append(f"no change of {percent(share)} or more")
    else:
        out.append(f"B was above A in {e.higher} of {e.n} pairs")
    return tuple(out)


def _against(e: Effect, mean: float, way: int, margin: float) -> tuple[str, ...]:
    out = []
    if way in (ABOVE, BELOW) and abs(mean) < margin:
        out.append("the change is smaller than what was said to count")
    if way in (ABOVE, BELOW) and (e.higher if mean > 0 else e.n - e.higher) < e.n:
        out.append("not every pair agrees")
    return tuple(out)


def _more(e: Effect, alpha: float, margin: float) -> str:
    n = pairs_needed(np.array(e.deltas), alpha, margin, e.floor)
    if n is None:
        return f"more than {FAR} pairs at this noise: make rounds longer (--requests, --duration) or the box quieter"
    return f"about {n} pairs would decide, if the rounds to come are like these"


def pairs_needed(d: Array, alpha: float, margin: float, floor: float = 0.0) -> int | None:
    """Pairs at which an effect and a spread like those of ``d`` would be decided; None above ``FAR`` or unknown."""
    n = len(d)
    if n < 2:
        return None
    mean, sd = float(d.mean()), max(float(d.std(ddof=1)), floor)
    for more in range(n + n % 2 + 2, FAR + 1, 2):
        half = half_width_of(sd, more, alpha)
        if abs(mean) > half or abs(mean) + half < margin:
            return more
    return None


def half_width_of(sd: float, n: int, alpha: float) -> float:
    """Half of the always-valid interval that ``n`` pairs of this spread would give: what a trial can see."""
    unit = np.resize([1.0, -1.0], n)  # any n values: scaled to the spread
    return float(mean_half_width(unit, alpha)) * sd / float(unit.std(ddof=1)) if n > 1 else math.inf


def waits(effects: Mapping[str, Effect], promise: str = "") -> list[dict[str, Any]]:
    """Which waits moved, request account first, by the size of their moves: ``name, title, account, a, b, difference``
    and, on ``scale``, ``value, low, high``; ``unit, way, promised``. By 95 % intervals one at a time: a description, no
    claim. What moved by less than ``WORTH`` of a request's (the device's) time is left out, and so is what is not sure
    to have moved (``way`` open) but a phase that differs by ``MUCH`` of a request's time.

    ``promised`` says that it is what B promised to cut; what grew (``way`` above) is the other side of it.
    """
    target, whole = _promised(promise, effects).metric if promise else "", _request_ms(effects)
    out = []
    for name, e in effects.items():
        if not name.startswith((PHASE, CAUSE, DEVICE)) or not e.n:
            continue
        size = abs(e.difference.value or 0.0) / (1.0 if e.metric.unit == "share" else whole or 1.0)
        unsure = name.startswith(PHASE) and size >= MUCH  # a price that few pairs leave open is not kept back
        if name != target and not (e.moved and size >= WORTH) and not unsure:
            continue
        value, low, high = (e.ratio if e.scale == RATIO else e.difference)[:3]
        out.append({
            "name": name, "title": e.metric.title, "account": "device" if name.startswith(DEVICE) else "request",
            "a": e.plain[0], "b": e.plain[1], "difference": e.difference.value,
            "value": value, "low": low, "high": high, "unit": e.metric.unit, "scale": e.scale,
            "way": WAYS[e.moved] if e.moved else "open", "promised": name == target,
        })  # fmt: skip
    return sorted(out, key=lambda w: (w["account"] == "device", -abs(w["difference"])))


def noise(effects: Mapping[str, Effect], names: Sequence[str], pairs: int) -> dict[str, float | None]:
    """The least change (a share of a ratio, else in its unit) that ``pairs`` such pairs would surely see."""
    alpha = ALPHA / max(1, len(names))
    out: dict[str, float | None] = {}
    for name in names:
        e = effects.get(name)
        half = half_width_of(max(float(np.std(e.deltas, ddof=1)), e.floor), pairs, alpha) if e and e.n > 1 else math.inf
        out[name] = None if not math.isfinite(half) else math.expm1(half) if e and e.scale == RATIO else half
    return out


def better(c: Claim) -> bool:
    """That the claim's figure surely became better."""
    return c.way == {HIGHER: "above", LOWER: "below"}.get(metric_of(c.metric).better)


def worse(c: Claim) -> bool:
    """That the claim's figure surely became worse."""
    return c.way == {HIGHER: "below", LOWER: "above"}.get(metric_of(c.metric).better)
