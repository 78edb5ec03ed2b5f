"""Runs with meters whose truth is known: counters and power of devices that draw a given power."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.analysis_runs import S, make_run
from whywait.core.run import Run

Power = Callable[[float], float]


def meters(
    watts: Power | float, gpu: str = "0", seconds: tuple[float, float, float] = (-3.0, 73.0, 0.1), **more: Any
) -> list[dict[str, Any]]:
    """Counter and power rows of a device from ``seconds`` (first, last, every); the counter is the exact integral.

    ``more``: ``source``, ``busy`` (share), ``only`` (a tuple of names), ``base`` (where the counter stood), ``late_s``.
    """
    power = watts if callable(watts) else lambda _: float(watts)
    first, last, every = seconds
    at = np.arange(first, last, every)
    fine = np.linspace(first, at[-1], (len(at) - 1) * 10 + 1)
    w = np.array([power(x) for x in fine])
    grown = np.concatenate(([0.0], np.cumsum((w[1:] + w[:-1]) / 2 * np.diff(fine))))[::10]
    rows = []
    only = more.get("only", ("energy_joules_total", "power_watts", "busy_share"))
    for t, joules in zip(at.tolist(), grown.tolist(), strict=True):
        for name, value in (("energy_joules_total", more.get("base", 1e6 * (int(gpu or 0) + 1)) + joules),
                            ("power_watts", power(t)), ("busy_share", more.get("busy"))):  # fmt: skip
            if value is not None and name in only:
                asked = round(t * S) + 10 * S
                rows.append({"asked_ns": asked, "answered_ns": asked + round(more.get("late_s", 0.001) * S),
                             "source": more.get("source", "gpu"), "name": name,
                             "labels": json.dumps({"gpu": gpu}) if gpu else None, "value": value})  # fmt: skip
    return rows


def service(n: int = 70, readings: list[dict[str, Any]] | None = None, devices: int | None = 1, **more: Any) -> Run:
    """A closed loop at 1 from 10 s on: ``n`` requests of 1 s each with 50 tokens, the window 10 s … (10 + n) s.

    ``more``: ``change`` (a function of the number and the row, to make it fail, or long), and what the manifest takes.
    """
    change = more.pop("change", lambda i, r: r)
    point = more.pop("point", {})
    rows = []
    for i in range(n):
        sent = (10 + i) * S
        row = {"id": i, "due_ns": sent, "sent_ns": sent, "accepted_ns": sent, "first_ns": sent + S // 5,
               "first_answer_ns": sent + S // 5, "last_ns": sent + S, "end_ns": sent + S, "output_tokens": 50,
               "prompt_tokens": 100, "cached_tokens": 0, "connect_ns": 0, "rtt_ns": 0,
               "engine_prefill_ms": 200.0}  # fmt: skip
        rows.append({k: v for k, v in change(i, row).items() if v is not None})
    whole = {"start_ns": 10 * S, "end_ns": (10 + n) * S, "steady_start_ns": 10 * S, "steady_end_ns": (10 + n) * S,
             "planned": n}  # fmt: skip
    engine = {} if devices is None else {"devices": devices}
    wide = {**whole, "start_ns": 10 * S - 1, **point}
    return make_run(rows, readings=readings, points=[wide], **{"engine": engine, "made_by": "measured", **more})
