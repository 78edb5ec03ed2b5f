"""From a Run and its summary to the evidence of every load point, so that a verdict speaks of the very figures the
table shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from whywait.analyze.counters import delta, gauge
from whywait.analyze.phases import PHASES, RequestAccount, account
from whywait.analyze.stalls import NEIGHBOUR
from whywait.core.run import Run
from whywait.judge.evidence import Evidence, Level, Seen, ratio
from whywait.judge.facts_cpu import client_lost, engine_cpu, neighbours
from whywait.judge.facts_requests import draft, reuse, streams, work

GAUGES = ("running", "waiting", "kv_use", "retracted", "slots_prefilling")
PAIR = 1.15  # times the throughput of one, with two at a time: a third would gain too
Span = tuple[int, int]


def gather(
    run: Run, summary: dict[str, Any], flags: dict[str, str] | None = None, acc: RequestAccount | None = None
) -> Evidence:
    """Evidence of every point of ``run``; ``summary`` is ``analyze.summary.summarize(run)`` of the same run, and
    ``acc`` its ``account(run)`` when the caller has it."""
    acc = account(run) if acc is None else acc
    points = [_seen(run, row, s, acc) for row, s in zip(run.points.rows(), summary["points"], strict=True)]
    m = run.manifest
    focus, beyond = _focus(run, points, summary)
    lag = m.client.get("read_lag_ms") or {}
    reads, late = m.client.get("coalesced_reads"), m.client.get("coalesced_reads_while_late")
    return Evidence(
        points,
        m.engine,
        m.machine,
        flags or {},
        focus,
        beyond,
        (float(lag["p50"]), float(lag["p99"])) if lag.get("p50") is not None and lag.get("p99") is not None else None,
        late / reads if reads and late is not None else None,
        any(s.startswith("metrics") for s in set(run.readings["source"].tolist())),
    )


def _focus(run: Run, points: list[Seen], summary: dict[str, Any]) -> tuple[Seen | None, tuple[int, ...]]:
    """The point that the verdict is about, and the points above it that nobody but us asked for.

    With an SLO: the first point of rising load that fails it, for what it waits on is what the SLO waits on. Else, of
    points the user asked for: the highest load. A diagnosis climbs by itself: there it is the knee, else the last rung
    that does not exceed the places of the engine; what is above says what limits going beyond. Only where there are so
    few places that the climb ran into them first, it is the first rung above.
    """
    plain = [p for p in points if p.tried and not p.label] or [p for p in points if p.tried]
    if not plain:
        return None, ()
    open_loop = [p for p in plain if p.mode != "concurrency"]
    order = sorted(open_loop or plain, key=lambda p: p.target)
    if run.manifest.slo:
        failing = [p for p in order if (p.summary.get("goodput_share") or 0.0) < 0.95]
        if failing:
            return failing[0], tuple(p.number for p in order if p.target > failing[0].target)
    # A run saved before the journey said so tells it by its command.
    climbed = run.manifest.journey.get("climbs", run.manifest.command[:1] == ["diagnose"])
    if not climbed or len(order) == 1:
        return order[-1], ()
    slots = Evidence(points, run.manifest.engine, {}).limit()
    knee = summary.get("knee")
    if slots and any(p.target <= slots for p in order):
        within = [p for p in order if p.target <= slots]
        at = within[-1]
        if _premature(slots, within) and len(order) > len(within):
            at = order[len(within)]
    elif knee is not None and any(p.number == summary["points"][knee]["point"] for p in order):
        at = next(p for p in order if p.number == summary["points"][knee]["point"])
    else:
        return order[-1], ()
    return at, tuple(p.number for p in order if p.target > at.target)


def _premature(slots: int, within: list[Seen]) -> bool:
    """Whether the limit is what the climb ran into, not the device: it takes one at a time, or two to some gain."""
    gain = ratio(within[-1].tokens_per_s, within[0].tokens_per_s)
    return slots == 1 or (slots == 2 and gain is not None and within[-1].target == 2 and gain >= PAIR)


def _seen(run: Run, row: dict[str, Any], summary: dict[str, Any], acc: RequestAccount) -> Seen:
    phases = summary["phases"]
    by_share = all(v["ms"] is None for v in phases.values())  # a watched service whose rate is not known
    mean_ms = {p: float(v["share" if by_share else "ms"] or 0.0) for p, v in phases.items()}
    mean_ms = {**dict.fromkeys(PHASES, 0.0), **mean_ms}
    causes = {p: dict(v["causes"]) for p, v in phases.items()}
    turn = causes.get("queue", {}).pop(NEIGHBOUR, 0.0)
    mean_ms["turn"] = mean_ms["queue"] * turn
    mean_ms["queue"] -= mean_ms["turn"]
    if turn < 1 and causes.get("queue"):
        causes["queue"] = {k: v / (1 - turn) for k, v in causes["queue"].items()}
    whole = sum(mean_ms.values())
    span = (int(row["start_ns"]), int(row["end_ns"]))
    window = summary.get("window") or {}
    steady = (int(window.get("start_ns") or span[0]), int(window.get("end_ns") or span[1]))
    one = run.point(row["point"])
    watched = summary.get("passive") or {}
    ended = watched.get("requests")
    ok = int(ended if ended is not None else bool(watched.get("active"))) if watched else summary["counts"]["ok"]
    # What only the point as a whole knows of queue and prefill is still in what its requests leave unexplained.
    derived = sum(
        float(v["ms"] or 0.0) for k, v in phases.items() if k in ("queue", "prefill") and v["how"] == "derived"
    )
    cpu = engine_cpu(run, steady)
    return Seen(
        number=row["point"],
        mode=row["mode"],
        target=row["target"] or 0.0,
        label=row["label"],
        ok=ok,
        tried=ok if watched else sum(n for k, n in summary["counts"].items() if k not in ("never_sent", "cancelled")),
        share={p: v / whole if whole > 0 else 0.0 for p, v in mean_ms.items()},
        mean_ms=mean_ms,
        how={p: modelled(v["how"], run) for p, v in phases.items()},
        causes=causes,
        device=_device(summary["occupancy"]),
        summary=summary,
        gauges={**{g: _level(run, g, span) for g in GAUGES}, "kv_use": _kv(run, span)},
        cpu=cpu,
        streams=streams(run, one, acc, span, derived),
        work=work(one, span),
        reuse=reuse(run, one, span),
        draft=draft(run, span),
        client_lost=client_lost(run, steady),
        neighbours=neighbours(run, steady, cpu.run),
        preemptions=_grown(run, "preemptions_total", span),
        rejected=_grown(run, "rejections_total", span),
        seconds=(span[1] - span[0]) / 1e9,
    )


def modelled(how: str, run: Run) -> str:
    """``how`` a figure is known: of a simulated service nothing was measured."""
    return "modelled" if run.manifest.origin == "simulated" and how != "unknown" else how


def _device(account: dict[str, Any]) -> dict[str, float]:
    """Shares of the device's time. What only one pool of a split service was without a request is no idle service."""
    out = {k: v or 0.0 for k, v in account["shares"].items()}
    return {**out, "idle_no_work": max(out["idle_no_work"] - (account.get("pool_idle") or 0.0), 0.0)}


