"""Shell completion, in the shells themselves where they are; verbs and flags as the parser has them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from whywait.cli import VERBS, main, parser
from whywait.verbs.completion import script

SHELLS = ("bash", "zsh", "fish")
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
DRIVE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_whywait
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(script(parser(), shell), encoding="utf-8")
    return {shell: folder / shell for shell in SHELLS}


def bash(script: Path, *words: str, cwd: Path | None = None) -> list[str]:
    command = ["bash", "--norc", "--noprofile", "-c", DRIVE, "bash", str(script), "whywait", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd)
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if line]


def flags(verb: str) -> set[str]:
    (subs,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return {name for a in subs.choices[verb]._actions for name in a.option_strings}


@needs_bash
def test_bash_completes_verbs(scripts: dict[str, Path]) -> None:
    assert set(bash(scripts["bash"], "")) == set(VERBS)
    assert bash(scripts["bash"], "swe") == ["sweep"]
    assert {"--help", "--version"} <= set(bash(scripts["bash"], "-"))


@needs_bash
@pytest.mark.parametrize("verb", VERBS)
def test_bash_completes_every_flag_of_every_verb(scripts: dict[str, Path], verb: str) -> None:
    assert set(bash(scripts["bash"], verb, "-")) == flags(verb)


@needs_bash
@pytest.mark.parametrize(("words", "found"), [
    (["run", "http://x", "--cache", ""], {"cold", "warm", "natural"}),
    (["run", "http://x", "--con"], {"--concurrency"}),
    (["exam", "s"], {"score", "simulate"}),
    (["engine", ""], {"start", "stop", "status", "list"}),
    (["completion", ""], {"bash", "zsh", "fish"}),
    (["show", "x", "--format", "b"], {"bench"}),
])  # fmt: skip
def test_bash_completes_values(scripts: dict[str, Path], words: list[str], found: set[str]) -> None:
    assert set(bash(scripts["bash"], *words)) == found


@needs_bash
def test_bash_completes_files_and_folders(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "report.html").write_text("")
    assert bash(scripts["bash"], "show", "", cwd=tmp_path) == ["runs"]
    assert set(bash(scripts["bash"], "show", "x", "--html", "r", cwd=tmp_path)) == {"runs", "report.html"}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_itself_takes_its_script(scripts: dict[str, Path], shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, "-n", str(scripts[shell])], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.parametrize("verb", VERBS)
def test_zsh_and_fish_know_every_verb_and_flag(scripts: dict[str, Path], shell: str, verb: str) -> None:
    text = scripts[shell].read_text(encoding="utf-8")
    assert verb in text
    for name in (n for n in flags(verb) if n.startswith("--")):
        assert (name if shell == "zsh" else f"-l {name[2:]} ") in text, name


def test_the_verb_prints_the_script(capsys: pytest.CaptureFixture[str], scripts: dict[str, Path]) -> None:
    assert main(["completion", "bash"]) == 0
    out = capsys.readouterr()
    assert out.out.strip() == scripts["bash"].read_text(encoding="utf-8").strip()
    assert not out.err
