"""Renews the golden output of examples: ``python tools/golden.py`` (``--check`` compares, and shows the difference).

The commands of ``run.sh`` are run one after another in this process, in an empty folder beside a link to the kept
runs of the exam; what they print on stdout is kept, with what differs from run to run masked.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from whywait.cli import main as whywait

ROOT = Path(__file__).parents[1]
EXAMPLES = (ROOT / "examples" / "02_without_an_engine",)
#: (what differs from run to run, what stands for it)
MASKS = (
    (re.compile(r"^.*compile the simulator.*\n", re.MULTILINE), ""),  # the first start on a machine only
    (re.compile(r"(?<=draws, )[\d.]+ s$", re.MULTILINE), "# s"),
    (re.compile(r"whywait \d+\.\d+\.\d+\S*"), "whywait #"),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
)


def commands(script: str) -> list[list[str]]:
    """The commands of a script that begin with ``whywait``; lines that end in a backslash go on."""
    lines = script.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("whywait ")]


def masked(text: str) -> str:
    for pattern, instead in MASKS:
        text = pattern.sub(instead, text)
    return text


def output(example: Path) -> str:
    """What the commands of ``run.sh`` print, each under its own line, with the exit code where that is not 0."""
    out = []
    with tempfile.TemporaryDirectory() as folder, _inside(Path(folder)):
        Path("exam").symlink_to(ROOT / "exam")
        for args in commands((example / "run.sh").read_text(encoding="utf-8")):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
                code = whywait(args)
            out.append(
                f"$ whywait {shlex.join(args)}\n{said.getvalue().strip()}\n" + (f"[exit {code}]\n" if code else "")
            )
    return masked("\n".join(out))


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main() -> int:
    stale = False
    for example in EXAMPLES:
        kept, found = example / "expected.txt", output(example)
        if "--check" not in sys.argv:
            kept.write_text(found, encoding="utf-8")
            continue
        before = kept.read_text(encoding="utf-8").splitlines()
        shown = list(difflib.unified_diff(before, found.splitlines(), str(kept), "now", lineterm=""))
        print("\n".join(shown), end="\n" if shown else "")
        stale = stale or bool(shown)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
