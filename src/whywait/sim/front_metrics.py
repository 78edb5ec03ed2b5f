"""The metrics of the simulated service as a Prometheus page under vLLM's names. Seconds are those of the timetable, at
the pace it is served: what a client that is not late would see. No sockets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

# Bucket bounds as vLLM has them, so that dashboards and alerts made for it work here.
_SHORT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
          2560)  # fmt: skip
_STEP = tuple(float(2**k) for k in (0, *range(3, 15)))
_LATE = tuple(round(m * 10.0**e, 6) for e in range(-5, 1) for m in (1, 2, 5))
_FEW = (1, 2, 5, 10, 20)

REASONS = ("stop", "length", "abort", "error")
#: Name -> (what it is, bounds). Those of requests are told once, when it ends.
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("Arrival to first token.", _FIRST),
    "vllm:inter_token_latency_seconds": ("From one step that gave a request tokens to the next.", _SHORT),
    "vllm:request_time_per_output_token_seconds": ("Mean time per token after the first, per request.", _SHORT),
    "vllm:e2e_request_latency_seconds": ("Arrival to last token.", _LONG),
    "vllm:request_queue_time_seconds": ("Waiting to be scheduled.", _LONG),
    "vllm:request_inference_time_seconds": ("Scheduled to last token.", _LONG),
    "vllm:request_prefill_time_seconds": ("Scheduled to first token.", _LONG),
    "vllm:request_decode_time_seconds": ("First to last token.", _LONG),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", ()),
    "vllm:request_generation_tokens": ("Output tokens of a request.", ()),
    "vllm:request_params_max_tokens": ("max_tokens of a request.", ()),
    "vllm:request_params_n": ("Answers asked for by a request.", _FEW),
    "vllm:iteration_tokens_total": ("Prompt tokens computed and tokens produced in one engine step.", _STEP),
}
COUNTERS: Mapping[str, str] = {
    "vllm:prompt_tokens_total": "Prompt tokens of requests that got their first token.",
    "vllm:prompt_tokens_cached_total": "Those of them that were found in the prefix cache.",
    "vllm:generation_tokens_total": "Tokens produced.",
    "vllm:num_preemptions_total": "Requests pushed out of work for want of KV blocks.",
    "vllm:prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits_total": "Prompt tokens found there.",
}
SPECULATION: Mapping[str, str] = {
    "vllm:spec_decode_num_drafts_total": "Rounds of verification.",
    "vllm:spec_decode_num_draft_tokens_total": "Tokens proposed.",
    "vllm:spec_decode_num_accepted_tokens_total": "Proposed tokens that were accepted.",
}


def counts(most: int) -> tuple[float, ...]:
    """Bounds of token counts up to ``most``: 1, 2, 5, 10, …"""
    return tuple(float(m * 10**e) for e in range(10) for m in (1, 2, 5) if m * 10**e <= most)


class Histogram:
    """Counts by upper bound, sum and number. ``quantile`` is the bound of the bucket it lies in."""

    __slots__ = ("bounds", "counts", "number", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.number, self.total = 0, 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.number += times
        self.total += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        so_far, comma = 0, "," if labels else ""
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            so_far += count
            le = "+Inf" if bound is None else f"{float(bound)}"
            yield f'{name}_bucket{{{labels}{comma}le="{le}"}} {so_far}'
        yield f"{name}_count{{{labels}}} {self.number}"
        yield f"{name}_sum{{{labels}}} {self.total!r}"


class Late:
    """How late the last token of each step left: from when it was due to when the kernel had it, seconds."""

    def __init__(self) -> None:
        self.histogram = Histogram(_LATE)
        self.worst = 0.0

    def observe(self, seconds: float) -> None:
        self.histogram.observe(max(0.0, seconds))
        self.worst = max(self.worst, seconds)

    def quantile(self, share: float) -> float | None:
        """Upper bound of the bucket that holds it; None without steps."""
        h, so_far = self.histogram, 0
        for bound, count in zip(h.bounds, h.counts, strict=False):
            so_far += count
            if h.number and so_far >= share * h.number:
                return min(bound, self.worst)
        return self.worst if h.number else None


class Told:
    """What one engine has done so far."""

    def __init__(self, context: int) -> None:
        self.histograms = {name: Histogram(bounds or counts(context)) for name, (_, bounds) in HISTOGRAMS.items()}
        self.counters: dict[str, float] = dict.fromkeys((*COUNTERS, *SPECULATION), 0.0)
        self.finished = dict.fromkeys(REASONS, 0)
        self.late = Late()
        self.slipped_s = 0.0

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def add(self, name: str, value: float) -> None:
        self.counters[name] += value


@dataclass(frozen=True)
class Now:
    """Gauges of one engine: requests in work, waiting, and the share of KV blocks that those in work hold."""

    running: int
    waiting: int
    kv_use: float


@dataclass(frozen=True)
class Facts:
    """What does not change: the labels of the pages' info lines."""

    model: str
    cache: Mapping[str, str]
    simulated: Mapping[str, str]
    speed: float
    speculates: bool = False


