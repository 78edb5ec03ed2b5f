"""What the rules look at: one record per load point, drawn from both accounts, the summary and the readings.

Only types and what follows from them; ``gather`` fills them from a Run. None is unknown everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whywait.units import load_name

KV_FULL = 0.9  # of the KV space in use
MIXED = "long prompts mixed in"


@dataclass(frozen=True)
class Level:
    """A gauge over a point: time-weighted mean, extremes, and its growth from the first third to the last."""

    mean: float
    low: float
    high: float
    growth: float | None = None


@dataclass(frozen=True)
class Cpu:
    """Processor time of the engine, per second of wall time.

    ``run`` of all its threads; ``lost`` is what the computing threads waited for a core, of the time they wanted one
    (0..1), ``wait`` the same of wall time, per thread; ``others`` is what anybody but us used on the cores it may run
    on, ``neighbour`` who used most; ``serving`` is ``run`` without the threads that compute, ``serving_wait`` what
    those others waited for a core, ``serving_top`` the busiest serving thread: process, seconds on a core, seconds
    ready. ``quota`` in cores, ``throttled`` seconds and ``throttled_periods`` (share) of its control group. ``hot`` is
    what the busiest computing thread ran or wanted to run, the time it was throttled included.
    """

    run: float | None = None
    lost: float | None = None
    wait: float | None = None
    others: float | None = None
    serving: float | None = None
    serving_wait: float | None = None
    serving_top: tuple[str, float, float] | None = None
    quota: float | None = None
    throttled: float | None = None
    throttled_periods: float | None = None
    neighbour: str = ""
    hot: float | None = None


@dataclass(frozen=True)
class Streams:
    """What the client's stamps say of a point. ``together`` is the share of content chunks that came in one read with
    the one before; ``bursts`` the median reads that carried content per request, of ``chunks`` content chunks;
    ``first_share`` the median TTFT over end-to-end; ``outside_ms`` what neither queue nor prefill explains of the time
    to the first token, at its 5th percentile, median and 95th; ``engine_gap_ms`` the engine's own mean gap;
    ``with_first`` the share of requests whose first read already carried several content chunks."""

    together: float | None = None
    bursts: float | None = None
    chunks: float | None = None
    first_share: float | None = None
    outside_ms: tuple[float, float, float] | None = None
    engine_gap_ms: float | None = None
    client_gap_ms: float | None = None
    with_first: float | None = None


@dataclass(frozen=True)
class Work:
    """What was asked of the service in a point: medians of tokens, how unequal the answers were, and how the load grew.

    ``long_share`` is the part of the service time (first prefill to last token) of requests whose answers are at least
    ``LONG`` times the median, and ``long_n`` their part of the requests; ``pending`` (first third, last third) the mean
    requests in flight; ``ttft_growth`` their median TTFT likewise, ms. ``big_prompts`` is the part of the prompt tokens
    computed that belongs to prompts of at least ``LONG`` times the median.
    """

    prompt: float | None = None
    output: float | None = None
    long_share: float = 0.0
    long_n: float = 0.0
    long_answer: float | None = None
    big_prompts: float = 0.0
    pending: tuple[float, float] | None = None
    ttft_growth: tuple[float, float] | None = None


@dataclass(frozen=True)
class Reuse:
    """Equal beginnings that were sent, and what became of them: shares of the prompt tokens. ``offered`` is what could
    have come from a cache (None: the workload does not say), ``hit`` what did; ``looked`` whether the engine looks
    prefixes up at all (None unknown); ``any_hit`` whether a single token came from a cache."""

    offered: float | None = None
    hit: float | None = None
    looked: bool | None = None
    any_hit: bool = False
    groups: int = 1


@dataclass(frozen=True)
class Draft:
    """Speculation in a point: tokens proposed, accepted, and rounds; ``tokens`` made in all, by drafts or not."""

    proposed: float
    accepted: float
    rounds: float | None
    tokens: float | None = None

    @property
    def lost(self) -> float:
        """Of the positions computed in decode, those for nothing; where few steps draft, few are."""
        wrong = max(self.proposed - self.accepted, 0.0)
        return wrong / max(wrong + (self.tokens or self.accepted + (self.rounds or 0.0)), 1e-9)

    @property
    def rate(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass(frozen=True)
class Seen:
    """One load point, as the summary has it. ``share``: parts of the requests' time by phase (they add up to 1), with
    ``turn`` split off from queue: waiting for a step of a neighbour's prefill while a place was free. ``device``:
    parts of the device's wall time. ``ok`` is how many succeeded (of a watched service: ended) of those
    ``tried``. ``client_lost`` is what our own busiest loop waited for a core, of the time it wanted one; ``neighbours``
    the cores that neither engine nor client used.
    """

    number: int
    mode: str
    target: float
    label: str | None
    ok: int
    tried: int
    share: dict[str, float]
    mean_ms: dict[str, float]
    how: dict[str, str]
    causes: dict[str, dict[str, float]]
    device: dict[str, float]
    summary: dict[str, Any]
    gauges: dict[str, Level | None]
    cpu: Cpu = field(default_factory=Cpu)
    streams: Streams = field(default_factory=Streams)
    work: Work = field(default_factory=Work)
    reuse: Reuse = field(default_factory=Reuse)
    draft: Draft | None = None
    client_lost: float | None = None
    neighbours: float | None = None
    preemptions: float | None = None
    rejected: float | None = None
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return load_name(self.mode, self.target, self.label)

    @property
    def tokens_per_s(self) -> float | None:
        value: float | None = self.summary.get("output_tokens_per_s")
        return value

    @property
    def total_ms(self) -> float:
        return sum(self.mean_ms.values())

    def p(self, metric: str, q: str = "p50") -> float | None:
        found = self.summary.get(metric)
        value: float | None = found.get(q) if found else None
        return value

    def known(self, phase: str) -> bool:
        return self.how.get(phase, "unknown") != "unknown"

    @property
    def kv_tight(self) -> bool:
        """KV space was full, or had no room for one more request of the usual size."""
        kv, running = self.gauges.get("kv_use"), self.gauges.get("running")
        if kv is None:
            return False
        each = 0.0 if running is None else kv.mean / max(running.mean, 1.0)
        return kv.high >= KV_FULL or kv.high + each >= 1.0

    @property
    def starved(self) -> float:
        """The part of the time that the engine's computing threads had no core though they wanted one."""
        return 0.0 if self.cpu.lost is None or self.cpu.wait is None else min(self.cpu.lost, self.cpu.wait)

    @property
    def working(self) -> float:
        """The part of the requests' time in which the engine works on them: what slow cores stretch."""
        return sum(self.share[k] for k in ("prefill", "decode", "stall", "turn"))

    @property
    def in_flight(self) -> float | None:
        """Mean requests in flight; ours, or of a watched service those its gauges show."""
        found = self.summary.get("in_flight") or {}
        mean = found.get("mean")
        if not mean and self.summary.get("passive"):
            mean = self.summary["passive"].get("in_flight")
        return None if mean is None else float(mean)

    @property
    def itl_left_out(self) -> float | None:
        """The part of the gaps that ITL leaves out, since how many tokens their chunks carry is not known."""
        known, gaps = ((self.summary.get(k) or {}).get("n") for k in ("itl_ms", "chunk_gap_ms"))
        return None if known is None or not gaps else 1 - known / gaps

    @property
    def step_ms(self) -> float | None:
        """The usual time of a decode step: the median gap per token, so that stalls do not enter."""
        return self.p("itl_ms") or self.p("tpot_ms") or self.p("chunk_gap_ms")


