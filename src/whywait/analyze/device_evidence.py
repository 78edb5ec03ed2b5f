"""What counters and gauges say of the device while our requests' stamps call it busy.

The stamps only show that a request was being worked on. Readings of the device itself then take time out of *busy*:
the kernel throttled the engine's cgroup, its threads were ready without a core, a GPU ran no kernel, its clocks were
lowered, it moved data to its neighbours. Each only as far as it was read; what no reading speaks of stays busy.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

import numpy as np

from whywait.analyze.counters import Delta, delta, gauge, series
from whywait.core.run import Run
from whywait.physics.machines import find
from whywait.units import NS_PER_S

UNCOVERED = 0.1  # share of the window without readings up to which they still speak for it
ELSEWHERE = 0.02  # busy share of a GPU below which the engine computes on something else
BUSY = ("prefill_busy", "decode_busy")
#: Reasons that a GPU gives for a clock below its highest that are no loss: it idles, or a user set the clock.
_HARMLESS = ("idle", "applications", "app_clock", "sync", "none", "display")
_LINKS = ("nvlink", "xgmi", "pcie", "link")


@dataclass
class Found:
    """``take``: category → (ns × devices to take out of busy, how it is known), in order; ``busy`` the least and most
    that the device was busy (ns × devices) by its own readings; ``notes`` what each rests on, in words."""

    take: dict[str, tuple[int, str]] = field(default_factory=dict)
    busy: tuple[int, int] | None = None
    notes: dict[str, str] = field(default_factory=dict)


def device_evidence(run: Run, window: tuple[int, int], devices: int, busy_ns: int) -> Found:
    """What readings in ``window`` say against ``busy_ns`` (ns × devices) of time called busy by the stamps."""
    out = Found()
    total = (window[1] - window[0]) * devices
    if total <= 0:
        return out
    run, share = _used(run, window, devices)
    if share is not None:
        _gpu(run, window, (share, total, busy_ns), out)
    elif not series(run.readings, "power_watts", "gpu"):
        _cpu(run, window, devices, busy_ns, out)
    _moved(run, window, devices, out)
    return out


def apply(found: Found, ns: dict[str, int]) -> None:
    """Takes time out of the busy categories of ``ns``, each in proportion, never more than there is; the sum stays."""
    for category, (amount, _) in found.take.items():
        there = sum(ns[k] for k in BUSY)
        amount = min(max(amount, 0), there)
        if not amount:
            continue
        first = amount * ns[BUSY[0]] // there
        ns[BUSY[0]] -= first
        ns[BUSY[1]] -= amount - first
        ns[category] += amount


def _used(run: Run, window: tuple[int, int], devices: int) -> tuple[Run, float | None]:
    """``run`` without the readings of devices that this engine does not use, and the mean busy share of those it does
    (None where none was read): the ``devices`` busiest, since a machine may have more of them."""
    means = []
    for s in series(run.readings, "busy_share", "gpu"):
        inside = (s.t_ns >= window[0]) & (s.t_ns <= window[1])
        if inside.any():
            means.append((float(s.values[inside].mean()), s))
    means.sort(key=lambda m: m[0])
    others = {(s.source, json.dumps(s.labels.get("gpu"))) for _, s in means[:-devices]}
    if others:
        rows = zip(run.readings["source"].tolist(), run.readings["labels"].tolist(), strict=True)
        kept = [s.split("/")[0] != "gpu" or (s, json.dumps(json.loads(t or "{}").get("gpu"))) not in others
                for s, t in rows]  # fmt: skip
        run = dataclasses.replace(run, readings=run.readings.where(np.array(kept, dtype=bool)))
    return run, float(np.mean([m for m, _ in means[-devices:]])) if means else None


def _gpu(run: Run, window: tuple[int, int], seen: tuple[float, int, int], out: Found) -> None:
    share, total, busy_ns = seen
    if share < ELSEWHERE and busy_ns > ELSEWHERE * total:
        return  # a device that hardly ran while work went on is not the one that did it
    busy = min(round(share * total), total)
    out.busy = (busy, busy)
    if busy < busy_ns:
        out.take["idle_host"] = (busy_ns - busy, "derived")
        out.notes["idle_host"] = f"the GPU ran a kernel {share:.0%} of the time, our requests were in work longer"
    flags = {s.name for s in _named(run, "throttle_")}
    high = max((g.mean for n in flags if (g := gauge(run.readings, n, window, "gpu", combine="mean"))), default=0.0)
    if high <= 0:
        return
    clock, top = (gauge(run.readings, n, window, "gpu", combine="mean") for n in ("sm_clock_hz", "sm_clock_max_hz"))
    if clock is None or top is None or top.high <= 0:
        out.notes["throttled"] = f"at most {high:.0%} of the time: a throttle reason was set, the clocks were not read"
        return
    lost = max(0.0, 1 - clock.mean / top.high)
    out.take["throttled"] = (round(min(lost, high) * min(busy, busy_ns)), "derived")
    out.notes["throttled"] = f"a throttle reason was set {high:.0%} of the time, clocks {lost:.0%} below their highest"


def _cpu(run: Run, window: tuple[int, int], devices: int, busy_ns: int, out: Found) -> None:
    """An engine on CPUs: its device is the cores of its compute threads. What CPU time it had was busy, whatever else
    was counted: other threads of it wait for a core too."""
    threads = run.manifest.engine.get("threads")
    if not threads:
        return
    used = _covering(run, "cpu_seconds_total", window)
    room = busy_ns if used is None else busy_ns - round(used.value / float(threads) * NS_PER_S) * devices
    for category, name, words in (
        ("throttled", "cgroup_throttled_seconds_total", "its cgroup was throttled by a CPU quota"),
        ("idle_host", "run_queue_wait_seconds_total", "its threads were ready but had no core"),
    ):
        found = _covering(run, name, window)
        if found is None or found.value <= 0 or room <= 0 or (used is None and category == "idle_host"):
            continue
        per_thread = found.value / float(threads)
        amount = min(round(per_thread * NS_PER_S) * devices, room)
        room -= amount
        out.take[category] = (amount, "derived")
        out.notes[category] = f"{words}: {amount / NS_PER_S:.2f} s in which requests were in work and it had no CPU"


def _moved(run: Run, window: tuple[int, int], devices: int, out: Found) -> None:
    """Time to move what the links carried, at their data sheet's rate: the least, as if nothing overlapped."""
    if devices < 2:
        return
    names = [n.get("name", "") if isinstance(n, dict) else str(n) for n in run.manifest.machine.get("gpus") or ()]
    labels = [s.labels.get("name") or s.labels.get("modelName") or "" for s in _named(run, "power_watts")]
    device = next((a for n in (*names, *labels) if (a := find(n)) is not None), None)
    if device is None:
        return
    for link in _LINKS:
        ways = [v for way in ("tx", "rx") if (v := _carried(run, f"{link}_{way}_bytes", window)) is not None]
        if ways:
            seconds = max(ways) / device.link_bytes_per_s
            out.take["communication"] = (round(seconds * NS_PER_S), "modelled")
            out.notes["communication"] = f"{link} bytes over {device.link_bytes_per_s / 1e9:.0f} GB/s, at least"
            return


