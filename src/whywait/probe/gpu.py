"""NVIDIA devices through NVML, by ctypes: power, energy, memory, utilisation. Not yet run on hardware.

A machine without ``libnvidia-ml.so.1`` has no devices for us; a figure the driver does not support gives no row.
"""

from __future__ import annotations

import ctypes
from typing import Any

from whywait.probe import Row
from whywait.probe.prometheus import label_json

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Nvml:
    """Every device NVML shows us. Make it with :meth:`open`; close it when done."""

    def __init__(self, library: Any, devices: list[ctypes.c_void_p]) -> None:
        self._lib, self._devices = library, devices

    @classmethod
    def open(cls, path: str = LIBRARY) -> Nvml | None:
        """None when there is no library, no driver or no device."""
        try:
            lib = ctypes.CDLL(path)
            if lib.nvmlInit_v2() != _SUCCESS:
                return None
            count = ctypes.c_uint()
            devices: list[ctypes.c_void_p] = []
            if lib.nvmlDeviceGetCount_v2(ctypes.byref(count)) == _SUCCESS:
                for i in range(count.value):
                    handle = ctypes.c_void_p()
                    if lib.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(i), ctypes.byref(handle)) == _SUCCESS:
                        devices.append(handle)
        except (OSError, AttributeError):
            return None
        if not devices:
            lib.nvmlShutdown()
            return None
        return cls(lib, devices)

    def close(self) -> None:
        if self._devices:
            self._devices = []
            self._lib.nvmlShutdown()

    def sample(self, _now_s: float = 0.0) -> list[Row]:
        rows: list[Row] = []
        for i, device in enumerate(self._devices):
            labels = label_json({"gpu": str(i)})
            rows += [(name, labels, value) for name, value in self._figures(device)]
        return rows

    def names(self) -> list[str]:
        """Product names, for the manifest; serial numbers and UUIDs are never read."""
        out = []
        for device in self._devices:
            text = ctypes.create_string_buffer(96)
            if self._call("nvmlDeviceGetName", device, text, ctypes.c_uint(len(text))):
                out.append(text.value.decode(errors="replace"))
        return out

    def _figures(self, device: ctypes.c_void_p) -> list[tuple[str, float]]:
        out: list[tuple[str, float]] = []
        milliwatts, millijoules = ctypes.c_uint(), ctypes.c_ulonglong()
        memory, use = _Memory(), _Utilization()
        if self._call("nvmlDeviceGetPowerUsage", device, ctypes.byref(milliwatts)):
            out.append(("power_watts", milliwatts.value / 1e3))
        if self._call("nvmlDeviceGetTotalEnergyConsumption", device, ctypes.byref(millijoules)):
            out.append(("energy_joules_total", millijoules.value / 1e3))
        if self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory)):
            out += [("memory_used_bytes", float(memory.used)), ("memory_total_bytes", float(memory.total))]
        if self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(use)):
            # NVML's own meaning: share of time a kernel ran, share of time memory was read or written.
            out += [("busy_share", use.gpu / 100), ("memory_busy_share", use.memory / 100)]
        return out

    def _call(self, name: str, *args: Any) -> bool:
        function = getattr(self._lib, name, None)  # older drivers lack some
        return function is not None and function(*args) == _SUCCESS
