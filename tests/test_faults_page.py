"""docs/faults.md has all cells of the matrix, and the tests it names are there."""

from __future__ import annotations

import ast
import itertools
import re
from functools import cache
from pathlib import Path

from whywait.convert import results_file
from whywait.core import bounded, parquet, timetable
from whywait.load import link, relay, shards
from whywait.net import coding, dialect, wire
from whywait.probe import pages, promql

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "faults.md").read_text(encoding="utf-8")
WHAT = ("client", "sampler", "worker", "engine", "metrics source", "disk")
HOW = ("killed", "stalled", "slow", "garbage")
ROW = re.compile(r"^\| ([a-z ]+) \| (\w+) \| (.+) \| (.*) \|$", re.MULTILINE)


@cache
def _tests(file: str) -> frozenset[str]:
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return frozenset(n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def test_every_cell_is_there_once_with_a_test_or_a_reason() -> None:
    rows = [r for r in ROW.findall(PAGE) if r[0] in WHAT]
    assert [(what, how) for what, how, _, _ in rows] == list(itertools.product(WHAT, HOW))
    for what, how, seen, named in rows:
        assert len(seen) > 20, (what, how)
        tests = re.findall(r"`([\w.:]+)`", named)
        assert tests or named.startswith("no meaning: "), (what, how)
        for test in tests:
            file, _, name = test.partition("::")
            assert (HERE / file).exists(), test
            assert not name or name in _tests(file), test


def test_bounds_are_those_of_the_code() -> None:
    mib = bounded.MIB
    assert wire.MAX_HEAD == wire.MAX_SAID == 1 * mib
    assert wire.MAX_EVENT == coding.MAX_PIECE == 16 * mib
    assert wire.MAX_BODY == promql.MAX_BYTES == bounded.MOST_TEXT == 64 * mib
    assert (wire.MAX_EVENTS, wire.MAX_ANSWER) == (1_048_576, 1 << 30)
    assert wire.MAX_HELD == dialect.MOST_PARSED == results_file.DOCUMENT_BYTES == 256 * mib
    assert (8 * mib, 60, 30) == (pages.MAX_BYTES, promql.TIMEOUT_S, shards.SILENT_S)
    assert (16 * mib, 30, 20) == (shards.MOST_WORD, link.TELL_S, relay.SILENT_S)
    assert (results_file.UNFOLDS, parquet.MOST_ROWS, timetable.MOST) == (200, 40, 5_000_000)
