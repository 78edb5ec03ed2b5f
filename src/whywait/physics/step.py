"""The time of one engine step as a few numbers, so that a simulated step costs nanoseconds.

Everything that depends only on how many tokens the step computes (matrix products, experts, collectives, host work per
token) is a table over that number; attention is linear in what is read and in pairs of tokens. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class StepCost(NamedTuple):
    """One engine (all devices of one replica together). Seconds throughout.

    A step of ``T`` tokens, of which ``B`` sequences decode over ``K`` tokens of context in all (``Kw`` where layers look at
    most ``window`` tokens back), while ``P`` sequences prefill, whose tokens look back at ``A`` (``Aw``) pairs in all, takes

    ``max(step_s + [P > 0] prefill_step_s + linear(T) + seq_s B + kv_s K + window_s Kw + prefill_seq_s P + pair_s A +
    window_pair_s Aw, floor_s + floor_seq_s (B + P))``

    where ``linear`` interpolates ``linear_s`` over ``grid``, linearly between its points and, above the last, along its
    last slope. The second term is the host of an engine that schedules ahead: it hides until it is the longer.
    """

    grid: NDArray[np.int64]  # (n,) token counts, ascending, from 1
    linear_s: NDArray[np.float64]  # (n,)
    step_s: float
    prefill_step_s: float
    seq_s: float
    kv_s: float
    window_s: float
    window: int  # 0: no layer has a window
    prefill_seq_s: float
    pair_s: float
    window_pair_s: float
    floor_s: float = 0.0
    floor_seq_s: float = 0.0
