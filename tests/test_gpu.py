"""Devices through libraries made here and recorded-style pages: what we read, in which units, and what is left out."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whywait.net.reach import Reach
from whywait.probe.amd import RocmSmi
from whywait.probe.dcgm import DcgmPage, DcgmReader
from whywait.probe.gpu import Nvml, device_names, throttling
from whywait.probe.pages import Fetcher
from whywait.probe.sampler import Config, SamplerProcess

SOURCE = r"""
#include <string.h>
#include <stdlib.h>
typedef struct { unsigned long long total, free, used; } mem_t;
typedef struct { unsigned int gpu, memory; } util_t;
typedef struct {
  unsigned int fieldId, scopeId; long long timestamp, latencyUsec; unsigned int valueType; int nvmlReturn;
  union { double d; unsigned int ui; unsigned long long ull; } value;
} field_t; /* as in nvml.h: 40 bytes */
static int devices[2] = {0, 1};
static int no(void) { return getenv("FAKE_NVML_NO") != NULL; }
static int which(void *h) { return *(int *)h; }
int nvmlInit_v2(void) { return no() ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *n) { *n = getenv("FAKE_NVML_NONE") ? 0 : 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **h) {
  if (i > 1 || (i == 0 && getenv("FAKE_NVML_LOST"))) return 15; /* NVML_ERROR_GPU_IS_LOST */
  *h = &devices[i]; return 0; }
int nvmlDeviceGetName(void *h, char *s, unsigned int n) { strncpy(s, which(h) ? "Fake B" : "Fake A", n); return 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned int *mw) { *mw = 250500 + which(h); return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) {
  if (which(h)) return 3; /* NVML_ERROR_NOT_SUPPORTED, as on older chips */
  *mj = 5000000000123ULL; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, mem_t *m) {
  m->total = 80ULL << 30; m->used = (60ULL << 30) + which(h); m->free = m->total - m->used; return 0; }
"""
RATES = "int nvmlDeviceGetUtilizationRates(void *h, util_t *u) { u->gpu = 97; u->memory = 41; return 0; }\n"
MORE = r"""
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned int *mw) { *mw = 700000; return 0; }
int nvmlDeviceGetClockInfo(void *h, unsigned int kind, unsigned int *mhz) {
  if (kind == 1) *mhz = 1755; else if (kind == 2) *mhz = 2619; else return 2; return 0; }
int nvmlDeviceGetMaxClockInfo(void *h, unsigned int kind, unsigned int *mhz) {
  if (kind != 1) return 3; *mhz = 1980; return 0; }
int nvmlDeviceGetTemperature(void *h, unsigned int sensor, unsigned int *c) { *c = 61 + which(h); return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *bits) {
  *bits = which(h) ? 0x20 : 0x4; return 0; }
int nvmlDeviceGetPcieThroughput(void *h, unsigned int direction, unsigned int *kb) {
  *kb = direction == 0 ? 1500 : 2500; return 0; }
int nvmlDeviceGetFieldValues(void *h, int n, field_t *f) {
  for (int i = 0; i < n; i++) {
    f[i].nvmlReturn = 0; f[i].valueType = 3;
    if (f[i].fieldId == 138 && f[i].scopeId == 0xFFFFFFFFu) f[i].value.ull = 7000000000ULL;
    else if (f[i].fieldId == 139 && f[i].scopeId == 0xFFFFFFFFu) f[i].value.ull = 9000000000ULL;
    else if (f[i].fieldId == 197 || f[i].fieldId == 198) {
      if (which(h)) f[i].value.ull = 1ULL << 40; else { f[i].valueType = 1; f[i].value.ui = 123; } }
    else f[i].nvmlReturn = 3;
  }
  return 0; }
