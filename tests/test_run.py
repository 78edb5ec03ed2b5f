"""Run and its tables: what is saved is what is loaded, in files that others can read, and damage is told apart."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis_runs import MS, S, Service, make_run, stream
from whywait.core.check import violations
from whywait.core.columns import SCHEMA_VERSION, TABLES, Column
from whywait.core.run import Manifest, Run, concat, write_json
from whywait.core.table import Table
from whywait.errors import UsageError

ROW = {"point": 0, "replica": 0, "attempt": 1, "outcome": "ok", "fault": "none"}
EXACT = 1 << 53  # a nullable integer is a double in memory
VALUES = {
    "f64": st.floats(allow_nan=False),
    "str": st.text(max_size=12),
}


def _value(c: Column) -> st.SearchStrategy[object]:
    if c.type == "enum":
        value: st.SearchStrategy[object] = st.sampled_from(c.values)
    elif c.type == "i64":
        value = st.integers(-EXACT, EXACT) if c.nullable else st.integers(-(1 << 63), (1 << 63) - 1)
    else:
        value = VALUES[c.type]
    return st.none() | value if c.nullable else value


def _rows(name: str, max_size: int = 12) -> st.SearchStrategy[list[dict[str, object]]]:
    return st.lists(st.fixed_dictionaries({c.name: _value(c) for c in TABLES[name]}), max_size=max_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all examples of a property: a file is replaced by the next, as when a run is saved again."""
    return tmp_path_factory.mktemp("tables")


def _same_rows(a: list[dict[str, object]], b: list[dict[str, object]]) -> bool:
    """Equal in value and in type: 1 is not 1.0, and -0.0 is not 0.0."""
    return repr([sorted(r.items()) for r in a]) == repr([sorted(r.items()) for r in b])


# Tables


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
@settings(max_examples=40)
def test_every_table_survives_the_disk(name, folder, data):
    rows = data.draw(_rows(name))
    table = Table.from_rows(name, rows)
    path = folder / f"{name}.parquet"
    table.save(path)
    back = Table.load(name, path)
    assert back == table
    assert _same_rows(back.rows(), rows)
    assert [back[c.name].dtype for c in TABLES[name]] == [table[c.name].dtype for c in TABLES[name]]


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
@settings(max_examples=25)
def test_others_read_every_table_with_real_nulls(name, folder, data):
    """pyarrow, which shares no code with us: the same values, the types the registry promises, null where unknown."""
    rows = data.draw(_rows(name))
    path = folder / f"{name}.parquet"
    Table.from_rows(name, rows).save(path)
    theirs = pq.read_table(path)
    assert _same_rows(theirs.to_pylist(), rows)
    for c in TABLES[name]:
        assert theirs.column(c.name).null_count == sum(r[c.name] is None for r in rows)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("rows", ["none", "some"])
def test_files_describe_themselves(name, rows, tmp_path):
    first = {"i64": 1, "f64": 1.0, "str": "x"}
    row = {c.name: c.values[0] if c.type == "enum" else first[c.type] for c in TABLES[name]}
    Table.from_rows(name, [row] if rows == "some" else []).save(tmp_path / "t.parquet")
    schema = pq.read_schema(tmp_path / "t.parquet")
    kinds = {"i64": pa.int64(), "f64": pa.float64(), "str": pa.string(), "enum": pa.string()}
    assert schema.names == [c.name for c in TABLES[name]]
    for field, c in zip(schema, TABLES[name], strict=True):
        assert field.type == kinds[c.type]
        assert field.nullable == c.nullable
        assert field.metadata[b"unit"].decode() == c.unit
        assert field.metadata[b"meaning"].decode() == c.meaning
    assert schema.metadata[b"whywait.schema_version"] == str(SCHEMA_VERSION).encode()


