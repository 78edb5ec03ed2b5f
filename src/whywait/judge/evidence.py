"""What the rules look at: one record per load point, drawn from both accounts, the summary and the readings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whywait.analyze.counters import delta, gauge
from whywait.analyze.occupancy import device_account
from whywait.analyze.phases import PHASES, RequestAccount, account, point_account
from whywait.core.columns import OUTCOMES
from whywait.core.run import Run

MIXED = "long prompts mixed in"


@dataclass(frozen=True)
class Seen:
    """One load point. ``share`` are parts of the requests' time by phase (they add up to 1), ``device`` of the
    device's wall time. Gauges are (mean, max) or None where nothing was read; None is unknown everywhere."""

    number: int
    mode: str
    target: float
    label: str | None
    ok: int
    share: dict[str, float]
    mean_ms: dict[str, float]
    how: dict[str, str]
    causes: dict[str, dict[str, float]]
    device: dict[str, float]
    summary: dict[str, Any]
    gauges: dict[str, tuple[float, float] | None]
    growth: dict[str, float | None]
    waiting_trend: float | None = None

    @property
    def name(self) -> str:
        what = f"concurrency {self.target:g}" if self.mode == "concurrency" else f"{self.target:g} requests/s"
        return f"{what} with {self.label}" if self.label else what

    @property
    def tokens_per_s(self) -> float | None:
        value: float | None = self.summary.get("output_tokens_per_s")
        return value

    def p(self, metric: str, q: str = "p50") -> float | None:
        found = self.summary.get(metric)
        value: float | None = found.get(q) if found else None
        return value


@dataclass(frozen=True)
class Evidence:
    points: list[Seen]
    engine: dict[str, Any]
    machine: dict[str, Any]
    client: dict[str, Any]
    flags: dict[str, str] = field(default_factory=dict)

    @property
    def plain(self) -> list[Seen]:
        """Points of the user's own workload, in order of load."""
        return sorted((p for p in self.points if not p.label and p.ok), key=lambda p: p.target)

    def single(self) -> Seen | None:
        return next((p for p in self.plain if p.mode == "concurrency" and p.target == 1), None)

    def seen_limit(self) -> int | None:
        """How many requests were in work at most while others waited, where it was the same at every such point."""
        full = [p.gauges["running"] for p in self.points if (p.gauges["waiting"] or (0, 0))[0] >= 1]
        tops = {round(g[1]) for g in full if g and g[0] >= 0.8 * g[1]}
        return tops.pop() if len(tops) == 1 and len(full) > 0 else None

    def flag(self, limit: str) -> str:
        return self.flags.get(limit, "")


def gather(run: Run, summary: dict[str, Any], flags: dict[str, str] | None = None) -> Evidence:
    """Evidence of every point of ``run``; ``summary`` is ``analyze.summary.summarize(run)`` of the same run."""
    acc = account(run)
    points = [_seen(run, acc, row, s) for row, s in zip(run.points.rows(), summary["points"], strict=True)]
    m = run.manifest
    return Evidence(points, m.engine, m.machine, m.client, flags or {})


def _seen(run: Run, acc: RequestAccount, row: dict[str, Any], summary: dict[str, Any]) -> Seen:
    number = row["point"]
    mine = (acc.point == number) & (run.requests["outcome"] == OUTCOMES.index("ok"))
    total = float(acc.total_ns[mine].sum())
    mean_ms = {p: float(acc.phases[mine, i].mean()) / 1e6 if mine.any() else 0.0 for i, p in enumerate(PHASES)}
    how = dict(acc.how.get(number, {}))
    derived = point_account(run, number, acc)
    if derived is not None:
        mean_ms = {p: v["ms"] for p, v in derived["phases"].items()}
        how = {p: v["how"] for p, v in derived["phases"].items()}
        total = sum(mean_ms.values()) * 1e6 * mine.sum()
    whole = total / 1e6 / max(1, int(mine.sum()))
    span = (row["start_ns"], row["end_ns"])
    device = device_account(run, *span)
    return Seen(
        number=number,
        mode=row["mode"],
        target=row["target"],
        label=row["label"],
        ok=int(mine.sum()),
        share={p: v / whole if whole > 0 else 0.0 for p, v in mean_ms.items()},
        mean_ms=mean_ms,
        how=how,
        causes=acc.causes.get(number, {}),
        device={k: v / device.total_ns if device.total_ns else 0.0 for k, v in device.ns.items()},
        summary=summary,
        gauges={g: _gauge(run, g, span) for g in ("running", "waiting", "kv_use", "slots_busy", "slot_kv_use_max")},
        growth={c: _grown(run, c, span) for c in ("preemptions_total", "draft_tokens_total", "accepted_tokens_total")},
        waiting_trend=_trend(run, span),
    )


def _grown(run: Run, name: str, span: tuple[int, int]) -> float | None:
    found = delta(run.readings, name, span)
    return None if found is None else float(found.value)


def _gauge(run: Run, name: str, span: tuple[int, int]) -> tuple[float, float] | None:
    found = gauge(run.readings, name, span, combine="mean" if name.startswith("kv") else "sum")
    return None if found is None else (float(found.mean), float(found.high))


def _trend(run: Run, span: tuple[int, int]) -> float | None:
    """How much longer the queue was in the last third of the point than in the first (requests); None if not read."""
    third = (span[1] - span[0]) // 3
    first = _gauge(run, "waiting", (span[0], span[0] + third))
    last = _gauge(run, "waiting", (span[1] - third, span[1]))
    return None if first is None or last is None else float(last[0] - first[0])


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, or None where either is unknown or b is 0."""
    if a is None or b is None or not b or not np.isfinite(a) or not np.isfinite(b):
        return None
    return a / b


Rule = Callable[[Evidence], list[Any]]
