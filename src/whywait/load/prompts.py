"""Natural prompts of our own writing, of any length, salted or not. The same seed gives the same prompts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from whywait.load.corpus import USUAL, texts, units

LEAST_TOKENS_PER_UNIT = 0.2  # below this the service's counts do not follow the length of the prompt
WARM_PROMPTS = 8


@dataclass(frozen=True)
class Fit:
    """How a service counts a language: tokens per unit (a word; in Chinese a character), and those it adds to any."""

    overhead: float = 12.0
    per_unit: float = 1.3

    def units(self, tokens: float) -> int:
        return max(1, round((tokens - self.overhead) / self.per_unit))

    def refit(self, seen: Sequence[tuple[int, int]]) -> Fit:
        """Fitted to (units, tokens) pairs as the service counted them (least squares); as it is where they tell
        nothing: too few, of one length, or counts that do not follow the length."""
        if len(seen) < 2:
            return self
        n, tokens = (np.array(x, dtype=float) for x in zip(*seen, strict=True))
        if np.ptp(n) == 0:
            return self
        slope, overhead = np.polyfit(n, tokens, 1)
        if slope < LEAST_TOKENS_PER_UNIT:
            return self
        # The line must meet the longer prompts exactly: those are the ones that will be sent.
        overhead = float((tokens - slope * n)[n >= np.median(n)].mean())
        return Fit(overhead, float(slope))


@dataclass(frozen=True)
class Prompter:
    """Makes the texts of prompts. How long they come out the service's own counts tell: see ``load/calibrate.py``.

    ``fits`` are by language; before calibrating, usual ratios are assumed. Each further message costs ``per_message``
    tokens. ``exact`` holds how many units the prompt of a request (by id) needs, where that was found out one by one.
    ``cache``: ``cold`` begins every prompt, or session, with a salt of its own, so no prefix is shared but those meant;
    ``warm`` repeats eight prompts (where beginnings are shared by name, those and no others: ``load/turns.py``);
    ``natural`` draws freely without a salt.
    """

    seed: int = 1
    cache: str = "cold"
    salt: str = ""
    fits: Mapping[str, Fit] = field(default_factory=dict)
    per_message: float = 4.0
    exact: Mapping[int, int] = field(default_factory=dict)
    trims: Mapping[int, int] = field(default_factory=dict)  # characters then cut from its end, since a word is no token

    def fit(self, language: str) -> Fit:
        return self.fits.get(language) or Fit(per_unit=USUAL[language])

    def language(self, number: int, languages: Sequence[str]) -> str:
        """That of request or session ``number``: one of ``languages``, evenly."""
        if len(languages) == 1:
            return languages[0]
        return random.Random(f"{self.seed}/language/{self._kind(number)}").choice(languages)

    def turn(self, number: int, turn: int, length: int, language: str = "en", tool: bool = False) -> str:
        """What turn ``turn`` of session ``number`` says, in exactly ``length`` units: salt, text and a question; short
        ones are cut from its end. A longer one is a shorter one with more text before the question."""
        number = self._kind(number)
        corpus = texts(language)
        key = f"{self.seed}/{number}/{turn}" if turn else f"{self.seed}/{number}"
        head: list[str] = list(units("Tool result:", "en")) if tool else []
        if self.cache == "cold" and not turn:
            head.append(self._salt(f"{self.seed}/{number}"))
        ask = corpus.asks[(number + turn) % len(corpus.asks)]
        body = self._fill(random.Random(key), length - len(head) - len(ask), language)
        return _joined([*head[: max(1, length - len(ask))], *body, *ask][:length])

    def answer(self, number: int, turn: int, length: int, language: str = "en") -> str:
        """What stands in a history for the answer to that turn: text of ours, since outputs are not kept."""
        rng = random.Random(f"{self.seed}/{self._kind(number)}/{turn}/answer")
        return _joined(self._fill(rng, length, language))

    def system(self, group: int, length: int, language: str = "en") -> str:
        """The shared beginning ``group``: any two of one group are equal as far as the shorter goes."""
        head = [self._salt(f"{self.seed}/group/{group}")] if self.cache == "cold" else []
        return _joined([*head, *self._fill(random.Random(f"{self.seed}/group/{group}"), length, language)][:length])

    def blocks(self, names: Sequence[int | str], lengths: Sequence[int], language: str = "en") -> str:
        """Text made of named pieces: equal names (and lengths) are equal text."""
        out = [self._salt(f"{self.seed}/blocks")] if self.cache == "cold" else []
        for name, length in zip(names, lengths, strict=True):
            out += self._fill(random.Random(f"{self.seed}/block/{name}"), length, language)
        return _joined(out)

    def _kind(self, number: int) -> int:
        return number % WARM_PROMPTS if self.cache == "warm" else number

    def _salt(self, key: str) -> str:
        return f"{random.Random(f'{self.salt}/{key}').getrandbits(30):08x}: "

    def _fill(self, rng: random.Random, length: int, language: str) -> list[str]:
        sentences = texts(language).sentences
        out: list[str] = []
        while len(out) < length:
            out.extend(rng.choice(sentences))
        return out[: max(0, length)]


def _joined(parts: Sequence[str]) -> str:
    return "".join(parts).rstrip()
