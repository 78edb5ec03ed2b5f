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


def test_the_map_of_the_design_is_that_of_the_tree() -> None:
    text = (ROOT / "docs" / "design.md").read_text().split("## 2.")[1].split("cli -> ")[0]
    tree = text.split("```")[1]
    blocks = dict(re.findall(r"^  (\w+)/(.*?)(?=^  \w|\Z)", tree, re.DOTALL | re.MULTILINE))
    source = ROOT / "src" / "whywait"
    for path in sorted(source.rglob("*.py")):
        place, name = path.relative_to(source).parent.parts[:1], path.stem
        if name.startswith("__") or place == ("verbs",) or path.parent.name == "corpus":
            continue
        said = blocks[place[0]] if place else text
        assert re.search(rf"\b{name}\b", said), f"docs/design.md, section 2, does not name {path.relative_to(source)}"
    for place, block in blocks.items():
        for names in re.findall(r"^ {4}(\w[\w, ]*?)(?: {2,}|$)", block, re.MULTILINE):
            for name in names.split(", "):
                found = (source / place / f"{name}.py", source / place / name)
                assert any(f.exists() for f in found), f"docs/design.md names {place}/{name}, which is gone"


def test_the_examples_of_the_help_are_commands() -> None:
    assert EXAMPLES.keys() == VERBS.keys()
    for verb, (example, page) in EXAMPLES.items():
        assert parser().parse_args([verb, *shlex.split(example)]).verb == verb
        assert (ROOT / "docs" / page).exists(), page


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name)
def test_pages_have_a_title(page: Path) -> None:
    assert page.read_text().startswith("# ")