def _grown(run: Run, name: str, span: Span) -> float | None:
    found = delta(run.readings, name, span)
    return None if found is None else float(found.value)


def _kv(run: Run, span: Span) -> Level | None:
    """KV space in use. Where slots share one space and each states the whole of it, tokens held over tokens there are
    (told when the engine was started) say more than the gauge."""
    gauged, held, room = (
        _level(run, "kv_use", span),
        _level(run, "kv_tokens_used", span),
        run.manifest.engine.get("kv_tokens"),
    )
    if held is None or not room or (gauged is not None and gauged.high >= held.high / float(room)):
        return gauged
    growth = None if held.growth is None else held.growth / room
    return Level(held.mean / room, held.low / room, held.high / room, growth)


def _level(run: Run, name: str, span: Span) -> Level | None:
    combine = "mean" if name.startswith("kv") else "sum"
    found = gauge(run.readings, name, span, combine=combine)
    if found is None:
        return None
    third = (span[1] - span[0]) // 3
    first = gauge(run.readings, name, (span[0], span[0] + third), combine=combine)
    last = gauge(run.readings, name, (span[1] - third, span[1]), combine=combine)
    growth = None if first is None or last is None else float(last.mean - first.mean)
    return Level(
        float(found.mean), float(found.low), float(found.high), None if growth is None or np.isnan(growth) else growth
    )
