"""The rules of a plan at their borders: what is the same, what is a tie, what a lost node takes, what moves by how
much."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whywait import planning_more, planning_quality, simulating
from whywait.judge import plan, plan_money
from whywait.judge.plan import Row
from whywait.physics.prices import Offer
from whywait.planning_search import Drawn, idle_w
from whywait.planning_space import Space, shapes_of
from whywait.sim import techniques
from whywait.sim.deployment import Deployment


def row(name: str, shape: str = "", draws: Any = None, **figures: float) -> Row:
    d = {k: np.full(20, v) for k, v in figures.items()} | ({} if draws is None else {"cost": np.asarray(draws)})
    return Row(name, "g", shape or name, figures, d)


def test_of_equal_draws_each_is_the_better_half_of_the_time():
    assert plan.better(row("a", cost=1.0), row("b", cost=1.0)) == 0.5
    a, b = row("a", draws=[1.0, 1.0, 1.0, 2.0], cost=1.0), row("b", draws=[1.0, 1.0, 2.0, 1.0], cost=1.0)
    assert plan.better(a, b) == 0.5
    assert plan.better(row("a", goodput=2.0), row("b", goodput=1.0), "goodput") == 1.0, "more goodput is better"
    assert plan.better(row("a", cost=1.0), row("b", latency=1.0)) is None


@pytest.mark.parametrize(("cost", "does"), [(1.005, True), (1.05, False), (1.15, False)])
def test_one_hundredth_is_the_same_and_one_twentieth_is_not(cost, does):
    """The quicker one takes the other's place only where it is not dearer."""
    quick, slow = row("quick", cost=cost, latency=0.2), row("slow", cost=1.0, latency=0.5)
    assert plan.dominates(quick, slow) is does
    more, less = row("more", goodput=8.0 / cost, latency=0.2), row("less", goodput=8.0, latency=0.5)
    assert plan.dominates(more, less) is does


def test_sure_is_nine_draws_of_ten():
    assert plan.state_of([1.0] * 9 + [0.0], 0.95) == "holds"
    assert plan.state_of([1.0] * 8 + [0.0] * 2, 0.95) == "undecided"
    assert plan.state_of([1.0] + [0.0] * 9, 0.95) == "fails"
    assert plan.state_of([0.95] * 10, 0.95) == "holds", "what is asked for is enough"
    first = row("first", draws=[1.0] * 10, cost=1.0)
    for wins, tied in ((8, ["other"]), (9, [])):
        other = row("other", draws=[2.0] * wins + [0.5] * (10 - wins), cost=1.1)
        assert plan.ties([first, other]) == tied
    assert plan.ties([first, row("larger", "first", draws=[1.0] * 10, cost=1.1)]) == [], "another size is no tie"


def test_eight_tenths_of_the_draws_lie_in_the_interval():
    assert plan.interval(np.arange(1.0, 11.0)) == (1.0, 9.0)
    assert plan.interval(np.array([1.0])) == (None, None)
    assert plan.interval(np.array([1.0, np.nan, 3.0])) == (1.0, 3.0)


def test_the_order_is_by_state_then_test_then_cost():
    def of(name: str, cost: float | None, meets: str = "holds", quality: str = "as published") -> Row:
        return Row(name, "g", name, {"cost": cost}, {}, meets, quality)

    rows = [of("f", None), of("e", 1.0, "fails"), of("d", 1.0, "undecided"), of("c2", 1.0, quality="fails"),
            of("c1", 2.0, quality="untested"), of("b", 3.0), of("a", 2.5, quality="holds")]  # fmt: skip
    assert [r.name for r in plan.ranked(rows)] == ["a", "b", "c1", "c2", "d", "e", "f"]


def test_idle_power_of_every_device_is_paid():
    owned = Offer("o", "owned", "EUR", "2026", "t", capex=8766.0, years=1.0, power_price=0.1, pue=1.5,
                  utilisation=0.25)  # fmt: skip
    rent = plan_money.per_hour(owned, 8, 0.0, 0.0)
    assert rent == pytest.approx(8 / 0.25)
    used = plan_money.per_hour(owned, 8, 4000.0, 100.0)
    assert used == pytest.approx(rent + (4000.0 + 3 * 8 * 100.0) / 1000 * 0.1 * 1.5), "three hours idle for one of use"
    assert plan_money.per_hour(owned, 8, 4000.0, None) is None


