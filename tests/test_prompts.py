"""Prompts: the same seed gives the same text, of the asked length, and shares a prefix only where it is meant to."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whywait.core.schedule import LANGUAGES
from whywait.load.corpus import USUAL, texts, units
from whywait.load.prompts import Fit, Prompter

CACHES = st.sampled_from(["cold", "warm", "natural"])
PROMPTERS = st.builds(Prompter, seed=st.integers(0, 1 << 40), cache=CACHES, salt=st.text(max_size=6))
NUMBERS = st.integers(0, 100_000)
LANGUAGE = st.sampled_from(LANGUAGES)


# The texts that ship


def test_there_is_enough_text_in_every_language():
    least = {"en": 60, "code": 20}
    assert set(USUAL) == set(LANGUAGES)
    for language in LANGUAGES:
        t = texts(language)
        assert len(set(t.sentences)) == len(t.sentences) >= least.get(language, 25)
        assert len(set(t.asks)) == len(t.asks) == 4


def test_texts_are_in_the_language_they_are_filed_under():
    """By their letters: a file under another name would distort every count of tokens."""
    joined = {x: "".join("".join(s) for s in texts(x).sentences) for x in LANGUAGES}
    share = {x: sum("一" <= c <= "鿿" for c in t) / len(t) for x, t in joined.items()}
    assert share.pop("zh") > 0.8
    assert not any(share.values())
    arabic = {x: sum("\u0600" <= c <= "\u06ff" for c in t) / len(t) for x, t in joined.items()}
    assert arabic.pop("ar") > 0.7
    assert not any(arabic.values())
    assert "ñ" in joined["es"]
    assert "ß" in joined["de"]
    assert "def " in joined["code"]
    assert "SELECT " in joined["code"]


@given(st.text(max_size=60), LANGUAGE)
def test_units_put_together_are_the_text(text, language):
    assert "".join(units(text, language)).split() == text.split()


# Texts of prompts


@given(PROMPTERS, NUMBERS, st.integers(0, 3), st.integers(1, 600), LANGUAGE)
def test_the_same_seed_gives_the_same_prompt(prompter, number, turn, length, language):
    again = dataclasses.replace(prompter)
    assert again.turn(number, turn, length, language) == prompter.turn(number, turn, length, language)
    assert again.answer(number, turn, length, language) == prompter.answer(number, turn, length, language)
    assert again.system(number, length, language) == prompter.system(number, length, language)


def test_prompts_are_these_and_stay_these():
    """Written out, so that a change of the texts or of their drawing is seen: results on both sides do not compare."""
    assert Prompter(seed=1, cache="natural").turn(3, 0, 25) == (
        "Glass is poured at night here, because the furnace must not "
        "Rewrite the text above for a reader who has never seen any of it."
    )
    assert Prompter(seed=1, salt="s").turn(3, 0, 4) == "02826d89: Rewrite the text"
    assert Prompter(seed=1, cache="natural").turn(3, 0, 30, "zh").endswith("请为从未读过上面文字的人把它改写一遍。")
    assert Prompter(seed=1, cache="natural").turn(3, 1, 30, tool=True).startswith("Tool result: ")


@given(PROMPTERS, NUMBERS, st.integers(0, 3), st.integers(1, 600), st.booleans())
def test_prompts_have_the_asked_number_of_units(prompter, number, turn, length, tool):
    for language in ("en", "es", "de", "ar", "code"):
        assert len(prompter.turn(number, turn, length, language, tool).split()) == length
    salted = prompter.cache == "cold" and not turn
    characters = len(prompter.turn(number, turn, length, "zh"))
    assert characters == length + salted * (9 if length > 1 else 8)  # a salt of nine and a space counts as one


def _split(prompter: Prompter, text: str) -> tuple[list[str], str, str]:
    """Salt, body and question of an English prompt that is long enough to have all three."""
    (ask,) = [a for a in ("".join(x).rstrip() for x in texts("en").asks) if text.endswith(f" {a}")]
    words = text.removesuffix(ask).split()
    salted = prompter.cache == "cold"
    return words[:salted], " ".join(words[salted:]), ask


@given(PROMPTERS, NUMBERS, st.integers(60, 300))
def test_a_prompt_is_natural_text_with_a_question_at_its_end(prompter, number, length):
    _, left, _ = _split(prompter, prompter.turn(number, 0, length))
    sentences = ["".join(s).rstrip() for s in texts("en").sentences]
    while left:
        whole = [s for s in sentences if left.startswith(s)]
        cut = [s for s in sentences if s.startswith(left)]  # the last sentence may be cut to the asked length
        assert whole or cut, left
        left = left[len(whole[0]) :].lstrip() if whole else ""


@given(st.integers(0, 1 << 30), CACHES)
def test_all_questions_are_asked(seed, cache):
    prompter = Prompter(seed, cache)
    assert len({_split(prompter, prompter.turn(n, 0, 60))[2] for n in range(8)}) == 4


@given(st.integers(0, 1 << 30), st.lists(NUMBERS, min_size=2, max_size=6, unique=True), LANGUAGE)
def test_cold_prompts_share_no_beginning(seed, numbers, language):
    """A prefix cache must find nothing: not between prompts, and not with those of the run before (another salt)."""
    runs = [Prompter(seed, "cold", salt) for salt in ("one", "two")]
    prompts = [p.turn(n, 0, 40, language)[:9] for p in runs for n in numbers]
    prompts += [p.system(n, 40, language)[:9] for p in runs for n in numbers]
    assert len(set(prompts)) == len(prompts)


@given(st.integers(0, 1 << 30), NUMBERS, st.integers(1, 200))
def test_warm_prompts_are_eight_that_come_again(seed, number, length):
    prompter = Prompter(seed, "warm")
    assert prompter.turn(number, 0, length) == prompter.turn(number + 8, 0, length)
    assert len({prompter.turn(n, 0, 60) for n in range(100)}) == 8


@given(st.integers(0, 1 << 30), NUMBERS)
def test_natural_prompts_differ_without_a_salt(seed, number):
    a, b = (Prompter(seed, "natural", "x").turn(n, 0, 200) for n in (number, number + 1))
    assert a != b
    assert a == Prompter(seed, "natural", "y").turn(number, 0, 200)
    assert ":" not in a.split()[0]


@given(PROMPTERS, NUMBERS, st.integers(30, 100), st.integers(1, 100))
def test_a_longer_prompt_is_a_shorter_one_with_more_text_before_the_question(prompter, number, short, more):
    """Length changes nothing else, so points of different lengths are comparable."""
    (salt, body, ask), (salt2, body2, ask2) = (
        _split(prompter, prompter.turn(number, 0, n)) for n in (short, short + more)
    )
    assert (salt, body, ask) == (salt2, body2[: len(body)], ask2)


@given(PROMPTERS, NUMBERS, LANGUAGE, st.integers(1, 100), st.integers(1, 100))
def test_shared_beginnings_are_equal_as_far_as_the_shorter_goes(prompter, group, language, short, more):
    a, b = prompter.system(group, short, language), prompter.system(group, short + more, language)
    assert b.startswith(a)
    assert a[:9] != prompter.system(group + 1, short, language)[:9] or prompter.cache != "cold"


@given(PROMPTERS, st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(st.integers(0, 9), max_size=5))
def test_equal_blocks_are_equal_text(prompter, names, others):
    a, b = (prompter.blocks([*names, *more], [16] * (len(names) + len(more))) for more in ([], others))
    assert b.startswith(a)
    assert len(prompter.blocks(names, [16] * len(names)).split()) == 16 * len(names) + (prompter.cache == "cold")


def test_another_seed_gives_other_text_and_another_turn_too():
    assert len({Prompter(seed, "natural").turn(5, 0, 60) for seed in range(20)}) == 20
    assert len({Prompter(1, "natural").turn(5, turn, 60) for turn in range(9)}) == 9


def test_languages_are_mixed_evenly_and_stay_with_their_session():
    p = Prompter(seed=3)
    drawn = [p.language(n, ("en", "zh", "code")) for n in range(3000)]
    assert drawn == [p.language(n, ("en", "zh", "code")) for n in range(3000)]
    assert min(drawn.count(x) for x in ("en", "zh", "code")) > 900


# How long they come out


@given(st.integers(1, 20_000), st.floats(0, 40), st.floats(0.5, 3))
def test_a_fit_turns_tokens_into_the_nearest_units(tokens, overhead, per_unit):
    found, nearest = Fit(overhead, per_unit).units(tokens), (tokens - overhead) / per_unit
    assert found == 1 if nearest <= 1 else abs(found - nearest) <= 0.5


LENGTHS = st.lists(st.integers(1, 2000), min_size=2, max_size=8, unique=True)


@given(LENGTHS, st.integers(0, 50), st.integers(4, 24))
def test_fitting_finds_overhead_and_ratio(lengths, overhead, eighths):
    fitted = Fit().refit([(n, overhead + n * eighths / 8) for n in lengths])
    assert fitted.overhead == pytest.approx(overhead, abs=1e-6)
    assert fitted.per_unit == pytest.approx(eighths / 8)


@given(st.lists(st.integers(-2, 2), min_size=6, max_size=6))
def test_a_noisy_count_is_met_where_the_prompts_are_longest(noise):
    lengths = [500, 501, 1000, 1001, 1002, 1003]
    fitted = Fit().refit([(n, 20 + 2 * n + e) for n, e in zip(lengths, noise, strict=True)])
    longer_half = [fitted.overhead + fitted.per_unit * n for n in lengths[3:]]
    assert sum(longer_half) / 3 == pytest.approx(20 + 2 * 1002 + sum(noise[3:]) / 3)


@pytest.mark.parametrize("seen", [[], [(5, 10)], [(5, 10), (5, 12)], [(5, 20), (9, 10)]])
def test_counts_that_tell_nothing_leave_the_usual_ratio(seen):
    assert Fit().refit(seen) == Fit()


def test_a_service_that_counts_every_prompt_alike_tells_nothing():
    """By such a ratio a prompt of 128 tokens would have 10^17 words, and the loop that writes it would never end."""
    for usual in range(24, 200):
        counts = [(n, 33) for n in (usual // 2, usual // 2 + 1, usual, usual + 1, usual + 2, usual + 3)]
        assert Fit().refit(counts) == Fit()
