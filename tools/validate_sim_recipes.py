"""How the record's engines were started: what a row does not say of its engine's limits.

InferenceX (formerly InferenceMAX) publishes its launch scripts; the limits are those of the scripts on the day of each
measurement (github.com/SemiAnalysisAI/InferenceX, ``benchmarks/``, history to 843c625). Rows of other origin name no
limits: see ``_unnamed``.
"""

from __future__ import annotations

from dataclasses import replace

from validate_sim_record import Part, Row
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import machine
from whywait.sim.deployment import Deployment, Engine, Split
from whywait.sim.engines import engine_of

SYSTEMS = {
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
}


def deployment_of(row: Row) -> Deployment:
    """The deployment behind a row."""
    device = machine(SYSTEMS[row.system])
    base = replace(engine_of(row.backend, device), prefix_cache=False, ahead=True)
    engine = _inferencex(row, base) if row.inferencex else _unnamed(row, base)
    d = Deployment(device, row.arch, precision_of(row), layout_of(row.part), 1, engine)
    if row.prefill is None:
        return d
    split = Split(row.prefill.workers, row.part.workers, layout_of(row.prefill))
    return replace(d, split=split)


def layout_of(part: Part) -> Layout:
    """``tp`` of the record counts devices of an engine; with attention over ``dp`` parts each has its share of them."""
    return Layout(tp=part.tp, pp=part.pp, dp=part.dp, ep=part.ep)


def precision_of(row: Row) -> Precision:
    weights = {"fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4_wo": "bf16", "": "bf16"}[row.gemm]
    experts = {"int4_wo": "int4_wo", "": weights}.get(row.experts, row.experts)
    if row.arch.name == "openai/gpt-oss-120b":  # attention in 16 bits, experts in MXFP4, whatever the column says
        weights, experts = "bf16", "mxfp4"
    compute = {"nvfp4": "fp4", "fp8": "fp8", "fp8_block": "fp8"}.get(weights, "bf16")
    return Precision(weights, _kv_type(row), compute, experts if row.arch.experts else None)


def _kv_type(row: Row) -> str:
    if not row.inferencex:
        return "fp8" if row.precision in ("fp8", "fp4") and row.backend == "trtllm" else "bf16"
    name, hopper = row.arch.name, row.system in ("h100_sxm", "h200_sxm")
    if "gpt-oss" in name or "MiniMax" in name:
        return "bf16" if hopper else "fp8"
    if "Kimi" in name:
        return "bf16" if hopper else "fp8"
    if (
        "Llama" in name and row.system == "h100_sxm"
    ):  # asked for in 8 bits; both its size and its reading are those of 16
        return "bf16"
    if "Qwen3.5" in name and row.precision == "bf16":
        return "bf16"
    if "GLM" in name and hopper:
        return "bf16"
    return "fp8"


def _inferencex(row: Row, e: Engine) -> Engine:
    """Limits by the launch scripts. ``C`` is the row's concurrency."""
    return {"vllm": _vllm, "trtllm": _trtllm, "sglang": _sglang}[row.backend](row, e)


def _vllm(row: Row, e: Engine) -> Engine:
    name, hopper = row.arch.name, row.system in ("h100_sxm", "h200_sxm")
    if "MiniMax" in name:
        share = 0.95 if row.system == "h200_sxm" else 0.9
        return replace(e, memory_share=share, max_seqs=256 if row.system == "h100_sxm" else 1024,
                       token_budget=8192 if hopper else 2 * row.isl)  # fmt: skip
    if "Kimi" in name:
        return replace(e, memory_share=0.95 if hopper else 0.9, max_seqs=row.concurrency, token_budget=8192)
    return replace(e, max_seqs=row.concurrency if hopper else 512, token_budget=8192)


def _trtllm(row: Row, e: Engine) -> Engine:
    name, tp = row.arch.name, row.part.tp
    if "Llama" in name:
        short = row.isl == 1024 and row.osl == 1024 and tp < 8
        return replace(e, token_budget=16384, wait_steps=20 if short else 0, wait_share=0.9)
    if "gpt-oss" in name:
        return _balanced(row, replace(e, token_budget=20000, max_seqs=512, memory_share=0.85))
    tokens = max(8192, (row.concurrency + row.isl + 64 + 63) // 64 * 64)
    e = replace(e, token_budget=tokens, memory_share=0.75 if row.system == "h200_sxm" else 0.8)
    return _balanced(row, e)


def _balanced(row: Row, e: Engine) -> Engine:
    """Attention over ``dp`` parts with ``enable_balance``: prompts wait until each has one, ``timeout_iters`` 60."""
    dp = row.part.dp
    if dp == 1:
        return e
    budget = e.token_budget * dp
    return replace(e, token_budget=budget, wait_steps=60, wait_share=min(0.9, 0.9 * dp * row.isl / budget))


def _sglang(row: Row, e: Engine) -> Engine:
    name, hopper = row.arch.name, row.system in ("h100_sxm", "h200_sxm")
    every = 30 if row.concurrency >= 16 else 10
    if "GLM" in name:
        if hopper:
            return replace(e, memory_share=0.85)
        return replace(e, token_budget=32768, memory_share=0.9 if row.precision == "fp4" else 0.85,
                       receive_every=10 if row.precision == "fp4" else 1)  # fmt: skip
    if "Qwen3.5" in name:
        if hopper:
            return replace(e, token_budget=16384, max_seqs=128, memory_share=0.8)
        return replace(e, token_budget=32768, max_seqs=128, memory_share=0.82, receive_every=every)
    if row.precision == "fp4":
        return replace(e, token_budget=16384, max_seqs=256, memory_share=0.85, receive_every=every)
    if row.part.tp == 4:
        return replace(e, token_budget=8192, max_seqs=32, memory_share=0.95, receive_every=10)
    return replace(e, token_budget=32768, max_seqs=128, memory_share=0.82, receive_every=every)


def _unnamed(row: Row, e: Engine) -> Engine:
    """Rows of the aiconfigurator's own runs. Their TTFT is only explained by one prompt per step (found on
    ``LOOKED_AT``), which is what a token limit of prompt + batch does, as its generator sets it for TensorRT-LLM; the
    batch limit is the row's, in the runs of Llama-3.1-8B one less than what the client keeps in flight."""
    if row.backend == "sglang":
        return replace(e, max_seqs=max(128, row.concurrency))
    seqs = row.concurrency - 1 if row.arch.name == "meta-llama/Llama-3.1-8B" and row.backend == "trtllm" else 1024
    return replace(e, max_seqs=max(1, seqs), token_budget=row.isl + row.concurrency)
