"""Cases on the embedded engine: llama.cpp with SmolLM2-135M (some with tiny random weights), one thread.

Lengths suit 30–50 ms a token and 4 ms a prompt token, so that 20 seconds hold enough requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from whywait.lab.exam import Case, Point, chat, closed, mixed, opened

DECODE: Final = ("weight-read-bound decode", "compute-bound decode")
#: What may be said of an engine that has nothing to complain of but its own work.
HEALTHY: Final = (*DECODE, "compute-bound prefill", "want of load")

CHAT: Final = chat(32, 32)
SHORT: Final = chat(24, 12)
SHARED: Final = chat(420, 8, shared=0.9)
FAST: Final = chat(48, 40)
TINY: Final = {"slots": 8, "ctx_per_slot": 2048, "synthetic": "tiny"}
FOUR: Final = {"slots": 4}
EIGHT: Final = {"slots": 8}


def _case(name: str, fault: str, accepted: str | tuple[str, ...], **more: Any) -> Case:
    right = (accepted,) if isinstance(accepted, str) else accepted
    more = {"workload": CHAT, "points": closed(4), "settings": FOUR, **more}
    return Case(f"llama-{name}", "embedded", fault, right, **more)


#: On one thread every prompt holds up the streams beside it, be it for 100 ms: true of all points but the single one.
BESIDE: Final = ("neighbour's prefill",)


def _bases() -> Iterator[Case]:
    yield _case("base", "", HEALTHY, symptoms=BESIDE)
    yield _case("base-alone", "", HEALTHY, points=(Point("concurrency", 1, 20),))
    yield _case("base-wide", "", HEALTHY, settings=EIGHT, points=closed(8), symptoms=BESIDE)
    yield _case("base-url", "", HEALTHY, by="url", symptoms=BESIDE)
    yield _case("base-short", "", HEALTHY, workload=SHORT, by="url", symptoms=BESIDE)
    yield _case("base-shared", "", HEALTHY, workload=SHARED, symptoms=BESIDE)
    fast = (*HEALTHY, "host CPU")  # a model so small that the server around it is much of its time
    yield _case("base-fast", "", fast, settings=TINY, workload=FAST, points=closed(4, 10, 4), by="url",
                symptoms=BESIDE)  # fmt: skip
    yield _case("base-fast-rate", "", fast, settings=TINY, workload=FAST, points=opened(20.0, 14, 4),
                symptoms=BESIDE)  # fmt: skip
    yield _case("base-rate", "", HEALTHY, workload=SHORT, points=opened(1.0), symptoms=BESIDE)


def _engine() -> Iterator[Case]:
    base = "llama-base-wide"
    for slots, load in ((1, 4), (1, 8), (2, 8)):
        yield _case(f"slots-{slots}-of-{load}", "slot limit", "slot limit", settings={"slots": slots},
                    points=closed(load), base=base)  # fmt: skip
    for tokens in (640, 896):  # eight requests need 1,350
        yield _case(f"kv-{tokens}", "kv space", "kv space", workload=chat(64, 96), points=closed(8), base=base,
                    settings={"slots": 8, "kv_unified": True, "extra": {"n_ctx": tokens}})  # fmt: skip
    off = {"slots": 4, "cache_prompt": False}
    for load in (1, 4):
        yield _case(f"cache-off-{load}", "prefix cache off", "prefix cache off", settings=off, workload=SHARED,
                    points=closed(load) if load > 1 else (Point("concurrency", 1, 20),),
                    symptoms=("compute-bound prefill",), base="llama-base-shared")  # fmt: skip
    for groups in (12, 24):
        yield _case(f"thrash-{groups}", "prefix-cache thrash", "prefix-cache thrash",
                    workload=chat(420, 8, shared=0.9, groups=groups), symptoms=("compute-bound prefill",),
                    base="llama-base-shared")  # fmt: skip
    # The eight prompts of a warm cache each have a slot, so that nothing of them is computed but the last token.
    tiny = {"slots": 8, "ctx_per_slot": 8192, "synthetic": "tiny"}
    for words in (3000, 7000):
        yield _case(f"tokenise-{words}", "tokenisation", "host CPU", settings=tiny, points=closed(4, 10, 4),
                    workload=chat(words, 1, cache="warm"), base="llama-base")  # fmt: skip
    for most in (4, 12):
        speculate = {"slots": 4, "draft": most}
        yield _case(f"draft-{most}", "a draft that never agrees", "poor speculation", settings=speculate,
                    base="llama-base")  # fmt: skip


def _machine() -> Iterator[Case]:
    base = "llama-base"
    for cpus in (0.7, 0.5, 0.25):
        yield _case(f"quota-{cpus:g}", "cpu quota", "cpu quota", put="quota", args={"cpus": cpus}, base=base)
    for count in (1, 2, 4):
        yield _case(f"hog-{count}", "noisy neighbour", "noisy neighbour", put="hog", args={"count": count}, base=base)
    # Kernel stamps make our client hard to starve: it takes many short streams in open loop, where sends come late.
    for count in (16, 32):
        yield _case(f"client-{count}", "a starved client", "the client itself", put="starved client",
                    args={"count": count}, settings=TINY, workload=FAST, points=opened(20.0, 14, 4),
                    base="llama-base-fast-rate")  # fmt: skip


def _line() -> Iterator[Case]:
    base = "llama-base-short"
    # Jitter that keeps the order hands pieces on in clumps, as a buffer does: a true word, but not the main one.
    # Where the service takes long itself, a short way there is no cause: the strengths suit each service's own time.
    for ms, jitter in ((150, 0), (300, 0)):
        yield _case(f"delay-{ms}-{jitter}", "network latency", "network latency", workload=SHORT, put="delay",
                    args={"ms": ms, "jitter_ms": jitter}, points=closed(2), by="url", base=base)  # fmt: skip
    for ms, jitter in ((60, 0), (100, 100)):
        yield _case(f"delay-{ms}-{jitter}", "network latency", "network latency", workload=FAST, put="delay",
                    args={"ms": ms, "jitter_ms": jitter}, settings=TINY, points=closed(4, 10, 4), by="url",
                    symptoms=("buffering proxy",) if jitter else (), base="llama-base-fast")  # fmt: skip
    for size in (16384, 4096):
        yield _case(f"buffer-{size // 1024}k", "a buffering proxy", "buffering proxy", put="buffering",
                    args={"size": size}, by="url", base="llama-base-url")  # fmt: skip
    for most in (1, 3):
        yield _case(f"shed-{most}", "load shedding", "load shedding", workload=SHORT, put="shedding",
                    args={"most": most}, points=opened(5.0, 14), by="url", base="llama-base-rate")  # fmt: skip


def _load() -> Iterator[Case]:
    for long in (400, 1000):
        yield _case(f"long-prompts-{long}", "long prompts mixed into decode", "neighbour's prefill",
                    workload=mixed((24, 48), (long, 4), 0.2), base="llama-base-alone",
                    symptoms=("compute-bound prefill",))  # fmt: skip
    for prompt in (300, 800):
        yield _case(f"prefill-{prompt}", "long prompts", "compute-bound prefill", workload=chat(prompt, 4),
                    points=closed(2, 20, 8), symptoms=BESIDE)  # fmt: skip
    yield _case("long-answers-2", "long answers that hold every slot", "long requests", settings={"slots": 2},
                workload=mixed((24, 4), (24, 200), 0.25), points=closed(6, 24), symptoms=("slot limit",),
                base="llama-base-wide")  # fmt: skip
    yield _case("long-answers-4", "long answers that hold every slot", "long requests",
                workload=mixed((24, 4), (24, 160), 0.4), points=closed(12, 24), symptoms=("slot limit",),
                base="llama-base-wide")  # fmt: skip
    for rate, seconds in ((4.0, 15), (8.0, 8)):  # 64 requests at most, that the queue is worked off in half a minute
        yield _case(f"rate-{rate:g}", "rate beyond capacity", "rate beyond capacity", workload=SHORT,
                    points=opened(rate, seconds), symptoms=("slot limit",), base="llama-base-rate")  # fmt: skip
    yield _case("few-2", "concurrency too low", "want of load", settings=EIGHT, points=closed(2),
                base="llama-base-full")  # fmt: skip
    yield _case("seldom", "rate too low", "want of load", workload=SHORT, points=opened(0.3, 24),
                base="llama-base-full")  # fmt: skip
    yield _case("base-full", "", (*DECODE, "compute-bound prefill", "slot limit"),
                symptoms=BESIDE, points=(Point("concurrency", 4, 18), Point("concurrency", 6, 18)))  # fmt: skip


def _two() -> Iterator[Case]:
    yield _case("two-slots-delay", "slot limit and network latency", ("slot limit", "network latency"), put="delay",
                args={"ms": 200, "jitter_ms": 0}, settings={"slots": 1}, workload=SHORT, points=closed(4), by="url",
                together=True, base="llama-base-short")  # fmt: skip
    yield _case("two-hog-prompts", "noisy neighbour and long prompts mixed in",
                ("noisy neighbour", "neighbour's prefill"), put="hog", args={"count": 2},
                workload=mixed((24, 48), (600, 4), 0.2), symptoms=("compute-bound prefill",), together=True,
                base="llama-base-alone")  # fmt: skip


CASES: Final[tuple[Case, ...]] = (*_bases(), *_engine(), *_machine(), *_line(), *_load(), *_two())
