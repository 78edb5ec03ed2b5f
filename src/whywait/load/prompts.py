"""Natural prompts of our own writing, of any length, salted or not. The same seed gives the same prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

# Written for whywait. Short factual sentences in plain English; whole sentences are drawn, so text stays natural and
# the number of tokens per word is steady.
SENTENCES = tuple(
    s.strip()
    for s in """
The harbour opens at six and the first boats leave before the fog has lifted.
A good index makes a slow query fast, but every write has to pay for it.
Rain fell on the northern slopes for nine days and the river rose by two metres.
The committee read the report twice and sent it back with eleven questions.
Copper carries heat well, which is why the old kettles boil so quickly.
She kept the letters in a tin box under the stairs, sorted by year and by hand.
When the queue is full the server answers with an error instead of waiting.
The library closes early on Fridays, except during the weeks before examinations.
Bees find their way home by the sun even when clouds cover most of the sky.
Each train carries about four hundred passengers and stops at every village.
The experiment failed because nobody had noticed that the clock was running late.
Bread made with cold dough takes longer, but the crust is thinner and the taste deeper.
A bridge must carry its own weight before it can carry anything else.
The market sells apples, onions, old books and, on some mornings, live geese.
Two engineers measured the same pipe and wrote down different numbers.
In winter the ferry runs once a day and the islanders plan around it.
The painter mixed her blues from three powders and would not say which.
Most failures begin with a small change that seemed too simple to test.
The valley was once a lake, and fish bones still turn up under the plough.
He repaired watches for forty years and never owned one that kept time.
A cache that is slightly too small can be worse than no cache at all.
The orchestra tuned for a long time while the audience looked for its seats.
Clay from the southern bank is red, and the houses there are red as well.
The patient slept well, ate a little, and asked for the window to be opened.
Trade between the two towns stopped when the road over the pass was closed.
The first version was slow, the second was wrong, and the third is still in use.
Wind from the east brings dust, and dust finds its way into every bearing.
The teacher drew a circle, divided it into seven parts, and asked which was largest.
Old maps show the coast further out, before the storms took the lighthouse.
The contract runs for five years and may be ended by either side in writing.
""".strip().splitlines()
)

ASKS = (
    "Explain what the text above says, point by point, and add what you think is missing.",
    "Write a longer story that begins where the text above ends.",
    "List the facts in the text above and say for each how one could check it.",
    "Rewrite the text above for a reader who has never seen any of it.",
)


LEAST_TOKENS_PER_WORD = 0.2  # below this the service's counts do not follow the length of the prompt


@dataclass(frozen=True)
class Prompter:
    """Makes prompts of a wanted token length by the service's own count.

    ``overhead`` (tokens) and ``per_word`` (tokens per word) come from two calibrating requests; before them a usual
    English ratio is assumed. ``cache``: ``cold`` begins every prompt with a salt of its own, so no prefix is shared;
    ``warm`` repeats eight prompts; ``natural`` draws freely without a salt.
    """

    seed: int = 1
    cache: str = "cold"
    salt: str = ""
    overhead: float = 12.0
    per_word: float = 1.3

    def text(self, number: int, tokens: int) -> str:
        """Prompt ``number`` with about ``tokens`` tokens as the service counts them, template included."""
        return self.words(number, max(1, round((tokens - self.overhead) / self.per_word)))

    def words(self, number: int, words: int) -> str:
        """Prompt ``number`` with exactly ``words`` words, the question included; shorter ones are cut from its end."""
        if self.cache == "warm":
            number %= 8
        rng = random.Random(f"{self.seed}/{number}")
        out: list[str] = []
        if self.cache == "cold":
            out.append(f"{random.Random(f'{self.salt}/{self.seed}/{number}').getrandbits(30):08x}:")
        tail = ASKS[number % len(ASKS)].split()
        while len(out) + len(tail) < words:
            out.extend(rng.choice(SENTENCES).split())
        return " ".join((out[: max(1, words - len(tail))] + tail)[:words])

    @classmethod
    def fit(cls, base: Prompter, seen: list[tuple[int, int]]) -> Prompter:
        """With overhead and ratio fitted to (words, tokens) pairs as the service counted them (least squares)."""
        words, tokens = (np.array(x, dtype=float) for x in zip(*seen, strict=True))
        if np.ptp(words) == 0:
            return base
        slope, overhead = np.polyfit(words, tokens, 1)
        if slope < LEAST_TOKENS_PER_WORD:
            return base
        # The line must meet the longer prompts exactly: those are the ones that will be sent.
        overhead = float((tokens - slope * words)[words >= np.median(words)].mean())
        return cls(base.seed, base.cache, base.salt, overhead, float(slope))
