"""Power that was not metered: what the devices draw with nothing to do, and a model that the user states.

Idle power is measured where the meters were read while nothing was in flight, else modelled from the machine's data
sheet (``physics.power``). A stated model is two levels per device, idle and busy, weighed by the device account's busy
time, whose bounds become bounds of the energy; and a constant for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whywait.analyze.counters import Series
from whywait.analyze.occupancy import device_account
from whywait.analyze.roofline import device_names
from whywait.analyze.window import Spans
from whywait.core.run import Run
from whywait.core.table import Array
from whywait.errors import UsageError
from whywait.physics import power as physics
from whywait.physics.machines import Accelerator, find
from whywait.units import NS_PER_S

SETTLE_S = 2.0  # after the last work power falls to idle (trailing average, clocks); readings of this time are left out
QUIET_SAMPLES = 3
KEYS = ("idle_w", "busy_w", "host_w")


@dataclass(frozen=True)
class PowerModel:
    """Watts that the user states: of one device idle and busy, of the host all the time. None: not stated."""

    idle_w: float | None = None
    busy_w: float | None = None
    host_w: float | None = None


@dataclass(frozen=True)
class IdlePower:
    """Of all devices of the service together; ``how`` is measured, modelled or stated (None and empty: not known)."""

    watts: float | None = None
    how: str = ""
    why: str = ""


def parse_model(text: str | None) -> PowerModel | None:
    """``idle_w=70,busy_w=600,host_w=350`` → a model; None for no text.

    Raises:
        UsageError: not of this form, or busy is not above idle.
    """
    if not text:
        return None
    values: dict[str, float] = {}
    for part in (p.strip() for p in text.split(",") if p.strip()):
        key, _, value = (x.strip() for x in part.partition("="))
        try:
            values[key] = float(value)
        except ValueError:
            values[key] = -1.0
        if key not in KEYS or not 0 <= values[key] < 1e7:
            raise UsageError(f"--power-model: {part!r} is not KEY=WATTS", f"keys: {', '.join(KEYS)}")
    if ("idle_w" in values) != ("busy_w" in values) or values.get("idle_w", 0.0) > values.get("busy_w", 0.0):
        raise UsageError("--power-model: idle_w and busy_w belong together, idle the lower", "idle_w=70,busy_w=600")
    return PowerModel(**values)


def modelled(
    run: Run, window: tuple[int, int], scope: str, model: PowerModel, devices: int | None
) -> tuple[float | None, float | None, float | None]:
    """Joules of ``window`` by the stated model: value and bounds; None where devices cannot be counted."""
    seconds = (window[1] - window[0]) / NS_PER_S
    if scope == "host":
        joules = None if model.host_w is None else model.host_w * seconds
        return joules, joules, joules
    if model.busy_w is None or model.idle_w is None or devices is None:
        return None, None, None
    a = device_account(run, *window)
    share = [x / a.total_ns if a.total_ns else 0.0 for x in (a.busy_low_ns, a.busy_high_ns)]
    low, high = (devices * seconds * (model.idle_w + (model.busy_w - model.idle_w) * s) for s in share)
    return (low + high) / 2, low, high


def idle_power(run: Run, power: Sequence[Series], devices: int | None, model: PowerModel | None) -> IdlePower:
    """What the devices draw when nothing is in flight: stated, else read, else by the machine's data sheet."""
    if model is not None and model.idle_w is not None and devices is not None:
        return IdlePower(model.idle_w * devices, "stated")
    quiet = _quiet(run, power) if run.manifest.made_by == "measured" else None
    if quiet is not None:
        return IdlePower(quiet, "measured", "mean of the readings with nothing in flight")
    machine = the_machine(run)
    if machine is None or machine.tdp_w is None or devices is None:
        return IdlePower(None, "", "never read while nothing was in flight, and no data sheet tells it")
    why = f"{physics.shares(machine)['idle']:.0%} of the rated {machine.tdp_w:g} W of {machine.name}"
    return IdlePower(physics.idle_w(machine) * devices, "modelled", why)


def the_machine(run: Run) -> Accelerator | None:
    """The catalogue's entry of the Run's devices, where all are of one kind; None of an engine on CPUs."""
    if run.manifest.engine.get("device_kind") == "cpu":
        return None
    found = {find(n) for n in device_names(run)}
    return next(iter(found)) if len(found) == 1 else None


def idle_host_w(run: Run, counters: Sequence[Series], model: PowerModel | None) -> float | None:
    """What the host draws when nothing is in flight (W): stated, else what its energy counters grew by then; None where
    they were not read then."""
    if model is not None and model.host_w is not None:
        return model.host_w
    if not counters or run.manifest.made_by != "measured":
        return None
    total = 0.0
    for s in counters:
        quiet, after = _at_rest(run, s.t_ns)
        between = quiet[1:] & quiet[:-1] & (after[1:] == after[:-1])
        grown, took = np.diff(s.values)[between], np.diff(s.t_ns)[between]
        if between.sum() < QUIET_SAMPLES or (grown < 0).any():
            return None
        total += float(grown.sum() / took.sum()) * NS_PER_S
    return total


def _quiet(run: Run, power: Sequence[Series]) -> float | None:
    total = 0.0
    for s in power:
        quiet, _ = _at_rest(run, s.t_ns)
        if quiet.sum() < QUIET_SAMPLES:
            return None
        total += float(s.values[quiet].mean())
    return total if power else None


def _at_rest(run: Run, t_ns: Array) -> tuple[Array, Array]:
    """At which times nothing was in flight, or just had been (nowhere, where that is not known), and after which
    stretch of work each lies."""
    sent, end = run.requests["sent_ns"], run.requests["end_ns"]
    known = ~np.isnan(sent)
    if not known.any() or np.isnan(end[known]).any():
        return np.zeros(len(t_ns), dtype=bool), np.zeros(len(t_ns), dtype=np.int64)
    work = Spans.of(sent[known], end[known] + SETTLE_S * NS_PER_S)
    i = np.searchsorted(work.starts, t_ns, "right") - 1
    return (i < 0) | (t_ns > work.stops[np.maximum(i, 0)]), i
