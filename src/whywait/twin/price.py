"""What a token costs before and after a change: by one offer of each machine, of the same terms, and what the range of
such offers does to the claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from whywait.judge.calibrate_claims import Claim, scaled
from whywait.judge.hourly import hours, missing
from whywait.sim.deployment import Deployment

COST = "usd_per_million_tokens"


def hourly(before: Deployment, after: Deployment) -> tuple[float, float]:
    """US dollars of a device-hour before and after, by offers of the same terms; NaN where one has none."""
    found = hours([before.machine, after.machine])
    known = [h.price if (h := found[d.machine.name]) is not None else math.nan for d in (before, after)]
    return known[0], known[1]


def priced(claims: Sequence[Claim], before: Deployment, after: Deployment) -> list[Claim]:
    """The claims, those of cost with the range of prices in their intervals. One machine has one price, whatever it is:
    it cancels where the machine stays; two machines have two, and all pairs of them are possible."""
    machines = [before.machine, after.machine]
    found = hours(machines)
    old, new = (found[m.name] for m in machines)
    if old is None or new is None:
        why = missing(found, machines)
        return [replace(c, why=why) if c.metric == COST and c.change is None else c for c in claims]
    one = before.machine.name == after.machine.name
    return [scaled(c, old.span, new.span, cancels=one) if c.metric == COST else c for c in claims]


def prices(before: Deployment, after: Deployment) -> list[str]:
    """The prices in words, and which are not known."""
    machines = list({d.machine.name: d.machine for d in (before, after) if d.machine.words}.values())
    if not machines:
        return []
    found = hours(machines)
    none = missing(found, machines)
    if none:
        return [f"{none}: no cost"]
    said = "; ".join(h.said for h in found.values() if h is not None)
    return [f"cost by one offer each, its interval with all offers of the same terms: {said}"]
