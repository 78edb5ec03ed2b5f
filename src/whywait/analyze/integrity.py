"""Whether the streams were what they should be: answers that ended well and hold what makes no sense all the same."""

from __future__ import annotations

import numpy as np

from whywait.analyze.latency import OK
from whywait.analyze.stats import Doubt
from whywait.analyze.streams import Content, is_alike
from whywait.core.columns import KINDS, STRANGE
from whywait.core.run import Run

_TOOL = KINDS.index("tool")
_WHY = {
    STRANGE[0]: "what they held is in no figure: tokens may be missing",
    STRANGE[1]: "it is counted, and they end with the last of it: was it theirs?",
}


def strange(one: Run) -> list[Doubt]:
    """A doubt for each kind of what :data:`~whywait.core.columns.STRANGE` names, with how many answers have it."""
    held = [str(d) for d in one.requests["detail"][one.requests["outcome"] == OK] if d]
    counts = {what: sum(what in d.split("; ") for d in held) for what in STRANGE}
    return [{"what": f"{n} answers that ended well hold {what}", "why": _WHY[what],
             "next": "read such a stream by hand (curl -N), past the gateway and at it"}
            for what, n in counts.items() if n]  # fmt: skip


def unasked(run: Run) -> Doubt | None:
    """A doubt when bytes came over connections that nothing was asked over: HTTP/1.1 has no other way to tell whose an
    answer is than their order."""
    n = run.manifest.client.get("unasked")
    if not isinstance(n, int) or n <= 0:
        return None
    return {
        "what": f"{n} times bytes came over a connection that nothing was asked over",
        "why": "it was given up; bytes that came while something was asked were taken for its answer",
        "next": "a gateway or engine that answers twice: see its log",
    }


def miscounted(one: Run, c: Content) -> list[Doubt]:
    """A doubt when the tokens the service counted in the chunks do not add up to its usage, and when there are fewer
    of them than chunks.

    Only a cross-check: the usage is what every figure uses. One token more is a stop token, which has no text; where
    tokens of chunks are inferred they add up by themselves.
    """
    n = one.requests["output_tokens"]
    counts = c.counts(len(n))
    # NaN where a chunk's tokens are unknown.
    seen = counts * float(c.tokens[0]) if is_alike(c.tokens) else np.bincount(c.row, c.tokens, len(n))
    has = counts > 0
    mine = has & ~np.isnan(seen) & (one.requests["outcome"] == OK) & (n > 0)
    off = np.abs(n - seen)[mine]
    out: list[Doubt] = []
    if (off > 1).any():
        share = float((off / n[mine]).max())
        what = f"{int((off > 1).sum())} requests: the tokens counted in their chunks are not their usage"
        why = f"they differ by up to {share:.0%}; the usage is what all figures use"
        out.append({"what": what, "why": why, "next": "ask whose count is right: the usage or the counts per chunk"})
    # An end may come with a rest of text, and arguments of tools are cut as an engine likes.
    plain = np.ones(len(n), dtype=bool)
    plain[np.unique(c.row[c.kind == _TOOL])] = False
    fewer = plain & (one.requests["outcome"] == OK) & (n > 0) & (counts > n + 1)
    if fewer.any():
        what = f"{int(fewer.sum())} requests have more chunks with output than tokens in their usage"
        why = "no chunk is less than a token: something on the way cuts them up, or the usage is wrong"
        out.append({"what": what, "why": why, "next": "ask the engine itself, past the gateway"})
    return out
