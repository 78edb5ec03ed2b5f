"""Columns of a long table in a short form: what comes out is bit for bit what went in, cut anywhere."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.analysis_runs import Service
from whywait.core import parquet
from whywait.core import run as core
from whywait.core.packed import Packed, Plain, Rare, Runs, Same, Small, pack
from whywait.core.run import Run, runs_of
from whywait.core.table import Table

NAN = np.nan
RNG = np.random.default_rng(1)
FORMS = {
    "ids": (np.repeat(np.arange(40, dtype=np.int64), 25), Runs),
    "times": (np.cumsum(RNG.integers(0, 1 << 40, 1000)), Plain),
    "one id": (np.full(1000, 7, dtype=np.int64), Same),
    "kinds": (RNG.integers(0, 4, 1000).astype(np.int8), Plain),
    "one clock": (np.zeros(1000, dtype=np.int8), Same),
    "no value": (np.full(1000, NAN), Same),
    "one token each": (np.ones(1000), Same),
    "tokens": (np.where(RNG.random(1000) < 0.3, NAN, RNG.integers(0, 9, 1000)), Small),
    "some exact": (np.where(RNG.random(1000) < 0.01, RNG.random(1000) * 1e18, NAN), Rare),
    "tokens beyond a byte": (RNG.integers(0, 300, 1000).astype(np.float64), Plain),
    "a byte's null": (np.where(np.arange(1000) % 2, 255.0, 1.0), Plain),
    "halves": (RNG.integers(0, 9, 1000) / 2, Plain),
    "minus nought": (np.where(np.arange(1000) % 2, -0.0, 3.0), Plain),
    "both noughts": (np.where(np.arange(1000) % 2, -0.0, 0.0), Plain),
    "below nought": (np.where(np.arange(1000) % 2, -1.0, 3.0), Plain),
    "without bound": (np.where(np.arange(1000) % 2, np.inf, 3.0), Plain),
}


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.ascontiguousarray(a).tobytes() == b.tobytes()


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_back_its_bits(name: str) -> None:
    values, form = FORMS[name]
    part = pack(values)
    assert isinstance(part, form)
    column = Packed([part], [len(values)], values.dtype)
    for a, b in ((0, 1000), (0, 1), (999, 1000), (3, 3), (24, 26), (17, 803)):
        assert _same_bits(column[a:b].dense(), values[a:b])
        assert len(column[a:b]) == b - a


def test_stretches_of_different_forms_are_one_column() -> None:
    parts = [FORMS[k][0] for k in ("no value", "tokens", "some exact", "halves", "one token each", "one token each")]
    column = Packed([pack(p) for p in parts], [len(p) for p in parts], np.float64)
    whole = np.concatenate(parts)
    for a, b in itertools.pairwise((0, 5, 999, 1000, 1001, 2500, 4000, 4001, 5990, 6000)):
        assert _same_bits(column[a:b].dense(), whole[a:b])
        assert _same_bits(column[a:].dense(), whole[a:])
        assert _same_bits(column[a:][3 : b - a].dense(), whole[a + 3 : b] if b - a > 3 else whole[:0])
    assert column[4000:].dense().strides == (0,)  # one value throughout takes no memory
    assert not column.all_null()
    assert column[:1000].all_null()


def test_runs_are_joined_where_stretches_meet() -> None:
    ids = np.repeat(np.array([3, 5, 5, 9, 4]), [20, 30, 12, 40, 30])
    cuts = [(a, min(a + 25, len(ids))) for a in range(0, len(ids), 25)]
    column = Packed([pack(ids[a:b]) for a, b in cuts], [b - a for a, b in cuts], np.int64)
    for a, b in ((0, 132), (0, 20), (10, 70), (55, 131)):
        values, counts = column[a:b].runs()
        assert (values[1:] != values[:-1]).all()
        assert _same_bits(np.repeat(values, counts), ids[a:b])


def test_codes_outside_the_list_and_nulls_are_told_in_any_batch(tmp_path: Path) -> None:
    for column, word in (("kind", "answer"), ("clock", "user")):
        spec = next(c for c in core.TABLES["chunks"] if c.name == column)
        for n in (1, 5):
            strings = parquet.ac.Array([word] * n, parquet.ac.DataType.string())
            assert parquet._enum_codes(spec, strings).tolist() == [spec.values.index(word)] * n
            for bad in (["x" * len(word)] * n, [word] * n + ["other"], ["other"]):
                with pytest.raises(ValueError, match=f"column {column} holds a value outside"):
                    parquet._enum_codes(spec, parquet.ac.Array(bad, parquet.ac.DataType.string()))
    nullable = spec._replace(nullable=True)
    mixed = parquet.ac.Array(["user", None, "kernel", None], parquet.ac.DataType.string())
    assert parquet._enum_codes(nullable, mixed).tolist() == [1, -1, 0, -1]


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table is a long one, read in short batches."""
    monkeypatch.setattr(parquet, "PACK_FROM", 0)
    monkeypatch.setattr(parquet, "READ_ROWS", 97)


def test_a_packed_run_is_the_run(tmp_path: Path, long: None) -> None:
    run = Service().closed(4, 30)
    run.save(tmp_path / "a")
    back = Run.load(tmp_path / "a")
    assert back.chunks.packed("id") is not None
    assert back == run
    assert back.save(tmp_path / "b")
    assert Run.load(tmp_path / "b") == run
    mask = RNG.random(len(run.chunks)) < 0.5
    assert back.chunks.where(mask) == run.chunks.where(mask)
    assert back.chunks.cut(5, 200) == run.chunks.cut(5, 200) == run.chunks.where(np.arange(5, 200))
    assert back.chunks.rows() == run.chunks.rows()
    assert Table.concat([back.chunks, back.chunks]) == Table.concat([run.chunks, run.chunks])
    assert [len(p) for p in back.chunks.pieces(100)] == [len(p) for p in run.chunks.pieces(100)]
    for a, b in zip(runs_of(back.chunks, "id"), runs_of(run.chunks, "id"), strict=True):
        assert (a == b).all()


def test_the_chunks_of_a_point_are_found_where_they_lie_together_and_where_not(tmp_path: Path, long: None) -> None:
    run = Service().closed(4, 40)
    point = (run.requests["id"] % 2).astype(np.int64)  # every other request
    rows = [{**run.points.rows()[0], "point": p, "planned": 20} for p in (0, 1)]
    scattered = Run(run.manifest, Table.from_rows("points", rows), run.requests.replace(point=point), run.chunks,
                    run.steps, run.readings)  # fmt: skip
    scattered.save(tmp_path / "a")
    for made in (scattered, Run.load(tmp_path / "a")):
        for p in (0, 1):
            one = made.point(p)
            wanted = run.chunks.where(np.isin(run.chunks["id"], run.requests["id"][point == p]))
            assert one.chunks == wanted
    together = run.point(run.points["point"][0])
    assert together.chunks == run.chunks
