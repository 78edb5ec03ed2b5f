"""Work that is spread: the same figures wherever it is done and however often it was cut; what is kept of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whywait import simulating
from whywait.core.schedule import Schedule, Workload
from whywait.errors import MissingExtra, UsageError
from whywait.load.recipe import Load, schedule_of
from whywait.sim import grid as grids
from whywait.sim import journal, over_ray, spread
from whywait.sim.grid import Cell, grid
from whywait.sim.journal import Journal, digest
from whywait.sim.spread import Where, Work, over
from whywait.verbs.somewhere import somewhere


def plan(seed: int) -> Schedule:
    load = {"prompt_tokens": "uniform(50,150)", "output_tokens": "uniform(20,60)", "seed": seed}
    return schedule_of(Load("concurrency", 4, 12), Workload.from_dict(load), 0, 0)[0]


@pytest.fixture(scope="module")
def work() -> tuple[list[Cell], list[Schedule]]:
    small = simulating.deployment_of("h100", "llama-3.1-8b")
    return [Cell(small, k % 2, "concurrency", 4.0, k) for k in range(6)], [plan(1), plan(2)]


def test_what_is_in_the_file_is_not_simulated_again(work, tmp_path, monkeypatch):
    """Cut after four of six; the same question goes on, and its figures are the very same."""
    cells, schedules = work
    alone = grid(cells, schedules)
    file, made, told = tmp_path / "cells.jsonl", [0], list[tuple[int, int]]()
    one = grids.one

    def cut(*args: Any) -> Any:
        made[0] += 1
        if made[0] == 5:
            raise KeyboardInterrupt
        return one(*args)

    monkeypatch.setattr(grids, "one", cut)
    with over(Where(cells=str(file))), pytest.raises(KeyboardInterrupt):
        grid(cells, schedules)
    with over(Where(cells=str(file))):
        assert grid(cells, schedules, progress=lambda a, b: told.append((a, b))) == alone
    assert told == [(4, 6), (5, 6), (6, 6)]
    assert made[0] == 5 + 2
    with over(Where(cells=str(file))):
        assert grid(list(reversed(cells)), schedules) == alone[::-1]  # by what it is, not by its place
    assert made[0] == 7
    assert grid(cells, schedules) == alone  # outside nothing is taken from it
    assert made[0] == 13


def test_another_question_is_another_cell(work, tmp_path):
    cells, schedules = work
    with over(Where(cells=str(tmp_path / "c"))):
        first = grid(cells[:1], schedules)
        other = [plan(7), schedules[1]]
        assert grid(cells[:1], other) != first  # the same cell of another schedule
        assert grid([dataclasses.replace(cells[0], target=2.0)], schedules) != first
    assert len((tmp_path / "c").read_text().splitlines()) == 1 + 3


def test_another_code_is_not_asked_for_its_figures(work, tmp_path, monkeypatch):
    cells, schedules = work
    with over(Where(cells=str(tmp_path / "c"))):
        grid(cells, schedules)
        monkeypatch.setattr(journal, "code", lambda: "another")
        grid(cells, schedules)
    assert len((tmp_path / "c").read_text().splitlines()) == 1 + 12


def test_a_torn_line_is_passed_over_and_the_next_is_whole(tmp_path):
    file = tmp_path / "c"
    figures = {"a": 0.1 + 0.2, "b": None, "c": float("inf"), "d": float("nan")}
    one = Journal(file)
    one.add("k1", figures)
    one.add("k2", figures)
    one.close()
    file.write_bytes(file.read_bytes()[:-9])
    two = Journal(file)
    assert two.get("k2") is None
    two.add("k3", figures)
    two.close()
    three = Journal(file)
    three.close()
    for key in ("k1", "k3"):
        got = three.get(key)
        assert got is not None
        assert (got["a"], got["b"], got["c"]) == (0.1 + 0.2, None, float("inf"))
        assert np.isnan(got["d"])


@pytest.mark.parametrize("text", ["some notes\n", '{"whywait": "cells", "version": 9}\n', "[1]\n"])
def test_another_kind_of_file_is_left_alone(tmp_path, text):
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(UsageError, match="is no file of cells"):
        Journal(file)
    assert file.read_text() == text


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="is a folder, no file of cells"):
        Journal(tmp_path)
    (tmp_path / "x").write_text("")
    with pytest.raises(UsageError, match="cannot keep cells in"):
        Journal(tmp_path / "x" / "cells")


def test_digests_tell_apart_what_differs_and_nothing_else():
    a = simulating.deployment_of("h100", "llama-3.1-8b")
    again = simulating.deployment_of("h100", "llama-3.1-8b")
    assert a is not again
    assert digest(a) == digest(again)
    assert digest(a) != digest(dataclasses.replace(a, replicas=2))
    assert digest(plan(1)) == digest(plan(1)) != digest(plan(2))
    values = [
        1,
        1.0,
        "1",
        True,
        None,
        (1,),
        [1],
        {"a": 1},
        {"a": 1.0},
        np.array([1]),
        np.array([1.0]),
        0.1,
        0.1 + 1e-18,
        0.2,
    ]
    assert len({digest(v) for v in values}) == len(values) - 1  # 0.1 + 1e-18 is 0.1
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    with pytest.raises(TypeError):
        digest(object())


# On the workers of a cluster, without one


def _double(item: int, known: int) -> dict[str, float | None]:
    if item < 0:
        raise UsageError("below nothing")
    return {"x": item * 0.1 * known}


class Cluster:
    """What is asked of the module ``ray``, in one process."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def put(self, data: bytes) -> bytes:
        return data

    def remote(self, **how: Any) -> Any:
        self.asked.append(how)
        return lambda f: argparse.Namespace(remote=lambda *args: (f, args))

    def wait(self, waiting: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return waiting[-num_returns:], waiting[:-num_returns]  # not in their order

    def get(self, future: Any) -> Any:
        return future[0](*future[1])


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    node = argparse.Namespace(cpus=2, name="n1")
    monkeypatch.setattr(over_ray.cluster, "ray_of", lambda _address: made)
    monkeypatch.setattr(over_ray.cluster, "nodes_of", lambda _ray: [node, node])
    monkeypatch.setattr(over_ray.cluster, "looked_at", lambda *_, **__: [])
    return made


def test_pieces_come_back_in_any_order_and_are_told(cluster, tmp_path):
    told: list[int] = []
    made = Work(_double, list(range(100)), 3, lambda x: (x,))
    with over(Where("auto", str(tmp_path / "c"))):
        found = spread.spread(made, progress=lambda a, _of: told.append(a))
    assert found == [_double(i, 3) for i in range(100)]
    assert told[-1] == 100
    assert told == sorted(told)
    assert len(told) > 10
    assert cluster.asked[0]["max_retries"] > 0  # a worker that is killed costs its piece


def test_a_fault_of_a_cell_is_said_as_here(cluster):
    with over(Where("auto")), pytest.raises(UsageError, match="below nothing"):
        spread.spread(Work(_double, [1, -1, 2], 3, lambda x: (x,)))


@pytest.mark.parametrize("what", ["numpy", "arithmetic", "machine"])
def test_a_worker_that_reckons_differently_is_refused_by_name(what):
    ours = {**over_ray.bits(), what: "another"}
    with pytest.raises(UsageError, match=f"reckons differently: {what} .* \\(here another\\)"):
        over_ray.piece(b"", "x", (0,), ours)
    assert over_ray.bits() == over_ray.bits()


def test_a_lost_cluster_is_a_line_with_what_to_do(cluster, monkeypatch):
    def lost(_future: Any) -> Any:
        raise RuntimeError("The worker died unexpectedly.\nLogs: somewhere")

    monkeypatch.setattr(cluster, "get", lost)
    with over(Where("auto")), pytest.raises(UsageError, match="is lost: The worker died unexpectedly") as found:
        spread.spread(Work(_double, [1, 2], 3, lambda x: (x,)))
    assert "goes on with what is missing" in found.value.hint


# The verbs


def _args(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"ray": None, "cells": None, "out": None, "json": False, "rate": 3.0, **more})


