"""Engines as the simulator starts from: a scheduler's policy with the defaults that the engine documents."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace

from whywait.errors import UsageError
from whywait.physics.fitted import host_of
from whywait.physics.machines import Accelerator
from whywait.sim.deployment import Engine

#: Defaults of the engines' own documentation (read 2026): vLLM V1 on a GPU of 70 GB and more, ``LLM`` class apart
#: (docs.vllm.ai, engine arguments); SGLang (docs.sglang.ai, server arguments); TensorRT-LLM (nvidia.github.io,
#: ``trtllm-serve``); llama.cpp ``llama-server`` (its README, four slots as ``--parallel auto`` gives).
ENGINES: Mapping[str, Engine] = {
    "vllm": Engine("vllm", max_seqs=1024, token_budget=8192, block=16),
    "sglang": Engine("sglang", max_seqs=2048, token_budget=8192, block=1, memory_share=0.88, reserve="share"),
    "trtllm": Engine("trtllm", max_seqs=2048, token_budget=8192, block=32, reserve="full", chunked=False),
    "llama.cpp": Engine("llama.cpp", max_seqs=4, token_budget=2048, block=1, reserve="full", memory_share=0.95),
    "static": Engine("static", max_seqs=32, token_budget=1 << 20, block=16, chunked=False, prefix_cache=False),
}
_ALSO = {"tensorrt-llm": "trtllm", "tensorrt_llm": "trtllm", "trt-llm": "trtllm", "llama_cpp": "llama.cpp",
         "llamacpp": "llama.cpp", "llama-server": "llama.cpp"}  # fmt: skip


def engine_of(name: str, device: Accelerator | None = None) -> Engine:
    """The engine of that name with its defaults on that device: vLLM's and SGLang's depend on its memory.

    Raises:
        UsageError: none; the nearest are named.
    """
    known = _ALSO.get(name.lower(), name.lower())
    if known not in ENGINES:
        close = difflib.get_close_matches(known, ENGINES, 2, 0.3) or list(ENGINES)
        raise UsageError(f"there is no engine {name!r} in the simulator", f"nearest: {', '.join(close)}")
    memory, host = device.memory_bytes if device else 0.0, host_of(known)
    found = replace(ENGINES[known], frontend_s=host["frontend_s"], frontend_token_s=host["frontend_token_s"],
                    reply_s=host["reply_s"])  # fmt: skip
    if known == "vllm" and 0 < memory < 70 * 2**30:
        return replace(found, max_seqs=256, token_budget=2048)
    if known == "sglang" and memory > 0:
        budget = 2048 if memory < 35 * 2**30 else 4096 if memory < 60 * 2**30 else 8192
        # What it leaves for activations and graphs (server_args.py: half a GiB, 1.5 MiB a token of a prefill step,
        # graphs).
        kept = (1024 + 1.5 * budget + (512 if budget == 8192 else 160)) * 2**20
        return replace(found, token_budget=budget, memory_share=round(1 - kept / memory, 3))
    return found
