"""What agents read counts like what was read here."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.analysis_runs import make_run
from whywait.analyze.counters import delta
from whywait.analyze.remote import with_agents
from whywait.core.run import Run
from whywait.core.table import Table
from whywait.judge.facts_cpu import engine_cpu

S = 1_000_000_000


def _row(t: int, source: str, name: str, value: float, **labels: Any) -> dict[str, Any]:
    return {"asked_ns": t, "answered_ns": t, "source": source, "name": name, "value": value,
            "labels": json.dumps(labels) if labels else None}  # fmt: skip


def _with(rows: list[dict[str, Any]]) -> Run:
    return dataclasses.replace(make_run([]), readings=Table.from_rows("readings", rows))


def _cpu(source: str, **of: str) -> list[dict[str, Any]]:
    rows = []
    for t in range(11):
        rows.append(_row(t * S, source, "cpu_seconds_total", t * 0.5, **of))
        rows.append(_row(t * S, source, "cgroup_periods_total", t * 10.0, **of))
        rows.append(_row(t * S, source, "cgroup_throttled_periods_total", t * 4.0, **of))
    return rows


def test_an_engine_elsewhere_is_judged_by_its_agent() -> None:
    here, there = _with(_cpu("process/engine")), _with(_cpu("agent/0", of="process/engine"))
    assert engine_cpu(there, (0, 10 * S)).run is None
    found = engine_cpu(with_agents(there), (0, 10 * S))
    assert found == engine_cpu(here, (0, 10 * S))
    assert found.run == pytest.approx(0.5)
    assert found.throttled_periods == pytest.approx(0.4)


def test_two_agents_add_up_and_do_not_mix() -> None:
    run = with_agents(_with(_cpu("agent/0", of="process/engine") + _cpu("agent/1", of="process/engine")))
    found = delta(run.readings, "cpu_seconds_total", (0, 10 * S), "process/engine")
    assert found is not None
    assert found.value == pytest.approx(10.0)
    assert found.resets == 0


def test_what_was_read_here_stays() -> None:
    run = _with(_cpu("process/engine") + _cpu("agent/0", of="process/engine") + _cpu("agent/0", of="agent"))
    assert with_agents(run).readings == run.readings
    assert with_agents(_with(_cpu("host"))).readings == _with(_cpu("host")).readings
