"""The page of a bill: it says what the bill says, stands alone, and keeps every foreign word text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.analysis_runs import S, join, make_run
from tests.bill_runs import meters, service
from tests.pages import HOSTILE, Page
from whywait import deciding
from whywait.analyze.bill import Ask
from whywait.cli import main
from whywait.core.run import Run
from whywait.physics.prices import Offer
from whywait.report.bill import headline
from whywait.report.bill_html import render

EUR = Offer("hour", "on demand", "EUR", "2026-11", "a list", per_device_hour=3.6)


def two(**more: Any) -> Run:
    short = (-3, 43, 0.1)
    parts = [service(n=40, readings=meters(w, seconds=short), **more) for w in (300.0, 100.0)]
    return join(parts)


def mixed(i: int, r: dict[str, Any]) -> dict[str, Any]:
    return {**r, "class": ("chat", "rag")[i % 2], "prompt_tokens": (100, 3000)[i % 2]}


def test_the_page_says_what_the_bill_says() -> None:
    found = deciding.bill(two(change=mixed), Ask((EUR,)))
    page = Page(render(found))
    text = " ".join(" ".join(words) for words in page.words.values())
    assert page.words["h1"] == [found["headline"]]
    assert found["headline"].startswith("1,000 good requests cost 100 kJ and 1.00 EUR (hour, on demand)")
    assert "where it is least" in found["headline"]
    for word in ("300", "2026-11", "a list", "EUR", "chat", "rag", "up to 128",
                 "shared by device time", "the host", "Undecided", "All load points"):  # fmt: skip
        assert word in text, word
    names = {name for name, _ in page.elements}
    assert "script" not in names
    assert not any(
        "src" in attrs or attrs.get("href", "#")[0] != "#" for name, attrs in page.elements if name != "link"
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_what_others_wrote_stays_text(text: str) -> None:
    run = two(change=lambda i, r: {**mixed(i, r), "class": (text, "b")[i % 2]})
    point = run.points.replace(label=[text] * len(run.points))
    run = dataclasses.replace(run, points=point, manifest=dataclasses.replace(run.manifest, engine={
        "devices": 1, "devices_how": text}))  # fmt: skip
    offer = dataclasses.replace(EUR, name=text, source=text, note=text)
    found = {**deciding.bill(run, Ask((offer,))), "run": text}
    page = Page(render(found))
    names = {name for name, _ in page.elements}
    assert not names & {"script", "img", "iframe"}
    assert not any(key.startswith("on") for _, attrs in page.elements for key in attrs)
    assert "alert(1)" not in text or any("alert(1)" in w for words in page.words.values() for w in words)


def test_a_page_of_what_is_not_known_and_of_a_watched_service() -> None:
    dark = deciding.bill(service())
    assert dark["headline"].startswith("What 1,000 good requests cost is not known: no energy is known")
    assert "no price" in render(dark)
    point = {"start_ns": 10 * S, "end_ns": 80 * S, "steady_start_ns": 10 * S, "steady_end_ns": 80 * S, "planned": 0}
    made = [{"asked_ns": t * S, "source": "metrics/0", "name": "output_tokens_total", "value": 50.0 * t}
            for t in range(9, 83)]  # fmt: skip
    run = make_run([], readings=[*meters(300.0), *made], points=[point], engine={"devices": 1}, made_by="measured")
    text = render(deciding.bill(run))
    assert "by the engine&#x27;s counters, goodput unknown" in text
    assert "good: ended well" not in text
    none = make_run([], readings=[], points=[], made_by="measured")
    assert "no load point" in headline(deciding.bill(none))
    render(deciding.bill(none))


def test_the_verb_and_the_python_entry_give_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = two(machine={"gpus": ["NVIDIA H200"]}).save(tmp_path / "run")
    out = tmp_path / "bill.html"
    assert main(["bill", str(path), "--html", str(out)]) == 0
    said = capsys.readouterr().out
    found = deciding.bill(path)
    assert found["headline"].split()[0] in said
    assert [m["name"] for m in found["points"][0]["money"]]  # the shipped offers of the machine
    assert out.read_text() == render({**found, "run": str(path)})
    assert main(["bill", str(path), "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
