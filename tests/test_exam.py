"""The exam: its cases make sense, its marks are fair, recording resumes, and today's code passes on the kept runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whywait import app, exam, exam_blind, exam_score
from whywait.cli import main
from whywait.core.run import Run
from whywait.errors import EngineDied, UsageError
from whywait.judge.verdict import Verdict
from whywait.judge.vocabulary import CAUSES
from whywait.lab import faults
from whywait.lab.exam import Case, Point, by_name, cases, chat, closed
from whywait.lab.exam_model import SIZES, write_model
from whywait.lab.faults import FAULTS
from whywait.lab.state import Engine
from whywait.load.recipe import Load
from whywait.load.stub import StubProcess
from whywait.session import Options
from whywait.verbs import exam as verb

ROOT = Path(__file__).resolve().parents[1]
KEPT, PAGE = ROOT / "exam", ROOT / "docs" / "exam.md"
CASES = cases()
FAULTY = [c for c in CASES if c.fault]
kept = pytest.mark.skipif(not any(KEPT.glob("*/case.json")), reason="no kept runs beside this checkout")


def test_there_are_enough_cases_on_two_engines() -> None:
    assert len({c.name for c in CASES}) == len(CASES) >= 40
    for engine in ("embedded", "vllm"):
        assert len([c for c in FAULTY if c.engine == engine]) >= 15
    strengths = [c.fault for c in FAULTY if c.engine == "embedded"]
    assert len(strengths) > len(set(strengths))


def test_every_cause_has_its_name_from_the_vocabulary() -> None:
    assert {c for case in CASES for c in (*case.accepted, *case.symptoms)} <= set(CAUSES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_case_is_whole(case: Case) -> None:
    assert case.accepted
    assert not set(case.accepted) & set(case.symptoms)
    assert case.put in FAULTS
    assert sum(p.seconds for p in case.points) <= 36
    if case.put in ("delay", "buffering", "shedding"):
        assert case.by == "url"  # behind a proxy nobody has launched anything at that address
    if case.base:
        base = by_name()[case.base]
        assert base.engine == case.engine
        assert not base.fault
        assert not set(case.accepted) & {*base.accepted, *base.symptoms}, "the base would prove nothing"


def test_a_case_that_is_not_there_is_said() -> None:
    with pytest.raises(UsageError, match="no case"):
        cases(names="llama-no-such-*")


def _verdict(cause: str, state: str = "holds") -> Verdict:
    return Verdict(cause, cause, state, evidence=("seen",))


CASE = Case("x", "embedded", "a fault", ("cpu quota",), chat(8, 8), closed(2), symptoms=("slot limit",), base="b")
BASE = Case("b", "embedded", "", ("compute-bound decode",), chat(8, 8), closed(2))


@pytest.mark.parametrize(("causes", "mark", "in_two"), [
    (["cpu quota", "want of load"], "right", True),
    (["want of load", "cpu quota"], "wrong", True),
    (["slot limit", "want of load", "cpu quota"], "symptom", False),
    ([], "undecided", False),
])  # fmt: skip
def test_marks(causes: list[str], mark: str, in_two: bool) -> None:
    open_ = [_verdict("cpu quota", "undecided"), _verdict("cpu quota", "fails")]
    marked = exam_score.mark(CASE, [*map(_verdict, causes), *open_])
    assert (marked.mark, marked.in_two) == (mark, in_two)
    assert (marked in exam_score.confident_wrongs([marked])) == (mark == "wrong")


def test_of_two_put_in_together_both_must_be_named() -> None:
    two = dataclasses.replace(CASE, accepted=("cpu quota", "kv space"), together=True)
    both = exam_score.mark(two, [_verdict(c) for c in ("kv space", "cpu quota")])
    late = exam_score.mark(two, [_verdict(c) for c in ("kv space", "want of load", "cpu quota")])
    one = exam_score.mark(two, [_verdict("kv space")])
    assert [(m.mark, m.in_two) for m in (both, late, one)] == [("right", True), ("right", False), ("half", False)]
    assert exam_score.truth(two) == "cpu quota + kv space"


def test_a_fault_claimed_of_a_base_without_it_is_a_wrong_too() -> None:
    fault = exam_score.mark(CASE, [_verdict("cpu quota")])
    base = exam_score.mark(BASE, [_verdict("compute-bound decode"), _verdict("cpu quota")])
    assert base.mark == "right"
    alarmed = exam_score._with_alarms(base, [fault, base], {"x": fault.claimed, "b": base.claimed})
    assert alarmed.false_alarms == ("cpu quota",)
    assert exam_score.confident_wrongs([fault, alarmed]) == [alarmed]
    totals = exam_score.as_dict([fault, alarmed])["totals"]["all"]
    assert (totals["cases"], totals["right"], totals["bases"], totals["bases_with_false_alarm"]) == (2, 2, 1, 1)


def test_the_confusion_matrix_counts_every_case_once() -> None:
    marked = [exam_score.mark(CASE, [_verdict(c)]) for c in ("cpu quota", "cpu quota", "kv space")]
    marked.append(exam_score.mark(BASE, []))
    said = {(r["true"], r["claimed"]): r["cases"] for r in exam_score.as_dict(marked)["confusion"]}
    assert said == {("cpu quota", "cpu quota"): 2, ("cpu quota", "kv space"): 1, ("(base)", "undecided"): 1}
    assert "| cpu quota | 2 | 1 |" in exam_score.markdown(marked)


def test_the_page_keeps_what_was_written_by_hand() -> None:
    page = f"before\n{exam_score.BEGIN}\nold\n{exam_score.END}\nafter\n"
    assert exam_score.into_page(page, "new\n") == page.replace("old", "new")
    with pytest.raises(UsageError, match="no <!--"):
        exam_score.into_page("no marks", "new")


def test_keeping_does_not_thin_the_recorded_runs_themselves(tmp_path: Path) -> None:
    assert main(["exam", "keep", str(tmp_path), "--out", f"{tmp_path}/."]) == 2


def test_a_page_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        verb._write_page(tmp_path / "none.md", "x")


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess("--ttft-ms", "10", "--gap-ms", "5", "--tokens", "8", "--timings") as s:
        yield s


def test_recording_keeps_the_run_resumes_and_tells_the_judge_nothing(
    stub: StubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = (Point("concurrency", 1, 0.3), Point("concurrency", 3, 0.3))
    good = Case("good", "embedded", "a full gateway", ("load shedding",), chat(8, 8), points, put="shedding",
                args={"most": 2}, by="url")  # fmt: skip
    bad = Case("bad", "embedded", "x", ("cpu quota",), chat(8, 8), points, put="starved client")
    starts: list[str] = []

    @contextlib.contextmanager
    def engine(case: Case, *_: Any) -> Iterator[Engine]:
        starts.append(case.name)
        yield Engine("e", "embedded", stub.url, 1, "m", "", ())

    monkeypatch.setattr(exam, "_engine", engine)
    monkeypatch.setattr(exam, "cpu_split", lambda: ((), ()))
    looks = iter([0.9, 0.1, 0.0])
    monkeypatch.setattr(faults, "busy_share", lambda _: next(looks))
    monkeypatch.setattr(exam.time, "sleep", lambda _: None)
    assert exam.record([good, bad], tmp_path, say=lambda _: None) == ["bad"]
    assert starts == ["good"]  # one start for both
    assert [p.name for p in tmp_path.iterdir()] == ["good"]
    note = json.loads((tmp_path / "good" / exam.NOTE).read_text())
    assert "429" in note["put"]
    assert note["busy_before"] == 0.1  # it waited
    run = Run.load(tmp_path / "good")
    assert {"ok", "shed"} <= set(run.requests.text("outcome"))
    manifest = (tmp_path / "good" / "manifest.json").read_text()
    assert not [word for word in ("good", "gateway", "load shedding", "shedding") if word in manifest]
    assert exam.record([good], tmp_path, say=lambda _: None) == []
    assert starts == ["good"]
    assert exam.keep([good, bad], tmp_path, tmp_path / "kept") == 1
    thin = Run.load(tmp_path / "kept" / "good")
    assert len(thin.readings) < len(run.readings)
    assert thin.requests == run.requests
    assert exam._claims(thin) == exam._claims(run)


def test_an_engine_that_does_not_start_costs_its_own_cases_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(*_: Any) -> Any:
        raise EngineDied("no", "")

    monkeypatch.setattr(exam, "_engine", engine)
    said: list[str] = []
    assert exam.record(cases(names="llama-slots-*"), tmp_path, say=said.append) == [
        "llama-slots-1-of-4", "llama-slots-1-of-8", "llama-slots-2-of-8",
    ]  # fmt: skip
    assert sum("does not start" in line for line in said) == 2


def test_vllm_needs_to_be_given(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="need vLLM"):
        exam.record(cases(names="vllm-base"), tmp_path, say=lambda _: None)


def test_the_command_line_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHYWAIT_CACHE", str(tmp_path))
    draft = {"--speculative-config": {"method": "ngram"}, "--no-enable-prefix-caching": "", "model": "nano"}
    words = shlex.split(exam.vllm_command("/venv/bin/python", dict(draft), (0, 2)))
    assert "VLLM_CPU_OMP_THREADS_BIND=0,2" in words
    assert json.loads(words[words.index("--speculative-config") + 1]) == {"method": "ngram"}
    assert words[-1] == "--no-enable-prefix-caching"
    folder = Path(words[words.index("--model") + 1])
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == SIZES["nano"]["hidden_size"]


def test_the_tokenizer_knows_every_printable_character(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write_model(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == tokenizer.get_vocab_size()


def test_blinding_takes_away_what_it_says(
    stub: StubProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = app.measure(Options(url=stub.url, out=str(tmp_path / "r")), [Load("concurrency", 1, requests=2),
                      Load("concurrency", 2, requests=6)], lambda _: None).run  # fmt: skip
    assert any(s.startswith("metrics") for s in run.readings["source"])
    assert len(exam_blind.reference(run).points) == 1
    half = exam_blind.half(run)
    assert 0 < len(half.requests) < len(run.requests)
    bare = exam_blind.blinded(run, exam_blind.parse("metrics, host,slots,stages"))
    left = set(bare.readings["source"])
    assert not [s for s in left if s.startswith(("metrics", "slots", "process/engine", "host"))]
    assert "process/client" in left
    assert "slots" not in bare.manifest.engine
    assert np.isnan(bare.requests["engine_prefill_ms"]).all()
    with pytest.raises(UsageError, match="eyes"):
        exam_blind.blinded(run, ["eyes"])
    exam.save(run, tmp_path / "runs" / "llama-base-url", {"name": "llama-base-url"})
    page = tmp_path / "page.md"
    page.write_text(f"{exam_score.BLIND_BEGIN}\nold\n{exam_score.BLIND_END}\n")
    assert main(["exam", "score", str(tmp_path / "runs"), "--blind", "each", "--page", str(page)]) in (0, 1)
    assert page.read_text().count("\n| ") == len(exam_blind.SETS) + 2
    assert "| metrics + host |" in capsys.readouterr().out


def test_list_and_missing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exam", "score", str(tmp_path), "--list", "--engine", "vllm"]) == 0
    said = capsys.readouterr().out
    assert "0 recorded" in said
    assert "llama" not in said
    assert main(["exam", "score", str(tmp_path)]) == 2
    assert "no recorded case" in capsys.readouterr().err


@kept
def test_the_kept_runs_are_small_and_name_no_machine() -> None:
    files = [f for f in KEPT.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 12_000_000
    for manifest in KEPT.glob("*/manifest.json"):
        said = manifest.read_text()
        assert "/home/" not in said
        assert "/opt/" not in said


@kept
def test_less_to_go_by_makes_no_verdict_wrong() -> None:
    """Each kept run without what another measurement would not have had: a few sets in turn, all in ``score --blind
    each``."""
    for i, path in enumerate(sorted(KEPT.glob("*/case.json"))):
        taken = exam_blind.SETS[i % len(exam_blind.SETS)]
        marked = exam_score.score(KEPT, taken, [path.parent.name])
        assert [(m.case.name, taken) for m in exam_score.confident_wrongs(marked)] == []


@kept
def test_the_verdict_passes_its_exam(capsys: pytest.CaptureFixture[str]) -> None:
    """No confident wrong on any kept run; and the page says what today's code scores."""
    marked = exam_score.score(KEPT)
    assert [m.case.name for m in exam_score.confident_wrongs(marked)] == []
    page = PAGE.read_text(encoding="utf-8")
    assert exam_score.into_page(page, exam_score.markdown(marked)) == page


