"""How many devices serve, and who says so: what a bill and the device account are made by. Never a guess.

Part of the application layer, like ``watching.py``. Of a service on this machine its processes are looked at (which
devices they have in use), and its command line and log (what it was told to spread over). Where these contradict each
other the number is null and a doubt says so; of a service elsewhere nothing here can tell.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from whywait.lab.capacity import read_log
from whywait.lab.spread import is_command, layout
from whywait.lab.state import Engine
from whywait.load.preflight import Target
from whywait.probe.listener import listening_pids
from whywait.probe.opened import CPU, Opened, family_of, opened

Doubt = dict[str, str]


def devices_of(target: Target, engine: Engine | None) -> tuple[dict[str, Any], list[Doubt]]:
    """For ``manifest.engine``: ``devices`` (None: not known), ``devices_how`` (who says so), ``device_kind`` (cpu: the
    machine's processors are its one device; gpu; None), ``device_ids`` (GPUs by their number; empty: not known) and
    ``layout`` (tp, pp, dp that are not 1, by its command; only where told). Nothing of a simulated service."""
    endpoint = target.endpoint
    if target.simulated:
        return {}, []
    pids: tuple[int, ...] = (engine.pid,) if engine is not None else ()
    if not pids and endpoint.loopback and not endpoint.unix:
        pids = tuple(p for p in listening_pids(endpoint.port) if p != os.getpid())
    seen = opened(pids) if pids else Opened()
    sizes, who = (None, "") if seen.kind == CPU else _told(target, engine, pids)
    told = None if sizes is None else math.prod(sizes.values())
    out: dict[str, Any] = {"devices": None, "devices_how": "", "device_kind": seen.kind, "device_ids": list(seen.ids)}
    if seen.count is not None and told is not None and told != seen.count:
        why = f"{seen.how}: {seen.count}; {who}: {told}"
        doubt = {"what": "how many devices serve is not sure", "why": why, "next": "whywait bill RUN --devices N"}
        return {**out, "device_ids": []}, [doubt]
    if seen.count is not None or told is not None:
        both = "; ".join(filter(None, (seen.how, who if told is not None else "")))
        out.update(devices=seen.count if seen.count is not None else told, devices_how=both)
        out |= {"layout": sizes} if sizes else {}
    return out, []


def _told(target: Target, engine: Engine | None, pids: tuple[int, ...]) -> tuple[dict[str, int] | None, str]:
    if target.engine is None:
        return None, ""
    if engine is not None and engine.kind == "command":
        return layout(target.engine, engine.command, read_log(engine.log))
    for pid in (*pids, *sorted(family_of(pids) - set(pids))):
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            continue
        if is_command(argv):
            return layout(target.engine, argv)
    return None, ""
