"""Examples print what their golden file says."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

import golden


@pytest.mark.parametrize("example", golden.EXAMPLES, ids=lambda p: p.name)
def test_an_example_prints_what_it_did(example: Path) -> None:
    kept = (example / "expected.txt").read_text().splitlines()
    found = golden.output(example).splitlines()
    changed = "\n".join(difflib.unified_diff(kept, found, "expected.txt", "now", lineterm="", n=1))
    assert not changed, f"if that is meant: python tools/golden.py\n{changed}"


def test_the_commands_of_a_script_are_whole() -> None:
    script = "# whywait no\nset -e\nwhywait a --b \\\n  'c d'\n  whywait not-this\nwhywait e\n"
    assert golden.commands(script) == [["a", "--b", "c d"], ["e"]]


def test_a_difference_is_seen_and_a_duration_is_not() -> None:
    one = "modelled, 4 draws, 2.2 s\nTTFT p50 20 ms   \n"
    assert golden.masked(one) == golden.masked("modelled, 4 draws, 13 s\nTTFT p50 20 ms\n")
    assert golden.masked(one) != golden.masked(one.replace("20 ms", "21 ms"))
