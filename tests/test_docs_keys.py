"""docs/metrics.md defines every key of a summary; docs/methods.md says of each method where it comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whywait.analyze.occupancy import CATEGORIES
from whywait.analyze.phases import PHASES
from whywait.analyze.summary import summarize
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run
from whywait.judge.verdict import Verdict

ROOT = Path(__file__).parents[1]
METRICS = (ROOT / "docs" / "metrics.md").read_text()
#: Below these a key is a name from the data (a class, a cause, a phase), not one of ours.
NAMED = ("classes", "by_class", "by_latency", "phases", "slo", "slo_of_classes", "counts", "shares", "how", "causes",
         "notes", "decode")  # fmt: skip
RUNS = ("llama-slots-1-of-8", "vllm-long-answers", "vllm-shed-own", "llama-draft-4", "llama-buffer-4k")


def keys(value: Any, under: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for x in value:
            yield from keys(x, under)
    elif isinstance(value, dict):
        ours = under not in NAMED
        for name, x in value.items():
            if ours:
                yield name
            yield from keys(x, name if ours else "causes" if under == "causes" else "")


@pytest.mark.parametrize("name", RUNS)
def test_every_key_of_a_summary_is_defined(name: str) -> None:
    found = set(keys(summarize(Run.load(ROOT / "exam" / name))))
    assert len(found) > 90
    code = " ".join(re.findall(r"`([^`]+)`", METRICS))
    missing = sorted(k for k in found if not re.search(rf"(?<![\w.]){re.escape(k)}(?!\w)", code))
    assert not missing, f"not in docs/metrics.md: {missing}"


def test_names_from_closed_lists_and_of_a_verdict_are_defined() -> None:
    verdict = Verdict("unexplained", "x", "undecided").as_dict()
    for word in (*OUTCOMES, *PHASES, *CATEGORIES, *verdict):
        assert re.search(rf"\b{word}\b", METRICS), word


def test_every_method_has_a_source_and_a_place_in_the_code() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| what |")]
    assert len(rows) >= 35
    for row in rows:
        what, method, source, code = (x.strip() for x in row.strip("|").split(" | "))
        assert what, row
        assert method, row
        assert re.search(r"\b(19|20)\d\d\b|documentation|Standard|Specification|manual", source), row
        places = re.findall(r"`([\w/]+\.py)`", code)
        assert places, row
        for place in places:
            assert (ROOT / "src" / "whywait" / place).exists(), place


def test_the_papers_that_the_judge_and_the_statistics_name_are_among_the_methods() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    named = set()
    for path in (*(ROOT / "src/whywait/judge").glob("*.py"), ROOT / "src/whywait/analyze/stats.py"):
        named |= set(re.findall(r"\b([A-ZÖ][a-zö]+)(?: et al\.)?(?: & [A-Z]\w+)?, \*", path.read_text()))
    assert {"Robbins", "Geyer", "Sokal", "Gönen", "Lai"} <= named
    for name in named:
        assert name in text, name
