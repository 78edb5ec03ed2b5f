"""What a candidate costs an hour, by offers of the price book; which of them a comparison is made by. Pure.

Offers are never averaged and nothing is converted: of each machine the cheapest offer of one kind of terms and one
currency stands, the same for all machines where the book allows it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from whywait.physics import machines as catalogue
from whywait.physics import power
from whywait.physics.prices import TERMS, Offer, of_machine


class Basis(NamedTuple):
    """``offers`` by machine, None where there is none; ``mixed``: their terms differ, since no terms has all."""

    offers: Mapping[str, Offer | None]
    terms: str
    currency: str
    mixed: bool = False

    @property
    def unpriced(self) -> list[str]:
        return [m for m, o in self.offers.items() if o is None]


def basis(
    offers: Sequence[Offer], machines: Sequence[str], terms: str | None = None, currency: str | None = None
) -> Basis:
    """The offers to compare by. Without ``terms`` those that most of the machines have, on demand before reserved
    before owned; without ``currency`` the one that most offers are in."""
    mine = {m: of_machine(offers, m) for m in machines}
    seen = Counter(o.currency for os in mine.values() for o in os)
    money = currency or (seen.most_common(1)[0][0] if seen else "USD")
    by = {m: [o for o in os if o.currency == money] for m, os in mine.items()}
    wanted = terms or max(TERMS, key=lambda t: (sum(any(o.terms == t for o in os) for os in by.values()),
                                                -TERMS.index(t)))  # fmt: skip
    found: dict[str, Offer | None] = {}
    for m, os in by.items():
        fitting = [o for o in os if o.terms == wanted] or ([] if terms else list(os))
        found[m] = min(fitting, key=lambda o, m=m: busy_hour(o, m)) if fitting else None  # type: ignore[misc]
    mixed = len({o.terms for o in found.values() if o is not None}) > 1
    return Basis(found, wanted, money, mixed)


def all_terms(offers: Sequence[Offer], machines: Sequence[str], currency: str) -> list[Basis]:
    """A basis for every kind of terms that prices at least two of the machines (or the only one)."""
    found = [basis(offers, machines, t, currency) for t in TERMS]
    return [b for b in found if len(machines) - len(b.unpriced) >= min(2, len(machines))]


def busy_hour(o: Offer, machine: str) -> float:
    """Money of an hour of use of one device at its rated power, before anything is known of its load: what offers are
    compared by, and kinds are left out by. Without its power where the catalogue does not tell that."""
    known = catalogue.find(machine)
    watts = None if known is None or known.tdp_w is None else (power.rated_w(known), power.idle_w(known))
    hour = None if watts is None else per_hour(o, 1, *watts)
    return sum(o.hourly().values()) if hour is None else hour


def per_hour(o: Offer | None, devices: int, watts: float | None, idle_w: float | None, node: int = 1) -> float | None:
    """Money of an hour of use of ``devices``; ``watts`` of all of them, ``idle_w`` of one with nothing to do, ``node``:
    how many the machine has in one (an offer may be of whole nodes). None where there is no offer, or its power is to
    be paid and not known."""
    if o is None:
        return None
    many = o.billed(devices, node)
    rent = many * sum(o.hourly().values())
    if o.all_in or not o.per_joule:
        return rent
    idle = o.idle_joules(None if idle_w is None else idle_w * many, 3600.0)
    spare = 0.0 if many == devices else None if idle_w is None else idle_w * (many - devices) * 3600.0
    if watts is None or idle is None or spare is None:
        return None
    return rent + (watts * 3600.0 + spare + idle) * o.per_joule


def whole_nodes(
    o: Offer | None, devices: int, watts: float | None, idle_w: float | None, node: int
) -> dict[str, Any] | None:
    """Where ``devices`` do not fill their nodes: how many devices those nodes have and what is paid an hour for all of
    them, and whether the offer is of nodes (``included``: then it is in every figure). None where they do."""
    whole = math.ceil(devices / max(node, 1)) * max(node, 1)
    if whole == devices:
        return None
    by_node = None if o is None else dataclasses.replace(o, sold_by="node")
    return {"node": node, "devices": whole, "paid": paid(by_node, per_hour(by_node, devices, watts, idle_w, node)),
            "included": o is not None and o.sold_by == "node"}  # fmt: skip


def paid(o: Offer | None, hour_of_use: float | None) -> float | None:
    """Money paid an hour, used or not: what the contract bills, or owning comes to; of ``per_hour``."""
    return None if o is None or hour_of_use is None else hour_of_use * o.used


def within(money: float | None, budget: float | None) -> bool:
    """Whether what is paid an hour is within the budget; what is not known is not held against it."""
    return budget is None or money is None or money <= budget * (1 + 1e-9)


def least_paid(o: Offer, devices: int, idle_w: float | None, node: int = 1) -> float:
    """What ``devices`` cost an hour, used or not, at the least: with nothing to do (power not known: none)."""
    rent = sum(o.hourly().values()) * o.used
    return o.billed(devices, node) * (rent + (idle_w or 0.0) * 3600.0 * o.per_joule)


def plain(o: Offer) -> dict[str, Any]:
    """An offer as JSON values, with what an hour comes to: of use, and paid."""
    return {"name": o.name, "terms": o.terms, "currency": o.currency, "date": o.date, "source": o.source,
            "note": o.note or None, "per_device_hour": sum(o.hourly().values()), "utilisation": o.used,
            "sold_by": o.sold_by, "paid_per_device_hour": sum(o.hourly().values()) * o.used,
            "per_kwh": o.per_joule * 3.6e6 if o.per_joule else None}  # fmt: skip
