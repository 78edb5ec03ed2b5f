"""What the price range of a device-hour does to the claims of cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whywait.judge.calibrate_claims import Claim, scaled
from whywait.sim.deployment import Deployment

COST = "usd_per_million_tokens"


def priced(found: Sequence[Claim], before: Deployment, after: Deployment) -> list[Claim]:
    """The claims, those of cost with the range of prices in their intervals. One machine has one price, whatever it is:
    it cancels where the machine stays; two machines have two, and all pairs of them are possible."""
    old, new = _range(before), _range(after)
    if old is None or new is None:
        missing = after.machine.name if new is None else before.machine.name
        why = f"no price of {missing} is known"
        return [replace(c, why=why) if c.metric == COST and c.change is None else c for c in found]
    one = before.machine.name == after.machine.name
    return [scaled(c, old, new, cancels=one) if c.metric == COST else c for c in found]


def prices(before: Deployment, after: Deployment) -> list[str]:
    """The prices in words, and which are not known."""
    machines = {d.machine.name: d.machine.price_usd_h for d in (before, after) if d.machine.words}
    none = [name for name, price in machines.items() if price is None]
    out = [f"no price of {name} is known: no cost" for name in none]
    if machines and not none:
        said = ", ".join(f"{n} {p[0]:g}–{p[1]:g} US$" for n, p in machines.items() if p)
        out.append(f"cost at the middle of the price of a device-hour ({said}), its interval with the whole range")
    return out


def _range(d: Deployment) -> tuple[float, float] | None:
    price = d.machine.price_usd_h
    if price is None:
        return None
    middle = (price[0] + price[1]) / 2
    return price[0] / middle, price[1] / middle
