"""From a deployment to what the simulated service says of itself and keeps to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whywait.errors import UsageError
from whywait.physics.memory import kv_bytes_per_token
from whywait.sim.capacity import Capacity
from whywait.sim.deployment import Deployment
from whywait.sim.front import Service
from whywait.sim.loads import capacities_of, efficiency_of

#: Tokens of a block where the engine's own is smaller (SGLang and llama.cpp go token by token): a number for every
#: token of every prompt would cost more time than this server has.
LEAST_BLOCK = 16


def servable(d: Deployment) -> Deployment:
    """``d`` as it can be served.

    Raises:
        UsageError: it is split over engines for prefill and decode.
    """
    if d.split is not None:
        raise UsageError("serve-sim serves engines that do both prefill and decode",
                         "leave pd=… out; whywait simulate knows split engines")  # fmt: skip
    e = d.engine
    if e.block >= LEAST_BLOCK:
        return d
    blocks = None if e.kv_blocks is None else e.kv_blocks * e.block // LEAST_BLOCK
    return replace(d, engine=replace(e, block=LEAST_BLOCK, kv_blocks=blocks))


def service_of(d: Deployment, name: str = "", context: int | None = None, label: str = "") -> Service:
    """What a server of ``d`` (``servable``) says: its limits, and where its time before and after the engine goes.

    ``context`` is the longest request, tokens (by default the engine's limit, at most what its KV space holds).

    Raises:
        UsageError: it does not fit, or ``context`` is more than fits.
    """
    space = capacities_of(d)[0]
    e, drafts = d.engine, d.speculation.drafts if d.speculation else 0
    most = space.tokens - drafts
    if not e.chunked and e.policy not in ("sglang", "static"):  # a prompt, and one that comes again, is one step's work
        most = min(most, e.token_budget)
    if context and context > most:
        raise UsageError(f"--max-model-len {context}: more than {most} does not fit in KV space and a step's tokens",
                         f"at most {most}; or more devices, a larger --token-budget")  # fmt: skip
    engine, frontend = d.engine, efficiency_of(d).frontend
    tiers = sum(tier.bytes for tier in d.tiers) / kv_bytes_per_token(d.model, d.precision.kv, d.layout)[1]
    return Service(
        model=name or d.model.name,
        context=min(context or e.max_context or most, most),
        block=engine.block,
        kv_blocks=space.blocks + int(tiers // engine.block),
        prefix_cache=engine.prefix_cache,
        frontend_s=engine.frontend_s * frontend,
        frontend_token_s=engine.frontend_token_s * frontend,
        reply_s=engine.reply_s,
        routing=d.routing,
        speculates=d.speculation is not None,
        cache=_cache(d, space),
        simulated={"label": label, "machine": d.machine.name, "model": d.model.name, "engine": engine.policy},
    )


def _cache(d: Deployment, space: Capacity) -> Mapping[str, str]:
    """Labels of ``vllm:cache_config_info``."""
    e = d.engine
    return {
        "block_size": str(e.block),
        "cache_dtype": d.precision.kv,
        "enable_prefix_caching": str(e.prefix_cache),
        "gpu_memory_utilization": f"{e.memory_share:g}",
        "num_gpu_blocks": str(space.blocks),
        "kv_cache_size_tokens": str(space.tokens),
    }
