"""What was done in the window of a load point: requests and tokens, by what became of them, and in pieces of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from whywait.analyze.goodput import answer_tokens, answers_only, goodput
from whywait.analyze.latency import CLOSED, OK
from whywait.analyze.passive import is_passive
from whywait.analyze.sharing import failed_tokens, presence, tokens_inside
from whywait.analyze.streams import Content
from whywait.analyze.window import UNCOUNTED, Window
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run
from whywait.core.table import Array

GOOD, EFFECTIVE, ANSWER, RAW = "good_requests", "effective_tokens", "answer_tokens", "output_tokens"
#: Ended by the client and not by the service, so that they are none of its failures.
CUT = ("censored", "cancelled")
MOST_BLOCKS, BLOCK_S = 20, 1.0


@dataclass(frozen=True)
class Work:
    """Of each request of a point: ``here``, what it counts for in the window; ``good`` (ended well, within its SLO),
    ``ok``; its tokens made in the window (NaN: not known), all and of the answer alone."""

    one: Run
    c: Content
    w: Window
    here: Array
    good: Array
    ok: Array
    tokens: Array
    answers: Array
    answer_content: Content
    answer_total: Array

    @property
    def kinds(self) -> dict[str, Array]:
        """Which requests were good, late, failed, censored (cut off by the end of the run), cancelled by their client:
        each is one of these."""
        outcome = self.one.requests["outcome"]
        cut = {k: outcome == OUTCOMES.index(k) for k in CUT}
        failed = ~self.ok & ~np.any(list(cut.values()), axis=0)
        return {"good": self.good, "late": self.ok & ~self.good, "failed": failed, **cut}

    def count(self, what: str) -> tuple[float | None, str]:
        """How much there is of a thing; None, or 0, with the reason."""
        n = len(self.good)
        if not n:
            return None, "no request of ours is in this point"
        if what == GOOD:
            found = float(self.here[self.good].sum())
            return found, "" if found else self._none_good()
        which = np.ones(n, dtype=bool) if what == RAW else self.good
        tokens = (self.answers if what == ANSWER else self.tokens)[which]
        unknown = int(np.isnan(tokens).sum())
        if unknown > UNCOUNTED * len(tokens):
            kind = "reasoning tokens are not told apart" if what == ANSWER else "the service gave no token counts"
            return None, f"{kind} for {unknown} of {len(tokens)} requests"
        found = float(np.nansum(tokens))
        return found, "" if found else self._none_good() if what != RAW else "no token was made in the window"

    def _none_good(self) -> str:
        ok = float(self.here[self.ok].sum())
        kind = "none ended well" if not ok else f"{ok:.0f} ended well and none was within its SLO"
        cut = float(self.here[self.kinds["censored"]].sum())
        rest = f", {cut:.0f} were cut off by the end of the run" if cut else ""
        return f"of {self.here.sum():.0f} requests {kind}{rest}"

    def in_pieces(self, edges: Array) -> dict[str, Array | None]:
        """Each thing in the pieces between ``edges`` (ns, equally long); None where it cannot be counted."""
        closed = self.one.points["mode"][0] == CLOSED
        windows = [Window(round(a), round(b), False, 0, 0) for a, b in pairwise(edges)]
        out: dict[str, Array | None] = {
            GOOD: np.array([float(presence(self.one, w, closed)[self.good].sum()) for w in windows])
        }
        everyone = np.ones(len(self.good), dtype=bool)
        for what, which in ((EFFECTIVE, self.good), (ANSWER, self.good), (RAW, everyone)):
            known = self.count(what)[0] is not None
            out[what] = np.array([self._tokens(w, what, which) for w in windows]) if known else None
        return out

    def _tokens(self, w: Window, what: str, which: Array) -> float:
        if what == ANSWER:
            found = tokens_inside(self.one, self.answer_content, w, self.answer_total)
        else:
            found = failed_tokens(self.one, self.c, w, tokens_inside(self.one, self.c, w))
        return float(np.nansum(found[which]))

    def as_dict(self) -> dict[str, Any]:
        """Counts of the window. ``late`` ended well but not within the SLO; ``failed`` did not end well by
        the service's doing; ``censored`` and ``cancelled`` by ours (see ``kinds``). All null where nothing was sent."""
        sent = not is_passive(self.one)
        counts = {what: self.count(what) for what in (EFFECTIVE, ANSWER, RAW)}
        return {
            "requests": float(self.here.sum()) if sent else None,
            **{f"{k}_requests": float(self.here[mine].sum()) if sent else None for k, mine in self.kinds.items()},
            **{what: value for what, (value, _) in counts.items()},
            "why": {what: why for what, (_, why) in counts.items() if why} or None,
        }


def work_of(one: Run, c: Content, w: Window, slo: Mapping[str, float]) -> Work:
    """The work of a Run of one load point in its window, good by ``slo`` (ms) and the classes' own."""
    good = goodput(one, slo, w, c).meets
    answers = answer_tokens(one)
    only = answers_only(one, c, answers)
    closed = one.points["mode"][0] == CLOSED
    tokens = failed_tokens(one, c, w, tokens_inside(one, c, w))
    return Work(
        one, c, w, presence(one, w, closed), good, one.requests["outcome"] == OK, tokens,
        tokens_inside(one, only, w, answers), only, answers,
    )  # fmt: skip


def blocks_of(w: Window, gap_s: float) -> int:
    """Into how many pieces a window is cut for resampling: each at least 1 s and two readings of the meters long."""
    return int(min(MOST_BLOCKS, w.seconds / max(BLOCK_S, 2 * gap_s)))
