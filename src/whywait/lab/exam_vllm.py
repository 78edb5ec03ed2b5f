"""Cases on vLLM with a small Llama of random weights, written by ``exam_model``: about 10 ms a step on one core.

One token is about one letter of a prompt, since the tokenizer knows bytes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from whywait.lab.exam import Case, Point, chat, closed, mixed, opened
from whywait.lab.exam_llama import BESIDE, DECODE, HEALTHY

CHAT: Final = chat(64, 48)
SHORT: Final = chat(48, 4)
SHARED: Final = chat(600, 12, shared=0.9, groups=2)
#: The engine of most cases: room for 16 sequences, more KV space than they need.
USUAL: Final = {"--max-num-seqs": 16}


def _case(name: str, fault: str, accepted: str | tuple[str, ...], **more: Any) -> Case:
    right = (accepted,) if isinstance(accepted, str) else accepted
    more = {"workload": CHAT, "points": closed(8), "settings": USUAL, **more}
    return Case(f"vllm-{name}", "vllm", fault, right, **more)


def _bases() -> Iterator[Case]:
    # A part of its steps is the framework's own work, which host CPU is a true word for.
    small = (*HEALTHY, "host CPU")
    yield _case("base", "", small, symptoms=BESIDE)
    yield _case("base-alone", "", small, points=(Point("concurrency", 1, 15),))
    yield _case("base-url", "", small, by="url", symptoms=BESIDE)
    yield _case("base-short", "", small, workload=SHORT, points=closed(4), by="url", symptoms=BESIDE)
    yield _case("base-wide", "", small, points=closed(16), symptoms=BESIDE)
    yield _case("base-shared", "", small, workload=SHARED, symptoms=BESIDE)
    yield _case("base-short-rate", "", small, workload=SHORT, points=opened(8.0, 14), symptoms=BESIDE)
    yield _case("base-rate", "", small, workload=SHORT, points=opened(2.0), symptoms=BESIDE)


def _engine() -> Iterator[Case]:
    base = "vllm-base-wide"
    for slots, load in ((1, 8), (2, 8), (4, 16)):
        yield _case(f"slots-{slots}-of-{load}", "slot limit", "slot limit", settings={"--max-num-seqs": slots},
                    points=closed(load), base=base)  # fmt: skip
    tight = {"--max-num-seqs": 16, "--num-gpu-blocks-override": 24, "--max-model-len": 640}
    for output, load in ((200, 8), (400, 12)):
        yield _case(f"kv-24-{output}", "kv space", "kv space", settings=tight, workload=chat(64, output),
                    points=closed(load, 24), base=base)  # fmt: skip
    off = {**USUAL, "--no-enable-prefix-caching": ""}
    for load in (2, 8):
        yield _case(f"cache-off-{load}", "prefix cache off", "prefix cache off", settings=off, workload=SHARED,
                    points=closed(load), symptoms=("compute-bound prefill",), base="vllm-base-shared")  # fmt: skip
    small = {"--max-num-seqs": 2, "--num-gpu-blocks-override": 132, "--max-model-len": 4096}
    for groups in (12, 24):  # 540 shared tokens are 16 blocks of 32
        yield _case(f"thrash-{groups}", "prefix-cache thrash", "prefix-cache thrash", settings=small,
                    workload=chat(600, 12, shared=0.9, groups=groups), points=closed(2),
                    symptoms=("compute-bound prefill", "kv space"), base="vllm-base-shared")  # fmt: skip
    draft = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    for most in (4, 8):  # at temperature 1 random weights say every letter alike; at 0 they go in circles
        settings = {**USUAL, "--speculative-config": {**draft, "num_speculative_tokens": most}}
        yield _case(f"draft-{most}", "a draft that never agrees", "poor speculation", settings=settings,
                    workload=chat(64, 48, temperature=1.0), points=closed(4), base="vllm-draft-agrees")  # fmt: skip
    yield _case("draft-agrees", "", (*HEALTHY, "host CPU"), settings=settings, points=closed(4),
                symptoms=BESIDE)  # fmt: skip
    queued = {"--max-num-seqs": 2, "--max-num-queued-reqs": 2}
    yield _case("shed-own", "load shedding by the engine", "load shedding", settings=queued, points=opened(15.0, 12),
                base="vllm-base-rate")  # fmt: skip
    for load in (16, 48):
        yield _case(f"frontend-{load}", "a frontend busier than its model", "host CPU",
                    settings={"--max-num-seqs": 64, "model": "nano"}, points=closed(load, 14, 4), base="")  # fmt: skip
    yield _case("tokenise", "tokenisation", "host CPU", settings={"--max-num-seqs": 64, "model": "nano"},
                workload=chat(1500, 1, cache="warm"), points=closed(8, 12, 4), base="")  # fmt: skip


def _machine() -> Iterator[Case]:
    base = "vllm-base"
    for cpus in (0.6, 0.3):
        yield _case(f"quota-{cpus:g}", "cpu quota", "cpu quota", put="quota", args={"cpus": cpus}, base=base)
    for count in (1, 3):
        yield _case(f"hog-{count}", "noisy neighbour", "noisy neighbour", put="hog", args={"count": count}, base=base)
    for count in (16, 32):
        yield _case(f"client-{count}", "a starved client", "the client itself", put="starved client",
                    args={"count": count}, workload=SHORT, points=opened(8.0, 14),
                    base="vllm-base-short-rate")  # fmt: skip


def _line() -> Iterator[Case]:
    base = "vllm-base-short"
    for ms, jitter in ((60, 0), (150, 0), (60, 80)):
        yield _case(f"delay-{ms}-{jitter}", "network latency", "network latency", workload=SHORT, put="delay",
                    args={"ms": ms, "jitter_ms": jitter}, points=closed(4), by="url", base=base,
                    symptoms=("buffering proxy",) if jitter else ())  # fmt: skip
    for size in (16384, 4096):
        yield _case(f"buffer-{size // 1024}k", "a buffering proxy", "buffering proxy", put="buffering",
                    args={"size": size}, by="url", base="vllm-base-url")  # fmt: skip
    yield _case("shed-gateway", "load shedding", "load shedding", put="shedding", args={"most": 3},
                points=opened(15.0, 12), by="url", base="vllm-base-rate")  # fmt: skip


def _load() -> Iterator[Case]:
    for long in (800, 1600):
        yield _case(f"long-prompts-{long}", "long prompts mixed into decode", "neighbour's prefill",
                    workload=mixed((48, 64), (long, 4), 0.25), base="vllm-base-alone",
                    symptoms=("compute-bound prefill",))  # fmt: skip
    for load in (1, 4):
        yield _case(f"prefill-{load}", "long prompts", "compute-bound prefill", workload=chat(1600, 2),
                    points=closed(load) if load > 1 else (Point("concurrency", 1, 18),), symptoms=BESIDE)  # fmt: skip
    yield _case("long-answers", "long answers that hold every slot", "long requests", settings={"--max-num-seqs": 2},
                workload=mixed((32, 4), (32, 500), 0.25), points=closed(8, 24), symptoms=("slot limit",),
                base="vllm-base-wide")  # fmt: skip
    for rate, seconds in ((40.0, 6), (80.0, 3)):
        yield _case(f"rate-{rate:g}", "rate beyond capacity", "rate beyond capacity", workload=CHAT,
                    points=opened(rate, seconds), symptoms=("slot limit",), base="vllm-base-rate")  # fmt: skip
    yield _case("few-2", "concurrency too low", "want of load", points=closed(2), base="vllm-base-full")
    yield _case("seldom", "rate too low", "want of load", workload=SHORT, points=opened(0.5, 20),
                base="vllm-base-full")  # fmt: skip
    yield _case("base-full", "", (*DECODE, "compute-bound prefill", "host CPU", "slot limit"),
                symptoms=BESIDE, points=(Point("concurrency", 16, 16), Point("concurrency", 24, 16)))  # fmt: skip


def _two() -> Iterator[Case]:
    yield _case("two-slots-quota", "slot limit and cpu quota", ("slot limit", "cpu quota"), put="quota",
                args={"cpus": 0.5}, settings={"--max-num-seqs": 2}, points=closed(8), together=True,
                base="vllm-base-wide")  # fmt: skip


CASES: Final[tuple[Case, ...]] = (*_bases(), *_engine(), *_machine(), *_line(), *_load(), *_two())
