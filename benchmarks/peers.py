"""whywait beside AIPerf, GuideLLM, inference-perf and a plain aiohttp loop: what each reports against what the stub
really sent, and what it costs to run, to install and to start.

Each is a program in a virtual environment of its own: ``--venvs DIR/NAME``, made there with pip where there is none.

    python benchmarks/peers.py --venvs ~/peer-venvs                        # 16, 64, 256 streams × 50 chunks/s
    python benchmarks/peers.py --venvs … --peak 2048                       # and the most chunks/s that each takes
    python benchmarks/peers.py --venvs … --no-install --found aiperf=DIR   # only what is there already
    python benchmarks/peers.py --venvs … --json out.json --markdown        # the tables of docs/benchmarks.md

The stub notes when the kernel had each request whole (its receive stamp) and when it sent each chunk; that is the truth
for all of them, so a peer that sends late, or reads late, shows it. A figure that a peer does not report is null, one
that could not be taken is not there: neither is ever 0.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from accuracy_clients import TOKENIZER, Job, pin, run_aiperf
from accuracy_report import Row, compared, count, machine_line, ratio, share, stats, table, times, us
from client_accuracy import BUSY_LOAD, BUSY_SHARE, KEEPS_UP, MOST, TTFT_MS, Others, Search, Settings, say

from whywait.core.run import Run
from whywait.lab.cpus import allowed_cpus, cpu_split
from whywait.load.stub import StubProcess
from whywait.probe import host

VERSION = 1
ROOT = Path(__file__).resolve().parents[1]
TTFT, GAP = ("p50", "p95", "mean"), ("p50", "p99", "mean")
HELP_TRIES = 3
OWN = ("pip", "setuptools", "wheel")  # of every virtual environment, so nobody's
# Of each pair of figures the smaller is the better one, but for these.
MORE_IS_BETTER = ("peak_chunks_per_s",)
RATIOS = {
    "ttft_error_ms": "TTFT error", "gap_error_ms": "gap error", "cpu_us_per_chunk": "CPU/chunk",
    "cpu_us_per_chunk_marginal": "without start-up",
}  # fmt: skip
COSTS = {
    "peak_chunks_per_s": "peak chunks/s", "install_bytes": "size", "packages": "packages", "install_s": "install time",
    "help_s": "start-up",
}  # fmt: skip


# --- the stub, and what it knows


def serve(log: Path, flags: Sequence[str]) -> int:
    """The stub, as it is, with a note of every content chunk; written to ``log`` when it ends."""
    from whywait.load import stub
    from whywait.net import serve as server
    from whywait.net import stamps
    from whywait.net.clock import bracket

    wall = bracket()[0]

    class Stamped(server.Conn):
        """A request has come when the kernel had its last byte: with hundreds of streams the stub reads it later."""

        def __init__(self, to: server.Server, sock: socket.socket) -> None:
            stamps.enable(sock)
            super().__init__(to, sock)
            self._arrived = 0
            self._recv = self._stamped

        def _stamped(self, size: int) -> bytes:
            data, ancillary, _, _ = self._sock.recvmsg(size, stamps.ANCILLARY)
            arrived = stamps.unix_ns(ancillary)
            self._arrived = arrived - wall if arrived else time.monotonic_ns()
            return data

        def _feed(self, data: bytes) -> None:
            self._read_ns = self._arrived
            super()._feed(data)

    server.Conn = Stamped  # type: ignore[misc]
    kept: list[tuple[int, array[int]]] = []

    class Noted(stub.Stream):
        def start(self) -> None:
            super().start()
            if not self.ask.stream:
                return
            t: array[int] = array("q")
            kept.append((self.reply.request.accepted_ns, t))
            push, note, now = self.push, t.append, time.monotonic_ns

            def noting(data: bytes) -> None:
                note(now())
                push(data)

            self.push = noting

    stub.Stream = Noted  # type: ignore[misc]
    code = stub.main([*flags, "--die-with-stdin"])
    kept.sort(key=lambda stream: stream[0])
    np.savez(log, accepted=np.array([a for a, _ in kept], np.int64), counts=np.array([len(t) for _, t in kept], int),
             t=np.array([x for _, t in kept for x in t], np.int64), wall=wall)  # fmt: skip
    return code


class NotedStub(StubProcess):
    """The same, as a process."""

    log: Path

    def command(self) -> list[str]:
        return [sys.executable, __file__, "--serve", str(self.log), *self.flags]


@dataclass(frozen=True)
class Truth:
    """What the stub did for the last ``streams`` requests (those before were warm-up). Times are Unix seconds."""

    ttft_ms: Any
    gap_ms: Any
    start: float
    end: float
    chunks_of_all: int
    streams: int
    chunks_per_s: float | None  # the best second; None of less than one

    @classmethod
    def load(cls, log: Path, streams: int) -> Truth:
        with np.load(log) as saved:
            accepted, counts, t, wall = (saved[k] for k in ("accepted", "counts", "t", "wall"))
        stream = np.repeat(np.arange(len(counts)), counts)
        last = stream >= len(counts) - streams
        all_chunks, t, stream = len(t), t[last], stream[last]
        new = np.diff(stream, prepend=-1) != 0
        first = t[new] - accepted[stream[new]]
        order = np.sort(t)
        a_second = np.searchsorted(order, order + 10**9) - np.arange(len(order))
        whole = len(order) > 0 and order[-1] - order[0] >= 10**9
        begin = int(accepted[stream[new]].min()) if len(t) else 0
        return cls(first / 1e6, np.diff(t)[~new[1:]] / 1e6 if len(t) else t, (begin + int(wall)) / 1e9,
                   (int(order[-1]) + int(wall)) / 1e9 if len(t) else 0.0, all_chunks, int(new.sum()),
                   float(a_second.max()) if whole else None)  # fmt: skip


# --- the peers


@dataclass(frozen=True)
class Seen:
    """What a peer says of its run; None where it does not say. ``end`` is when it had the last chunk, Unix seconds."""

    ttft_ms: dict[str, float | None]
    gap_ms: dict[str, float | None]
    chunks: int | None
    streams_ok: int
    end: float | None


class Failed(RuntimeError):
    """A peer that could not do it; the message is the last line it said."""


def last_line(text: str) -> str:
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1][:300]


def command_runs(command: Sequence[str], job: Job, folder: Path) -> None:
    """The command, on the CPUs of the job.

    Raises:
        Failed: with the last line it said.
    """
    log = folder / "peer.log"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    with log.open("wb") as f, pinned(job):
        try:
            code = subprocess.run(command, stdout=f, stderr=f, stdin=subprocess.DEVNULL, cwd=folder, env=env,
                                  timeout=job.patience_s + 60, check=False).returncode  # fmt: skip
        except OSError as exc:
            raise Failed(str(exc)) from exc
        except subprocess.TimeoutExpired as exc:
            raise Failed(f"not done after {exc.timeout:.0f} s; {last_line(log.read_text(errors='replace'))}") from exc
    if code:
        raise Failed(f"exit code {code}; {last_line(log.read_text(errors='replace'))}")


@contextlib.contextmanager
def pinned(job: Job) -> Iterator[None]:
    before = os.sched_getaffinity(0) if job.cpus else set()
    pin(job.cpus)
    try:
        yield
    finally:
        pin(tuple(before))


def tokenizer(folder: Path) -> str:
    """Some of them want a tokenizer though the stub counts, and make prompts with it: one of a few words, on disk."""
    where = folder / "tokenizer"
    where.mkdir(exist_ok=True)
    vocab = {"[UNK]": 0, **{f"word{i}": i for i in range(1, 1000)}}
    (where / "tokenizer.json").write_text(json.dumps({**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": vocab}}))
    (where / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return str(where)


def of_streams(streams: Sequence[Sequence[float]], unit: float = 1e3) -> Seen:
    """From ``[sent, chunk, chunk, …]`` of each stream, in seconds of Unix time."""
    good = [s for s in streams if len(s) > 1]
    ttft = [(s[1] - s[0]) * unit for s in good]
    gaps = [(b - a) * unit for s in good for a, b in itertools.pairwise(s[1:])]
    chunks = sum(len(s) - 1 for s in good)
    return Seen(stats(ttft, TTFT), stats(gaps, GAP), chunks, len(good), max((s[-1] for s in good), default=None))


def drive_whywait(program: str, job: Job, folder: Path) -> Seen:
    """``whywait run`` as anyone would, but for the first requests spread over one gap."""
    out = folder / "run"
    command_runs([program, "run", job.urls[0], "--concurrency", str(job.streams), "--requests", str(job.streams),
                  "--ramp", f"{job.gap_ms:g}ms", "--output-tokens", str(job.tokens), "--no-floor", "--out", str(out)],
                 job, folder)  # fmt: skip
    (point,) = json.loads((out / "summary.json").read_text())["points"]
    rows = Run.load(out).requests.rows()
    zero = json.loads((out / "manifest.json").read_text())["zero_unix_ns"]
    ttft, gap = point.get("ttft_ms") or {}, point.get("chunk_gap_ms") or {}
    return Seen({k: ttft.get(k) for k in TTFT}, {k: gap.get(k) for k in GAP}, sum(r["content_chunks"] for r in rows),
                sum(r["outcome"] == "ok" for r in rows),
                max(((r["last_ns"] + zero) / 1e9 for r in rows if r["last_ns"] is not None), default=None))  # fmt: skip


def drive_aiohttp(program: str, job: Job, folder: Path) -> Seen:
    out = folder / "seen.json"
    command_runs([program, str(ROOT / "benchmarks/peer_loop.py"), job.urls[0], str(job.streams), str(job.tokens),
                  f"{job.gap_ms!r}", str(out)], job, folder)  # fmt: skip
    return of_streams(json.loads(out.read_text()))


def drive_aiperf(program: str, job: Job, folder: Path) -> Seen:
    try:
        records = run_aiperf(program, job, folder)
    except (OSError, subprocess.TimeoutExpired, RuntimeError) as exc:
        raise Failed(str(exc)) from exc
    good = [r for r in records if not r.get("error") and r.get("metrics")]
    ttft = [m["time_to_first_token"]["value"] for m in (r["metrics"] for r in good) if "time_to_first_token" in m]
    gaps = [v for r in good for v in r["metrics"].get("inter_chunk_latency", {}).get("value", ())]
    end = max((r["metadata"]["request_end_ns"] / 1e9 for r in good), default=None)
    return Seen(stats(ttft, TTFT), stats(gaps, GAP), len(ttft) + len(gaps), len(good), end)


def drive_guidellm(program: str, job: Job, folder: Path) -> Seen:
    """It keeps first and last token of a request, not those between: only the mean of the gaps is to be had."""
    out, prompts = folder / "guidellm.json", folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "calibration"}\n' * job.streams)
    backend = {"kind": "openai_http", "target": job.urls[0], "model": "stub", "max_tokens": job.tokens,
               "request_format": "/v1/chat/completions"}  # fmt: skip
    command_runs([program, "run", "--backend", json.dumps(backend),
                  "--profile", f"kind=concurrent,streams={job.streams}",
                  "--constraint", f"kind=max_requests,count={job.streams}", "--data", f"kind=json_file,path={prompts}",
                  "--tokenizer", f"kind=huggingface_auto,model={tokenizer(folder)}", "--disable-console",
                  "--output", f"kind=json,path={out}"], job, folder)  # fmt: skip
    good = json.loads(out.read_text())["benchmarks"][0]["requests"]["successful"]
    ttft = [r["time_to_first_token_ms"] for r in good if r.get("time_to_first_token_ms") is not None]
    gap = [r["inter_token_latency_ms"] for r in good if r.get("inter_token_latency_ms") is not None]
    chunks = [r["info"]["timings"].get("token_iterations") for r in good]
    return Seen(stats(ttft, TTFT), {**dict.fromkeys(GAP), **stats(gap, ("mean",))},
                sum(chunks) if chunks and all(chunks) else None, len(good),
                max((r["request_end_time"] for r in good), default=None))  # fmt: skip


def drive_inference_perf(program: str, job: Job, folder: Path) -> Seen:
    """Its per-request report holds a stamp of each chunk, by a clock that this machine shares (``perf_counter``)."""
    out, config = folder / "report", folder / "config.yml"
    fields = {"request": False, "response": False, "response_chunks": False, "computed_metrics": False}
    config.write_text(json.dumps({  # JSON is YAML
        "api": {"type": "chat", "streaming": True},
        "data": {"type": "shared_prefix", "shared_prefix": {
            "num_groups": 1, "num_prompts_per_group": job.streams, "system_prompt_len": 1, "question_len": 1,
            "output_len": job.tokens}},
        "load": {"type": "concurrent", "stages": [{"num_requests": job.streams, "concurrency_level": job.streams}],
                 "worker_max_concurrency": job.streams},
        "server": {"type": "vllm", "model_name": "stub", "base_url": job.urls[0], "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": tokenizer(folder)},
        "storage": {"local_storage": {"path": str(out)}},
        "report": {"request_lifecycle": {"per_request": True, "per_request_fields": fields}},
    }))  # fmt: skip
    command_runs([program, "--config_file", str(config)], job, folder)
    reports = list(out.rglob("*per_request_lifecycle_metrics.json"))
    if not reports:
        raise Failed(f"no per-request report; {last_line((folder / 'peer.log').read_text(errors='replace'))}")
    records = [r for r in json.loads(reports[0].read_text()) if not r.get("error")]
    unix = time.time() - time.perf_counter()
    times_of = [r["info"]["response_metrics"]["chunk_times"] for r in records]
    return of_streams([[unix + x for x in (r["start_time"], *t)] for r, t in zip(records, times_of, strict=True)])


@dataclass(frozen=True)
class Peer:
    name: str
    program: str  # in the bin folder of its environment
    package: str
    drive: Callable[[str, Job, Path], Seen]
    help: tuple[str, ...] = ("--help",)


PEERS = {
    p.name: p
    for p in (
        Peer("whywait", "whywait", str(ROOT), drive_whywait),
        Peer("aiohttp", "python", "aiohttp", drive_aiohttp, ("-c", "import aiohttp")),
        Peer("aiperf", "aiperf", "aiperf", drive_aiperf),
        Peer("guidellm", "guidellm", "guidellm", drive_guidellm),
        Peer("inference-perf", "inference-perf", "inference-perf", drive_inference_perf),
    )
}


# --- installing, size, start-up


def environment(peer: Peer, where: Path, python: str, install: bool) -> Row:
    """The peer's environment, made where it is not there, and what it takes; ``absent`` says why there is none."""
    row: Row = {"peer": peer.name, "environment": str(where), "absent": None, "version": None, "install_s": None,
                "install_bytes": None, "packages": None, "help_s": None, "help_cpu_s": None}  # fmt: skip
    program, note = where / "bin" / peer.program, where / "peer-install.json"
    if not (note if peer.program == "python" and install else program).exists():
        if not install:
            return {**row, "absent": f"not installed here: there is no {program}"}
        try:
            note.write_text(json.dumps({"seconds": make(peer, where, python)}))
        except (OSError, Failed) as exc:
            return {**row, "absent": f"not installed here: {exc}"}
    if note.exists():
        row["install_s"] = json.loads(note.read_text())["seconds"]
    row["install_bytes"] = size_of(where)
    row |= packages_of(peer, where)
    return row | start_up([str(program), *peer.help])


