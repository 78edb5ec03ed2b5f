"""The cost of a report by the user's own prices and watts: the flags of ``bill``, the same figures."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from tests.pages import checked, sweep
from whywait import app
from whywait.cli import main
from whywait.units import number

OWN = [
    "--price-per-hour",
    "2.5",
    "--currency",
    "EUR",
    "--devices",
    "2",
    "--power-model",
    "idle_w=70,busy_w=600,host_w=0",
]
BOOK = """
[[offers]]
name = "ours"
terms = "reserved"
per_device_hour = 7
currency = "CHF"
date = "2026-11-01"
source = "the contract"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return app.keep(sweep(slo={"ttft_ms": 200.0}), tmp_path / "run").directory


def page_by(folder: Path, *flags: str) -> str:
    file = folder.parent / "r.html"
    assert main(["show", str(folder), "--html", str(file), *flags]) == 0
    text = file.read_text()
    checked(text)
    return html.unescape(text)


def test_the_report_has_the_figures_of_the_bill(folder, capsys):
    page = page_by(folder, *OWN)
    capsys.readouterr()
    assert main(["bill", str(folder), *OWN, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["points"][0]
    assert "EUR per 1,000 good requests (given" in page
    assert number(1000 * first["money"][0]["per_good_request"]["value"]) in page
    assert first["energy"]["how"] == "modelled"
    assert number(first["energy"]["joules"]) in page
    assert "Energy: modelled, no meter was read." in page


def test_without_them_it_says_what_would_price_it(folder):
    page = page_by(folder)
    assert "EUR" not in page
    said = re.sub(r"</?span[^>]*>", "", page)  # flags are kept whole
    assert "whywait show RUN --html FILE --price-per-hour X --currency USD" in said


def test_a_price_book_of_ones_own(folder, tmp_path):
    (tmp_path / "book.toml").write_text(BOOK)
    page = page_by(folder, "--price", str(tmp_path / "book.toml"), "--devices", "2")
    assert "CHF per 1,000 good requests (ours, 2026-11-01)" in page
    assert "the contract" in page


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--price-per-hour", "2", "--currency", "EUR"], "--price-per-hour: the text of show has no cost"),
     (["--power-model", "idle_w=70,busy_w=600"], "--power-model: the text of show has no cost"),
     (["--html", "r.html", "--price-per-hour", "2"], "in which currency?"),
     (["--html", "r.html", "--price", "none.toml"], "see docs/bill.md")],
)  # fmt: skip
def test_mistakes(folder, flags, said, capsys):
    report = folder.parent / "r.html"
    assert main(["show", str(folder), *(str(report) if f == "r.html" else f for f in flags)]) == 2
    assert said in capsys.readouterr().err
    assert not report.exists()


def test_a_folder_that_is_no_single_run_has_no_cost(tmp_path, capsys):
    (tmp_path / "trial.json").write_text("{}")
    assert main(["show", str(tmp_path), "--html", "r.html", "--devices", "2"]) == 2
    assert "is no single run" in capsys.readouterr().err
