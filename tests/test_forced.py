"""Teacher-forced scores by each engine's way: all must say of one little model what it says itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.scoring_engines import VOCABULARY, deaf, echo, llama, model, served, sglang, tokens_of, vllm
from whywait.errors import ServiceError, UsageError
from whywait.load import forced
from whywait.load.given import Given, built_in, texts_of

TEXTS = [Given(f"t{i}", "k", "a few words that are scored, one by one: " + "xyz"[i] * 30) for i in range(3)]
WAYS = {"decode": (llama(), "llama.cpp"), "prompt_logprobs": (vllm(most=60), "vllm"), "generate": (sglang(), "sglang")}


@pytest.mark.parametrize("name", WAYS)
def test_every_way_tells_what_the_model_thinks(name: str) -> None:
    with served(*WAYS[name], slots=2) as (target, asked):
        way = forced.way_of(target, 10)
        assert (way.name, way.k) == (name, 10)
        found = dict(forced.score(target, way, TEXTS, 12, 60))
    assert set(found) == {0, 1, 2}
    for i, one in found.items():
        ids = tokens_of(TEXTS[i].text)[:60]
        s = one.scored
        assert one.tokens == len(ids) == 60
        assert s.at.tolist() == forced.places(60, 12)
        for row, at in enumerate(s.at.tolist()):
            truth = model(ids[:at])
            assert s.own[row] == pytest.approx(truth[ids[at]])
            listed = {int(t): v for t, v in zip(s.ids[row], s.logp[row], strict=True) if t >= 0}
            best = sorted(truth, key=lambda t: -truth[t])[:10]
            assert set(best) <= set(listed) <= {*best, ids[at]}
            assert all(v == pytest.approx(truth[t]) for t, v in listed.items())
    assert len(asked) <= forced.requests_at_most(way, 3, 12) + 3  # and the trial
    assert all(b.get("stream") is not True for _, b in asked)


def test_echo_knows_tokens_by_their_text() -> None:
    with served(echo(), None) as (target, _):
        way = forced.way_of(target, 5)
        assert way.name == "echo"
        (_, one), *_ = forced.score(target, way, TEXTS[:1], 20, 50)
    ids = tokens_of(TEXTS[0].text)
    truth = [model(ids[:at])[ids[at]] for at in one.scored.at.tolist()]
    assert one.scored.own.tolist() == pytest.approx(truth)
    assert ((one.scored.ids >= 0).sum(axis=1) == 6).all()  # five, and the real one


def test_one_tokenizer_has_one_digest() -> None:
    with served(llama(), "llama.cpp") as (a, _), served(vllm(), "vllm") as (b, _):
        of_a = dict(forced.score(a, forced.way_of(a, 20), TEXTS, 4, 60))
        of_b = dict(forced.score(b, forced.way_of(b, 20), TEXTS, 4, 60))
    assert [of_a[i].digest for i in range(3)] == [of_b[i].digest for i in range(3)]
    assert len({of_a[i].digest for i in range(3)}) == 3


def test_a_shorter_list_is_taken_where_the_service_allows_no_longer() -> None:
    with served(vllm(most=20), "vllm") as (target, asked):
        assert forced.way_of(target, 50).k == 20
        assert [b["prompt_logprobs"] for p, b in asked if p.endswith("completions")] == [50, 20]


def test_parts_of_characters_are_asked_for_by_another_token() -> None:
    """llama.cpp tells nothing where the sampled token is a part of a character; such positions are not lost."""
    ids = tokens_of(TEXTS[0].text)
    broken = frozenset(ids[20:24])
    with served(llama(broken=broken), "llama.cpp", slots=1) as (target, asked):
        way = forced.way_of(target, 8)
        (_, one), *_ = forced.score(target, way, TEXTS[:1], 40, 60)
    at = one.scored.at.tolist()
    again = [b for p, b in asked if p == "/completion" and b["n_probs"] == forced.LONGER]
    assert len(again) == sum(ids[i] in broken for i in at) > 0
    for row, i in enumerate(at):
        truth = model(ids[:i])
        if ids[i] in broken:
            assert way.whole not in one.scored.ids[row] or truth[way.whole] >= sorted(truth.values())[-10]
        assert one.scored.own[row] == pytest.approx(truth[ids[i]])
    assert {b["id_slot"] for p, b in asked if p == "/completion"} == {0}


@pytest.mark.parametrize("engine", ["llama.cpp", "vllm", "sglang", None])
def test_a_service_without_it_says_so(engine: str | None) -> None:
    with served(deaf, engine) as (target, asked), pytest.raises(forced.Untold):
        forced.way_of(target, 10)
    assert len(asked) <= 4  # tried, not hammered


def test_a_service_that_starts_to_fail_is_an_error() -> None:
    calls = {"n": 0}
    good = vllm()

    def answer(path: str, body: dict[str, object]) -> tuple[int, object]:
        calls["n"] += 1
        return good(path, body) if calls["n"] < 4 else (500, {"error": {"message": "out of memory"}})

    with served(answer, "vllm") as (target, _):
        way = forced.way_of(target, 5)
        with pytest.raises(ServiceError, match="out of memory"):
            dict(forced.score(target, way, TEXTS, 4, 60))


def test_closing_sends_nothing_further() -> None:
    with served(llama(), "llama.cpp", slots=1) as (target, asked):
        way = forced.way_of(target, 5)
        found = forced.score(target, way, TEXTS * 5, 10, 60)
        next(found)
        found.close()
        sent = len(asked)
    assert sent < 3 * 12
    assert len(asked) == sent


def test_places_are_evenly_spread_behind_the_beginning() -> None:
    assert forced.places(100, 4) == [8, 31, 54, 77]
    assert forced.places(12, 50) == [6, 7, 8, 9, 10, 11]
    assert forced.places(1, 5) == []
    assert forced.places(0, 5) == []
    for n in range(2, 60):
        at = forced.places(n, 7)
        assert len(set(at)) == len(at) <= 7
        assert all(0 < i < n for i in at)


def test_built_in_texts_are_of_several_kinds() -> None:
    texts = built_in()
    assert len(texts) == len({t.name for t in texts}) >= 24
    assert {"prose", "code", "reasoning", "german", "chinese", "arabic"} <= {t.kind for t in texts}
    assert all(len(t.text) > 100 for t in texts)
    assert texts_of([], 512, 400) == texts
    assert len({t.kind for t in texts_of([], 512, 6)}) >= 5  # a few of them are not all of one kind


def test_a_users_texts(tmp_path: Path) -> None:
    long = tmp_path / "manual.txt"
    sentence = "The valve is opened slowly. "
    long.write_text(sentence * 300)
    found = texts_of([str(long)], 100, 1000)
    assert len(found) > 15
    assert all(len(t.text.encode()) <= 400 and t.text.endswith(".") for t in found)
    assert " ".join(t.text for t in found).split() == (sentence * 300).split()
    lines = tmp_path / "own.jsonl"
    rows = [{"text": "ein Satz, der lang genug ist, um gezählt zu werden", "kind": "de"}, {"text": "too short"}]
    lines.write_text("\n".join(map(json.dumps, rows)))
    found = texts_of([str(long), str(lines)], 100, 6)
    assert len(found) == 6
    assert texts_of([str(lines)], 100, 10) == [Given("own.jsonl:1", "de", rows[0]["text"])]
    lines.write_text('{"no": 1}')
    with pytest.raises(UsageError, match="line 1"):
        texts_of([str(lines)], 100, 10)
    with pytest.raises(UsageError, match="cannot read"):
        texts_of([str(tmp_path / "none")], 100, 10)


def test_the_little_model_is_one() -> None:
    assert sum(np.exp(list(model([1, 5]).values()))) == pytest.approx(1)
    assert len(model([1])) == VOCABULARY
