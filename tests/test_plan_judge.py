"""Dominance, ties, order, sensitivity and the value of an experiment, on figures whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from whywait.judge import plan, plan_money, plan_sense
from whywait.judge.plan import Row
from whywait.physics.prices import Offer


def row(name: str, cost: float, spread: float = 0.0, **more: object) -> Row:
    rng = np.random.default_rng(len(name) + round(cost * 100))
    draws = {"cost": cost * np.exp(rng.normal(0, spread, 50))}
    figures = {"cost": cost, "goodput": 8.0, "latency": 0.5, "energy": 100.0, "hourly": cost * 28.8}
    figures |= {k: v for k, v in more.items() if k in figures}
    rest = {k: v for k, v in more.items() if k in ("group", "shape", "meets", "quality")}
    return Row(name, str(rest.pop("group", name)), str(rest.pop("shape", name)), figures, draws, **rest)  # type: ignore[arg-type]


def test_the_cheaper_one_is_first_and_no_tie_outside_the_error():
    rows = [row("dear", 2.0, 0.05), row("cheap", 1.0, 0.05)]
    assert [r.name for r in plan.ranked(rows)] == ["cheap", "dear"]
    assert plan.ties(rows) == []
    assert (plan.better(rows[1], rows[0]) or 0) > 0.99


def test_inside_the_error_it_is_a_tie():
    rows = [row("a", 1.0, 0.3), row("b", 1.05, 0.3)]
    assert plan.ties(rows) == ["b"]


def test_rows_of_one_group_share_their_draws():
    noise = np.exp(np.random.default_rng(1).normal(0, 0.5, 50))
    a = Row("a", "g", "a", {"cost": 1.0}, {"cost": 1.00 * noise})
    b = Row("b", "g", "b", {"cost": 1.1}, {"cost": 1.10 * noise})
    apart = Row("c", "other", "c", {"cost": 1.1}, {"cost": 1.10 * noise})
    assert plan.better(a, b) == 1.0
    assert (plan.better(a, apart) or 1.0) < 0.8


@pytest.mark.parametrize(
    "why", [{"quality": x} for x in ("untested", "undecided", "fails")] + [{"meets": x} for x in ("undecided", "fails")]
)
def test_untested_or_unsure_is_never_first(why):
    rows = [row("narrow", 0.5, **why), row("plain", 1.0)]
    assert plan.ranked(rows)[0].name == "plain"
    assert not rows[0].eligible
    assert plan.dominated([rows[0], rows[1]]) == {}, "and it takes nobody's place"


def test_dominated_needs_to_be_nowhere_better_and_surely_worse():
    good, worse = row("good", 1.0, 0.01), row("worse", 1.5, 0.01)
    quick = row("quick", 1.5, 0.01, latency=0.2)
    assert plan.dominated([good, worse, quick]) == {"worse": "good"}
    assert plan.front([good, worse, quick]) == ["good", "quick"]
    near = row("near", 1.02, 0.3)
    assert plan.dominated([good, near]) == {}, "a tie is pruned by nobody"


def test_states_of_draws():
    assert plan.state_of([0.99] * 10, 0.95) == "holds"
    assert plan.state_of([0.5] * 10, 0.95) == "fails"
    assert plan.state_of([0.99] * 5 + [0.5] * 5, 0.95) == "undecided"
    assert plan.state_of([], 0.95) == "undecided"


def test_a_price_that_turns_it_over_is_found_with_its_break_even():
    base = {"a": 1.0, "b": 1.2}
    machine_of = {"a": "A", "b": "B"}
    found = plan_sense.flips(base, plan_sense.priced(base, machine_of, 0.3))
    assert {(f.assumption, f.by) for f in found if f.flips} == {("price of A", "+30 %"), ("price of B", "−30 %")}
    assert plan_sense.break_even(base, machine_of) == [{"machine": "B", "factor": pytest.approx(1 / 1.2)}]


def test_an_assumption_under_which_nothing_keeps_the_slo_is_said():
    (f,) = plan_sense.flips({"a": 1.0}, [plan_sense.Varied("output length", "+30 %", {"a": None})])
    assert f.flips
    assert f.first is None
    assert "nothing" in f.note


def test_an_experiment_is_worth_what_it_can_change():
    sure, open_ = row("sure", 1.0, group="A"), row("open", 1.2, group="B")
    hourly = {"sure": np.full(10, 10.0), "open": np.array([5.0] * 4 + [20.0] * 6)}
    a, b = plan_sense.experiments([sure, open_], hourly, {"A": 1.0, "B": 3.0})
    assert (a.of, b.of) == ("B", "A"), "the one that cannot change anything is last"
    assert a.change == pytest.approx(0.4)
    assert a.saves == pytest.approx(0.4 * 5.0)
    assert b.change == 0.0


def test_what_is_not_tested_but_would_be_cheaper():
    rows = [row("plain", 1.0), row("narrow", 0.6, quality="untested"), row("bad", 0.5, quality="fails")]
    assert plan_sense.untested(rows) == ["narrow"]


def offer(machine: str, price: float, terms: str = "on demand", currency: str = "USD") -> Offer:
    return Offer(f"{machine} {terms} {price}", terms, currency, "2026", "test", (machine,), per_device_hour=price)


def test_offers_are_compared_by_terms_that_all_have():
    book = [offer("A", 5.0), offer("A", 2.0, "reserved"), offer("B", 3.0, "reserved"), offer("B", 2.5, "reserved")]
    found = plan_money.basis(book, ["A", "B"])
    assert found.terms == "reserved"
    assert not found.mixed
    assert [o.per_device_hour for o in found.offers.values() if o] == [2.0, 2.5]
    assert plan_money.basis(book, ["A", "B"], "on demand").unpriced == ["B"]
    assert plan_money.basis([*book, offer("A", 1.0, currency="EUR")], ["A", "B"]).currency == "USD"
    assert plan_money.basis([offer("A", 5.0), offer("B", 2.0, "owned")], ["A", "B"]).mixed


def test_the_cheapest_offer_is_that_with_its_power():
    """All in it costs 2.00 an hour; without its power the other looks cheaper, and is not: 0.7 kW × 1.5 × 2.0."""
    all_in = Offer("a", "owned", "EUR", "2026", "t", ("H100 SXM",), per_device_hour=2.0)
    bare = Offer("b", "owned", "EUR", "2026", "t", ("H100 SXM",), capex=40000.0, years=4.0, power_price=2.0, pue=1.5)
    assert sum(bare.hourly().values()) < 2.0
    assert plan_money.basis([bare, all_in], ["H100 SXM"]).offers["H100 SXM"] == all_in
    assert plan_money.busy_hour(bare, "H100 SXM") > 2.5
    assert plan_money.busy_hour(bare, "a machine of nobody's") == sum(bare.hourly().values())


def test_machines_that_cost_nothing_draw_level_with_none():
    assert plan_sense.break_even({"a": 0.0, "b": 0.0}, {"a": "A", "b": "B"}) == []


def test_power_is_paid_where_the_hour_does_not_hold_it():
    owned = Offer("o", "owned", "EUR", "2026", "t", capex=8 * 8766.0, devices=8, years=1.0, power_price=0.1, pue=1.5)
    assert plan_money.per_hour(owned, 8, 4000.0, 100.0) == pytest.approx(8 * 1.0 + 4.0 * 0.1 * 1.5)
    assert plan_money.per_hour(owned, 8, None, 100.0) is None
    assert plan_money.per_hour(None, 8, 1.0, 1.0) is None
