"""When each token of a simulated answer came: from the engine's steps, which every sequence in decode takes part in."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whywait.core.columns import CLOCKS, KINDS
from whywait.core.schedule import Ints
from whywait.sim.loads import Prepared
from whywait.sim.service import Times
from whywait.sim.state import Result

Floats = NDArray[np.float64]
MOST_TOKENS = 600_000  # of a point; past it chunks are not kept
_SLACK_S = 1e-9
KERNEL_CLOCK, ANSWER = CLOCKS.index("kernel"), KINDS.index("answer")


class Tokens(NamedTuple):
    """Content chunks: row of the request, time (s), tokens in it; by request, each in the order of time. ``exact`` is
    False for requests whose tokens were spread evenly, since the steps do not tell which they sat out."""

    row: Ints
    t: Floats
    tokens: Ints
    exact: NDArray[np.bool_]


def tokens_of(p: Prepared, r: Result, t: Times) -> Tokens | None:
    """None where there are too many tokens, or the steps were thinned."""
    w = p.warmed
    output = p.load.output[w:]
    begun = np.flatnonzero(~np.isnan(t.first))
    if int(output[begun].sum()) > MOST_TOKENS or r.steps_stride != 1 or not len(begun):
        return None
    single = len(p.pools) == 1
    ends = {int(k): _step_ends(r, int(k), t.shift_s) for k in np.unique(r.replica[w:])} if single else {}
    reply, drafts = p.pools[-1].reply_s, p.pools[-1].drafts
    rows, times, counts = [], [], []
    exact = np.zeros(len(output), bool)
    for i in begun.tolist():
        want = int(output[i]) - 1
        first, last = float(t.first[i]), float(t.last[i])
        mine = ends.get(int(r.replica[w + i]), np.zeros(0))
        low, high = (int(np.searchsorted(mine, x - reply + _SLACK_S, "right")) for x in (first, last))
        at = mine[low:high] + reply
        exact[i] = bool(t.ok[i]) and (len(at) == want or (drafts > 0 and 0 < len(at) <= want))
        if not exact[i]:
            share = 1.0 if t.ok[i] or not want else min(1.0, max(0.0, (last - first) / max(_whole(p, r, i), 1e-12)))
            at = np.linspace(first, last, int(want * share) + 1)[1:] if want else np.zeros(0)
        rows.append(np.full(len(at) + 1, i))
        times.append(np.concatenate(([first], np.minimum(at, last))))
        of = want if exact[i] else len(at)
        edges = np.rint(np.arange(len(at) + 1) * (of / max(len(at), 1))).astype(np.int64)
        counts.append(np.concatenate(([1], np.diff(edges))))
    return Tokens(np.concatenate(rows), np.concatenate(times), np.concatenate(counts), exact)


def _whole(p: Prepared, r: Result, i: int) -> float:
    """Seconds of the whole decode of a request that was given up midway, had it been let run."""
    return float(r.last_s[p.warmed + i] - r.first_s[p.warmed + i])


def _step_ends(r: Result, replica: int, shift: float) -> Floats:
    """The ends of all decode steps of an engine; steps kept as one row are spread evenly over it (their lengths differ
    by the KV of one token per sequence)."""
    s = r.steps
    mine = np.flatnonzero((s.replica == replica) & (s.decode_seqs > 0))
    mine = mine[np.argsort(s.t_s[mine], kind="stable")]
    n = s.n[mine]
    each = np.repeat(s.took_s[mine] / np.maximum(n, 1), n)
    number = np.arange(int(n.sum())) - np.repeat(np.cumsum(n) - n, n) + 1
    return np.repeat(s.t_s[mine], n) + each * number - shift


def kind_of(tokens: Tokens, thinking: Ints) -> NDArray[np.int8]:
    """Reasoning until the request's thinking tokens are out, then answer."""
    made = np.cumsum(tokens.tokens)
    first = np.r_[True, tokens.row[1:] != tokens.row[:-1]]
    before = np.repeat((made - tokens.tokens)[first], np.diff(np.r_[np.flatnonzero(first), len(made)]))
    answer = made - before > thinking[tokens.row]
    return np.where(answer, KINDS.index("answer"), KINDS.index("reasoning")).astype(np.int8)