def page(facts: Facts, engines: Sequence[tuple[Told, Now]], rejected: int) -> bytes:
    """The page of a service of one engine or several (replicas, told apart by the label ``engine`` as vLLM does)."""
    out: list[str] = []
    each = [
        (_labels({"engine": str(i), "model_name": facts.model}), told, now) for i, (told, now) in enumerate(engines)
    ]

    def family(name: str, kind: str, text: str, lines: Iterable[str]) -> None:
        out.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}", *lines))

    for name, text, field in (
        ("vllm:num_requests_running", "Requests in work.", "running"),
        ("vllm:num_requests_waiting", "Requests waiting.", "waiting"),
        ("vllm:kv_cache_usage_perc", "KV blocks held by requests in work, 1 is all.", "kv_use"),
    ):
        family(name, "gauge", text, (f"{name}{{{at}}} {float(getattr(now, field))!r}" for at, _, now in each))
    counters = {**COUNTERS, **(SPECULATION if facts.speculates else {})}
    for name, text in counters.items():
        family(name, "counter", text, (f"{name}{{{at}}} {told.counters[name]!r}" for at, told, _ in each))
    name = "vllm:prompt_tokens_by_source_total"
    family(name, "counter", "Prompt tokens by where their KV came from.", (
        f'{name}{{{at},source="{source}"}} {value!r}' for at, told, _ in each for source, value in _by_source(told)
    ))  # fmt: skip
    name = "vllm:request_success_total"
    family(name, "counter", "Requests that ended.", (
        f'{name}{{{at},finished_reason="{why}"}} {n}' for at, told, _ in each for why, n in told.finished.items()
    ))  # fmt: skip
    name, model = "vllm:admission_rejections_total", _labels({"model_name": facts.model})
    family(name, "counter", "Requests refused because too many were there.",
           [f'{name}{{{model},reason="max_num_queued_reqs"}} {rejected}'])  # fmt: skip
    for name, (text, _) in HISTOGRAMS.items():
        family(name, "histogram", text, (x for at, told, _ in each for x in told.histograms[name].lines(name, at)))
    name = "vllm:cache_config_info"
    family(name, "gauge", "The KV cache of the simulated engine.",
           (f"{name}{{{_labels({**facts.cache, 'engine': str(i)})}}} 1.0" for i in range(len(each))))  # fmt: skip
    out.extend(_own(facts, each))
    return ("\n".join(out) + "\n").encode()


def _own(facts: Facts, each: Sequence[tuple[str, Told, Now]]) -> Iterator[str]:
    """What no engine has: that this is none, and how far it kept its timetable."""
    yield "# HELP whywait_sim_info This service is simulated: all times are modelled."
    yield "# TYPE whywait_sim_info gauge"
    yield f"whywait_sim_info{{{_labels(facts.simulated)}}} 1.0"
    yield "# HELP whywait_sim_speed Simulated seconds per second."
    yield "# TYPE whywait_sim_speed gauge"
    yield f"whywait_sim_speed {float(facts.speed)!r}"
    name = "whywait_sim_lateness_seconds"
    yield f"# HELP {name} How late the last token of each step left, against the timetable."
    yield f"# TYPE {name} histogram"
    for at, told, _ in each:
        yield from told.late.histogram.lines(name, at)
    name = "whywait_sim_slipped_seconds_total"
    yield f"# HELP {name} By how much the timetable was moved because this machine could not keep it."
    yield f"# TYPE {name} counter"
    for at, told, _ in each:
        yield f"{name}{{{at}}} {told.slipped_s!r}"


def _by_source(told: Told) -> Iterator[tuple[str, float]]:
    cached = told.counters["vllm:prompt_tokens_cached_total"]
    yield "local_compute", told.counters["vllm:prompt_tokens_total"] - cached
    yield "local_cache_hit", cached


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{k}="{_escaped(v)}"' for k, v in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
