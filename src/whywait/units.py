"""Units: names, conversion, and formatting for people. Times inside whywait are integer nanoseconds."""

from __future__ import annotations

import math
import re

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000

_DURATION = {"ns": 1, "us": NS_PER_US, "µs": NS_PER_US, "ms": NS_PER_MS, "s": NS_PER_S, "m": 60 * NS_PER_S,
             "min": 60 * NS_PER_S, "h": 3600 * NS_PER_S, "d": 86_400 * NS_PER_S}  # fmt: skip


def parse_duration(text: str, default_unit: str = "s") -> int:
    """``'500ms'``, ``'1.5s'``, ``'3m'`` or a bare number of ``default_unit`` → nanoseconds.

    Raises:
        ValueError: not a number with a known unit, or not finite and ≥ 0.
    """
    s = text.strip()
    digits = s.rstrip("abcdefghijklmnopqrstuvwxyzµ")
    unit = s[len(digits) :].strip() or default_unit
    try:
        ns = float(digits) * _DURATION[unit]
    except (ValueError, KeyError):
        ns = math.nan
    if not math.isfinite(ns) or ns < 0:
        raise ValueError(f"{text!r} is not a duration such as 500ms, 1.5s or 3m")
    return round(ns)


def ms(value: float | None) -> str:
    """Milliseconds for people: three significant figures, seconds past 10 s; '–' when unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 10_000:
        return f"{_sig(value / 1000)} s"
    return f"{_sig(value)} ms"


def seconds(value: float) -> str:
    """A stretch of time for people: ``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    whole = round(value)
    if whole < 100:
        return f"{whole} s"
    if whole < 6000:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number(value: float | None, unit: str = "") -> str:
    """Three significant figures without exponent; '–' when unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{_sig(value)}{' ' + unit if unit else ''}"


def load_name(mode: str, target: float | None, label: str | None = None) -> str:
    """A load point in words: ``concurrency 8``, ``2 requests/s``, with its label where it has one."""
    amount = "" if target is None else f"{target:g}"
    what = f"concurrency {amount}" if mode == "concurrency" else f"{amount} requests/s"
    return f"{what.strip()} with {label}" if label else what.strip()


def percent(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if 0 < value < 0.0005:
        return "<0.1 %"
    if 0.995 <= value < 1:  # what is not the whole is not called the whole
        return f"{min(value * 100, 99.9):.1f} %"
    whole = abs(value) >= 0.0995 or abs(value) < 0.0005
    return f"{value * 100 or 0:.0f} %" if whole else f"{value * 100:.1f} %"


def size(value: float | None) -> str:
    """Bytes in decimal units."""
    if value is None or not math.isfinite(value):
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{_sig(value)} {unit}"
        value /= 1000
    return f"{_sig(value)} TB"


def _sig(value: float) -> str:
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")  # 9.996 is 10.0, not 10.00
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{min(digits, 6)}f}" if digits else f"{round(value):,}"


#: C0 and C1 controls but tab and newline, marks that turn the direction of what follows or end a line, and what has no
#: width.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]")


def in_short(text: str) -> str:
    """The first line of a message of several, without a word that announces the others."""
    return re.sub(r"; its (?:last lines|first error):$", "", text.splitlines()[0]) if text else ""


def plain(text: str) -> str:
    """Text of others (a service, a file) as a terminal may have it: nothing in it moves the cursor or colours."""
    return _CONTROLS.sub("", text)
