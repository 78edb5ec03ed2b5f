"""Power by what a device is busy with, and what a cap on it costs. Pure.

The power of a step is that of a device that is on, plus what each resource draws while it is the one that is waited for
(``kernels.RESOURCES``): reading weights and KV moves bytes, computing switches multipliers, links and the host leave
most of the chip idle. The shares of the device's rated power are fitted (``fitted.json``, ``power``) on services
measured at many batch sizes; a device draws no more than its rating.

Under a cap the clock falls until dynamic power fits: power goes with the clock to the power ``exponent`` (voltage
falls with it), time of computing with its inverse, and reading does not slow (Patel et al. 2024, "Splitwise", arXiv
2311.18677: at half the power prompts take 1.3 times as long, tokens as long as before).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from whywait.errors import UsageError
from whywait.physics.fitted import fitted
from whywait.physics.kernels import COMPUTE, RESOURCES
from whywait.physics.machines import Accelerator

Floats = NDArray[np.float64]


def shares(machine: Accelerator) -> Mapping[str, float]:
    """Shares of the rated power: ``idle``; ``active`` while steps run, and on top of it by resource; of the machine's
    fit, or of all machines'."""
    power = fitted()["power"]
    found: Mapping[str, float] = {**power["default"], **power.get(machine.fit, {})}
    return found


def rated_w(machine: Accelerator) -> float:
    """
    Raises:
        UsageError: the machine's rated power is not in the catalogue.
    """
    if machine.tdp_w is None:
        raise UsageError(f"the rated power of {machine.name} is not known", "give tdp_w in a machine's .toml entry")
    return machine.tdp_w


def idle_w(machine: Accelerator) -> float:
    """Of one device with a model loaded and nothing to do."""
    return rated_w(machine) * shares(machine)["idle"]


def watts(machine: Accelerator, parts: Floats) -> Floats:
    """Power of one device during steps that spend ``parts`` (5, …) seconds by resource; W."""
    share = shares(machine)
    total = np.maximum(parts.sum(axis=0), 1e-12)
    dynamic = np.array([share[name] for name in RESOURCES]) @ parts / total
    return np.asarray(rated_w(machine) * np.minimum(share["active"] + dynamic, 1.0), dtype=float)


def joules(machine: Accelerator, parts: Floats, devices: int, wall_s: float | None = None) -> Floats:
    """Energy of each step on all ``devices``; with ``wall_s`` the last row is what the idle rest of that time takes."""
    spent = np.asarray(watts(machine, parts) * parts.sum(axis=0) * devices, dtype=float)
    if wall_s is None:
        return spent
    rest = max(0.0, wall_s - float(parts.sum()))
    return np.append(spent, rest * idle_w(machine) * devices)


def capped(machine: Accelerator, parts: Floats, cap_w: float) -> Floats:
    """``parts`` under a cap on each device: computing takes longer by what the clock falls.

    Raises:
        UsageError: the cap is not above what the device draws idle.
    """
    share, rated = shares(machine), rated_w(machine)
    room = cap_w / rated - share["idle"]
    if room <= 0:
        raise UsageError(
            f"a cap of {cap_w:.0f} W is below what {machine.name} draws idle", f"above {idle_w(machine):.0f} W"
        )
    slowed = np.array(parts, dtype=float)
    dynamic = np.maximum(watts(machine, parts) / rated - share["idle"], 1e-9)
    slowed[COMPUTE] *= np.maximum(dynamic / room, 1.0) ** (1 / share["exponent"])
    return slowed
