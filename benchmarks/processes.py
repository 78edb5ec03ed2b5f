"""Chunks per second with one and two processes against the stub: ``python benchmarks/processes.py [SECONDS] [SHARE]``.

Pinned: the stub on one CPU, the shards on the others; flat out, so that whoever has no CPU left sets the figure. That
takes three CPUs. With two, the stub and a shard would share one, and the figure would be the stub's: there, give SHARE
(such as 0.1): each client process may then use that share of a CPU and no more (a quota of the kernel, cgroup v1, needs
root), the stub has the rest, and two processes are compared with one at the same CPU time each.

Printed besides: how busy each side was, and the client's CPU time per chunk.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from whywait.app import Load
from whywait.core.schedule import Lengths, RequestClass, Workload
from whywait.load.stub import StubProcess
from whywait.session import Options, Session

STREAMS, TOKENS, GAP_MS = 256, 400, 2.0


CGROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000


def quota(pids: list[int], share: float) -> list[Path]:
    """A group for each process, which gets this share of a CPU."""
    made = []
    for pid in pids:
        group = CGROUP / f"whywait-{os.getpid()}-{len(made)}"
        group.mkdir()
        made.append(group)
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US * share)))
        (group / "cgroup.procs").write_text(str(pid))
    return made


def release(groups: list[Path]) -> None:
    for group in groups:
        for pid in (group / "cgroup.procs").read_text().split():
            (CGROUP / "cgroup.procs").write_text(pid)
        group.rmdir()


def measure(processes: int, seconds: float, cpus: list[int], share: float) -> dict[str, float]:
    stub_cpu, rest = cpus[0], cpus[1:] or cpus
    with (
        StubProcess("--ttft-ms", "5", "--gap-ms", str(GAP_MS), cpus=[stub_cpu]) as stub,
        tempfile.TemporaryDirectory() as tmp,
    ):
        shape = RequestClass(prompt_tokens=Lengths("fixed", 8), output_tokens=Lengths("fixed", TOKENS))
        options = Options(stub.url, workload=Workload((shape,)), out=str(Path(tmp) / "r"), floor=False,
                          processes=processes, metrics_hz=1.0)  # fmt: skip
        with Session(options, lambda _line: None) as s:
            pids = getattr(s.crew, "pids", (os.getpid(),))
            for i, pid in enumerate(pids):
                os.sched_setaffinity(pid, {rest[i % len(rest)]})
            groups = quota(list(pids), share) if share else []
            before, began = _cpu_s(stub.pid), time.monotonic()
            s.point(Load("concurrency", STREAMS, duration_s=seconds))
            took = time.monotonic() - began
            release(groups)
            stub_busy = (_cpu_s(stub.pid) - before) / took
            run = s.finish()
    point = run.points.rows()[0]
    wall = (point["end_ns"] - point["start_ns"]) / 1e9
    parts = run.manifest.client.get("shards") or [run.manifest.client]
    cpu = sum(p["cpu_ns_by_point"]["0"] for p in parts) / 1e9
    os.sched_setaffinity(0, set(cpus))
    return {
        "chunks_per_s": len(run.chunks) / wall,
        "client_busy": cpu / wall,
        "stub_busy": stub_busy,
        "us_per_chunk": cpu * 1e6 / len(run.chunks),
        "coalesced": run.manifest.client["coalesced_chunks"] / len(run.chunks),
    }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(argv: list[str]) -> int:
    seconds = float(argv[0]) if argv else 8.0
    share = float(argv[1]) if len(argv) > 1 else 0.0
    cpus = sorted(os.sched_getaffinity(0))
    print(f"{len(cpus)} CPUs; the stub on CPU {cpus[0]}, shards on {cpus[1:] or cpus}")
    rates = []
    for n in (1, 2):
        m = measure(n, seconds, cpus, share)
        rates.append(m)
        print(
            f"{n} process(es): {m['chunks_per_s']:,.0f} chunks/s; clients {m['client_busy']:.2f} CPU, "
            f"stub {m['stub_busy']:.2f} CPU; {m['us_per_chunk']:.1f} µs of CPU a chunk ({m['coalesced']:.0%} coalesced)"
        )
    ratio = rates[1]["chunks_per_s"] / rates[0]["chunks_per_s"]
    own = rates[0]["us_per_chunk"] / rates[1]["us_per_chunk"] * 2
    print(f"ratio as measured: {ratio:.2f}; by CPU per chunk, on a CPU each: {own:.2f}")
    if len(cpus) < 3 and not share:
        print("with fewer than three CPUs the ratio as measured is that of the stub and of two shards on one CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
