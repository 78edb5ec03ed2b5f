"""Which CPUs may be used, and how to keep engine and client off each other's.

An engine's threads spin at barriers; one that shares its CPU with the load generator waits for it at every layer
(measured: two threads beside one busy process fall from 84 to 19 tokens/s). And a client that waits stamps late.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

Cpus = tuple[int, ...]


def allowed_cpus() -> Cpus:
    """CPUs this process may run on; empty where the system cannot say (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def usable_count() -> int:
    """How many CPUs' worth of time we get: the affinity mask, cut by a container's quota."""
    count = len(allowed_cpus()) or os.cpu_count() or 1
    quota = _quota(Path("/sys/fs/cgroup"))
    return count if quota is None else max(1, min(count, math.floor(quota)))


def default_threads(cpus: Cpus = ()) -> int:
    """Engine threads: 1 on up to two CPUs, else half of them; never more than the CPUs it is pinned to."""
    count = usable_count()
    threads = 1 if count <= 2 else count // 2
    return min(threads, len(cpus)) if cpus else threads


def cpu_split() -> tuple[Cpus, Cpus]:
    """CPUs for the engine and for the client. Disjoint where possible; both empty where pinning is no help.

    That is: where there is no affinity call; and where a quota grants less than the mask shows, since then others run
    on the same CPUs and the kernel places us better than a fixed choice. With one CPU both get it.
    """
    allowed = allowed_cpus()
    if not allowed or usable_count() < len(allowed):
        return (), ()
    return split(allowed, [_siblings(cpu) for cpu in allowed])


def split(allowed: Cpus, siblings: Iterable[frozenset[int]]) -> tuple[Cpus, Cpus]:
    """The pure part: the client gets about one CPU in eight, in whole cores where there are at least two cores."""
    if len(allowed) == 1:
        return allowed, allowed
    cores = sorted({tuple(sorted(s & set(allowed))) for s in siblings})
    if len(cores) < 2 or sum(map(len, cores)) != len(allowed):
        cores = [(cpu,) for cpu in allowed]  # one core's two threads, or a topology that makes no sense
    wanted = max(1, len(allowed) // 8)
    client: list[int] = []
    while len(client) < wanted and len(cores) > 1:
        client.extend(cores.pop())
    engine = sorted(cpu for core in cores for cpu in core)
    return tuple(engine), tuple(sorted(client))


def pin(cpus: Cpus) -> bool:
    """Pin this process (threads it starts later included) to ``cpus``; says whether that happened."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return False
    return True


def _siblings(cpu: int) -> frozenset[int]:
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
        return frozenset(parse_cpu_list(text))
    except (OSError, ValueError):
        return frozenset({cpu})


def parse_cpu_list(text: str) -> list[int]:
    """``0-2,8`` -> ``[0, 1, 2, 8]``."""
    cpus: list[int] = []
    for piece in text.strip().split(","):
        low, _, high = piece.partition("-")
        cpus.extend(range(int(low), int(high or low) + 1))
    return cpus


def _quota(root: Path) -> float | None:
    """CPUs granted by the control group, v2 then v1; None when unlimited or unknown."""
    try:
        quota, period = (root / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    try:
        granted = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max"
    return granted if granted > 0 else None
