"""Techniques of KV space: pages, reuse, eviction. See ``technique``."""

from __future__ import annotations

from typing import Final

from whywait.core.lengths import Lengths
from whywait.core.workload import RequestClass, Workload
from whywait.lab.technique import Point, Show, Technique, one_class

FULL = "pool full"  # more long requests at once than the space holds
SMALL, MIDDLE = "set of 2", "set of 4"
#: Four slots for two requests at a time, so that a set of two has room. By llama.cpp's own 0.1 a chat template alone is
#: likeness enough to overwrite the first slot, again and again; so unlike prompts take the slot used longest ago.
_KEPT = {"slots": 4, "ctx_per_slot": 256, "cache_prompt": True, "extra": {"slot_prompt_similarity": 0.5}}


def _mixed(long_share: float, long_prompt: int) -> Workload:
    """Short requests, and a few that need a large region."""
    return Workload(
        classes=(
            RequestClass("short", 1 - long_share, Lengths("fixed", 48), Lengths("fixed", 24)),
            RequestClass("long", long_share, Lengths("fixed", long_prompt), Lengths("fixed", 24)),
        )
    )


def _set(groups: int) -> Workload:
    """Prompts that begin with one of so many long beginnings."""
    return Workload(classes=one_class(96, 6, shared=0.9, groups=groups), cache="natural")


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
    "prefix-thrash": Technique(
        says="room for all the beginnings that come again, against a cache that evicts them before they do",
        a={**_KEPT, "cache_ram_mib": 0},
        b={**_KEPT, "cache_ram_mib": 256},
        workload=_set(8),
        points=(Point(2, 20), Point(2, 12, SMALL, workload=_set(2)), Point(2, 10, MIDDLE, workload=_set(4))),
        promise="prefix-cache thrash",
        shows=(
            Show("cached_share", True),
            Show("ttft_ms.mean", False),
            Show("memory_bytes", True, price=True),
        ),
        cost="memory for what is idle; copying it out and back",
        flags={
            "vllm": (
                "--enable-prefix-caching --max-num-seqs 2 --max-model-len 256 --num-gpu-blocks-override 24",
                "--enable-prefix-caching --max-num-seqs 2 --max-model-len 256 --num-gpu-blocks-override 96",
            ),
            "sglang": (
                "--max-total-tokens 512",
                "--max-total-tokens 512 --enable-hierarchical-cache --hicache-ratio 4",
            ),
            "llama-server": (
                "--parallel 4 --slot-prompt-similarity 0.5 --cache-ram 0",
                "--parallel 4 --slot-prompt-similarity 0.5 --cache-ram 256",
            ),
        },
    ),
    "paged-kv": Technique(
        says="one pool of KV space that all requests draw from as they grow, against a fixed region for each; as much "
        "space in all",
        a={"slots": 2, "ctx_per_slot": 512},
        b={"slots": 4, "ctx_per_slot": 256, "kv_unified": True},  # 1,024 tokens too
        workload=_mixed(0.125, 300),
        points=(Point(4, 16), Point(4, 4, FULL, workload=_mixed(1.0, 300))),
        promise="slot limit",
        shows=(
            Show("running", True),
            Show("output_tokens_per_s", True),
            Show("ttft_ms.mean", False),
            Show("failed_share", True, FULL, price=True),
        ),
        cost="the pool can run full: then requests are pushed out and computed again or, here, fail",
        flags={
            # A block per request, or many small ones; vLLM keeps one block for itself.
            "vllm": (
                "--max-model-len 512 --block-size 512 --num-gpu-blocks-override 3 --max-num-seqs 4",
                "--max-model-len 512 --block-size 32 --num-gpu-blocks-override 33 --max-num-seqs 4",
            ),
            "llama-server": (
                "--parallel 2 --ctx-size 1024 --no-kv-unified",
                "--parallel 4 --ctx-size 1024 --kv-unified",
            ),
        },
    ),
}