def test_over_a_cluster_a_file_is_kept_until_the_whole_is_done(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spread.cluster, "ray_of", lambda _address: cluster)
    work = Work(_double, list(range(100)), 3, lambda x: (x,))

    def cut(done: int, _of: int) -> None:
        if done > 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), somewhere(_args(ray="auto")):
        spread.spread(work, progress=cut)
    (file,) = Path("whywait-runs").glob("cells-*.jsonl")
    assert f"kept in {file}: the same command goes on" in capsys.readouterr().err
    assert len(file.read_text().splitlines()) > 50
    told: list[int] = []
    with somewhere(_args(ray="auto", json=True)):  # how it is printed does not matter
        spread.spread(work, progress=lambda done, _of: told.append(done))
    assert told[0] > 50
    assert not file.exists()


def test_a_file_that_was_named_stays(tmp_path):
    file = tmp_path / "c"
    with somewhere(_args(cells=str(file))):
        spread.spread(Work(_double, [1, 2], 3, lambda x: (x,)), alone=True)
    assert [json.loads(x)["figures"]["x"] for x in file.read_text().splitlines()[1:]] == [0.1 * 3, 0.2 * 3]


def test_without_ray_nothing_begins(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match="needs the extra 'ray'"), somewhere(_args(ray="auto")):
        raise AssertionError("it began")
