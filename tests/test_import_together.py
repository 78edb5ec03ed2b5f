"""Which chunks of an imported result came in one read: those that the tool's loop stamped within a tenth of a ms."""

from __future__ import annotations

import numpy as np
import pytest

from whywait.convert.results_build import _stream
from whywait.convert.results_part import Asked
from whywait.core.columns import CLOCKS

MS = 1_000_000


@pytest.mark.parametrize(
    ("gaps_ms", "low_ms"),
    [
        ((20, 20, 20), (None, None, None, None)),
        ((1, 20, 1), (None, None, None, None)),  # a fast engine's token, not the same read
        ((20, 0.05, 20), (None, 0, 0, None)),  # two in one read: both since the one before
        ((20, 0.05, 0.05), (None, 0, 0, 0)),
        ((0.05, 20, 20), (None, 0, None, None)),  # before the first there is none to count from
    ],
)
def test_chunks_of_one_read_are_intervals(gaps_ms, low_ms):
    times = np.concatenate(([0], np.cumsum([round(g * MS) for g in gaps_ms]))) + 5 * MS
    found = _stream(Asked(times=times.astype(np.int64)), 3, 7, CLOCKS.index("user"))
    assert found["id"] == 3
    assert found["t"].tolist() == (times + 7).tolist()
    lows = [None if np.isnan(x) else round((x - 7) / MS - 5) for x in found["low"]]
    assert lows == list(low_ms)
