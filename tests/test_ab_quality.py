"""A trial whose arms may answer otherwise: it says that quality was not measured and what would, or measures it."""

from __future__ import annotations

import argparse
import html
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from whywait import flags_lab, trying
from whywait.cli import main
from whywait.errors import ServiceError
from whywait.judge.trial import surely_worse
from whywait.lab.arms import answers_may_differ, arm_of, roomy
from whywait.lab.techniques import TECHNIQUES
from whywait.load.stub import StubProcess
from whywait.report.trial import quality_lines
from whywait.report.trial_html import render
from whywait.verbs import quality

FLAGS = ["--no-floor", "--prompt-tokens", "16", "--output-tokens", "5", "--concurrency", "2", "--requests", "4",
         "--rounds", "2", "--metric", "tpot_ms.p50"]  # fmt: skip


@pytest.fixture(autouse=True)
def no_fixed_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "calibration_ms", lambda _cpus, _rounds: 10.0)
    monkeypatch.setattr("whywait.verbs.measure.raise_invalid", lambda _invalid: None)
    monkeypatch.setattr(quality, "EACH", 1)


@pytest.mark.parametrize(
    ("a", "b", "differ"),
    [
        ("embedded", "embedded:slots=8", False),
        ("embedded", "embedded:weights=q2", True),
        ("embedded:cache_type_k=f16", "embedded", False),
        ("embedded", "embedded:cache_type_v=q8_0", True),
        ("true serve M", "true serve M --max-num-seqs 4", False),
        ("true serve M", "true serve M --kv-cache-dtype fp8", True),
        ("true serve M --dtype float32", "true serve M --dtype=bfloat16", True),
        ("true serve M --quantization fp8", "true serve M --quantization=fp8", False),
        ("http://127.0.0.1:1", "http://127.0.0.1:2", False),
    ],
)
def test_arms_that_keep_other_numbers_are_known(a: str, b: str, differ: bool) -> None:
    assert answers_may_differ(arm_of(a), arm_of(b)) is differ


def test_tasks_get_room_that_the_trial_did_not_need() -> None:
    assert roomy(arm_of("embedded:ctx_per_slot=512,weights=q2")).text == "embedded:ctx_per_slot=2048,weights=q2"
    assert roomy(arm_of("embedded:ctx_per_slot=4096")).settings["ctx_per_slot"] == 4096
    assert roomy(arm_of("http://127.0.0.1:1")).text == "http://127.0.0.1:1"


@pytest.mark.parametrize("name", ["weight-precision", "kv-precision"])
def test_precision_says_that_it_changes_answers(name: str) -> None:
    found = TECHNIQUES[name]
    arms = found.arms()
    assert found.changes_answers
    assert arms is not None
    assert answers_may_differ(*map(arm_of, arms))
    assert "answers change" in found.cost


def test_the_list_says_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "--list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["weight-precision"]["changes_answers"] is True
    assert told["prefix-reuse"]["changes_answers"] is False


def test_what_was_not_measured_is_said_with_the_command_that_does() -> None:
    arms = ["vllm serve M", "vllm serve M --kv-cache-dtype fp8"]
    first, second = quality_lines({"plan": {"quality_arms": arms}, "quality": None})
    assert "NOT measured" in first
    words = shlex.split(second.partition("  (")[0])
    assert words[-4:] == ["whywait", "quality", *arms]
    assert quality_lines({"plan": {}}) == []


@pytest.fixture(scope="module")
def stubs() -> Any:
    flags = ("--ttft-ms", "2", "--gap-ms", "1", "--slots", "4", "--timings")
    with StubProcess(*flags) as a, StubProcess(*flags) as b:
        yield a.url, b.url


def test_quality_is_measured_after_the_rounds_and_kept_beside_the_claims(
    stubs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trial"
    argv = ["ab", "--a", stubs[0], "--b", stubs[1], *FLAGS, "--quality", "tasks", "--out", str(out)]
    assert main(argv) == 0
    said = capsys.readouterr().out
    kept = json.loads((out / "trial.json").read_text())
    assert kept["quality"]["claims"]
    assert kept["quality"]["headline"] in " ".join(said.split())
    assert (out / "quality" / "quality.json").is_file()
    assert "; quality of the answers: " in kept["headline"]
    assert kept["quality"]["headline"] in html.unescape(render(kept))
    assert main(["show", str(out)]) == 0
    assert "Quality of the answers" in capsys.readouterr().out


def test_a_quality_that_cannot_be_had_takes_nothing_from_the_trial(
    stubs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_args: object) -> None:
        raise ServiceError("the service went away", "start it")

    monkeypatch.setattr(quality, "beside", broken)
    out = tmp_path / "trial"
    code = main(["ab", "--a", stubs[0], "--b", stubs[1], *FLAGS, "--quality", "--out", str(out)])
    assert code == 4
    assert "the service went away" in capsys.readouterr().err
    kept = json.loads((out / "trial.json").read_text())
    assert kept["pairs"] == 2
    assert not kept["partial"]
    assert kept["quality"] is None


def test_quality_of_one_arm_against_itself_is_another_verb(
    stubs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ab", "--a", stubs[0], "--aa", "--quality", *FLAGS]) == 2
    assert "whywait quality A --aa" in capsys.readouterr().err


def test_what_is_asked_beside_a_trial_is_what_the_verb_asks_by_default() -> None:
    parser = argparse.ArgumentParser()
    flags_lab.quality(parser)
    usual = vars(parser.parse_args(["A", "B"]))
    assert {k: usual[k] for k in quality.USUAL} == quality.USUAL


def test_worse_answers_are_worse() -> None:
    claim = {"claim": "accuracy falls by less than 2 points", "state": "fails"}
    assert surely_worse({"claims": [], "quality": {"claims": [claim]}}) == [
        f"quality of the answers (not so: {claim['claim']})"
    ]
    assert surely_worse({"claims": [], "quality": None}) == []
