"""The page of each wait: current, complete, and its hand-written part true to the code."""

from __future__ import annotations

import json
import re

import pytest

import wait_pages
from whywait.analyze.occupancy import CATEGORIES
from whywait.analyze.phases import PHASES
from whywait.cli import main
from whywait.engines import ENGINES
from whywait.judge.vocabulary import CAUSES
from whywait.judge.what import WHAT
from whywait.lab.exam import cases


def test_pages_are_those_of_the_generator() -> None:
    kept = {p.name: p.read_text() for p in wait_pages.PAGES.glob("*.md")}
    made = wait_pages.pages()
    stale = sorted(n for n in kept.keys() | made.keys() if kept.get(n) != made.get(n))
    assert not stale, f"run: python tools/wait_pages.py ({', '.join(stale)})"


def test_every_cause_has_a_page_that_the_overview_and_the_table_of_verdicts_lead_to() -> None:
    overview = (wait_pages.PAGES / "README.md").read_text()
    verdicts = (wait_pages.DOCS / "verdicts.md").read_text()
    for cause in CAUSES:
        assert f"]({wait_pages.slug(cause)}.md)" in overview, cause
        assert f"[`{cause}`](waits/{wait_pages.slug(cause)}.md)" in verdicts, cause


def test_every_cause_is_told_in_a_paragraph_and_by_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(WHAT) == list(CAUSES)
    for cause in CAUSES:
        for name in (cause, wait_pages.slug(cause)):
            assert main(["catalog", name, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["waits"]["name"] == cause
    assert main(["catalog", "waits", "slotlimit"]) == 2
    assert "slot limit" in capsys.readouterr().err


def test_the_terminal_names_the_page_of_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(wait_pages.ROOT / "exam" / "llama-two-slots-delay")]) == 0
    said = re.findall(r"    more: (\S+)", capsys.readouterr().out)
    assert said[:2] == ["docs/waits/slot-limit.md", "docs/waits/network-latency.md"]
    assert all((wait_pages.ROOT / path).exists() for path in said)


def test_pages_name_every_case_that_puts_a_cause_in_and_every_flag_of_its_limits() -> None:
    made, parts = wait_pages.pages(), wait_pages.written()
    for case in cases():
        for cause in case.accepted if case.fault else ():
            assert f"`{case.name}`" in made[f"{wait_pages.slug(cause)}.md"], (cause, case.name)
    for cause, part in parts.items():
        for limit in part.get("limits", ()):
            for table in ENGINES.values():
                if limit in table.flags:
                    assert table.flags[limit].split(" ")[0] in made[f"{wait_pages.slug(cause)}.md"], (cause, limit)


def test_the_figures_that_move_are_keys_of_the_summary() -> None:
    known = set(re.findall(r"[a-z][a-z0-9_]+", (wait_pages.ROOT / "src/whywait/analyze/summary.py").read_text()))
    for cause, part in wait_pages.written().items():
        for figure, how in part["moves"]:
            first, *rest = figure.split(".")
            assert first in known, (cause, figure)
            assert how, (cause, figure)
            if first == "phases":
                assert rest[0] in PHASES, (cause, figure)
            if first == "occupancy":
                assert rest[0] == "shares", (cause, figure)
                assert rest[1] in CATEGORIES, (cause, figure)


def test_a_name_that_does_not_exist_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "waits.toml"
    bad.write_text(wait_pages.WRITTEN.read_text().replace('limits = ["slots"', 'limits = ["seats"').replace(
        "limits = ['slots'", "limits = ['seats'"))  # fmt: skip
    monkeypatch.setattr(wait_pages, "WRITTEN", bad)
    with pytest.raises(ValueError, match="seats"):
        wait_pages.written()