def test_text_of_any_script_survives(tmp_path):
    words = ["", "é", "日本語", "👩‍🔬", "a\0b", "\n\t", "\ufeff", "\U0010ffff", None, "x" * 70_000]
    rows = [{"asked_ns": i, "answered_ns": i, "source": "s", "name": "n", "labels": w} for i, w in enumerate(words)]
    Table.from_rows("readings", rows).save(tmp_path / "r.parquet")
    assert Table.load("readings", tmp_path / "r.parquet")["labels"].tolist() == words
    assert pq.read_table(tmp_path / "r.parquet").column("labels").to_pylist() == words


def test_many_rows_in_several_row_groups_come_back_in_order(tmp_path):
    n = 50_000
    rng = np.random.default_rng(1)
    cols = {
        "id": np.arange(n),
        "t_ns": rng.integers(0, 1 << 62, n),
        "t_low_ns": np.where(rng.random(n) < 0.5, np.nan, rng.integers(0, EXACT, n).astype(float)),
        "kind": rng.integers(0, 4, n),
        "clock": rng.integers(0, 2, n),
    }
    table = Table("chunks", cols)
    table.save(tmp_path / "c.parquet")
    assert Table.load("chunks", tmp_path / "c.parquet") == table
    pq.write_table(pq.read_table(tmp_path / "c.parquet"), tmp_path / "d.parquet", row_group_size=777)
    assert Table.load("chunks", tmp_path / "d.parquet") == table


def _foreign(path: Path, **changes: pa.Array) -> Path:
    """A chunks file as another tool would write it: two rows, with some columns replaced."""
    rows = [{"id": i, "t_ns": 5, "kind": "answer", "clock": "user", "tokens": 7} for i in range(2)]
    Table.from_rows("chunks", rows).save(path)
    theirs = pq.read_table(path)
    for name, values in changes.items():
        theirs = theirs.set_column(theirs.column_names.index(name), name, values)
    pq.write_table(theirs, path)
    return path


@pytest.mark.parametrize("word", ["anzwer", "ansver", "answers", "an", "", "Answer", "reasoning "])
def test_a_word_outside_a_closed_list_is_refused_not_guessed(tmp_path, word):
    with pytest.raises(UsageError, match="column kind holds a value outside"):
        Table.load("chunks", _foreign(tmp_path / "c.parquet", kind=pa.array(["answer", word])))


def test_a_null_where_none_may_be_is_refused(tmp_path):
    with pytest.raises(UsageError, match="column t_ns may not be null"):
        Table.load("chunks", _foreign(tmp_path / "c.parquet", t_ns=pa.array([5, None], pa.int64())))
    with pytest.raises(UsageError, match="column kind may not be null"):
        Table.load("chunks", _foreign(tmp_path / "c.parquet", kind=pa.array(["answer", None])))


def test_files_of_other_writers_are_read_by_value(tmp_path):
    """pandas turns integers with nulls into doubles, polars writes large strings, and some reorder or drop columns."""
    path = tmp_path / "c.parquet"
    theirs = pq.read_table(
        _foreign(path, tokens=pa.array([7.0, None]), kind=pa.array(["role", "tool"], pa.large_string()))
    )
    theirs = theirs.select(["kind", "tokens", "t_ns", "id", "clock"]).append_column("extra", pa.array([1, 2]))
    pq.write_table(theirs, path)
    back = Table.load("chunks", path)
    assert back.text("kind") == ["role", "tool"]
    assert [r["tokens"] for r in back.rows()] == [7, None]
    assert np.isnan(back["t_low_ns"]).all()


@pytest.mark.parametrize("cut", [0, 1, 100, -9, -1])
def test_a_damaged_file_is_named(tmp_path, capfd, cut):
    path = tmp_path / "c.parquet"
    Table.from_rows("chunks", [{"id": 1, "t_ns": 5, "kind": "answer", "clock": "user"}]).save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UsageError, match=r"c\.parquet is not a readable whywait table"):
        Table.load("chunks", path)
    assert capfd.readouterr().err == ""  # no library's stack trace between the user and the one line of ours


