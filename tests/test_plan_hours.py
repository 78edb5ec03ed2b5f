"""A plan's money: what is paid an hour and what an hour of use is, budgets, whole nodes; and what is said where nothing
is first."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from whywait import deciding, planning
from whywait.core.schedule import Workload
from whywait.judge import plan_money
from whywait.physics.prices import HOURS_A_MONTH, Offer
from whywait.planning_space import Space
from whywait.report import plan_html
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
