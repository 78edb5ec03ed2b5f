"""Signs of degeneration on texts that have them and texts that do not; paired over two arms."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from whywait.analyze.degeneration import (
    FIGURES,
    SIGNS,
    compared,
    compression,
    loop_share,
    loops,
    repeated_share,
    signs,
    switched,
    unfinished,
)
from whywait.analyze.tasks import changed, doubts, levels
from whywait.core.tasks import Answered, Case, Grader
from whywait.load.corpus import texts

PROSE = " ".join("".join(s).strip() for s in texts("en").sentences[:40])
LISTED = "\n".join(f"{i}. item number {i}" for i in range(1, 30))


def case(prompt: str = "What is it, please?", **more: Any) -> Case:
    return Case("c", "x", (("user", prompt),), Grader(**{"kind": "exact", "answers": ("x",), **more}))


def said(text: str, output_tokens: int = 5, **more: Any) -> Answered:
    return Answered("c", text, **{"outcome": "ok", "finish_reason": "stop", "output_tokens": output_tokens, **more})


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 78.\n" * 20,
        "First a normal start of some words. " + "and then and then " * 30,
        "no " * 40,
        "我不知道" * 10,
        PROSE[:400] + " the end of it is here and so" * 12,
    ],
)
def test_loops_are_seen(text: str) -> None:
    assert loops(text)
    assert loop_share(text) > 0.3


@pytest.mark.parametrize(
    "text", [PROSE, LISTED, "yes yes yes", "", "7 + 1 = 8\n8 + 2 = 10\n10 + 3 = 13", "a b a b a b"]
)
def test_plain_text_does_not_loop(text: str) -> None:
    assert not loops(text)


def test_loop_share_is_the_share_that_was_put_in() -> None:
    rng = random.Random(1)
    words = [f"w{rng.randrange(10_000)}" for _ in range(120)]
    for period in (1, 3, 10, 40):
        looped = [f"x{i}" for i in range(period)] * (120 // period)
        text = " ".join(words + looped)
        assert loop_share(text) == pytest.approx(len(looped) / (120 + len(looped)), abs=0.01)
    assert loop_share(" ".join(words)) == 0


def test_repetition_and_compression_order_texts() -> None:
    assert repeated_share("so it is") is None
    assert compression("short") is None
    assert repeated_share("on and on and " * 20) > 0.9
    assert repeated_share(PROSE) < 0.3 < compression(PROSE)
    assert compression("on and on and " * 40) < 0.1


def test_a_thought_that_never_ends() -> None:
    assert unfinished(said("", thinking="hm", finish_reason="length"))
    assert unfinished(said("", thinking="hm", unclosed=True))
    assert not unfinished(said("yes", thinking="hm", finish_reason="length"))
    assert not unfinished(said("", finish_reason="length"))


@pytest.mark.parametrize(
    ("prompt", "language", "text", "found"),
    [
        ("What is the capital?", "", "The capital is Paris", 0),
        ("What is the capital?", "", "Столица это Париж", 1),
        ("Какая столица у страны?", "", "The capital is Paris", 1),
        ("Write it in Russian, please", "ru", "Столица это Париж", 0),
        ("日本の首都はどこですか", "ja", "日本の首都は東京です。", 0),
        ("日本の首都はどこですか", "ja", "The capital is Tokyo", 1),
        ("What is 2 + 2, please?", "", "4", None),
        ("¿Cuál es la capital?", "es", "La capital es Madrid", 0),
    ],
)
def test_a_change_of_script(prompt: str, language: str, text: str, found: float | None) -> None:
    assert switched(case(prompt, language=language), said(text)) == found


def test_each_answer_has_every_sign_or_none() -> None:
    full = signs(case(kind="json", answers=({},)), said('{"a": 1', output_tokens=8))
    assert set(full) == {*SIGNS, *FIGURES}
    assert full["invalid_json"] == 1.0
    assert full["length"] == pytest.approx(np.log(8))
    assert signs(case(), said("ok"))["invalid_json"] is None
    assert signs(case(), said(""))["empty"] == 1.0
    assert signs(case(), said("a\ufffdb"))["broken"] == 1.0
    assert signs(case(), said("so", finish_reason="length"))["cut"] == 1.0
    assert set(signs(case(), said("x", outcome="timeout")).values()) == {None}
    assert set(signs(case(), said("", generated=False)).values()) == {None}


def rows(n: int, looping: int, longer: float) -> list[dict[str, Any]]:
    """B loops in the first ``looping`` answers and is ``longer`` times as long."""
    rng = random.Random(2)
    out = []
    for i in range(n):
        words = [f"w{rng.randrange(500)}" for _ in range(40)]
        tokens = rng.randint(30, 80)
        a, b = " ".join(words), "on and on " * 30 if i < looping else " ".join(words)
        out.append({"id": str(i), "category": "x" if i % 2 else "y", "level": i % 3, "group": "",
                    "a": {"right": True, "why": "", "outcome": "ok", "signs": signs(case(), said(a, tokens))},
                    "b": {"right": i >= looping, "why": "another text", "outcome": "ok",
                          "signs": signs(case(), said(b, max(1, round(tokens * longer))))}})  # fmt: skip
    return out


def test_what_b_does_worse_is_found_and_nothing_else() -> None:
    found = {f.name: f for f in compared(rows(80, 20, 1.0))}
    looped = found[SIGNS["loops"]]
    assert (looped.a, looped.b, looped.better) == (0.0, 0.25, 20)
    assert looped.p < 1e-4
    assert looped.low > 0
    assert found[SIGNS["empty"]].p is None  # nobody showed it: nothing is asked
    assert SIGNS["invalid_json"] not in found  # no case asked for JSON
    assert found[FIGURES["length"]].drop == 0.0
    assert found[FIGURES["repeated"]].p < 0.01


def test_length_drift_is_a_ratio() -> None:
    found = {f.name: f for f in compared(rows(60, 0, 1.5))}[FIGURES["length"]]
    assert np.exp(found.drop) == pytest.approx(1.5, rel=0.02)
    assert 1.4 < np.exp(found.low) < np.exp(found.high) < 1.6


def test_levels_and_cases_that_changed() -> None:
    table = levels(rows(60, 12, 1.0))
    assert {(t["category"], t["level"]) for t in table} == {(c, k) for c in "xy" for k in (1, 2)}
    assert all(t["n"] == 10 and t["a"] == 1.0 and t["b"] == 0.8 and t["tells"] for t in table)
    moved = changed(rows(60, 12, 1.0))
    assert [m["id"] for m in moved["lost"]] == ["0", "1", "2", "3", "4"]
    assert moved["won"] == []


def test_what_tells_nothing_is_doubted() -> None:
    quiet = rows(120, 20, 1.0)
    assert doubts(quiet) == []
    dull = [d["what"] for d in doubts(rows(20, 0, 1.0))]
    assert any("hardly a loss could show in y (100% and 100% right), x" in d for d in dull)
    assert any("20 tasks are few" in d for d in dull)
    quiet[0]["b"]["outcome"] = "timeout"
    assert "1 of 120 tasks of arm B were not answered" in doubts(quiet)[0]["what"]
