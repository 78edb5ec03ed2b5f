"""The price book: what an hour of a device costs, by offer, with terms, currency, date and source (``prices.toml``).

Three terms. *On demand*: paid while it is used. *Reserved*: paid for every hour of the contract, so an hour of use
costs price / utilisation. *Owned*: capital over its years of use and hosting, both paid for every hour, and the power
that was drawn × PUE × the price of a kWh. An offer with ``per_device_hour`` holds everything, power included.
Nothing is converted from one currency to another.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from whywait.errors import UsageError
from whywait.physics.tables import load, parse

TERMS = ("on demand", "reserved", "owned")
SOLD_BY = ("device", "node")
HOURS_A_YEAR, HOURS_A_MONTH = 365.25 * 24, 365.25 * 2
_DATE = re.compile(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?")
_NUMBERS = ("per_device_hour", "capex", "years", "hosting", "power_price", "pue", "utilisation")
_FREE = ("hosting", "power_price", "per_device_hour")  # these may be 0


@dataclass(frozen=True)
class Offer:
    """One line of the price book, in units of ``currency``.

    ``per_device_hour``: all in; or, of owned machines, ``capex`` of ``devices`` devices with all around them over
    ``years``, ``hosting`` of those a month, ``power_price`` a kWh and ``pue`` (facility power / machine power).
    ``utilisation``: share of the hours paid for in which the machine serves. ``machines``: names it is of; empty: any.
    ``sold_by``: device, or node: then whole nodes of the machine are paid.
    """

    name: str
    terms: str
    currency: str
    date: str
    source: str
    machines: tuple[str, ...] = ()
    note: str = ""
    per_device_hour: float | None = None
    capex: float | None = None
    devices: int = 1
    years: float | None = None
    hosting: float = 0.0
    power_price: float | None = None
    pue: float = 1.0
    utilisation: float = 1.0
    sold_by: str = "device"

    @property
    def all_in(self) -> bool:
        """Whether the price of an hour holds the power, too."""
        return self.per_device_hour is not None

    @property
    def used(self) -> float:
        """Share of the hours paid for that are hours of use; on demand nothing else is paid."""
        return 1.0 if self.terms == "on demand" else self.utilisation

    def hourly(self) -> dict[str, float]:
        """What an hour of use of one device costs before its power, by item; their sum is the price. What is paid an
        hour, used or not, is that × :attr:`used`."""
        used = self.used
        if self.per_device_hour is not None:
            return {"rent" if self.terms != "owned" else "all in": self.per_device_hour / used}
        capex, years = self.capex or 0.0, self.years or 1.0  # both are given where the hour's price is not
        return {
            "capital": capex / self.devices / (years * HOURS_A_YEAR) / used,
            "hosting": self.hosting / self.devices / HOURS_A_MONTH / used,
        }

    def billed(self, devices: int, node: int) -> int:
        """How many devices are paid where ``devices`` serve; ``node``: how many the machine has in one."""
        return devices if self.sold_by == "device" else math.ceil(devices / max(node, 1)) * max(node, 1)

    @property
    def per_joule(self) -> float:
        """What a joule at the machine costs; 0 where the hour's price holds it."""
        return 0.0 if self.all_in or self.power_price is None else self.power_price * self.pue / 3.6e6

    def idle_joules(self, watts: float | None, seconds: float) -> float | None:
        """What the machine draws, at ``watts`` with nothing to do, in the hours without use that belong to ``seconds``
        of use; None where that is not known."""
        rest = seconds * (1 / self.utilisation - 1)
        return 0.0 if rest <= 0 else None if watts is None else watts * rest


def offer_of(entry: Mapping[str, Any], who: str = "offer") -> Offer:
    """From an entry with the keys of ``prices.toml``.

    Raises:
        UsageError: a key is unknown or missing, or its value cannot be.
    """
    known = [f.name for f in fields(Offer)]
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1, 0.5)
            raise UsageError(f"{who}: {key!r} is not known", f"nearest: {near[0]}" if near else ", ".join(known))
    values = dict(entry)
    for key in ("name", "terms", "currency", "date", "source"):
        values[key] = str(values.get(key, "")).strip()
        if not values[key]:
            raise UsageError(f"{who}: {key} is missing", "every price has a name, terms, currency, date and source")
    if values["terms"] not in TERMS:
        raise UsageError(f"{who}: terms = {values['terms']!r}", f"one of: {', '.join(TERMS)}")
    if values.get("sold_by", "device") not in SOLD_BY:
        raise UsageError(f"{who}: sold_by = {values['sold_by']!r}", f"one of: {', '.join(SOLD_BY)}")
    if not re.fullmatch(r"[A-Z]{3}", values["currency"]):
        raise UsageError(f"{who}: currency = {values['currency']!r} is no ISO 4217 code", "such as USD, EUR, CNY")
    if not _DATE.fullmatch(values["date"]):
        raise UsageError(f"{who}: date = {values['date']!r}", "a year, month or day: 2026, 2026-11 or 2026-11-30")
    _numbers(who, values)
    machines = values.get("machines", ())
    if isinstance(machines, str) or not all(isinstance(m, str) for m in machines):
        raise UsageError(f"{who}: machines = {machines!r} is no list of names")
    return Offer(**{**values, "machines": tuple(machines), "note": str(values.get("note", ""))})


