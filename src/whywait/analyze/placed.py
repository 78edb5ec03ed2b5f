"""The request account laid on the time line: which phase a request is in from when to when.

The account knows how long each phase took, and to the nanosecond when a request began, had its first and its last token
and ended. Between those stamps the order is a convention: before the first token client, network, frontend, what nobody
knows, queue, prefill, a hand-over of KV, a token held back on its way; stalls lie at the ends of the longest gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whywait.analyze.first_token import line_of
from whywait.analyze.phases import (
    BUFFERING,
    CLIENT,
    DECODE,
    FRONTEND,
    NETWORK,
    PREFILL,
    QUEUE,
    STALL,
    TAIL,
    UNKNOWN,
    RequestAccount,
)
from whywait.analyze.stalls import typical_gaps
from whywait.analyze.streams import Content, content, gaps
from whywait.core.run import Run
from whywait.core.table import Array

#: The phases of a request from left to right; the decode after the first token holds the stalls of that time.
ORDER = (CLIENT, NETWORK, FRONTEND, UNKNOWN, QUEUE, PREFILL, STALL, DECODE, DECODE, TAIL, UNKNOWN)


@dataclass(frozen=True)
class Placed:
    """``edges`` (requests × 12, int64 ns, ascending in each row) bound the parts named by ``ORDER``: the first edge is
    the origin of the request, the ninth its first token, the tenth its last, the last its end.

    ``stall_row, stall_start, stall_end`` (stalls,) are the stalls inside decode, by request and time, disjoint.
    """

    edges: Array
    stall_row: Array
    stall_start: Array
    stall_end: Array

    def parts(self, row: int) -> list[tuple[int, int, int]]:
        """(phase, start, end) of a request, parts of no length left out."""
        e = self.edges[row].tolist()
        return [(phase, e[i], e[i + 1]) for i, phase in enumerate(ORDER) if e[i + 1] > e[i]]

    def stalls(self, row: int) -> list[tuple[int, int]]:
        """(start, end) of the stalls inside the decode of a request."""
        a, b = np.searchsorted(self.stall_row, [row, row + 1])
        return list(zip(self.stall_start[a:b].tolist(), self.stall_end[a:b].tolist(), strict=True))


def placed(run: Run, acc: RequestAccount, c: Content | None = None) -> Placed:
    """Where the phases of every request of ``run`` lie; ``acc`` is ``account(run)``, ``c`` is ``content(run)``."""
    line, spent = line_of(run), acc.phases
    held = acc.cause_ns.get(("decode", BUFFERING), np.zeros(len(spent), dtype=np.int64))
    tail = spent[:, TAIL]
    lost = line.end - line.last - tail  # after the last token of a request that failed
    before = spent[:, UNKNOWN] - lost
    known = spent[:, [CLIENT, NETWORK, FRONTEND, QUEUE, PREFILL]].sum(axis=1) + before + held
    moved = line.first - line.origin - known  # what is left is the hand-over that lay before the first token
    lengths = np.stack([spent[:, CLIENT], spent[:, NETWORK], spent[:, FRONTEND], before, spent[:, QUEUE],
                        spent[:, PREFILL], moved, held, line.last - line.first, tail, lost], axis=1)  # fmt: skip
    edges = line.origin[:, None] + np.concatenate((np.zeros((len(spent), 1), np.int64), lengths.cumsum(axis=1)), axis=1)
    left = spent[:, STALL] - moved
    return Placed(edges, *_stalls(run, content(run) if c is None else c, left, edges[:, 8:10]))


def _stalls(run: Run, c: Content, left: Array, decode: Array) -> tuple[Array, Array, Array]:
    """The stalled time ``left`` of each request at the ends of its longest gaps, as far as they exceed its usual."""
    none = np.zeros(0, dtype=np.int64)
    if not (left > 0).any():
        return none, none, none
    g = gaps(c)
    over = g.value - typical_gaps(g, len(left), run.requests["point"])[g.row]
    mine = np.flatnonzero((left[g.row] > 0) & (over >= 1))
    mine = mine[np.lexsort((-g.value[mine], g.row[mine]))]
    row, excess = g.row[mine], np.floor(over[mine]).astype(np.int64)
    used = np.cumsum(excess) - excess
    fresh = np.flatnonzero(np.diff(row, prepend=-1))
    used -= np.repeat(used[fresh], np.diff(np.append(fresh, len(row))))
    took = np.clip(left[row] - used, 0, excess)
    end = np.rint(g.begin_ns[mine] + g.value[mine]).astype(np.int64)
    start, end = np.maximum(end - took, decode[row, 0]), np.minimum(end, decode[row, 1])
    order = np.lexsort((start, row))
    row, start, end = row[order], start[order], end[order]
    # Chunks of one read have gaps that begin together: what overlaps is told once.
    wide = int(decode.max(initial=0)) + 1
    reach = np.maximum.accumulate(np.concatenate(([-1], (end + row * wide)[:-1]))) if len(row) else none
    start = np.maximum(start, np.minimum(reach - row * wide, end))
    some = end > start
    return row[some], start[some], end[some]
