"""Arms that carry keys, and services that carry escapes: neither reaches a terminal or a file as it is."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from whywait import trying
from whywait.cli import main
from whywait.core import secrets
from whywait.errors import UsageError
from whywait.lab.arms import arm_of
from whywait.load.stub import StubProcess, StubThread
from whywait.load.stub_plan import Options as StubOptions
from whywait.load.stub_plan import Plan as StubPlan
from whywait.report.text import console
from whywait.session import stderr
from whywait.units import plain

KEY = "sk-Qw8eRt7yUi"
FLAGS = ["--no-floor", "--prompt-tokens", "16", "--output-tokens", "3", "--concurrency", "2", "--requests", "4",
         "--rounds", "2", "--metric", "e2e_ms.p50", "--warm-up", "0"]  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trying, "calibration_ms", lambda _cpus, _rounds: 10.0)
    yield
    secrets.forget()


def written(folder: Path) -> str:
    return "\n".join(p.read_bytes().decode("utf-8", "replace") for p in folder.rglob("*") if p.is_file())


def test_a_password_in_either_url_is_refused_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StubThread(StubOptions(plan=StubPlan())) as s:
        asked: list[object] = []
        s.stub._generate = lambda *found: asked.append(found)  # type: ignore[method-assign]
        bad = s.url.replace("http://", f"http://user:{KEY}@")
        for arms in (["--a", bad, "--b", s.url], ["--a", s.url, "--b", bad]):
            assert main(["ab", *arms, *FLAGS, "--out", str(tmp_path / "t")]) == 2
            err = capsys.readouterr().err
            assert "must not carry a password" in err
            assert KEY not in err
    assert not asked
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("text", ["http://", "http://host:port", "http://host:99999", "http://h:1/\x1b[31m"])
def test_what_is_no_url_is_said_at_once(text: str) -> None:
    with pytest.raises(UsageError, match="is not a URL"):
        arm_of(text)


def test_values_of_a_query_and_of_headers_are_kept_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StubProcess("--ttft-ms", "2", "--gap-ms", "1") as a, StubProcess("--ttft-ms", "2", "--gap-ms", "1") as b:
        arms = ["--a", f"{a.url}/?api_key={KEY}a", "--b", f"{b.url}/?token={KEY}b&v=2"]
        header = ["--header", f"X-Auth: {KEY}c"]
        out = tmp_path / "t"
        assert main(["ab", *arms, *header, *FLAGS, "--json", "--out", str(out)]) == 0
        said = capsys.readouterr()
        assert main(["show", str(out)]) == 0
        shown = capsys.readouterr()
        argv = ["ab", *arms, *header, *FLAGS, "--out", str(out)]
        assert main([*argv]) == 2  # the same trial, though its secrets are not kept
        assert "it is whole" in capsys.readouterr().err
    for text in (said.out, said.err, shown.out, shown.err, written(out)):
        assert KEY not in text
    assert "[secret]" in json.loads((out / "trial.json").read_text())["plan"]["a"]


STUB = f"{sys.executable} -m whywait.load.stub --port {{port}} --ttft-ms 2 --gap-ms 1"
SRC = Path(__file__).resolve().parents[1] / "src"


def test_a_key_in_a_command_arm_is_kept_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    out = tmp_path / "t"
    env = f"HF_TOKEN={KEY}e "
    args = ["--a", env + STUB, "--b", f"env VLLM_API_KEY={KEY}n {STUB}"]
    monkeypatch.setattr(sys, "argv", ["whywait", "ab", *args])  # as the manifest keeps it
    assert main(["ab", *args, *FLAGS, "--out", str(out)]) == 0
    said = capsys.readouterr()
    for text in (said.out, said.err, written(out)):
        assert KEY not in text
    assert "VLLM_API_KEY=[secret] " in (out / "trial.json").read_text()


@pytest.mark.parametrize(
    ("command", "hidden"),
    [
        (f"vllm serve m --api-key {KEY} --port 1", {KEY}),
        (f"vllm serve m --api-key={KEY}", {KEY}),
        (f"vllm serve m --api-key {KEY} {KEY}2 --port 12345", {KEY, KEY + "2"}),
        (f"env OPENAI_API_KEY={KEY} x --hf-token abcd", {KEY, "abcd"}),
        (f"curl -H 'Authorization: Bearer {KEY}' http://u:pwpw@h/?sig={'z' * 20}", {KEY, "pwpw", "z" * 20}),
        ("vllm serve m --tokenizer org/name --max-num-batched-tokens 8192 --api-key EMPTY", set()),
        ("x --ssl-key-file /a/key.pem --eos-token-id 12345 TOKENIZERS_PARALLELISM=false", set()),
        (f"vllm serve 'unclosed --api-key {KEY}", {KEY}),
    ],
)
def test_what_a_command_line_holds_of_secrets(command: str, hidden: set[str]) -> None:
    secrets.hide_command(command)
    assert hidden <= set(secrets.known())
    for kept in ("org/name", "8192", "EMPTY", "12345", "false", "/a/key.pem", "serve"):
        assert secrets.clean(kept) == kept


def test_escapes_of_others_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "model\x1b[31mRED\x1b]0;title\x07\x9b2J\u202eback\r"
    assert plain(evil) == "model[31mRED]0;title2Jback"
    assert plain("a\tb\n") == "a\tb\n"
    stderr(evil)
    assert "\x1b" not in capsys.readouterr().err
    out = io.StringIO()
    c = console(out)
    c.print(evil, markup=False)
    c.print("[bold]own[/bold] style")
    assert out.getvalue() == "model[31mRED]0;title2Jback\nown style\n"


def test_escapes_in_an_error_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "/nowhere/\x1b[31mRED\u202e"]) == 2
    err = capsys.readouterr().err
    assert "[31mRED" in err
    assert "\x1b" not in err
    assert "\u202e" not in err
    assert err.count("\n") >= 2


def test_a_trial_of_models_with_escapes_in_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["m\x1b[31mRED[red]", "m\x1b[2J"]
    found = [StubProcess("--ttft-ms", "2", "--gap-ms", "1", "--model", name) for name in names]
    with found[0] as a, found[1] as b:
        assert main(["ab", "--a", a.url, "--b", b.url, *FLAGS, "--out", str(tmp_path / "t")]) == 0
    said = capsys.readouterr()
    assert "RED[red]" in said.out
    assert "\x1b" not in said.out + said.err
