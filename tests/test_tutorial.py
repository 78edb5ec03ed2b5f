"""The tutorial is run on the embedded engine, as a user would, with fewer requests; what it prints has the shape shown.

Shape: each line shown is looked for in what came, in order, with any number for a number and anything for ``…``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from whywait import app

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial.md"
BLOCK = re.compile(r"```bash\n(.*?)```(?:\s*```text\n(.*?)```)?", re.DOTALL)
INVALID = 6  # the client was late: of a busy box that says nothing of the tutorial


def blocks() -> list[tuple[str, str]]:
    """(command, output shown), without the one that installs."""
    found = [(c.strip(), shown) for c, shown in BLOCK.findall(TUTORIAL.read_text())]
    return [(c, shown) for c, shown in found if not c.startswith("pip ")]


def shape(line: str) -> re.Pattern[str]:
    """What a line must look like: numbers may be others (or unknown), gaps of blanks wider or narrower."""
    out: list[str] = []
    for word in line.replace("…", " … ").split():
        if word == "…":
            out.append(".*")
        elif re.fullmatch(r"[(\[]?[-+−×≤≥]?[\d,.]*\d[\d,.]*[)\],;:]?", word) or word in ("–", "?"):
            out.append(r"\S+(?: (?:ms|%|s|MB))?(?: [?◂])?")
        elif word not in ("ms", "%", "s") or not out:  # those belong to the number before, which may be unknown
            out.append(re.escape(word))
    return re.compile(r"\s*" + r"\s*".join(out) + r"\s*")


def missing(shown: str, came: str) -> list[str]:
    """Lines shown that did not come, or not in that order."""
    lines, at, out = came.splitlines(), 0, []
    for line in shown.splitlines():
        if not line.strip() or line.strip() == "…":
            continue
        found = next((i for i in range(at, len(lines)) if shape(line).fullmatch(lines[i])), None)
        if found is None:
            out.append(line)
        else:
            at = found + 1
    return out


def test_it_is_about_ten_commands_with_what_they_print() -> None:
    found = blocks()
    assert 7 <= len(found) <= 10
    assert sum(bool(shown) for _, shown in found) >= 6
    text = "\n".join(c for c, _ in found)
    for verb in ("engine start", "sweep", "show", "what-if", "ab", "bill", "engine stop"):
        assert f"whywait {verb}" in text


def test_a_line_that_is_gone_or_other_is_missed() -> None:
    shown = "TTFT p50      465 ms    4,232 ms\n…\nrun kept in runs/x\n"
    assert missing(shown, "noise\nTTFT p50   1.2 s   –\nmore\nrun kept in runs/x\n") == []
    assert missing(shown, "TTFT p99   465 ms  4 ms\nrun kept in runs/x\n") == ["TTFT p50      465 ms    4,232 ms"]
    assert missing(shown, "run kept in runs/x\nTTFT p50   465 ms   4 ms\n") == ["run kept in runs/x"]
    assert missing("queue: slot limit…\n", "queue: slot limit  4 ms\n") == []
    assert missing("good: 4 of 4\n", "bad: 4 of 4\n") == ["good: 4 of 4"]


def test_with_one_place_no_second_concurrency_is_asked_for() -> None:
    """The tutorial's engine: two widths are not to be had before it has two places."""
    verdicts = app.show(TUTORIAL.parents[1] / "exam" / "vllm-slots-1-of-8").verdicts
    steps = [v.next_step for v in verdicts if v.claim.startswith("What bounds a decode step")]
    assert steps == ["give it more places (--max-num-seqs N), then measure a second concurrency"]


@pytest.mark.engine
def test_its_commands_print_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="needs the 'engine' extra: pip install 'whywait[engine]'")
    name = f"tutorial-{os.getpid()}"  # somebody may have the tutorial open in the next window
    lines = [
        f'whywait() {{ "{sys.executable}" -m whywait "$@"; local rc=$?; '
        f'echo "$rc $*" >> {tmp_path}/codes; return $rc; }}',
        f"trap 'whywait engine stop {name} > /dev/null 2>&1' EXIT",
    ]
    for i, (command, _) in enumerate(blocks()):
        short = re.sub(r"\btutorial\b", name, command).replace("--requests 12", "--requests 8")
        lines.append(f"{{ {short}\n}} > {tmp_path}/{i}.txt")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TUTORIAL.parents[1] / "src"), *sys.path])}
    subprocess.run(["bash", "-c", "\n".join(lines)], cwd=tmp_path, env=env, timeout=900, check=False)
    codes = dict(reversed(line.split(" ", 1)) for line in (tmp_path / "codes").read_text().splitlines())
    for arguments, code in codes.items():
        wanted = (1,) if "--fail-if" in arguments else (0, INVALID)
        assert int(code) in wanted or name in arguments, (arguments, code)
    for i, (command, shown) in enumerate(blocks()):
        came = (tmp_path / f"{i}.txt").read_text().replace(name, "tutorial")
        assert missing(shown, came) == [], f"{command}\nprinted\n{came}"
