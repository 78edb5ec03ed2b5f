"""NVML through a library made here: what we read, in which units, and what happens when it says no."""

import shutil
import subprocess
from pathlib import Path

import pytest

from whywait.probe.gpu import Nvml

SOURCE = r"""
#include <string.h>
#include <stdlib.h>
typedef struct { unsigned long long total, free, used; } mem_t;
typedef struct { unsigned int gpu, memory; } util_t;
static int devices[2] = {0, 1};
static int no(void) { return getenv("FAKE_NVML_NO") != NULL; }
int nvmlInit_v2(void) { return no() ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *n) { *n = getenv("FAKE_NVML_NONE") ? 0 : 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int i, void **h) { if (i > 1) return 2; *h = &devices[i]; return 0; }
static int which(void *h) { return *(int *)h; }
int nvmlDeviceGetName(void *h, char *s, unsigned int n) { strncpy(s, which(h) ? "Fake B" : "Fake A", n); return 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned int *mw) { *mw = 250500 + which(h); return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) {
  if (which(h)) return 3; /* NVML_ERROR_NOT_SUPPORTED, as on older chips */
  *mj = 5000000000123ULL; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, mem_t *m) {
  m->total = 80ULL << 30; m->used = (60ULL << 30) + which(h); m->free = m->total - m->used; return 0; }
"""
RATES = "int nvmlDeviceGetUtilizationRates(void *h, util_t *u) { u->gpu = 97; u->memory = 41; return 0; }\n"


def build(folder: Path, source: str) -> str:
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("no C compiler")
    (folder / "nvml.c").write_text(source)
    library = folder / "libfake-nvml.so"
    subprocess.run([cc, "-shared", "-fPIC", "-o", str(library), str(folder / "nvml.c")], check=True)
    return str(library)


def test_figures_units_and_absence(tmp_path: Path) -> None:
    nvml = Nvml.open(build(tmp_path, SOURCE + RATES))
    assert nvml is not None
    got = {(name, labels): value for name, labels, value in nvml.sample()}
    first, second = '{"gpu":"0"}', '{"gpu":"1"}'
    assert got[("power_watts", first)] == 250.5
    assert got[("energy_joules_total", first)] == 5_000_000_000.123
    assert ("energy_joules_total", second) not in got  # not supported is absent, not 0
    assert got[("memory_total_bytes", second)] == 80 << 30
    assert got[("memory_used_bytes", second)] == (60 << 30) + 1
    assert got[("busy_share", first)] == 0.97
    assert got[("memory_busy_share", first)] == 0.41
    assert nvml.names() == ["Fake A", "Fake B"]
    nvml.close()
    nvml.close()
    assert nvml.sample() == []


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
    assert Nvml.open(build(tmp_path, "int nothing(void) { return 0; }")) is None
