"""How many devices serve: by what the engine's processes have open and were told, never guessed; the bill uses it."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.analysis_runs import S
from tests.bill_runs import meters, service
from tests.test_gpu import SOURCE, build
from whywait.analyze.energy import energy_of
from whywait.analyze.energy_checks import checks_of
from whywait.analyze.window import window_of
from whywait.counting import devices_of
from whywait.engines import EngineTable, by_name
from whywait.lab.spread import spread
from whywait.lab.state import Engine
from whywait.load.preflight import Target
from whywait.net.endpoint import parse_url
from whywait.probe.opened import CPU, GPU, Opened, family_of, opened

WINDOW = (10 * S, 80 * S)
NONE = "/nowhere/libnvidia-ml.so.1"
VLLM, SGLANG = by_name("vllm"), by_name("sglang")
OWN = EngineTable("mine", "Mine", log_patterns={"tensor_parallel": r"shards: (\d+)",
                                                "data_parallel": r"replicas: (\d+)"})  # fmt: skip
PROCESSES = r"""
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } process_t;
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned int *n, process_t *p) {
  p[0].pid = 70; p[0].used = 1; *n = 1;
  if (which(h)) { p[0].pid = 71; p[1].pid = 5; p[1].used = 2; *n = 2; }
  return 0; }
"""


class Box:
    """A machine's /proc and /dev in a folder."""

    def __init__(self, root: Path, *devices: str) -> None:
        self.root = root
        (root / "dev").mkdir()
        for name in devices:
            (root / "dev" / name).write_text("")

    def process(self, pid: int, parent: int, argv: str, *files: str, group: int = 70, exe: str = "python") -> None:
        folder = self.root / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} (x) S {parent} {group} " + "0 " * 40)
        (folder / "cmdline").write_text(argv.replace(" ", "\0") + "\0")
        (folder / "exe").symlink_to(f"/usr/bin/{exe}")
        for i, file in enumerate(files):
            (folder / "fd" / str(i)).symlink_to(file)

    def opened(self, *pids: int, library: str = NONE) -> Opened:
        return opened(pids, str(self.root), library)


