"""What the record's benchmark client did, done to a simulated service: closed loop, all ``concurrency`` sent at once.

The client (InferenceX ``benchmark_serving.py``) runs its warm-up to the end before it sends the first measured prompt,
so that the measured 10 × C prompts begin with a burst of C on an idle engine; TTFT and TPOT are means over all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from validate_sim_record import Row
from whywait.core.schedule import Schedule
from whywait.sim import service
from whywait.sim.deployment import Deployment
from whywait.sim.loads import Options
from whywait.twin.model import FIELDS, REPLY

TTFT, TPOT = "ttft_ms.mean", "tpot_ms.mean"
PER_SLOT = 10  # prompts per place in the loop


@lru_cache(maxsize=512)
def schedule_of(isl: int, osl: int, ratio: float | None, concurrency: int, seed: int) -> Schedule:
    """10 × C prompts; lengths uniform in whole numbers from ``ratio`` of the nominal one."""
    n = PER_SLOT * concurrency
    rng = np.random.default_rng([seed, isl, osl, concurrency])

    def lengths(nominal: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        if ratio is None:
            return np.full(n, nominal, np.int64)
        return rng.integers(int(nominal * ratio), nominal + 1, n, dtype=np.int64)

    prompts, answers = lengths(isl), lengths(osl)
    return Schedule(np.arange(n), np.zeros(n, np.int64), prompts, answers, np.full(n, -1, np.int64))


def moved(d: Deployment, multipliers: Mapping[str, float]) -> Deployment:
    """The deployment with multipliers on its efficiency and its reply."""
    own = {k: getattr(d.efficiency, k) * v for k, v in multipliers.items() if k in FIELDS}
    engine = dataclasses.replace(d.engine, reply_s=d.engine.reply_s * multipliers.get(REPLY, 1.0))
    return dataclasses.replace(d, efficiency=dataclasses.replace(d.efficiency, **own), engine=engine)


def predict(d: Deployment, row: Row, seed: int = 0) -> dict[str, float]:
    """Mean TTFT and TPOT (ms) of the row's load on ``d``; NaN where some request was never served."""
    schedule = schedule_of(*row.load[:2], row.ratio, row.concurrency, seed)
    _, _, t = service.run_point(d, schedule, "concurrency", row.concurrency, seed, options=Options(keep="none"))
    ttft = t.first - t.sent
    tpot = (t.last - t.first) / np.maximum(schedule.output_tokens - 1, 1)
    return {TTFT: float(ttft.mean()) * 1e3, TPOT: float(tpot.mean()) * 1e3}


def measured(row: Row) -> dict[str, float]:
    return {TTFT: row.ttft_ms, TPOT: row.tpot_ms}
