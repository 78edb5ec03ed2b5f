"""What a model thought of a given text, token by token: ``load/forced.py`` makes it, ``analyze/agreement.py`` reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whywait.core.table import Array


@dataclass(frozen=True)
class Scored:
    """One row per scored position: the distribution of the token there, given all tokens before it.

    ``own`` (n): natural logarithm of the probability of the token that is really there; NaN where the engine does not
    tell. ``ids`` (n × k): the tokens of the list, −1 where it is shorter; ``logp`` (n × k): theirs, NaN there. The
    list holds the most probable tokens, and the real one wherever it is told. ``at`` (n): its place in the text.
    """

    at: Array
    own: Array
    ids: Array
    logp: Array

    def __len__(self) -> int:
        return len(self.at)


def scored(rows: list[tuple[int, float | None, dict[int, float]]]) -> Scored:
    """Rows of (place, log-probability of the real token, token → log-probability) as arrays."""
    k = max((len(found) for _, _, found in rows), default=0)
    ids, logp = np.full((len(rows), k), -1, dtype=np.int64), np.full((len(rows), k), np.nan)
    for i, (_, _, found) in enumerate(rows):
        ids[i, : len(found)] = list(found)
        logp[i, : len(found)] = list(found.values())
    own = np.array([np.nan if v is None else v for _, v, _ in rows], dtype=np.float64)
    return Scored(np.array([at for at, _, _ in rows], dtype=np.int64), own, ids, logp)
