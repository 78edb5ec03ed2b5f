"""Pages of NVIDIA's DCGM exporter → rows under the same names as NVML's, with the profiling figures NVML lacks.

Not yet run on hardware. Field names and units are those of dcgm_fields.h. DCGM's PCIe and NVLink figures are *rates*
(bytes per second since the last look), whatever type the page gives them.
"""

from __future__ import annotations

import math

from whywait.probe import Row
from whywait.probe.gpu import throttling
from whywait.probe.pages import Fetcher
from whywait.probe.prometheus import Lines, Sample, label_json

MIB = 1 << 20

#: DCGM field → (our name, factor).
FIELDS: dict[str, tuple[str, float]] = {
    "DCGM_FI_DEV_GPU_UTIL": ("busy_share", 0.01),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("memory_busy_share", 0.01),
    "DCGM_FI_DEV_FB_USED": ("memory_used_bytes", MIB),
    "DCGM_FI_DEV_FB_TOTAL": ("memory_total_bytes", MIB),
    "DCGM_FI_DEV_FB_FREE": ("memory_free_bytes", MIB),
    "DCGM_FI_DEV_POWER_USAGE": ("power_watts", 1),
    "DCGM_FI_DEV_POWER_MGMT_LIMIT": ("power_limit_watts", 1),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("energy_joules_total", 1e-3),
    "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_hz", 1e6),
    "DCGM_FI_DEV_MEM_CLOCK": ("memory_clock_hz", 1e6),
    "DCGM_FI_DEV_MAX_SM_CLOCK": ("sm_clock_max_hz", 1e6),
    "DCGM_FI_DEV_MAX_MEM_CLOCK": ("memory_clock_max_hz", 1e6),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature_celsius", 1),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("engine_active_share", 1),
    "DCGM_FI_PROF_SM_ACTIVE": ("sm_active_share", 1),
    "DCGM_FI_PROF_SM_OCCUPANCY": ("sm_occupancy_share", 1),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("tensor_active_share", 1),
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": ("fp64_active_share", 1),
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": ("fp32_active_share", 1),
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": ("fp16_active_share", 1),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("dram_active_share", 1),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("pcie_tx_bytes_per_s", 1),
    "DCGM_FI_PROF_PCIE_RX_BYTES": ("pcie_rx_bytes_per_s", 1),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": ("nvlink_tx_bytes_per_s", 1),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": ("nvlink_rx_bytes_per_s", 1),
}
REASONS = ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS")
#: DCGM's words for "no value" (blank, not found, not supported, no permission) of each width.
BLANK = {float(base + i) for base in (0x7FFFFFF0, 1 << 47, 0x7FFFFFFFFFFFFFF0) for i in range(4)}
_KEPT = {"gpu": "gpu", "GPU_I_ID": "mig"}  # a device, a MIG slice of it; host names, UUIDs and pods are not kept


#: What a line becomes: name, labels, factor.
_Known = tuple[str, "str | None", float]


class DcgmReader:
    """Rows of successive pages. Labels: ``gpu``, and ``mig`` for a slice of one."""

    def __init__(self) -> None:
        self._lines = Lines(_learn)

    def read(self, text: str) -> list[Row]:
        """The rows of a page; those of fields that have no value are left out."""
        rows: list[Row] = []
        for known, value in self._lines.read(text, "DCGM_"):
            if not known or not math.isfinite(value) or value in BLANK:
                continue
            name, labels, factor = known
            if name == "throttle":
                rows += [(reason, labels, flag) for reason, flag in throttling(int(value))]
            else:
                rows.append((name, labels, value * factor))
        return _totals(rows)


class DcgmPage:
    """One exporter's page."""

    def __init__(self, name: str, fetcher: Fetcher) -> None:
        self.name, self._fetcher = name, fetcher
        self._reader = DcgmReader()
        self.why = ""

    def sample(self) -> list[Row] | None:
        body = self._fetcher.get()
        self.why = self._fetcher.why
        if body is None:
            return None
        rows = self._reader.read(body.decode("utf-8", "replace"))
        if not rows:
            self.why = "no DCGM figures"
            return None
        return rows

    def close(self) -> None:
        self._fetcher.close()


def _learn(sample: Sample) -> _Known | tuple[()]:
    name, factor = ("throttle", 1.0) if sample.name in REASONS else FIELDS.get(sample.name, ("", 0.0))
    if not name:
        return ()
    labels = {new: sample.labels[old] for old, new in _KEPT.items() if sample.labels.get(old)}
    return name, label_json(labels), factor


def _totals(rows: list[Row]) -> list[Row]:
    """Memory in all from what is used and free, where the page does not say it (reserved memory is then missing)."""
    if any(name == "memory_total_bytes" for name, _, _ in rows):
        return [r for r in rows if r[0] != "memory_free_bytes"]
    parts: dict[str | None, dict[str, float]] = {}
    for name, labels, value in rows:
        if name in ("memory_used_bytes", "memory_free_bytes"):
            parts.setdefault(labels, {})[name] = value
    whole: list[Row] = [("memory_total_bytes", k, sum(v.values())) for k, v in parts.items() if len(v) == 2]
    return [r for r in rows if r[0] != "memory_free_bytes"] + whole
