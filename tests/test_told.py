"""What a user is told at the edges: a terminal without our signs, a word that is none, a run given as a service, a
run that was cut off before it had anything, a guess."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import whywait
from tests.analysis_runs import Service, make_run
from tests.test_live import Screen, buckets, point, progress
from whywait import options
from whywait.analyze.compare import effects
from whywait.analyze.summary import summarize
from whywait.cli import main
from whywait.encodings import STAND_INS
from whywait.errors import UsageError, WhywaitError
from whywait.judge import plan_answers
from whywait.judge.diagnose import judge
from whywait.judge.paired import waits
from whywait.load.progress import SoFar
from whywait.physics.models import Shape
from whywait.report.history import BARS, GAP
from whywait.report.live import Live, fitting
from whywait.report.svg import tag
from whywait.report.text import Plain, _hanging, console
from whywait.report.trial import wait_rows
from whywait.twin.baseline import _guessed, _weight_type
from whywait.verbs.completion import script
from whywait.whatif import _unseen_width

ROOT = Path(__file__).resolve().parents[1]
MS = 1_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Service(slots=4).closed(2, 12).save(tmp_path_factory.mktemp("kept") / "run")


def test_no_sign_of_ours_becomes_a_question_mark() -> None:
    """Of all signs that the sources hold, in an ASCII and in a Latin-1 terminal."""
    signs = {c for p in (ROOT / "src").rglob("*.py") for c in p.read_text(encoding="utf-8") if ord(c) > 127}
    assert {"●", "◐", "→", "×"} <= signs
    for encoding in ("ascii", "latin-1"):
        for sign in sorted(signs):
            assert b"?" not in sign.encode(encoding, STAND_INS) or sign == "？"  # that is a question mark
    assert "● a → b – ◐ 3 × 4\u2009ms é".encode("ascii", STAND_INS) == b"* a -> b - ~ 3 x 4 ms e"
    assert "3 × 4 é →".encode("latin-1", STAND_INS).decode("latin-1") == "3 × 4 é ->"
    assert "答".encode("ascii", STAND_INS) == b"\\u7b54"
    assert b"\\" not in f"{BARS}{GAP}½◆⇄".encode("ascii", STAND_INS)


def test_a_terminal_that_knows_only_ascii(folder: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    said = subprocess.run(
        [sys.executable, "-m", "whywait", "show", str(folder)], env=env, capture_output=True, timeout=60, check=False
    )
    assert said.returncode == 0
    assert b" -> " in said.stdout
    assert b"\xe2" not in said.stdout


def test_what_was_probably_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["shwo"])
    assert "did you mean show?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["zzzz"])
    assert "did you mean" not in capsys.readouterr().err
    assert main(["run", "http://127.0.0.1:9", "--concurrency", "1", "--duration", "-3s"]) == 2
    assert "'-3s' is not a duration" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["diagnose", "run", "sweep", "probe", "doctor", "watch"])
def test_a_saved_run_is_no_service(verb: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"sweep": ["--concurrency", "1,2"], "run": ["--concurrency", "1"]}.get(verb, [])
    assert main([verb, str(folder), *flags]) == 2
    assert f"{folder} is the folder of a saved run, not a service\n  → whywait show {folder}" in capsys.readouterr().err


def test_what_is_no_path_is_an_error_of_ours() -> None:
    for call in (lambda: whywait.run(123), lambda: whywait.show(None), lambda: whywait.compare(None, 3),  # type: ignore[arg-type]
                 lambda: whywait.import_results(3, "x"), lambda: whywait.bill(2.5),  # type: ignore[arg-type]
                 lambda: whywait.export("x", "csv", 5)):  # type: ignore[arg-type] # fmt: skip
        with pytest.raises(WhywaitError, match="is no path and no URL"):
            call()


def test_a_result_is_one_line_and_the_module_lists_its_own(folder: Path) -> None:
    said = repr(whywait.show(folder))
    assert said.startswith(f"Result({str(folder)!r}, ")
    assert "1 load point: " in said
    assert "\n" not in said
    assert len(said) < 500
    assert "Any" not in dir(whywait)
    assert set(whywait.__all__) <= set(dir(whywait))


@pytest.mark.parametrize(("given", "said"), [({"machine": "h100"}, "which model?"), ({"model": "x"}, "which machine?"),
                                             ({}, "which machine, which model?")])  # fmt: skip
def test_only_what_is_missing_is_asked_for(given: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as exc:
        whywait.simulate(**given)  # type: ignore[arg-type]
    assert exc.value.message == said


def test_an_interrupted_verb_says_where_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_args: object) -> int:
        made = options.new_directory(str(tmp_path / "run"))
        if kept:
            made.mkdir()
            (made / "manifest.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("whywait.verbs.measure.sweep", stopped)
    kept = False
    assert main(["sweep", "http://127.0.0.1:9", "--concurrency", "1,2"]) == 130
    assert capsys.readouterr().err == "whywait: interrupted\n"
    kept = True
    assert main(["sweep", "http://127.0.0.1:9", "--concurrency", "1,2"]) == 130
    assert f"kept in {tmp_path / 'run'}\n  → whywait show {tmp_path / 'run'}" in capsys.readouterr().err


def test_cut_off_before_any_request_ended_is_not_the_services_doing() -> None:
    row = {"sent_ns": MS, "end_ns": 90 * MS, "outcome": "censored"}
    cut = make_run([row], partial=True)
    (v,) = judge(cut, summarize(cut))
    assert v.claim.startswith("No request had ended when the run was cut off")
    assert "log" not in v.next_step
    failed = make_run([{**row, "outcome": "reset", "fault": "service"}], partial=True)
    assert "No request succeeded" in judge(failed, summarize(failed))[-1].claim
    whole = make_run([row])
    assert "No request succeeded" in judge(whole, summarize(whole))[-1].claim


def test_latencies_stay_when_the_time_left_comes() -> None:
    shown, at = Live(Screen(False), [30.0]), point()
    s = SoFar(buckets(90 * MS, 100 * MS, 110 * MS), buckets(9 * MS), 300.0, 100)
    shown(progress(9.0, 20, 1000, s, point=at))
    parts = shown.parts(progress(26.0, 23, 1100, s, point=at))
    left = next(text for _, text in parts if text.startswith("about"))
    width = len("  ".join(text for _, text in parts)) - 1
    assert left not in fitting(parts, width)
    assert "TTFT" in fitting(parts, width)
    assert "TPOT" in fitting(parts, width)


def test_a_type_of_weights_that_is_a_guess_says_so() -> None:
    def shape(bytes_each: float) -> Shape:
        return Shape(1e9, 1e9 * bytes_each, 1.0, 1.0, 1, 0.0)

    mixed = shape(5.3 / 8)
    assert _guessed(mixed, _weight_type(mixed, None)) == "the run says 5.3 bits a weight, taken as q5_0"  # type: ignore[arg-type]
    for bits in (4.5, 5.5, 8.5, 16.0, 32.0):
        plain = shape(bits / 8)
        assert _guessed(plain, _weight_type(plain, None)) == ""  # type: ignore[arg-type]


def test_a_width_that_was_never_run_is_named() -> None:
    def load(mode: str, target: float) -> SimpleNamespace:
        return SimpleNamespace(mode=mode, target=target)

    assert _unseen_width(1, 4, [load("concurrency", 8.0)]) == 4  # type: ignore[list-item]
    assert _unseen_width(2, 8, [load("concurrency", 1.0), load("concurrency", 4.0)]) == 4  # type: ignore[list-item]
    assert _unseen_width(1, 4, [load("rate", 0.5)]) == 4  # type: ignore[list-item]
    assert _unseen_width(1, 4, [load("concurrency", 1.0)]) is None  # type: ignore[list-item]
    assert _unseen_width(4, 4, [load("rate", 9.0)]) is None  # type: ignore[list-item]
    assert _unseen_width(8, 4, [load("rate", 9.0)]) is None  # type: ignore[list-item]


def test_a_plan_by_draws_is_not_sure() -> None:
    assert plan_answers._keeps({"kind": "modelled", "meets": "holds"}) == "in every simulated draw"
    assert plan_answers._keeps({"kind": "measured", "meets": "holds"}) == "yes, measured"
    assert plan_answers._keeps({"kind": "modelled", "meets": "fails"}) == "no"


def test_evidence_that_is_wrapped_hangs_under_its_verdict() -> None:
    screen = io.StringIO()
    _hanging(Plain(file=screen, width=40, highlight=False), "evidence: " + "words " * 12)
    first, *rest = screen.getvalue().splitlines()
    assert first.startswith("    evidence: words")
    assert rest
    assert all(line.startswith("      words") and len(line) <= 40 for line in rest)
    piped = io.StringIO()
    _hanging(console(piped), "evidence: " + "words " * 40)
    assert len(piped.getvalue().splitlines()) == 1


def test_techniques_are_completed() -> None:
    from whywait.cli import parser

    assert "continuous-batching" in script(parser(), "bash")


def test_two_pairs_do_not_hide_what_a_change_costs() -> None:
    """Decode that is far longer in B, by two pairs that differ too much to be sure, is listed as not sure."""
    found = effects(
        [({"phases.queue": 6000.0, "phases.decode": 1000.0, "phases.tail": 1.0, "causes.decode.compute": 1.0},
          {"phases.queue": q, "phases.decode": d, "phases.tail": t, "causes.decode.compute": c})
         for q, d, t, c in ((1000.0, 1200.0, 2.0, 900.0), (1001.0, 4800.0, 9.0, 2.0))]
    )  # fmt: skip
    listed = {w["name"]: w for w in waits(found)}
    assert set(listed) == {"phases.queue", "phases.decode"}
    assert listed["phases.decode"]["way"] == "open"
    rows = {r[0]: r[-1] for r in wait_rows(list(listed.values()))}
    assert rows == {"queue": "", "decode": "not sure"}


@pytest.mark.parametrize("verb", ["diagnose", "run", "sweep", "probe", "doctor", "watch"])
def test_a_folder_of_runs_is_no_service(
    verb: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent.parent)
    parent = folder.parent.name
    for path in (parent, f"./{parent}", f"./{parent}/{folder.name}", "./nowhere"):
        assert main([verb, path]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"whywait: {path} is "), err  # nothing before it
        assert "not a service" in err
        assert ("whywait history" in err) == (path in (parent, f"./{parent}"))


def test_a_flag_that_is_none_points_at_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, verb in (
        (["run", "http://127.0.0.1:9", "--concurency", "2"], "run"),
        (["run", "http://127.0.0.1:9", "--concurency=2"], "run"),
        (["engine", "start", "--slotz", "2"], "engine"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        err = capsys.readouterr().err
        assert ended.value.code == 2
        assert f"did you mean --{'slots' if verb == 'engine' else 'concurrency'}? whywait {verb} --help shows" in err


def test_flags_in_prose_stay_whole_and_escaped() -> None:
    said = tag("dd", "raise --max-num-seqs N, not <--x-y>; a--b")
    assert said == ('<dd>raise <span class="flag">--max-num-seqs</span> N, not '
                    '&lt;<span class="flag">--x-y</span>&gt;; a--b</dd>')  # fmt: skip
    assert tag("title", "--max-num-seqs") == "<title>--max-num-seqs</title>"
    assert tag("p", tag("b", "--a-b")) == "<p><b>--a-b</b></p>"  # markup is as it was
