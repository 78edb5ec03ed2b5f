"""A run beside the candidates of a plan costs an hour what its own bill says, its hours without use included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_plan import LLAMA, LOAD, SLO
from whywait import planning_facts, simulating
from whywait.analyze.bill import Ask, bill
from whywait.core.run import Run
from whywait.core.schedule import Workload
from whywait.load.recipe import Load
from whywait.physics.prices import Offer
from whywait.planning_loads import Want

OWN = Offer("own", "owned", "EUR", "2026", "test", capex=8766.0, years=1, power_price=3.6, utilisation=0.5)


def test_a_run_costs_an_hour_what_its_bill_says(tmp_path: Path) -> None:
    """Of two devices, and of two such services: idle power is of one device there and of all of them in a bill."""
    out, load = tmp_path / "run", Workload.from_dict(dict(LOAD))
    d = simulating.deployment_of("h100", "llama-3.1-8b", layout="tp=2")
    simulating.simulate(simulating.Plan(d, load, (Load("rate", 10, 200),), SLO, draws=2, jobs=1, out=str(out)))
    p = bill(Run.load(out), Ask((OWN,)))["points"][0]
    assert p["energy"]["devices"] == 2
    hour = p["money"][0]["total"] / p["window"]["seconds"] * 3600
    for copies in (1, 2):
        want = Want(load, 10.0 * copies, SLO, jobs=1)
        (m,), _ = planning_facts.measured(str(out), want, lambda _: OWN, (100.0, 40.0, LLAMA))
        assert m.entry["replicas"] == copies
        assert m.row.figures["hourly"] == pytest.approx(hour * copies)