def test_a_line_says_what_was_put_in_what_was_claimed_and_what_is_true() -> None:
    two = dataclasses.replace(CASE, name="two", accepted=("cpu quota", "kv space"), together=True, args={"cores": 1.5})
    right = exam_score.mark(CASE, [_verdict("cpu quota"), _verdict("want of load")])
    half = exam_score.mark(two, [_verdict("kv space")])
    open_ = exam_score.mark(dataclasses.replace(CASE, name="long name"), [_verdict("slot limit", "undecided")])
    base = dataclasses.replace(exam_score.mark(BASE, [_verdict("cpu quota")]), false_alarms=("cpu quota",))
    lines = exam_score.text([right, half, open_, base]).splitlines()
    assert lines[:5] == [
        "x          right      cpu quota, want of load",
        "two        half       kv space; true: cpu quota and kv space",
        "long name  undecided  undecided (slot limit); true: cpu quota",
        "b          wrong      cpu quota; true: compute-bound decode; not there: cpu quota",
        "",
    ]
    assert lines[5] == (
        "all: 4 cases, right first 1 (25%), among the first two 1 (25%), half of two 1, a symptom first 0, undecided "
        "1, confident and wrong 1; a fault claimed of a base without it: 1 of 1"
    )
    assert lines[6:] == [lines[5].replace("all:", "embedded:")]
    assert exam_score.text([half]).splitlines()[0] == "two  half       kv space; true: cpu quota and kv space"
    rows = exam_score.markdown([right, half]).splitlines()
    assert rows[2] == "| all | 2 | 1 (50%) | 1 (50%) | 1 | 0 | 0 | 0 | 0 of 0 |"
    assert rows[-2:] == [
        "| x | a fault; c 1, c 2 | right | cpu quota, want of load |",
        "| two | a fault (cores 1.5); c 1, c 2 | half | kv space; true: cpu quota and kv space |",
    ]
    assert exam_score.markdown([base]).splitlines()[-1].startswith("| b | nothing; c 1, c 2 | wrong |")


def test_the_list_tells_which_cases_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / exam.NOTE).write_text("{}")
    assert exam_score.listing([CASE, BASE], tmp_path).splitlines() == [
        "–         x  a fault; c 1, c 2  → cpu quota",
        "recorded  b  nothing; c 1, c 2  → compute-bound decode",
        "2 cases, 1 recorded",
    ]
