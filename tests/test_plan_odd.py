"""Odd inputs of ``whywait plan`` are refused in a line, and before the work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whywait import deciding
from whywait.analyze import window
from whywait.cli import main
from whywait.errors import UsageError
from whywait.planning import Ask
from whywait.planning_space import Space, space_from, space_of

ARGS = ["plan", "--model", "llama-3.1-8b", "--machines", "h100", "--layouts", "tp=1", "--apply", "", "--rate", "20",
        "--draws", "2", "--jobs", "1", "--prompt-tokens", "100", "--output-tokens", "30",
        "--slo", "ttft=500ms,tpot=20ms"]  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    at = tmp_path_factory.mktemp("kept") / "plan"
    assert main([*ARGS, "--out", str(at)]) == 0
    return at


def test_devices_that_cost_nothing_are_planned(tmp_path: Path, capsys):
    free = [*ARGS, "--price-per-hour", "h100=0", "--currency", "USD", "--budget", "20/h"]
    assert main([*free, "--json", "--out", str(tmp_path / "p")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["figures"]["cost"]["value"] == 0.0


def test_a_budget_without_end_is_none(tmp_path: Path, capsys):
    assert main([*ARGS, "--budget", "inf/h", "--out", str(tmp_path / "p")]) == 2
    assert "--budget" in capsys.readouterr().err


def never(*_: object) -> None:
    raise AssertionError("the work was begun")


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nothing", "used"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, capsys, monkeypatch, out):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("mine")
    monkeypatch.setattr(deciding, "plan", never)
    assert main([*ARGS, "--out", str(tmp_path / out)]) == 2
    assert "--out" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_a_plan_that_came_to_nothing_leaves_no_folder(tmp_path: Path, monkeypatch, stop):
    def work(*_: object) -> None:
        assert (tmp_path / "a" / "b").is_dir()
        raise stop

    monkeypatch.setattr(deciding, "plan", work)
    main([*ARGS, "--out", str(tmp_path / "a" / "b")])
    assert not (tmp_path / "a").exists()


def test_a_page_that_cannot_be_written_is_said(kept: Path, capsys):
    assert main(["show", str(kept), "--html", "/nonexistent/x.html"]) == 2
    assert "cannot write /nonexistent/x.html" in capsys.readouterr().err


@pytest.mark.parametrize("text", [
    "machines = [1]", "machines = [true]", "machines = 'h100'", "engines = [1.5]", "layouts = [[]]", "counts = ['4']",
    "counts = [true]", "candidate = 5", "candidate = [5]", "candidate = 'h100'", "model = 5", "precision = 5",
    "candidate = [{machine = 5}]", "candidate = [{machine = 'h100', engine = 5}]", "candidate = {machine = 'h100'}",
    "candidate = [{machine = 'h100', count = '4'}]",
])  # fmt: skip
def test_values_of_another_kind_in_a_file_of_candidates_are_refused(tmp_path: Path, capsys, text):
    file = tmp_path / "space.toml"
    file.write_text(text + "\n")
    assert main([*ARGS, "--candidates", str(file), "--out", str(tmp_path / "p")]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 3


def damaged(kept: Path, at: Path, change: dict[str, Any], space: dict[str, Any] | None = None) -> str:
    raw = json.loads((kept / "plan.json").read_text())
    raw["inputs"] |= change
    raw["inputs"]["space"] |= space or {}
    at.mkdir()
    (at / "plan.json").write_text(json.dumps(raw))
    return str(at)


@pytest.mark.parametrize("change", [
    {"rate": "x"}, {"rate": True}, {"rate": 0}, {"rate": -1}, {"draws": 2.5}, {"draws": "2"}, {"draws": 0},
    {"share": None}, {"share": 2}, {"slo": {"ttft_ms": "x"}}, {"slo": 5}, {"slo": {"ttft_ms": True}}, {"growth": []},
    {"budget": "20"}, {"terms": 5}, {"runs": 5}, {"runs": [5]}, {"quality": [5]}, {"seed": "1"}, {"calibrate": "no"},
    {"baseline": None}, {"catalog": 5}, {"workload": 5}, {"offers": 5}, {"offers": [5]}, {"unknown": 5},
])  # fmt: skip
def test_inputs_of_another_kind_are_not_made_again(kept: Path, tmp_path: Path, capsys, monkeypatch, change):
    monkeypatch.setattr(deciding, "plan", never)
    at = damaged(kept, tmp_path / "d", change)
    assert main(["plan", "--again", at, "--out", str(tmp_path / "p")]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("space", [{"machines": [1]}, {"machines": 5}, {"single": 5}, {"single": [[1]]}, {"model": 5},
                                   {"counts": ["a"]}, {"layouts": None}])  # fmt: skip
def test_a_space_of_another_kind_is_not_made_again(kept: Path, tmp_path: Path, monkeypatch, space):
    monkeypatch.setattr(deciding, "plan", never)
    at = damaged(kept, tmp_path / "d", {}, space)
    assert main(["plan", "--again", at, "--out", str(tmp_path / "p")]) == 2


def test_whole_inputs_are_read_back_as_they_were(kept: Path):
    raw = json.loads((kept / "plan.json").read_text())["inputs"]
    assert json.loads(json.dumps(Ask.from_dict(raw).as_dict())) == raw
    some = (("h200", "vllm", "tp=2", "", 4), ("h100", "sglang", "", "fp8-kv", None))
    space = Space("m", ("h100",), (), ("tp=1",), ("", "fp8-kv"), (2, 4), "fp8", some)
    assert space_from(json.loads(json.dumps(space.as_dict()))) == space
    with pytest.raises(UsageError, match="not a number of devices"):
        space_of({"counts": [0]})


def test_a_plan_whose_first_is_none_of_its_rows_is_not_shown(kept: Path, tmp_path: Path, capsys):
    raw = json.loads((kept / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**raw, "rows": []}))
    assert main(["show", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "is none of its rows" in err
    assert "plan --again" in err


def test_a_load_of_a_request_in_days_is_planned_in_seconds(tmp_path: Path, monkeypatch):
    """Pieces of a second over years are billions: those of the peak token rate are bounded."""
    asked: list[int] = []
    real = window.token_bins

    def bins(run: Any, c: Any, w: Any, which: Any, n: int) -> Any:
        asked.append(n)
        assert n <= 1_000_000
        return real(run, c, w, which, n)

    monkeypatch.setattr(window, "token_bins", bins)
    assert main([*ARGS, "--rate", "0.000001", "--out", str(tmp_path / "p")]) == 0
    assert max(asked) == 1_000_000


@pytest.mark.parametrize("rate", ["1e-9", "1e-300"])
def test_a_load_that_takes_centuries_is_refused(tmp_path: Path, capsys, rate):
    assert main([*ARGS, "--rate", rate, "--out", str(tmp_path / "p")]) == 2
    assert "too few to be simulated" in capsys.readouterr().err
