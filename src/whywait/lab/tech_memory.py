"""Techniques of KV space: pages, reuse, eviction. See ``technique``."""

from __future__ import annotations

from typing import Final

from whywait.core.workload import Workload
from whywait.lab.technique import Point, Show, Technique, one_class

TECHNIQUES: Final[dict[str, Technique]] = {
    "prefix-reuse": Technique(
        says="the KV of a beginning that comes again is kept and not computed again",
        a={"slots": 2, "ctx_per_slot": 512, "cache_prompt": False},
        b={"slots": 2, "ctx_per_slot": 512, "cache_prompt": True},
        workload=Workload(classes=one_class(256, 16, shared=0.8), cache="natural"),
        points=(Point(2, 12),),
        promise="prefix cache off",
        shows=(Show("ttft_ms.p50", False), Show("output_tokens_per_s", True)),
        cost="KV space that idle prefixes hold; no gain where beginnings do not come again",
        flags={
            "vllm": ("--no-enable-prefix-caching", "--enable-prefix-caching"),
            "sglang": ("--disable-radix-cache", ""),
        },
    ),
}
