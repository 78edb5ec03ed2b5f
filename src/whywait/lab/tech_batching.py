"""Techniques of how requests share a step. See ``technique``."""

from __future__ import annotations

from typing import Final

from whywait.core.workload import Workload
from whywait.lab.technique import Point, Show, Technique, one_class

TECHNIQUES: Final[dict[str, Technique]] = {
    "continuous-batching": Technique(
        says="several requests decoded together, each joining and leaving as it comes, against one after another",
        a={"slots": 1, "ctx_per_slot": 512},
        b={"slots": 4, "ctx_per_slot": 512},
        workload=Workload(classes=one_class(64, 32)),
        points=(Point(4, 16), Point(1, 3, "single stream")),
        promise="slot limit",
        shows=(
            Show("output_tokens_per_s", True),
            Show("ttft_ms.mean", False),
            Show("tpot_ms.mean", True, price=True),
            Show("tpot_ms.mean", True, "single stream", price=True),
        ),
        cost="each stream decodes more slowly while others run; KV space for all of them",
        flags={
            "vllm": ("--max-num-seqs 1", "--max-num-seqs 4"),
            "sglang": ("--max-running-requests 1", "--max-running-requests 4"),
            "llama-server": ("--parallel 1", "--parallel 4"),
        },
    ),
}
