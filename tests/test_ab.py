"""``whywait ab`` and ``try`` as a user meets them, on stub services: two whose difference is known, and engines that
do not start. The statistics are in ``test_paired.py``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whywait import trying
from whywait.analyze.compare import METRICS
from whywait.analyze.disturbed import RULES
from whywait.cli import main
from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.lab.arms import EMBEDDED, Arm, arm_of, embedded_text, program_of, settings_of
from whywait.lab.settings import Settings
from whywait.lab.techniques import TECHNIQUES
from whywait.load.stub import StubProcess
from whywait.report.trial_html import render
from whywait.verbs.ab import _rounds

FLAGS = ["--no-floor", "--prompt-tokens", "16", "--output-tokens", "5", "--concurrency", "4", "--requests", "8"]
SLOW, FAST = 16.0, 8.0  # ms between chunks: TPOT of B is half that of A


@pytest.fixture(autouse=True)
def no_fixed_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a second where the box is busy; one journey below has it."""
    monkeypatch.setattr(trying, "calibration_ms", lambda _cpus, _rounds: 10.0)


@pytest.fixture(scope="module")
def arms() -> Iterator[tuple[str, str]]:
    flags = ("--ttft-ms", "10", "--slots", "4", "--timings")
    with StubProcess(*flags, "--gap-ms", str(SLOW)) as a, StubProcess(*flags, "--gap-ms", str(FAST)) as b:
        yield a.url, b.url


