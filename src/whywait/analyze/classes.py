"""Figures per class of a mixed workload: what each kind of request met, held to the SLO of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from whywait.analyze.goodput import Goodput, bounds, was_due
from whywait.analyze.latency import Latency, request_summaries
from whywait.analyze.window import Window, request_rate
from whywait.core.run import Run
from whywait.core.table import Array

UNNAMED = "unnamed"  # requests of a Run made elsewhere may say no class


def by_class(one: Run, good: Goodput, inside: Array, w: Window, lat: Latency) -> dict[str, dict[str, Any]]:
    """A row per class of one load point, by name, in the order in which the workload names them.

    ``good`` is the point's goodput, ``inside`` which requests began in its window ``w``, ``lat`` its latencies. A row
    has ``requests`` (planned), ``ok``, ``due``, ``slo`` (bounds in ms that this class is held to, ``{}``: none),
    ``goodput_share`` of all due requests of the class (null when none was due), ``goodput_requests_per_s`` and the
    summaries ``ttft_ms, tpot_ms, e2e_ms`` of its ``ok`` requests that began in the window.
    """
    name = np.array([n or UNNAMED for n in one.requests["class"]], dtype=object)
    planned = [k.get("name") for k in one.manifest.workload.get("classes") or ()]
    names = [*dict.fromkeys(n for n in planned if (name == n).any()), *sorted(set(name.tolist()) - set(planned))]
    due, held = was_due(one), bounds(one, one.manifest.slo)
    out = {}
    for n in names:
        mine = name == n
        first = int(np.argmax(mine))
        latency = request_summaries(lat, lat.ok & inside & mine)
        count = int((due & mine).sum())
        out[n] = {
            "requests": int(mine.sum()),
            "ok": int((lat.ok & mine).sum()),
            "due": count,
            "slo": {key: float(bound[first]) for key, bound in held.items() if np.isfinite(bound[first])},
            "goodput_share": float((good.meets & mine).sum()) / count if count else None,
            "goodput_requests_per_s": request_rate(one, w, good.meets & mine),
            **{key: latency[key] for key in ("ttft_ms", "tpot_ms", "e2e_ms")},
        }
    return out
