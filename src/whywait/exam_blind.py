"""Takes away from a recorded Run what another user's measurement would not have had: the engine's metrics, the readings
of its host, its limits, its stages per request, the reference point.

A verdict from less may be undecided; it must not become wrong. Part of the application layer, beside ``exam_score``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from whywait.core.columns import REQUESTS
from whywait.core.run import Run
from whywait.errors import UsageError

#: What the engine was told, which a page of metrics or an address alone does not give away.
LIMITS: Final = ("slots", "kv_tokens", "ctx_per_slot", "enable_prefix_caching", "threads", "cpus", "kind",
                 "devices", "devices_how", "device_kind", "device_ids", "layout")  # fmt: skip
SHAPE: Final = ("model_bytes", "model_params", "model_shape")


def _without(run: Run, *sources: str) -> Run:
    kept = [not s.startswith(sources) for s in run.readings["source"].tolist()]
    return dataclasses.replace(run, readings=run.readings.where(np.array(kept, dtype=bool)))


def _untold(run: Run, *keys: str) -> Run:
    engine = {k: v for k, v in run.manifest.engine.items() if k not in keys}
    return dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, engine=engine))


def metrics(run: Run) -> Run:
    """No page of metrics, no list of slots."""
    return _without(run, "metrics/", "slots/")


def host(run: Run) -> Run:
    """The engine is on another machine."""
    machine = {k: v for k, v in run.manifest.machine.items() if k != "engine_rates"}
    manifest = dataclasses.replace(run.manifest, machine={**machine, "engine_is_local": False})
    return dataclasses.replace(_without(run, "process/engine", "host", "gpu"), manifest=manifest)


def slots(run: Run) -> Run:
    """Only an address: what the engine was started with is not known."""
    return _untold(run, *LIMITS, *SHAPE)


def stages(run: Run) -> Run:
    """The engine says nothing of a single request: no stage, no count of cached tokens."""
    told = [c.name for c in REQUESTS if c.name.startswith("engine_") or c.name == "cached_tokens"]
    gone = {name: np.full(len(run.requests), np.nan) for name in told}
    return dataclasses.replace(run, requests=run.requests.replace(**gone))


def reference(run: Run) -> Run:
    """The last point alone, as of ``whywait run``."""
    return run.point(int(run.points["point"][-1]))


def half(run: Run) -> Run:
    """Every point ended after half of its time: requests still in flight then were given up."""
    points, req = run.points, run.requests
    stop = (points["start_ns"] + points["end_ns"]) // 2
    at = dict(zip(points["point"].tolist(), stop.tolist(), strict=True))
    until = np.array([at[p] for p in req["point"].tolist()], dtype=float)
    begun = req["sent_ns"] < until
    kept = req.where(begun & (req["end_ns"] <= until))
    chunks = run.chunks.where(np.isin(run.chunks["id"], kept["id"]))
    points = points.replace(end_ns=stop, **{k: np.full(len(points), np.nan) for k in ("steady_start_ns",
                                                                                      "steady_end_ns")})  # fmt: skip
    return dataclasses.replace(run, points=points, requests=kept, chunks=chunks)


BLINDS: Final[dict[str, Callable[[Run], Run]]] = {
    "metrics": metrics, "host": host, "slots": slots, "stages": stages, "reference": reference, "half": half,
}  # fmt: skip
#: Each alone, and what together makes a stranger's address.
SETS: Final[tuple[tuple[str, ...], ...]] = (
    *((name,) for name in BLINDS),
    ("slots", "reference"), ("metrics", "host"), ("metrics", "slots"), ("stages", "slots"),
    ("metrics", "slots", "stages"), ("host", "slots", "reference"),
    ("metrics", "host", "slots", "stages"), ("metrics", "host", "slots", "stages", "reference"),
)  # fmt: skip


def blinded(run: Run, names: Sequence[str]) -> Run:
    """``run`` without what ``names`` say.

    Raises:
        UsageError: one of them is not in ``BLINDS``.
    """
    for name in names:
        if name not in BLINDS:
            raise UsageError(f"--blind: {name!r} is not known", "known: " + ", ".join(BLINDS))
        run = BLINDS[name](run)
    return run


def parse(text: str) -> tuple[str, ...]:
    """``'metrics,host'`` as names; '' is none."""
    return tuple(filter(None, (p.strip() for p in text.split(","))))


def described(names: Sequence[str]) -> str:
    return " + ".join(names) if names else "nothing"


__all__: Any = ["BLINDS", "SETS", "blinded", "described", "parse"]
