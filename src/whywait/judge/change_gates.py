"""``--fail-if`` on a comparison: conditions on a change against A, decided only where its interval decides.

``goodput<-5%`` a relative change; ``ttft_ms.p95>+20ms`` a change in the figure's own unit (a sign makes it a change,
``pp`` are points of a share); ``ttft_ms.p95>500`` B's own value, as ``whywait run`` has it; ``worse`` any claimed
figure that surely became worse by the threshold or more. A gate *fails* where the whole interval of the change lies
beyond its limit, *passes* where it lies on this side, and is *undecided* otherwise; what is unknown does not pass.
``worse`` passes where no claimed figure may be worse by the threshold. ``%`` of a share is refused: people mean points
or the share itself. The intervals of all gates of a comparison share one error of 5 %.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whywait.analyze.against import BY_RUNS, Change, Comparison, figure_of
from whywait.analyze.compare import HIGHER, LOWER, RATIO
from whywait.analyze.digest import COST, ENERGY, Point, told
from whywait.errors import UsageError
from whywait.judge.compared import ALPHA, Finding, outward
from whywait.judge.gates import OPS
from whywait.judge.paired import said
from whywait.units import ms, number, percent

FAILS, PASSES, UNDECIDED = "fails", "passes", "undecided"
WORSE = "worse"
ALIASES = {"goodput": "goodput_requests_per_s", "throughput": "output_tokens_per_s", "energy": ENERGY, "cost": COST}
EXAMPLE = "such as 'goodput<-5%', 'ttft_ms.p95>+20ms' or 'ttft_ms.p95>500' (docs/compare.md)"
COUNTED = ("memory_bytes", "model_bytes", "kv_tokens", "preemptions", "kv_use_max", "running_max")
_FORM = re.compile(r"\s*([a-z_][a-z0-9_]*(?:\.[\w' -]*\w)*)\s*(<=|>=|<|>)\s*([+-]?)\s*([\d.]+(?:[eE][+-]?\d+)?)\s*"
                   r"(%|pp|ms|s|us|)\s*")  # fmt: skip
MOST_TIMES = 100  # as many requests: what would take more is not promised
_MS = {"ms": 1.0, "s": 1000.0, "us": 0.001}


@dataclass(frozen=True)
class ChangeGate:
    """``kind`` is ratio (``limit`` a share: −0.05), difference (in the figure's unit), level or worse."""

    text: str
    figure: str
    op: str
    limit: float
    kind: str


def parse(texts: Sequence[str]) -> list[ChangeGate]:
    """
    Raises:
        UsageError: not a condition, or on a figure that no comparison has.
    """
    out = []
    for text in texts:
        if text.strip() == WORSE:
            out.append(ChangeGate(WORSE, WORSE, "", 0.0, WORSE))
            continue
        form = _FORM.fullmatch(text)
        try:
            limit = float(form[4]) if form else math.nan
        except ValueError:
            limit = math.nan
        if form is None or not math.isfinite(limit):
            raise UsageError(f"--fail-if {text!r} is not KEY<CHANGE", EXAMPLE)
        out.append(_gate(text.strip(), ALIASES.get(form[1], form[1]), form, limit))
    return out


def _gate(text: str, name: str, form: re.Match[str], limit: float) -> ChangeGate:
    sign, unit = form[3], form[5]
    try:
        metric = figure_of(name)
    except KeyError:
        raise UsageError(f"--fail-if: no comparison has {name!r}", EXAMPLE) from None
    signed = -limit if sign == "-" else limit
    if unit == "%":
        if metric.unit == "share":
            hint = f"points: '{name}{form[2]}{sign or '+'}{limit:g}pp'"
            level = "" if sign else f"; the share in B: '{name}{form[2]}{limit / 100:.6g}'"
            raise UsageError(f"--fail-if {text!r}: {name} is a share itself, and % is of A's value", hint + level)
        return ChangeGate(text, name, form[2], signed / 100, "ratio")
    if (unit == "pp" and metric.unit != "share") or (unit in _MS and metric.unit != "ms"):
        raise UsageError(f"--fail-if {text!r}: {name} is not in {unit}", f"its unit is {metric.unit or 'none'}")
    value = signed * _MS.get(unit, 1.0) / (100 if unit == "pp" else 1)
    return ChangeGate(text, name, form[2], value, "difference" if sign or unit == "pp" else "level")


def judge(
    gates: Sequence[ChangeGate], at: Sequence[tuple[Comparison, Sequence[Finding]]], share: int
) -> list[dict[str, Any]]:
    """Of one B: every gate at every load point. ``share`` is how many conditions there are in all, of all B's."""
    out = []
    for g in gates:
        for c, found in at:
            state, value, low, high, why = _worse(found) if g.kind == WORSE else _one(g, c, 1 - ALPHA / max(share, 1))
            out.append({"gate": g.text, "figure": g.figure, "kind": g.kind, "limit": g.limit, "load": c.b.load,
                        "state": state, "value": value, "low": low, "high": high, "why": why})  # fmt: skip
    return out


def _worse(found: Sequence[Finding]) -> tuple[str, float | None, float | None, float | None, str]:
    bad = [f for f in found if f.claimed and f.state == "worse"]
    told = ", ".join(f"{f.change.metric.title} {_effect(f.change)}" for f in bad)
    if bad:
        return FAILS, None, None, None, f"worse: {told}"
    unsure = [f.change.metric.title for f in found if f.claimed and _may_be_worse(f)]
    if unsure:
        return UNDECIDED, None, None, None, f"nothing is surely worse, but not known well enough: {', '.join(unsure)}"
    return PASSES, None, None, None, "no figure is worse by the threshold"


def _may_be_worse(f: Finding) -> bool:
    """That nothing is decided of it and its interval, if it has one, reaches as far as the threshold to the bad."""
    low, high = f.change.bounds()
    if f.state != "open" or f.change.metric.better not in (HIGHER, LOWER):
        return False
    if low is None or high is None:
        return True
    return high >= f.size if f.change.metric.better == LOWER else low <= -f.size


def _one(g: ChangeGate, c: Comparison, level: float) -> tuple[str, float | None, float | None, float | None, str]:
    change = c.change(g.figure)
    if g.kind == "level":
        return _level(g, c.b, change)
    if change.a is None or change.b is None:
        return FAILS, None, None, None, f"{g.figure} is unknown ({change.why or 'not known of both'}): does not pass"
    value, low, high = _against(g, change, level)
    if value is None:
        return _from_nothing(g, change, level)
    unit = RATIO if g.kind == "ratio" else "difference"
    text = said(value + 1 if g.kind == "ratio" else value, unit, change.metric.unit)
    if low is None or high is None:
        if g.figure in COUNTED:
            state = FAILS if OPS[g.op](value, g.limit) else PASSES
            return state, value, None, None, f"{text}, by its value: it has no interval"
        return UNDECIDED, value, None, None, f"{text}; {change.why}"
    ends = {OPS[g.op](low, g.limit), OPS[g.op](high, g.limit)}
    between = " … ".join(said(x + 1 if g.kind == "ratio" else x, unit, change.metric.unit) for x in (low, high))
    if len(ends) == 2:
        leans = "the value itself is beyond" if OPS[g.op](value, g.limit) else "the value itself is not beyond"
        more = _more(change, value, (low, high), g.limit)
        return UNDECIDED, value, low, high, f"{text}, surely {between}: {leans}{more}"
    return FAILS if ends == {True} else PASSES, value, low, high, f"{text}, surely {between}"


def _from_nothing(g: ChangeGate, c: Change, level: float) -> tuple[str, float | None, float | None, float | None, str]:
    """A share of A where A is nothing: what surely grew from it grew by more than any share."""
    low, _ = c.bounds(level)
    grew = c.b is not None and c.b > 0 if g.figure in COUNTED else low is not None and low > 0
    if c.a == 0 and grew:
        state = FAILS if OPS[g.op](math.inf, g.limit) else PASSES
        return state, None, None, None, f"{g.figure}: from nothing to {_shown(c.b, c)}, more than any share of it"
    return UNDECIDED, None, None, None, f"{g.figure}: {c.why or 'A is nothing, of which there is no share'}"


def _more(c: Change, value: float, ends: tuple[float, float], limit: float) -> str:
    """How much more would decide, if it is like what there is: an interval narrows with the root of the requests, or,
    where runs of A differ by more than their requests tell, with that of the runs."""
    if c.how.endswith(BY_RUNS):
        return "; runs of A differ more than that: more of them would decide"
    half, room = (value - ends[0], value - limit) if limit < value else (ends[1] - value, limit - value)
    times = math.ceil((half / room) ** 2) if room > 0 else MOST_TIMES + 1
    return f"; about {times} times the requests would decide" if 1 < times <= MOST_TIMES else ""


def _against(g: ChangeGate, c: Change, level: float) -> tuple[float | None, float | None, float | None]:
    """The change and its interval in the gate's terms: a share of A, or a difference."""
    low, high = c.bounds(level)
    found = [c.value, low, high]
    if c.value is None and c.a is not None and c.b is not None:  # no error is known of it, but the change is there
        found = [c.b - c.a, None, None]
        return _as_share(found, c.a) if g.kind == "ratio" else (c.b - c.a, None, None)
    if c.scale == RATIO:
        ratios = [outward(v, RATIO) for v in found]
        if g.kind == "ratio":
            out = [None if r is None else r - 1 for r in ratios]
        else:
            out = [None if r is None else (r - 1) * (c.a or 0.0) for r in ratios]
        return out[0], out[1], out[2]
    if g.kind == "ratio":
        return _as_share(found, c.a)
    return found[0], found[1], found[2]


def _as_share(found: Sequence[float | None], a: float | None) -> tuple[float | None, float | None, float | None]:
    out = [None if v is None or not a else v / a for v in found]
    return out[0], out[1], out[2]


def _level(g: ChangeGate, p: Point, c: Change) -> tuple[str, float | None, float | None, float | None, str]:
    value = told(p, g.figure)
    if value is None:
        return FAILS, None, None, None, f"{g.figure} is unknown in B: does not pass"
    return FAILS if OPS[g.op](value, g.limit) else PASSES, value, None, None, f"{_shown(value, c)} in B"


def _shown(value: float | None, c: Change) -> str:
    return {"ms": ms, "share": percent}.get(c.metric.unit, number)(value)


def _effect(c: Change) -> str:
    return said(outward(c.value, c.scale), c.scale, c.metric.unit)


def summed(states: Sequence[Mapping[str, Any]]) -> str:
    """Of all gates together: fails before undecided before passes."""
    seen = {s["state"] for s in states}
    return FAILS if FAILS in seen else UNDECIDED if UNDECIDED in seen else PASSES
