"""Prompts: the same seed gives the same text, of the asked length, and shares a prefix only where it is meant to."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whywait.load.prompts import ASKS, SENTENCES, Prompter

CACHES = st.sampled_from(["cold", "warm", "natural"])
PROMPTERS = st.builds(Prompter, seed=st.integers(0, 1 << 40), cache=CACHES, salt=st.text(max_size=6))
NUMBERS = st.integers(0, 100_000)


@given(PROMPTERS, NUMBERS, st.integers(1, 600))
def test_the_same_seed_gives_the_same_prompt(prompter, number, tokens):
    assert dataclasses.replace(prompter).text(number, tokens) == prompter.text(number, tokens)


def test_prompts_are_these_and_stay_these():
    """Written out, so that a change of the texts or of their drawing is seen: results on both sides do not compare."""
    assert Prompter(seed=1, cache="natural").words(3, 25) == (
        "Bees find their way home by the sun even when clouds "
        "Rewrite the text above for a reader who has never seen any of it."
    )
    assert Prompter(seed=1, salt="s").words(3, 4) == "02826d89: Rewrite the text"


@given(PROMPTERS, NUMBERS, st.integers(1, 600))
def test_prompts_have_the_asked_number_of_words(prompter, number, words):
    assert len(prompter.words(number, words).split(" ")) == words


@given(PROMPTERS, NUMBERS, st.integers(1, 20_000), st.floats(0, 40), st.floats(0.5, 3))
def test_prompts_have_the_asked_number_of_tokens_by_the_fitted_ratio(prompter, number, tokens, overhead, per_word):
    fitted = dataclasses.replace(prompter, overhead=overhead, per_word=per_word)
    words = len(fitted.text(number, tokens).split())
    nearest = (tokens - overhead) / per_word
    assert words == 1 if nearest <= 1 else abs(words - nearest) <= 0.5


def _split(prompter: Prompter, text: str) -> tuple[list[str], list[str], str]:
    """Salt, body and question of a prompt that is long enough to have all three."""
    (ask,) = [a for a in ASKS if text.endswith(f" {a}")]
    words = text.removesuffix(ask).split()
    salted = prompter.cache == "cold"
    return words[:salted], words[salted:], ask


@given(PROMPTERS, NUMBERS, st.integers(60, 300))
def test_a_prompt_is_natural_text_with_a_question_at_its_end(prompter, number, words):
    _, body, _ = _split(prompter, prompter.words(number, words))
    left = " ".join(body)
    while left:
        whole = [s for s in SENTENCES if left.startswith(s)]
        cut = [s for s in SENTENCES if s.startswith(left)]  # the last sentence may be cut to the asked length
        assert whole or cut, left
        left = left[len(whole[0]) :].lstrip() if whole else ""


@given(st.integers(0, 1 << 30), CACHES)
def test_all_questions_are_asked(seed, cache):
    prompter = Prompter(seed, cache)
    assert {_split(prompter, prompter.words(n, 60))[2] for n in range(8)} == set(ASKS)


@given(st.integers(0, 1 << 30), st.lists(NUMBERS, min_size=2, max_size=6, unique=True))
def test_cold_prompts_share_no_first_word(seed, numbers):
    """A prefix cache must find nothing: not between prompts, and not with those of the run before (another salt)."""
    prompts = [Prompter(seed, "cold", salt).words(n, 40) for salt in ("one", "two") for n in numbers]
    assert len({p.split()[0] for p in prompts}) == len(prompts)


@given(st.integers(0, 1 << 30), NUMBERS, st.integers(1, 200))
def test_warm_prompts_are_eight_that_come_again(seed, number, words):
    prompter = Prompter(seed, "warm")
    assert prompter.words(number, words) == prompter.words(number + 8, words)
    assert len({prompter.words(n, 60) for n in range(100)}) == 8


@given(st.integers(0, 1 << 30), NUMBERS)
def test_natural_prompts_differ_without_a_salt(seed, number):
    a, b = (Prompter(seed, "natural", "x").words(n, 200) for n in (number, number + 1))
    assert a != b
    assert a == Prompter(seed, "natural", "y").words(number, 200)
    assert ":" not in a.split()[0]


@given(PROMPTERS, NUMBERS, st.integers(30, 100), st.integers(1, 100))
def test_a_longer_prompt_is_a_shorter_one_with_more_text_before_the_question(prompter, number, short, more):
    """Length changes nothing else, so points of different lengths are comparable."""
    (salt, body, ask), (salt2, body2, ask2) = (
        _split(prompter, prompter.words(number, n)) for n in (short, short + more)
    )
    assert (salt, body, ask) == (salt2, body2[: len(body)], ask2)


def test_another_seed_gives_other_text():
    assert len({Prompter(seed, "natural").words(5, 60) for seed in range(20)}) == 20


WORDS = st.lists(st.integers(1, 2000), min_size=2, max_size=8, unique=True)


@given(PROMPTERS, WORDS, st.integers(0, 50), st.integers(4, 24))
def test_fitting_finds_overhead_and_ratio(prompter, words, overhead, eighths):
    fitted = Prompter.fit(prompter, [(w, overhead + w * eighths / 8) for w in words])
    assert fitted.overhead == pytest.approx(overhead, abs=1e-6)
    assert fitted.per_word == pytest.approx(eighths / 8)
    assert (fitted.seed, fitted.cache, fitted.salt) == (prompter.seed, prompter.cache, prompter.salt)


@given(st.lists(st.integers(-2, 2), min_size=6, max_size=6))
def test_a_noisy_count_is_met_where_the_prompts_are_longest(noise):
    words = [500, 501, 1000, 1001, 1002, 1003]
    fitted = Prompter.fit(Prompter(), [(w, 20 + 2 * w + n) for w, n in zip(words, noise, strict=True)])
    longer_half = [fitted.overhead + fitted.per_word * w for w in words[3:]]
    assert sum(longer_half) / 3 == pytest.approx(20 + 2 * 1002 + sum(noise[3:]) / 3)


@pytest.mark.parametrize("seen", [[(5, 10)], [(5, 10), (5, 12)], [(5, 20), (9, 10)]])
def test_counts_that_tell_nothing_leave_the_usual_ratio(seen):
    base = Prompter()
    assert Prompter.fit(base, seen) == base


def test_a_service_that_counts_every_prompt_alike_tells_nothing():
    """By such a ratio a prompt of 128 tokens would have 10^17 words, and the loop that writes it would never end."""
    base = Prompter()
    for usual in range(24, 200):
        counts = [(w, 33) for w in (usual // 2, usual // 2 + 1, usual, usual + 1, usual + 2, usual + 3)]
        assert Prompter.fit(base, counts) == base
