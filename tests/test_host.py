"""The machine and its processes, on made-up /proc and /sys trees and on the real one."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whywait.probe.host import Energy, System, facts
from whywait.probe.neighbours import Neighbours
from whywait.probe.process import Cgroups, Group
from whywait.probe.threads import cpu_list, cpu_text

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def values(rows: list[tuple[str, str | None, float]]) -> dict[str, float]:
    return {name if labels is None else f"{name} {labels}": value for name, labels, value in rows}


STAT = """cpu  100 20 30 1000 5 1 2 7 50 0
cpu0 60 10 20 500 2 1 1 3 0 0
cpu1 40 10 10 500 3 0 1 4 0 0
intr 12345 0
procs_running 3
"""


def pressure(some: int, full: int) -> str:
    return f"some avg10=0.21 avg60=0.31 avg300=1.31 total={some}\nfull avg10=0 avg60=0 avg300=0 total={full}\n"


def test_system(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/stat": STAT,
            "proc/pressure/cpu": pressure(27150306, 9),
            "proc/pressure/memory": pressure(0, 500000),
            "proc/meminfo": "MemTotal: 100 kB\nMemAvailable:    64 kB\n",
        },
    )
    tick = 1 / os.sysconf("SC_CLK_TCK")
    system = System(str(tmp_path))
    got = values(system.sample(0.0))
    assert got == pytest.approx(
        {
            "cpu_busy_seconds_total": 153 * tick,
            "cpu_steal_seconds_total": 7 * tick,
            'core_busy_seconds_total {"cpu":"0"}': 92 * tick,
            'core_busy_seconds_total {"cpu":"1"}': 61 * tick,
            "tasks_runnable": 3,
            "psi_cpu_some_seconds_total": 27.150306,
            "psi_memory_some_seconds_total": 0,
            "psi_memory_full_seconds_total": 0.5,
            "memory_available_bytes": 65536,
        }
    )
    assert not [k for k in values(system.sample(0.5)) if k.startswith("core_")]  # core by core only once a second
    assert [k for k in values(system.sample(1.0)) if k.startswith("core_")]


def test_nothing_there_gives_nothing(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert System(root).sample(0.0) == []
    assert Energy(root).sample() == []
    assert Group([1], root).sample(0.0) == []
    assert Cgroups(root).sample(1) == []
    assert {"python", "cores"} <= facts(root).keys()
    assert "memory_bytes" not in facts(root)


def test_energy_wraps_and_counts_no_joule_twice(tmp_path: Path) -> None:
    base = "sys/class/powercap/"
    for zone, name in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core"), ("intel-rapl:0:1", "dram"),
                       ("intel-rapl:1", "psys"), ("intel-rapl-mmio:0", "package-0")):  # fmt: skip
        write(tmp_path, {f"{base}{zone}/name": name + "\n", f"{base}{zone}/energy_uj": "9000000\n",
                         f"{base}{zone}/max_energy_range_uj": "10000000\n"})  # fmt: skip
    energy = Energy(str(tmp_path))
    package, dram = 'package_energy_joules_total {"zone":"0"}', 'dram_energy_joules_total {"zone":"0:1"}'
    assert values(energy.sample()) == {package: 9, dram: 9}
    write(tmp_path, {f"{base}intel-rapl:0/energy_uj": "2000000", f"{base}intel-rapl:0:1/energy_uj": "9500000"})
    assert values(energy.sample()) == {package: 12, dram: 9.5}
    (tmp_path / base / "intel-rapl:0/energy_uj").unlink()
    assert values(energy.sample()) == {dram: 9.5}


def test_facts_of_a_made_up_machine(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"proc/cpuinfo": "model name\t: Fast CPU\nflags\t: fpu hypervisor\n", "proc/meminfo": "MemTotal: 2 kB"},
    )
    got = facts(str(tmp_path))
    assert (got["cpu"], got["virtual"], got["memory_bytes"]) == ("Fast CPU", True, 2048)
    assert not any(os.uname().nodename == v for v in got.values() if isinstance(v, str))


def process(pid: int, parent: int, start: int = 5, ticks: int = 10, name: str = "a (b) c") -> dict[str, str]:
    """One process with one thread; utime and stime share the ticks."""
    before = f"{pid} ({name}) S {parent} 1 1 0 -1 0 100 0 7 0 {ticks - 3} 3 900 900 20 0 1 0 {start}"
    return {
        f"proc/{pid}/stat": before + " 1 2 3\n",
        f"proc/{pid}/statm": "500 100 50 1 0 1 0\n",
        f"proc/{pid}/task/{pid}/schedstat": f"{ticks * 10**7} {ticks * 10**6} 4\n",
        f"proc/{pid}/task/{pid}/status": "Name:\tx\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t2\n",
    }


def test_group_follows_children_and_keeps_what_the_dead_used(tmp_path: Path) -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    root = str(tmp_path)
    for files in (process(1, 0), process(10, 1), process(11, 10), process(12, 11), process(99, 1)):
        write(tmp_path, files)
    group = Group([10], root)
    got = values(group.sample(0.0))
    assert got["processes"] == 3
    assert got["cpu_seconds_total"] == pytest.approx(30 * tick)
    assert got["run_queue_wait_seconds_total"] == pytest.approx(0.03)
    assert (got["voluntary_switches_total"], got["involuntary_switches_total"]) == (15, 6)
    assert got["major_faults_total"] == 21
    assert got["rss_bytes"] == 300 * os.sysconf("SC_PAGE_SIZE")
    assert "pss_bytes" not in got
    assert "busiest_thread_share" not in got  # one look says nothing about a rate
    assert got['process_cpu_seconds_total {"pid":"11","process":"a (b) c"}'] == pytest.approx(10 * tick)

    write(tmp_path, process(11, 10, ticks=15))
    (tmp_path / "proc/12/stat").unlink()  # it ended
    got = values(group.sample(0.25))
    assert got["processes"] == 2
    assert got["cpu_seconds_total"] == pytest.approx(35 * tick)
    assert got["busiest_thread_share"] == pytest.approx(0.2)
    assert "rss_bytes" not in got  # once a second

    (tmp_path / "proc/10/stat").unlink()  # the first one ends; its child was adopted by 1
    write(tmp_path, process(11, 1, ticks=15) | process(13, 11, start=6))
    got = values(group.sample(1.5))
    assert got["processes"] == 2
    assert got["cpu_seconds_total"] == pytest.approx(45 * tick)

    shutil.rmtree(tmp_path / "proc/12")
    assert values(group.sample(2.6))["cpu_seconds_total"] == pytest.approx(45 * tick)
    assert not [pid for pid, _ in group._cpu if pid == 12]  # its sum is kept, and nothing else of it

    write(tmp_path, process(10, 1, start=777, ticks=500))  # the number comes back as a stranger
    assert values(group.sample(3.7))["cpu_seconds_total"] == pytest.approx(45 * tick)
    group.add([99])
    assert values(group.sample(4.9))["processes"] == 3


def test_a_client_is_not_charged_for_the_engine_it_started(tmp_path: Path) -> None:
    for files in (process(10, 1), process(11, 10), process(20, 10), process(21, 20)):
        write(tmp_path, files)
    named: set[int] = {10}
    client = Group([10], str(tmp_path), strangers=named)
    assert values(client.sample(0.0))["processes"] == 4
    named.add(20)  # only now we are told that this is the engine
    assert values(client.sample(1.0))["processes"] == 2
    assert values(Group([20], str(tmp_path), strangers=named).sample(0.0))["processes"] == 2


def test_a_recycled_thread_number_does_not_subtract(tmp_path: Path) -> None:
    write(tmp_path, process(10, 1, ticks=100))
    group = Group([10], str(tmp_path))
    first = values(group.sample(0.0))["run_queue_wait_seconds_total"]
    write(tmp_path, {"proc/10/task/10/schedstat": "1000 2000000 1\n"})
    assert values(group.sample(0.25))["run_queue_wait_seconds_total"] == pytest.approx(first + 0.002)


def thread(pid: int, tid: int, spent: tuple[float, float], name: str, cpus: str = "0-1") -> dict[str, str]:
    run, wait = spent
    return {
        f"proc/{pid}/task/{tid}/schedstat": f"{run * 1e9:.0f} {wait * 1e9:.0f} 4\n",
        f"proc/{pid}/task/{tid}/comm": name + "\n",
        f"proc/{pid}/task/{tid}/status": f"Name:\tx\nCpus_allowed_list:\t{cpus}\nvoluntary_ctxt_switches:\t5\n"
        "nonvoluntary_ctxt_switches:\t2\n",
    }


def labels(pid: int, tid: int, name: str) -> str:
    return f'{{"pid":"{pid}","process":"a (b) c","thread":"{name}","tid":"{tid}"}}'


def test_busy_and_waiting_threads_are_named_and_followed(tmp_path: Path) -> None:
    write(tmp_path, process(10, 1) | thread(10, 10, (5, 0), "main") | thread(10, 11, (7, 1), "worker", "3,5-6"))
    write(tmp_path, thread(10, 12, (9, 0), "asleep") | thread(10, 13, (1, 1), "starved"))
    group = Group([10], str(tmp_path))
    first = values(group.sample(0.0))
    assert not [k for k in first if k.startswith("thread_")]  # one look says nothing of lately
    assert first['cores_allowed {"cpus":"0-1,3,5-6"}'] == 5
    write(tmp_path, thread(10, 11, (7.5, 1), "worker") | thread(10, 13, (1, 1.5), "starved"))
    assert not [k for k in values(group.sample(0.5)) if k.startswith("thread_")]  # once a second
    got = {k: v for k, v in values(group.sample(1.0)).items() if k.startswith("thread_")}
    worker, starved = labels(10, 11, "worker"), labels(10, 13, "starved")
    assert got == {
        f"thread_cpu_seconds_total {worker}": 7.5, f"thread_wait_seconds_total {worker}": 1,
        f"thread_cpu_seconds_total {starved}": 1, f"thread_wait_seconds_total {starved}": 1.5,
    }  # fmt: skip
    got = values(group.sample(2.0))  # it did nothing since, and is followed all the same
    assert got[f"thread_cpu_seconds_total {worker}"] == 7.5
    (tmp_path / "proc/10/task/11/schedstat").unlink()
    (tmp_path / "proc/10/task/11/status").unlink()
    assert f"thread_cpu_seconds_total {worker}" not in values(group.sample(3.0))


def test_only_the_busiest_threads_are_named(tmp_path: Path) -> None:
    write(tmp_path, process(10, 1))
    for i in range(40):
        write(tmp_path, thread(10, 100 + i, (1, 0), f"t{i}"))
    group = Group([10], str(tmp_path))
    group.sample(0.0)
    for i in range(40):
        write(tmp_path, thread(10, 100 + i, (1 + i / 50, 0), f"t{i}"))
    named = [k for k in values(group.sample(1.0)) if k.startswith("thread_cpu")]
    assert sorted(named) == sorted(f"thread_cpu_seconds_total {labels(10, 100 + i, f't{i}')}" for i in range(24, 40))


def test_cpu_lists() -> None:
    assert cpu_list("0-2,5,7-8") == {0, 1, 2, 5, 7, 8}
    assert cpu_list("") == cpu_list("x") == cpu_list("1-y") == frozenset()
    assert cpu_text(frozenset({0, 1, 2, 5, 7, 8})) == "0-2,5,7-8"


class Fixed:
    def __init__(self, seconds: float, cpus: set[int], pids: set[int]) -> None:
        self.seconds, self.cpus, self._pids = seconds, frozenset(cpus), frozenset(pids)

    def cpu_now(self) -> dict[tuple[int, int], float]:
        return {(pid, 1): self.seconds for pid in self._pids}

    def pids(self) -> frozenset[int]:
        return self._pids


def machine(*busy: float) -> dict[str, str]:
    tick = os.sysconf("SC_CLK_TCK")
    lines = [f"cpu{i} {round(b * tick)} 0 0 0 0 0 0 0 0 0" for i, b in enumerate(busy)]
    return {"proc/stat": "\n".join(["cpu  0 0 0 0 0 0 0 0 0 0", *lines, ""])}


def test_neighbours_are_what_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whywait.probe.neighbours.time.process_time", lambda: 0.0)
    tick = os.sysconf("SC_CLK_TCK")
    write(tmp_path, machine(10, 20, 30, 40) | process(50, 1, name="hog", ticks=5 * tick) | process(7, 1, name="engine"))
    engine, client = Fixed(5, {0, 1}, {7}), Fixed(2, {2, 3}, {8})
    seen = Neighbours({"engine": engine, "client": client}, str(tmp_path))
    first = values(seen.sample(0.0))
    assert first == {"other_cpu_seconds_total": 0, "engine_cores_other_seconds_total": 0,
                     "engine_cores_busy_seconds_total": 30}  # fmt: skip
    assert seen.sample(0.5) == []
    engine.seconds, client.seconds = 6.5, 3
    write(tmp_path, machine(12, 21, 31, 40) | process(50, 1, name="hog", ticks=6 * tick))
    got = values(seen.sample(2.0))
    assert got["other_cpu_seconds_total"] == pytest.approx(4 - 2.5)
    assert got["engine_cores_other_seconds_total"] == pytest.approx(3 - 1.5)  # the client is on other cores
    assert got['neighbour_cpu_seconds_total {"pid":"50","process":"hog"}'] == pytest.approx(6)
    late = Fixed(500, {0, 1}, {9})  # a group that is named only now has not just used its 500 s
    seen._groups["late"] = late  # type: ignore[index]
    engine.seconds = 60  # more than the machine did: read a moment apart
    assert values(seen.sample(4.0))["other_cpu_seconds_total"] == got["other_cpu_seconds_total"]  # never falls
    client.cpus = frozenset({1, 2})  # it may run beside the engine: at least the rest was others'
    engine.seconds = 60
    write(tmp_path, machine(78, 22, 31, 40))
    assert values(seen.sample(6.0))["engine_cores_other_seconds_total"] == pytest.approx(
        (100 - 30) - (60 - 5)  # what it used when it was elsewhere was not used here
    )
    engine.cpus = frozenset({0, 1, 2, 3})  # tied to more: what those did before is nobody's doing now
    before = values(seen.sample(8.0))
    assert before["engine_cores_other_seconds_total"] == pytest.approx(100 - 30 - 55)
    assert before["engine_cores_busy_seconds_total"] == pytest.approx(100)
    write(tmp_path, machine(78, 22, 33, 41))
    assert values(seen.sample(10.0))["engine_cores_other_seconds_total"] == pytest.approx(100 - 30 - 55 + 3)
    assert Neighbours({}, str(tmp_path / "nothing")).sample(0.0) == []


V2 = "36 25 0:29 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = """36 25 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
40 25 0:30 / /sys/fs/cgroup/mem rw - cgroup cgroup rw,memory
"""


def test_cgroup_v2_with_the_quota_above(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/mountinfo": V2,
            "proc/7/cgroup": "0::/slice/job\n",
            "sys/fs/cgroup/cpu.stat": "usage_usec 5\n",  # the root keeps no throttling
            "sys/fs/cgroup/slice/cpu.stat": "usage_usec 5\nnr_periods 40\nnr_throttled 10\nthrottled_usec 2500000\n",
            "sys/fs/cgroup/slice/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/slice/job/cpu.stat": "usage_usec 5\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n",
            "sys/fs/cgroup/slice/job/cpu.max": "max 100000\n",
        },
    )
    assert values(Cgroups(str(tmp_path)).sample(7)) == {
        "cgroup_periods_total": 40, "cgroup_throttled_periods_total": 10, "cgroup_throttled_seconds_total": 2.5,
        "cgroup_quota_cores": 1.5,
    }  # fmt: skip


def test_cgroup_v1_seen_from_inside_a_container(tmp_path: Path) -> None:
    """The path in /proc is the host's and does not exist here: what is mounted is our own cgroup."""
    write(
        tmp_path,
        {
            "proc/self/mountinfo": V1,
            "proc/7/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/cpu/cpu.stat": "nr_periods 4\nnr_throttled 3\nthrottled_time 1500000000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    got = values(Cgroups(str(tmp_path)).sample(7))
    assert got["cgroup_throttled_seconds_total"] == 1.5
    assert got["cgroup_quota_cores"] == 0.5
    write(tmp_path, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"})
    assert "cgroup_quota_cores" not in values(Cgroups(str(tmp_path)).sample(7))
    # A container inside it: the part below our own is there.
    inner = "nr_periods 2\nnr_throttled 1\nthrottled_time 500000000\n"
    write(tmp_path, {"proc/7/cgroup": "4:cpu,cpuacct:/docker/abc/inner\n", "sys/fs/cgroup/cpu/inner/cpu.stat": inner})
    assert values(Cgroups(str(tmp_path)).sample(7))["cgroup_throttled_seconds_total"] == 2.0
    # One beside ours cannot be seen, and ours must not be taken for it.
    write(tmp_path, {"proc/7/cgroup": "4:cpu,cpuacct:/docker/other\n"})
    assert Cgroups(str(tmp_path)).sample(7) == []


def test_cgroups_of_several_processes_count_each_level_once(tmp_path: Path) -> None:
    def stat(seconds: float) -> str:
        return f"nr_periods 1\nnr_throttled 1\nthrottled_usec {seconds * 1e6:.0f}\n"

    write(
        tmp_path,
        {
            "proc/self/mountinfo": V2,
            "proc/7/cgroup": "0::/pod/a\n",
            "proc/8/cgroup": "0::/pod/b\n",
            "sys/fs/cgroup/pod/cpu.stat": stat(1),
            "sys/fs/cgroup/pod/a/cpu.stat": stat(2),
            "sys/fs/cgroup/pod/a/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/pod/b/cpu.stat": stat(4),
            "sys/fs/cgroup/pod/b/cpu.max": "200000 100000\n",
        },
    )
    got = values(Cgroups(str(tmp_path)).sample(7, 8))
    assert (got["cgroup_throttled_seconds_total"], got["cgroup_quota_cores"]) == (7, 2)


def test_cgroup_mounted_by_its_own_root(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/mountinfo": V2.replace(" / /sys", " /docker/abc /sys"),
            "proc/7/cgroup": "0::/docker/abc/inner\n",
            "sys/fs/cgroup/inner/cpu.stat": "nr_periods 1\nnr_throttled 1\nthrottled_usec 1000000\n",
        },
    )
    assert values(Cgroups(str(tmp_path)).sample(7))["cgroup_throttled_seconds_total"] == 1


@linux
def test_this_machine() -> None:
    got = values(System().sample(0.0))
    assert got["cpu_busy_seconds_total"] > 0
    machine = facts()
    assert machine["cores_allowed"] >= 1
    assert machine["memory_bytes"] > 0


@linux
def test_this_process_and_its_child() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        group = Group([os.getpid()])
        got = values(group.sample(time.monotonic()))
        child.communicate(b"\n")
    assert got["processes"] >= 2
    assert got["threads"] >= 2
    assert got["cpu_seconds_total"] > 0
    assert got["rss_bytes"] > 1e6
    assert f'process_cpu_seconds_total {{"pid":"{child.pid}","process":"' in str(sorted(got))


@linux
def test_cpu_and_waiting_grow_with_work() -> None:
    group = Group([os.getpid()])
    first = values(group.sample(0.0))
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    second = values(group.sample(0.3))
    assert second["cpu_seconds_total"] >= first["cpu_seconds_total"] + 0.15
    assert second["run_queue_wait_seconds_total"] >= first["run_queue_wait_seconds_total"]
    assert 0 < second["busiest_thread_share"] <= 1
