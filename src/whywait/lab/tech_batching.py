"""Techniques of how requests share a step. See ``technique``."""

from __future__ import annotations

from typing import Final

from whywait.core.lengths import Lengths
from whywait.core.workload import RequestClass, Workload
from whywait.lab.technique import Point, Show, Technique, one_class

SINGLE = "single stream"
BURST = "burst of 12"
LONG = "long prompt"  # the class of the requests that stand in the others' way

TECHNIQUES: Final[dict[str, Technique]] = {
    "continuous-batching": Technique(
        says="several requests decoded together, each joining and leaving as it comes, against one after another",
        a={"slots": 1, "ctx_per_slot": 512},
        b={"slots": 4, "ctx_per_slot": 512},
        workload=Workload(classes=one_class(32, 32)),
        # A burst needs no rate that lies between what one slot and four can serve on a machine nobody knows yet.
        points=(Point(4, 12), Point(12, 12, BURST), Point(1, 2, SINGLE)),
        promise="slot limit",
        shows=(
            Show("output_tokens_per_s", True),
            Show("ttft_ms.mean", False),
            Show("ttft_ms.spread", False, BURST),
            Show("tpot_ms.mean", True, price=True),
            Show("tpot_ms.mean", True, SINGLE, price=True),
        ),
        cost="each stream decodes more slowly while others run; KV space for all of them",
        flags={
            "vllm": ("--max-num-seqs 1", "--max-num-seqs 4"),
            "sglang": ("--max-running-requests 1", "--max-running-requests 4"),
            "llama-server": ("--parallel 1", "--parallel 4"),
        },
    ),
    "static-batching": Technique(
        says="requests join a running batch (B), against a batch that is decoded to its end before the next begins (A)",
        a={"slots": 4, "ctx_per_slot": 512, "cont_batching": False},
        b={"slots": 4, "ctx_per_slot": 512, "cont_batching": True},
        # Answers of unequal length: the whole batch waits for its longest.
        workload=Workload(
            classes=(RequestClass(prompt_tokens=Lengths("fixed", 32), output_tokens=Lengths("uniform", 4, 60)),)
        ),
        points=(Point(4, 16),),
        promise="queue",
        shows=(
            Show("output_tokens_per_s", True),
            Show("ttft_ms.mean", False),
            Show("tpot_ms.mean", True, price=True),
        ),
        cost="those that decode are held up by the prompts of those that join",
        flags={"llama-server": ("--parallel 4 --no-cont-batching", "--parallel 4 --cont-batching")},
    ),
    "chunked-prefill": Technique(
        says="prompts computed in small pieces beside those that decode, against whole prompts in one step",
        a={"slots": 4, "ctx_per_slot": 512, "batch": 2048, "ubatch": 512},
        b={"slots": 4, "ctx_per_slot": 512, "batch": 64, "ubatch": 64},
        workload=Workload(
            classes=(
                RequestClass("chat", 0.75, Lengths("fixed", 16), Lengths("fixed", 48)),
                RequestClass(LONG, 0.25, Lengths("fixed", 256), Lengths("fixed", 4)),
            )
        ),
        points=(Point(4, 12),),
        promise="neighbour's prefill",
        shows=(
            Show("chunk_gap_ms.max", False),
            Show("itl_ms.p99", False),
            Show(f"classes.{LONG}.ttft_ms.mean", True, price=True),
            Show("output_tokens_per_s", False, price=True),
        ),
        cost="long prompts take more steps, each with its overhead and the decodes of others in it: their TTFT",
        flags={
            # vLLM wants the budget to hold a token of each sequence; its default of sequences is more than 64.
            "vllm": (
                "--max-num-batched-tokens 2048 --max-num-seqs 16",
                "--max-num-batched-tokens 64 --max-num-seqs 16",
            ),
            "sglang": ("--chunked-prefill-size -1", "--chunked-prefill-size 64 --enable-mixed-chunk"),
            "llama-server": ("--batch-size 2048 --ubatch-size 512", "--batch-size 64 --ubatch-size 64"),
        },
    ),
}
