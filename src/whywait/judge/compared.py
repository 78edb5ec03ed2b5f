"""What changed between runs: findings per figure, with chance and size told apart, and the waits that moved.

*Surely* (statistical): the change is no chance. All figures of all load points of all B's share one error of ``ALPHA``
(Holm, *Scand. J. Stat.* 6 (1979) 65): that any of them is called a change where there is none. The waits, which
explain, share another. *Counts* (practical): it is as large as the threshold, of the figure itself, of a request's time
for a wait, in points for a share. Neither says the other:

- ``better`` / ``worse`` / ``moved``: surely changed, by the threshold or more;
- ``small``: surely changed, by less than the threshold;
- ``same``: its interval lies within the threshold on both sides: no change that counts;
- ``open``: none of these; more requests or more runs would tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whywait.analyze.against import Change, Comparison
from whywait.analyze.compare import CAUSE, DEVICE, HIGHER, LOWER, PHASE, RATIO
from whywait.analyze.digest import COST, ENERGY
from whywait.judge.paired import said

ALPHA = 0.05
THRESHOLD = 0.05  # of a figure: a change below this is none that counts
WORTH = 0.005  # of a request's or of the device's time: a wait below this is not worth a line
FIGURES = ("goodput_requests_per_s", "goodput_share", "output_tokens_per_s", "requests_per_s", "ttft_ms.p50",
           "ttft_ms.p95", "tpot_ms.p50", "tpot_ms.p95", "e2e_ms.p50", "e2e_ms.p95", "failed_share", ENERGY,
           COST)  # fmt: skip
BESIDE = ("itl_ms.p99", "effective_tokens_per_s", "kv_use", "cached_share", "preemptions", "memory_bytes")
NEED_SLO = ("goodput_requests_per_s", "goodput_share", "effective_tokens_per_s")


@dataclass
class Finding:
    """A :class:`Change` judged. ``p_adjusted`` is Holm's over its family; ``low, high`` bound the effect at 95 % by
    itself, as a ratio or a difference; ``state`` is one of the module's words."""

    change: Change
    size: float  # the threshold on the change's scale
    family: str  # figures or waits
    claimed: bool
    p_adjusted: float | None = None
    state: str = "open"

    @property
    def surely(self) -> bool:
        return self.p_adjusted is not None and self.p_adjusted < ALPHA

    @property
    def counts(self) -> str:
        """yes (surely), no (surely not), maybe."""
        low, high = self.change.bounds()
        if low is None or high is None:
            return "maybe"
        if low >= self.size or high <= -self.size:
            return "yes"
        return "no" if -self.size < low and high < self.size else "maybe"

    def as_dict(self) -> dict[str, Any]:
        c = self.change
        low, high = c.bounds()
        return {
            "name": c.name, "title": c.metric.title, "unit": c.metric.unit, "better": c.metric.better,
            "a": c.a, "b": c.b,
            "scale": c.scale, "value": outward(c.value, c.scale), "low": outward(low, c.scale),
            "high": outward(high, c.scale), "p": c.p, "p_adjusted": self.p_adjusted, "surely": self.surely,
            "counts": self.counts, "state": self.state, "how": c.how, "n": c.n, "why": c.why, "claimed": self.claimed,
            "size": self.size,
        }  # fmt: skip


def outward(value: float | None, scale: str) -> float | None:
    """From the scale of a change to a ratio or a difference; None where it has no end."""
    if value is None or not math.isfinite(value):
        return None
    return math.exp(max(min(value, 700.0), -700.0)) if scale == RATIO else value


def findings(c: Comparison, names: Sequence[str], threshold: float, slo: bool) -> list[Finding]:
    """Of one load point, not yet adjusted: ``names`` (or the default ones that are known) claimed, others beside."""
    out = []
    for name in names or FIGURES:
        change = c.change(name)
        if not names and ((name in NEED_SLO and not slo) or (change.a is None and change.b is None)):
            continue
        out.append(Finding(change, size_of(change, threshold), "figures", True))
    for name in () if names else BESIDE:
        change = c.change(name)
        if (slo or name not in NEED_SLO) and (change.a or change.b):
            out.append(Finding(change, size_of(change, threshold), "figures", False))
    return out


def waits(c: Comparison, threshold: float) -> list[Finding]:
    """Of one load point: both accounts, phases and their causes, states of the device; not yet adjusted."""
    whole = sum(c.a.figures.get(n) or 0.0 for n in c.names(PHASE))
    out = []
    for start in (PHASE, CAUSE, DEVICE):
        for name in c.names(start):
            try:
                change = c.change(name)
            except KeyError:  # a name that a file gives and no account has
                continue
            of = 1.0 if start == DEVICE else whole
            most = max(abs(change.a or 0.0), abs(change.b or 0.0))
            if change.a is not None and change.b is not None and of and most >= WORTH * of:
                out.append(Finding(change, threshold * of, "waits", True))
    return out


def size_of(c: Change, threshold: float) -> float:
    """The threshold on the scale of the change: of a share in points, else of what A has."""
    if c.scale == RATIO:
        return math.log1p(threshold)
    return threshold if c.metric.unit == "share" else threshold * abs(c.a or 0.0)


def adjust(found: Sequence[Finding]) -> None:
    """Holm over each family of what is claimed, and the state of all of them."""
    for family in ("figures", "waits"):
        mine = [f for f in found if f.family == family and f.claimed and f.change.p is not None]
        mine.sort(key=lambda f: f.change.p or 0.0)
        least = 0.0
        for i, f in enumerate(mine):
            least = max(least, min(1.0, (len(mine) - i) * float(f.change.p or 0.0)))
            f.p_adjusted = least
    for f in found:
        f.state = _state(f)


def _state(f: Finding) -> str:
    value = f.change.value
    if f.surely and value is not None:
        return "small" if abs(value) < f.size else _way(f.change, value)
    return "same" if f.counts == "no" else "open"


def _way(c: Change, value: float) -> str:
    if c.metric.better not in (HIGHER, LOWER):
        return "moved"
    return "better" if (value > 0) == (c.metric.better == HIGHER) else "worse"


def headline(found: Sequence[tuple[str, Sequence[Finding]]], name: str, again: bool) -> str:
    """One sentence: what became worse and better, at which load; ``again``: runs of A were repeated."""
    parts = []
    for way in ("worse", "better"):
        told = [f"{f.change.metric.title} {_said(f)}" + (f" at {load}" if len(found) > 1 else "")
                for load, fs in found for f in fs if f.claimed and f.state == way]  # fmt: skip
        if told:
            more = f" and {len(told) - 3} more" if len(told) > 3 else ""
            parts.append(f"{way}: {', '.join(told[:3])}{more}")
    if parts:
        return f"{name} against A is {'; '.join(parts)}" + ("" if again else " (in these two runs)")
    claimed = [f for _, fs in found for f in fs if f.claimed]
    unsure = sum(f.state == "open" for f in claimed)
    if not claimed or unsure == len(claimed):
        return f"{name} against A is undecided: no figure is known well enough to say"
    if unsure:
        return f"{name} against A: no change that counts is sure; {unsure} of {len(claimed)} figures are undecided"
    return f"{name} against A: no change that counts"


def _said(f: Finding) -> str:
    return said(outward(f.change.value, f.change.scale), f.change.scale, f.change.metric.unit)
