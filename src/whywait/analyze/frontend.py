"""The frontend: what parses, tokenises and streams, before the engine's queue and after its first token.

Seen only as a remainder: the client's time to first token less the path's round trip and the engine's own stages. A
proxy that answers TCP itself hides in it too; that part does not grow with load (*fixed cost*).
"""

from __future__ import annotations

import numpy as np

from whywait.analyze.counters import series
from whywait.analyze.first_token import Line, Split
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.units import NS_PER_MS, NS_PER_S

FIXED, HOST_CPU = "fixed cost", "host CPU"
FLOOR = 0.05  # the quantile of all requests that stands for what every request pays
BUSY_CORES = 0.8  # a frontend process that used this much of a core was short of it
_MIN = 20  # requests for a floor
_CORE = ("enginecore", "worker", "llama")  # processes (comm) that compute rather than serve


def frontend_causes(run: Run, line: Line, split: Split) -> dict[str, Array]:
    """The frontend's time by cause (int64 ns per request; the causes add up to it): what every request pays whatever
    the load; host CPU, where a serving process of the engine used up a core meanwhile; else unknown."""
    spent, seen = split.frontend, split.fronted
    floor = int(np.quantile(spent[seen], FLOOR)) if seen.sum() >= _MIN else 0
    fixed = np.minimum(spent, floor)
    busy = _busy(run, line)
    rest = spent - fixed
    return {FIXED: fixed, HOST_CPU: np.where(busy, rest, 0), "unknown": np.where(busy, 0, rest)}


def frontend_ms(run: Run, mine: Array, stages_ms: float | None, ttft_ms: float | None) -> float | None:
    """Mean frontend time (ms) of the requests ``mine`` (bool) by what histograms say of all: client TTFT and round trip
    against the engine's queue + prefill, else against its own TTFT. None without a round trip or either."""
    engine = stages_ms if stages_ms is not None else ttft_ms
    req = run.requests
    wait = (req["first_ns"] - req["sent_ns"])[mine]
    path = (np.nan_to_num(req["connect_ns"]) + req["rtt_ns"])[mine]
    known = ~np.isnan(wait) & ~np.isnan(path)
    if engine is None or not known.any():
        return None
    return max(float((wait - path)[known].mean()) / NS_PER_MS - engine, 0.0)


def _busy(run: Run, line: Line) -> Array:
    """Whether a serving process of the engine used up a core between sent and first token (bool)."""
    out = np.zeros(len(line.sent), dtype=bool)
    found = series(run.readings, "process_cpu_seconds_total", "process/engine")
    if len(found) < 2:  # one process serves and computes: its CPU time does not tell which
        return out
    for s in found:
        name = s.labels.get("process", "").lower()
        if len(s.values) < 2 or any(word in name for word in _CORE):
            continue
        # At least the sampling interval around each wait: CPU time is read a few times a second.
        a = np.maximum(np.searchsorted(s.t_ns, line.sent, "right") - 1, 0)
        b = np.minimum(np.searchsorted(s.t_ns, line.first, "left"), len(s.t_ns) - 1)
        took = (s.t_ns[b] - s.t_ns[a]) / NS_PER_S
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(took > 0, (s.values[b] - s.values[a]) / took, 0.0)
        out |= share >= BUSY_CORES
    return out
