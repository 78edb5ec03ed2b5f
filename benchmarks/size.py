"""Time and memory of the analysis by the size of a run: ``python benchmarks/size.py [millions of chunks …]``.

Default 1 10 100. For each size a run is made (``make``: see :func:`make`) and, in processes of their own: loaded and
analysed as ``whywait show`` does it (summary, request and device account, verdicts), and again with the HTML report.
Printed: time and CPU time of each part, the peak of the resident memory, the size of the page.

``--points N`` load points (default 10), ``--keep DIR`` leaves the runs there, and takes those that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

MILLION = 1_000_000
S, MS, US = 1_000_000_000, 1_000_000, 1_000
CLASSES = (("chat", 0.6, 300, 220), ("code", 0.25, 1500, 260), ("think", 0.15, 500, 700))  # share, prompt, output
NAMES = np.array([c[0] for c in CLASSES], dtype=object)
PIECE = 2_000  # requests whose chunks are made at once
COALESCED, FAILED = 0.004, 0.002  # share of the chunks that come with the one before; of the requests
STEP_NS = 12 * MS


def lengths(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(class, prompt, output tokens) of ``n`` requests: log-normal by class, as in logs of services."""
    kind = rng.choice(len(CLASSES), n, p=[c[1] for c in CLASSES])
    prompt, output = (np.array([c[i] for c in CLASSES])[kind] for i in (2, 3))
    spread = rng.lognormal(0.0, 0.6, (2, n))
    return kind, np.maximum(prompt * spread[0], 8).astype(np.int64), np.clip(output * spread[1], 4, 4000).astype(int)


