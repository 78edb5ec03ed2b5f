"""``whywait history``: every run of a folder in a row, and nothing in it can stop the list."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from pathlib import Path

import pytest

from tests.analysis_runs import S, Service
from whywait import app, listing
from whywait.cli import main
from whywait.core.run import Run
from whywait.listing import Choice, history
from whywait.report.history import BARS, GAP, spark
from whywait.report.history_html import render

DAY = 86_400
NOON = 1_796_040_000  # 2026-11-30T12:00:00Z


def kept(top: Path, name: str, gap_ms: float = 20.0, day: int = 0, **manifest: object) -> Run:
    run = Service(gap_ms=gap_ms).closed(4, 40)
    facts = {
        "zero_unix_ns": (NOON + day * DAY) * S,
        "engine": {"name": "vllm", "model": "tiny", "slots": 4},
        **manifest,
    }
    run = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, **facts))
    app.keep(run, top / name)
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    kept(tmp_path, "c-third", 40, day=2)
    kept(tmp_path, "a-second", 20, day=1, partial=True, partial_reason="the service died")
    kept(tmp_path, "deep/b-first", 10, day=0)
    return tmp_path


def call(*argv: str) -> int:
    try:
        return main(list(argv))
    except SystemExit as exc:
        return int(exc.code or 0)


def test_runs_are_listed_by_date_with_their_figures(folder):
    r = history(folder)
    assert [x["name"] for x in r["runs"]] == ["deep/b-first", "a-second", "c-third"]
    assert [x["state"] for x in r["runs"]] == ["whole", "PARTIAL", "whole"]
    assert r["runs"][1]["why"] == "the service died"
    assert r["runs"][0]["date"] == "2026-11-30T12:00:00Z"
    for x in r["runs"]:
        summary = json.loads((folder / x["name"] / "summary.json").read_text())
        assert x["value"] == summary["points"][0]["output_tokens_per_s"]
        assert (x["engine"], x["model"], x["at"]) == ("vllm", "tiny", "concurrency 4")
        assert x["verdict"] == summary["headline"]
    values = [x["value"] for x in r["runs"]]
    assert values == sorted(values, reverse=True)


def test_a_run_without_a_summary_is_analysed_and_one_cut_off_is_partial(folder):
    (folder / "c-third" / "summary.json").unlink()
    assert history(folder)["runs"][-1]["value"] > 0
    (folder / "cut" / "spool").mkdir(parents=True)
    (folder / "cut" / "spool" / "log.jsonl").write_text("")
    cut = next(x for x in history(folder)["runs"] if x["name"] == "cut")
    assert (cut["state"], cut["value"]) == ("PARTIAL", None)
    assert cut["why"]


BROKEN = {
    "manifest.json": ["", "{", "[]", "null", "{}", '{"schema_version": 99}', '{"made_by": "magic"}', '{"slo": 5}',
                      '{"schema_version": "x"}', "[" * 5000, '{"engine": []}', "\udcff"],
    "summary.json": ["", "{", "[]", "{}", '{"points": 5, "slo": {}}', '{"points": [{}], "slo": {}}',
                     '{"points": [{"window": {"start_ns": "x"}}], "slo": {}}'],
}  # fmt: skip


@pytest.mark.parametrize(("file", "text"), [(f, t) for f, texts in BROKEN.items() for t in texts])
def test_whatever_is_broken_is_listed_and_the_others_stay(file, text, folder):
    (folder / "a-second" / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    r = history(folder)
    known = [x["name"] for x in r["runs"]]
    assert {"deep/b-first", "c-third"} <= set(known)
    assert ("a-second" in known) != ("a-second" in [b["name"] for b in r["broken"]])
    if text != "{}" or file == "summary.json":
        assert [b["name"] for b in r["broken"]] == ["a-second"]
        assert r["broken"][0]["why"]
    assert call("history", str(folder)) == 0


def test_a_run_of_before_the_slo_was_kept_is_read(folder):
    kept_summary = folder / "c-third" / "summary.json"
    raw = json.loads(kept_summary.read_text())
    del raw["slo"]
    kept_summary.write_text(json.dumps(raw))
    r = history(folder)
    assert (r["broken"], r["runs"][-1]["name"]) == ([], "c-third")
    assert r["runs"][-1]["value"] > 0


def test_no_number_and_no_date_stop_the_list(folder, capsys):
    """JSON of Python has NaN and Infinity; what has them is named, and what is printed has none."""
    kept_summary = folder / "c-third" / "summary.json"
    kept_summary.write_text(kept_summary.read_text().replace('"p50": ', '"p50": NaN, "was": ', 1))
    manifest = json.loads((folder / "a-second" / "manifest.json").read_text())
    (folder / "a-second" / "manifest.json").write_text(json.dumps({**manifest, "zero_unix_ns": 10**40}))
    facts = {"engine": {"name": float("nan"), "model": float("inf")}}
    kept(folder, "odd", day=3)
    manifest = json.loads((folder / "odd" / "manifest.json").read_text())
    (folder / "odd" / "manifest.json").write_text(json.dumps({**manifest, **facts}))
    assert call("history", str(folder), "--json") == 0
    r = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [x["name"] for x in r["runs"]] == ["deep/b-first", "odd"]
    assert [b["name"] for b in r["broken"]] == ["a-second", "c-third"]
    assert "first_byte_ms.p50 is nan, not a number" in r["broken"][1]["why"]
    assert call("history", str(folder)) == 0
    assert call("history", str(folder), "--csv", "-") == 0


def test_the_plotted_point_is_the_knee_or_that_of_most_load(folder):
    """A ladder without a knee: the point of most load, whatever its place; a labelled one stands aside."""
    path = folder / "c-third" / "summary.json"
    raw = json.loads(path.read_text())
    one = raw["points"][0]
    loads = [(4, None), (16, None), (8, None), (64, "warm")]
    raw["points"] = [{**one, "point": i, "target": n, "label": label, "output_tokens_per_s": n * 10.0}
                     for i, (n, label) in enumerate(loads)]  # fmt: skip
    for knee, at in ((None, 16), (2, 8), (0, 4)):
        path.write_text(json.dumps({**raw, "knee": knee}))
        run = history(folder)["runs"][-1]
        assert (run["at"], run["value"]) == (f"concurrency {at}", at * 10.0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_read_does_not_stop_the_list(folder):
    (folder / "c-third" / "manifest.json").chmod(0)
    assert len(history(folder)["runs"]) == 2
    assert len(history(folder)["broken"]) == 1


def test_links_do_not_lead_in_circles(folder):
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    assert len(history(folder)["runs"]) == 3


def test_other_folders_are_named_for_what_they_are_and_rounds_are_not_runs(folder):
    kept(folder, "trial/round-01-a")
    (folder / "trial" / "trial.json").write_text(json.dumps({"headline": "B is faster", "partial": False}))
    (trial,) = (x for x in history(folder)["runs"] if x["made_by"] == "trial")
    assert (trial["name"], trial["verdict"], trial["points"]) == ("trial", "B is faster", [])
    assert not any("round" in x["name"] for x in history(folder)["runs"])


def test_the_list_is_narrowed(folder):
    kept(folder, "other", engine={"name": "sglang", "model": "large", "slots": 4}, day=3)
    assert [x["name"] for x in history(folder, Choice(engine="sglang"))["runs"]] == ["other"]
    assert [x["name"] for x in history(folder, Choice(model="tiny", last=1))["runs"]] == ["c-third"]
    assert all(x["value"] is None for x in history(folder, Choice(at="concurrency 8"))["runs"])
    assert history(folder, Choice(figure="goodput"))["figure"] == "goodput_requests_per_s"
    assert history(folder, Choice(figure="ttft_ms.p95"))["runs"][0]["value"] == pytest.approx(50.2, abs=1)


@pytest.mark.parametrize(
    ("argv", "word"),
    [(["nowhere"], "is not a folder"), ([".", "--figure", "speed"], "no figure 'speed'"),
     ([".", "--last", "0"], "--last"), ([".", "--html", "/nowhere/x.html"], "cannot write")],
)  # fmt: skip
def test_mistakes_are_one_clear_line(argv, word, capsys):
    assert call("history", *argv) == 2
    err = capsys.readouterr().err
    assert word in err
    assert "Traceback" not in err


def test_an_empty_folder_is_no_mistake(tmp_path, capsys):
    assert call("history", str(tmp_path)) == 0
    assert "no run in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([1, 2, 3], "▁▅█"),
        ([5, 5], "▄▄"),
        ([None, 1.0, None, 2.0], "·▁·█"),
        ([], ""),
        ([None], GAP),
        ([0.0, -1.0], "█▁"),
    ],
)
def test_a_line_of_bars(values, line):
    assert spark(values) == line


def test_a_long_line_keeps_the_last():
    assert spark([float(i) for i in range(200)]).endswith(BARS[-1])
    assert len(spark([float(i) for i in range(200)])) == 60


HOSTILE = "=cmd|' /C calc'!A0\x1b[31m<img src=x onerror=alert(1)>[red]"


def test_hostile_names_stay_text(folder, capsys):
    kept(
        folder,
        "hostile",
        engine={"name": HOSTILE, "model": HOSTILE, "slots": 4},
        day=3,
        partial=True,
        partial_reason=HOSTILE,
    )
    (folder / "deep" / "=evil\n<b>").mkdir()
    (folder / "deep" / "=evil\n<b>" / "manifest.json").write_text(HOSTILE)
    page, table = folder / "h.html", folder / "h.csv"
    assert call("history", str(folder), "--html", str(page), "--csv", str(table)) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "<img" not in page.read_text()
    assert "<script" not in page.read_text()
    assert "&lt;img" in page.read_text()
    for row in csv.reader(io.StringIO(table.read_text())):
        assert not any(c[:1] in ("=", "+", "@") for c in row)


def test_json_and_csv_have_every_run_and_point(folder, capsys):
    assert call("history", str(folder), "--json") == 0
    r = json.loads(capsys.readouterr().out)
    assert (r["kind"], len(r["runs"])) == ("whywait history", 3)
    assert call("history", str(folder), "--csv", "-", "--figure", "e2e_ms.p99") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 3
    assert float(rows[0]["output_tokens_per_s"]) == r["runs"][0]["value"]
    assert float(rows[0]["e2e_ms.p99"]) > 0
    assert "▁" in render(r)
    assert r["kind"] == listing.KIND


def test_a_run_that_nobody_measured_says_so_and_no_line_joins_it_to_one_that_was(tmp_path, capsys):
    for i, made_by in enumerate(("measured", "simulated", "measured", "imported")):
        kept(tmp_path, f"r{i}", 20 + i, day=i, made_by=made_by)
    kept(tmp_path, "r4", 24, day=4, partial=True, partial_reason="the service died")
    assert call("history", str(tmp_path)) == 0
    lines = {x.split()[0]: x for x in capsys.readouterr().out.splitlines() if x.strip()}
    assert "simulated" in lines["r1"]
    assert "imported" in lines["r3"]
    assert all(x.count("imported") <= 1 for x in lines.values())  # the state, never the engine
    assert "simulated" not in lines["r0"]
    page = render(history(tmp_path))
    assert page.count('class="line-p50"') == 1  # the measured ones; of the others there is one each
    assert page.count('class="cross"') == 1
    assert page.count("M0-6.5 6.5 0") == 2


def test_a_summary_kept_among_runs_hides_none_of_them(folder):
    (folder / "summary.json").write_text('{"kept": "by hand"}')
    assert len(history(folder)["runs"]) == 3


def test_a_run_without_a_date_stands_where_it_was_kept(folder):
    """Simulated runs have none: they are not older than all others."""
    kept(folder, "simulated", day=0, made_by="simulated", zero_unix_ns=0)
    old = (NOON - 30 * DAY, NOON - 30 * DAY)
    os.utime(folder / "simulated", old)
    assert history(folder)["runs"][0]["name"] == "simulated"
    os.utime(folder / "simulated", (NOON + 30 * DAY, NOON + 30 * DAY))
    assert history(folder)["runs"][-1]["name"] == "simulated"
