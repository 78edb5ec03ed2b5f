"""``whywait quality`` from the command line on stub services: what it claims, keeps, refuses and ends with."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scoring_engines import VLLM_PAGES, Handler, llama, model, served, vllm, whole
from whywait.cli import main
from whywait.load.given import built_in

FEW = ["--positions", "250", "--context", "60"]
CASES = [{"id": f"c{i}", "category": "sums" if i % 2 else "names", "prompt": f"case {i}: which number?",
          "grader": "numeric", "answer": i} for i in range(40)]  # fmt: skip
SECRET = "a question about the merger of two firms"


def says(wrong: int) -> Callable[[str], str]:
    """Right in all cases but the first ``wrong``."""

    def text(question: str) -> str:
        number = int(question.split("case ")[1].split(":")[0])
        return f"The answer is {number + (1 if number < wrong else 0)}."

    return text


def service(heat: float = 1.0, wrong: int = 0, scores: Handler | None = None) -> Handler:
    return whole(scores or vllm(heat, most=60), says(wrong), VLLM_PAGES)


def kept(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "quality.json").read_text())
    return found


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "cases.jsonl"
    rows = [*CASES[:-1], {**CASES[-1], "prompt": f"case 39: {SECRET}"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_change_for_the_worse_is_seen_in_all_three(
    tmp_path: Path, tasks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "q"
    with served(service(1.6), "vllm") as (a, asked_a), served(service(1.0, wrong=20), "vllm") as (b, asked_b):
        argv = ["quality", a.endpoint.url, b.endpoint.url, "--tasks", tasks, *FEW, "--out", str(out)]
        assert main([*argv, "--fail-if", "worse", "--fail-if", "accuracy.drop>30"]) == 1
    found = kept(out)
    assert not found["partial"]
    assert [(c["figure"], c["state"]) for c in found["claims"]] == [
        ("perplexity_ratio", "fails"), ("top1", "holds"), ("accuracy", "fails"),
    ]  # fmt: skip
    f = found["agreement"]["figures"]
    assert f["positions"] == 250
    p, q = model([1, 5], 1.6), model([1, 5], 1.0)  # the same wherever it stands
    true = sum(math.exp(v) * (v - q[t]) for t, v in p.items())
    assert f["kl_mean"] == pytest.approx(true, rel=0.02)
    assert f["kl_mean"] <= true + 1e-6
    assert f["perplexity_ratio_low"] > 1.02
    assert found["tasks"]["accuracy"][0]["drop"] == pytest.approx(-0.5)
    assert [len(p) for p in (found["cases"], found["texts"])] == [40, 25]
    # Both arms were sent the same; nothing of it is kept.
    assert sorted(map(repr, asked_a)) == sorted(map(repr, asked_b))
    whole_folder = "".join(p.read_text() for p in out.iterdir())
    assert SECRET not in whole_folder
    assert built_in()[0].text[:30] not in whole_folder
    assert {p.name for p in out.iterdir()} == {"quality.json", "report.html"}
    page = (out / "report.html").read_text()
    assert "B is worse than allowed" in page
    assert "<script" not in page
    said = capsys.readouterr()
    assert "accuracy.drop is 50" in said.err
    assert "prompt_logprobs" in said.out


def test_show_says_the_same_again(tmp_path: Path, tasks: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "q"
    with served(service(), "vllm") as (a, _), served(service(1.3), "vllm") as (b, _):
        argv = ["quality", a.endpoint.url, b.endpoint.url, "--tasks", tasks, *FEW, "--out", str(out), "--json"]
        assert main(argv) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["show", str(out), "--json", "--html", str(tmp_path / "again.html")]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == first
    assert (tmp_path / "again.html").read_text() == (out / "report.html").read_text()
    assert main(["show", str(out), "--fail-if", "agreement.kl_mean>0.001"]) == 1
    assert main(["show", str(out), "--fail-if", "agreement.nonsense>0.001"]) == 2
    assert main(["show", str(out), "--fail-if", "accuracy.sums.drop_high>99"]) == 0


def test_a_against_itself_finds_nothing(tmp_path: Path, tasks: str) -> None:
    out = tmp_path / "q"
    with served(service(), "vllm") as (a, _):
        argv = ["quality", a.endpoint.url, "--aa", "--tasks", tasks, *FEW, "--out", str(out)]
        assert main([*argv, "--fail-if", "worse"]) == 0
    found = kept(out)
    f = found["agreement"]["figures"]
    assert (f["top1"], f["perplexity_ratio"]) == (1.0, 1.0)
    assert f["kl_mean"] == pytest.approx(0, abs=1e-12)
    assert found["plan"]["same"]
    assert not any(r["found"] for part in ("accuracy", "degeneration") for r in found["tasks"][part])


def test_other_tokenizers_are_refused_and_tasks_go_on(
    tmp_path: Path, tasks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = vllm(most=60)

    def other(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, found = plain(path, body)
        return status, {"tokens": [2, *found["tokens"][1:]]} if path == "/tokenize" else found

    out = tmp_path / "q"
    with served(service(), "vllm") as (a, _), served(service(scores=other), "vllm") as (b, _):
        urls = [a.endpoint.url, b.endpoint.url]
        assert main(["quality", *urls, "--tasks", tasks, *FEW, "--out", str(out)]) == 0
        assert main(["quality", *urls, "--only", "agreement", *FEW, "--out", str(tmp_path / "r")]) == 4
    found = kept(out)
    assert "different tokens" in found["agreement"]["why"]
    assert found["agreement"]["figures"] is None
    assert found["texts"] == []
    assert found["tasks"]["cases"] == 40
    assert not (tmp_path / "r").exists()
    assert main(["show", str(out), "--fail-if", "agreement.kl_mean>1"]) == 1  # what is unknown does not pass
    assert "kl_mean is unknown" in capsys.readouterr().err


def test_a_service_without_distributions_says_so(tmp_path: Path, tasks: str) -> None:
    pages = {"/v1/models": {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "me"}]}}

    def nothing(_path: str, _body: dict[str, Any]) -> tuple[int, Any]:
        return 400, {"error": {"message": "echo is not supported"}}

    out = tmp_path / "q"
    with served(whole(nothing, says(0), pages), None) as (a, _):
        argv = ["quality", a.endpoint.url, "--aa", "--tasks", tasks, *FEW, "--out", str(out)]
        assert main([*argv, "--keep-text"]) == 0
    found = kept(out)
    assert "echo is not supported" in found["agreement"]["why"]
    assert [c["figure"] for c in found["claims"]] == ["accuracy"]
    lines = [json.loads(x) for x in (out / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 80  # kept, since that was asked for
    assert lines[3]["text"] == "The answer is 3."


def test_what_was_done_is_kept_when_b_goes_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, calls = vllm(most=60), {"n": 0}

    def dying(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        calls["n"] += 1
        return good(path, body) if calls["n"] < 40 else (500, {"error": {"message": "out of memory"}})

    out = tmp_path / "q"
    with served(service(), "vllm") as (a, _), served(service(scores=dying), "vllm") as (b, _):
        argv = ["quality", a.endpoint.url, b.endpoint.url, "--only", "agreement", *FEW, "--out", str(out)]
        assert main(argv) == 4
    found = kept(out)
    assert found["partial"]
    assert "out of memory" in found["partial_reason"]
    assert 5 < found["agreement"]["figures"]["texts"] < 25
    assert "PARTIAL" in capsys.readouterr().out


def test_ctrl_c_keeps_what_both_were_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from whywait.load import forced

    real, calls = forced.score, {"n": 0}

    def interrupted(*args: Any) -> Any:
        calls["n"] += 1
        for i, found in enumerate(real(*args)):
            if calls["n"] == 2 and i == 9:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(forced, "score", interrupted)
    out = tmp_path / "q"
    with served(service(), "vllm") as (a, _):
        assert main(["quality", a.endpoint.url, "--aa", "--only", "agreement", *FEW, "--out", str(out)]) == 130
    found = kept(out)
    assert (found["partial_reason"], found["agreement"]["figures"]["texts"]) == ("interrupted", 9)


@pytest.mark.parametrize(
    ("number", "code", "why"), [(signal.SIGTERM, 130, "interrupted"), (signal.SIGKILL, -9, "it was cut off")]
)
def test_a_process_that_ends_in_the_middle_of_b_keeps_what_it_has(
    tmp_path: Path, number: signal.Signals, code: int, why: str
) -> None:
    """A folder labelled PARTIAL; SIGTERM also the exit code of an interruption."""
    seen = threading.Event()
    good, calls = vllm(most=60), {"n": 0}

    def slow(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        calls["n"] += 1
        if calls["n"] > 30:
            seen.set()
            time.sleep(0.2)
        return good(path, body)

    out = tmp_path / "q"
    with served(service(), "vllm") as (a, _), served(service(scores=slow), "vllm") as (b, _):
        argv = ["quality", a.endpoint.url, b.endpoint.url, "--only", "agreement", *FEW, "--out", str(out)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "src")}
        child = subprocess.Popen([sys.executable, "-m", "whywait", *argv], env=env, stdout=subprocess.DEVNULL)
        try:
            assert seen.wait(60)
            until = time.monotonic() + 60
            while number == signal.SIGKILL and not (out / "quality.json").exists():
                assert time.monotonic() < until
                time.sleep(0.01)
            child.send_signal(number)
            assert child.wait(60) == code
        finally:
            child.kill()
    found = kept(out)
    assert found["partial_reason"] == why
    assert 0 < found["agreement"]["figures"]["texts"] < 25


def test_two_engines_of_one_tokenizer_are_compared(tmp_path: Path) -> None:
    props = {"total_slots": 2, "default_generation_settings": {"n_ctx": 512}}
    pages = {"/v1/models": {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "llamacpp"}]},
             "/metrics": "# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 0\n",
             "/props": props}  # fmt: skip
    out = tmp_path / "q"
    with served(service(), "vllm") as (a, _), served(whole(llama(), says(0), pages), None) as (b, asked):
        argv = ["quality", a.endpoint.url, b.endpoint.url, "--only", "agreement", *FEW, "--out", str(out)]
        assert main(argv) == 0
    found = kept(out)
    assert found["agreement"]["figures"]["top1"] == 1.0
    assert len(found["agreement"]["ways"]) == 2
    assert any("different ways" in d["what"] for d in found["doubts"])
    assert sum(p == "/completion" for p, _ in asked) >= 250


def test_a_foreign_service_needs_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", "http://192.0.2.1:8000", "http://192.0.2.1:8001", "--only", "agreement"]) == 2
    said = capsys.readouterr().err
    assert "is not this machine" in said
    assert "up to" in said


@pytest.mark.parametrize(
    "argv",
    [
        ["embedded"],
        ["embedded", "embedded", "--aa"],
        ["embedded", "embedded", "--margin", "0"],
        ["embedded", "embedded", "--fail-if", "nonsense"],
        ["embedded", "embedded", "--tasks", "no-such-set"],
        ["embedded", "embedded", "--text", "no-such-file"],
        ["embedded", "embedded:no_such=1"],
    ],
)
def test_wrong_words_are_said_before_anything_is_started(argv: list[str]) -> None:
    assert main(["quality", *argv]) == 2


def test_documents_of_a_suite_are_paired_by_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval itself is another test's; here its samples: those of one arm alone and those without a score are out."""
    from whywait.core.tasks import Answered
    from whywait.load import lmeval

    arms = iter([{f"k{i}": 1.0 for i in range(30)}, {f"k{i}": float(i % 2) for i in range(1, 40)} | {"k29": None}])

    def run(_target: Any, suites: Any, directory: Path) -> list[lmeval.Sample]:
        (directory / "text").write_text(SECRET)
        found = next(arms)
        return [lmeval.Sample(suites.names[0], k, v, "acc", Answered(k, "x", outcome="ok")) for k, v in found.items()]

    monkeypatch.setattr(lmeval, "run", run)
    monkeypatch.setattr(lmeval, "program", lambda: ["lm_eval"])
    out = tmp_path / "q"
    with served(service(), "vllm") as (a, _), served(service(), "vllm") as (b, _):
        argv = ["quality", a.endpoint.url, b.endpoint.url, "--suite", "sums", "--only", "tasks", "--out", str(out)]
        assert main(argv) == 0
    found = kept(out)
    assert found["plan"]["suites"] == ["sums"]
    assert found["plan"]["cases"] == 0
    (row,) = [r for r in found["tasks"]["accuracy"] if r["name"] == "accuracy"]
    assert (row["n"], row["a"], row["worse"]) == (28, 1.0, 14)
    assert {p.name for p in out.iterdir()} == {"quality.json", "report.html"}
