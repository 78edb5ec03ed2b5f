"""Invariants: a sound Run has no violations; each way of breaking one is named."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analysis_runs import MS, S, Service, make_run, stream
from whywait.core.check import violations
from whywait.core.run import Run
from whywait.core.table import Table


def _broken(run: Run, table: str, **columns) -> list[str]:
    tables = {name: run.table(name) for name in ("points", "requests", "chunks", "steps", "readings")}
    t = tables[table]
    cols = {}
    for name, (row, value) in columns.items():
        cols[name] = t[name].copy()
        cols[name][row] = value
    tables[table] = t.replace(**cols)
    return violations(Run(run.manifest, **tables))


def test_sound_runs_have_none():
    assert violations(Service().closed(4, 12)) == []
    assert violations(Service().open([50 * MS] * 10)) == []
    assert violations(make_run([], points=[])) == []


@pytest.mark.parametrize(
    ("table", "columns", "said"),
    [
        ("points", {"planned": (0, 99)}, "1: point 0 planned 99"),
        ("requests", {"id": (1, 0)}, "1: 1 request ids"),
        ("requests", {"point": (0, 5)}, "1: load point is not"),
        ("requests", {"outcome": (0, 77)}, "1: no outcome"),
        ("requests", {"sent_ns": (2, 0)}, "3: sent_ns before due_ns: 1 (2)"),
        ("requests", {"accepted_ns": (2, 1)}, "3: accepted_ns before sent_ns"),
        ("requests", {"last_ns": (2, 2.0)}, "3: last_ns before first_ns"),
        ("requests", {"first_answer_ns": (2, 2.0)}, "3: first_answer_ns before"),
        ("requests", {"end_ns": (2, 99 * S)}, "8: ended after its point"),
        ("points", {"start_ns": (0, 2 * S)}, "8: sent before its point"),
        ("points", {"steady_start_ns": (0, 0), "steady_end_ns": (0, 99 * S)}, "8: steady window reaches outside"),
        ("requests", {"content_chunks": (3, 7)}, "chunks: content_chunks is not"),
        ("chunks", {"id": (0, 1234)}, "chunks: no such request: 1 (1234)"),
        ("chunks", {"t_low_ns": (0, 99 * S)}, "chunks: t_low_ns after"),
        ("chunks", {"t_ns": (0, 1)}, "chunks: before the response"),
        ("chunks", {"t_ns": (0, 99 * S)}, "chunks: after the response"),
    ],
)
def test_each_violation_is_named(table, columns, said):
    found = _broken(Service().closed(4, 12), table, **columns)
    assert any(line.startswith(said) for line in found), found


def test_missing_stamps_are_no_violation_but_order_is_kept_across_them():
    row = {"due_ns": 1, "sent_ns": None, "first_ns": 10, "last_ns": None, "end_ns": 20, "outcome": "timeout"}
    assert violations(make_run([row])) == []
    assert violations(make_run([{**row, "end_ns": 5}])) == ["3: end_ns before first_ns: 1 (0)"]


def test_time_to_first_token_is_positive():
    row = {"sent_ns": 10, "first_ns": 10, "last_ns": 30, "end_ns": 30}
    assert violations(make_run([row])) == ["8: time to first token is not positive: 1 (0)"]


def test_runs_without_chunks_are_not_counted_against_them():
    run = Service().closed(2, 4)
    assert violations(Run(run.manifest, run.points, run.requests, Table.empty("chunks"), run.steps, run.readings)) == []


def test_kv_blocks_stay_within_the_total():
    steps = Table.from_rows("steps", [{"t_ns": 1, "took_ns": 5, "kv_used": 11}, {"t_ns": 9, "took_ns": -1}])
    run = make_run([{"sent_ns": 1, "end_ns": 9, "outcome": "reset"}], engine={"kv_blocks": 10})
    run = Run(run.manifest, run.points, run.requests, run.chunks, steps, run.readings)
    assert violations(run) == [
        "9: step of negative length: 1 (1)",
        "9: more KV blocks in use than the 10 there are: 1 (0)",
    ]


def test_only_a_few_ids_are_listed():
    rows = [{"sent_ns": 10, "first_ns": 9, "end_ns": 20, "outcome": "reset"} for _ in range(9)]
    assert violations(make_run(rows))[0] == "3: first_ns before sent_ns: 9 (0, 1, 2, 3, 4, …)"


def test_role_chunks_are_not_content():
    row = {"sent_ns": 1, "accepted_ns": 2, "first_ns": 5, "last_ns": 9, "end_ns": 9, "content_chunks": 2}
    chunks = [{**stream(0, [3])[0], "kind": "role"}, *stream(0, [5, 9])]
    assert violations(make_run([row], chunks)) == []
    assert np.isnan(make_run([row], chunks).chunks["t_low_ns"]).all()