def make(folder: Path, chunks: int, points: int = 10, seed: int = 1) -> None:
    """A run of about so many chunks as a sweep of rates leaves it: ``points`` load points of equally many requests,
    Poisson arrivals, classes of unequal lengths, a role chunk and a token per chunk, steps of the engine that grow with
    the load, neighbours' prefills as long gaps, some chunks that came several in one read, some requests that failed,
    the engine's own stages per request, its gauges and counters once a second."""
    from whywait.core.columns import FAULTS, KINDS, OUTCOMES
    from whywait.core.run import Manifest, Run
    from whywait.core.table import Stored, Table

    rng = np.random.default_rng(seed)
    mean = sum(c[1] * c[3] for c in CLASSES) * float(np.exp(0.6**2 / 2))
    n = max(round(chunks / mean / points), 8)
    folder.mkdir(parents=True, exist_ok=True)
    cols: dict[str, list[np.ndarray]] = {}
    rows: list[dict[str, Any]] = []
    readings: list[dict[str, np.ndarray]] = []
    role, reasoning, answer = (KINDS.index(k) for k in ("role", "reasoning", "answer"))

    def pieces() -> Iterator[tuple[dict[str, np.ndarray], int]]:
        start, first_id = S, 0
        for p in range(points):
            load = (p + 1) / points
            step, rate = STEP_NS * (1 + load), 150.0 * load
            due = start + np.sort(rng.integers(0, int(n / rate * S) + 1, n))
            end = start
            for lo in range(0, n, PIECE):
                made, piece = stretch(due[lo : lo + PIECE], first_id + lo, (p, step, load))
                end = max(end, int(np.nanmax(made["end_ns"])))
                for k, v in made.items():
                    cols.setdefault(k, []).append(v)
                yield piece, len(piece["id"])
            rows.append({"point": p, "mode": "rate", "target": rate, "planned": n, "start_ns": start, "end_ns": end})
            readings.append(read(rng, start, end, (load, n / rate)))
            start, first_id = end + S, first_id + n

    def stretch(due: np.ndarray, id0: int, at: tuple[int, float, float]) -> tuple[dict[str, Any], dict[str, Any]]:
        point, step, load = at
        m = len(due)
        kind, prompt, output = lengths(rng, m)
        failed = rng.random(m) < FAILED
        got = np.where(failed, output // 3, output)
        sent = due + rng.integers(5 * US, 60 * US, m)
        queue = rng.exponential(20 * load**3, m) * MS
        prefill = (4 + prompt / 40) * MS
        accepted = sent + (1.2 * MS + queue * 0.1).astype(np.int64)
        rank = np.concatenate([np.arange(k + 1) for k in got.tolist()])  # 0: the role chunk
        row = np.repeat(np.arange(m), got + 1)
        gap = step * rng.normal(1.0, 0.03, len(row)) + rng.exponential(30 * US, len(row))
        gap[rng.random(len(row)) < 0.01 * (1 + load)] += 45 * MS  # a neighbour's prefill in the same step
        first = rank == 1
        gap[rank == 0] = accepted + 50 * US
        gap[first] = (sent + queue + prefill + 2 * MS - (accepted + 50 * US)).clip(50 * US)
        total = np.cumsum(gap.astype(np.int64))
        begin = np.flatnonzero(rank == 0)
        base = total[begin] - gap[begin].astype(np.int64)
        t = total - np.repeat(base, got + 1)
        last_of = np.append(begin[1:], len(row)) - 1
        low = np.full(len(row), np.nan)
        late = np.flatnonzero((rng.random(len(row)) < COALESCED) & (rank > 2))
        late = late[~np.isin(late, last_of)]
        low[late + 1] = t[late - 1]
        low[late] = t[late - 1]
        t[late] = t[late + 1]
        thoughts = np.where(kind == 2, got // 2, 0)
        what = np.where(rank == 0, role, np.where(rank <= thoughts[row], reasoning, answer))
        piece = {
            "id": id0 + row, "t_ns": t, "t_low_ns": low, "kind": what.astype(np.int8),
            "tokens": np.where(rank == 0, np.nan, 1.0), "clock": np.zeros(len(row), dtype=np.int8),
        }  # fmt: skip
        last = t[last_of].astype(np.float64)
        bad = failed.astype(bool)
        answered = t[begin + thoughts + 1].astype(np.float64)
        made = {
            "point": np.full(m, point), "id": id0 + np.arange(m), "class": NAMES[kind],
            "replica": np.zeros(m), "attempt": np.ones(m), "due_ns": due, "sent_ns": sent, "accepted_ns": accepted,
            "first_ns": t[begin + 1].astype(np.float64), "first_answer_ns": answered, "last_ns": last,
            "end_ns": last + 300 * US, "connect_ns": np.zeros(m), "rtt_ns": rng.integers(60 * US, 90 * US, m),
            "retransmits": np.zeros(m), "asked_prompt_tokens": prompt, "asked_output_tokens": output,
            "prompt_tokens": np.where(bad, np.nan, prompt), "output_tokens": np.where(bad, np.nan, output),
            "reasoning_tokens": np.where(bad, np.nan, thoughts), "cached_tokens": np.where(bad, np.nan, prompt // 8),
            "content_chunks": got, "first_chunk_tokens": np.ones(m),
            "outcome": np.where(bad, OUTCOMES.index("truncated"), 0),
            "fault": np.where(bad, FAULTS.index("service"), 0),
            "status": np.full(m, 200.0), "finish_reason": np.where(bad, None, "length"),
            "engine_queue_ms": np.where(bad, np.nan, queue / MS),
            "engine_prefill_ms": np.where(bad, np.nan, prefill / MS),
            "trace_id": np.array([f"chatcmpl-{id0 + i:032x}" for i in range(m)], dtype=object),
        }  # fmt: skip
        return made, piece

    chunk_table = Stored.write("chunks", folder / "chunks.parquet", pieces())
    requests = Table("requests", {k: np.concatenate(v) for k, v in cols.items()})
    table = Table("readings", {k: np.concatenate([r[k] for r in readings]) for k in readings[0]})
    m = Manifest(
        zero_unix_ns=1_700_000_000_000_000_000, command=["sweep"], engine={"name": "vllm", "model": "made-up-8b"},
        slo={"ttft_ms": 500.0, "tpot_ms": 40.0}, client={"read_lag_ms": {"p50": 0.01, "p99": 0.2}},
        workload={"classes": [{"name": c[0], "share": c[1]} for c in CLASSES]},
    )  # fmt: skip
    Run(m, Table.from_rows("points", rows), requests, chunk_table, Table.empty("steps"), table).save(folder)


def read(rng: np.random.Generator, start: int, end: int, at: tuple[float, float]) -> dict[str, np.ndarray]:
    """What a sampler reads once a second of vLLM's page and of a device."""
    load, _ = at
    t = np.arange(start - S // 2, end + S, S)
    k = len(t)
    gauges = {
        "running": 40 * load * rng.normal(1, 0.1, k), "waiting": np.maximum(rng.normal(load * 4 - 3, 1, k), 0).round(),
        "kv_use": np.clip(rng.normal(0.7 * load, 0.05, k), 0, 1), "power_watts": rng.normal(300 + 300 * load, 20, k),
    }  # fmt: skip
    counters = {"prompt_tokens_total": 1e5 * load, "output_tokens_total": 4e4 * load, "preemptions_total": 0.01}
    names = {**gauges, **{c: (t / S) * per_s for c, per_s in counters.items()}}
    source = {name: "gpu" if name == "power_watts" else "metrics/0" for name in names}
    return {
        "asked_ns": np.tile(t, len(names)), "answered_ns": np.tile(t + 2 * MS, len(names)),
        "source": np.repeat(np.array(list(source.values()), dtype=object), k),
        "name": np.repeat(np.array(list(names), dtype=object), k), "value": np.concatenate(list(names.values())),
    }  # fmt: skip


def analyse(folder: Path, page: str = "") -> None:
    """``whywait show``: what it takes is printed as JSON."""
    from whywait import app

    began, used = time.monotonic(), time.process_time()
    result = app.show(folder)
    told: dict[str, Any] = {"s": time.monotonic() - began, "cpu_s": time.process_time() - used,
                            "chunks": len(result.run.chunks), "requests": len(result.run.requests)}  # fmt: skip
    told["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if page:
        began, used = time.monotonic(), time.process_time()
        app.write_report(result, Path(page))
        told |= {"page_s": time.monotonic() - began, "page_cpu_s": time.process_time() - used,
                 "page_mb": Path(page).stat().st_size / MILLION}  # fmt: skip
        told["page_peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(told))


def measured(folder: Path) -> dict[str, Any]:
    argv = [sys.executable, __file__, "analyse", str(folder), str(folder / "report.html")]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: list[str]) -> int:
    if argv[:1] == ["make"]:
        make(Path(argv[1]), int(argv[2]), int(argv[3]))
        return 0
    if argv[:1] == ["analyse"]:
        analyse(Path(argv[1]), *argv[2:3])
        return 0
    ask = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ask.add_argument("millions", nargs="*", type=float, default=[1, 10, 100])
    ask.add_argument("--points", type=int, default=10)
    ask.add_argument("--keep", type=Path)
    args = ask.parse_args(argv)
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; {args.points} load points")
    print("| chunks, million | requests | on disk, MB | load + analysis, s | CPU, s | CPU per chunk, ns | peak, MB "
          "| report, s | its peak, MB | its size, MB |")  # fmt: skip
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for millions in args.millions:
        with tempfile.TemporaryDirectory() as tmp:
            folder = (args.keep or Path(tmp)) / f"{millions:g}m-{args.points}p"
            if not (folder / "manifest.json").exists():
                wanted = str(round(millions * MILLION))
                subprocess.run([sys.executable, __file__, "make", str(folder), wanted, str(args.points)], check=True)
            m = measured(folder)
            disk = sum(p.stat().st_size for p in folder.glob("*.parquet")) / MILLION
            print(f"| {m['chunks'] / MILLION:.1f} | {m['requests']:,} | {disk:.0f} | {m['s']:.1f} | {m['cpu_s']:.1f} "
                  f"| {m['cpu_s'] / m['chunks'] * 1e9:.0f} | {m['peak_mb']:.0f} | {m['page_s']:.1f} "
                  f"| {m['page_peak_mb']:.0f} | {m['page_mb']:.2f} |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
