"""The machine: cores, pressure, energy, and what it is (for the manifest). Linux; elsewhere it has nothing to say.

Everything that is not there, or may not be read, gives no row: absent is null, never 0. Nothing private is read: no
host name, no user name, no command lines.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from whywait.probe import Row
from whywait.probe.prometheus import label_json

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
CORES_S = 1.0
_PRESSURE = re.compile(rb"^(some|full) .*total=(\d+)", re.M)


def read(path: str) -> bytes | None:
    """A small file of /proc or /sys, or None. (os.read is a third of the cost of open().)"""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        chunks = []
        while chunk := os.read(fd, 65536):
            chunks.append(chunk)
        return b"".join(chunks)
    except OSError:  # a process that ended between open and read; a counter root may not read
        return None
    finally:
        os.close(fd)


def read_int(path: str) -> int | None:
    raw = read(path)
    try:
        return int(raw) if raw is not None else None
    except ValueError:
        return None


def busy_seconds(fields: list[bytes]) -> float:
    """Of a ``cpu`` line of /proc/stat, split: all but idle, I/O wait and what the hypervisor took."""
    user, nice, system, _idle, _iowait, irq, softirq = (int(f) for f in fields[1:8])
    return (user + nice + system + irq + softirq) / TICKS_PER_S


class System:
    """Counters of the whole machine; core by core only once a second (there may be hundreds)."""

    def __init__(self, root: str = "/") -> None:
        self.proc = os.path.join(root, "proc")
        self.energy = Energy(root)
        self._cores_at = float("-inf")

    def sample(self, now_s: float) -> list[Row]:
        """Rows at ``now_s`` (any steady clock, in seconds)."""
        cores = now_s - self._cores_at >= CORES_S
        if cores:
            self._cores_at = now_s
        return self._cpu(cores) + self._pressure() + self._memory() + self.energy.sample()

    def _cpu(self, cores: bool) -> list[Row]:
        rows: list[Row] = []
        for line in (read(f"{self.proc}/stat") or b"").splitlines():
            fields = line.split()
            if fields and fields[0].startswith(b"cpu") and len(fields) >= 8:
                busy = busy_seconds(fields)
                if fields[0] == b"cpu":
                    rows.append(("cpu_busy_seconds_total", None, busy))
                    if len(fields) > 8:
                        rows.append(("cpu_steal_seconds_total", None, int(fields[8]) / TICKS_PER_S))
                elif cores:
                    rows.append(("core_busy_seconds_total", label_json({"cpu": fields[0][3:].decode()}), busy))
            elif fields and fields[0] == b"procs_running":
                rows.append(("tasks_runnable", None, float(fields[1])))
        return rows

    def _pressure(self) -> list[Row]:
        rows: list[Row] = []
        for resource in ("cpu", "memory", "io"):
            raw = read(f"{self.proc}/pressure/{resource}")
            for kind, total in _PRESSURE.findall(raw or b""):
                if resource != "cpu" or kind == b"some":  # "full" has no meaning for the CPU of a whole machine
                    rows.append((f"psi_{resource}_{kind.decode()}_seconds_total", None, int(total) / 1e6))
        return rows

    def _memory(self) -> list[Row]:
        match = re.search(rb"^MemAvailable:\s+(\d+) kB", read(f"{self.proc}/meminfo") or b"", re.M)
        return [("memory_available_bytes", None, int(match[1]) * 1024.0)] if match else []


class Energy:
    """RAPL counters, where the machine has them and lets us read. They wrap at ``max_energy_range_uj``; rows do not."""

    def __init__(self, root: str = "/") -> None:
        self._zones: list[_Zone] = []
        base = Path(root, "sys/class/powercap")
        for path in sorted(base.glob("intel-rapl:*")):  # AMD's counters carry this name as well
            kind = (read(str(path / "name")) or b"").decode().strip()
            # Packages and their memory only: cores and uncore are parts of a package, psys holds everything again.
            name = "package" if kind.startswith("package") else kind if kind == "dram" else ""
            if name and read_int(str(path / "energy_uj")) is not None:
                self._zones.append(_Zone(f"{name}_energy_joules_total", path))

    def sample(self) -> list[Row]:
        rows: list[Row] = []
        for zone in self._zones:
            joules = zone.joules()
            if joules is not None:
                rows.append((zone.name, label_json({"zone": zone.path.name.partition(":")[2]}), joules))
        return rows


class _Zone:
    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._range = read_int(str(path / "max_energy_range_uj"))
        self._last: int | None = None
        self._total = 0
        self._lost = False

    def joules(self) -> float | None:
        now = read_int(str(self.path / "energy_uj"))
        if now is None or self._lost:
            return None
        if self._last is None:
            self._total = now
        elif now >= self._last:
            self._total += now - self._last
        elif self._range is None:
            self._lost = True  # it wrapped and we cannot know by how much, now or later
            return None
        else:
            self._total += now + self._range - self._last
        self._last = now
        return self._total / 1e6


def facts(root: str = "/") -> dict[str, Any]:
    """What kind of machine this is, for the manifest. A key that could not be learnt is absent."""
    cpuinfo = (read(os.path.join(root, "proc/cpuinfo")) or b"").decode(errors="replace")
    model = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", cpuinfo, re.M)
    memory = re.search(rb"^MemTotal:\s+(\d+) kB", read(os.path.join(root, "proc/meminfo")) or b"", re.M)
    found = {
        "cpu": model[1].strip() if model else platform.processor() or None,
        "arch": platform.machine() or None,
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "virtual": ("hypervisor" in cpuinfo) if "flags" in cpuinfo else None,
        "memory_bytes": int(memory[1]) * 1024 if memory else None,
        "os": platform.system() or None,
        "kernel": platform.release() or None,
        "python": platform.python_version(),
    }
    return {k: v for k, v in found.items() if v is not None}
