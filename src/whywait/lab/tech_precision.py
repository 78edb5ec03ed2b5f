"""Techniques of fewer bits: weights and KV cache. See ``technique``.

Both change what is answered; ``--quality`` holds the arms against each other in that, too. Neither arm maps its file
(``mmap``), so that the engine's memory is what it holds, once.
"""

from __future__ import annotations

from typing import Final

from whywait.core.workload import Workload
from whywait.lab.technique import Point, Show, Technique, one_class

#: A long prompt of which nearly all is in the slot's cache since the warm-up: decode at that depth, prefill paid once.
_DEEP: Final = Workload(classes=one_class(1536, 32, shared=0.98), cache="natural")

TECHNIQUES: Final[dict[str, Technique]] = {
    "weight-precision": Technique(
        says="the weights of the layers in 4 bits instead of 16, of the same model",
        a={"slots": 4, "ctx_per_slot": 512, "weights": "f16", "mmap": False},
        b={"slots": 4, "ctx_per_slot": 512, "weights": "q4_0", "mmap": False},
        workload=Workload(classes=one_class(64, 32)),
        points=(Point(1, 4), Point(4, 8, "4 in flight")),
        promise="weight-read-bound decode",
        shows=(
            Show("model_bytes", False),
            Show("memory_bytes", False),
            Show("tpot_ms.mean", False),
            Show("tpot_ms.mean", False, "4 in flight"),
        ),
        cost="answers change; unpacking the weights, which what is bound by compute pays and gets nothing for",
        flags={"vllm": ("", "--quantization fp8"), "sglang": ("", "--quantization fp8")},
        changes_answers=True,
    ),
    "kv-precision": Technique(
        says="keys and values kept in 8 bits instead of 16",
        a={"slots": 1, "ctx_per_slot": 2048, "mmap": False, "cache_type_k": "f16", "cache_type_v": "f16"},
        b={"slots": 1, "ctx_per_slot": 2048, "mmap": False, "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        workload=_DEEP,
        points=(Point(1, 4),),
        promise="KV-read-bound decode",
        shows=(Show("memory_bytes", False), Show("tpot_ms.mean", False), Show("ttft_ms.mean", True, price=True)),
        cost="answers change; converting on write and read, which on a CPU may take more than the reads it saves",
        flags={
            "vllm": ("", "--kv-cache-dtype fp8"),
            "sglang": ("", "--kv-cache-dtype fp8_e4m3"),
            "llama-server": ("", "--cache-type-k q8_0 --cache-type-v q8_0"),
        },
        changes_answers=True,
    ),
}
