"""The device itself: lowered clocks, data of its neighbours; and what nothing explains."""

from __future__ import annotations

from whywait.judge.evidence import Evidence, Seen
from whywait.judge.verdict import WAIT, WORK, Verdict
from whywait.units import percent

PRESENT = 0.05  # of the device's time
MUCH = 0.5  # … from which waiting for each other is no longer a part of the work of several devices


def device(e: Evidence) -> list[Verdict]:
    out = []
    for p in e.points:
        notes = (p.summary.get("occupancy") or {}).get("notes") or {}
        busy = 1 - p.device.get("idle_no_work", 0.0)
        clocked = p.device.get("throttled", 0.0) if p.cpu.throttled is None or not p.cpu.throttled else 0.0
        moved = p.device.get("communication", 0.0)
        if clocked >= PRESENT:
            out.append(Verdict("throttling", f"At {p.name} the device runs below its clocks", "holds", clocked / busy,
                               of="device time", where=p.name, how="derived", point=p.number,
                               evidence=(notes.get("throttled", f"{percent(clocked)} of the device's time"),),
                               lever="cooling, or a higher power limit (nvidia-smi -pl)", gain="clocks in proportion",
                               cost="power", next_step="nvidia-smi -q -d PERFORMANCE shows the reason"))  # fmt: skip
        if moved >= PRESENT:
            out.append(Verdict("interconnect", f"At {p.name} devices wait for each other's data", "holds", moved / busy,
                               of="device time", where=p.name, how="modelled", point=p.number,
                               kind=WAIT if moved / busy >= MUCH else WORK,
                               evidence=(notes.get("communication", f"{percent(moved)} of the device's time"),),
                               lever="fewer devices for one model: " + (e.flag("tensor_parallel") or "tensor parallel"),
                               gain="up to that share", cost="each device holds more of the weights",
                               next_step=e.profile("time in collectives (all-reduce) in a step")))  # fmt: skip
    return out


def unknown_step(e: Evidence, p: Seen) -> str:
    """What would explain the time of ``p`` that nothing read accounts for."""
    if p.known("queue") and p.known("prefill"):  # it says what it can: what is left, its metrics do not tell
        return e.profile("what runs, and what stands still, outside prefill and decode")
    step = f"let the engine publish its metrics ({e.flag('metrics') or 'a /metrics page'})"
    if e.flag("request_metrics"):
        step += f", or its stages per request ({e.flag('request_metrics')})"
    return step


def unexplained(e: Evidence) -> list[Verdict]:
    worst = max(e.plain or e.points, key=lambda p: p.share["unknown"], default=None)
    if worst is None or worst.share["unknown"] < 0.15:
        return []
    step = unknown_step(e, worst)
    claim = f"At {worst.name} {percent(worst.share['unknown'])} of the requests' time is not explained by anything seen"
    return [Verdict("unexplained", claim, "undecided", worst.share["unknown"], where=worst.name, how="unknown",
                    next_step=step, point=worst.number)]  # fmt: skip
