"""``--json``: of every verb that has a result, one JSON document on stdout and nothing else there; talk on stderr."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.imported_files import DATA
from whywait.cli import VERBS, main, parser
from whywait.load.stub import StubProcess

ROOT = Path(__file__).resolve().parents[1]
#: Their result is a script.
WITHOUT = {"completion"}
LOAD = ["--no-floor", "--prompt-tokens", "16", "--output-tokens", "4"]
SIM = ["--machine", "h100", "--model", "llama-3.1-8b"]


@pytest.fixture(scope="module")
def stub() -> Iterator[str]:
    with StubProcess("--ttft-ms", "5", "--gap-ms", "2", "--slots", "2", "--timings") as s:
        yield s.url


@pytest.fixture(scope="module")
def kept(stub: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A sweep of two points that is kept."""
    folder = str(tmp_path_factory.mktemp("json") / "sweep")
    main(["sweep", stub, "--concurrency", "1,4", "--requests", "12", *LOAD, "--out", folder, "--json"])
    return folder


def document(capsys: pytest.CaptureFixture[str], *argv: str, ok: tuple[int, ...] = (0, 6)) -> Any:
    """What a verb prints, read by a parser that takes no NaN; 6: a busy machine made the client late."""
    capsys.readouterr()
    code = main(list(argv))
    out = capsys.readouterr()
    assert code in ok, out.err

    def never(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(out.out, parse_constant=never)


def test_every_verb_with_a_result_has_the_flag() -> None:
    (subs,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    lack = {verb for verb in VERBS if "--json" not in subs.choices[verb]._option_string_actions}
    assert lack == WITHOUT


def test_the_page_lists_every_verb() -> None:
    page = (ROOT / "docs" / "terminal.md").read_text(encoding="utf-8")
    table = page.partition("## `--json`")[2].partition("\n## ")[0]
    assert [verb for verb in VERBS if f"| `{verb}" not in table and verb not in WITHOUT] == []


QUICK = {
    "run": ["run", "{stub}", "--requests", "4", *LOAD, "--out", "{out}"],
    "show": ["show", "{kept}"],
    "bill": ["bill", "{kept}", "--price-per-hour", "2.5", "--currency", "EUR"],
    "compare": ["compare", "{kept}", "{kept}"],
    "history": ["history", "{kept}/.."],
    "import": ["import", str(DATA / "vllm-0.32-c4.json"), "--out", "{out}"],
    "export": ["export", "{kept}", "--to", "csv", "--out", "{out}"],
    "catalog": ["catalog", "techniques"],
    "workload show": ["workload", "show", "{workload}"],
    "exam score --list": ["exam", "score", "exam", "--list"],
    "engine list": ["engine", "list"],
    "try --list": ["try", "--list"],
    "doctor": ["doctor", "{stub}", "--no-floor"],
}
SLOW = {
    "exam simulate --list": ["exam", "simulate", "--list", "--rounds", "1"],
    "diagnose": ["diagnose", "{stub}", "--budget", "6s", *LOAD, "--out", "{out}", "--report", "{out}.html"],
    "find": ["find", "{stub}", "--slo", "ttft=1s@p95", "--budget", "6s", "--max-rate", "20", *LOAD, "--out", "{out}"],
    "probe": ["probe", "{stub}", "--budget", "5s", "--longest", "64", "--no-floor", "--out", "{out}"],
    "watch": ["watch", "{stub}", "--once", "--window", "4s"],
    "ab": ["ab", "--a", "{stub}", "--b", "{stub}", "--rounds", "2..2", "--requests", "6", "--concurrency", "2", *LOAD,
           "--out", "{out}"],
    "simulate": ["simulate", *SIM, "--concurrency", "1", "--draws", "2", "--requests", "4", "--out", "{out}"],
    "what-if": ["what-if", "{kept}", "--apply", "prefix-cache", "--seeds", "2",
                "--baseline", "model=llama-3.1-8b,machine=h100,engine=vllm"],
    "plan": ["plan", "--model", "llama-3.1-8b", "--machines", "h100", "--rate", "1", "--slo", "ttft=2s,tpot=100ms",
             "--draws", "2", "--out", "{out}"],
}  # fmt: skip


def _filled(argv: list[str], stub: str, kept: str, tmp_path: Path) -> list[str]:
    workload = tmp_path / "w.toml"
    workload.write_text('[[classes]]\nname = "a"\nprompt_tokens = "16"\noutput_tokens = "4"\n', encoding="utf-8")
    return [a.format(stub=stub, kept=kept, out=tmp_path / "out", workload=workload) for a in argv]


@pytest.mark.parametrize("name", QUICK)
def test_a_document_and_nothing_else(
    name: str, stub: str, kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert document(capsys, *_filled(QUICK[name], stub, kept, tmp_path), "--json") is not None


@pytest.mark.engine
@pytest.mark.parametrize("name", SLOW)
def test_a_document_of_what_takes_longer(
    name: str, stub: str, kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = _filled(SLOW[name], stub, kept, tmp_path)
    found = document(capsys, *argv, "--json", ok=(0, 3, 6))
    assert isinstance(found, (dict, list))


def test_a_failure_leaves_stdout_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "http://127.0.0.1:9", "--json"]) == 4
    out = capsys.readouterr()
    assert not out.out
    assert "refuses connections" in out.err


def test_what_serves_says_where_as_json(tmp_path: Path) -> None:
    """agent and serve-sim answer until they are stopped: their document is a line, once they answer."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "WHYWAIT_SIM": "python"}
    for argv in (["agent", "--listen", "127.0.0.1:0"], ["serve-sim", *SIM]):
        command = [sys.executable, "-m", "whywait", *argv, "--json"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True
        ) as process:
            assert process.stdout is not None
            try:
                assert json.loads(process.stdout.readline())["url"].startswith("http://127.0.0.1:")
            finally:
                process.send_signal(signal.SIGTERM)
            assert process.stdout.read() == ""
