"""Two halves of a run: what of the first is whole, whether the second measured the same thing, both as one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from whywait.core.columns import OUTCOMES
from whywait.core.run import Manifest, Run, concat, with_zero

_OPEN = (OUTCOMES.index("censored"), OUTCOMES.index("never_sent"))
#: How a doubt ends that a shard died: it is of the point that was cut short, which is measured again.
LOST = " was lost"
#: What makes a service the same one, by part of the manifest.
_SAME = {
    "endpoint": ("url", "dialect", "stream"),
    "engine": ("name", "model", "kind", "slots", "ctx_per_slot", "model_bytes", "kv_tokens"),
}


def whole_points(run: Run) -> int:
    """How many points, from the first on, need not be measured again. Of a run that was cut off the last one is not
    whole when any of its requests has no outcome of its own."""
    numbers = np.sort(run.points["point"])
    if not run.manifest.partial or not len(numbers):
        return len(numbers)
    mine = run.requests["outcome"][run.requests["point"] == numbers[-1]]
    cut = not len(mine) or bool(np.isin(mine, _OPEN).any())
    return len(numbers) - cut


def differences(old: Manifest, new: Manifest) -> list[str]:
    """What of the service, its model or its engine is not as it was; what either does not say is not compared."""
    out = []
    for part, names in _SAME.items():
        then, now = getattr(old, part), getattr(new, part)
        for name in names:
            a, b = then.get(name), now.get(name)
            if a is not None and b is not None and a != b:
                out.append(f"{part} {name} was {a}, is {b}")
    return out


def joined(first: Run, second: Run, source: str) -> Run:
    """Both as one Run, told from the zero of the first. The manifest is the second's, and names both halves."""
    zero = first.manifest.zero_unix_ns
    doubts = [d for d in first.manifest.doubts if not d["what"].endswith(LOST)]
    was = dataclasses.replace(first.manifest, partial=False, partial_reason="", doubts=doubts)
    whole = Run(was, first.points, first.requests, first.chunks, first.steps, first.readings)
    union = concat([whole, with_zero(second, zero)])
    m, u = second.manifest, union.manifest
    client = dict(m.client)
    cpu = {**first.manifest.client.get("cpu_ns_by_point", {}), **m.client.get("cpu_ns_by_point", {})}
    kept = {str(p) for p in union.points["point"].tolist()}
    client["cpu_ns_by_point"] = {k: v for k, v in cpu.items() if k in kept}
    halves = [*(first.manifest.halves or [_half(first, source)]), _half(second, "")]
    manifest = dataclasses.replace(
        m, zero_unix_ns=zero, client=client, clock=u.clock, doubts=u.doubts, journey=first.manifest.journey,
        halves=halves, partial=m.partial, partial_reason=m.partial_reason,
    )  # fmt: skip
    return dataclasses.replace(union, manifest=manifest)


def _half(run: Run, source: str) -> dict[str, Any]:
    m = run.manifest
    return {
        "run": source, "points": run.points["point"].tolist(), "zero_unix_ns": m.zero_unix_ns, "command": m.command,
        "whywait_version": m.whywait_version, "cut_short": m.partial_reason,
        "client": {k: v for k, v in m.client.items() if k != "shards"},
    }  # fmt: skip
