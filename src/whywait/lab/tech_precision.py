"""Techniques of fewer bits: weights and KV cache. See ``technique``."""

from __future__ import annotations

from typing import Final

from whywait.core.workload import Workload
from whywait.lab.technique import Point, Show, Technique, one_class

TECHNIQUES: Final[dict[str, Technique]] = {
    "kv-precision": Technique(
        says="keys and values kept in 8 bits instead of 16",
        a={"slots": 2, "ctx_per_slot": 1024, "cache_type_k": "f16", "cache_type_v": "f16"},
        b={"slots": 2, "ctx_per_slot": 1024, "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        workload=Workload(classes=one_class(512, 32)),
        points=(Point(2, 8),),
        promise="KV-read-bound decode",
        shows=(Show("memory_bytes", False), Show("tpot_ms.mean", False), Show("ttft_ms.mean", True, price=True)),
        cost="converting on write and read; quality, which this trial does not measure",
        flags={"vllm": ("", "--kv-cache-dtype fp8"), "sglang": ("", "--kv-cache-dtype fp8_e5m2")},
    ),
}
