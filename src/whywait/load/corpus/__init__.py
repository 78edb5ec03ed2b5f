"""Texts of our own writing that ship with whywait: six languages, code being one. Each is a file beside this one.

Sentences a line each (code: snippets apart by ``%%``), then ``---``, then the questions that end a prompt.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple


class Texts(NamedTuple):
    """Sentences and questions of a language, each as its units: what a prompt's length is counted in before the
    service counts it. A unit is a word with the white space after it, in Chinese a character."""

    sentences: tuple[tuple[str, ...], ...]
    asks: tuple[tuple[str, ...], ...]


#: Tokens per unit to start from, before the service was asked; by common tokenizers of 100 k words and more.
USUAL = {"en": 1.3, "zh": 0.8, "es": 1.6, "de": 1.8, "ar": 2.2, "code": 2.6}


@functools.cache
def texts(language: str) -> Texts:
    """The texts of ``language``, a key of USUAL."""
    whole = (Path(__file__).parent / f"{language}.txt").read_text(encoding="utf-8")
    body, _, asks = whole.partition("\n---\n")
    pieces = body.split("\n%%\n") if language == "code" else body.splitlines()
    return Texts(
        tuple(units(p, language) for p in pieces if p), tuple(units(a, language) for a in asks.splitlines() if a)
    )


def units(text: str, language: str) -> tuple[str, ...]:
    """``text`` in units; joined they are the text again, followed by what separates it from the next."""
    if language == "zh":
        return tuple(text)
    return tuple(re.findall(r"\S+\s*", text + ("\n\n" if language == "code" else " ")))
