"""What the rules look at: one record per load point, drawn from both accounts, the summary and the readings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whywait.analyze.counters import delta, gauge
from whywait.analyze.phases import PHASES
from whywait.analyze.stalls import NEIGHBOUR
from whywait.core.run import Run
from whywait.units import load_name

MIXED = "long prompts mixed in"


@dataclass(frozen=True)
class Seen:
    """One load point, as the summary has it. ``share``: parts of the requests' time by phase (they add up to 1), with
    ``turn`` split off from queue: waiting for a step of a neighbour's prefill while a place was free. ``device``:
    parts of the device's wall time. Gauges are (mean, max) or None where nothing was read; None is unknown everywhere.
    """

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
    preemptions: float | None = None
    waiting_trend: float | None = None

    @property
    def name(self) -> str:
        return load_name(self.mode, self.target, self.label)

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

    def by(self, what: str, limit: str) -> str:
        """``what``, with the engine's own flag for it where that is known."""
        flag = self.flag(limit)
        return f"{what}: {flag}" if flag else what

    def flag(self, limit: str) -> str:
        return self.flags.get(limit, "")


def gather(run: Run, summary: dict[str, Any], flags: dict[str, str] | None = None) -> Evidence:
    """Evidence of every point of ``run``; ``summary`` is ``analyze.summary.summarize(run)`` of the same run, so that a
    verdict speaks of the very figures that the table shows."""
    points = [_seen(run, row, s) for row, s in zip(run.points.rows(), summary["points"], strict=True)]
    m = run.manifest
    return Evidence(points, m.engine, m.machine, flags or {})


def _seen(run: Run, row: dict[str, Any], summary: dict[str, Any]) -> Seen:
    phases = summary["phases"]
    mean_ms = {p: float(v["ms"] or 0.0) for p, v in phases.items()} or dict.fromkeys(PHASES, 0.0)
    causes = {p: dict(v["causes"]) for p, v in phases.items()}
    turn = causes.get("queue", {}).pop(NEIGHBOUR, 0.0)
    mean_ms["turn"] = mean_ms["queue"] * turn
    mean_ms["queue"] -= mean_ms["turn"]
    if turn < 1 and causes.get("queue"):
        causes["queue"] = {k: v / (1 - turn) for k, v in causes["queue"].items()}
    span = (row["start_ns"], row["end_ns"])
    return Seen(
        number=row["point"],
        mode=row["mode"],
        target=row["target"] or 0.0,
        label=row["label"],
        ok=summary["counts"]["ok"] or int(summary.get("passive", {}).get("active", False)),
        share=_shares(mean_ms, phases),
        mean_ms=mean_ms,
        how={p: v["how"] for p, v in phases.items()},
        causes=causes,
        device={k: v or 0.0 for k, v in summary["occupancy"]["shares"].items()},
        summary=summary,
        gauges={g: _gauge(run, g, span) for g in ("running", "waiting", "kv_use")},
        preemptions=_grown(run, "preemptions_total", span),
        waiting_trend=_trend(run, span),
    )


def _shares(mean_ms: dict[str, float], phases: dict[str, Any]) -> dict[str, float]:
    whole = sum(mean_ms.values())
    if whole > 0:
        return {p: v / whole for p, v in mean_ms.items()}
    # Only watched, and the rate of requests is not known: shares are, times are not.
    return {p: float(phases.get(p, {}).get("share") or 0.0) for p in mean_ms}


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