def deployment(layout: str, replicas: int) -> Deployment:
    d = simulating.deployment_of("h100", "llama-3.1-8b", layout=layout)
    return dataclasses.replace(d, replicas=replicas)


@pytest.mark.parametrize(
    ("layout", "replicas", "lost"),
    [("tp=1", 12, 8), ("tp=2", 12, 4), ("tp=4", 12, 2), ("tp=8", 12, 1), ("tp=8,pp=2", 3, 1), ("tp=1", 5, 5)],
)
def test_a_node_takes_the_replicas_that_are_on_it(layout, replicas, lost):
    assert planning_more.lost_with_a_node(deployment(layout, replicas)) == lost


def drawn(machine: str, replicas: int = 2, apply: str = "", **central: float) -> Drawn:
    (shape,), _ = shapes_of(Space("llama-3.1-8b", (machine,), layouts=("tp=1",), apply=(apply,)))
    return Drawn(shape, replicas, {"goodput_share": 1.0, "power_w": 500.0, **central}, (), "holds")


def rent(machine: str, price: float) -> Offer:
    return Offer(machine, "on demand", "EUR", "2026", "t", (machine,), per_device_hour=price)


def test_a_cost_moves_by_as_much_as_the_central_one(monkeypatch):
    """H100 costs 2 with the size that the draws asked for; longer answers take half as much again of it: 3, above the
    2.5 of H200, which they leave alone."""
    a, b = drawn("h100"), drawn("h200")
    n, m = a.shape.name, b.shape.name
    plain, longer = {n: 1.0, m: 2.4}, {n: 1.5, m: 2.4}
    monkeypatch.setattr(planning_more, "_costs", lambda *x: plain if x[3] is None else longer)
    monkeypatch.setattr(planning_more, "_safe", lambda d, *_: 2.0 if d is a else 2.5)
    monkeypatch.setattr(planning_more, "_assumptions", lambda *_: [("output length", lambda by: by, False, "")])
    money = plan_money.Basis({"H100 SXM": rent("H100 SXM", 1.0), "H200 SXM": rent("H200 SXM", 1.2)}, "on demand", "EUR")
    states = {n: ("as published", ""), m: ("as published", "")}
    ask, first = SimpleNamespace(offers=()), SimpleNamespace(name="", eligible=True)
    found = planning_more._sensitivity(None, [a, b], ask, money, (states, [a, b], [first]))  # type: ignore[arg-type]
    assert found["base"] == {n: 2.0, m: 2.5}
    (up,) = [f for f in found["flips"] if f["assumption"] == "output length" and f["by"] == "+30 %"]
    assert up["flips"]
    assert up["first"] == m
    longer[m] = 3.0
    again = planning_more._sensitivity(None, [a, b], ask, money, (states, [a, b], [first]))  # type: ignore[arg-type]
    (up,) = [f for f in again["flips"] if f["assumption"] == "output length" and f["by"] == "+30 %"]
    assert up["first"] == n, "3.0 against 2.5 × 3 / 2.4"


def searching(shares: dict[float, float]) -> Any:
    """A search whose load points are the rates themselves, and whose shares of good requests are told."""
    return SimpleNamespace(
        want=SimpleNamespace(rate=10.0, share=0.95),
        whole=lambda d, rate, **_: (d.replicas, round(rate / 10.0, 3)),
        run=lambda cells, _: [{"goodput_share": shares.get(c[1], 1.0) if c[0] == 12 else 0.4} for c in cells],
    )


