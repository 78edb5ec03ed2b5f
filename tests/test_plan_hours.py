"""A plan's money: what is paid an hour and what an hour of use is, budgets, whole nodes; and what is said where nothing
is first."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from whywait import deciding, planning, planning_more, simulating
from whywait.analyze.bill import Ask, bill
from whywait.core.schedule import Workload
from whywait.errors import UsageError
from whywait.judge import plan_answers, plan_money, plan_worded
from whywait.load.recipe import Load
from whywait.physics.prices import HOURS_A_MONTH, Offer, parse_owned
from whywait.planning_facts import workload_facts
from whywait.planning_loads import Want
from whywait.planning_search import Search
from whywait.planning_space import Space, shapes_of
from whywait.report import plan_html
from whywait.report.plan import asked, experiment, screening, turning
from whywait.units import number

LOAD = {"prompt_tokens": "uniform(50,150)", "output_tokens": "uniform(20,60)"}
SLO = {"ttft_ms": 500.0, "tpot_ms": 20.0}
RESERVED = Offer("contract", "reserved", "EUR", "2026-11-01", "t", ("H100 SXM",), per_device_hour=2.0, utilisation=0.5)
OWNED = Offer("racks", "owned", "EUR", "2026-11-01", "t", ("H100 SXM",), capex=8 * 8766.0, devices=8, years=1.0,
              power_price=0.1, pue=1.5, utilisation=0.5)  # fmt: skip


def ask(**more: object) -> planning.Ask:
    space = Space("llama-3.1-8b", ("h100",), layouts=("tp=1",), apply=("",))
    base = planning.Ask(space, Workload.from_dict(dict(LOAD)), 60.0, SLO, offers=(RESERVED,), draws=2, jobs=1,
                        own_prices=True)  # fmt: skip
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found() -> dict:
    return planning.plan(ask())


def test_the_paid_hour_of_an_owned_machine_has_the_power_of_all_hours():
    """8 devices at 1 an hour; 4 kW in half of the hours, 0.8 kW in the others, 0.15 a kWh."""
    use = plan_money.per_hour(OWNED, 8, 4000.0, 100.0)
    assert plan_money.paid(OWNED, use) == pytest.approx(8 * 1.0 + (4.0 + 0.8) / 2 * 0.15)
    assert plan_money.least_paid(OWNED, 8, 100.0) == pytest.approx(8 * 1.0 + 0.8 * 0.15)
    on_demand = dataclasses.replace(RESERVED, terms="on demand")
    assert plan_money.paid(on_demand, plan_money.per_hour(on_demand, 3, None, None)) == 6.0
    assert plan_money.paid(None, 1.0) is None


def test_the_month_and_the_headline_are_of_what_the_contract_bills(found, tmp_path: Path):
    first = found["rows"][0]
    assert first["paid"] == pytest.approx(first["devices"] * 2.0)
    assert first["hourly"] == pytest.approx(first["devices"] * 4.0)
    assert f"{number(first['paid'])} EUR an hour paid, {number(first['hourly'])} an hour of use" in found["headline"]
    assert "utilisation 50 %" in found["headline"]
    page = plan_html.render(found)
    assert f"about {number(first['paid'] * HOURS_A_MONTH)} EUR a month" in page
    assert "2.00 EUR a device-hour paid, 4.00 one of use (utilisation 50 %)" in page
    at = deciding.Planned(found).keep(tmp_path / "p")
    row = next(csv.DictReader((at / "plan.csv").read_text(encoding="utf-8").splitlines()))
    assert float(row["paid_per_hour"]) == pytest.approx(first["paid"])
    assert float(row["per_hour"]) == pytest.approx(first["hourly"])


def test_the_budget_is_of_what_is_paid(found):
    first = found["rows"][0]
    same = planning.plan(ask(budget=first["paid"]))
    assert same["first"] == first["name"], "an hour of use is twice that"
    less = planning.plan(ask(budget=first["paid"] - 0.01))
    assert less["first"] is None


def test_the_budget_holds_against_the_power_that_is_drawn():
    owned = planning.plan(ask(offers=(OWNED,)))
    first = owned["rows"][0]
    bare = first["devices"] * 1.0
    assert first["paid"] > bare * 1.01
    poor = planning.plan(ask(offers=(OWNED,), budget=(first["paid"] + bare) / 2))
    assert poor["first"] is None
    assert not any(r["affordable"] for r in poor["rows"] if r["devices"] >= first["devices"])


def test_whole_nodes_are_said_and_by_an_offer_of_nodes_they_are_paid(found, tmp_path: Path):
    first = found["rows"][0]
    assert first["devices"] % 8
    assert first["whole_nodes"] == {"node": 8, "devices": 8, "paid": 16.0, "included": False}
    page = plan_html.render(found)
    said = f"of nodes of 8, 8 paid for {first['devices']}, 16.0 EUR an hour"
    assert f"Where only whole nodes can be had: {first['name']}: {said}" in page
    at = deciding.Planned(found).keep(tmp_path / "p")
    row = next(csv.DictReader((at / "plan.csv").read_text(encoding="utf-8").splitlines()))
    assert (row["whole_nodes_devices"], float(row["whole_nodes_paid_per_hour"])) == ("8", 16.0)
    by_node = dataclasses.replace(RESERVED, sold_by="node")
    whole = planning.plan(ask(offers=(by_node,)))
    one = whole["rows"][0]
    assert one["paid"] == 16.0
    assert one["figures"]["cost"]["value"] == pytest.approx(32.0 / (one["figures"]["goodput"]["value"] * 3.6))
    assert "sold by node, which is in every figure" in plan_worded.whole_nodes(whole)
    assert planning.plan(ask(offers=(by_node,), budget=15.9))["first"] is None
    assert planning.plan(ask(offers=(by_node,), budget=16.0))["first"] == one["name"]


def test_spare_devices_of_a_node_are_paid_and_draw_idle_power():
    by_node = dataclasses.replace(OWNED, sold_by="node", utilisation=1.0)
    assert plan_money.per_hour(by_node, 6, 3000.0, 100.0, 8) == pytest.approx(8 * 1.0 + 3.2 * 0.15)
    assert plan_money.per_hour(by_node, 6, 3000.0, None, 8) is None
    assert plan_money.per_hour(by_node, 8, 3000.0, None, 8) == pytest.approx(8 * 1.0 + 3.0 * 0.15)
    assert plan_money.whole_nodes(OWNED, 16, 1.0, 1.0, 8) is None
    assert plan_money.whole_nodes(None, 6, None, None, 8) == {"node": 8, "devices": 8, "paid": None, "included": False}
    with pytest.raises(UsageError, match="sold_by"):
        parse_owned("capex=1,years=1,power_price=0,sold_by=rack", "EUR", "2026")
    assert parse_owned("capex=1,years=1,power_price=0,sold_by=node", "EUR", "2026").billed(9, 8) == 16


def test_a_bill_by_an_offer_of_nodes_pays_the_whole_node(tmp_path: Path):
    d = simulating.deployment_of("h100", "llama-3.1-8b", layout="tp=2")
    load = (Load("rate", 10, 300),)
    run = simulating.simulate(simulating.Plan(d, Workload.from_dict(dict(LOAD)), load, SLO, draws=2, jobs=1)).result.run
    plain, whole = (bill(run, Ask((dataclasses.replace(RESERVED, sold_by=x),)))["points"][0]["money"][0]["total"]
                    for x in ("device", "node"))  # fmt: skip
    assert whole == pytest.approx(4 * plain)


def row(found: dict, **more: object) -> dict:
    return {**found["rows"][0], "name": "9 × other", "shape": "other", "tie": True, "paid": 39.0, **more}


def test_a_tie_of_other_prices_is_said_to_be_about_sizes(found):
    first = found["rows"][0]
    two = {**found, "ties": ["9 × other"], "rows": [first, row(found)]}
    said = plan_answers.headline(two)
    assert said.endswith("; a tie, inside the error of how many each needs, with 9 × other (39.0)")
    page = plan_html.render(two)
    assert "It is not surely cheaper than 9 × other (39.0): the difference is inside the error of how many" in page
    runs = {**two, "rows": [{**first, "run": "a"}, row(found, run="b")]}
    assert plan_answers.headline(runs).endswith("; a tie, inside the error, with 9 × other (39.0)")
    assert "tie" not in plan_answers.headline(found)


def test_growth_that_the_first_does_not_take_is_in_the_headline(found):
    first = {**found["rows"][0], "growth": 0.41}
    much = {**found, "want": {**found["want"], "growth": 1.5}, "rows": [first]}
    said = plan_answers.headline(much)
    assert (
        "not enough for the growth of 150 %, at which 41 % of the requests are good (--rate 150 plans for it)" in said
    )
    enough = {**much, "rows": [{**first, "growth": 0.97}]}
    assert plan_answers.headline(enough).endswith("; it takes the growth of 150 %")
    assert "was not simulated" in plan_answers.headline({**much, "rows": [{**first, "growth": None}]})
    assert "growth" not in plan_answers.headline(found)


def test_lengths_that_nobody_gave_are_said_in_the_second_line(found):
    assert "prompts p50 " in asked(found)
    assert "default" not in asked(found)
    workload = Workload()
    by_default = {**found, "inputs": ask(workload=workload).as_dict(), "workload": workload_facts(workload, 8.0, None)}
    assert "prompts of 128 and answers of 64 tokens, which is the default and nobody's load" in asked(by_default)
    named = {**by_default, "workload": {**found["workload"], "kind": "fitted", "file": "w.toml"}}
    assert "tokens (w.toml); 95 %" in asked(named)


def test_how_many_kinds_were_simulated_whole_is_said_near_the_headline(found, capsys):
    some = {**found, "counts": {**found["counts"], "in_draws": 12, "sized": 55}}
    deciding.Planned(some).print("nowhere")
    text = " ".join(capsys.readouterr().out.split())
    assert text.index("looked at closely: 12 of the 55 kinds") < text.index("The five questions")
    page = plan_html.render(some)
    assert page.index("looked at closely: 12 of the 55 kinds") < page.index("The decision</h2>")
    assert "looked at closely: " not in plan_html.render(found), "all of them were"


def test_the_price_of_every_machine_is_moved_or_it_is_said_why_not():
    space = Space("llama-3.1-8b", ("h100", "l40s", "h200", "a100"), layouts=("tp=1",), apply=("",))
    dear = {"H200 SXM": 9.0, "A100 80GB SXM": 4.0, "L40S": None, "H100 SXM": 2.0}
    offers = tuple(dataclasses.replace(RESERVED, name=m, machines=(m,), per_device_hour=x)
                   for m, x in dear.items() if x)  # fmt: skip
    made = planning.plan(ask(space=space, offers=offers))
    moved = {f["assumption"] for f in made["sensitivity"]["flips"]}
    skipped = {s["assumption"]: s["why"] for s in made["sensitivity"]["skipped"]}
    for m in dear:
        assert (f"price of {m}" in moved) != (f"price of {m}" in skipped), m
    assert skipped["price of L40S"] == "it has none"


def test_of_a_machine_that_may_not_be_first_the_price_is_not_moved_and_that_is_said(monkeypatch):
    monkeypatch.setattr(planning_more, "VARIED", 1)
    space = Space("llama-3.1-8b", ("h100", "h200"), layouts=("tp=1",), apply=("",))
    both = (RESERVED, dataclasses.replace(RESERVED, name="b", machines=("H200 SXM",)))
    made = planning.plan(ask(space=space, offers=both))
    moved = {f["assumption"] for f in made["sensitivity"]["flips"]}
    assert {"price of H100 SXM", "price of H200 SXM"} <= moved, "also of a machine whose ranking is not simulated anew"
    narrow = dataclasses.replace(space, machines=("h100",), single=(("h200", "vllm", "tp=1", "fp8-weights", None),))
    made = planning.plan(ask(space=narrow, offers=both))
    assert "price of H200 SXM: not tried, none of it surely keeps the SLO with tested answers" in turning(made)


@pytest.fixture(scope="module")
def poor(found: dict) -> dict:
    """Nothing within the budget may be first: 8-bit weights do with less, and nobody compared their answers."""
    space = Space("llama-3.1-8b", ("h100",), layouts=("tp=1", "tp=8"), apply=("", "fp8-weights"))
    return planning.plan(ask(space=space, rate=205.0, budget=2.0))


def test_where_the_budget_leaves_nothing_first_the_cheapest_beyond_it_is_said(poor):
    assert poor["first"] is None
    assert poor["rows"], "something was looked at"
    free = planning.plan(planning.Ask.from_dict({**poor["inputs"], "budget": None}))
    assert poor["beyond_budget"]["name"] == free["first"]
    assert poor["headline"].startswith("No candidate may be ranked first within 2.00 EUR an hour paid: ")
    assert (
        f"the cheapest that does is {free['first']}: {number(free['rows'][0]['paid'])} EUR an hour" in poor["headline"]
    )
    assert poor["counts"]["by_budget"] >= 2
    assert f"by the budget: {poor['counts']['by_budget']} kinds out" in screening(poor)
    assert free["beyond_budget"] is None
    assert not any("by the budget" in line for line in screening(free))


def test_where_nothing_is_first_nothing_is_measured_against_it(poor):
    cost = poor["questions"][4]
    assert cost["state"] == "open"
    enough = float(cost["command"].partition("--budget ")[2].removesuffix("/h"))
    assert poor["beyond_budget"]["paid"] <= enough <= 1.01 * poor["beyond_budget"]["paid"]
    assert turning(poor) == ["nothing is first, so no assumption was moved"]
    assert poor["sensitivity"]["flips"] == []
    assert poor["untested"], "8-bit weights keep the SLO for sure"
    for said in (poor["questions"][3]["answer"], "; ".join(experiment(poor)), plan_html.render(poor)):
        assert "than the first" not in said
        assert "would be first if its answers were tested and held" in said


def test_a_cost_is_never_surer_than_the_goodput_it_is_divided_by(found):
    three, five = found["questions"][2], found["questions"][4]
    assert (three["state"], five["state"]) == ("in part", "in part")
    assert "no surer than question 3" in five["answer"]
    assert five["command"] == three["command"]
    measured = {**found, "rows": [{**r, "kind": "measured"} for r in found["rows"]]}
    assert [q["state"] for q in plan_answers.questions(measured)][2::2] == ["answered", "answered"]


def test_sizes_are_searched_by_whole_nodes_and_what_the_budget_cut_is_known():
    shapes, _ = shapes_of(Space("llama-3.1-8b", ("h100",), layouts=("tp=1",), apply=("",)))
    want = Want(Workload.from_dict(dict(LOAD)), 240.0, SLO, jobs=1)
    for offer, hours in ((RESERVED, 3 * 4.0), (dataclasses.replace(RESERVED, sold_by="node"), 8 * 4.0)):
        (x,), _ = Search(want, {"H100 SXM": offer}).screen(shapes)
        assert (x.hourly(3), x.cut) == (hours, False)
    search = Search(dataclasses.replace(want, budget=2.0), {"H100 SXM": RESERVED})
    (x,), dropped = search.screen(shapes)
    dropped += search.least([x])
    assert (x.ladder, x.cut, x.least, dropped) == ((1,), True, None, [])
    assert x.why.startswith("over the budget: with 1 devices ")
