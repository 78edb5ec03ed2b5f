"""How true are a client's stamps, and what do they cost? whywait's client beside a plain aiohttp loop and AIPerf.

Every client drives the same stub service, which knows the truth: each chunk says when it was sent, by an absolute
timetable. Needs Linux for the kernel stamps; ``pip install '.[bench]'`` adds aiohttp, AIPerf is used where it is found.

    python benchmarks/client_accuracy.py                            # 16, 64, 256, 1,024 streams × 50 chunks/s
    python benchmarks/client_accuracy.py --saturate                 # how many chunks a second one core can take
    python benchmarks/client_accuracy.py --json out.json --markdown # the table of docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accuracy_clients import DRIVERS, Job, run_aiperf, run_trial
from accuracy_report import Row, add_ratios, blank, figures, figures_of_aiperf, render

from whywait.lab.cpus import allowed_cpus, cpu_split
from whywait.load.stub import StubProcess
from whywait.probe import host

VERSION = 1
TTFT_MS = 50.0
BUSY_LOAD, BUSY_SHARE = 0.25, 0.05  # of the CPUs, at start and while a trial ran
START, MOST, GRAIN = 64, 8192, 16  # streams of the saturation search
KEEPS_UP = 0.97


@dataclass(frozen=True)
class Settings:
    seconds: float
    rate: float
    aiperf: str | None
    stub_cpus: tuple[int, ...]
    client_cpus: tuple[int, ...]

    @property
    def gap_ms(self) -> float:
        return 1000 / self.rate


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Others:
    """Share of the machine's CPU time that went to processes that are none of ours, from construction to ``share``."""

    def __init__(self) -> None:
        self.wall, self.all, self.ours = time.monotonic(), self._all(), self._ours()

    def share(self) -> float | None:
        """None where the system does not say. Our children must have been waited for."""
        wall, now = time.monotonic() - self.wall, self._all()
        if now is None or self.all is None or not wall:
            return None
        busy = now - self.all - (self._ours() - self.ours)
        return max(0.0, busy / (wall * (os.cpu_count() or 1)))

    @staticmethod
    def _ours() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in used)

    @staticmethod
    def _all() -> float | None:
        fields = (host.read("/proc/stat") or b"").split(b"\n", 1)[0].split()
        if len(fields) < 9:
            return None
        user, nice, system, steal = (int(fields[i]) for i in (1, 2, 3, 8))
        return (user + nice + system + steal) / host.TICKS_PER_S


def trial(client: str, streams: int, s: Settings, stubs: int = 1) -> Row:
    """One client, one number of streams, a fresh stub."""
    tokens = max(2, round(s.seconds * s.rate))
    plan = ("--ttft-ms", f"{TTFT_MS:g}", "--gap-ms", f"{s.gap_ms!r}", "--tokens", str(tokens))
    cpus = s.client_cpus[:1]
    if client == "aiperf":  # many processes: it may use all that the stub does not
        cpus = tuple(c for c in allowed_cpus() if c not in s.stub_cpus[:stubs]) or s.client_cpus if cpus else ()
    others = Others()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whywait-bench-")))
        on = [s.stub_cpus[i % len(s.stub_cpus) :][:1] if s.stub_cpus else None for i in range(stubs)]
        urls = tuple(stack.enter_context(StubProcess(*plan, cpus=c)).url for c in on)
        job = Job(client, urls, streams, tokens, s.gap_ms, TTFT_MS, cpus)
        try:
            if client == "aiperf":
                assert s.aiperf
                row = figures_of_aiperf(job, run_aiperf(s.aiperf, job, folder))
            else:
                row = figures(job, run_trial(job, folder))
        except (RuntimeError, subprocess.TimeoutExpired) as exc:
            row = {**blank(job), "failed": str(exc)}
    row["others_cpu_share"] = others.share()
    return row


def compare(clients: Sequence[str], streams: Sequence[int], s: Settings) -> list[Row]:
    rows = []
    for n in streams:
        for client in clients:
            say(f"{client}, {n:,} streams …")
            rows.append(trial(client, n, s))
    add_ratios(rows)
    return rows


# --- saturation


def judge(row: Row, s: Settings) -> Row:
    """One step of the search. The client is behind when bytes lie unread for a whole period (p99), or when it is done
    with all chunks only after 1/0.97 of the time that the stub took to send them."""
    lag = row["read_lag_p99_ms"]
    if lag is None and row["stamp_error_us"]["p99"] is not None:
        lag = row["stamp_error_us"]["p99"] / 1e3
    if row["failed"] or row["chunks"] != row["chunks_expected"]:
        verdict = "failed"
    elif lag > s.gap_ms or row["kept_share"] < KEEPS_UP:
        verdict = "client behind"
    elif row["stub_chunks_per_s"] < KEEPS_UP * row["offered_chunks_per_s"]:
        verdict = "stub behind"
    else:
        verdict = "keeps up"
    keys = ("client", "streams", "stubs", "offered_chunks_per_s", "chunks_per_s", "kept_share", "cpu_share",
            "cpu_us_per_chunk", "coalesced_share", "stamp_error_us", "stub_late_us", "others_cpu_share", "failed",
            )  # fmt: skip
    return {**{k: row[k] for k in keys}, "lag_p99_ms": lag, "verdict": verdict}