"""


def build(folder: Path, source: str, name: str = "libfake-nvml.so") -> str:
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("no C compiler")
    (folder / "fake.c").write_text(source)
    library = folder / name
    subprocess.run([cc, "-shared", "-fPIC", "-o", str(library), str(folder / "fake.c")], check=True)
    return str(library)


FIRST, SECOND = '{"gpu":"0"}', '{"gpu":"1"}'


def test_figures_units_and_absence(tmp_path: Path) -> None:
    nvml = Nvml.open(build(tmp_path, SOURCE + RATES))
    assert nvml is not None
    got = {(name, labels): value for name, labels, value in nvml.sample()}
    assert got[("power_watts", FIRST)] == 250.5
    assert got[("energy_joules_total", FIRST)] == 5_000_000_000.123
    assert ("energy_joules_total", SECOND) not in got  # not supported is absent, not 0
    assert got[("memory_total_bytes", SECOND)] == 80 << 30
    assert got[("memory_used_bytes", SECOND)] == (60 << 30) + 1
    assert got[("busy_share", FIRST)] == 0.97
    assert got[("memory_busy_share", FIRST)] == 0.41
    assert not [name for name, _ in got if "clock" in name or "throttle" in name or "bytes_per_s" in name]
    assert nvml.names() == ["Fake A", "Fake B"]
    nvml.close()
    nvml.close()
    assert nvml.sample() == []


def test_a_lost_device_leaves_the_others_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_LOST", "1")
    nvml = Nvml.open(build(tmp_path, SOURCE + RATES))
    assert nvml is not None
    assert {labels for _, labels, _ in nvml.sample()} == {SECOND}
    nvml.close()


def test_names_for_the_manifest_or_none(tmp_path: Path) -> None:
    assert device_names(build(tmp_path, SOURCE + RATES)) == ["Fake A", "Fake B"]
    assert device_names(str(tmp_path / "nothing.so")) == []


def test_clocks_throttling_and_traffic(tmp_path: Path) -> None:
    nvml = Nvml.open(build(tmp_path, SOURCE + RATES + MORE))
    assert nvml is not None
    got = {(name, labels): value for name, labels, value in nvml.sample(0.0)}
    assert got[("sm_clock_hz", FIRST)] == 1.755e9
    assert got[("sm_clock_max_hz", FIRST)] == 1.98e9
    assert got[("memory_clock_hz", FIRST)] == 2.619e9
    assert ("memory_clock_max_hz", FIRST) not in got
    assert (got[("temperature_celsius", FIRST)], got[("power_limit_watts", FIRST)]) == (61, 700)
    assert [got[(f"throttle_{why}", FIRST)] for why in ("power", "thermal", "hardware")] == [1, 0, 0]
    assert [got[(f"throttle_{why}", SECOND)] for why in ("power", "thermal", "hardware")] == [0, 1, 0]
    assert got[("nvlink_tx_bytes_total", FIRST)] == 7_000_000_000 * 1024  # NVML counts KiB
    assert got[("nvlink_rx_bytes_total", FIRST)] == 9_000_000_000 * 1024
    # A 32-bit PCIe counter wraps within a second: the rate is read instead, once a second.
    assert ("pcie_tx_bytes_total", FIRST) not in got
    assert (got[("pcie_tx_bytes_per_s", FIRST)], got[("pcie_rx_bytes_per_s", FIRST)]) == (1.5e6, 2.5e6)
    assert got[("pcie_tx_bytes_total", SECOND)] == 1 << 40
    assert ("pcie_tx_bytes_per_s", SECOND) not in got
    later = {(name, labels) for name, labels, _ in nvml.sample(0.5)}
    assert ("pcie_tx_bytes_per_s", FIRST) not in later
    assert ("sm_clock_hz", FIRST) in later
    nvml.close()


def test_reasons() -> None:
    assert throttling(0x1 | 0x2) == [("throttle_power", 0), ("throttle_thermal", 0), ("throttle_hardware", 0)]
    assert throttling(0x80 | 0x40 | 0x8) == [("throttle_power", 1), ("throttle_thermal", 1), ("throttle_hardware", 1)]


def test_a_driver_that_lacks_a_function(tmp_path: Path) -> None:
    nvml = Nvml.open(build(tmp_path, SOURCE))
    assert nvml is not None
    names = {name for name, _, _ in nvml.sample()}
    nvml.close()
    assert "power_watts" in names
    assert "busy_share" not in names


def test_no_driver_no_device_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Nvml.open(str(tmp_path / "nothing.so")) is None
    library = build(tmp_path, SOURCE)
    monkeypatch.setenv("FAKE_NVML_NO", "1")
    assert Nvml.open(library) is None
    monkeypatch.delenv("FAKE_NVML_NO")
    monkeypatch.setenv("FAKE_NVML_NONE", "1")
    assert Nvml.open(library) is None


def test_a_library_that_is_something_else(tmp_path: Path) -> None:
    other = build(tmp_path, "int nothing(void) { return 0; }")
    assert Nvml.open(other) is None
    assert RocmSmi.open((other,)) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the library by LD_LIBRARY_PATH")
def test_the_sampler_finds_the_devices_by_itself(tmp_path: Path) -> None:
    build(tmp_path, SOURCE + RATES + MORE, "libnvidia-ml.so.1")
    config = Config(zero_unix_ns=time.time_ns(), spool=str(tmp_path / "spool"), hz=50, host=False)
    with SamplerProcess(config, {"LD_LIBRARY_PATH": str(tmp_path)}) as sampler:
        end = time.monotonic() + 60
        while time.monotonic() < end and not any(r["name"] == "sm_clock_hz" for r in sampler.rows):
            time.sleep(0.02)
    assert {r["value"] for r in sampler.rows if r["source"] == "gpu" and r["name"] == "sm_clock_hz"} == {1.755e9}
    assert not sampler.complaint


# --- AMD

ROCM = r"""
#include <stdint.h>
#include <stdlib.h>
int rsmi_init(uint64_t flags) { return getenv("FAKE_ROCM_NO") ? 8 : 0; }
int rsmi_shut_down(void) { return 0; }
int rsmi_num_monitor_devices(uint32_t *n) { *n = 2; return 0; }
int rsmi_dev_busy_percent_get(uint32_t d, uint32_t *p) { *p = 88 + d; return 0; }
int rsmi_dev_memory_busy_percent_get(uint32_t d, uint32_t *p) { *p = 31; return 0; }
int rsmi_dev_power_ave_get(uint32_t d, uint32_t sensor, uint64_t *uw) { if (d) return 2; *uw = 550250000; return 0; }
int rsmi_dev_power_cap_get(uint32_t d, uint32_t sensor, uint64_t *uw) { *uw = 750000000; return 0; }
int rsmi_dev_memory_usage_get(uint32_t d, uint32_t kind, uint64_t *b) { *b = kind ? 0 : 1ULL << 36; return 0; }
int rsmi_dev_memory_total_get(uint32_t d, uint32_t kind, uint64_t *b) { *b = 192ULL << 30; return 0; }
int rsmi_dev_energy_count_get(uint32_t d, uint64_t *ticks, float *res, uint64_t *t) {
  *ticks = 2000000; *res = 15.25f; *t = 1; return 0; }