def test_damage_that_makes_the_reader_panic_is_named(tmp_path):
    """A panic is no Exception; unless it is caught by name it ends the program with a stack trace."""
    path = tmp_path / "c.parquet"
    path.write_bytes(b"PAR1" + bytes(100) + (90).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(UsageError, match=r"c\.parquet is not a readable whywait table"):
        Table.load("chunks", path)


def test_saving_replaces_the_old_file_whole(tmp_path):
    path = tmp_path / "c.parquet"
    Table.empty("chunks").save(path)
    before = path.read_bytes()
    bad = Table.from_rows("chunks", [{"id": 1, "t_ns": 5, "kind": "answer", "clock": "user"}])
    bad["kind"][0] = 99
    with pytest.raises(ValueError, match="column kind holds a code outside"):
        bad.save(path)
    assert path.read_bytes() == before


def test_rows_refuse_what_would_lose_data():
    row = {"id": 1, "t_ns": 5, "kind": "answer", "clock": "user"}
    with pytest.raises(ValueError, match=r"unknown columns for chunks: \['token'\]"):
        Table.from_rows("chunks", [{**row, "token": 3}])
    with pytest.raises(ValueError, match="column t_ns may not be null"):
        Table.from_rows("chunks", [{**row, "t_ns": None}])
    with pytest.raises(ValueError, match="column id may not be null"):
        Table("chunks", {"t_ns": np.array([1])})
    with pytest.raises(ValueError, match="column t_ns may not be null"):
        Table("chunks", {**{c: np.array([1]) for c in ("id", "kind", "clock")}, "t_ns": np.array([np.nan])})
    with pytest.raises(ValueError, match="differ in length"):
        Table("chunks", {"id": np.array([1]), "t_ns": np.array([1, 2])})
    with pytest.raises(KeyError):
        Table.from_rows("chunks", [{**row, "kind": "thought"}])


@given(_rows("requests", 6), st.data())
@settings(max_examples=30)
def test_selecting_and_joining_are_inverse(rows, data):
    table = Table.from_rows("requests", rows)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), dtype=bool)
    kept, left = table.where(mask), table.where(~mask)
    assert _same_rows(kept.rows(), [r for r, keep in zip(rows, mask, strict=True) if keep])
    order = np.argsort(np.concatenate([np.flatnonzero(mask), np.flatnonzero(~mask)]), kind="stable")
    assert Table.concat([kept, left]).where(order) == table


@given(st.lists(st.sampled_from([None, "", "a", "b", "c"]), max_size=12))
@settings(max_examples=30)
def test_rows_with_a_text_are_those_that_have_it_and_of_that_table_only(names):
    table = Table.from_rows("requests", [{**ROW, "id": i, "class": name} for i, name in enumerate(names)])
    for name in (None, "", "a", "b", "c", "d"):
        expected = [i for i, found in enumerate(names) if found == name]
        assert table.rows_with("class", name).tolist() == expected
    kept = table.where(table["class"] == "b")  # its index is its own
    assert kept.rows_with("class", "b").tolist() == list(range(names.count("b")))
    assert kept.rows_with("class", "a").tolist() == []


def test_equality_sees_every_column_and_takes_null_for_null():
    row = {"id": 1, "t_ns": 5, "kind": "answer", "clock": "user"}
    table = Table.from_rows("chunks", [row])
    assert table == Table.from_rows("chunks", [row])
    for changed in ({"id": 2}, {"t_ns": 6}, {"t_low_ns": 4}, {"kind": "role"}, {"tokens": 1}, {"clock": "kernel"}):
        assert table != Table.from_rows("chunks", [{**row, **changed}])
    assert table != Table.from_rows("chunks", [row, row])
    assert Table.empty("chunks") != Table.empty("steps")
    assert table != row


# Runs

