"""Answers counted anew as a check of usage; and prompt lengths by a tokenizer file."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.test_calibrate import AGENT, CHAT, Service, counted, serving
from whywait.errors import UsageError
from whywait.load import calibrate, recount, tokens
from whywait.load.prompts import Prompter
from whywait.load.recipe import closed_schedule


class Words:
    def text(self, text: str) -> int | None:
        return len(text.split())


def said(*contents: str, **more: object) -> list[dict[str, object]]:
    return [{"choices": [{"index": 0, "delta": {"content": c, **more}}]} for c in contents]


def test_only_a_few_are_sampled_and_later_ones_too() -> None:
    sample = recount.Sample()
    taps = [i for i in range(1000) if sample.tap(i) is not None]
    assert taps == [0, 1, 2, 4, 8, 16, 32, 64]


def test_usage_is_compared_with_what_the_text_accounts_for() -> None:
    sample = recount.Sample()
    for i, (objects) in enumerate([said("a b ", "c"), said("a b c"), said("a", tool_calls=[1]), said("x\ufffd y")]):
        tap = sample.tap({0: 0, 1: 1, 2: 2, 3: 3}[i]) or recount.Text(sample, i).tap
        for obj in objects:
            tap(obj)
    counts = sample.counts(Words())
    assert [(c["id"], c["counted"]) for c in counts] == [(0, 3), (1, 3)]
    assert sample.texts == []
    found = recount.compared(counts, {0: 4.0, 1: 30.0})  # a stop token; and far too many
    assert found == {"answers": 2, "usage_tokens": 34, "recounted_tokens": 6, "disagree": 1, "worst_off": 26}
    doubt = recount.doubt_of(0, found)
    assert doubt is not None
    assert "34 tokens" in doubt["why"]
    assert "6 in the text" in doubt["why"]
    assert recount.doubt_of(0, recount.compared(counts[:1], {0: 4.0})) is None
    assert recount.compared(counts, {0: float("nan")}) is None


def test_reasoning_counts_and_long_text_is_dropped() -> None:
    sample = recount.Sample()
    tap = sample.tap(7)
    assert tap is not None
    tap({"choices": [{"index": 0, "delta": {"reasoning_content": "let me think"}}]})
    tap({"choices": [{"index": 0, "delta": {"content": "so it is"}}]})
    long = sample.tap(8)
    assert long is not None
    long(said("y " * recount.MOST_CHARS)[0])
    counts = sample.counts(Words())
    assert counts == [{"id": 7, "counted": 6, "choices": 1, "thinking": 1}]
    assert recount.compared(counts, {7: 11.0})["worst_off"] == 0  # type: ignore[index]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer(package.models.WordLevel({"x": 0, "[UNK]": 1}, unk_token="[UNK]"))
    # As the stand-in services count: pieces of three letters, every other sign by itself.
    split = package.pre_tokenizers.Split(package.Regex(r"[A-Za-z]{1,3}|[^\sA-Za-z]"), "removed", invert=True)
    made.pre_tokenizer = split
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


@pytest.mark.parametrize("workload", [CHAT, AGENT])
def test_a_file_makes_lengths_exact_where_the_service_does_not_count(tokenizer: str, workload: object) -> None:
    import dataclasses

    schedule = closed_schedule(workload, 16)  # type: ignore[arg-type]
    with serving(tokenizer=False) as (_, plain):
        target = dataclasses.replace(plain, tokenizer=tokenizer)
        prompter, _ = calibrate.calibrate(target, workload, Prompter())  # type: ignore[arg-type]
        found = calibrate.counter(target, workload, prompter)  # type: ignore[arg-type]
        assert found is not None
        prompter = calibrate.exact(found, prompter, schedule, workload)  # type: ignore[arg-type]
    off = [counted(prompter, schedule, workload, row) - int(schedule.prompt_tokens[row]) for row in range(16)]  # type: ignore[arg-type]
    assert np.abs(off).max() <= 1
    assert off.count(0) >= 14


def test_what_is_wrong_with_a_tokenizer_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file"):
        tokens.load(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError) as caught:
        tokens.load(str(tmp_path / "other"))
    assert "pip install 'whywait[tokenizer]'" in caught.value.hint


def test_the_service_counts_answers_without_adding_to_them() -> None:
    assert Service is not None
    with serving() as (server, target):
        counter = tokens.text_counter(target)
        assert counter is not None
        assert counter.text("one") == 1
        assert server.asked[-1][1]["add_special_tokens"] is False


def test_the_text_of_the_responses_dialect_is_kept_by_item_and_kind() -> None:
    sample = recount.Sample()
    tap = sample.tap(3)
    assert tap is not None
    tap({"type": "response.reasoning_text.delta", "output_index": 0, "delta": "let me think"})
    tap({"type": "response.output_text.delta", "output_index": 1, "delta": "so it"})
    tap({"type": "response.output_text.delta", "output_index": 1, "delta": " is"})
    tap({"type": "response.refusal.delta", "delta": "no"})
    assert sample.counts(Words()) == [{"id": 3, "counted": 7, "choices": 2, "thinking": 1}]


@pytest.mark.parametrize("what", ["response.function_call_arguments.delta", "response.reasoning_summary_text.delta"])
def test_what_is_no_text_of_its_own_drops_the_answer(what: str) -> None:
    sample = recount.Sample()
    tap = sample.tap(3)
    assert tap is not None
    tap({"type": "response.output_text.delta", "output_index": 0, "delta": "so it is"})
    tap({"type": what, "output_index": 0, "delta": "x"})
    assert sample.counts(Words()) == []
    assert sample.chars == 0
