"""Documentation that a test can fail."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import run_format
from whywait.analyze.phases import PHASES
from whywait.cli import EXAMPLES, VERBS, parser
from whywait.core.columns import OUTCOMES
from whywait.core.run import Manifest

ROOT = Path(__file__).parents[1]


def test_run_format_is_that_of_the_registry() -> None:
    assert run_format.PAGE.read_text() == run_format.page(), "run: python tools/run_format.py"


def test_metrics_name_every_outcome_and_phase_and_their_version() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    for word in (*OUTCOMES, *PHASES):
        assert word in text, word
    assert f"definitions {Manifest().definitions}" in text


def test_readme_links_and_paths_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
    for path in re.findall(r"`((?:src|docs|examples|tools|benchmarks)/[^`*…]*)`", text):
        assert (ROOT / path).exists(), path


def test_readme_verbs_exist() -> None:
    text = (ROOT / "README.md").read_text()
    code = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    for verb in re.findall(r"^whywait (\w+) ", code, re.MULTILINE):
        assert verb in VERBS, verb


def test_the_examples_of_the_help_are_commands() -> None:
    assert EXAMPLES.keys() == VERBS.keys()
    for verb, (example, page) in EXAMPLES.items():
        assert parser().parse_args([verb, *shlex.split(example)]).verb == verb
        assert (ROOT / "docs" / page).exists(), page


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name)
def test_pages_have_a_title(page: Path) -> None:
    assert page.read_text().startswith("# ")