@dataclass(frozen=True)
class Evidence:
    """Of a whole Run. ``focus`` is the load the verdict is about, ``beyond`` the rungs above it that only we asked for;
    ``lag_ms`` how late our own loop read (p50, p99), ``late_reads`` which part of coalesced reads came while it was;
    ``paged`` whether a page of the engine's metrics was read."""

    points: list[Seen]
    engine: dict[str, Any]
    machine: dict[str, Any]
    flags: dict[str, str] = field(default_factory=dict)
    focus: Seen | None = None
    beyond: tuple[int, ...] = ()
    lag_ms: tuple[float, float] | None = None
    late_reads: float | None = None
    paged: bool = False

    @property
    def plain(self) -> list[Seen]:
        """Points of the user's own workload, in order of load."""
        return sorted((p for p in self.points if not p.label and p.ok), key=lambda p: p.target)

    def single(self) -> Seen | None:
        return next((p for p in self.plain if p.mode == "concurrency" and p.target == 1), None)

    def lower(self, p: Seen) -> Seen | None:
        """The point of the least load below ``p``, of the same mode or one at a time."""
        found = [q for q in self.plain if q.number != p.number and (q.mode == p.mode or q.target <= 1)
                 and ((q.in_flight or 0) < (p.in_flight or 0) or q.target < p.target)]  # fmt: skip
        return min(found, key=lambda q: q.in_flight or q.target, default=None)

    def limit(self) -> int | None:
        """How many requests are worked on at once, told or seen."""
        told = self.engine.get("slots")
        return int(told) if told else self.seen_limit()

    def seen_limit(self) -> int | None:
        """How many requests were in work at most while others waited, where it was the same at every such point."""
        tops = set()
        for p in self.points:
            running, waiting = p.gauges.get("running"), p.gauges.get("waiting")
            if running is None or waiting is None or waiting.mean < 0.5 or p.kv_tight:
                continue
            tops.add(round(running.high) if running.mean >= 0.75 * running.high else None)
        return tops.pop() if len(tops) == 1 else None

    def by(self, what: str, limit: str) -> str:
        """``what``, with the engine's own flag for it where that is known."""
        flag = self.flag(limit)
        return f"{what}: {flag}" if flag else what

    def profile(self, look: str) -> str:
        """The last resort: the engine's own profiler, how it is run where that is known, and what to look for."""
        return f"{self.by('profile the engine', 'profiler')}; look for {look}"

    def flag(self, limit: str) -> str:
        return self.flags.get(limit, "")


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, or None where either is unknown or b is 0."""
    if a is None or b is None or not b or not np.isfinite(a) or not np.isfinite(b):
        return None
    return a / b
