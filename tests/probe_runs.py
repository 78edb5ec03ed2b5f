"""Runs of ``whywait probe`` whose truth is known: a service of numbers, probed by the journey's own plan."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.analysis_runs import MS, S, make_run, stream
from whywait.analyze.pairs import BESIDE, PAIR, SINGLES
from whywait.core.run import Run
from whywait.probing import Plan, Row, _ladder


@dataclass
class Truth:
    """Times in ms. ``noise``: sigma of lognormal times (median 1); ``outliers``: share of requests 3 times as slow."""

    fixed: float = 30.0
    per_token: float = 0.2
    per_token2: float = 0.0
    step: float = 8.0
    per_context: float = 0.002
    noise: float = 0.03
    outliers: float = 0.03
    cache: float = 0.0  # share of prefill that a repeat does without
    reports: bool = False  # cached tokens, in blocks of 16
    second: float = 1.3  # step of two / step of one; 0: one slot
    chunk: int = 0  # tokens of a piece of prefill; 0: whole
    stalls: bool = True
    drift: float = 0.0  # more at the end than at the beginning


class Probed:
    """``Probed(truth, seed).run(rounds)``: requests one after another, pairs at once, in the plan's random order."""

    def __init__(self, truth: Truth, seed: int, longest: int = 2048) -> None:
        self.truth, self.rng, self.seed = truth, np.random.default_rng(seed), seed
        self.plan = Plan(_ladder(longest), 32, 64, 150 * MS)
        self.rows: list[dict[str, Any]] = []
        self.chunks: list[dict[str, Any]] = []
        self.points: list[dict[str, Any]] = []
        self.now = S

    def run(self, rounds: int, **manifest: Any) -> Run:
        order = random.Random(self.seed)
        for number in range(rounds):
            self.slow = 1 + self.truth.drift * number / max(1, rounds - 1)
            parts = [(SINGLES, self._singles, self.plan.singles(number, order))]
            parts += [(PAIR, self._pair, self.plan.pair())] * 2 + [(BESIDE, self._beside, self.plan.long_beside())]
            order.shuffle(parts)
            for what, send, rows in parts:
                begun = self.now
                send(rows)
                point = {"mode": "concurrency", "target": 1, "start_ns": begun, "end_ns": self.now}
                self.points.append({**point, "label": f"round {number + 1}: {what}"})
                self.now += 20 * MS
        return make_run(
            self.rows, self.chunks, points=self.points, journey={"probe": {"connect_ms": [0.2] * 8}}, **manifest
        )

    def _noisy(self, t: float) -> float:
        late = 3.0 if self.rng.random() < self.truth.outliers else 1.0
        return t * self.slow * late * float(np.exp(self.truth.noise * self.rng.standard_normal()))

    def prefill(self, n: int) -> float:
        return self.truth.per_token * n + self.truth.per_token2 * n * n

    def _singles(self, rows: list[Row]) -> None:
        for r in rows:
            # Texts come out a little longer or shorter than asked, but a repeated one as before.
            t, n = (
                self.truth,
                r.prompt + (random.Random(f"{self.now if r.block < 0 else r.block}").randrange(r.prompt // 20 + 1)),
            )
            repeat = r.name in ("again", "later")
            first = self.now + self._noisy(t.fixed + self.prefill(n) * (1 - t.cache * repeat)) * MS
            step = self._noisy(t.step + t.per_context * (n + r.output / 2)) * MS
            cached = (n - 1) // 16 * 16 if repeat and t.cache and t.reports else None
            self.now = round(self._add(r, self.now, first, np.full(r.output - 1, step), cached, n=n)) + MS

    def _pair(self, rows: list[Row]) -> None:
        t, ends, sent = self.truth, [], self.now
        for r in rows:
            start = sent if t.second or not ends else ends[0]
            first = start + self._noisy(t.fixed + self.prefill(r.prompt)) * MS
            step = self._noisy((t.step + t.per_context * (r.prompt + r.output / 2)) * (t.second or 1.0)) * MS
            ends.append(self._add(r, sent, first, np.full(r.output - 1, step)))
        self.now = round(max(ends))

    def _beside(self, rows: list[Row]) -> None:
        t, (a, b) = self.truth, rows
        first = self.now + self._noisy(t.fixed + self.prefill(a.prompt)) * MS
        gaps = np.full(a.output - 1, t.step) * np.exp(t.noise * self.rng.standard_normal(a.output - 1)) * self.slow * MS
        sent = self.now + b.due_ns
        took = self._noisy(t.fixed + self.prefill(b.prompt)) * MS
        at = int(np.searchsorted(first + np.cumsum(gaps), sent + t.fixed / 2 * MS))
        if t.stalls:
            pieces = max(1, -(-b.prompt // t.chunk)) if t.chunk else 1
            gaps[at : at + pieces] += (took - t.fixed * MS) / pieces
        end = self._add(a, self.now, first, gaps)
        self.now = round(max(end, self._add(b, sent, sent + took + 2 * t.step * MS, np.empty(0))))

    def _add(
        self, r: Row, sent: float, first: float, gaps: np.ndarray, cached: int | None = None, *, n: int | None = None
    ) -> float:
        times = [round(first), *np.rint(first + np.cumsum(gaps)).astype(np.int64).tolist()]
        id_ = len(self.rows)
        self.rows.append({
            "id": id_, "point": len(self.points), "class": r.name, "sent_ns": round(sent),
            "accepted_ns": round(sent) + MS, "first_ns": times[0], "last_ns": times[-1], "end_ns": times[-1],
            "connect_ns": 0, "rtt_ns": 200_000, "asked_prompt_tokens": r.prompt, "prompt_tokens": n or r.prompt,
            "output_tokens": r.output, "cached_tokens": cached, "content_chunks": r.output,
            "asked_output_tokens": r.output,
        })  # fmt: skip
        self.chunks += stream(id_, times)
        return times[-1]
