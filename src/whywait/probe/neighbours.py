"""Who else computes on this machine: what the service, the client and this sampler do not account for.

``other_cpu_seconds_total``: busy time of all cores, less what our groups and the sampler used. With an engine that is
tied to some cores, ``engine_cores_busy_seconds_total`` and ``engine_cores_other_seconds_total`` say the same of those
cores. Whoever else used most is named, by the name of its process only (``neighbour_cpu_seconds_total``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Protocol

from whywait.probe import Row
from whywait.probe.host import busy_seconds, read
from whywait.probe.process import stat_of
from whywait.probe.prometheus import label_json

LOOK_S = 1.0
NAMES_S = 2.0
LEAST_SHARE = 0.05  # of a core
MOST = 4


class Member(Protocol):
    """What is asked of a group of processes (:class:`whywait.probe.process.Group`)."""

    cpus: frozenset[int]

    def cpu_now(self) -> Mapping[tuple[int, int], float]: ...

    def pids(self) -> frozenset[int]: ...


class Neighbours:
    """Counters never fall: where the parts were read a moment apart, the highest value so far is given."""

    def __init__(self, groups: Mapping[str, Member], root: str = "/") -> None:
        self._groups, self.proc = groups, os.path.join(root, "proc")
        self._look_at = self._names_at = float("-inf")
        self._highest: dict[str, float] = {}
        self._zero: dict[str, float] = {}
        self._seen: dict[tuple[int, int], float] = {}
        self._used: dict[str, float] = {}
        self._spent: dict[int, tuple[str, float]] = {}  # name and CPU seconds of all others
        self._named: dict[int, float] = {}
        self._before: tuple[dict[int, float], dict[str, float]] | None = None
        self._there = self._others = 0.0  # of the engine's cores: busy, and what of it was others'

    def sample(self, now_s: float) -> list[Row]:
        """Rows at ``now_s``, at most once a second; [] in between."""
        if now_s - self._look_at < LOOK_S:
            return []
        busy = _busy(self.proc)
        if not busy:
            return []
        self._look_at = now_s
        groups = dict(self._groups)
        used = self._grown(groups)
        ours = sum(used.values()) + time.process_time()
        rows = [self._rising("other_cpu_seconds_total", sum(busy.values()) - ours)]
        engine = groups.get("engine")
        if engine is not None and engine.cpus:
            rows += self._engine_cores(engine.cpus, groups, used, busy)
        if now_s - self._names_at >= NAMES_S:
            rows += self._names(now_s)
        return rows

    def _grown(self, groups: Mapping[str, Member]) -> dict[str, float]:
        """What each group used since we look. What a process had used when it was first seen is not charged to us now:
        it was somebody else's when it happened."""
        now: dict[tuple[int, int], float] = {}
        for name, group in groups.items():
            for key, seconds in group.cpu_now().items():
                now[key] = seconds
                self._used[name] = self._used.get(name, 0.0) + max(0.0, seconds - self._seen.get(key, seconds))
        self._seen = now
        return {name: self._used.get(name, 0.0) for name in groups}

    def _engine_cores(
        self, cpus: frozenset[int], groups: Mapping[str, Member], used: Mapping[str, float], busy: Mapping[int, float]
    ) -> list[Row]:
        """Where a group may run on some of these cores and on others, all of its time is taken to be here: what is left
        for others is then the least they used. Only what grew since the last look is added, by the cores as they are
        now: a set of cores that changes brings no busy time of the past with it."""
        here = {c: busy.get(c, 0.0) for c in cpus}
        mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else cpus
        ours = {name: seconds for name, seconds in used.items() if not groups[name].cpus or groups[name].cpus & cpus}
        if cpus & mine:
            ours[""] = time.process_time()
        before, self._before = self._before, (dict(busy), {**used, "": time.process_time()})
        if before is None:
            self._there = sum(here.values())
        else:
            grown = sum(now - before[0].get(c, now) for c, now in here.items())
            self._there += grown
            self._others += grown - sum(now - before[1].get(name, 0.0) for name, now in ours.items())
        return [
            ("engine_cores_busy_seconds_total", None, self._there),
            self._rising("engine_cores_other_seconds_total", self._others),
        ]

    def _rising(self, name: str, value: float) -> Row:
        zero = self._zero.setdefault(name, value)  # what was used before we looked tells nothing
        self._highest[name] = max(self._highest.get(name, 0.0), value - zero)
        return name, None, self._highest[name]

    def _names(self, now_s: float) -> list[Row]:
        first, took = not self._spent, now_s - self._names_at
        self._names_at = now_s
        ours = frozenset({os.getpid()}).union(*(group.pids() for group in self._groups.values()))
        seen: dict[int, tuple[str, float]] = {}
        for name in os.listdir(self.proc) if os.path.isdir(self.proc) else []:
            if name.isdigit() and int(name) not in ours and (found := stat_of(self.proc, int(name))):
                seen[int(name)] = found.comm, found.cpu_s
        lately: dict[int, float] = {}
        for pid, (comm, cpu_s) in seen.items():
            old = self._spent.get(pid)
            if old is not None and old[0] == comm and cpu_s >= old[1]:
                lately[pid] = cpu_s - old[1]
        self._spent = seen
        if first:
            return []
        busy = {p for p, s in lately.items() if s > LEAST_SHARE * took} | (self._named.keys() & lately.keys())
        self._named = {p: lately[p] for p in sorted(busy, key=lambda p: -lately[p])[:MOST]}
        return [
            (
                "neighbour_cpu_seconds_total",
                label_json({"process": seen[p][0], "pid": str(p)}),
                seen[p][1],
            )
            for p in self._named
        ]


def _busy(proc: str) -> dict[int, float]:
    """Busy seconds of each core."""
    out: dict[int, float] = {}
    for line in (read(f"{proc}/stat") or b"").splitlines():
        fields = line.split()
        if fields and fields[0].startswith(b"cpu") and fields[0][3:].isdigit() and len(fields) >= 8:
            out[int(fields[0][3:])] = busy_seconds(fields)
    return out
