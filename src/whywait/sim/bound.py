"""A rate that a deployment surely does not exceed, reckoned without simulating it: what a plan of many candidates is
screened by.

Optimistic on purpose. Two bounds, at every number N of requests in work that the KV space, the engine's places and the
limit of the time per token allow; the smaller of the two, at the N where it is largest:

- *decode alone*: N streams share a step, which makes (with drafts accepted) ``gain`` tokens each;
- *all work*: a token costs no less than in the step size where tokens are cheapest, attention is linear in what it
  reads, and every request takes its part of the steps' fixed cost.

Prompts that begin like another one count as cached where the engine caches. Queues, batches that are not full, and
prompts that hold up others are left out: they only make it slower.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whywait.core.schedule import Schedule
from whywait.physics.fitted import prior_of
from whywait.physics.step import StepCost, StepWork, seconds
from whywait.sim.capacity import Capacity
from whywait.sim.chains import chains
from whywait.sim.deployment import Deployment
from whywait.sim.loads import capacities_of, cost_of, family_of

Floats = NDArray[np.float64]
POINTS = 48  # numbers of requests in work that are looked at


class Bound(NamedTuple):
    """``requests_per_s`` of the whole deployment at most; ``at``: with so many in work per engine; ``why`` where it is
    0. ``slack``: what the bound may be short by, as a factor, if the machine is better than its fit (90 %)."""

    requests_per_s: float
    at: float = 0.0
    why: str = ""
    slack: float = 1.0

    @property
    def surely(self) -> float:
        return self.requests_per_s * self.slack


class _Mean(NamedTuple):
    """Of a request: prompt tokens to compute, answer tokens, resident tokens while it decodes, context read by its
    decode steps together, pairs of its prefill."""

    fresh: float
    answer: float
    resident: float
    context: float
    pairs: float


def bound(
    d: Deployment, schedule: Schedule, tpot_ms: float | None = None, sd: Mapping[str, float] | None = None
) -> Bound:
    """Requests per second that ``d`` serves at most of what is like ``schedule``, its streams at ``tpot_ms`` a token
    (None: at any); ``sd``: log-sd of its multipliers by name, where more is known of them than the fits tell.

    Raises:
        UsageError: it does not fit, as ``capacity`` says.
    """
    longest = float((schedule.prompt_tokens + schedule.output_tokens).max(initial=2))
    capacities = capacities_of(d, longest)
    mean = _mean(d, schedule)
    slack = _slack(d, prior_of(d.machine, family_of(d)).sd if sd is None else sd)
    if d.split is None:
        found = _engine(d, cost_of(d), capacities[0], mean, tpot_ms)
        return found._replace(requests_per_s=found.requests_per_s * d.replicas, slack=slack)
    decode = _engine(d, cost_of(d), capacities[-1], mean._replace(fresh=0.0, pairs=0.0), tpot_ms)
    first = dataclasses.replace(d, layout=d.split.prefill_layout or d.layout)
    prompts = 1.0 / max(_work_s(cost_of(first, prefill=True), mean._replace(answer=0.0, context=0.0), d), 1e-12)
    most = min(decode.requests_per_s * d.split.decode, prompts * d.split.prefill) * d.replicas
    return decode._replace(requests_per_s=most, slack=slack)


def _slack(d: Deployment, sd: Mapping[str, float]) -> float:
    return math.exp(
        1.28 * max(sd.get(k, 0.0) for k in ("weights", "compute", "kv", "experts" if d.model.experts else "kv"))
    )


def _mean(d: Deployment, s: Schedule) -> _Mean:
    prompt, answer = s.prompt_tokens.astype(float), s.output_tokens.astype(float)
    fresh = prompt.copy()
    if d.engine.prefix_cache:
        at, _ = chains(s, d.engine.block)
        fresh = np.maximum(prompt - np.diff(at) * d.engine.block, 1.0)
    resident = float((answer * (fresh + answer / 2)).sum() / max(answer.sum(), 1.0))
    context = answer * (prompt + answer / 2)
    pairs = fresh * (prompt - fresh / 2)
    return _Mean(float(fresh.mean()), float(answer.mean()), resident, float(context.mean()), float(pairs.mean()))


def _engine(d: Deployment, cost: StepCost, c: Capacity, m: _Mean, tpot_ms: float | None) -> Bound:
    most = max(1.0, min(float(d.engine.max_seqs), c.tokens / max(m.resident, 1.0)))
    n = np.unique(np.concatenate(([1.0], np.geomspace(1.0, most, POINTS))))
    each = 1 + (d.speculation.drafts if d.speculation else 0)
    gain = _gain(d)
    read = n * m.context / max(m.answer, 1.0)
    window = np.minimum(read, n * cost.window) if cost.window else np.zeros_like(read)
    zero = np.zeros_like(n)
    step = seconds(cost, StepWork(n * each, n, read, window, zero, zero, zero))
    within = step / gain <= (tpot_ms or math.inf) / 1e3
    if not within.any():
        return Bound(0.0, 1.0, f"a stream alone takes {step[0] / gain * 1e3:.0f} ms a token")
    decode = n * gain / (step * max(m.answer, 1.0))
    share = m.answer * cost.step_s / (gain * n)
    whole = 1.0 / np.maximum(_work_s(cost, m, d) + share, 1e-12)
    rate = np.where(within, np.minimum(decode, whole), 0.0)
    at = int(np.argmax(rate))
    return Bound(float(rate[at]), float(n[at]))


def _gain(d: Deployment) -> float:
    """Tokens that a stream gets per step: one, and the drafts accepted."""
    return 1.0 + (float(np.cumprod(d.speculation.acceptance).sum()) if d.speculation else 0.0)


def _work_s(cost: StepCost, m: _Mean, d: Deployment) -> float:
    """Seconds of an engine that a request takes at least, the fixed part of steps left out."""
    reach = cost.grid <= d.engine.token_budget
    token = float((cost.linear_s[reach] / cost.grid[reach]).min()) if reach.any() else 0.0
    gain = _gain(d)
    tokens = m.fresh + m.answer * (1 + (d.speculation.drafts if d.speculation else 0)) / gain
    return token * tokens + cost.kv_s * m.context / gain + cost.pair_s * m.pairs + cost.seq_s * m.answer / gain