def test_the_family_has_the_workers_beside_the_one_that_listens_and_no_stranger(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.process(60, 1, "bash", exe="bash")
    box.process(70, 60, "vllm serve M")
    box.process(71, 70, "VLLM::APIServer_0")
    box.process(72, 70, "VLLM::EngineCore")
    box.process(80, 60, "python other.py", group=80)
    assert family_of([71], str(tmp_path)) == {70, 71, 72}


def test_an_engine_without_a_device_computes_on_the_processors(tmp_path: Path) -> None:
    box = Box(tmp_path, "nvidia0", "nvidia1")
    box.process(70, 1, "vllm serve M", "/tmp/log", "/dev/null")
    assert box.opened(70).kind == CPU
    box.process(75, 1, "ssh -L 8000:gpu:8000 gpu", group=75, exe="ssh")  # it listens and computes nowhere
    assert box.opened(75) == Opened()
    (tmp_path / "dev" / "nvidia0").unlink()
    (tmp_path / "dev" / "nvidia1").unlink()
    assert box.opened(75) == Opened()
    assert box.opened(70) == Opened(CPU, 1, (), "this machine has no GPU")


def test_one_open_device_is_one_and_several_are_not_counted_by_their_files(tmp_path: Path) -> None:
    box = Box(tmp_path, "nvidia0", "nvidia1")
    box.process(70, 1, "vllm serve M", "/dev/nvidiactl", "/dev/nvidia1")
    assert (box.opened(70).kind, box.opened(70).count, box.opened(70).ids) == (GPU, 1, ())
    box.process(71, 70, "VLLM::Worker", "/dev/nvidia0")  # CUDA opens all it may see
    assert (box.opened(70).kind, box.opened(70).count) == (GPU, None)
    box.process(90, 1, "vllm serve M", "/dev/kfd", group=90)
    assert (box.opened(90).kind, box.opened(90).count) == (GPU, None)


def test_the_driver_says_which_devices_are_in_use(tmp_path: Path) -> None:
    library = build(tmp_path, SOURCE + PROCESSES)
    box = Box(tmp_path, "nvidia0", "nvidia1")
    box.process(70, 1, "vllm serve M", "/dev/nvidia0", "/dev/nvidia1")
    assert box.opened(70, library=library) == Opened(GPU, 1, (0,), "its processes have 1 GPU in use (NVML)")
    box.process(71, 70, "VLLM::Worker", "/dev/nvidia0", "/dev/nvidia1")
    assert box.opened(70, library=library).ids == (0, 1)
    box.process(99, 1, "vllm serve M", "/dev/nvidia0", "/dev/nvidia1", group=99)  # the driver knows no such number
    assert box.opened(99, library=library) == Opened(GPU)


@pytest.mark.parametrize(
    ("table", "words", "log", "count"),
    [
        (VLLM, "vllm serve M --tensor-parallel-size 4", "", 4),
        (VLLM, "vllm serve M -tp 2 -pp=2 --data_parallel_size=3", "", 12),
        (VLLM, "vllm serve M", "", 1),
        (VLLM, "vllm serve M --config c.yaml", "", None),
        (VLLM, "vllm serve M --config c.yaml -dp 1 -pcp 1", "tensor_parallel_size=8, pipeline_parallel_size=1, ", 8),
        (VLLM, "vllm serve M --tensor-parallel-size auto", "", None),
        (SGLANG, "python -m sglang.launch_server --tp 4 --dp-size 2", "", 8),
        (SGLANG, "python -m sglang.launch_server --tp 4 --dp 4 --enable-dp-attention", "", 4),
        (SGLANG, "python -m sglang.launch_server", "ServerArgs(tp_size=2, pp_size=1, dp_size=1)", 2),
        (by_name("tensorrt-llm"), "trtllm-serve M --tp_size 2", "", 2),
        (OWN, "my-server --shards 2", "x\nshards: 2\nreplicas: 3\n", 6),
        (OWN, "my-server", "", None),
        (by_name("llama.cpp"), "llama-server -m m.gguf", "", None),  # it takes all it sees
    ],
)
def test_what_a_command_spreads_it_over(table: Any, words: str, log: str, count: int | None) -> None:
    assert spread(table, words.split(), log)[0] == count


def launched(**more: Any) -> tuple[Target, Engine]:
    target = Target(parse_url("http://127.0.0.1:9", "chat"), "m", engine=VLLM)
    engine = Engine("e", "command", "http://127.0.0.1:9", os.getpid(), "m", "/none", ("vllm", "serve", "M", "-tp", "2"))
    return target, dataclasses.replace(engine, **more)


@pytest.mark.parametrize(
    ("seen", "devices", "doubts"),
    [
        (Opened(GPU, 2, (0, 1), "seen"), 2, 0),
        (Opened(GPU), 2, 0),
        (Opened(GPU, 4, (0, 1, 2, 3), "seen"), None, 1),
        (Opened(CPU, 1, (), "no GPU"), 1, 0),
    ],
)
def test_where_what_is_seen_and_what_was_told_differ_it_is_null_with_a_doubt(
    monkeypatch: pytest.MonkeyPatch, seen: Opened, devices: int | None, doubts: int
) -> None:
    monkeypatch.setattr("whywait.counting.opened", lambda _: seen)
    facts, found = devices_of(*launched())
    assert facts["devices"] == devices
    assert len(found) == doubts
    assert bool(facts["devices_how"]) == (devices is not None)
    if doubts:
        assert "-tp 2: 2" in found[0]["why"]
        assert facts["device_ids"] == []


def test_a_local_service_is_found_by_its_port_and_asked_for_its_command(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = tmp_path / "api_server.py"
    script.write_text(f"import socket,time\ns=socket.create_server(('127.0.0.1',{port}))\nprint(1,flush=True)\n"
                      "time.sleep(60)\n")  # fmt: skip
    child = subprocess.Popen([sys.executable, str(script), "--model", "vllm/x", "-tp", "2"], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        target = Target(parse_url(f"http://127.0.0.1:{port}", "chat"), "m", engine=VLLM)
        facts, found = devices_of(target, None)
        assert not found
        if facts["device_kind"] == CPU:  # whatever it was told, the processors are one device
            assert facts["devices"] == 1
        else:
            assert (facts["devices"], facts["devices_how"]) == (2, "its command: -tp 2")
            assert facts["layout"] == {"tp": 2}
        far = Target(parse_url("http://192.0.2.1:8000", "chat"), "m", engine=VLLM)
        assert devices_of(far, None)[0]["devices"] is None
        assert devices_of(dataclasses.replace(target, simulated=True), None) == ({}, [])
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_the_bill_takes_the_devices_that_were_seen_and_says_where_from() -> None:
    rows = meters(600.0, "0", busy=0.5) + meters(590.0, "1", busy=0.5) + meters(580.0, "2", busy=0.5)
    told = {"devices": 2, "devices_how": "seen in NVML", "device_kind": "gpu", "device_ids": [0, 2]}
    run = service(readings=rows, devices=None, engine=told)
    e = energy_of(run, WINDOW)
    assert e.joules == pytest.approx(1180 * 70, rel=1e-6)
    assert (e.devices, e.devices_how, e.devices_by, e.unused) == (2, "told", "seen in NVML", ("gpu 1",))
    check = next(c for c in checks_of(run, 0, e, window_of(run.point(0))) if c.what == "the devices are the service's")
    assert (check.state, check.why) == ("holds", "2 serve (seen in NVML), 2 were read")
    assert energy_of(run, WINDOW, devices=3).joules == pytest.approx(1770 * 70, rel=1e-6)


def test_an_engine_on_the_processors_of_a_machine_with_gpus_is_not_billed_for_them() -> None:
    host = [{**r, "source": "host", "name": "package_energy_joules_total", "labels": '{"zone": "0"}'}
            for r in meters(120.0, only=("energy_joules_total",))]  # fmt: skip
    told = {"devices": 1, "devices_how": "its processes have no GPU open", "device_kind": "cpu", "device_ids": []}
    machine = {"engine_is_local": True, "gpus": ["NVIDIA H100 80GB HBM3"] * 2}
    run = service(readings=meters(90.0, busy=0.0) + host, devices=None, engine=told, machine=machine)
    e = energy_of(run, WINDOW)
    assert e.joules == pytest.approx(120 * 70, rel=1e-6)
    assert e.idle.watts is None  # no data sheet of a GPU tells it
    unknown = {**told, "devices": None, "device_kind": None}  # a tunnel to elsewhere: this host is not its device
    there = service(readings=host, devices=None, engine=unknown, machine={"engine_is_local": True, "gpus": []})
    assert energy_of(there, WINDOW).joules is None
