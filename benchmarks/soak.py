"""A long run against the stub: ``python benchmarks/soak.py [REQUESTS]`` (default 2,000,000; about half an hour).

``whywait run`` as a user types it, in a closed loop over loopback, against the stub in a process of its own; two tokens
an answer. Every few seconds the resident memory, the open descriptors and the CPU time of all its processes are read
from ``/proc`` (Linux). At the end a row per stretch of the run: these, and from the Run itself how late the client sent
(due → sent) and read (its own loop), and whether anything was lost. ``--seconds`` bounds the whole; nothing leaves the
machine. ``--processes N`` drives it from several processes, ``--keep DIR`` leaves the run there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from whywait.load.stub import StubProcess

STRETCHES = 10
MB = 1 << 20


def of_process(pid: int) -> tuple[int, int, float] | None:
    """(Resident bytes, open descriptors, CPU seconds) of a process; None where it has gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")), cpu
    except OSError:
        return None


def children(pid: int) -> list[int]:
    try:
        return [int(p) for t in os.listdir(f"/proc/{pid}/task")
                for p in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]  # fmt: skip
    except OSError:
        return []


def ended(log: list[Path], at: dict[Path, int], count: int) -> int:
    """Requests that the spools call ended; each log is read on from where it was."""
    for path in log:
        try:
            with path.open("rb") as f:
                f.seek(at.get(path, 0))
                while piece := f.read(8 * MB):
                    whole = piece.rfind(b"\n") + 1
                    if not whole:
                        break
                    count += piece[:whole].count(b'["ended"')
                    at[path] = at.get(path, 0) + whole
                    f.seek(at[path])
        except OSError:
            continue
    return count


def watch(client: subprocess.Popen[bytes], stub: int, out: Path, most_s: float) -> list[dict[str, Any]]:
    """Readings until the client ends, which it is asked to after ``most_s``."""
    rows: list[dict[str, Any]] = []
    at: dict[Path, int] = {}
    began, count, asked = time.monotonic(), 0, False
    while client.poll() is None:
        time.sleep(2.0)
        count = ended(sorted(out.glob("spool*/log.jsonl")), at, count)
        mine = [p for p in (of_process(pid) for pid in [client.pid, *children(client.pid)]) if p]
        service = of_process(stub)
        if mine and service:
            rows.append({"s": time.monotonic() - began, "ended": count, "rss": sum(p[0] for p in mine),
                         "fds": sum(p[1] for p in mine), "cpu_s": sum(p[2] for p in mine),
                         "stub_rss": service[0], "stub_fds": service[1]})  # fmt: skip
        if not asked and time.monotonic() - began > most_s:
            client.send_signal(signal.SIGINT)
            asked = True
    return rows


def figures(out: Path) -> dict[str, Any]:
    """From the Run: by stretch of the requests, in the order they were sent, how late they were (ms)."""
    from whywait.core.run import Run

    run = Run.load(out)
    req = run.requests
    sent = np.flatnonzero(~np.isnan(req["sent_ns"]))
    order = sent[np.argsort(req["sent_ns"][sent], kind="stable")]
    late = (req["sent_ns"] - req["due_ns"]) / 1e6
    ttft = (req["first_ns"] - req["sent_ns"]) / 1e6
    stretches = [
        {"from_s": float(req["sent_ns"][part[0]] / 1e9), "late_p50": float(np.nanmedian(late[part])),
         "late_p99": float(np.nanquantile(late[part], 0.99)), "ttft_p50": float(np.nanmedian(ttft[part]))}
        for part in np.array_split(order, STRETCHES) if len(part)
    ]  # fmt: skip
    outcomes = req.text("outcome")
    return {
        "planned": int(run.points["planned"].sum()), "outcomes": {o: outcomes.count(o) for o in set(outcomes)},
        "chunks": len(run.chunks), "seconds": float((run.points["end_ns"] - run.points["start_ns"]).sum() / 1e9),
        "client": {k: run.manifest.client.get(k) for k in ("read_lag_ms", "coalesced_chunks")},
        "doubts": [d["what"] for d in run.manifest.doubts], "stretches": stretches,
    }  # fmt: skip


def told(rows: list[dict[str, Any]], found: dict[str, Any], peak_mb: float) -> None:
    """The curve, as a table; then what grew from the second stretch to the last."""
    total = found["planned"]
    print(f"{total:,} requests planned, outcomes {found['outcomes']}; {found['chunks']:,} chunks in "
          f"{found['seconds']:.0f} s; doubts: {found['doubts'] or 'none'}; {found['client']}")  # fmt: skip
    print("| requests ended | client, MB | its descriptors | its CPU per request, µs | stub, MB | its descriptors "
          "| sent late p50, ms | p99, ms | TTFT p50, ms |")  # fmt: skip
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    most = max(r["ended"] for r in rows)
    before, curve = rows[0], []
    for i, s in enumerate(found["stretches"]):
        at = next(r for r in rows if r["ended"] >= most * (i + 1) / len(found["stretches"]) * 0.98)
        cpu = (at["cpu_s"] - before["cpu_s"]) / max(at["ended"] - before["ended"], 1) * 1e6
        print(f"| {at['ended']:,} | {at['rss'] / MB:.0f} | {at['fds']} | {cpu:.0f} | {at['stub_rss'] / MB:.0f} "
              f"| {at['stub_fds']} | {s['late_p50']:.3f} | {s['late_p99']:.2f} | {s['ttft_p50']:.2f} |")  # fmt: skip
        before = at
        curve.append(at)
    if len(curve) > 2:
        a, b = curve[1], curve[-1]
        grew = (b["rss"] - a["rss"]) / max(b["ended"] - a["ended"], 1)
        print(f"From stretch 2 to {len(curve)} the client's memory changed by {(b['rss'] - a['rss']) / MB:+.1f} MB "
              f"({grew:+.1f} bytes a request), its descriptors by {b['fds'] - a['fds']:+d}; "
              f"finishing and analysis peaked at {peak_mb:.0f} MB.")  # fmt: skip


def main(argv: list[str]) -> int:
    ask = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ask.add_argument("requests", nargs="?", type=int, default=2_000_000)
    ask.add_argument("--concurrency", type=int, default=32)
    ask.add_argument("--processes", type=int, default=1)
    ask.add_argument("--seconds", type=float, default=3600.0, help="after this long it is interrupted")
    ask.add_argument("--keep", type=Path)
    args = ask.parse_args(argv)
    with tempfile.TemporaryDirectory() as tmp, StubProcess("--ttft-ms", "1", "--gap-ms", "1") as stub:
        out = args.keep or Path(tmp) / "run"
        command = [sys.executable, "-m", "whywait", "run", stub.url, "--concurrency", str(args.concurrency),
                   "--requests", str(args.requests), "--prompt-tokens", "8", "--output-tokens", "2",
                   "--processes", str(args.processes), "--out", str(out)]  # fmt: skip
        said = Path(tmp) / "said"
        with said.open("w") as file:
            client = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            try:
                rows = watch(client, stub.pid, out, args.seconds)
            finally:
                if client.poll() is None:
                    client.kill()
        if client.returncode not in (0, 6, 130) or not rows:
            print(said.read_text())
            return 1
        peak = max(r["rss"] for r in rows) / MB
        found = figures(out)
        (out / "soak.json").write_text(json.dumps({"rows": rows, **found}))
        print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; {args.processes} process(es), "
              f"{args.concurrency} in flight, exit code {client.returncode}")  # fmt: skip
        told([r for r in rows if r["ended"]], found, peak)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