class Search:
    """Doubles the number of streams until a client falls behind, then halves the interval three times."""

    def __init__(self, client: str, s: Settings, most: int = MOST) -> None:
        self.client, self.s, self.start, self.most = client, s, min(START, most), most
        self.steps: list[Row] = []
        self.stubs = 1

    def keeps_up(self, streams: int) -> bool:
        """One try; a second where it failed, since on a shared machine that may be chance, or with one more stub."""
        for _ in range(2):
            say(f"{self.client}, {streams:,} streams, {self.stubs} stub{'s' * (self.stubs > 1)} …")
            step = judge(trial(self.client, streams, self.s, self.stubs), self.s)
            self.steps.append(step)
            if step["verdict"] == "keeps up":
                return True
            if step["verdict"] == "stub behind" and self.stubs < max(1, len(self.s.stub_cpus)):
                self.stubs += 1
        return False

    def run(self) -> Row:
        low, high = 0, self.start
        while high <= self.most and self.keeps_up(high):
            low, high = high, high * 2
        for _ in range(3 if low and high <= self.most else 0):
            middle = round((low + high) / 2 / GRAIN) * GRAIN
            if low < middle < high:
                low, high = (middle, high) if self.keeps_up(middle) else (low, middle)
        kept = [step for step in self.steps if step["verdict"] == "keeps up"]
        best = max(kept, key=lambda step: float(step["chunks_per_s"]), default=None)
        above = [step["verdict"] for step in self.steps if step["streams"] == high and high <= self.most]
        return {
            "chunks_per_s_per_core": best and best["chunks_per_s"],
            "streams": best and best["streams"],
            "limit": above[-1] if above else "range",
            "steps": sorted(self.steps, key=lambda step: int(step["streams"])),
            "ratio_to_whywait": None,
        }


def saturate(clients: Sequence[str], s: Settings) -> dict[str, Row]:
    found = {client: Search(client, s).run() for client in clients if client in DRIVERS}
    ours = found.get("whywait", {}).get("chunks_per_s_per_core")
    for row in found.values():
        rate = row["chunks_per_s_per_core"]
        row["ratio_to_whywait"] = rate / ours if rate and ours else None
    return found


# --- command line


def missing(clients: Sequence[str], s: Settings, saturating: bool) -> dict[str, str]:
    """Why a client cannot take part."""
    out = {}
    if "aiohttp" in clients:
        try:
            import aiohttp  # noqa: F401
        except ImportError as exc:
            out["aiohttp"] = f"not installed ({exc}); pip install 'whywait[bench]'"
    if "aiperf" in clients and not s.aiperf:
        out["aiperf"] = "there is no aiperf on PATH; give --aiperf PATH"
    elif "aiperf" in clients and saturating:
        out["aiperf"] = "it has no stamps to saturate"
    return out


def warnings(rows: Sequence[Row], load: float, s: Settings) -> list[str]:
    cores = os.cpu_count() or 1
    out = []
    if load > BUSY_LOAD * cores:
        out.append(f"load average {load:.2f} on {cores} CPUs at start: the machine is busy, so these figures are noisy")
    worst = max((r["others_cpu_share"] or 0 for r in rows), default=0)
    if worst > BUSY_SHARE:
        out.append(f"other processes used up to {worst:.0%} of the CPU time during a trial")
    late = [r["streams"] for r in rows if (r["stub_late_us"]["p99"] or 0) > s.gap_ms * 1e3]
    if late:
        out.append(f"from {min(late):,} streams up the stub itself was more than a gap late (p99): the truth is what "
                   "it sent, not its timetable")  # fmt: skip
    if s.client_cpus[:1] == s.stub_cpus[:1]:
        out.append("client and stub are not on CPUs of their own, so each makes the other late")
    return out


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*DRIVERS, "aiperf")
    p.add_argument("--streams", default="16,64,256,1024", help="numbers of streams, with commas")
    p.add_argument("--seconds", type=float, default=5.0, help="how long each stream lasts")
    p.add_argument("--rate", type=float, default=50.0, help="chunks per second of each stream")
    p.add_argument("--clients", default=",".join(names), help=f"some of {', '.join(names)}")
    p.add_argument("--aiperf", metavar="PATH", help="the aiperf program, where it is not on PATH")
    p.add_argument("--saturate", action="store_true", help="find the most chunks per second that one core can take")
    p.add_argument("--json", metavar="FILE", help="write every figure there")
    p.add_argument("--markdown", action="store_true", help="print the tables of docs/benchmarks.md")
    args = p.parse_args(argv)
    args.clients = args.clients.split(",")
    if unknown := set(args.clients) - set(names):
        p.error(f"unknown client {sorted(unknown)[0]!r}; known: {', '.join(names)}")
    try:
        args.streams = [int(n) for n in args.streams.split(",")]
    except ValueError:
        p.error(f"--streams {args.streams}: not numbers with commas between")
    if min(args.streams) < 1 or args.seconds <= 0 or not 0 < args.rate <= 10_000:
        p.error("--streams, --seconds and --rate must be positive, the rate at most 10,000")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    stub_cpus, client_cpus = cpu_split()
    aiperf = args.aiperf or shutil.which("aiperf")
    s = Settings(args.seconds, args.rate, aiperf, stub_cpus, client_cpus)
    load = os.getloadavg()
    absent = missing(args.clients, s, args.saturate)
    clients = [c for c in args.clients if c not in absent]
    result: dict[str, Any] = {
        "benchmark": "client_accuracy",
        "version": VERSION,
        "taken": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": host.facts(),
        "load_average": load,
        "settings": {**asdict(s), "clients": args.clients, "streams": args.streams, "ttft_ms": TTFT_MS},
        "rows": [] if args.saturate else compare(clients, args.streams, s),
        "saturation": saturate(clients, s) if args.saturate else None,
        "absent": absent,
    }
    seen = result["rows"] + [step for found in (result["saturation"] or {}).values() for step in found["steps"]]
    result["warnings"] = warnings(seen, load[0], s)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    print(render(result, args.markdown))
    return 1 if any(r["failed"] for r in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
