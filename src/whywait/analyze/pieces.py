"""Rates over pieces of a window, where what is counted comes whole: requests."""

from __future__ import annotations

import math

from whywait.analyze.digest import Point
from whywait.core.table import Array

LEAST_ENDED = 4  # requests in each piece, on average


def ended_of(p: Point, name: str) -> int | None:
    """How many requests a rate of requests counts; None of any other figure, and where no row tells."""
    which = {"requests_per_s": "ok", "goodput_requests_per_s": "good"}.get(name)
    if which is None or p.rows is None:
        return None
    return int((p.rows[which] & p.rows["inside"]).sum())


def joined(x: Array, ended: int | None) -> Array:
    """Pieces put together until each has ``LEAST_ENDED`` requests: by ones and twos they tell nothing of how much rates
    vary."""
    each = math.ceil(LEAST_ENDED * len(x) / ended) if ended else 1
    n = len(x) // each
    found: Array = x[: n * each].reshape(n, each).mean(axis=1)
    return found
