"""Long runs: the fast ways give the figures that the plain ones give, to the last bit."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.size import make

from whywait import app
from whywait.analyze import pooled, stats
from whywait.analyze.latency import per_request
from whywait.analyze.phases import account
from whywait.analyze.pooled import Pool
from whywait.analyze.sharing import tokens_inside
from whywait.analyze.stalls import _group_median
from whywait.analyze.streams import arrivals, content, ends_low, gaps
from whywait.analyze.window import Window, token_bins
from whywait.core import parquet
from whywait.core import run as core
from whywait.core.run import Run
from whywait.core.table import Table

GOLDEN = Path(__file__).parent / "golden" / "size.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20,000 chunks of three load points, as ``benchmarks/size.py`` makes those of a hundred million."""
    out = tmp_path_factory.mktemp("size")
    make(out, 20_000, 3, seed=3)
    return out


def _figures(value: Any, at: str = "") -> dict[str, Any]:
    """Every leaf of a summary, by its path."""
    if isinstance(value, dict):
        return {k2: v2 for k, v in value.items() for k2, v2 in _figures(v, f"{at}/{k}").items()}
    if isinstance(value, list):
        return {k2: v2 for i, v in enumerate(value) for k2, v2 in _figures(v, f"{at}/{i}").items()}
    return {at: value}


def test_the_figures_are_those_of_before(folder: Path) -> None:
    """Made by the code as it was before chunks were packed and gone through once; the version is not a figure."""
    wanted, got = json.loads(GOLDEN.read_text()), _figures(app.show(folder).summary)
    assert wanted.keys() == got.keys()
    for key, value in wanted.items():
        if isinstance(value, float):  # other machines add in another order
            assert got[key] == pytest.approx(value, rel=1e-9, abs=1e-9), key
        elif not key.endswith("whywait_version"):
            assert got[key] == value, key


def test_a_long_run_is_analysed_point_by_point_with_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = app.show(folder)
    app.write_report(plain, tmp_path / "plain.html")
    monkeypatch.setattr(parquet, "PACK_FROM", 0)
    monkeypatch.setattr(parquet, "READ_ROWS", 1_000)
    monkeypatch.setattr(core, "MOST_KEPT", 0)
    long = app.show(folder)
    assert long.run.chunks.packed("t_ns") is not None
    assert json.dumps(long.summary) == json.dumps(plain.summary)
    app.write_report(long, tmp_path / "long.html")
    assert (tmp_path / "long.html").read_bytes() == (tmp_path / "plain.html").read_bytes()


def test_points_that_overlap_in_time_are_looked_at_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.load(folder)
    shift = np.array([0, 10_000_000, 20_000_000])[run.requests["point"]]  # all three at about the same time
    stamps = ("due_ns", "sent_ns", "accepted_ns", "first_ns", "first_answer_ns", "last_ns", "end_ns")
    by = shift - run.points["start_ns"][run.requests["point"]] + 10**9
    moved = {k: run.requests[k] + by for k in stamps}
    by_id = by[run.chunks["id"]]
    chunks = run.chunks.replace(t_ns=run.chunks["t_ns"] + by_id, t_low_ns=run.chunks["t_low_ns"] + by_id)
    points = run.points.replace(start_ns=run.points["start_ns"] * 0, end_ns=run.points["end_ns"] * 0 + 10**12)
    both = dataclasses.replace(run, requests=run.requests.replace(**moved), chunks=chunks, points=points)
    plain = account(dataclasses.replace(both))
    monkeypatch.setattr(core, "MOST_KEPT", 0)
    long = account(dataclasses.replace(both))
    assert (plain.phases == long.phases).all()
    assert plain.causes == long.causes
    assert plain.how == long.how


def test_pooled_values_that_each_count_one_need_no_companions() -> None:
    rng = np.random.default_rng(5)
    for groups, most in ((1, 5), (3, 9), (40, 30), (2_500, 6)):
        group = np.repeat(np.arange(groups) * 3, rng.integers(1, most, groups))
        for values in (rng.exponential(20.0, len(group)), rng.integers(0, 50, len(group)) * 0.1, group - 4.5):
            seed = int(rng.integers(1 << 30))
            plain = stats.pooled_summary(values, group, np.random.default_rng(seed))
            weighted = stats.pooled_summary(values, group, np.random.default_rng(seed), np.ones(len(values)))
            pool = Pool(values, group)
            assert pool.summary(np.random.default_rng(seed)) == plain == weighted
            assert (pooled.sort(values) == np.sort(values)).all()
            qs = [0.5, 0.9, 0.99, 1.0]
            assert stats.ranked(values, qs) == [stats.weighted_percentile(values, q, None) for q in qs]
    assert Pool(np.zeros(0), np.zeros(0, dtype=int)).summary(rng)["p50"] is None


