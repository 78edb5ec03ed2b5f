"""What a device-hour of one or more machines costs, for a figure that wants one price. Pure.

One offer's price, never a mean of several: of each machine the cheapest of one kind of terms, the same for all
machines, as ``plan`` compares them (``plan_money.basis``). The other offers of those terms are its range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whywait.judge.plan_money import basis
from whywait.physics.machines import Accelerator
from whywait.physics.prices import Offer, of_machine, shipped
from whywait.units import number

CURRENCY = "USD"  # what the figures that use this are in; offers in others are not converted


@dataclass(frozen=True)
class Hour:
    """The price of a device-hour in US dollars, the dearest of the same terms, and the offer in words."""

    price: float
    high: float
    said: str

    @property
    def span(self) -> tuple[float, float]:
        """The range of these terms over the price."""
        return 1.0, self.high / self.price


def hours(machines: Sequence[Accelerator], offers: Sequence[Offer] | None = None) -> dict[str, Hour | None]:
    """By machine; None where there is no price, or none of terms that all the priced ones have.

    ``offers``: the shipped book by default. A machine of the user's catalogue whose own price is not that of the
    offers is taken at the low end of that price.
    """
    book = shipped() if offers is None else offers
    out: dict[str, Hour | None] = {}
    rest = []
    for m in {m.name: m for m in machines}.values():
        own = _own(m, book)
        if own is None:
            rest.append(m.name)
        else:
            out[m.name] = own
    money = basis(book, rest, currency=CURRENCY)
    for name in rest:
        offer = money.offers[name]
        out[name] = None if offer is None or money.mixed else _hour(offer, book, name)
    return out


def missing(found: Mapping[str, Hour | None], machines: Sequence[Accelerator]) -> str:
    """Why there is no price to compare by; '' where there is."""
    none = [m for m in {m.name: m for m in machines}.values() if found[m.name] is None]
    unknown = [m.name for m in none if m.price_usd_h is None]
    if unknown:
        return f"no price of {' and of '.join(unknown)} is known"
    return f"there is no price of the same terms for {' and '.join(m.name for m in none)}" if none else ""


def _own(m: Accelerator, book: Sequence[Offer]) -> Hour | None:
    """The price of a catalogue file, where that says another than the offers."""
    if m.price_usd_h is None:
        return None
    low, high = m.price_usd_h
    prices = [_price(o) for o in of_machine(book, m.name) if o.currency == CURRENCY and m.name in o.machines]
    if prices and abs(min(prices) - low) < 0.01 and abs(max(prices) - high) < 0.01:
        return None
    said = f"{m.name} {number(low)} {CURRENCY} a device-hour, the low end of its catalogue entry ({m.source})"
    return Hour(low, high, said)


def _hour(o: Offer, book: Sequence[Offer], name: str) -> Hour:
    alike = [_price(x) for x in of_machine(book, name) if (x.terms, x.currency) == (o.terms, o.currency)]
    price = _price(o)
    said = f"{name} {number(price)} {o.currency} a device-hour, {o.terms}, {o.name} ({o.date}; {o.source})"
    more = f", others of these terms up to {number(max(alike))}" if max(alike) > price else ""
    return Hour(price, max(alike), said + more)


def _price(o: Offer) -> float:
    return sum(o.hourly().values())