def test_room_ends_with_the_first_growth_that_is_too_much():
    d = drawn("h100", replicas=12)
    (found,) = planning_more._headroom(searching({1.5: 0.5, 3.0: 0.5}), [d], 0.4).values()
    assert found["headroom"] == pytest.approx(0.4), "2.0 would be kept by chance, 1.5 is not"
    assert found["headroom_open"] is False
    assert found["growth"] == 1.0
    assert found["loss"] == {"replicas": 8, "share": 0.4, "keeps": False}
    (found,) = planning_more._headroom(searching({}), [d], 0.0).values()
    assert found["headroom"] == 2.0
    assert found["headroom_open"] is True
    assert found["growth"] is None
    (found,) = planning_more._headroom(searching({1.1: 0.5}), [d], 0.0).values()
    assert found["headroom"] == 0.0


def test_acceptance_moves_and_ends_at_one():
    d = techniques.apply("spec-draft:accept=0.8", deployment("tp=1", 1))
    assert d.speculation is not None
    up, down = (planning_more._accepting(d, by).speculation for by in (1.3, 0.7))
    assert up is not None
    assert down is not None
    assert up.acceptance[0] == 1.0
    assert down.acceptance == pytest.approx([a * 0.7 for a in d.speculation.acceptance])
    plain = deployment("tp=1", 1)
    assert planning_more._accepting(plain, 1.3) is plain


def test_sizes_tried_under_other_assumptions_hold_both_ends():
    assert planning_more._spread(1, 5) == [1, 2, 3, 4, 5]
    wide = planning_more._spread(10, 100)
    assert (wide[0], wide[-1], len(wide)) == (10, 100, 9)


def test_an_experiment_costs_half_an_hour_of_its_devices():
    (shape,), _ = shapes_of(Space("llama-3.1-8b", ("h100",), layouts=("tp=4",), apply=("",)))
    money = plan_money.Basis({"H100 SXM": rent("H100 SXM", 3.0)}, "on demand", "EUR")
    assert planning_more._trial(shape, money) == pytest.approx(6.0)
    assert planning_more._trial(dataclasses.replace(shape, machine="H200 SXM"), money) is None


def test_quality_of_parts_and_wholes():
    def tested(names: str, state: str) -> planning_quality.Tested:
        return planning_quality.Tested(tuple(sorted(names.split("+"))), names, state, "", "said")

    state = planning_quality.quality_state
    both, kv, weights = ("fp8-weights", "fp8-kv"), tested("fp8-kv", "holds"), tested("fp8-weights", "holds")
    assert state(both, [kv, weights]) == ("untested", "each tested alone, not together")
    assert state(both, [kv]) == ("untested", "no comparison of its answers was given")
    whole = tested("fp8-weights+fp8-kv", "holds")
    assert state(both, [whole])[0] == "holds"
    assert state(both, [whole, tested("fp8-weights+fp8-kv", "fails")])[0] == "fails", "the worst of several counts"
    assert state(both, [whole, tested("fp8-weights+fp8-kv", "undecided")])[0] == "undecided"
    assert state(("fp8-kv",), [tested("fp8-weights", "fails")])[0] == "untested", "another part says nothing"
    assert state(both, [kv, tested("fp8-weights", "fails")])[0] == "fails"


def test_other_terms_are_held_against_these_with_their_power(monkeypatch):
    """On demand 2.5 an hour, all in; owned 31250 over four years, of half the hours, and its power in use and idle."""
    d = drawn("h100", replicas=1)
    on_demand = rent("H100 SXM", 2.5)
    owned = Offer("o", "owned", "EUR", "2026", "t", ("H100 SXM",), capex=31250.0, years=4.0, power_price=0.3, pue=1.5,
                  utilisation=0.5)  # fmt: skip
    now = plan_money.Basis({"H100 SXM": on_demand}, "on demand", "EUR")
    then = plan_money.Basis({"H100 SXM": owned}, "owned", "EUR")
    power = (500.0 + idle_w(d.deployment)) / 1000 * 0.3 * 1.5
    hour = 31250 / (4 * 8766) / 0.5 + power
    assert planning_more._at_other(1.0, d, now, then) == pytest.approx(hour / 2.5)
    assert planning_more._at_other(1.0, d, then, now) == pytest.approx(2.5 / hour)
    free = plan_money.Basis({"H100 SXM": rent("H100 SXM", 0.0)}, "on demand", "EUR")
    assert planning_more._at_other(0.0, d, free, then) is None
