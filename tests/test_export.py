"""The verb ``export``: what is written where, CSV and Parquet read back by others, and what it says when it cannot."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.analysis_runs import S, Service, gauge_rows, join, make_run, messy_runs
from whywait import cli
from whywait.cli import main
from whywait.core.columns import TABLES
from whywait.core.events import Sent
from whywait.core.recorder import Recorder
from whywait.core.run import Manifest, Run
from whywait.core.table import Table
from whywait.exporting import NAMES, TO
from whywait.flags_out import FORMS
from whywait.flags_out import TABLES as TABLE_FLAG
from whywait.report import export_tables
from whywait.report.export import choose, parted

EXAM = Path(__file__).parents[1] / "exam" / "llama-kv-640"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = join([Service(slots=2).closed(1, 4), Service(slots=2).closed(4, 8)])
    read = Table.from_rows("readings", [{"answered_ns": r["asked_ns"], **r}
                                        for r in gauge_rows("running", [(S, 1.0), (9 * S, 2.0)], gpu="0")])  # fmt: skip
    return Run(run.manifest, run.points, run.requests, run.chunks, run.steps, read).save(tmp_path / "run")


def test_the_flags_are_those_of_the_journey() -> None:
    assert FORMS == TO
    assert tuple(TABLES) == TABLE_FLAG


@pytest.mark.parametrize("form", TO)
def test_every_form_by_the_command(form: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if form == "perfetto":
        pytest.importorskip("perfetto")
    assert cli.main(["export", str(run_dir), "--to", form, "--json"]) == 0
    out = capsys.readouterr()
    told = json.loads(out.out)
    assert (told["to"], told["made_by"], told["partial"], told["requests"]) == (form, "measured", False, 12)
    for file in told["files"]:
        path = Path(file["path"])
        assert path.parent in (run_dir, run_dir / form)  # into the run's folder
        assert path.stat().st_size == file["bytes"] > 0
        assert f"wrote {path}" in out.err
    assert not list(run_dir.rglob("*.tmp"))
    assert len(Run.load(run_dir).requests) == 12  # which stays a run


@pytest.mark.parametrize("form", [t for t in TO if t not in ("csv", "parquet", "perfetto")])
def test_stdout_holds_the_data_alone(form: str, run_dir: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    argv = ["export", str(run_dir), "--to", form, "--point", "1", "--out"]
    assert cli.main([*argv, "-"]) == 0
    raw = capfdbinary.readouterr().out
    target = run_dir.parent / "there"
    assert cli.main([*argv, str(target)]) == 0
    assert target.read_bytes() == raw  # the same bytes every time
    assert raw


def test_a_folder_takes_the_default_name_and_a_file_for_each_point(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert cli.main(["export", str(run_dir), "--to", "vllm-bench", "--out", str(tmp_path / "out")]) == 0
    assert cli.main(["export", str(run_dir), "--to", "grafana", "--out", str(tmp_path / "out")]) == 0
    found = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert found == [NAMES["grafana"], "vllm-bench-0.json", "vllm-bench-1.json"]
    loads = [json.loads((tmp_path / "out" / f"vllm-bench-{n}.json").read_text())["max_concurrency"] for n in (0, 1)]
    assert loads == [1, 4]


def test_csv_is_read_back_whole(run_dir: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(run_dir), "--to", "csv", "--out", str(tmp_path / "csv")]) == 0
    run = Run.load(run_dir)
    for name in TABLES:
        with (tmp_path / "csv" / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [_typed(name, r) for r in rows] == run.table(name).rows()
    with (tmp_path / "csv" / "data_dictionary.csv").open(newline="") as file:
        told = {(r["table"], r["column"]): r for r in csv.DictReader(file)}
    for table, spec in TABLES.items():
        for c in spec:
            assert told[table, c.name]["unit"] == c.unit
            assert told[table, c.name]["meaning"] == c.meaning
            assert told[table, c.name]["values"].split() == list(c.values)
    assert json.loads((tmp_path / "csv" / "manifest.json").read_text())["made_by"] == "measured"


def _typed(name: str, row: dict[str, str]) -> dict[str, Any]:
    kinds = {c.name: {"i64": int, "f64": float}.get(c.type, str) for c in TABLES[name]}
    return {k: kinds[k](v) if v else None for k, v in row.items()}


def test_a_cell_is_no_formula_of_a_spreadsheet() -> None:
    texts = ['=cmd|"/c calc"!A1', "+1", "-2", "@SUM(1)", "\tx", 'a,"b"\nc', "plain", None]
    run = make_run([{"sent_ns": 0, "end_ns": 1, "detail": t} for t in texts])
    out = io.StringIO()
    export_tables.write_csv(run, "requests", out)
    details = [r["detail"] for r in csv.DictReader(io.StringIO(out.getvalue(), newline=""))]
    assert details == [f"'{t}" for t in texts[:5] if t] + ['a,"b"\nc', "plain", ""]


def test_parquet_is_read_by_others_with_units_and_meanings(run_dir: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    argv = ["export", str(run_dir), "--to", "parquet", "--point", "1", "--out", str(tmp_path / "pq")]
    assert cli.main(argv) == 0
    run = Run.load(run_dir)
    for name, spec in TABLES.items():
        table = pq.read_table(tmp_path / "pq" / f"{name}.parquet")
        part = parted(run, (1,), np.flatnonzero(run.requests["point"] == 1))
        assert table.to_pylist() == part.table(name).rows()
        for c in spec:
            meta = table.schema.field(c.name).metadata
            assert meta[b"unit"].decode() == c.unit
            assert meta[b"meaning"].decode() == c.meaning


def test_tables_can_be_chosen(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["export", str(run_dir), "--to", "csv", "--table", "requests", "--requests", "1,3-4", "--out"]
    assert cli.main([*argv, "-"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [r["id"] for r in rows] == ["1", "3", "4"]
    assert cli.main([*argv, str(tmp_path / "some")]) == 0
    assert sorted(p.name for p in (tmp_path / "some").iterdir()) == ["data_dictionary.csv", "manifest.json",
                                                                     "requests.csv"]  # fmt: skip


def test_large_tables_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_tables, "PIECE", 7)
    run = Service().closed(1, 4)
    out = io.StringIO()
    assert export_tables.write_csv(run, "chunks", out) == 64
    assert [int(r["t_ns"]) for r in csv.DictReader(io.StringIO(out.getvalue()))] == run.chunks["t_ns"].tolist()


@settings(max_examples=40)
@given(messy_runs(orderly=False))
def test_any_run_is_csv(run: Run) -> None:
    chosen = choose(run)
    part = parted(run, chosen.points, chosen.rows)
    for name in TABLES:
        out = io.StringIO()
        export_tables.write_csv(part, name, out)
        assert [_typed(name, r) for r in csv.DictReader(io.StringIO(out.getvalue()))] == part.table(name).rows()


WRONG = {
    "--to openmetrics --limit 3": "figures of whole load points",
    "--to llm-d --requests 1": "figures of whole load points",
    "--to llm-d --out -": "the run has 2",
    "--to csv --out -": "one stream holds one table",
    "--to parquet --table points --out -": "one stream holds one table",
    "--to perfetto --endpoint http://127.0.0.1:4318": "--endpoint takes spans",
    "--to otlp --endpoint http://127.0.0.1:4318 --out x": "do not go together",
    "--to otlp --point 9": "no point 9",
    "--to otlp --requests 5-1": "not a range",
    "--to otlp --requests 0-99999999999": "not a range",
    "--to otlp --requests x": "no id",
    "--to otlp --out no/such/folder/x": "cannot write",
    "--to otlp --start yesterday": "is no time",
    "--to openmetrics --step 0s": "longer than nothing",
    "--to otlp --json --out -": "both want stdout",
}


@pytest.mark.parametrize("flags", WRONG)
def test_what_does_not_go_is_one_line(flags: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(run_dir), *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert WRONG[flags] in err
    assert not out
    assert len(err.splitlines()) <= 2


def test_a_trial_and_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(tmp_path), "--to", "csv"]) == 2
    (tmp_path / "trial.json").write_text("{}")
    assert cli.main(["export", str(tmp_path), "--to", "csv"]) == 2
    assert "is a trial of several runs" in capsys.readouterr().err


def test_a_missing_extra_is_one_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "perfetto"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    assert cli.main(["export", str(run_dir), "--to", "perfetto"]) == 2
    err = capsys.readouterr().err
    assert "needs the extra 'perfetto'" in err
    assert "pip install 'whywait[perfetto]'" in err
    assert not list(run_dir.glob("trace*"))


def test_a_run_that_was_cut_off_is_exported_and_labelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path / "run", Manifest(zero_unix_ns=1_700_000_000 * S))
    recorder.begin_point({"point": 0, "mode": "concurrency", "target": 1.0, "start_ns": 0}, [{"id": 0, "due_ns": 0}])
    recorder.event(Sent(0, 5))
    recorder.close()  # as a kill leaves it: no manifest, only the spool
    assert cli.main(["export", str(tmp_path / "run"), "--to", "otlp", "--out", "-"]) == 0
    out, err = capsys.readouterr()
    assert '"whywait.run.partial","value":{"boolValue":true}' in out
    assert "PARTIAL" in err


def test_a_run_without_a_time_of_day_says_where_it_was_put(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["export", str(run_dir), "--to", "otlp", "--out", "-"]
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert "begin at 2000-01-01" in err
    assert '"startTimeUnixNano":"946684801000000000"' in out
    assert cli.main([*argv, "--start", "2026-11-30T12:00:00Z"]) == 0
    out, err = capsys.readouterr()
    assert "2000" not in err
    assert '"startTimeUnixNano":"1796040001000000000"' in out


def test_a_measured_run_of_a_real_engine(tmp_path: Path) -> None:
    """The kept run of the exam: every form takes it, and no text of prompts or answers is in any of them."""
    forms = [t for t in TO if t != "perfetto" or "perfetto" in sys.modules or _has("perfetto")]
    for form in forms:
        target = tmp_path / form
        target.mkdir()
        assert cli.main(["export", str(EXAM), "--to", form, "--out", str(target)]) == 0
    words = re.compile(rb"\"(content|messages|prompt|gen_ai\.(input|output)\.messages|gen_ai\.(prompt|completion))\"")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert not words.search(path.read_bytes()), path
    # All that a Run holds of words; a column that could hold a prompt or an answer would have to be named here.
    told = {(name, c.name) for name, spec in TABLES.items() for c in spec if c.type == "str"}
    assert {column for _, column in told} == {"label", "class", "trace_id", "detail", "finish_reason", "bound_by",
                                              "source", "name", "labels"}  # fmt: skip
    bench = json.loads((tmp_path / "vllm-bench" / "vllm-bench-1.json").read_text())
    assert (bench["completed"], bench["failed"], set(bench["generated_texts"])) == (0, 40, {None})  # it had no KV space


def _has(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def test_a_simulated_run(tmp_path: Path) -> None:
    argv = ["simulate", "--machine", "h100", "--model", "llama-3.1-8b", "--concurrency", "2", "--requests", "6",
            "--prompt-tokens", "64", "--output-tokens", "8", "--draws", "1", "--jobs", "1",
            "--out", str(tmp_path / "sim")]  # fmt: skip
    assert cli.main(argv) == 0
    for form in TO:
        if form != "perfetto" or _has("perfetto"):
            assert cli.main(["export", str(tmp_path / "sim"), "--to", form]) == 0
    report = json.loads((tmp_path / "sim" / "llm-d-report.json").read_text())
    engine = report["scenario"]["stack"][0]["standardized"]
    assert (engine["kind"], engine["accelerator"]["model"]) == ("inference_engine", "H100 SXM")
    assert "start" not in report["run"]["time"]  # it has no time of day
    assert "simulated" in report["run"]["description"]
    assert len((tmp_path / "sim" / "csv" / "steps.csv").read_text().splitlines()) > 1


def test_a_pipe_and_a_link_stay_what_they_are(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing a device by a file would break the machine (``--out /dev/null``)."""
    fifo, got = tmp_path / "pipe", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    assert cli.main(["export", str(run_dir), "--to", "grafana", "--out", str(fifo)]) == 0
    reader.join(20)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert json.loads(got[0])["uid"] == "whywait-run"
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert cli.main(["export", str(run_dir), "--to", "grafana", "--out", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == got[0]
    monkeypatch.setattr("whywait.exporting.os.replace", lambda *_: pytest.fail("a device was to be replaced"))
    assert cli.main(["export", str(run_dir), "--to", "grafana", "--out", "/dev/null"]) == 0


def test_what_never_came_due_is_no_failure(tmp_path: Path) -> None:
    """Of a run that was cut off the rest of its plan: in the tables, in no figure and in no trace."""
    rows = [{"due_ns": 0, "sent_ns": 0, "first_ns": 1, "last_ns": S, "end_ns": S},
            {"due_ns": S // 2, "outcome": "never_sent"}, {"due_ns": 9 * S, "outcome": "never_sent"}]  # fmt: skip
    run = make_run(rows, points=[{"mode": "rate", "target": 1.0, "start_ns": 0, "end_ns": S}], partial=True)
    run.save(tmp_path / "run")
    for form in ("otlp", "vllm-bench", "csv"):
        assert cli.main(["export", str(tmp_path / "run"), "--to", form]) == 0
    bench = json.loads((tmp_path / "run" / "vllm-bench.json").read_text())
    assert (bench["num_prompts"], bench["completed"], bench["failed"]) == (2, 1, 1)
    spans = (tmp_path / "run" / "spans.otlp.jsonl").read_text()
    assert spans.count('"error.type"') == 1
    assert len((tmp_path / "run" / "csv" / "requests.csv").read_text().splitlines()) == 4


def test_nothing_is_written_through_links_of_a_run(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of somebody else may hold links that lead anywhere."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run_dir / "grafana.json").symlink_to(victim)
    for name in ("spans.otlp.jsonl.tmp", "vllm-bench.json.tmp", "metrics.openmetrics.txt.tmp"):
        (run_dir / name).symlink_to(victim)
    try:
        assert main(["export", str(run_dir), "--to", "grafana"]) == 2
        assert "is a link to another file" in capsys.readouterr().err
        for form in ("otlp", "vllm-bench", "openmetrics"):
            main(["export", str(run_dir), "--to", form])
        assert victim.read_text() == "mine"
    finally:
        for path in run_dir.iterdir():
            if path.is_symlink():
                path.unlink()
