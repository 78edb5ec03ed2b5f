"""How the service of a Run was spread over devices: as the run itself says, else by the devices that were busy. Where
that says nothing it is asked for, and nothing is taken that the devices' memory cannot hold.

Part of the application layer, a piece of ``baseline``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from whywait.analyze.counters import series
from whywait.analyze.energy import ALL, CPU, told_devices
from whywait.analyze.roofline import device_names
from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.physics.layout import Layout
from whywait.physics.memory import kv_bytes_per_token, weights_bytes, window_kv_bytes
from whywait.sim.capacity import check_layout
from whywait.sim.deployment import ROUTING, Deployment, Split

SPREADS = ("tp", "pp", "dp", "pd")  # techniques by which a user says it
BUSY = 0.05  # a device that was busy for less of the run did not take part
MORE = 1.05  # memory that a device may have over the catalogue's round figure
DEVICES = "devices"
_ELSE = "--baseline tp=N,pp=N to say else"


@dataclass(frozen=True)
class Fact:
    """One thing about the baseline: ``how`` is ``run``, ``given``, or ``assumed`` with ``why``."""

    what: str
    value: str
    how: str
    why: str = ""


@dataclass(frozen=True)
class Spread:
    """``engines``: how many share the places and the KV space that the run counts as a whole."""

    layout: Layout
    replicas: int
    facts: tuple[Fact, ...] = ()
    split: Split | None = None
    routing: str = ROUTING[0]
    engines: int = 1


def serving(run: Run) -> list[str]:
    """Names of the devices that may have served: of those of the machine the ones that the engine had in use, where
    that was seen; none of an engine on CPUs."""
    engine = run.manifest.engine
    if engine.get("device_kind") == CPU:
        return []
    names = device_names(run)
    ids = [i for i in engine.get("device_ids") or () if isinstance(i, int) and 0 <= i < len(names)]
    return [names[i] for i in ids] or names


def spread_of(run: Run, names: list[str], plain: bool) -> Spread:
    """``names`` as of :func:`serving`; ``plain``: nothing is looked for, since the user says it or it is a processor.

    Raises:
        UsageError: several devices are named and nobody says how many worked, or they cannot be dealt out to replicas.
    """
    replicas = max(len(np.unique(run.requests["replica"])), 1)
    kept = _kept(run)
    if plain:
        return Spread(Layout(), replicas, engines=kept.engines if kept else replicas)
    if kept is not None:
        return kept
    count, who = told_devices(run) if names or run.manifest.engine.get("devices") else (None, "")
    if count is None:
        count, who = _busy(run, len(names)), "as many as were busy"
    if count is None and len(names) > 1:
        raise UsageError(f"the run names {len(names)} devices, not how many the engine is spread over",
                         "--baseline tp=N")  # fmt: skip
    if count is None:
        assumed = Fact(DEVICES, "1 per replica", "assumed", "--baseline tp=N if there were more")
        return Spread(Layout(), replicas, (assumed,), engines=replicas)
    if count % replicas:
        raise UsageError(f"the run says {count} devices and {replicas} replicas, which cannot be alike",
                         "--baseline tp=N")  # fmt: skip
    each = count // replicas
    layout = _of_command(run.manifest.engine.get("layout"), each)
    if layout is not None:
        return Spread(layout, replicas, (Fact(DEVICES, _words(layout), "run", who),), engines=replicas)
    facts = (Fact(DEVICES, f"tp={each}", "assumed", f"{who}; {_ELSE}"),) if each > 1 else ()
    return Spread(Layout(tp=each), replicas, facts, engines=replicas)


def _kept(run: Run) -> Spread | None:
    """What a simulated run's manifest says it simulated; None of a run that does not say."""
    d = run.manifest.engine.get("deployment")
    if run.manifest.made_by != "simulated" or not isinstance(d, Mapping):
        return None
    try:
        layout, split = Layout(**d["layout"]), d["split"]
        if split is not None:
            first = split["prefill_layout"]
            split = Split(**{**split, "prefill_layout": None if first is None else Layout(**first)})
        count, routing = int(d["replicas"]), str(d["routing"])
    except (KeyError, TypeError, ValueError):
        return None
    words = _words(layout) + (f", pd={split.prefill}:{split.decode}" if split else "")
    words += f", replicas={count}" if count > 1 else ""
    engines = count * (split.decode if split else 1)
    return Spread(layout, count, (Fact(DEVICES, words, "run"),), split, routing, max(engines, 1))


def _of_command(said: Any, each: int) -> Layout | None:
    """The layout of the engine's own flags, where it makes up the devices that were counted."""
    if not isinstance(said, Mapping):
        return None
    sizes = {k: said.get(k, 1) for k in ("tp", "pp", "dp")}
    if not all(isinstance(v, int) and v > 0 for v in sizes.values()) or math.prod(sizes.values()) != each:
        return None
    return Layout(**sizes)


def _words(at: Layout) -> str:
    return ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(at).items() if v > 1 or k == "tp")


def _busy(run: Run, devices: int) -> int | None:
    """Devices that took part, by their own counters; None where not each of them was read by itself."""
    if devices == 1:
        return 1
    read = {s.labels.get("gpu", s.source): s for s in series(run.readings, "busy_share", "gpu") if len(s.values)}
    if ALL in read or len(read) < devices:
        return None
    return sum(float(np.mean(s.values)) > BUSY for s in read.values()) or None


def check_fits(d: Deployment) -> None:
    """See that the devices hold what the service has in them.

    Raises:
        UsageError: heads or layers cannot be dealt out so, or weights and KV space are more than the memory.
    """
    kinds = [d.layout] if d.split is None else [d.split.prefill_layout or d.layout, d.layout]
    for layout in kinds:
        try:
            check_layout(d, layout)
        except UsageError as exc:
            raise UsageError(f"the run's service cannot be laid out as it seems to be: {exc.message}",
                             "--baseline tp=N,pp=N says how it was") from None  # fmt: skip
        tokens = (d.engine.kv_blocks or 0) * d.engine.block / layout.dp
        per_token = kv_bytes_per_token(d.model, d.precision.kv, layout)[0]
        # Windowed layers keep no more than their window: what an engine counts as tokens does not tell how much.
        kv = tokens * max(per_token - window_kv_bytes(d.model, d.precision.kv, layout), 0.0)
        weights, memory = weights_bytes(d.model, d.precision, layout), d.machine.memory_bytes
        if memory > 0 and weights + kv > MORE * memory:
            p = d.precision
            what = f"{weights / 1e9:.0f} GB of weights ({p.weights})"
            what += f" and {kv / 1e9:.0f} GB of KV ({p.kv}) as it says it has" if kv else ""
            raise UsageError(f"the run's service cannot have been {d.model.name} on {d.machine.name} with "
                             f"{_words(layout)}: {what} are more than a device's {memory / 1e9:.0f} GB",
                             "--baseline tp=N, or what was stored narrower: fp8-weights, fp8-kv")  # fmt: skip