def _carried(run: Run, name: str, window: tuple[int, int]) -> float | None:
    """Bytes of all devices in one direction: by a counter, else by a rate over the window."""
    counted = _covering(run, f"{name}_total", window, "gpu")
    if counted is not None:
        return counted.value
    rate = gauge(run.readings, f"{name}_per_s", window, "gpu")
    return None if rate is None else rate.mean * (window[1] - window[0]) / NS_PER_S


def _covering(run: Run, name: str, window: tuple[int, int], source: str = "process/engine") -> Delta | None:
    found = delta(run.readings, name, window, source)
    if found is None or window[1] - window[0] - (found.end_ns - found.start_ns) > UNCOVERED * (window[1] - window[0]):
        return None
    return found


@dataclass(frozen=True)
class _Named:
    name: str
    labels: dict[str, str]


def _named(run: Run, prefix: str) -> list[_Named]:
    """Names of the GPU's readings that begin so, and that mean a loss."""
    mine = np.array([str(s).split("/")[0] == "gpu" for s in run.readings["source"]], dtype=bool)
    names = {str(n) for n in run.readings["name"][mine]} if mine.any() else set()
    kept = sorted(n for n in names if n.startswith(prefix) and not any(word in n for word in _HARMLESS))
    return [_Named(n, s.labels) for n in kept for s in series(run.readings, n, "gpu")]