def test_medians_of_groups_are_those_of_a_sort() -> None:
    rng = np.random.default_rng(2)
    for n in (0, 1, 5, 300):
        group = np.repeat(np.arange(n), rng.integers(0, 40, n))
        values = rng.integers(0, 30, len(group)).astype(np.float64)
        for order in (np.arange(len(group)), rng.permutation(len(group))):
            got, count = _group_median(values[order], group[order], n)
            assert (count == np.bincount(group, minlength=n)).all()
            for i in range(n):
                mine = np.sort(values[group == i])
                assert got[i] == mine[(len(mine) - 1) // 2] if len(mine) else np.isnan(got[i])


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return Run.load(folder)


def test_chunks_and_gaps_are_those_of_the_definition(run: Run) -> None:
    """One request after another, in plain Python."""
    c, g = content(run), gaps(content(run))
    at = n = 0
    first, last = ends_low(run)
    chunks = {name: run.chunks[name] for name in ("id", "t_ns", "t_low_ns", "kind", "tokens")}
    for row, id_ in enumerate(run.requests["id"].tolist()):
        mine = np.flatnonzero((chunks["id"] == id_) & (chunks["kind"] != 0))
        mine = mine[np.argsort(chunks["t_ns"][mine], kind="stable")]
        t = chunks["t_ns"][mine].astype(np.float64)
        low = np.where(np.isnan(chunks["t_low_ns"][mine]), t, np.minimum(chunks["t_low_ns"][mine], t))
        part = slice(at, at + len(mine))
        assert (c.row[part] == row).all()
        assert (c.t[part] == t).all()
        assert (c.low[part] == low).all()
        spread = np.array([a + (b - a) * (int((t[: i + 1] == b).sum()) / int((t == b).sum()))
                           for i, (a, b) in enumerate(zip(low, t, strict=True))])  # fmt: skip
        assert (c.spread[part] == spread).all()
        assert (c.tokens[part] == 1).all()
        gap = slice(n, n + len(mine) - 1)
        assert (g.low[gap] == np.maximum(low[1:] - t[:-1], 0)).all()
        assert (g.high[gap] == t[1:] - low[:-1]).all()
        assert (g.value[gap] == np.clip(np.diff(spread), g.low[gap], g.high[gap])).all()
        assert (g.begin_ns[gap] == t[:-1]).all()
        assert first[row] == min(low[0], run.requests["first_ns"][row])
        assert last[row] == min(low[-1], run.requests["last_ns"][row])
        at, n = at + len(mine), n + len(mine) - 1
    assert at == len(c.row)
    assert n == len(g.row)
    assert c.coalesced.any()


def test_tokens_in_a_window_are_counted_one_by_one(run: Run) -> None:
    one = run.point(1)
    c = content(one)
    start, end = int(one.points["start_ns"][0]), int(one.points["end_ns"][0])
    rng = np.random.default_rng(4)
    for _ in range(5):
        a, b = sorted(rng.integers(start, end, 2).tolist())
        inside = (c.spread > a) & (c.spread <= b)
        w = Window(a, b, False, 0, 0)
        assert (tokens_inside(one, c, w) == np.bincount(c.row, inside * c.tokens_spread, len(one.requests))).all()
        which = rng.random(len(one.requests)) < 0.5
        found, missing = token_bins(one, c, w, which, 7)
        edges = np.linspace(a, b, 8)
        mine = c.spread[which[c.row]]
        assert found is not None
        assert missing == 0
        assert found.tolist() == [int(((mine > x) & (mine <= y)).sum()) for x, y in itertools.pairwise(edges)]


def test_how_chunks_came_is_counted_one_by_one(run: Run) -> None:
    found, one = arrivals(run, 2), run.point(2)
    c = content(one)
    for row in range(len(one.requests)):
        t = c.t[c.row == row]
        near = np.diff(t) < 100_000
        assert found.chunks[row] == len(t)
        assert found.bursts[row] == len(t) - near.sum()
        assert found.second[row] == (len(t) > 1 and bool(near[0]))
    assert found.gap_ms == pytest.approx(np.mean([x for r in range(len(one.requests))
                                                  for x in np.diff(c.t[c.row == r])]) / 1e6)  # fmt: skip


def test_what_was_made_once_is_nobody_elses(run: Run) -> None:
    """A table with other figures is another Run: nothing of the first is taken for its own."""
    other = dataclasses.replace(run, requests=run.requests.replace(last_ns=run.requests["last_ns"] + 5e6))
    assert (per_request(other).e2e_ms == per_request(run).e2e_ms + 5).mean() > 0.99
    empty = dataclasses.replace(run, chunks=Table.empty("chunks"))
    assert len(content(empty).row) == 0
    assert len(gaps(content(empty)).value) == 0
    assert np.isnan(arrivals(empty, 0).gap_ms)
    assert len(content(run).row) > 0