FACTS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
MANIFESTS = st.builds(
    Manifest,
    made_by=st.sampled_from(["measured", "simulated", "imported"]),
    zero_unix_ns=st.integers(0, 1 << 62),
    command=st.lists(st.text(max_size=5), max_size=3),
    seed=st.integers(0, 1 << 40),
    engine=st.dictionaries(st.text(max_size=5), FACTS, max_size=3),
    slo=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=2),
    partial=st.booleans(),
    partial_reason=st.text(max_size=9),
    doubts=st.lists(st.fixed_dictionaries({k: st.text(max_size=4) for k in ("what", "why", "next")}), max_size=2),
)


@given(data=st.data())
@settings(max_examples=25)
def test_a_run_loads_as_it_was_saved(folder, data):
    """Invariant 6. The folder already holds the run before: nothing of that may shine through."""
    tables = {name: Table.from_rows(name, data.draw(_rows(name, 4))) for name in TABLES}
    run = Run(data.draw(MANIFESTS), **tables)
    assert run.save(folder) == folder
    assert Run.load(folder) == run
    assert Run.load(str(folder)) == run
    assert not list(folder.glob("*.tmp"))


def _saved(folder: Path) -> Path:
    return Service().closed(2, 4).save(folder / "run")


def _edit(run_dir: Path, **changes: object) -> None:
    path = run_dir / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_that_is_no_run_says_so(tmp_path):
    for what in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match="holds no whywait run") as caught:
            Run.load(what)
        assert "manifest.json" in caught.value.hint
    (tmp_path / "file").write_text("{}")
    with pytest.raises(UsageError, match="holds no whywait run"):
        Run.load(tmp_path / "file")


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"schema_version": null}', b'{"schema_version": "1"}',
            b'{"made_by": "guessed"}', b'{"partial": true'],
)  # fmt: skip
def test_a_damaged_manifest_is_named(tmp_path, raw):
    run_dir = _saved(tmp_path)
    (run_dir / "manifest.json").write_bytes(raw)
    with pytest.raises(UsageError, match=r"manifest\.json is damaged"):
        Run.load(run_dir)


def test_a_newer_schema_is_not_guessed_at(tmp_path):
    run_dir = _saved(tmp_path)
    _edit(run_dir, schema_version=SCHEMA_VERSION + 1, whywait_version="9.9")
    with pytest.raises(UsageError, match=rf"written by whywait 9\.9 \(schema {SCHEMA_VERSION + 1}\)") as caught:
        Run.load(run_dir)
    assert "upgrade" in caught.value.hint


def test_facts_that_a_later_version_adds_are_passed_over(tmp_path):
    run_dir = _saved(tmp_path)
    before = Run.load(run_dir)
    _edit(run_dir, invented_later={"a": 1})
    assert Run.load(run_dir) == before


@pytest.mark.parametrize("name", ["points", "requests"])
def test_a_run_without_its_points_or_requests_is_damaged_not_empty(tmp_path, name):
    run_dir = _saved(tmp_path)
    (run_dir / f"{name}.parquet").unlink()
    with pytest.raises(UsageError, match=rf"{name}\.parquet is missing"):
        Run.load(run_dir)


@pytest.mark.parametrize("name", ["chunks", "steps", "readings"])
def test_a_run_may_do_without_the_other_tables(tmp_path, name):
    run_dir = _saved(tmp_path)
    (run_dir / f"{name}.parquet").unlink(missing_ok=True)
    assert len(Run.load(run_dir).table(name)) == 0


def test_steps_of_the_run_before_do_not_stay(tmp_path):
    run = Service().closed(2, 4)
    steps = Table.from_rows("steps", [{"t_ns": 1, "took_ns": 5}])
    dataclasses.replace(run, steps=steps).save(tmp_path)
    run.save(tmp_path)
    assert Run.load(tmp_path) == run


def test_the_manifest_marks_a_run_as_whole(tmp_path, monkeypatch):
    """Killed while saving: no manifest, so what is there is not taken for a run."""
    order: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(Path(b).name), replace(a, b)))
    _saved(tmp_path)
    assert order[-1] == "manifest.json"
    assert order[-2] == "checksums.json"
    assert {"points.parquet", "requests.parquet", "chunks.parquet", "readings.parquet"} == set(order[:-2])


