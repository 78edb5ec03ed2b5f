"""Time and memory of ``whywait import`` by the size of the file: ``python benchmarks/import_size.py --gb 1``.

The file is made: lines of a real AIPerf export (``tests/data/import/aiperf-0.13-c4``) again and again, each 3 ms later,
with ``--tokens`` chunks (gaps of some 12 ms), filled up with metrics that import does not read to the 2.6 kB that a
line of 8 tokens has before it is trimmed for the tests. Import runs in a process of its own; printed are
requests, chunks, seconds and the peak of its resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
REAL = ROOT / "tests" / "data" / "import" / "aiperf-0.13-c4"
LINE = 2600  # bytes of a real line with 8 tokens
STEP_NS = 3_000_000
STAMPS = ("credit_issued_ns", "request_start_ns", "request_ack_ns", "request_end_ns")


def make(folder: Path, size: int, tokens: int) -> int:
    """Write the file (and its totals beside it); how many requests."""
    lines = [json.loads(line) for line in (REAL / "profile_export.jsonl").read_text().splitlines()]
    lines = [r for r in lines if r["metadata"].get("benchmark_phase") == "profiling"]
    made, n, base = 0, 0, lines[0]["metadata"]["request_start_ns"]
    (folder / "profile_export_aiperf.json").write_text((REAL / "profile_export_aiperf.json").read_text())
    with (folder / "profile_export.jsonl").open("w", encoding="utf-8") as file:
        while made < size:
            row = json.loads(json.dumps(lines[n % len(lines)]))
            meta, metrics = row["metadata"], row["metrics"]
            gaps = [8 + (i * 7919 + n * 31) % 8000 / 1000 for i in range(tokens - 1)]
            took = metrics["time_to_first_token"]["value"] + sum(gaps)
            later = base + n * STEP_NS - meta["request_start_ns"]
            for key in STAMPS:
                meta[key] = meta.get(key, meta["request_start_ns"]) + later
            meta["request_end_ns"] = meta["request_start_ns"] + round(took * 1e6) + 400_000
            metrics["inter_chunk_latency"]["value"] = gaps
            metrics["request_latency"]["value"] = took
            for key in ("output_sequence_length", "usage_completion_tokens"):
                metrics.get(key, {})["value"] = tokens
            short = LINE - len(json.dumps(lines[n % len(lines)], separators=(",", ":")))
            metrics.update({f"not_read_{i:02}": {"value": 0.25, "unit": "ratio"} for i in range(short // 44)})
            text = json.dumps(row, separators=(",", ":")) + "\n"
            file.write(text)
            made, n = made + len(text), n + 1
    return n


def imported(folder: Path) -> tuple[float, float]:
    """Seconds, and the peak in MB.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "whywait", "import", str(folder), "--out", str(folder / "run"), "--json"]
    began = time.monotonic()
    with open(folder / "out.json", "wb") as out:
        child = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"import failed ({child.returncode})")
    return time.monotonic() - began, usage.ru_maxrss / (1024 if sys.platform == "linux" else 1_000_000)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gb", type=float, default=1.0, help="size of the file (default 1)")
    p.add_argument("--tokens", type=int, default=8, help="chunks of an answer (default 8)")
    p.add_argument("--folder", type=Path, help="where the file goes and stays (default: a temporary one)")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        folder = args.folder or Path(tmp)
        folder.mkdir(parents=True, exist_ok=True)
        n = make(folder, round(args.gb * 1e9), args.tokens)
        took, mb = imported(folder)
        print(f"{args.gb:g} GB, {n:,} requests, {n * args.tokens:,} chunks: {took:.0f} s, {mb:,.0f} MB at the peak")
    return 0


if __name__ == "__main__":
    sys.exit(main())
