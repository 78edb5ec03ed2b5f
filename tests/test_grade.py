"""Graders on constructed answers whose grade is known."""

from __future__ import annotations

import json

import pytest

from tests.graded_pairs import TRICKY, Pair, numeric_pairs
from whywait.analyze.grade import grade, grade_text, json_in
from whywait.analyze.grade_checks import CHECKS, failed_check, script_shares
from whywait.core.tasks import Answered, Case, Grader


@pytest.mark.parametrize("pair", TRICKY, ids=lambda p: f"{p[0].kind}-{p[0].answers}-{p[1][:30]!r}")
def test_tricky_answers(pair: Pair) -> None:
    grader, text, right = pair
    assert grade_text(grader, text).right is right, grade_text(grader, text)


def test_numbers_in_every_wording_and_writing() -> None:
    pairs = list(numeric_pairs())
    wrong = [(g.answers, t, right, grade_text(g, t)) for g, t, right in pairs if grade_text(g, t).right is not right]
    assert len(pairs) > 300
    assert not wrong, wrong[:5]


def test_accuracy_of_a_constructed_set_is_what_was_put_in() -> None:
    pairs = [*numeric_pairs(), *TRICKY]
    put_in = sum(right for _, _, right in pairs) / len(pairs)
    assert sum(grade_text(g, t).right for g, t, _ in pairs) / len(pairs) == put_in
    assert 0.3 < put_in < 0.7


def test_an_answer_that_was_cut_off_counts_only_when_it_is_clear() -> None:
    five = Grader("numeric", (5,))
    assert grade_text(five, "4 + 1 = 5\nAnswer: 5\nAnd then", cut=True).right
    assert not grade_text(five, "First I add 4 and 1, which is 5", cut=True).right
    assert grade_text(five, "It is 5, that is 5 and so", cut=True).right
    code = Grader("numeric", (8710,))
    assert grade_text(code, "The code is 8710.\nThe code: 871", cut=True).right
    assert not grade_text(code, "The code is 87", cut=True).right


def test_what_is_no_answer_is_wrong_whatever_it_says() -> None:
    case = Case("c", "x", (("user", "?"),), Grader("numeric", (5,)))
    assert grade(case, Answered("c", "Answer: 5", outcome="ok")).right
    for bad, why in (
        (Answered("c", "Answer: 5", outcome="truncated"), "truncated"),
        (Answered("c", "", outcome="ok"), "empty"),
        (Answered("c", "Answer: 5", outcome="ok", unclosed=True), "the thinking never ended"),
        (Answered("c"), "never_sent"),
    ):
        assert grade(case, bad) == (False, "", why)


def test_json_by_a_schema() -> None:
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer", "minimum": 0}}}
    grader = Grader("json_schema", schema=schema)
    assert grade_text(grader, '```\n{"age": 4}\n```').right
    found = grade_text(grader, '{"age": -4}')
    assert not found.right
    assert "against the schema" in found.why
    assert not grade_text(grader, "no").right
    both = Grader("json_schema", ({"age": 4},), schema=schema)
    assert not grade_text(both, '{"age": 5}').right
    assert grade_text(both, json.dumps({"age": 4})).right


@pytest.mark.parametrize(
    "text",
    ["answer" + " " * 40_000, "Answer:\n" * 10_000, "#### " * 20_000, "1" * 40_000, "[{" * 20_000, "* answer " * 10_000,
     "Answer: " + ": " * 10_000, "(B) or " * 10_000, "\\boxed{" * 5_000],
)  # fmt: skip
def test_answers_that_went_astray_take_no_time(text: str) -> None:
    """Quadratic searches would take hours here; there is no clock in this test."""
    for grader in (Grader("numeric", (5,)), Grader("choice", ("B",)), Grader("exact", ("x",)), Grader("json", ({},))):
        grade_text(grader, text)


def test_json_is_found_and_nonsense_is_not() -> None:
    assert json_in("5") == (5, True)
    assert json_in("about 5") == (None, False)
    assert json_in('x [1, 2] y {"a"') == ([1, 2], True)
    assert json_in("[" * 5000)[1] is False


@pytest.mark.parametrize(
    ("name", "value", "good", "bad"),
    [
        ("words", 2, "Hello there!", "Hello"),
        ("words_max", 3, "don't go out", "do not go out"),
        ("words_min", 2, "a b", "a"),
        ("sentences", 2, "One. Two!", "One, two."),
        ("lines", 2, "a\n\nb", "a"),
        ("items", 3, "a, b, c.", "a, b"),
        ("bullets", 2, "- a\n- b", "- a\nb"),
        ("numbered", 2, "1. a\n2. b", "1. a\n3. b"),
        ("upper", True, "ABC 1", "Abc"),
        ("lower", True, "abc", "Abc"),
        ("times", {"rain": 2}, "Rain rain", "rain"),
        ("in_order", ["a", "b"], "a then b", "b then a"),
        ("contains", ["a", "b"], "b a", "a"),
        ("contains_any", ["x", "b"], "b", "a"),
        ("absent", "hot", "cold", "Hot"),
        ("starts", "Listen", '"Listen to me', "I listen"),
        ("ends", "!", "Go!", "Go."),
        ("is", ["yes"], "Yes.", "yes sir"),
        ("full", "[a-c]+", "abc", "abd"),
        ("script", "cyrillic", "Привет", "Privet"),
    ],
)
def test_each_check_can_hold_and_fail(name: str, value: object, good: str, bad: str) -> None:
    assert failed_check({name: value}, good) == ""
    assert failed_check({name: value}, bad) == name


def test_every_check_is_tested_above() -> None:
    marks = next(m for m in test_each_check_can_hold_and_fail.pytestmark if m.name == "parametrize")
    assert {row[0] for row in marks.args[1]} == set(CHECKS)


def test_scripts() -> None:
    assert script_shares("Привет you")["cyrillic"] == pytest.approx(6 / 9)
    assert set(script_shares("東京はどこ")) == {"kana"}
    assert set(script_shares("北京")) == {"han"}
    assert script_shares("123 !") == {}
