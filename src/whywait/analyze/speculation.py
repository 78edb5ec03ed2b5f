"""What speculative decoding did at a load point: tokens proposed, accepted, and made per step. Pure.

Of each request where the engine says it with the answer (llama.cpp), else by its counters over the window (vLLM). A
request's first token comes from its prefill; every step after that gives one token and as many as were accepted, so n
tokens of which a were accepted took n − 1 − a steps, whether or not anything was proposed in them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from whywait.analyze.counters import delta
from whywait.analyze.latency import OK
from whywait.analyze.offered import acceptance
from whywait.core.run import Run
from whywait.core.table import Array, Table


class Speculation(NamedTuple):
    """``acceptance`` is accepted / proposed (0..1); ``tokens_per_step`` of one request's decode steps, 1 without
    speculation; ``per_request`` tokens proposed for each. None unknown, ``acceptance`` also where nothing was."""

    acceptance: float | None
    tokens_per_step: float | None
    per_request: float | None


NOTHING = Speculation(None, None, None)


def speculation(run: Run, point: int, which: Array, span: tuple[int, int]) -> Speculation:
    """Of the requests ``which`` (bool, rows of the point), which began in ``span`` (ns), the window."""
    req = run.point(point).requests
    mine = req.where(which & (req["outcome"] == OK))
    # llama.cpp leaves both out of an answer for which nothing was proposed; that it speaks of it at all, others show.
    if not np.isnan(run.requests["draft_tokens"]).all() and len(mine):
        drafted, accepted = (np.nan_to_num(mine[k]) for k in ("draft_tokens", "accepted_tokens"))
        steps = np.maximum(mine["output_tokens"] - 1 - accepted, 0)
        return _of(float(drafted.sum()), float(accepted.sum()), float(steps.sum()), len(mine))
    return _counted(run, req, span)


def _counted(run: Run, req: Table, span: tuple[int, int]) -> Speculation:
    drafted, accepted, made = (
        delta(run.readings, name, span)
        for name in ("draft_tokens_total", "accepted_tokens_total", "output_tokens_total")
    )
    if drafted is None or accepted is None:
        return NOTHING
    if drafted.high <= 0:  # it counts, and nothing was proposed
        return Speculation(None, 1.0 if made is not None and made.value > 0 else None, 0.0)
    first = req["first_ns"]
    begun = int(((first >= span[0]) & (first < span[1])).sum())
    steps = None if made is None else made.value - begun - accepted.value
    found = _of(drafted.value, accepted.value, steps, begun)
    return found._replace(acceptance=acceptance(run, span))


def _of(drafted: float, accepted: float, steps: float | None, requests: int) -> Speculation:
    return Speculation(
        min(1.0, accepted / drafted) if drafted > 0 else None,
        1.0 + accepted / steps if steps is not None and steps > 0 else None,
        drafted / requests if requests else None,
    )
