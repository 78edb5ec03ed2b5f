"""Finding the knee of a service: which rate to probe next, when a probe has said enough, and what is known then.

Pure: it is told what was seen and never looks at a clock. A probe answers *yes* (the share of good requests is above
the asked one), *no* (below, or the requests in flight grow without end) or nothing. Each may be wrong with probability
``ALPHA / PROBES`` at most, and a probe can err on one side only (its rate is either below the knee or above), so by the
union bound all answers are right with probability 1 - ALPHA, as far as the evidence of a probe holds
(``judge.sequential``). Goodput is taken to fall as the rate rises; then the knee lies between the highest *yes* and the
lowest *no*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from whywait.analyze.stats import Estimate
from whywait.core.table import Array
from whywait.judge.sequential import Evidence, evidence, share_interval, slope

ALPHA = 0.05  # that any answer of a search is wrong
PROBES = 16  # at most, so that each has its part of ALPHA
BLOCK_S = 10.0  # a probe is judged after so much time, and after each further block
SETTLED = 0.2  # this share of a probe's beginning is left out, and the warm-up at least: it starts with an empty queue
MIN_FINE = 30  # requests after which a rate may pass for fine while climbing, without a claim
MIN_EFFECTIVE = 5.0  # fewer effective requests than this decide nothing
ENOUGH = 1.15  # the ratio of the interval's ends at which the search is content
FLOOD = 3.0  # a wait of so many limits belongs to no excursion of a queue that keeps them for the asked share
_T_SLOPE = 4.03  # Student's t, 7 degrees of freedom, one-sided 0.25 %


class Rule(NamedTuple):
    """``share`` of all due requests must meet every limit in ``limits`` (ms, by SLO key)."""

    name: str
    limits: dict[str, float]
    share: float


@dataclass(frozen=True)
class Seen:
    """What a probe has shown ``now`` seconds after it began; a column per request, in the order they were due.

    ``scores`` (rules, requests) is measured / limit, the worst of the rule's limits: up to 1 is good, inf for a request
    that failed, NaN while its fate is open. ``end`` is NaN while in flight; of requests not yet sent nothing is given.
    """

    now: float
    due: Array
    end: Array
    scores: Array


@dataclass(frozen=True)
class Look:
    """What was made of :class:`Seen`. ``answer`` is ``yes``, ``no`` or ``''``; ``evidence`` is per rule."""

    answer: str
    why: str
    now: float
    evidence: tuple[Evidence, ...]
    shares: tuple[tuple[float, float], ...]
    slope: Estimate
    n: int

    @property
    def worst(self) -> int:
        """The rule that is furthest from being met."""
        gaps = [e.log_yes - e.log_no for e in self.evidence]
        return gaps.index(min(gaps))


def look(seen: Seen, rules: Sequence[Rule], warm_s: float, alpha: float = ALPHA / PROBES) -> Look:
    """Judge a probe. Requests count in the order they were due, up to the first whose fate is open.

    Whoever counted what has ended would count the quick ones first. A false *no* can come of any rule, so each rule has
    its part of ``alpha`` for it; a *yes* needs all of them.
    """
    open_ = np.isnan(seen.scores).any(axis=0)
    known = int(np.argmax(open_)) if open_.any() else len(seen.due)
    last = float(seen.due[known - 1]) if known else 0.0
    cut = max(warm_s, SETTLED * last)
    counted = seen.due[:known] >= cut
    scores, busy = seen.scores[:, :known][:, counted], _met(seen)[:known][counted]
    found = tuple(evidence(s, busy, r.share) for s, r in zip(scores, rules, strict=True))
    growth = slope(*_in_flight(seen, warm_s), _T_SLOPE)
    need, need_no = -math.log(alpha), math.log(len(rules) / alpha)
    answer, why = "", ""
    if seen.now >= warm_s + BLOCK_S:
        if all(e.clear or (e.log_yes >= need and e.n_eff >= MIN_EFFECTIVE) for e in found):
            answer, why = "yes", "the share of good requests is above the asked one"
        elif any(e.log_no >= need_no and e.n_eff >= MIN_EFFECTIVE for e in found):
            answer, why = "no", "the share of good requests is below the asked one"
        elif _flooded(scores, growth):
            answer, why = "no", "the requests in flight grow without end"
    shares = tuple(share_interval(e, alpha) for e in found)
    return Look(answer, why, seen.now, found, shares, growth, scores.shape[1])


def _met(seen: Seen) -> Array:
    """How many others each request found in flight when it was due."""
    ends = np.sort(seen.end[~np.isnan(seen.end)])
    found: Array = np.arange(len(seen.due)) - np.searchsorted(ends, seen.due)
    return found


def _in_flight(seen: Seen, warm_s: float) -> tuple[Array, Array]:
    """The count after each change since the warm-up; from due, so that a late client does not hide growth."""
    ends = np.sort(seen.end[seen.end <= seen.now])
    times = np.concatenate((seen.due, ends))
    change = np.concatenate((np.ones(len(seen.due)), -np.ones(len(ends))))
    order = np.argsort(times, kind="stable")
    t, count = times[order], np.cumsum(change[order])
    inside = t >= warm_s
    return t[inside], count[inside]


def _flooded(scores: Array, growth: Estimate) -> bool:
    """In-flight requests surely grow, and the last fifth of the requests misses some limit throughout, at length.

    The tail of waiting times falls about exponentially (Kingman, *Quart. J. Math.* 1970): where 95 % keep the limit,
    three limits are exceeded by about 0.05 cubed.
    """
    if growth.lo is None or growth.lo <= 0:
        return False
    tail = scores[:, -max(5, scores.shape[1] // 5) :]
    return tail.shape[1] >= 5 and bool((np.median(tail, axis=1) >= FLOOD).any())


class Ask(NamedTuple):
    """The next probe: its rate, how long it may take, and whether a first impression is enough."""

    rate: float
    cap_s: float
    climb: bool


@dataclass
class Search:
    """``while (ask := search.next(left_s)): … search.tell(ask, look)``; then ``low`` and ``high`` bound the knee."""

    first_rate: float
    max_rate: float | None = None
    warm_s: float = 2.0
    low: float | None = None  # highest rate known good
    high: float | None = None  # lowest rate known bad
    fine: set[float] = field(default_factory=set)  # looked good, without a claim
    poor: set[float] = field(default_factory=set)  # looked bad, without a claim
    near: set[float] = field(default_factory=set)  # tried for long and not decided: close to the knee
    asked: int = 0
    why: str = ""

    @property
    def decided(self) -> bool:
        """Both ends are known, or the service keeps its SLO at the highest rate allowed."""
        return self.low is not None and (self.high is not None or self.low == self.max_rate)

    def next(self, left_s: float) -> Ask | None:
        """What to probe with ``left_s`` seconds left; None when enough is known, or no more can be (``why``)."""
        if self.asked >= PROBES:
            return self._end(f"{PROBES} probes were made")
        if self.low is not None and (self.low == self.max_rate or (self.high or math.inf) <= ENOUGH * self.low):
            return self._end("")
        if left_s < self.warm_s + 1.5 * BLOCK_S:
            return self._end("the time budget ran out")
        bottom = max([*self.fine, self.low or 0.0], default=0.0)
        top = min([*self.poor, self.high or math.inf], default=math.inf)
        if math.isinf(top) and not self.near:
            return self._climb(bottom, left_s)
        if not bottom and self.low is None:
            below = min([top, *self.near]) / 2
            if below < self.first_rate / 100:
                return self._end("the SLO is not met at any rate worth the name")
            return Ask(below, left_s * 0.8, top < min(self.near, default=math.inf))
        rate = self._between(bottom, top)
        part = 0.5 if self.low is not None else 0.8 if self.near else 0.35
        return Ask(rate, max(left_s * part, self.warm_s + 1.5 * BLOCK_S), False) if rate else self._end("")

    def tell(self, ask: Ask, found: Look, rules: Sequence[Rule]) -> None:
        """The last look at a probe."""
        self.asked += 1
        if found.answer == "yes":
            self.low = max(self.low or 0.0, ask.rate)
        elif found.answer == "no":
            self.high = min(self.high or math.inf, ask.rate)
        elif looks_fine(found, rules) and ask.climb:
            self.fine.add(ask.rate)
        elif looks_poor(found, rules) and ask.climb:
            self.poor.add(ask.rate)
        else:
            self.near.add(ask.rate)
        self._tidy()

    def _tidy(self) -> None:
        """Impressions that a claim has overtaken."""
        low, high = self.low or 0.0, self.high or math.inf
        for kind in (self.fine, self.poor, self.near):
            kind.intersection_update({r for r in kind if low < r < high})
        self.fine -= {r for r in self.fine if r >= min([*self.poor, *self.near], default=math.inf)}

    def _climb(self, bottom: float, left_s: float) -> Ask | None:
        rate = 2 * bottom if bottom else self.first_rate
        if self.max_rate is not None and rate >= self.max_rate:
            return Ask(self.max_rate, left_s / 2, self.max_rate not in self.fine and bottom < self.max_rate)
        return Ask(rate, left_s / 3, True)

    def _between(self, bottom: float, top: float) -> float | None:
        """The rate that would tell most: first an end that is not known, then the middle of the widest gap."""
        first, last = min(self.near, default=top), max(self.near, default=bottom)
        if self.low is None:
            return bottom if bottom < first and bottom in self.fine else math.sqrt(bottom * first)
        if self.high is None:
            if top in self.poor:
                return top
            if self.max_rate is None or last < self.max_rate:
                return min(1.3 * last, self.max_rate or math.inf)
            return self._gap([(first / self.low, math.sqrt(self.low * first))])
        gaps = [(first / self.low, math.sqrt(self.low * first)), (self.high / last, math.sqrt(last * self.high))]
        if not self.near:
            return math.sqrt(self.low * self.high)
        return self._gap(gaps)

    def _gap(self, gaps: list[tuple[float, float]]) -> float | None:
        width, rate = max(gaps)
        if width <= ENOUGH:
            self.why = "what is left is too close to the knee to be told apart"
            return None
        return rate

    def _end(self, why: str) -> Ask | None:
        self.why = self.why or why
        return None


def enough(found: Look, ask: Ask, rules: Sequence[Rule]) -> bool:
    """Whether a probe may end: it has answered, gave the impression asked of it, or will not answer in its time."""
    if found.answer or found.now >= ask.cap_s:
        return True
    if ask.climb and looks_fine(found, rules):
        return True
    if found.now < ask.cap_s / 3:
        return False
    if all(e.clearing * ask.cap_s >= found.now for e in found.evidence):
        return False  # so many requests come in its time that their mean and spread will say yes
    # Evidence grows about linearly with time: where it would take far longer than there is, time is better spent.
    need = math.log(PROBES / ALPHA)
    best = max(min(e.log_yes for e in found.evidence), *(e.log_no for e in found.evidence))
    if looks_fine(found, rules) and found.now < 2 * ask.cap_s / 3:
        return False
    return best * ask.cap_s < 0.6 * need * found.now


def looks_fine(found: Look, rules: Sequence[Rule]) -> bool:
    """Enough requests after a block, and fewer than half of the allowed failures."""
    return found.n >= MIN_FINE and all(
        1 - e.share <= (1 - r.share) / 2 for e, r in zip(found.evidence, rules, strict=True)
    )


def looks_poor(found: Look, rules: Sequence[Rule]) -> bool:
    """More than twice the allowed failures."""
    return any(e.n and 1 - e.share > 2 * (1 - r.share) for e, r in zip(found.evidence, rules, strict=True))
