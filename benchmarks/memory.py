"""Memory and disk of a run by its length: ``python benchmarks/memory.py [millions of chunks …]`` (default 1 3 10).

For each length, in processes of their own: a synthetic run is recorded through the Recorder as the client does it (64
streams at once, 100 chunks an answer, flushed twice a second's worth), and finished into Parquet files. Printed: the
peak of the resident memory while recording and while finishing, what lies on disk, and the time each took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MILLION = 1_000_000
STREAMS, ANSWER = 64, 100
GAP_NS = 20_000_000


def record(folder: Path, chunks: int) -> None:
    """Requests come and go in time, as in a real run: ``STREAMS`` in flight, a new one as each ends."""
    from whywait.core.events import Accepted, Finished, Sent
    from whywait.core.recorder import Recorder, chunk_meta
    from whywait.core.run import Manifest

    recorder = Recorder(folder, Manifest(zero_unix_ns=1_700_000_000_000_000_000))
    n = chunks // ANSWER
    plan = ({"id": i, "class": "chat", "asked_prompt_tokens": 128, "asked_output_tokens": ANSWER} for i in range(n))
    recorder.begin_point({"point": 0, "mode": "concurrency", "target": STREAMS, "start_ns": 0}, plan)
    exact, step = chunk_meta(2, 1, 0), GAP_NS // STREAMS
    live: dict[int, list[int]] = {}  # place -> [id, chunks so far, sent, first]
    t, following = 1, 0
    for i in range(n * ANSWER + STREAMS * ANSWER):
        t += step + (i * 7919) % 1009
        place = i % STREAMS
        at = live.get(place)
        if at is None:
            if following == n:
                continue
            # Places start staggered, so that ends are spread as they are in life.
            if following < STREAMS and i < following * 3:
                continue
            at = live[place] = [following, 0, t, 0]
            recorder.event(Sent(following, t))
            recorder.event(Accepted(following, t + 1, 200))
            following += 1
        recorder.chunk(at[0], t + 2, -1, exact)
        at[1] += 1
        at[3] = at[3] or t + 2
        if at[1] == ANSWER:
            facts: dict[str, Any] = {
                "outcome": "ok", "fault": "none", "detail": None, "due_ns": at[2], "attempt": 1, "connect_ns": 0,
                "rtt_ns": 41_000 + at[0] % 999, "retransmits": 0, "first_ns": at[3], "first_answer_ns": at[3],
                "last_ns": t + 2, "content_chunks": ANSWER, "first_chunk_tokens": 1, "prompt_tokens": 128,
                "output_tokens": ANSWER, "cached_tokens": 0, "finish_reason": "length",
                "trace_id": f"chatcmpl-{at[0]:032x}",
            }  # fmt: skip
            recorder.event(Finished(at[0], t + 3, facts))
            del live[place]
        if i % 25_000 == 0:
            recorder.flush()
    recorder.end_point(0, t + 4)
    recorder.close()


def finish(folder: Path) -> None:
    from whywait.core.recorder import spools_of
    from whywait.core.spool import assemble

    run = assemble(spools_of(folder), None, store=folder / "chunks.parquet")
    run.save(folder)
    print(json.dumps({"requests": len(run.requests), "chunks": len(run.chunks)}))


def peak_mb(pid: int) -> tuple[float, int]:
    """Wait for a child; (peak of its resident memory in MB, exit status)."""
    _, status, usage = os.wait4(pid, 0)
    return usage.ru_maxrss / 1024 if sys.platform == "linux" else usage.ru_maxrss / MILLION, status


def run_part(*argv: str) -> tuple[float, float, str]:
    """(peak MB, seconds, what it printed)."""
    began = time.monotonic()
    child = subprocess.Popen([sys.executable, __file__, *argv], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = child.stdout.read()
    mb, status = peak_mb(child.pid)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{argv[0]} failed ({child.returncode})")
    return mb, time.monotonic() - began, said


def size_mb(folder: Path, pattern: str) -> float:
    return sum(p.stat().st_size for p in folder.rglob(pattern) if p.is_file()) / MILLION


def measure(millions: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "run"
        recording, took, _ = run_part("record", str(folder), str(round(millions * MILLION)))
        spool = size_mb(folder, "chunks.bin") + size_mb(folder, "log.jsonl")
        finishing, took2, said = run_part("finish", str(folder))
        counted = json.loads(said)
        assert counted["chunks"] == counted["requests"] * ANSWER == round(millions * MILLION), counted
        return {
            "million_chunks": millions, "recording_mb": recording, "finishing_mb": finishing, "spool_mb": spool,
            "parquet_mb": size_mb(folder, "*.parquet"), "recording_s": took, "finishing_s": took2,
        }  # fmt: skip


def main(argv: list[str]) -> int:
    if argv[:1] == ["record"]:
        record(Path(argv[1]), int(argv[2]))
        return 0
    if argv[:1] == ["finish"]:
        finish(Path(argv[1]))
        return 0
    print("| chunks, million | peak while recording, MB | while finishing, MB | spool, MB | Run, MB | recording, s |"
          " finishing, s |")  # fmt: skip
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for text in argv or ["1", "3", "10"]:
        m = measure(float(text))
        print(
            f"| {m['million_chunks']:g} | {m['recording_mb']:.0f} | {m['finishing_mb']:.0f} | {m['spool_mb']:.0f} "
            f"| {m['parquet_mb']:.0f} | {m['recording_s']:.1f} | {m['finishing_s']:.1f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