def make(peer: Peer, where: Path, python: str) -> float:
    """Seconds that ``pip install`` took; the download is part of it, unless pip had it in its cache."""
    say(f"installing {peer.name} …")
    for command in ([python, "-m", "venv", str(where)],
                    [str(where / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check",
                     peer.package]):  # fmt: skip
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(last_line(done.stderr or done.stdout))
    return time.monotonic() - start


def size_of(where: Path) -> int | None:
    """Bytes of the environment's files, without pip and what else is in each."""
    out = 0
    for folder, folders, files in os.walk(where / "lib"):
        folders[:] = [f for f in folders if not f.startswith(OWN) and not os.path.islink(os.path.join(folder, f))]
        out += sum(os.lstat(os.path.join(folder, f)).st_size for f in files)
    return out or None


def packages_of(peer: Peer, where: Path) -> Row:
    """How many packages there are, and the version of the one that counts."""
    code = ("import importlib.metadata as m, json, sys\n"
            "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))")  # fmt: skip
    try:
        done = subprocess.run([str(where / "bin/python"), "-I", "-c", code], capture_output=True, text=True, check=True)
        found = {k: v for k, v in json.loads(done.stdout).items() if k not in OWN}
    except (OSError, ValueError, subprocess.CalledProcessError):
        return {}
    return {"packages": len(found), "version": found.get(peer.name)}


def start_up(command: Sequence[str]) -> Row:
    """The best of a few: what it takes to say its help, files in the cache."""
    walls, cpus = [], []
    for _ in range(HELP_TRIES):
        cpu, start = children_cpu_s(), time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=120, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return {}
        if done.returncode:
            return {}
        walls.append(time.monotonic() - start)
        cpus.append(children_cpu_s() - cpu)
    return {"help_s": min(walls), "help_cpu_s": min(cpus)}


def children_cpu_s() -> float:
    """CPU time of all children, and theirs, that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- runs


def blank(peer: str, streams: int, tokens: int, s: Settings) -> Row:
    return {
        "peer": peer, "streams": streams, "chunks_expected": streams * tokens, "chunks": None, "streams_ok": None,
        "offered_chunks_per_s": streams * s.rate, "chunks_per_s": None, "kept_share": None,
        "ttft_ms": compared(dict.fromkeys(TTFT), None, TTFT_MS), "gap_ms": compared(dict.fromkeys(GAP), None, s.gap_ms),
        "ttft_error_ms": None, "gap_error_ms": None, "gap_mean_only": False, "cpu_s": None, "cpu_us_per_chunk": None,
        "cpu_us_per_chunk_marginal": None, "chunks_sent": None, "wall_s": None, "others_cpu_share": None,
        "ratio_to_whywait": dict.fromkeys(RATIOS), "failed": None,
    }  # fmt: skip


def trial(peer: Peer, program: str, streams: int, tokens: int, s: Settings) -> Row:
    """One run of one peer, against a fresh stub."""
    cpus = tuple(c for c in allowed_cpus() if c not in s.stub_cpus[:1]) or s.client_cpus if s.client_cpus else ()
    row, others = blank(peer.name, streams, tokens, s), Others()
    with tempfile.TemporaryDirectory(prefix="whywait-peers-") as name:
        folder = Path(name)
        stub = NotedStub("--ttft-ms", f"{TTFT_MS:g}", "--gap-ms", f"{s.gap_ms!r}", "--tokens", str(tokens),
                         cpus=s.stub_cpus[:1] or None)  # fmt: skip
        stub.log = folder / "stub.npz"
        with stub:
            job = Job(peer.name, (stub.url,), streams, tokens, s.gap_ms, TTFT_MS, cpus)
            cpu, start = children_cpu_s(), time.monotonic()
            try:
                seen: Seen | None = peer.drive(program, job, folder)
            except Failed as exc:
                seen, row["failed"] = None, str(exc)
            except (KeyError, IndexError, TypeError, ValueError, OSError) as exc:
                seen, row["failed"] = None, f"its output is not what this script knows: {type(exc).__name__}: {exc}"
            row["wall_s"], cpu = time.monotonic() - start, children_cpu_s() - cpu
        if seen:
            truth = Truth.load(stub.log, streams)
            row |= figures(seen, truth, s)
            row |= {"cpu_s": cpu, "cpu_us_per_chunk": cpu * 1e6 / truth.chunks_of_all if truth.chunks_of_all else None}
    row["others_cpu_share"] = others.share()
    return row


def figures(seen: Seen, truth: Truth, s: Settings) -> Row:
    ttft = compared(seen.ttft_ms, stats(truth.ttft_ms, TTFT), TTFT_MS)
    gap = compared(seen.gap_ms, stats(truth.gap_ms, GAP), s.gap_ms)
    mean_only = seen.gap_ms["p50"] is None and seen.gap_ms["mean"] is not None
    kept = (truth.end - truth.start) / max(seen.end - truth.start, 1e-9) if seen.end and truth.streams else None
    return {
        "chunks": seen.chunks, "streams_ok": seen.streams_ok, "chunks_sent": truth.chunks_of_all,
        "chunks_per_s": truth.chunks_per_s, "kept_share": kept and min(1.0, kept), "ttft_ms": ttft, "gap_ms": gap,
        "ttft_error_ms": worst(ttft), "gap_error_ms": worst(gap), "gap_mean_only": mean_only,
    }  # fmt: skip


def worst(pair: Row) -> float | None:
    """The largest error, in ms, of the statistics that the peer reports."""
    said, true = pair["client"], pair["stub"]
    return max((abs(said[k] - true[k]) for k in said if said[k] is not None and true[k] is not None), default=None)


class PeakSearch(Search):
    """The search of ``client_accuracy.py``, with whole programs: each may use all the CPUs but the stub's."""

    def __init__(self, peer: Peer, program: str, s: Settings, most: int) -> None:
        super().__init__(peer.name, s, most)
        self.peer, self.program = peer, program

    def keeps_up(self, streams: int) -> bool:
        for _ in range(2):
            say(f"peak of {self.peer.name}, {streams:,} streams …")
            row = trial(self.peer, self.program, streams, tokens_of(self.s), self.s)
            self.steps.append({**row, "verdict": (verdict := judged(row, self.s))})
            if verdict == "keeps up":
                return True
        return False


def judged(row: Row, s: Settings) -> str:
    """A peer is behind when it ends late, or says of its chunks what is off by more than a whole period."""
    if row["failed"] or row["chunks"] not in (None, row["chunks_expected"]):
        return "failed"
    if (row["kept_share"] or 0) < KEEPS_UP or (row["ttft_error_ms"] or 0) > s.gap_ms:
        return "client behind"
    true = (row["ttft_ms"]["stub"] or {}).get("p50")
    return "stub behind" if true is None or true > TTFT_MS + s.gap_ms or row["chunks_per_s"] is None else "keeps up"


def tokens_of(s: Settings) -> int:
    return max(2, round(s.seconds * s.rate))


def compare(programs: Row, streams: Sequence[int], s: Settings) -> tuple[list[Row], dict[str, Row]]:
    """All runs, and of each peer the shortest run there is (one stream, two chunks): what a start costs."""
    shortest, rows = {}, []
    for name, program in programs.items():
        say(f"{name}, shortest run …")
        run = trial(PEERS[name], program, 1, 2, s)
        shortest[name] = {k: run[k] for k in ("wall_s", "cpu_s", "chunks_sent", "failed")}
    for n in streams:
        for name, program in programs.items():
            say(f"{name}, {n:,} streams …")
            row, base = trial(PEERS[name], program, n, tokens_of(s), s), shortest[name]
            if row["cpu_s"] is not None and base["cpu_s"] is not None and row["chunks_sent"] > base["chunks_sent"]:
                more = (row["cpu_s"] - base["cpu_s"]) * 1e6 / (row["chunks_sent"] - base["chunks_sent"])
                row["cpu_us_per_chunk_marginal"] = more if more > 0 else None  # lost in the noise of the start
            rows.append(row)
    ours = {r["streams"]: r for r in rows if r["peer"] == "whywait"}
    for row in rows:
        base = ours.get(row["streams"], {})
        row["ratio_to_whywait"] = {k: ratio(row[k], base.get(k)) for k in RATIOS}
    return rows, shortest


# --- for people


def ms(value: float | None) -> str:
    return us(None if value is None else value * 1e3)


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s" if value < 10 else f"{value:,.0f} s"


def size(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e6:,.0f} MB"


def better(result: Row) -> list[str]:
    """Where a peer has the better figure, in words."""
    out = []
    names = {**RATIOS, **COSTS}
    groups = [(f"at {n:,} streams", [r for r in result["rows"] if r["streams"] == n], RATIOS)
              for n in dict.fromkeys(r["streams"] for r in result["rows"])]  # fmt: skip
    groups.append(("", result["costs"], COSTS))
    for where, rows, keys in groups:
        ours = next((r for r in rows if r["peer"] == "whywait"), {})
        for row in rows:
            for key in keys:
                mine, its = ours.get(key), row.get(key)
                if key in COSTS and cost_ratio(row, ours, key) is None:
                    continue
                if row["peer"] == "whywait" or mine is None or its is None or its == mine:
                    continue
                if (its > mine) == (key in MORE_IS_BETTER):
                    note = " (of the mean gap alone)" if key == "gap_error_ms" and row["gap_mean_only"] else ""
                    out.append(f"{row['peer']} is better in {names[key]}{note} {where}".rstrip()
                               + f": {times(its / mine) if mine else its} whywait's")  # fmt: skip
    return out


def run_table(rows: Sequence[Row], markdown: bool) -> str:
    head = ("streams", "peer", "TTFT p50 said", "true", "largest error", "gap p50 said", "true", "largest error",
            "CPU/chunk", "without start-up", "chunks/s", "kept up")  # fmt: skip
    lines = []
    for r in rows:
        of = "mean" if r["gap_mean_only"] else "p50"
        mark = "†" if r["gap_mean_only"] else ""
        t, g = r["ttft_ms"], r["gap_ms"]
        lines.append([
            f"{r['streams']:,}", r["peer"], ms(t["client"]["p50"]), ms((t["stub"] or {}).get("p50")),
            ms(r["ttft_error_ms"]), ms(g["client"][of]) + mark, ms((g["stub"] or {}).get(of)) + mark,
            ms(r["gap_error_ms"]) + mark, us(r["cpu_us_per_chunk"]), us(r["cpu_us_per_chunk_marginal"]),
            count(r["chunks_per_s"]), share(r["kept_share"]),
        ])  # fmt: skip
    return table(head, lines, markdown)


def ratio_table(rows: Sequence[Row], markdown: bool) -> str:
    lines = [
        [f"{r['streams']:,}", r["peer"], *(times(r["ratio_to_whywait"][k]) for k in RATIOS)]
        for r in rows
        if r["peer"] != "whywait" and any(v is not None for v in r["ratio_to_whywait"].values())
    ]
    return table(("streams", "as multiples of whywait's", *RATIOS.values()), lines, markdown) if lines else ""


def cost_table(costs: Sequence[Row], markdown: bool) -> str:
    head = ("peer", "version", "size", "packages", "install time", "start-up", "shortest run", "its CPU",
            "peak chunks/s")  # fmt: skip
    lines = [[c["peer"], c["version"] or "–", size(c["install_bytes"]), count(c["packages"]), seconds(c["install_s"]),
              seconds(c["help_s"]), seconds(c["shortest_s"]), seconds(c["shortest_cpu_s"]),
              ("≥ " if c["peak_limit"] == "range" else "") + count(c["peak_chunks_per_s"])] for c in costs]  # fmt: skip
    return table(head, lines, markdown)


def cost_ratio(its: Row, ours: Row, key: str) -> float | None:
    if key == "peak_chunks_per_s" and "range" in (its["peak_limit"], ours.get("peak_limit")):
        return None  # a bound of what either takes, not the most
    return ratio(its[key], ours.get(key))


def cost_ratios(costs: Sequence[Row], markdown: bool) -> str:
    ours = next((c for c in costs if c["peer"] == "whywait"), {})
    lines = [[c["peer"], "", *(times(cost_ratio(c, ours, k)) for k in COSTS)] for c in costs if c["peer"] != "whywait"]
    return table(("as multiples of whywait's", "", *COSTS.values()), lines, markdown) if lines and ours else ""


def render(result: Row, markdown: bool) -> str:
    rows, costs = [r for r in result["rows"] if not r["failed"]], result["costs"]
    parts = [machine_line(result), *(f"{'**Warning:** ' if markdown else 'WARNING: '}{w}" for w in result["warnings"])]
    if rows:
        parts += [run_table(rows, markdown), ratio_table(rows, markdown)]
        parts.append("Errors are the largest of p50, p95 and mean for TTFT, of p50, p99 and mean for gaps, against "
                     "what the stub did between reading the request and sending; CPU is of the whole program and its "
                     "children, then without that of its shortest run.")  # fmt: skip
    if any(r["gap_mean_only"] for r in rows):
        parts.append("† it reports no gap but the mean of each request's: said, true and error are of the mean")
    if costs:
        parts += [cost_table(costs, markdown), cost_ratios(costs, markdown)]
    found = better(result)
    if any(r["peer"] != "whywait" for r in [*rows, *costs]):
        parts.append("Where a peer is better: " + ("; ".join(found) if found else "in nothing measured here") + ".")
    parts += [f"{r['peer']} at {r['streams']:,} streams failed: {r['failed']}" for r in result["rows"] if r["failed"]]
    parts += [f"{name} was left out: {why}" for name, why in result["absent"].items()]
    return "\n\n".join(p for p in parts if p)


# --- command line


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--venvs", type=Path, required=True, metavar="DIR", help="a virtual environment for each, by name")
    p.add_argument("--found", action="append", default=[], metavar="NAME=DIR", help="an environment that is elsewhere")
    p.add_argument("--python", action="append", default=[], metavar="NAME=PATH",
                   help="make its environment with this interpreter (inference-perf wants 3.12)")  # fmt: skip
    p.add_argument("--no-install", action="store_true", help="only what is there already")
    p.add_argument("--peers", default=",".join(PEERS), help=f"some of {', '.join(PEERS)}")
    p.add_argument("--streams", default="16,64,256", help="numbers of streams, with commas")
    p.add_argument("--seconds", type=float, default=5.0, help="how long each stream lasts")
    p.add_argument("--rate", type=float, default=50.0, help="chunks per second of each stream")
    p.add_argument("--peak", type=int, default=0, metavar="N", help=f"find the most chunks/s, with up to N ≤ {MOST} "
                   "streams (takes minutes)")  # fmt: skip
    p.add_argument("--json", metavar="FILE", help="write every figure there")
    p.add_argument("--markdown", action="store_true", help="print the tables of docs/benchmarks.md")
    args = p.parse_args(argv)
    try:
        args.streams = [int(n) for n in args.streams.split(",")]
        args.found, args.python = (dict(pair.split("=", 1) for pair in pairs) for pairs in (args.found, args.python))
    except ValueError:
        p.error("--streams wants numbers with commas between, --found and --python NAME=PATH")
    args.peers = args.peers.split(",")
    if unknown := (set(args.peers) | set(args.found) | set(args.python)) - set(PEERS):
        p.error(f"unknown peer {sorted(unknown)[0]!r}; known: {', '.join(PEERS)}")
    if min(args.streams) < 1 or args.seconds <= 0 or not 0 < args.rate <= 10_000 or not 0 <= args.peak <= MOST:
        p.error(f"--streams, --seconds and --rate must be positive, the rate at most 10,000, --peak at most {MOST:,}")
    return args


def warnings(rows: Sequence[Row], load: float, s: Settings) -> list[str]:
    cores, out = os.cpu_count() or 1, []
    if load > BUSY_LOAD * cores:
        out.append(f"load average {load:.2f} on {cores} CPUs at start: the machine is busy, so these figures are noisy")
    worst_share = max((r["others_cpu_share"] or 0 for r in rows), default=0)
    if worst_share > BUSY_SHARE:
        out.append(f"other processes used up to {worst_share:.0%} of the CPU time during a trial")
    if s.client_cpus[:1] == s.stub_cpus[:1]:
        out.append("client and stub are not on CPUs of their own, so each makes the other late")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    s = Settings(args.seconds, args.rate, None, *cpu_split())
    load = os.getloadavg()
    costs: list[Row] = []
    for name in args.peers:
        where = Path(args.found.get(name, args.venvs / name)).absolute()
        costs.append(environment(PEERS[name], where, args.python.get(name, sys.executable),
                                 not args.no_install and name not in args.found))  # fmt: skip
    absent = {c["peer"]: c["absent"] for c in costs if c["absent"]}
    costs = [c for c in costs if not c["absent"]]
    programs = {c["peer"]: str(Path(c["environment"], "bin", PEERS[c["peer"]].program)) for c in costs}
    rows, shortest = compare(programs, args.streams, s)
    longer = replace(s, seconds=max(s.seconds, 3.0))  # a peak needs whole seconds
    peaks = {name: PeakSearch(PEERS[name], p, longer, args.peak).run() for name, p in programs.items() if args.peak}
    for c in costs:
        peak = peaks.get(c["peer"], {})
        c |= {"shortest_s": shortest[c["peer"]]["wall_s"], "shortest_cpu_s": shortest[c["peer"]]["cpu_s"],
              "peak_chunks_per_s": peak.get("chunks_per_s_per_core"), "peak_limit": peak.get("limit")}  # fmt: skip
    steps = [step for peak in peaks.values() for step in peak["steps"]]
    result: Row = {
        "benchmark": "peers",
        "version": VERSION,
        "taken": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": host.facts(),
        "load_average": load,
        "settings": {**asdict(s), "peers": args.peers, "streams": args.streams, "ttft_ms": TTFT_MS, "peak": args.peak},
        "rows": rows,
        "shortest": shortest,
        "peaks": {
            name: {"limit": p["limit"], "streams": p["streams"], "steps": p["steps"]} for name, p in peaks.items()
        },
        "costs": costs,
        "absent": absent,
        "warnings": warnings([*rows, *steps], load[0], s),
    }
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    print(render(result, args.markdown))
    return 1 if any(r["failed"] for r in rows) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(serve(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
