"""What it costs to go over Ray, on two nodes of this machine (whywait[ray]): python benchmarks/ray_cost.py [REPEATS]

Load: the same closed loop by two local processes and by two workers, in turn. Grid: the same draws by two local
processes and by two workers, in turn, figures compared bit by bit. Ratios are medians over the repeats.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from whywait.core.run import Run
from whywait.load.stub import StubProcess

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
c = Cluster()
c.add_node(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)
c.add_node(num_cpus=1, object_store_memory=80 << 20)
print(c.address, flush=True)
sys.stdin.read()
c.shutdown()
"""
GRID = ("simulate", "--machine", "h100", "--model", "llama-3.1-8b", "--concurrency", "64", "--requests", "2000",
        "--draws", "32", "--output-tokens", "lognormal(200,0.5)", "--json")  # fmt: skip
FORCED = "import sys, whywait.sim.grid as g; g.ALONE = 0; from whywait.cli import main; sys.exit(main(sys.argv[1:]))"


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.DEVNULL, env=env, start_new_session=True) as p:  # fmt: skip
        assert p.stdin is not None
        assert p.stdout is not None
        try:
            address = p.stdout.readline().strip()
            with tempfile.TemporaryDirectory() as tmp, StubProcess("--ttft-ms", "20", "--gap-ms", "10") as stub:
                load(stub.url, address, Path(tmp), repeats, env)
                grid(address, Path(tmp), repeats, env)
        finally:
            p.stdin.close()


def load(url: str, address: str, tmp: Path, repeats: int, env: dict[str, str]) -> None:
    found: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    for i in range(repeats):
        for name, how in (("local", ("--processes", "2")), ("ray", ("--ray", address))):
            out = tmp / f"{name}-{i}"
            began = time.monotonic()
            argv = ("run", url, "--concurrency", "64", "--requests", "640", "--output-tokens", "100", "--no-floor",
                    "--out", str(out), *how)  # fmt: skip
            subprocess.run([sys.executable, "-m", "whywait", *argv], env=env, capture_output=True, check=False)
            took = time.monotonic() - began
            run = Run.load(out)
            c, wall = run.manifest.client, float((run.points["end_ns"] - run.points["start_ns"])[0]) / 1e9
            found[name].append({
                "before and after, s": took - wall, "chunks/s": c["chunks"] / wall,
                "CPU a chunk at most, us": sum(c["cpu_ns_by_point"].values()) * len(c["shards"]) / c["chunks"] / 1e3,
                "read lag p99, ms": c["read_lag_ms"]["p99"], "send lag p99, ms": c["send_lag_ms"]["p99"],
                "clock error, us": max(x["offset_error_ns"] for x in run.manifest.clock) / 1e3,
            })  # fmt: skip
    print(f"load, 64 in flight, {repeats} times each: over Ray against two local processes")
    for key in found["ray"][0]:
        here, there = (statistics.median(f[key] for f in found[name]) for name in ("local", "ray"))
        print(f"  {key}: {there:,.1f} against {here:,.1f}" + (f", {there / here:.2f} times" if here else ""))


def grid(address: str, tmp: Path, repeats: int, env: dict[str, str]) -> None:
    took: dict[str, list[float]] = {"local": [], "ray": []}
    said: list[Any] = []
    for i in range(repeats):
        for name, how in (("local", ("--jobs", "2")), ("ray", ("--ray", address))):
            began = time.monotonic()
            argv = [sys.executable, "-c", FORCED, *GRID, "--out", str(tmp / f"grid-{name}-{i}"), *how]
            out = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, cwd=tmp).stdout
            took[name].append(time.monotonic() - began)
            said.append(json.loads(out)["points"])
    same = all(s == said[0] for s in said)
    here, there = (statistics.median(took[name]) for name in ("local", "ray"))
    print(f"grid of 32 draws: {there / here:.2f} times the local time; the same bits: {same}")


if __name__ == "__main__":
    main()
