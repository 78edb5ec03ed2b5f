"""What this machine can read and compute in a second, measured in a pinned process of its own (about half a second).

Run as ``python -m whywait.probe.bench THREADS WORKING_SET_BYTES [CPU,CPU…]``; prints one JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any


def measure(threads: int, working_set: int, cpus: tuple[int, ...] = ()) -> dict[str, Any] | None:
    """Read bandwidth over ``working_set`` bytes and float32 matrix rate with ``threads`` threads on ``cpus``.

    ``{"read_bytes_per_s", "f32_flops_per_s", "threads", "how"}``; None when it could not be measured.
    """
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    env = {**os.environ, **dict.fromkeys(names, str(threads))}
    command = [sys.executable, "-m", "whywait.probe.bench", str(threads), str(working_set), ",".join(map(str, cpus))]
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=30, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return found


def main(argv: list[str]) -> int:
    import numpy as np

    threads, size = int(argv[0]), int(argv[1])
    cpus = [int(c) for c in argv[2].split(",") if c] if len(argv) > 2 else []
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    data = np.ones(max(size, 1 << 20) // 4, dtype=np.float32)
    side = np.ones((768, 768), dtype=np.float32)
    read = _best(lambda: np.dot(data, data))
    product = _best(lambda: side @ side)
    out = {
        "read_bytes_per_s": data.nbytes / read,
        "f32_flops_per_s": 2 * 768**3 / product,
        "threads": threads,
        "how": f"measured here with numpy: dot over {data.nbytes / 1e6:.0f} MB, 768³ float32 product",
    }
    print(json.dumps(out))
    return 0


def _best(work: Any, seconds: float = 0.2) -> float:
    """Shortest of as many runs as fit, at least three (s): the rate the machine can reach, not its noise."""
    best, end, runs = float("inf"), time.perf_counter() + seconds, 0
    while runs < 3 or time.perf_counter() < end:
        t = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - t)
        runs += 1
    return best


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
