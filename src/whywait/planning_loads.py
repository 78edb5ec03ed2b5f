"""What is asked of every candidate of a plan, and the loads that are made of it. Part of the application layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from whywait.core.schedule import Schedule, Workload
from whywait.errors import UsageError
from whywait.load.recipe import Load, schedule_of

DRAWS = 12
FULL, MOST = 400, 4000  # requests of a whole service's trial at least and at most
SPAN_S = 60.0
THINNEST = 1e-7  # requests a second of an engine: time is counted in ns of 64 bits, ``FULL`` of them must go in


@dataclass(frozen=True)
class Want:
    """What is asked of every candidate. ``share`` of the requests must keep ``slo`` (ms; per class in the workload
    where empty) at ``rate`` a second."""

    workload: Workload
    rate: float
    slo: Mapping[str, float]
    share: float = 0.95
    seed: int = 1
    jobs: int = 0
    draws: int = DRAWS
    budget: float | None = None  # money paid an hour, used or not

    @property
    def limits(self) -> dict[str, float]:
        """The limits by key, ms: of all; else those that every class has, the widest of them."""
        if self.slo:
            return dict(self.slo)
        keys = {k for c in self.workload.classes for k in c.slo}
        found = {k: max(c.slo.get(k, math.inf) for c in self.workload.classes) for k in sorted(keys)}
        return {k: v for k, v in found.items() if math.isfinite(v)}


class Loads:
    """Schedules by rate, seed and variant, made once each."""

    def __init__(self, want: Want) -> None:
        self.want, self.list = want, list[Schedule]()
        self._at: dict[tuple[object, ...], int] = {}

    def at(
        self, rate: float, k: int = 0, least: int = FULL, change: Callable[[Schedule], Schedule] | None = None
    ) -> int:
        """The number of the schedule of the ``k``-th seed at ``rate``.

        Raises:
            UsageError: see :func:`_can_be`.
        """
        key = (round(rate, 9), k, least, change)
        if key not in self._at:
            w = dataclasses.replace(self.want.workload, seed=self.want.workload.seed + k)
            n = max(least, min(MOST, math.ceil(rate * self.span)))
            made, _ = schedule_of(Load("rate", _can_be(rate), n), w, 0, 0)
            self.list.append(change(made) if change else made)
            self._at[key] = len(self.list) - 1
        return self._at[key]

    def long(self, rate: float) -> int:
        """Requests of a trial twice as long as usual: a load little above capacity takes its time to show."""
        return max(FULL, min(2 * MOST, math.ceil(rate * 2 * self.span)))

    @cached_property
    def sample(self) -> Schedule:
        return schedule_of(Load("rate", _can_be(self.want.rate), FULL), self.want.workload, 0, 0)[0]

    @cached_property
    def span(self) -> float:
        """Seconds of load: long enough that the service is in its steady state for most of it."""
        token = self.want.limits.get("tpot_ms", 50.0) / 1e3
        return max(SPAN_S, 4 * token * float(self.sample.output_tokens.mean()))


def _can_be(rate: float) -> float:
    """
    Raises:
        UsageError: requests come so seldom that a trial of them takes a hundred years.
    """
    if rate < THINNEST:
        raise UsageError(f"{rate:g} requests/s are too few to be simulated", "a higher --rate, or fewer devices")
    return rate


def scaled_output(by: float) -> Callable[[Schedule], Schedule]:
    """Answers ``by`` times as long, thinking alike."""

    def change(s: Schedule) -> Schedule:
        longer = np.maximum(1, np.rint(s.output_tokens * by)).astype(np.int64)
        thought = np.rint(s.thinking_tokens * by).astype(np.int64)
        return dataclasses.replace(s, output_tokens=longer, thinking_tokens=thought)

    return change


def scaled_reuse(by: float) -> Callable[[Schedule], Schedule]:
    """Shared beginnings ``by`` times as long; of prompts given by named pieces they can only be cut shorter."""

    def change(s: Schedule) -> Schedule:
        head = np.minimum(np.rint(s.prefix_tokens * by), s.prompt_tokens - 1).astype(np.int64)
        blocks = tuple(b[: max(0, math.floor(len(b) * min(by, 1.0)))] for b in s.blocks)
        return dataclasses.replace(s, prefix_tokens=np.maximum(head, 0), blocks=blocks)

    return change