@pytest.fixture(scope="module")
def trial(arms: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole trial, looked at by several tests."""
    out = tmp_path_factory.mktemp("ab") / "trial"
    with pytest.MonkeyPatch.context() as m:
        m.setattr(trying, "calibration_ms", lambda _cpus, _rounds: 10.0)
        m.setattr("whywait.verbs.measure.raise_invalid", lambda _invalid: None)
        argv = ["ab", "--a", arms[0], "--b", arms[1], *FLAGS, "--metric", "tpot_ms.p50", "--promise", "decode"]
        assert main([*argv, "--rounds", "4..6", "--out", str(out)]) == 0
    return out


def kept(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "trial.json").read_text())
    return found


def test_the_known_ratio_is_inside_the_interval(trial: Path) -> None:
    found = kept(trial)
    claims = {c["kind"]: c for c in found["claims"]}
    assert claims["metric"]["state"] == "holds"
    assert claims["metric"]["low"] < FAST / SLOW < claims["metric"]["high"]
    assert claims["promise"]["state"] == "holds"
    assert found["decided"]
    assert not found["partial"]
    assert found["pairs"] in (4, 6)  # it stopped when it was decided


def test_every_round_is_a_run_of_its_own(trial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = kept(trial)
    assert [r["arm"] for r in found["rounds"]] == found["order"][: len(found["rounds"])]
    assert {"".join(r["arm"] for r in found["rounds"][:4])} <= {"ABBA", "BAAB"}
    for r in found["rounds"]:
        run = Run.load(trial / r["run"])
        assert run.points["label"].tolist() == [trying.WARM_UP, None]  # in the run, and in no figure of the trial
        assert len(run.point(1).requests) == 8
    assert main(["show", str(trial / found["rounds"][0]["run"])]) == 0
    assert "TTFT" in capsys.readouterr().out


def test_show_says_the_same_again(trial: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["show", str(trial), "--html", str(page)]) == 0
    said = capsys.readouterr().out
    found = kept(trial)
    for word in (found["headline"], "the promise", "rounds", "decode"):
        assert " ".join(word.split()) in " ".join(said.split())
    text = page.read_text(encoding="utf-8")
    assert "TPOT p50" in text
    assert "<script" not in text
    assert (trial / "report.html").exists()
    assert main(["show", str(trial), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {k: again[k] for k in ("claims", "effects", "waits")} == {
        k: found[k] for k in ("claims", "effects", "waits")
    }


@pytest.mark.parametrize(
    ("gate", "code", "word"),
    [
        ("worse", 0, ""),
        ("tpot_ms.p50.ratio_low<0.9", 1, "tpot_ms.p50.ratio_low"),
        ("tpot_ms.p50.ratio>1", 0, ""),
        ("energy_j_per_good_request.ratio>1", 1, "unknown"),
        ("speed.ratio>1", 2, "has no"),
    ],
)
def test_gates(trial: Path, gate: str, code: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(trial), "--fail-if", gate]) == code
    assert word in capsys.readouterr().err


def test_worse_is_a_gate(trial: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same trial with its arms exchanged."""
    found = kept(trial)
    for r in found["rounds"]:
        r["arm"] = "BA"["AB".index(r["arm"])]
    (tmp_path / "trial.json").write_text(json.dumps(found))
    assert main(["show", str(tmp_path), "--fail-if", "worse"]) == 1
    assert "surely worse: tpot_ms.p50" in " ".join(capsys.readouterr().err.split())


# --- what goes wrong

DIES = f"{sys.executable} -c \"print('loading'); raise SystemExit('no such model: tiny')\" --port {{port}}"


def test_an_arm_that_does_not_start(arms: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t"
    assert main(["ab", "--a", arms[0], "--b", DIES, *FLAGS, "--rounds", "2", "--out", str(out)]) == 7
    err = capsys.readouterr().err
    assert "arm B did not start" in err
    assert "no such model: tiny" in err
    assert "loading" in err
    assert "Traceback" not in err


def test_a_service_that_fails_ends_the_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StubProcess("--ttft-ms", "2", "--gap-ms", "1") as a:
        argv = ["ab", "--a", a.url, "--b", "http://127.0.0.1:9", *FLAGS, "--rounds", "2"]
        assert main([*argv, "--out", str(tmp_path / "t")]) == 4
    assert "refuses connections" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--a", "http://127.0.0.1:9"], "other arm"),
        (["--a", "no-such-program serve", "--b", "http://127.0.0.1:9"], "no program"),
        (["--a", "embedded:speed=9", "--b", "embedded"], "speed=9"),
        (["--a", "embedded:slots=many", "--b", "embedded"], "whole number"),
        (["--a", "embedded:slots=0", "--b", "embedded"], "out of range"),
        (["--a", "embedded", "--b", "embedded", "--metric", "speed"], "speed"),
        (["--a", "embedded", "--b", "embedded", "--promise", "speed"], "speed"),
        (["--a", "embedded", "--b", "embedded", "--rounds", "5..2"], "--rounds"),
        (["--a", "embedded", "--b", "embedded", "--margin", "0"], "--margin"),
    ],
)
def test_mistakes(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab", *argv]) == 2
    err = capsys.readouterr().err
    assert word in err
    assert "Traceback" not in err


def test_a_service_elsewhere_needs_a_word_before_either_arm_is_sent_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StubProcess() as s:
        argv = ["ab", "--a", s.url, "--b", "http://192.0.2.1:8000", "--out", str(tmp_path / "t"), "--seed", "3"]
        assert main(argv) == 2
    said = capsys.readouterr().err
    assert "192.0.2.1:8000 is not this machine" in said
    assert "round 1" not in said


def test_a_chart_says_how_many_figures_it_leaves_to_the_table(trial: Path) -> None:
    result = trying.load(trial).result()
    load = next(iter(result["effects"]))
    (one,) = [e for n, e in result["effects"][load].items() if n == "tpot_ms.p50"]
    many = {**result, "effects": {load: {f"tpot_ms.p50.{i}": one for i in range(20)}}}
    assert "The first 16 of 20; the table has all." in render(many)
    assert "; the table has all." not in render({**result, "effects": {load: {"tpot_ms.p50": one}}})


def test_a_folder_is_never_written_over(trial: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("mine")
    argv = ["ab", "--a", "http://127.0.0.1:9", "--aa", *FLAGS]
    assert main([*argv, "--out", str(tmp_path)]) == 2
    assert main([*argv, "--out", str(trial)]) == 2
    assert "another trial" in capsys.readouterr().err


# --- arms and techniques


def test_arms() -> None:
    assert arm_of("http://x:1").kind == "url"
    assert arm_of(" embedded ") == Arm("embedded", EMBEDDED)
    got = arm_of("embedded:parallel=8,cache_prompt=off,speculative.n_max=4,cache_type_k=q8_0")
    assert got.settings == {"slots": 8, "cache_prompt": False, "cache_type_k": "q8_0",
                            "extra": {"speculative.n_max": 4}}  # fmt: skip
    assert settings_of(embedded_text(got.settings).partition(":")[2]) == got.settings
    assert Settings.from_dict(dict(got.settings)).slots == 8
    assert arm_of(f"{sys.executable} -m x").kind == "command"
    assert program_of("A=1 /usr/bin/vllm serve m") == "vllm"
    assert program_of("python -m sglang.launch_server") == "sglang"
    with pytest.raises(UsageError):
        arm_of("")


def test_rounds_are_even() -> None:
    assert [_rounds(x) for x in ("4..12", "3", "5-7")] == [(4, 12), (4, 4), (6, 8)]


@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques_are_whole(name: str) -> None:
    from whywait.analyze.compare import metric_of
    from whywait.judge.paired import promise_of

    t = TECHNIQUES[name]
    promise_of(t.promise)
    texts = t.arms()
    assert texts is not None
    a, b = map(arm_of, texts)
    assert a != b
    assert t.a == (a.text if isinstance(t.a, str) else a.settings)
    labels = {p.label for p in t.points}
    assert t.points[0].label == ""
    for s in t.shows:
        metric_of(s.metric)
        assert s.at in labels
    for program in t.flags:
        made = t.arms(f"{program} serve m", program)
        assert made is not None
        assert made[0] != made[1]


def test_the_list_of_techniques(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "--list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in TECHNIQUES)
    assert main(["try", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == TECHNIQUES.keys()
    assert main(["try", "perpetual-motion"]) == 2
    assert main(["try"]) == 2
    assert main(["try", "kv-precision", "--engine", f"{sys.executable} -m strange"]) == 2


def test_the_page_names_every_figure_rule_and_technique() -> None:
    docs = Path(__file__).parents[1] / "docs"
    for page, words in (("ab.md", (*METRICS, *RULES)), ("techniques/README.md", TECHNIQUES)):
        text = (docs / page).read_text(encoding="utf-8")
        for word in words:
            assert f"`{word}`" in text, word


def test_hostile_words_stay_text(trial: Path) -> None:
    found = kept(trial)
    found["plan"]["a"] = "<script>alert(1)</script>"
    found["rounds"][0]["disturbed"] = {"client": "<img src=x onerror=alert(1)>"}
    page = render(found)
    assert "<script" not in page
    assert "<img" not in page
