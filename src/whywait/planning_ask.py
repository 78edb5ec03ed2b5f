"""What a plan is made from, as it is asked and as it is kept. Part of the application layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from whywait.core.schedule import Workload
from whywait.errors import UsageError
from whywait.physics.prices import Offer, offer_of
from whywait.planning_space import Space, space_from

#: What a value of a kept plan's inputs must be, by the annotation of its field.
KINDS: Mapping[Any, Callable[[Any], bool]] = {
    "float": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v < math.inf,
    "float | None": lambda v: v is None or KINDS["float"](v),
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0,
    "bool": lambda v: isinstance(v, bool),
    "str": lambda v: isinstance(v, str),
    "str | None": lambda v: v is None or isinstance(v, str),
}


@dataclass(frozen=True)
class Ask:
    """Everything a plan is made from; ``plan.json`` keeps it and :meth:`from_dict` reads it back."""

    space: Space
    workload: Workload
    rate: float
    slo: Mapping[str, float] = field(default_factory=dict)
    share: float = 0.95
    growth: float = 0.0
    offers: tuple[Offer, ...] = ()
    terms: str | None = None
    currency: str | None = None
    budget: float | None = None
    runs: tuple[str, ...] = ()
    quality: tuple[tuple[str, str], ...] = ()
    own_prices: bool = False
    workload_file: str | None = None
    catalog: str | None = None
    seed: int = 1
    draws: int = 12
    jobs: int = 0
    calibrate: bool = True
    baseline: str = ""  # what the runs do not tell of their service, as of ``whywait what-if --baseline``

    def as_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("space", "workload")}
        plain |= {"offers": [_offer(o) for o in self.offers], "runs": list(self.runs), "slo": dict(self.slo),
                  "quality": [list(q) for q in self.quality]}  # fmt: skip
        return {"space": self.space.as_dict(), "workload": self.workload.as_dict(), **plain}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Ask:
        """
        Raises:
            UsageError: it is not what a plan keeps.
        """
        try:
            more = {k: v for k, v in raw.items() if k not in ("space", "workload", "offers", "runs", "quality", "slo")}
            for f in dataclasses.fields(cls):
                if f.name in more and f.type in KINDS and not KINDS[f.type](more[f.name]):
                    raise TypeError(f"{f.name}: {more[f.name]!r}")
            offers = tuple(offer_of(o) for o in raw["offers"])
            pairs = tuple((str(a), str(b)) for a, b in raw["quality"])
            slo, runs = dict(raw["slo"]), tuple(raw["runs"])
            if not (all(KINDS["float"](v) for v in slo.values()) and all(isinstance(r, str) for r in runs)):
                raise TypeError(f"slo, runs: {raw['slo']!r}, {raw['runs']!r}")
            made = cls(space_from(raw["space"]), Workload.from_dict(dict(raw["workload"])), offers=offers, slo=slo,
                       runs=runs, quality=pairs, **more)  # fmt: skip
            if not (made.rate > 0 and made.draws > 0 and 0 < made.share <= 1):
                raise ValueError(f"rate {made.rate}, draws {made.draws} or share {made.share} can be none")
            return made
        except (KeyError, TypeError, ValueError) as exc:
            what = f"{exc} is missing" if isinstance(exc, KeyError) else str(exc)
            raise UsageError(f"the inputs of that plan cannot be read: {what}", "a plan.json of whywait plan") from None


def _offer(o: Offer) -> dict[str, Any]:
    plain = {k: v for k, v in o.__dict__.items() if v is not None and v != ""}
    return {**plain, "machines": list(o.machines)}