def test_json_refuses_nan_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"b": 1, "a": None})
    assert path.read_text() == '{\n  "b": 1,\n  "a": null\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"b": 1, "a": None}


def test_one_point_is_its_requests_their_chunks_and_the_readings_of_its_time():
    rows = [{"point": i // 2, "sent_ns": i * S, "end_ns": (i + 1) * S} for i in range(4)]
    points = [{"start_ns": 0, "end_ns": 2 * S}, {"start_ns": 2 * S, "end_ns": 4 * S}]
    chunks = [c for i in range(4) for c in stream(i, [i * S + MS])]
    readings = [{"asked_ns": t, "name": "n"} for t in (S, 3 * S)]
    one = make_run(rows, chunks, readings, points).point(1)
    assert one.points["point"].tolist() == [1]
    assert one.requests["id"].tolist() == [2, 3]
    assert one.chunks["id"].tolist() == [2, 3]
    assert one.readings["asked_ns"].tolist() == [3 * S]


# Concatenation


def _cut(run: Run, ids: list[int], **manifest: object) -> Run:
    """The part of a run that a shard with these requests would have recorded."""
    req = run.requests.where(np.isin(run.requests["id"], ids))
    chunks = run.chunks.where(np.isin(run.chunks["id"], ids))
    points = run.points.replace(planned=np.array([len(req)]), target=run.points["target"] / 2)
    m = dataclasses.replace(run.manifest, **manifest)
    return Run(m, points, req, chunks, run.steps, run.readings.where(np.zeros(len(run.readings), dtype=bool)))


@given(st.permutations(range(6)), st.integers(0, 6), st.booleans())
@settings(max_examples=25)
def test_shards_together_are_the_whole(order, at, swapped):
    """Invariant 7, for what was recorded."""
    whole = Service(tokens=3).closed(2, 6)
    parts = [_cut(whole, order[:at]), _cut(whole, order[at:])]
    joined = concat(parts[::-1] if swapped else parts)
    assert joined == whole
    assert violations(joined) == []


def test_a_point_of_two_shards_spans_both_and_adds_up():
    steady = {"steady_start_ns": 1, "steady_end_ns": 2}
    a = make_run([{"id": 0}], points=[{"start_ns": 5, "end_ns": 9, **steady}])
    b = make_run([{"id": 1}, {"id": 2}], points=[{"start_ns": 3, "end_ns": 7, **steady}])
    c = make_run([{"id": 3, "point": 1}], points=[{"point": 1, "start_ns": 20, "end_ns": 30}])
    rows = concat([c, a, b]).points.rows()
    assert rows[0]["target"] == 2 * rows[1]["target"]  # places in flight of both
    assert [(r["point"], r["planned"], r["start_ns"], r["end_ns"]) for r in rows] == [(0, 3, 3, 9), (1, 1, 20, 30)]
    assert rows[0]["steady_start_ns"] is rows[0]["steady_end_ns"] is None  # that of a part is not that of the whole


def test_what_one_part_doubts_the_whole_doubts():
    one, two = ({"what": w, "why": "", "next": ""} for w in ("one", "two"))
    a = make_run([{"id": 0}], doubts=[one], clock=[{"shard": 0}])
    b = make_run([{"id": 1}], doubts=[one, two], clock=[{"shard": 1}], partial=True, partial_reason="killed")
    m = concat([a, b]).manifest
    assert m.doubts == [one, two]
    assert m.clock == [{"shard": 0}, {"shard": 1}]
    assert (m.partial, m.partial_reason) == (True, "killed")


def test_runs_that_do_not_go_together_are_refused():
    a = make_run([{"id": 0}])
    with pytest.raises(ValueError, match="request ids clash"):
        concat([a, a])
    with pytest.raises(ValueError, match="different zeros"):
        concat([a, make_run([{"id": 1}], zero_unix_ns=5)])
