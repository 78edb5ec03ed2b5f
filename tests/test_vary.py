"""``--vary``: a trial per value, and between which values gain turns to loss. Rounds are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whywait import trying, varying
from whywait.cli import main
from whywait.errors import UsageError
from whywait.judge.vary import GAIN, LOSS, NONE, OPEN, outcome, said_of, turns
from whywait.report.vary import cell, render

ARMS = ["--a", "replicas:2", "--b", "split:slots=2"]
FLAGS = ["--metric", "tpot_ms.p50", "--rounds", "4"]


def made_up(plan: trying.Plan, t: trying.Trial, _say: object, _watch: object) -> None:
    """A round in which A takes 12 ms a token, and B as many as its ``delay_ms``."""
    number, arm = len(t.rounds), t.order[len(t.rounds)]
    value = 12.0 if arm == "A" else float(plan.b.settings["delay_ms"])
    t.rounds.append({
        "number": number, "arm": arm, "pair": number // 2, "run": f"round-{number}", "whole": True, "seconds": 1.0,
        "calibration_ms": [10.0, 10.0], "partial": "", "disturbed": {}, "doubts": [], "invalid": [], "engine": {},
        "figures": {"": {"tpot_ms.p50": value * (1 + 0.001 * (number % 3)),
                         "handover_bytes": 1e6 if arm == "B" else None}},
    })  # fmt: skip


def claim(way: str, value: float | None = 1.0, metric: str = "ttft_ms.p50", **more: Any) -> dict[str, Any]:
    return {"metric": metric, "load": "", "kind": "metric", "claim": "B lowers it", "way": way, "value": value,
            "a": 1.0, "b": value, "low": None, "high": None, "scale": "ratio", "unit": "ms", "pairs": 4,
            **more}  # fmt: skip


def rows(*claims: tuple[str, str, float | None]) -> dict[str, Any]:
    (row,) = turns([(v, {"claims": [claim(way, x)]}) for v, way, x in claims])
    return row


@pytest.mark.parametrize(
    ("metric", "way", "want"),
    [
        ("ttft_ms.p50", "below", GAIN),
        ("ttft_ms.p50", "above", LOSS),
        ("output_tokens_per_s", "above", GAIN),
        ("phases.stall", "below", GAIN),
        ("ttft_ms.p50", "same", NONE),
        ("ttft_ms.p50", "open", OPEN),
        ("kv_use", "above", OPEN),  # neither good nor bad
    ],
)
def test_what_a_claim_came_to(metric: str, way: str, want: str) -> None:
    assert outcome(claim(way, metric=metric)) == want


def test_where_it_turns() -> None:
    row = rows(("1600", "above", 2.0), ("0", "below", 0.5), ("400", "open", 1.0), ("100", "below", 0.8))
    assert [x["value"] for x in row["at"]] == ["0", "100", "400", "1600"]  # by size, not as given
    want = {"from": "gain", "to": "loss", "between": ["100", "1600"], "through": [], "near": 400}
    assert row["turn"] == want
    assert "gain turns to loss between 100 and 1600" in said_of(row)


def test_the_headline_of_what_is_undecided_claims_no_turn_and_no_lack_of_one() -> None:
    def said(row: dict[str, Any]) -> str:
        return varying.headline("delay_ms", [{**row, "said": said_of(row)}])

    assert said(rows(("0", "open", 0.9), ("9", "open", 1.1))) == "by delay_ms: no claim is decided at any value"
    assert said(rows(("0", "below", 0.9), ("9", "open", 1.1))).endswith("no claim turns between gain and loss here")
    assert "turns to loss" in said(rows(("0", "below", 0.9), ("9", "above", 1.1)))


def test_the_estimate_lies_between() -> None:
    row = rows(("100", "open", 0.5), ("300", "open", 2.0))
    assert row["turn"] is None
    assert row["near"] == pytest.approx(200)  # straight in the logarithm
    assert "undecided at every value" in said_of(row)


@pytest.mark.parametrize(
    ("ways", "word"),
    [
        (("below", "below"), "does not turn here: gain throughout"),
        (("above", "above"), "does not turn here: loss throughout"),
        (("above", "open"), "does not turn here: loss wherever it is decided"),
        (("below", "same"), "does not turn here: gain or no change wherever it is decided"),
    ],
)
def test_where_it_does_not_turn(ways: tuple[str, str], word: str) -> None:
    assert said_of(rows(*((str(i), w, 0.5) for i, w in enumerate(ways)))) == word


def test_words_as_values_keep_their_order() -> None:
    row = rows(("q8_0", "below", 0.5), ("f16", "above", 2.0))
    assert row["turn"] is not None
    assert row["turn"]["between"] == ["q8_0", "f16"]
    assert row["near"] is None


def test_every_turn_is_told() -> None:
    row = rows(("0", "below", 0.5), ("1", "above", 2.0), ("2", "below", 0.5), ("3", "above", 2.0))
    assert [(t["from"], t["to"], *t["between"]) for t in row["turns"]] == [
        ("gain", "loss", "0", "1"), ("loss", "gain", "1", "2"), ("gain", "loss", "2", "3")
    ]  # fmt: skip
    assert [t["near"] for t in row["turns"]] == pytest.approx([0.5, 1.5, 2.5])
    said = said_of(row)
    assert "gain turns to loss between 0 and 1" in said
    assert "then loss turns to gain between 1 and 2" in said
    assert "near 2.5" in said


def test_no_change_that_a_turn_goes_over_is_named() -> None:
    row = rows(("0", "below", 0.5), ("1", "same", 1.0), ("2", "above", 2.0))
    assert row["turn"]["through"] == ["1"]
    assert said_of(row).startswith("gain turns to loss between 0 and 2, with no change at 1")


@pytest.mark.parametrize(
    ("effects", "want"),
    [
        ((0.5, 1.0, 2.0), [1]),  # exactly none is a crossing
        ((0.5, 1.0, 1.0, 2.0), [1.5]),
        ((0.5, 1.0, 0.5), []),  # it only touches
        ((0.5, 1.0), []),
        ((1.0, 1.0), []),
        ((0.5, 2.0, 0.5), [0.5, 1.5]),
    ],
)
def test_where_effects_cross_no_change(effects: tuple[float, ...], want: list[float]) -> None:
    row = rows(*((str(i), "open", e) for i, e in enumerate(effects)))
    assert row["crossings"] == pytest.approx(want)
    assert all(f"{x:.4g}" in said_of(row) for x in want)


@pytest.mark.parametrize("text", ["", "delay_ms", "delay_ms=", "delay_ms=1", "delay_ms=1,1", "delay_ms=1,,2", "=1,2"])
def test_what_is_no_list_of_values(text: str) -> None:
    with pytest.raises(UsageError):
        varying.parse(text)


def test_folders_stay_below() -> None:
    assert "/" not in varying.folder_of("x", "../../etc")


def test_no_two_values_share_a_folder() -> None:
    values = ["a b", "a_b", "a/b", "a" * 120, "a" * 121, "a" * 119 + "b"]
    assert len({varying.folder_of("t", v) for v in values}) == len(values)
    assert varying.folder_of("delay_ms", "100") == "delay_ms=100"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"name":"x"}',
        '{"name":"x","values":3}',
        '{"name":"x","values":["1",2]}',
        '{"name":"x","values":[]}',
        '{"name":["x"],"values":["1","2"]}',
        '{"name":"../..","values":["../../etc"]}',
    ],
)
def test_a_damaged_table(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / varying.NOTE).write_text(text)
    assert main(["show", str(tmp_path)]) == 2
    assert "holds no table" in capsys.readouterr().err
    assert main(["ab", *ARMS, "--vary", "delay_ms=36,4", *FLAGS, "--out", str(tmp_path)]) == 2
    assert "holds no table" in capsys.readouterr().err


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """B at 4 and at 36: a gain, and a loss."""
    out = tmp_path_factory.mktemp("vary") / "table"
    with pytest.MonkeyPatch.context() as m:
        m.setattr(trying, "_round", made_up)
        argv = ["ab", *ARMS, "--vary", "delay_ms=36,4", *FLAGS, "--out", str(out)]
        assert main(argv) == 0
        said = json.loads((out / varying.NOTE).read_text())
        m.setattr(trying, "_round", None)
        first = [t["directory"] for t in said["trials"]]
        assert main(argv) == 0  # all of it is there already
        again = json.loads((out / varying.NOTE).read_text())
    assert first == ["delay_ms=4", "delay_ms=36"]
    assert again == said
    return out


def test_a_trial_per_value(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["turns"]
    assert [x["outcome"] for x in row["at"]] == [GAIN, LOSS]
    assert row["turn"]["between"] == ["4", "36"]
    assert 4 < row["near"] < 36
    assert found["error_probability"] == pytest.approx(0.1)
    assert found["missing"] == []
    assert found["trials"][0]["handover"] == {"handover_bytes": 1e6}  # which A has not
    for t in found["trials"]:
        assert trying.load(table / t["directory"]).rounds
        assert (table / t["directory"] / "report.html").exists()


def test_the_table_for_people(table: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", str(table), "--html", str(tmp_path / "page.html")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "gain turns to loss between 4 and 36" in said
    found = varying.load(table).result()
    assert "(" in cell(found["turns"][0]["at"][0])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'href="delay_ms=4/report.html"' in page
    found["a"] = found["headline"] = "<script>alert(1)</script>"
    assert "<script" not in render(found)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--vary", "speed=1,2"], "is not a setting of split"),
        (["--vary", "delay_ms=1"], "NAME=V1"),
        (["--vary", "delay_ms=1,2", "--aa"], "nothing to vary"),
        (["--vary", "delay_ms=1,2", "--fail-if", "worse"], "one trial"),
    ],
)
def test_mistakes(more: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["ab", *ARMS, *FLAGS, "--out", str(tmp_path / "t"), *more]
    assert main(argv) == 2
    assert word in capsys.readouterr().err


def test_another_table_is_not_written_over(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["ab", *ARMS, "--vary", "delay_ms=1,2", *FLAGS, "--out", str(table)]
    assert main(argv) == 2
    assert "varies something else" in capsys.readouterr().err
