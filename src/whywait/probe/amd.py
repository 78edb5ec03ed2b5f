"""AMD devices through ROCm SMI, by ctypes, under the same names as NVIDIA's. Not yet run on hardware.

Only functions that hand over plain numbers are used: the structures of AMD SMI change between releases, and a figure
read at the wrong offset would be a wrong figure. (``librocm_smi64`` comes with ROCm and asks the same driver.)
"""

from __future__ import annotations

import ctypes
from typing import Any

from whywait.probe import Row
from whywait.probe.prometheus import label_json

LIBRARIES = ("librocm_smi64.so.7", "librocm_smi64.so.6", "librocm_smi64.so.5", "librocm_smi64.so",
             "/opt/rocm/lib/librocm_smi64.so")  # fmt: skip
_SUCCESS = 0
_VRAM = 0
_EDGE, _CURRENT = 0, 0  # temperature: sensor, metric


class RocmSmi:
    """Every device ROCm SMI shows us. Make it with :meth:`open`; close it when done."""

    def __init__(self, library: Any, count: int) -> None:
        self._lib, self._count = library, count

    @classmethod
    def open(cls, paths: tuple[str, ...] = LIBRARIES) -> RocmSmi | None:
        """None when there is no library, no driver or no device."""
        for path in paths:
            try:
                lib = ctypes.CDLL(path)
                if lib.rsmi_init(ctypes.c_uint64(0)) != _SUCCESS:
                    return None
                count = ctypes.c_uint32()
                if lib.rsmi_num_monitor_devices(ctypes.byref(count)) == _SUCCESS and count.value:
                    return cls(lib, count.value)
                lib.rsmi_shut_down()
            except (OSError, AttributeError):
                continue
            return None
        return None

    def close(self) -> None:
        if self._count:
            self._count = 0
            self._lib.rsmi_shut_down()

    def sample(self, _now_s: float = 0.0) -> list[Row]:
        rows: list[Row] = []
        for i in range(self._count):
            labels = label_json({"gpu": str(i)})
            rows += [(name, labels, value) for name, value in self._figures(i)]
        return rows

    def _figures(self, i: int) -> list[tuple[str, float]]:
        """Percent → share, microwatts → watts, counter × resolution in microjoules → joules, millidegrees → degrees."""
        out: list[tuple[str, float]] = []
        for name, function in (("busy_share", "rsmi_dev_busy_percent_get"),
                               ("memory_busy_share", "rsmi_dev_memory_busy_percent_get")):  # fmt: skip
            percent = ctypes.c_uint32()
            if self._call(function, i, ctypes.byref(percent)):
                out.append((name, percent.value / 100))
        power = ctypes.c_uint64()
        if self._call("rsmi_dev_power_ave_get", i, ctypes.c_uint32(0), ctypes.byref(power)):
            out.append(("power_watts", power.value / 1e6))
        if self._call("rsmi_dev_power_cap_get", i, ctypes.c_uint32(0), ctypes.byref(power)):
            out.append(("power_limit_watts", power.value / 1e6))
        for name, function in (("memory_used_bytes", "rsmi_dev_memory_usage_get"),
                               ("memory_total_bytes", "rsmi_dev_memory_total_get")):  # fmt: skip
            size = ctypes.c_uint64()
            if self._call(function, i, ctypes.c_uint32(_VRAM), ctypes.byref(size)):
                out.append((name, float(size.value)))
        ticks, resolution, at = ctypes.c_uint64(), ctypes.c_float(), ctypes.c_uint64()
        if self._call("rsmi_dev_energy_count_get", i, *(ctypes.byref(x) for x in (ticks, resolution, at))):
            out.append(("energy_joules_total", ticks.value * resolution.value / 1e6))
        degrees = ctypes.c_int64()
        where = ctypes.c_uint32(_EDGE), ctypes.c_uint32(_CURRENT)
        if self._call("rsmi_dev_temp_metric_get", i, *where, ctypes.byref(degrees)):
            out.append(("temperature_celsius", degrees.value / 1e3))
        return out

    def _call(self, name: str, device: int, *args: Any) -> bool:
        function = getattr(self._lib, name, None)
        return function is not None and function(ctypes.c_uint32(device), *args) == _SUCCESS
