"""What ``whywait try`` can run: each technique as data. Arm A goes without it, arm B with it, all else alike.

A technique says beforehand what it promises to cut (a word of the closed vocabulary), what must be shown to have become
better, and what it is expected to cost. ``a`` and ``b`` are settings of the embedded engine, which runs on any machine;
``flags`` are what turns it off and on in an engine that a user brings (``--engine 'vllm serve MODEL'``), as its
documentation says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from whywait.core.lengths import Lengths
from whywait.core.workload import RequestClass, Workload
from whywait.lab.arms import embedded_text, with_flags


@dataclass(frozen=True)
class Point:
    """A load point of every round; the first of a technique is the main one and has no label. ``target`` is in flight,
    or per second where ``mode`` is rate."""

    target: float
    requests: int
    label: str = ""
    mode: str = "concurrency"


@dataclass(frozen=True)
class Show:
    """A claim: B moves ``metric`` ``up`` or down at the point labelled ``at``; ``price``: as what it costs."""

    metric: str
    up: bool
    at: str = ""
    price: bool = False


@dataclass(frozen=True)
class Technique:
    """``a`` and ``b``: settings of the embedded engine, or an arm as ``whywait ab`` takes it. ``flags``: program →
    (flags of A, flags of B). ``says`` is one line; ``cost`` what is to be paid, in words."""

    says: str
    a: Mapping[str, Any] | str
    b: Mapping[str, Any] | str
    workload: Workload
    points: tuple[Point, ...]
    promise: str
    shows: tuple[Show, ...]
    cost: str
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def arms(self, engine: str = "embedded", program: str = "") -> tuple[str, str] | None:
        """What ``whywait ab`` takes as --a and --b; None where there is no recipe for that program."""
        if engine == "embedded":
            a, b = (x if isinstance(x, str) else embedded_text(x) for x in (self.a, self.b))
            return a, b
        if program not in self.flags:
            return None
        off, on = self.flags[program]
        return with_flags(engine, off), with_flags(engine, on)


def _one_class(prompt: int, output: int, **more: Any) -> tuple[RequestClass, ...]:
    return (RequestClass(prompt_tokens=Lengths("fixed", prompt), output_tokens=Lengths("fixed", output), **more),)


TECHNIQUES: Final[dict[str, Technique]] = {
    "continuous-batching": Technique(
        says="several requests decoded together, each joining and leaving as it comes, against one after another",
        a={"slots": 1, "ctx_per_slot": 512},
        b={"slots": 4, "ctx_per_slot": 512},
        workload=Workload(classes=_one_class(64, 32)),
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
    "prefix-reuse": Technique(
        says="the KV of a beginning that comes again is kept and not computed again",
        a={"slots": 2, "ctx_per_slot": 512, "cache_prompt": False},
        b={"slots": 2, "ctx_per_slot": 512, "cache_prompt": True},
        workload=Workload(classes=_one_class(256, 16, shared=0.8), cache="natural"),
        points=(Point(2, 12),),
        promise="prefix cache off",
        shows=(Show("ttft_ms.p50", False), Show("output_tokens_per_s", True)),
        cost="KV space that idle prefixes hold; no gain where beginnings do not come again",
        flags={
            "vllm": ("--no-enable-prefix-caching", "--enable-prefix-caching"),
            "sglang": ("--disable-radix-cache", ""),
        },
    ),
    "kv-precision": Technique(
        says="keys and values kept in 8 bits instead of 16",
        a={"slots": 2, "ctx_per_slot": 1024, "cache_type_k": "f16", "cache_type_v": "f16"},
        b={"slots": 2, "ctx_per_slot": 1024, "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        workload=Workload(classes=_one_class(512, 32)),
        points=(Point(2, 8),),
        promise="KV-read-bound decode",
        shows=(Show("memory_bytes", False), Show("tpot_ms.mean", False), Show("ttft_ms.mean", True, price=True)),
        cost="converting on write and read; quality, which this trial does not measure",
        flags={"vllm": ("", "--kv-cache-dtype fp8"), "sglang": ("", "--kv-cache-dtype fp8_e5m2")},
    ),
}
