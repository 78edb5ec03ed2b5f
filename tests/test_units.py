"""Durations are read exactly or refused; figures for people have three significant digits and no exponent."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whywait import units

FIGURES = st.floats(1e-4, 1e15).flatmap(lambda x: st.sampled_from([x, -x]))


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("500ms", 500_000_000),
        ("1.5s", 1_500_000_000),
        ("3m", 180_000_000_000),
        ("3min", 180_000_000_000),
        ("2h", 7_200_000_000_000),
        ("7d", 604_800_000_000_000),
        ("7us", 7_000),
        ("7µs", 7_000),
        ("9ns", 9),
        ("2", 2_000_000_000),
        (" 2 ms ", 2_000_000),
        ("1e3s", 1_000_000_000_000),
        ("0", 0),
        ("0.0000000004s", 0),
        ("0.0000000006s", 1),
    ],
)
def test_durations(text, ns):
    assert units.parse_duration(text) == ns


def test_a_bare_number_takes_the_unit_of_its_flag():
    assert units.parse_duration("250", "ms") == 250_000_000
    assert units.parse_duration("250s", "ms") == 250_000_000_000


@pytest.mark.parametrize(
    "text",
    ["", "s", "fast", "5 parsecs", "5S", "-1s", "nan", "inf", "Infinity", "1e999", "1e308h", "1..5s", "1,5s", "5s5"],
)
def test_what_is_no_duration_is_refused_by_name(text):
    with pytest.raises(ValueError, match="is not a duration such as 500ms") as caught:
        units.parse_duration(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 10**12), st.sampled_from(["ns", "us", "ms"]))
def test_whole_numbers_convert_exactly(value, unit):
    scale = {"ns": 1, "us": units.NS_PER_US, "ms": units.NS_PER_MS}[unit]
    value //= scale  # as far as a double counts whole nanoseconds
    assert units.parse_duration(f"{value}{unit}") == value * scale


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ms"),
        (0.01234, "0.0123 ms"),
        (1.234, "1.23 ms"),
        (12.34, "12.3 ms"),
        (999.6, "1,000 ms"),
        (1234.4, "1,234 ms"),
        (9_999, "9,999 ms"),
        (10_000, "10.0 s"),
        (-12_345, "-12.3 s"),
        (999_700, "1,000 s"),
        (12_345_678, "12,346 s"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_milliseconds(value, text):
    assert units.ms(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "", "0"), (0.5, "", "0.500"), (1, "", "1.00"), (0.9996, "", "1.00"), (9.996, "", "10.0"),
        (99.96, "", "100"), (-3.14159, "", "-3.14"), (123.4, "W", "123 W"), (1234567, "tok/s", "1,234,567 tok/s"),
        (None, "W", "–"), (math.nan, "", "–"),
    ],
)  # fmt: skip
def test_numbers(value, unit, text):
    assert units.number(value, unit) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 %"), (0.0123, "1.2 %"), (0.1, "10 %"), (0.456, "46 %"), (1, "100 %"), (1.5, "150 %"), (None, "–"),
        (math.nan, "–"),
    ],
)  # fmt: skip
def test_percent(value, text):
    assert units.percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (34_500_000, "34.5 MB"), (2e9, "2.00 GB"), (1.5e12, "1.50 TB"),
        (2e15, "2,000 TB"), (None, "–"), (math.nan, "–"),
    ],
)  # fmt: skip
def test_sizes(value, text):
    assert units.size(value) == text


def _digits(text: str) -> int:
    return len(text.replace(",", "").replace(".", "").lstrip("-0"))


@given(FIGURES)
def test_figures_are_near_to_three_digits_and_never_in_exponents(value):
    text = units.number(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.0051)
    assert _digits(text) == 3 if abs(value) < 999 else _digits(text) >= 3


@given(st.floats(1e-3, 1e12))
def test_times_are_near_whatever_unit_they_are_shown_in(value):
    figure, unit = units.ms(value).split(" ")
    scale = {"ms": 1, "s": 1000}[unit]
    assert float(figure.replace(",", "")) * scale == pytest.approx(value, rel=0.0051)


def test_a_message_in_short_announces_nothing_that_is_not_there() -> None:
    said = "arm A did not start: `x` ended with code 1 before it was ready; its last lines:\nboom"
    assert units.in_short(said) == "arm A did not start: `x` ended with code 1 before it was ready"
    assert units.in_short("interrupted") == "interrupted"
    assert units.in_short("") == ""
