"""Techniques of where threads and memory are. See ``technique``.

How many CPUs there are is known only on the machine, so these settings are made when they are asked for.
"""

from __future__ import annotations

import os
from typing import Final

from whywait.core.workload import Workload
from whywait.lab.cpus import allowed_cpus, default_threads, usable_count
from whywait.lab.technique import Point, Show, Technique, one_class

_ALL = allowed_cpus() or tuple(range(os.cpu_count() or 1))
_FEW = default_threads()
_MANY = max(usable_count(), _FEW + 1)
_LOAD = Workload(classes=one_class(48, 32))
_POINTS = (Point(4, 12), Point(1, 2, "single stream"))

TECHNIQUES: Final[dict[str, Technique]] = {
    "threads": Technique(
        says="as many engine threads as there are CPUs, against half of them and the client on CPUs of its own",
        a={"slots": 4, "ctx_per_slot": 256, "threads": _FEW},
        b={"slots": 4, "ctx_per_slot": 256, "threads": _MANY, "cpus": _ALL},
        workload=_LOAD,
        points=_POINTS,
        promise="compute-bound prefill",
        shows=(
            Show("output_tokens_per_s", True),
            Show("ttft_ms.mean", False),
            Show("tpot_ms.mean", False, "single stream"),
        ),
        cost="threads wait for each other in every layer, so that one that shares its CPU holds up all of them",
        flags={"llama-server": (f"--threads {_FEW}", f"--threads {_MANY}")},
    ),
    "pinning": Technique(
        says="engine and client on CPUs of their own, against an engine that the system places where it likes",
        a={"slots": 4, "ctx_per_slot": 256, "threads": _FEW, "cpus": _ALL},
        b={"slots": 4, "ctx_per_slot": 256, "threads": _FEW},
        workload=_LOAD,
        points=_POINTS,
        promise="decode",
        shows=(Show("output_tokens_per_s", True), Show("tpot_ms.mean", False)),
        cost="CPUs that stand idle while others have too much to do",
        flags={"llama-server": (f"--threads {_FEW}", f"--threads {_FEW} --cpu-range 0-{_FEW - 1} --cpu-strict 1")},
    ),
}
