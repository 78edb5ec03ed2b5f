"""A trial that is gone on with, by the same command, by another one, by two at once; and what ends it early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whywait import trying
from whywait.cli import main
from whywait.errors import UsageError
from whywait.lab.places import claimed
from whywait.load.stub import StubProcess
from whywait.verbs import quality
from whywait.verbs.signals import sigterm_as_ctrl_c

FLAGS = ["--no-floor", "--prompt-tokens", "16", "--output-tokens", "3", "--concurrency", "2", "--requests", "4",
         "--rounds", "2", "--metric", "e2e_ms.p50", "--warm-up", "0"]  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "calibration_ms", lambda _cpus, _rounds: 10.0)
    monkeypatch.setattr(quality, "EACH", 1)


@pytest.fixture(scope="module")
def stubs() -> Iterator[tuple[str, str]]:
    flags = ("--ttft-ms", "2", "--gap-ms", "1", "--slots", "4", "--timings")
    with StubProcess(*flags) as a, StubProcess(*flags) as b:
        yield a.url, b.url


@pytest.fixture(scope="module")
def whole(stubs: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("again") / "t"
    with pytest.MonkeyPatch.context() as m:
        m.setattr(trying, "calibration_ms", lambda _cpus, _rounds: 10.0)
        assert main(["ab", "--a", stubs[0], "--b", stubs[1], *FLAGS, "--out", str(out)]) == 0
    return out


def kept(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "trial.json").read_text())
    return found


def half(whole: Path, to: Path) -> Path:
    """The trial after its first pair."""
    to.mkdir()
    found = kept(whole)
    found["rounds"], found["partial_reason"] = found["rounds"][:2], "interrupted"
    (to / "trial.json").write_text(json.dumps(found))
    return to


@pytest.mark.parametrize(
    "asked",
    [
        (["--body", '{"top_k": 5}'], "body"),
        (["--header", "X-Route: fast"], "headers"),
        (["--dialect", "completions"], "dialect"),
        (["--no-stream"], "stream"),
    ],
)
def test_a_trial_asked_otherwise_is_another_one(
    stubs: tuple[str, str], whole: Path, asked: tuple[list[str], str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    more, word = asked
    out = half(whole, tmp_path / "t")
    argv = ["ab", "--a", stubs[0], "--b", stubs[1], *FLAGS, "--out", str(out)]
    assert main([*argv, *more]) == 2
    err = capsys.readouterr().err
    assert "another trial" in err
    assert word in err
    assert main(argv) == 0
    assert kept(out)["pairs"] == 2


def test_two_processes_with_one_folder(
    stubs: tuple[str, str], whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = half(whole, tmp_path / "t")
    hold = "import sys, time; from pathlib import Path; from whywait.lab.places import claimed\n" \
           "with claimed(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"  # fmt: skip
    other = subprocess.Popen([sys.executable, "-c", hold, str(out)], env=os.environ | {"PYTHONPATH": "src"},
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    before = (out / "trial.json").read_bytes()
    argv = ["ab", "--a", stubs[0], "--b", stubs[1], *FLAGS, "--out", str(out)]
    assert main(argv) == 2
    assert "another whywait works in" in capsys.readouterr().err
    assert (out / "trial.json").read_bytes() == before
    other.kill()  # the kernel lets go: no stale lock
    other.communicate()
    assert main(argv) == 0
    assert sorted(p.name for p in out.iterdir() if p.name.startswith(".")) == []


def test_a_folder_is_claimed_once_more_by_its_own_process(tmp_path: Path) -> None:
    with claimed(tmp_path / "a" / "b"), claimed(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with claimed(tmp_path / "file"):  # that it is no folder is said elsewhere
        pass


# --- a condition that no trial has


@pytest.mark.parametrize(
    "gate",
    ["ttft.p50.ratio>1", "ttft_ms.p50.ration>1", "ttft_ms.p50>1", "classes.nosuch.ttft_ms.p50.ratio>1", "a>1"],
)
@pytest.mark.parametrize("verb", ["ab", "try"])
def test_a_misspelt_condition_is_said_before_anything_is_measured(
    verb: str, gate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trying, "_round", None)
    what = ["ab", "--a", "embedded", "--b", "embedded:slots=2"] if verb == "ab" else ["try", "continuous-batching"]
    assert main([*what, "--fail-if", gate, "--out", str(tmp_path / "t")]) == 2
    assert "this has no" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("gate", ["causes.queue.slot limit.ratio>1", "classes.b.ttft_ms.p50.a>1"])
def test_what_no_round_knew_does_not_pass(whole: Path, gate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(whole), "--fail-if", gate]) == 1
    assert "unknown" in capsys.readouterr().err


# --- quality afterwards


def test_quality_that_was_cut_off_is_gone_on_with(
    stubs: tuple[str, str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "t"
    argv = ["ab", "--a", stubs[0], "--b", stubs[1], *FLAGS, "--quality", "tasks", "--out", str(out)]

    def cut(_a: object, _b: object, _options: object, folder: Path, _part: str) -> Any:
        folder.mkdir()
        (folder / "left").write_text("")
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(quality, "beside", cut)
        assert main(argv) == 130
    rounds = kept(out)["rounds"]
    capsys.readouterr()
    monkeypatch.setattr(trying, "_round", None)  # no round is measured again
    assert main(argv) == 0
    found = kept(out)
    assert found["rounds"] == rounds
    assert found["quality"]["claims"]
    assert not found["partial"]
    assert Path(found["quality"]["directory"]).name == "quality-2"
    assert main(argv) == 2  # all of it is there
    assert "it is whole" in capsys.readouterr().err
    assert main([a for a in argv if a not in ("--quality", "tasks")]) == 2


# --- bounds


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--a", "replicas:²", "--b", "embedded"], "is not a setting of replicas"),
        (["--a", "embedded", "--b", "embedded:slots=2", "--warm-up", "99999999999999"], "--warm-up"),
        (["--a", "embedded", "--b", "embedded:slots=2", "--warm-up", "-1"], "--warm-up"),
        (["--a", "embedded", "--b", "embedded:slots=2", "--seed", "-1"], "seed"),
    ],
)
def test_numbers_that_are_none(argv: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab", *argv, "--out", str(tmp_path / "t")]) == 2
    assert word in capsys.readouterr().err


# --- SIGTERM


def test_sigterm_is_as_ctrl_c(stubs: tuple[str, str], tmp_path: Path) -> None:
    """Between rounds too, where no session takes the signal: an arm that starts for a long time."""
    out = tmp_path / "t"
    slow = f"{sys.executable} -c 'import time; print(1, flush=True); time.sleep(60)' --port {{port}}"
    argv = ["ab", "--a", slow, "--b", stubs[1], *FLAGS, "--out", str(out)]
    env = os.environ | {"PYTHONPATH": "src", "XDG_RUNTIME_DIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-m", "whywait", *argv], env=env, stderr=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert child.stderr is not None
    for line in child.stderr:
        if "arm A" in line:
            break
    time.sleep(1)
    child.send_signal(signal.SIGTERM)
    said, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "PARTIAL" in said
    assert (out / "report.html").is_file()
    assert kept(out)["partial_reason"] == "interrupted"


def test_a_handler_of_somebody_else_stays() -> None:
    mine = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with sigterm_as_ctrl_c():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, mine)


def test_claimed_says_whose_fault(tmp_path: Path) -> None:
    import fcntl

    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(UsageError, match="another whywait"), claimed(tmp_path):
            pass
    finally:
        os.close(handle)
