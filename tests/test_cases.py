"""Tasks: each generated answer is found a second time from the text alone, each hand-written one has a right and a
wrong answer; what is wrong with a user's own file is said by line and field. Asking them keeps every outcome."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.answering import Answering
from whywait.analyze.degeneration import unfinished
from whywait.analyze.grade import grade, grade_text
from whywait.analyze.grade_checks import CHECKS
from whywait.core.tasks import Case, Grader
from whywait.errors import MissingExtra, UsageError
from whywait.load.asking import GIVE_UP, ask_all, split_thinking
from whywait.load.case_sets import BOOKS, MADE, NAMES, SETS, book
from whywait.load.cases import case_of, cases_of
from whywait.load.preflight import find
from whywait.net.endpoint import parse_url

# a second rule for every generated set: the answer from the words of the last message alone


def again(case: Case) -> Any:
    text = case.messages[-1][1]
    return {"chains": sums, "counting": sums, "tracking": holder, "walks": place, "needle": code, "records": record}[
        case.category
    ](text)


def sums(text: str) -> int:
    value = 0
    for word, n in re.findall(r"(Start with|Add|Subtract|Multiply by) (\d+)\.", text):
        value = {"Start with": lambda v, k: k, "Add": int.__add__, "Subtract": int.__sub__, "Multiply by": int.__mul__}[
            word
        ](value, int(n))
    return value


def holder(text: str) -> str:
    thing = re.search(r"Who has the (.+) now\?", text)[1]
    who = re.search(rf"(\w+) has the {thing}\.", text)[1]
    for a, b in re.findall(r"(\w+) and (\w+) swap\.", text):
        who = b if who == a else a if who == b else who
    return who


def place(text: str) -> str:
    total = dict.fromkeys(("north", "south", "east", "west"), 0)
    for far, way in re.findall(r"Go (\d) (\w+)\.", text):
        total[way] += int(far)
    return f"({total['east'] - total['west']}, {total['north'] - total['south']})"


def code(text: str) -> int:
    city = re.search(r"What is the door code of the (\w+) office\?", text)[1]
    found = re.findall(rf"The door code of the {city} office is (\d+)\.", text)
    assert len(found) == 1
    return int(found[0])


def record(text: str) -> dict[str, Any]:
    said = {
        "name": r"is called (\w+)\.", "city": r"lives in (\w+)\.", "age": r"age is (\d+)\.",
        "thing": r"bought a ([\w ]+)\.", "price": r"costs (\d+) euros", "paid": r"It is (not )?paid",
    }  # fmt: skip
    out: dict[str, Any] = {}
    for key, pattern in said.items():
        if found := re.search(pattern, text):
            out[key] = not found[1] if key == "paid" else int(found[1]) if found[1].isdigit() else found[1]
    return out


@pytest.mark.parametrize("name", list(MADE))
def test_generated_answers_are_right(name: str) -> None:
    cases = cases_of(name, seed=3, n=200, context=60_000)
    assert len(cases) == 200
    for case in cases:
        assert again(case) == (case.grader.answers[0]), case.messages[-1][1][-300:]
    assert len({c.level for c in cases}) > 5
    assert len({c.messages[-1][1] for c in cases if c.level == max(x.level for x in cases)}) > 5


@pytest.mark.parametrize("name", ["chains", "counting", "tracking", "walks", "records"])
def test_the_worked_examples_are_right_too(name: str) -> None:
    for case in cases_of(name, n=30):
        turns = case.messages[1:-1]
        assert turns
        for (_, asked), (role, said) in zip(turns[::2], turns[1::2], strict=True):
            shown = Case("x", name, (("user", asked),), case.grader)
            assert role == "assistant"
            answer = again(shown)
            right = Grader(case.grader.kind, (answer,), checks=case.grader.checks)
            assert grade_text(right, said).right, (asked, said)


def test_same_seed_same_cases_and_few_are_the_first_of_many() -> None:
    assert cases_of("chains,walks", 5, 20) == cases_of("chains,walks", 5, 20)
    assert cases_of("chains", 5, 20) == cases_of("chains", 5, 40)[:20]
    assert cases_of("chains", 5, 20) != cases_of("chains", 6, 20)
    assert len({c.id for c in cases_of("all", 1, 30)}) == len(cases_of("all", 1, 30))


def test_levels_by_name_and_needles_that_fit() -> None:
    assert {c.level for c in cases_of("counting:2-4", n=9)} == {2, 3, 4}
    assert {c.level for c in cases_of("counting:3", n=4)} == {3}
    assert max(c.level for c in cases_of("needle", n=40, context=2048)) == 1000
    assert max(c.level for c in cases_of("needle", n=40, context=8192)) == 4000
    assert {c.level for c in cases_of("needle:1000-4000", n=6)} == {1000, 2000, 4000}  # asked for: not left out
    with pytest.raises(UsageError, match="no level in 5-5"):
        cases_of("counting:5")


@pytest.mark.parametrize("name", BOOKS)
def test_hand_written_cases_tell_right_from_wrong(name: str) -> None:
    rows = book(name)
    assert len(rows) >= 16
    for case, row in zip(cases_of(name, n=0), rows, strict=True):
        assert set(case.grader.checks) <= set(CHECKS)
        assert grade_text(case.grader, row["right"]).right, row
        assert not grade_text(case.grader, row["wrong"]).right, row
    assert sum(len(book(b)) for b in BOOKS) >= 70


# a user's own file


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    lines = [
        {"prompt": "2 + 2?", "answer": 4, "grader": "numeric"},
        {
            "messages": [{"role": "user", "content": "hi"}],
            "grader": "regex",
            "pattern": "(?i)hello",
            "category": "talk",
        },
        {"prompt": "A or B?", "answer": "B", "grader": "choice", "system": "Be short.", "id": 7, "max_tokens": 9},
        {"prompt": "yes?", "answer": "yes", "grader": "choice", "options": ["yes", "no"], "group": "doc-1", "level": 2},
        {"prompt": "pi?", "answer": ["3.14", 3.1416], "grader": "numeric", "tolerance": 0.01, "language": "de"},
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\n\n".join(json.dumps(x) for x in lines) + "\n")
    cases = cases_of(f"{path},counting", n=3)
    own = [c for c in cases if c.category != "counting"]
    assert [c.category for c in own] == ["own", "talk", "own", "own"]  # the fourth of its category was one too many
    assert own[0].grader.answers == (4.0,)
    assert own[2].messages[0] == ("system", "Be short.")
    assert (own[2].id, own[2].max_tokens) == ("7", 9)
    assert (own[3].group, own[3].level) == ("doc-1", 2)
    assert len(cases) == 7
    assert cases_of(str(path), n=0)[4].grader.tolerance == 0.01


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "it is not JSON"),
        ("[1]", "not a JSON object"),
        ('{"grader": "exact", "answer": "x"}', "field 'prompt': give either prompt or messages"),
        ('{"prompt": " ", "grader": "exact", "answer": "x"}', "field 'prompt': it is empty"),
        ('{"prompt": "x", "answer": "x"}', "field 'grader': it is missing"),
        ('{"prompt": "x", "answer": "x", "grader": "vibes"}', "no grader 'vibes'"),
        ('{"prompt": "x", "grader": "numeric"}', "field 'answer': the grader numeric needs it"),
        ('{"prompt": "x", "grader": "numeric", "answer": "many"}', "field 'answer': 'many' is not a number"),
        ('{"prompt": "x", "grader": "exact", "answer": []}', "field 'answer': the list is empty"),
        ('{"prompt": "x", "grader": "exact", "answer": {}}', "field 'answer': it is not a text"),
        ('{"prompt": "x", "grader": "regex"}', "field 'pattern': the grader regex needs it"),
        ('{"prompt": "x", "grader": "regex", "pattern": "("}', "field 'pattern': it is no regular expression"),
        ('{"prompt": "x", "grader": "choice", "answer": "C", "options": ["A", "B"]}', "none of the options"),
        ('{"prompt": "x", "grader": "exact", "answer": "x", "max_tokens": 0}', "field 'max_tokens': it is not above 0"),
        ('{"prompt": "x", "grader": "exact", "answer": "x", "max_tokens": "9"}', "field 'max_tokens'"),
        ('{"prompt": "x", "grader": "exact", "answer": "x", "tolerance": -1}', "field 'tolerance'"),
        ('{"prompt": "x", "grader": "exact", "answer": "x", "categroy": "y"}', "field 'categroy': there is no such"),
        ('{"messages": [{"role": "robot", "content": "x"}], "grader": "exact", "answer": "x"}', "field 'messages'"),
        ('{"prompt": "x", "grader": "json_schema", "schema": {"type": "thing"}}', "field 'schema': it is no"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_line_is_said(line: str, said: str, tmp_path: Path) -> None:
    if "json_schema" in line:
        pytest.importorskip("jsonschema")
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "1?", "answer": 1, "grader": "numeric"}\n' + line + "\n")
    with pytest.raises(UsageError, match=re.escape(said)) as found:
        cases_of(str(path))
    assert "own.jsonl, line 2" in found.value.message
    assert found.value.hint


def test_what_is_no_file_or_no_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no set of tasks or file"):
        cases_of("nosuch")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        cases_of(str(tmp_path / "b.jsonl"))
    (tmp_path / "e.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="no case"):
        cases_of(str(tmp_path / "e.jsonl"))
    twice = '{"prompt": "x", "answer": "x", "grader": "exact", "id": "a"}\n'
    (tmp_path / "t.jsonl").write_text(twice * 2)
    with pytest.raises(UsageError, match="two cases have the id 'a'"):
        cases_of(str(tmp_path / "t.jsonl"))


def test_a_schema_without_its_extra_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def none(name: str, *more: Any) -> Any:
        if name.startswith("jsonschema"):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", none)
    with pytest.raises(MissingExtra, match="needs the extra 'quality'") as found:
        case_of('{"prompt": "x", "grader": "json_schema", "schema": {"type": "object"}}', 1, "own.jsonl")
    assert "pip install 'whywait[quality]'" in found.value.hint


# asking


def test_right_answers_are_counted_right_through_the_real_client() -> None:
    """A service that solves the tasks by the second rule, except every fifth: its accuracy is known."""
    cases = cases_of("chains,tracking,walks,needle,records", 2, 15)
    wrong = {c.messages[-1][1] for c in cases[::5]}

    def say(messages: list[dict[str, str]]) -> str:
        text = messages[-1]["content"]
        case = next(c for c in cases if c.messages[-1][1] == text)
        right = again(case)
        if text in wrong:
            right = {"numeric": 999_999, "choice": next(n for n in NAMES if n != right), "exact": "(77, 77)",
                     "json": {}}[case.grader.kind]  # fmt: skip
        said = json.dumps(right) if case.grader.kind == "json" else f"so, 12 and 7.\nAnswer: {right}"
        return f"<think>Is it 3? Or Ann?</think>{said}"

    with Answering(say) as service:
        got = ask_all(find(parse_url(service.url), None), cases, 3)
    assert [a.case for a in got] == [c.id for c in cases]
    assert 1 < service.most <= 3
    rights = [grade(c, a).right for c, a in zip(cases, got, strict=True)]
    assert sum(rights) == len(cases) - len(wrong)
    assert all(a.thinking == "Is it 3? Or Ann?" and a.output_tokens and a.took_ns > 0 for a in got)
    assert {b["temperature"] for b in service.bodies} == {0}


def test_every_outcome_stays() -> None:
    cases = [Case(str(i), "x", (("user", str(i)),), Grader("exact", ("yes",))) for i in range(5)]
    told: list[str | dict[str, Any]] = [
        "yes",
        {"status": 500},
        {"content": "yes", "cut": True},
        {"content": "", "reasoning": "hm", "finish": "length"},
        {"content": "<think>I wonder", "finish": "length"},
    ]
    with Answering(lambda m: told[int(m[-1]["content"])]) as service:
        got = ask_all(find(parse_url(service.url), None), cases, 2)
    assert [a.outcome for a in got] == ["ok", "http_error", "truncated", "ok", "ok"]
    assert [grade(c, a).right for c, a in zip(cases, got, strict=True)] == [True, False, False, False, False]
    assert [unfinished(a) for a in got] == [False, False, False, True, True]


def test_a_service_that_is_gone_is_not_hammered() -> None:
    cases = [Case(str(i), "x", (("user", str(i)),), Grader("exact", ("yes",))) for i in range(GIVE_UP * 3)]
    with Answering(lambda _: {"status": 500}) as service:
        got = ask_all(find(parse_url(service.url), None), cases, 2)
        assert GIVE_UP <= len(service.bodies) <= GIVE_UP + 2
    assert len(got) == len(cases)
    assert {a.outcome for a in got} == {"http_error", "never_sent"}


@pytest.mark.parametrize(
    ("text", "thinking", "answer", "unclosed"),
    [
        ("yes", "", "yes", False),
        ("<think>a</think>yes", "a", "yes", False),
        ("<think>a", "a", "", True),
        ("a</think>yes", "a", "yes", False),
        ("x<think>a</think>y<THINK>b</THINK>z", "a\nb", "xyz", False),
        ("<thinking>a</thinking>\n\nyes", "a", "yes", False),
    ],
)
def test_thoughts_in_tags(text: str, thinking: str, answer: str, unclosed: bool) -> None:
    assert split_thinking(text) == (thinking, answer, unclosed)


def test_all_sets_are_there() -> None:
    assert {c.category for c in cases_of("all", n=1)} == set(SETS)
