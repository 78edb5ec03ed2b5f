"""A warm cache: the beginnings that requests share are sent once before the point, and not every prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from whywait.core.schedule import Lengths, RequestClass, Schedule, Workload
from whywait.load import warming
from whywait.load.prompts import Prompter
from whywait.load.recipe import closed_schedule
from whywait.load.turns import Message, Turns, languages_of

L = Lengths.parse
GROUPS = Workload((RequestClass(prompt_tokens=L("uniform(200,400)"), shared=0.5, groups=5),), cache="warm")


def sent(turns: Turns) -> tuple[list[list[Message]], warming.Warmed]:
    asked: list[list[Message]] = []
    return asked, warming.warm(turns, lambda messages, row: asked.append(messages) is None)


def of(schedule: Schedule, workload: Workload, salt: str = "a") -> Turns:
    return Turns(Prompter(cache="warm", salt=salt), schedule, languages_of(workload))


def with_blocks(*blocks: tuple[int, ...]) -> Schedule:
    n = len(blocks)
    lengths = np.array([64 * len(b) for b in blocks])
    return dataclasses.replace(closed_schedule(Workload(), n), prompt_tokens=lengths, blocks=blocks, block_tokens=64)


def test_each_system_prompt_once_and_at_its_longest() -> None:
    schedule = closed_schedule(GROUPS, 60)
    turns = of(schedule, GROUPS)
    asked, warmed = sent(turns)
    assert (warmed.answered, warmed.beginnings, warmed.share) == (5, 5, 1.0)
    systems = [m[0].content for m in asked]
    assert all([m.role for m in messages] == ["system", "user"] for messages in asked)
    for row in range(60):
        messages = turns.messages(row)
        assert any(s.startswith(messages[0].content) for s in systems)
        assert not any(messages[1].content == m[1].content for m in asked)
    assert str(warmed) == "cache warmed: 5 shared beginnings were sent once; they are in no figure"


def test_what_is_not_shared_is_new_to_the_service_in_every_run() -> None:
    schedule = closed_schedule(GROUPS, 40)
    first, again = of(schedule, GROUPS, "a"), of(schedule, GROUPS, "b")
    users = {turns.messages(row)[1].content[:9] for turns in (first, again) for row in range(40)}
    assert len(users) == 80
    assert all(first.messages(row)[0] == again.messages(row)[0] for row in range(40))


def test_the_longest_shared_runs_of_blocks_and_no_others() -> None:
    schedule = with_blocks((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 9), (7, 8), (7, 6), (11, 12))
    found = {(names, count) for names, count, _ in warming.shared_blocks(schedule)}
    assert found == {((1, 2, 3), 2), ((7,), 2)}
    turns = of(schedule, Workload(cache="warm"))
    asked, warmed = sent(turns)
    assert (warmed.answered, warmed.beginnings) == (2, 2)
    texts = [m[0].content for m in asked]
    assert len(texts[0]) > len(texts[1])  # what saves most goes first
    for row, text in ((0, texts[0]), (1, texts[0]), (3, texts[1]), (4, texts[1])):
        assert turns.messages(row)[0].content.startswith(text)
    assert turns.messages(2)[0].content[:200] == texts[0][:200]


def test_blocks_that_one_request_has_are_other_text_in_another_run() -> None:
    schedule = with_blocks((1, 2, 3), (1, 2, 4), (5, 6))
    a, b = of(schedule, Workload(), "a"), of(schedule, Workload(), "b")
    shared = warming._beginnings(a)[0][1]()[0].content
    assert a.messages(0)[0].content.startswith(shared)
    assert b.messages(0)[0].content.startswith(shared)
    assert a.messages(0) != b.messages(0)
    assert a.messages(2)[0].content[:40] != b.messages(2)[0].content[:40]


def test_it_has_an_end_and_says_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "MOST", 3)
    blocks = [tuple(range(100 * k, 100 * k + 2 + k)) for k in range(10) for _ in range(2)]
    asked, warmed = sent(of(with_blocks(*blocks), Workload()))
    assert len(asked) == warmed.answered == 3
    assert warmed.beginnings == 10
    assert warmed.share == pytest.approx((9 + 10 + 11) / sum(range(2, 12)))
    assert "3 of 10 shared beginnings" in str(warmed)
    assert "46%" in str(warmed)


def test_nothing_shared_nothing_sent() -> None:
    asked, warmed = sent(of(with_blocks((1, 2), (3, 4)), Workload()))
    assert asked == []
    assert "no beginning" in str(warmed)


def test_without_names_a_few_prompts_or_sessions_come_again() -> None:
    chats = Workload(
        (RequestClass(prompt_tokens=L("uniform(100,300)"), turns=L("3"), turn_tokens=L("50")),), cache="warm"
    )
    schedule = closed_schedule(chats, 90)
    rows = warming.warm_rows(schedule)
    assert all(int(schedule.turn[row]) == 2 for row in rows)
    assert {int(schedule.session_id[row]) % 8 for row in rows} == {int(s) % 8 for s in schedule.session_id}
    asked: list[Any]
    asked, warmed = sent(of(schedule, chats))
    assert len(asked) == len(rows) <= 8
    assert str(warmed) == f"cache warmed: {len(rows)} prompts were sent once; they are in no figure"
    alone = closed_schedule(Workload((RequestClass(prompt_tokens=L("uniform(100,300)")),), cache="warm"), 40)
    longest = [int(alone.prompt_tokens[alone.id % 8 == k].max()) for k in range(8)]
    rows = warming.warm_rows(alone)
    assert sorted(int(alone.prompt_tokens[row]) for row in rows) == sorted(longest)
