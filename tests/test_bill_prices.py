"""The price book: every offer with its terms, currency, date and source; nothing converted, nothing guessed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from whywait.errors import UsageError
from whywait.judge.hourly import hours, missing
from whywait.physics.machines import MACHINES, machine
from whywait.physics.prices import TERMS, Offer, of_machine, offer_of, parse_owned, read_offers, shipped

GIVEN: dict[str, Any] = {"name": "x", "terms": "on demand", "currency": "EUR", "date": "2026-11", "source": "a list"}
OWNED = {**GIVEN, "terms": "owned", "capex": 300_000, "devices": 8, "years": 4, "power_price": 0.2}


def test_every_shipped_offer_says_all_and_names_a_known_machine() -> None:
    known = {m.name for m in MACHINES}
    for o in shipped():
        assert o.terms in TERMS
        assert all((o.currency, o.date, o.all_in))
        assert len(o.source) > 10, o.name  # in full, not the short name
        assert o.machines
        assert set(o.machines) <= known


def test_the_span_of_the_catalogue_is_that_of_the_offers() -> None:
    """So that a range there is explained: which end is which terms."""
    for m in MACHINES:
        prices = [o.per_device_hour for o in shipped() if m.name in o.machines]
        assert (m.price_usd_h is None) == (not prices), m.name
        if prices:
            assert m.price_usd_h == (min(prices), max(prices)), m.name


def test_of_a_machine_come_its_own_and_those_of_any() -> None:
    anyone, h100 = Offer(**GIVEN, per_device_hour=1), Offer(**GIVEN, per_device_hour=2, machines=("H100 SXM",))
    assert of_machine([anyone, h100], "H100 SXM") == (anyone, h100)
    assert of_machine([anyone, h100], None) == (anyone,)
    assert {o.terms for o in of_machine(shipped(), machine("h200").name)} == set(TERMS)


def test_an_hour_of_use_pays_for_the_hours_without() -> None:
    assert offer_of({**GIVEN, "per_device_hour": 3}).hourly() == {"rent": 3.0}
    reserved = offer_of({**GIVEN, "terms": "reserved", "per_device_hour": 3, "utilisation": 0.5})
    assert reserved.hourly() == {"rent": 6.0}
    on_demand = offer_of({**GIVEN, "per_device_hour": 3, "utilisation": 0.5})
    assert on_demand.hourly() == {"rent": 3.0}  # paid while it is used


def test_owned_by_hand() -> None:
    o = offer_of({**OWNED, "hosting": 1461.0, "pue": 1.5, "utilisation": 0.5})
    assert o.hourly()["capital"] == pytest.approx(300_000 / 8 / (4 * 8766) / 0.5)
    assert o.hourly()["hosting"] == pytest.approx(1461 / 8 / 730.5 / 0.5)
    assert o.per_joule * 3.6e6 == pytest.approx(0.3)
    assert o.idle_joules(100.0, 3600.0) == pytest.approx(360_000)  # an hour without use per hour with
    assert o.idle_joules(None, 3600.0) is None
    assert offer_of(OWNED).idle_joules(None, 3600.0) == 0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"currency": "euro"}, "ISO 4217"),
        ({"currency": ""}, "missing"),
        ({"date": "last year"}, "year"),
        ({"date": "2026-13"}, "year"),
        ({"source": ""}, "missing"),
        ({"terms": "spot"}, "one of"),
        ({"per_device_hour": -1}, "above 0"),
        ({"per_device_hour": "3"}, "number"),
        ({"per_device_hour": float("nan")}, "number"),
        ({"utilisation": 1.5}, "share"),
        ({"utilisation": 0}, "above 0"),
        ({"pue": 0.9}, "1 or more"),
        ({"price_per_hour": 3}, "nearest: per_device_hour"),
        ({"capex": 5}, "give one"),
        ({"devices": 0}, "1 or more"),
        ({"machines": "H100"}, "list"),
    ],
)
def test_what_is_no_offer(change: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError) as e:
        offer_of({**GIVEN, "per_device_hour": 3, **change})
    assert word in e.value.message + e.value.hint


@pytest.mark.parametrize("missing", ["capex", "years", "power_price"])
def test_owned_needs_all_of_it(missing: str) -> None:
    with pytest.raises(UsageError, match=missing):
        offer_of({k: v for k, v in OWNED.items() if k != missing})
    with pytest.raises(UsageError, match="per_device_hour"):
        offer_of({**OWNED, "terms": "reserved"})


def test_owned_on_the_command_line() -> None:
    o = parse_owned("capex=250000, devices=8,years=4,power_price=0.12,pue=1.3", "EUR", "2026-11-30")
    assert (o.capex, o.devices, o.years, o.power_price, o.pue, o.currency) == (250_000, 8, 4, 0.12, 1.3, "EUR")
    for text in ("capex", "capex=many", "capex=1,years=4", "capex=1,years=4,power_price=0.1,colour=2"):
        with pytest.raises(UsageError):
            parse_owned(text, "EUR", "2026")


def test_the_book_of_the_page_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "bill.md").read_text()
    path = tmp_path / "prices.toml"
    path.write_text(page.split("```toml\n")[1].split("```")[0])
    reserved, owned = read_offers(path)
    assert reserved.hourly() == {"rent": pytest.approx(1.90 / 0.7)}
    assert owned.hourly()["capital"] == pytest.approx(250_000 / 8 / (4 * 8766) / 0.6)


def test_a_book_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    offer = '[[offers]]\nname="a"\nterms="reserved"\ncurrency="CHF"\nper_device_hour=2\ndate="2026"\nsource="s"\n'
    path.write_text('[meta.sources]\ns = "offer 4711"\n' + offer)
    assert read_offers(path)[0].source == "offer 4711"
    path.write_text(offer * 2)
    with pytest.raises(UsageError, match="two offers"):
        read_offers(path)
    for text in ("", "offers = 3", "offers = []", "not toml ="):
        path.write_text(text)
        with pytest.raises(UsageError):
            read_offers(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_offers(tmp_path / "none.toml")


def test_one_price_is_one_offer_and_the_same_terms_for_both_machines() -> None:
    h100, h200 = machine("h100"), machine("h200")
    alone, both = hours([h200]), hours([h100, h200])
    one = alone[h200.name]
    assert one is not None
    assert one.price == 5.20  # on demand, as listed; no mean of it and what owning one is estimated at
    assert "AWS" in one.said
    assert "on demand" in one.said
    assert "2026" in one.said
    pair = [both[m.name] for m in (h100, h200)]
    assert all(p is not None and "reserved" in p.said for p in pair)  # there is no H100 on demand in the book
    assert missing(both, [h100, h200]) == ""
    listed = {sum(o.hourly().values()) for o in shipped()}
    assert {p.price for p in pair if p is not None} <= listed


def test_no_terms_in_common_is_no_price() -> None:
    h100, h200 = machine("h100"), machine("h200")
    book = [Offer("a", "on demand", "USD", "2026", "s", ("H100 SXM",), per_device_hour=2.0),
            Offer("b", "owned", "USD", "2026", "s", ("H200 SXM",), per_device_hour=1.0)]  # fmt: skip
    bare = [dataclasses.replace(m, price_usd_h=p) for m, p in ((h100, (2.0, 2.0)), (h200, (1.0, 1.0)))]
    found = hours(bare, book)
    assert None in found.values()
    assert "same terms" in missing(found, bare)
    none = dataclasses.replace(h100, name="mine", price_usd_h=None)
    assert missing(hours([none], book), [none]) == "no price of mine is known"
    euro = [dataclasses.replace(o, currency="EUR") for o in book]
    assert hours([dataclasses.replace(h100, price_usd_h=None)], euro)[h100.name] is None  # nothing is converted


def test_the_range_is_of_the_same_terms_and_a_catalogue_of_the_users_counts() -> None:
    found = hours([machine("b300")])[machine("b300").name]
    assert found is not None
    assert found.span == (1.0, found.high / found.price)
    owned = [
        Offer(n, "owned", "USD", "2026", "s", ("H100 SXM",), per_device_hour=p) for n, p in (("a", 2.0), ("b", 3.0))
    ]
    more = [*owned, Offer("c", "reserved", "USD", "2026", "s", ("H200 SXM",), per_device_hour=9.0)]
    bare = dataclasses.replace(machine("h100"), price_usd_h=(2.0, 3.0))
    hour = hours([bare], more)["H100 SXM"]
    assert hour is not None
    assert (hour.price, hour.high) == (2.0, 3.0)
    own = hours([dataclasses.replace(bare, price_usd_h=(4.0, 5.0))], more)["H100 SXM"]
    assert own is not None
    assert (own.price, own.high) == (4.0, 5.0)
    assert "catalogue" in own.said
