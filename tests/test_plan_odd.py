"""Odd inputs of ``whywait plan`` are refused in a line, and before the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from whywait import deciding
from whywait.cli import main

ARGS = ["plan", "--model", "llama-3.1-8b", "--machines", "h100", "--layouts", "tp=1", "--apply", "", "--rate", "20",
        "--draws", "2", "--jobs", "1", "--prompt-tokens", "100", "--output-tokens", "30",
        "--slo", "ttft=500ms,tpot=20ms"]  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    at = tmp_path_factory.mktemp("kept") / "plan"
    assert main([*ARGS, "--out", str(at)]) == 0
    return at


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
