"""NVIDIA devices through NVML, by ctypes: use, memory, clocks, throttling, power, energy, traffic.
Not yet run on hardware.

A machine without ``libnvidia-ml.so.1`` has no devices for us; a figure the driver does not support gives no row. Names
are those of every source of device figures (``docs/probes.md``). Structures and numbers are those of nvml.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from whywait.probe import Row
from whywait.probe.prometheus import label_json

LIBRARY = "libnvidia-ml.so.1"
SLOW_S = 1.0  # the PCIe figure takes NVML 20 ms for each direction
MOST_PROCESSES = 256
_SUCCESS = 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_TEMPERATURE_GPU = 0
_PCIE_TX, _PCIE_RX = 0, 1
_TOTAL = 0xFFFFFFFF  # scope of an NVLink field: all links together

#: Bits of the reasons why clocks are held down → ours. Nothing to do, or clocks the user set, is no throttling.
REASONS: tuple[tuple[str, int], ...] = (
    ("throttle_power", 0x04 | 0x80),  # software power cap, power brake
    ("throttle_thermal", 0x20 | 0x40),  # software and hardware thermal slowdown
    ("throttle_hardware", 0x08),  # hardware slowdown: power or heat, it does not say which
)

#: NVML field → (our counter, factor to bytes). PCIe counters of 32 bits wrap within a second and are not used.
NVLINK_TX, NVLINK_RX, PCIE_TX, PCIE_RX = 138, 139, 197, 198
FIELDS: dict[int, tuple[str, float, int]] = {
    NVLINK_TX: ("nvlink_tx_bytes_total", 1024, _TOTAL),
    NVLINK_RX: ("nvlink_rx_bytes_total", 1024, _TOTAL),
    PCIE_TX: ("pcie_tx_bytes_total", 1, 0),
    PCIE_RX: ("pcie_rx_bytes_total", 1, 0),
}
_WIDE = (2, 3)  # value types unsigned long, unsigned long long


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Process(ctypes.Structure):
    """``nvmlProcessInfo_t`` of versions 2 and 3."""

    _fields_ = [
        ("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]  # fmt: skip


class _FieldValue(ctypes.Structure):
    """``nvmlFieldValue_t``; the union read as its widest unsigned member."""

    _fields_ = [
        ("field", ctypes.c_uint), ("scope", ctypes.c_uint), ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong), ("type", ctypes.c_uint), ("status", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    ]  # fmt: skip


def throttling(bits: int) -> list[tuple[str, float]]:
    """0 or 1 for each reason in ``REASONS``."""
    return [(name, float(bool(bits & mask))) for name, mask in REASONS]


class Nvml:
    """Every device NVML shows us. Make it with :meth:`open`; close it when done."""

    def __init__(self, library: Any, devices: dict[int, ctypes.c_void_p]) -> None:
        self._lib, self._devices = library, devices
        self._slow_at = float("-inf")

    @classmethod
    def open(cls, path: str = LIBRARY) -> Nvml | None:
        """None when there is no library, no driver or no device."""
        try:
            lib = ctypes.CDLL(path)
            if lib.nvmlInit_v2() != _SUCCESS:
                return None
            count = ctypes.c_uint()
            devices: dict[int, ctypes.c_void_p] = {}
            if lib.nvmlDeviceGetCount_v2(ctypes.byref(count)) == _SUCCESS:
                for i in range(count.value):
                    handle = ctypes.c_void_p()
                    if lib.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(i), ctypes.byref(handle)) == _SUCCESS:
                        devices[i] = handle  # one that is lost leaves the numbers of the others as they are
        except (OSError, AttributeError):
            return None
        if not devices:
            lib.nvmlShutdown()
            return None
        return cls(lib, devices)

    def close(self) -> None:
        if self._devices:
            self._devices = {}
            self._lib.nvmlShutdown()

    def sample(self, now_s: float = 0.0) -> list[Row]:
        """Rows of all devices at ``now_s`` (any steady clock, in seconds); PCIe traffic once a second."""
        slow = now_s - self._slow_at >= SLOW_S
        if slow:
            self._slow_at = now_s
        rows: list[Row] = []
        for i, device in self._devices.items():
            labels = label_json({"gpu": str(i)})
            figures = self._figures(device) + self._clocks(device) + self._traffic(device, slow)
            rows += [(name, labels, value) for name, value in figures]
        return rows

    def names(self) -> list[str]:
        """Product names, for the manifest; serial numbers and UUIDs are never read."""
        out = []
        for device in self._devices.values():
            text = ctypes.create_string_buffer(96)
            if self._call("nvmlDeviceGetName", device, text, ctypes.c_uint(len(text))):
                out.append(text.value.decode(errors="replace"))
        return out

    def processes(self) -> dict[int, set[int]]:
        """By the number of the device the processes that compute on it, as the driver numbers them (in a container
        those may be the host's numbers, or none); a device that does not say is left out."""
        out = {}
        for i, device in self._devices.items():
            for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
                found, count = (_Process * MOST_PROCESSES)(), ctypes.c_uint(MOST_PROCESSES)
                if self._call(name, device, ctypes.byref(count), found):
                    out[i] = {int(p.pid) for p in found[: count.value]}
                    break
        return out

    def _figures(self, device: ctypes.c_void_p) -> list[tuple[str, float]]:
        out: list[tuple[str, float]] = []
        memory, use = _Memory(), _Utilization()
        if (milliwatts := self._number("nvmlDeviceGetPowerUsage", device)) is not None:
            out.append(("power_watts", milliwatts / 1e3))
        if (limit := self._number("nvmlDeviceGetEnforcedPowerLimit", device)) is not None:
            out.append(("power_limit_watts", limit / 1e3))
        millijoules = self._number("nvmlDeviceGetTotalEnergyConsumption", device, kind=ctypes.c_ulonglong)
        if millijoules is not None:
            out.append(("energy_joules_total", millijoules / 1e3))
        if self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory)):
            out += [("memory_used_bytes", float(memory.used)), ("memory_total_bytes", float(memory.total))]
        if self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(use)):
            # NVML's own meaning: share of time a kernel ran, share of time memory was read or written.
            out += [("busy_share", use.gpu / 100), ("memory_busy_share", use.memory / 100)]
        return out

    def _clocks(self, device: ctypes.c_void_p) -> list[tuple[str, float]]:
        out: list[tuple[str, float]] = []
        for prefix, number in (("sm", _CLOCK_SM), ("memory", _CLOCK_MEMORY)):
            if (mhz := self._number("nvmlDeviceGetClockInfo", device, number)) is not None:
                out.append((f"{prefix}_clock_hz", mhz * 1e6))
            if (mhz := self._number("nvmlDeviceGetMaxClockInfo", device, number)) is not None:
                out.append((f"{prefix}_clock_max_hz", mhz * 1e6))
        if (celsius := self._number("nvmlDeviceGetTemperature", device, _TEMPERATURE_GPU)) is not None:
            out.append(("temperature_celsius", float(celsius)))
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):  # new, old
            bits = self._number(name, device, kind=ctypes.c_ulonglong)
            if bits is not None:
                return out + throttling(bits)
        return out

    def _traffic(self, device: ctypes.c_void_p, slow: bool) -> list[tuple[str, float]]:
        out = self._fields(device)
        if slow and not any(name.startswith("pcie") for name, _ in out):
            for name, direction in (("pcie_tx_bytes_per_s", _PCIE_TX), ("pcie_rx_bytes_per_s", _PCIE_RX)):
                kilobytes = self._number("nvmlDeviceGetPcieThroughput", device, direction)
                if kilobytes is not None:  # over 20 ms, KB/s
                    out.append((name, kilobytes * 1e3))
        return out

    def _fields(self, device: ctypes.c_void_p) -> list[tuple[str, float]]:
        values = (_FieldValue * len(FIELDS))()
        for value, (field, (_, _, scope)) in zip(values, FIELDS.items(), strict=True):
            value.field, value.scope = field, scope
        if not self._call("nvmlDeviceGetFieldValues", device, ctypes.c_int(len(FIELDS)), values):
            return []
        out = []
        for value in values:
            name, factor, _ = FIELDS[value.field]
            if value.status == _SUCCESS and value.type in _WIDE:
                out.append((name, value.value * factor))
        return out

    def _number(self, name: str, device: ctypes.c_void_p, *args: int, kind: Any = ctypes.c_uint) -> int | None:
        """What a function with one number as its result says; None where it is not supported."""
        out = kind()
        if not self._call(name, device, *(ctypes.c_uint(a) for a in args), ctypes.byref(out)):
            return None
        return int(out.value)

    def _call(self, name: str, *args: Any) -> bool:
        function: Callable[..., int] | None = getattr(self._lib, name, None)  # old drivers lack some
        return function is not None and function(*args) == _SUCCESS


def device_names(path: str = LIBRARY) -> list[str]:
    """Product names of this machine's NVIDIA devices, for what their data sheets say; empty where there is none."""
    devices = Nvml.open(path)
    if devices is None:
        return []
    try:
        return devices.names()
    finally:
        devices.close()