def _numbers(who: str, values: dict[str, Any]) -> None:
    for key in _NUMBERS:
        if key in values:
            values[key] = _number(who, key, values[key])
    devices = values.get("devices", 1)
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices < 2**31:
        raise UsageError(f"{who}: devices = {devices!r}", "how many devices the capex is of, 1 or more")
    if not values.get("utilisation", 1.0) <= 1:
        raise UsageError(f"{who}: utilisation = {values['utilisation']}", "a share of the hours, above 0 up to 1")
    if values.get("pue", 1.0) < 1:
        raise UsageError(f"{who}: pue = {values['pue']}", "facility power / machine power is 1 or more")
    if "per_device_hour" in values:
        if "capex" in values:
            raise UsageError(f"{who}: both per_device_hour and capex", "the hour's price holds everything: give one")
        return
    if values["terms"] != "owned":
        raise UsageError(f"{who}: per_device_hour is missing")
    missing = [k for k in ("capex", "years", "power_price") if k not in values]
    if missing:
        raise UsageError(f"{who}: {', '.join(missing)} missing", "owned: capex, years and power_price (of a kWh); or "
                         "per_device_hour, all in")  # fmt: skip


def _number(who: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(f"{who}: {key} = {value!r} is no number")
    if value < 0 or (value == 0 and key not in _FREE):
        raise UsageError(f"{who}: {key} = {value!r} is not above 0")
    return float(value)


def read_offers(path: str | Path) -> tuple[Offer, ...]:
    """A price book of the user's: a TOML file with a list ``[[offers]]``.

    Raises:
        UsageError: no such file, not TOML, or an offer cannot be.
    """
    table = load(Path(path), "docs/bill.md")
    return _offers(table, str(path))


def _offers(table: Mapping[str, Any], where: str) -> tuple[Offer, ...]:
    entries = table.get("offers")
    if not isinstance(entries, list) or not entries or not all(isinstance(e, Mapping) for e in entries):
        raise UsageError(f"{where} has no [[offers]]", "see docs/bill.md")
    sources = table.get("meta", {}).get("sources", {}) if isinstance(table.get("meta", {}), Mapping) else {}
    found = []
    for i, e in enumerate(entries):
        offer = offer_of(e, f"{where}: offer {e.get('name') or i + 1!r}")
        found.append(Offer(**{**offer.__dict__, "source": str(sources.get(offer.source, offer.source))}))
    names = [o.name for o in found]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice:
        raise UsageError(f"{where}: two offers are called {twice!r}", "each needs a name of its own")
    return tuple(found)


@cache
def shipped() -> tuple[Offer, ...]:
    """The offers that come with the package; sources in full."""
    text = files("whywait.physics").joinpath("prices.toml").read_text("utf-8")
    return _offers(parse(text, "prices.toml"), "prices.toml")


def of_machine(offers: Sequence[Offer], machine: str | None) -> tuple[Offer, ...]:
    """Those for ``machine`` (a name of the catalogue, None: not known), and those that are for any."""
    return tuple(o for o in offers if not o.machines or machine in o.machines)


def parse_currency(text: str | None) -> str:
    """``--currency`` in capitals; empty where it was not given.

    Raises:
        UsageError: it is no code.
    """
    if text is not None and not re.fullmatch(r"[A-Za-z]{3}", text):
        raise UsageError(f"--currency: {text!r} is no ISO 4217 code", "such as USD, EUR, CNY")
    return (text or "").upper()


def parse_owned(text: str, currency: str, date: str) -> Offer:
    """``capex=250000,devices=8,years=4,pue=1.3,power_price=0.12,hosting=900,utilisation=0.6`` → an offer.

    Raises:
        UsageError: not of this form, or an amount is missing or cannot be.
    """
    values: dict[str, Any] = {}
    for part in (p.strip() for p in text.split(",") if p.strip()):
        key, equals, value = (x.strip() for x in part.partition("="))
        try:
            values[key] = value if key == "sold_by" else int(value) if key == "devices" else float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise UsageError(f"--owned: {part!r} is not KEY=NUMBER", "capex=250000,devices=8,years=4,power_price=0.12")
    given = {"name": "owned", "terms": "owned", "currency": currency, "date": date, "source": "the command line"}
    return offer_of({**given, **values}, "--owned")
