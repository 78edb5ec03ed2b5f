"""The threads of a group that matter: which of them computes, which of them waits for a core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from whywait.probe import Row
from whywait.probe.host import read
from whywait.probe.prometheus import label_json

MOST = 16
LEAST_SHARE = 0.01  # of a core, used or waited for, since the last look
FORGET = 0.8  # how much of what a thread did before still counts when the busiest are chosen

Key = tuple[int, int]  # process, thread


class Spent(NamedTuple):
    """``schedstat`` of a thread: nanoseconds on a core, nanoseconds ready without one."""

    run: int
    wait: int


class BusyThreads:
    """``thread_cpu_seconds_total`` and ``thread_wait_seconds_total`` of the busiest threads.

    A thread once named stays named while it lives, so that its counters can be followed, unless 16 others have become
    busier. Labels: ``process``, ``pid``, ``thread`` (the name the thread gives itself), ``tid``.
    """

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._before: dict[Key, Spent] = {}
        self._weight: dict[Key, float] = {}
        self._names: dict[Key, str] = {}
        self._at: float | None = None

    def rows(self, now_s: float, spent: Mapping[Key, Spent], process: Callable[[int], str]) -> list[Row]:
        """Call it about once a second with what every living thread has spent so far."""
        before, self._before = self._before, dict(spent)
        at, self._at = self._at, now_s
        if at is None or now_s <= at:
            return []
        weight: dict[Key, float] = {}
        for key, now in spent.items():
            old = before.get(key)
            lately = sum(now) - sum(old) if old is not None and now.run >= old.run else 0
            kept = self._weight.get(key, 0.0) * FORGET
            if lately / 1e9 > LEAST_SHARE * (now_s - at) or key in self._weight:
                weight[key] = kept + lately
        self._weight = {key: weight[key] for key in sorted(weight, key=lambda k: -weight[k])[:MOST]}
        self._names = {key: self._names.get(key) or self._name(key) for key in self._weight}
        rows: list[Row] = []
        for key in sorted(self._weight):
            pid, tid = key
            labels = {"process": process(pid), "pid": str(pid), "thread": self._names[key], "tid": str(tid)}
            text = label_json(labels)
            rows.append(("thread_cpu_seconds_total", text, spent[key].run / 1e9))
            rows.append(("thread_wait_seconds_total", text, spent[key].wait / 1e9))
        return rows

    def _name(self, key: Key) -> str:
        raw = read(f"{self._proc}/{key[0]}/task/{key[1]}/comm") or b""
        return raw.decode(errors="replace").strip()


def cpu_list(text: str) -> frozenset[int]:
    """``0-3,8`` → {0, 1, 2, 3, 8}; empty where it is no such list."""
    out: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            continue
        out.update(range(int(low), int(high or low) + 1))
    return frozenset(out)


def cpu_text(cpus: frozenset[int]) -> str:
    """{0, 1, 2, 3, 8} → ``0-3,8``."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