int rsmi_dev_temp_metric_get(uint32_t d, uint32_t sensor, uint32_t metric, int64_t *m) { *m = 54500; return 0; }
"""


def test_amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build(tmp_path, ROCM, "libfake-rocm.so")
    rocm = RocmSmi.open((str(tmp_path / "nothing.so"), library))
    assert rocm is not None
    got = {(name, labels): value for name, labels, value in rocm.sample()}
    assert {name: value for (name, labels), value in got.items() if labels == FIRST} == {
        "busy_share": 0.88, "memory_busy_share": 0.31, "power_watts": 550.25, "power_limit_watts": 750,
        "memory_used_bytes": 1 << 36, "memory_total_bytes": 192 << 30, "energy_joules_total": 30.5,
        "temperature_celsius": 54.5,
    }  # fmt: skip
    assert ("power_watts", SECOND) not in got
    rocm.close()
    rocm.close()
    assert rocm.sample() == []
    monkeypatch.setenv("FAKE_ROCM_NO", "1")
    assert RocmSmi.open((library,)) is None


# --- DCGM exporter

WHO = 'UUID="GPU-1b2c",device="nvidia{0}",modelName="NVIDIA H100 80GB HBM3",Hostname="node7"'


def line(name: str, value: str, gpu: int = 0, more: str = "") -> str:
    return f'{name}{{gpu="{gpu}",{WHO.format(gpu)}{more}}} {value}'


DCGM = "\n".join(
    [
        "# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).",
        "# TYPE DCGM_FI_DEV_SM_CLOCK gauge",
        line("DCGM_FI_DEV_SM_CLOCK", "1755"),
        line("DCGM_FI_DEV_GPU_UTIL", "97"),
        line("DCGM_FI_DEV_MEM_COPY_UTIL", "41"),
        line("DCGM_FI_DEV_FB_USED", "61000"),
        line("DCGM_FI_DEV_FB_FREE", "20000"),
        line("DCGM_FI_DEV_POWER_USAGE", "645.731000"),
        line("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "5000000000123"),
        line("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "36"),
        line("DCGM_FI_PROF_SM_ACTIVE", "0.812000"),
        line("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "0.204300"),
        line("DCGM_FI_PROF_DRAM_ACTIVE", "0.715200"),
        "# TYPE DCGM_FI_PROF_NVLINK_TX_BYTES counter",
        line("DCGM_FI_PROF_NVLINK_TX_BYTES", "1.5e+10"),
        line("DCGM_FI_PROF_PCIE_RX_BYTES", "48210931"),
        line("DCGM_FI_DEV_XID_ERRORS", "0"),
        line("DCGM_FI_PROF_SM_ACTIVE", "0.5", 1, ',GPU_I_PROFILE="1g.10gb",GPU_I_ID="7",pod="p",namespace="n"'),
        line("DCGM_FI_DEV_GPU_TEMP", "2147483632", 1),
        line("DCGM_FI_PROF_DRAM_ACTIVE", "140737488355328", 1),
        line("DCGM_FI_DEV_SM_CLOCK", "nan", 1),
        "DCGM_FI_DEV_SM_CLOCK{broken 7",
        "",
    ]
)


def page() -> DcgmPage:
    return DcgmPage("gpu/0", Fetcher("http://127.0.0.1:1/metrics", {}, 0.2, Reach()))


def test_dcgm_page() -> None:
    reader = DcgmReader()
    for _ in range(2):  # the second time from what was learnt
        rows = reader.read(DCGM)
        assert {name: value for name, labels, value in rows if labels == FIRST} == pytest.approx(
            {
                "sm_clock_hz": 1.755e9, "busy_share": 0.97, "memory_busy_share": 0.41, "power_watts": 645.731,
                "memory_used_bytes": 61000 << 20, "memory_total_bytes": 81000 << 20, "throttle_hardware": 0,
                "energy_joules_total": 5_000_000_000.123, "throttle_power": 1, "throttle_thermal": 1,
                "sm_active_share": 0.812, "tensor_active_share": 0.2043, "dram_active_share": 0.7152,
                "nvlink_tx_bytes_per_s": 1.5e10, "pcie_rx_bytes_per_s": 48210931,
            }
        )  # fmt: skip
        # A slice is told apart; blank and absent values are not there; who and where it is, is not kept.
        assert [r for r in rows if r[1] != FIRST] == [("sm_active_share", '{"gpu":"1","mig":"7"}', 0.5)]
    assert "node7" not in str(rows)


def test_dcgm_lines_with_a_time_behind_the_value_and_figures_that_are_none() -> None:
    reader = DcgmReader()
    for second in (1, 2):
        line = (
            f'DCGM_FI_DEV_GPU_UTIL{{gpu="0"}} 50 {1_790_000_000_000 + second}\n'  # as a federating Prometheus says it
        )
        assert reader.read(line) == [("busy_share", '{"gpu":"0"}', 0.5)]
    assert reader.read('DCGM_FI_DEV_CLOCK_THROTTLE_REASONS{gpu="0"} +Inf\n') == []


def test_labels_that_never_come_back_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whywait.probe.prometheus.MEMO_LIMIT", 10)
    reader = DcgmReader()
    for pod in range(50):
        assert len(reader.read(f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",pod="{pod}"}} 50\n')) == 1
    assert len(reader._lines._memo) <= 11


def test_a_page_that_is_not_dcgm_is_a_lost_probe() -> None:
    reader = page()
    assert DcgmReader().read("vllm:num_requests_running 3\n") == []
    assert reader.sample() is None
    assert reader.why
