"""The clients that ``client_accuracy.py`` compares. Each runs in a process of its own: ``accuracy_clients.py FOLDER``
reads ``FOLDER/job.json``, drives its streams against the stub, and leaves ``FOLDER/trial.npz``.

Both keep, beside each stamp of theirs, the stub's own send stamp from inside that chunk, which costs either about the
same. AIPerf is another program: it is started and its export is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from whywait.analyze.latency import WITHHOLD
from whywait.analyze.streams import content, gaps
from whywait.core.columns import OUTCOMES
from whywait.core.recorder import Recorder
from whywait.core.run import Manifest
from whywait.core.schedule import Workload
from whywait.lab.cpus import pin
from whywait.load.driver import Driver, Point
from whywait.load.recipe import open_schedule
from whywait.net.client import Call, Client
from whywait.net.clock import Clock, bracket
from whywait.net.dialect import chat_body
from whywait.net.endpoint import parse_url
from whywait.units import NS_PER_MS, NS_PER_S

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
OK = OUTCOMES.index("ok")


@dataclass(frozen=True)
class Job:
    """What to drive: ``streams`` requests, started evenly over one gap, of ``tokens`` chunks each."""

    client: str
    urls: tuple[str, ...]
    streams: int
    tokens: int
    gap_ms: float
    ttft_ms: float
    cpus: tuple[int, ...] = ()

    @property
    def gap_ns(self) -> int:
        return int(self.gap_ms * NS_PER_MS)

    @property
    def body(self) -> bytes:
        return chat_body("stub", "calibration", self.tokens,
                         {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0})  # fmt: skip

    @property
    def aiperf_ramp_s(self) -> float:
        return max(self.gap_ms / 1000, self.streams / 2000)

    @property
    def patience_s(self) -> float:
        """How long a client may take before it is given up."""
        return 30 + 10 * self.tokens * self.gap_ms / 1000


@dataclass(frozen=True)
class Trial:
    """What a client saw, and what the stub said. Times are ns after the trial's own zero, content chunks are in order
    of (stream, time): ``t`` the client's stamp, ``low`` −1 or the begin of the interval (low, t] it claims, ``truth``
    when the stub sent it. By stream: ``sent`` and ``first`` by the client, ``due`` of the first chunk by the stub.
    """

    stream: Ints
    t: Ints
    low: Ints
    truth: Ints
    sent: Ints
    first: Ints
    due: Ints
    gap: Floats
    cpu_ns: int
    wall_ns: int
    streams_ok: int
    read_lag_p99_ms: float | None = None
    withheld: bool = False  # the client would not print these gaps: too many are intervals

    def save(self, path: Path) -> None:
        arrays = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {k: v for k, v in arrays.items() if not isinstance(v, np.ndarray)}
        np.savez(path, **{k: arrays[k] for k in arrays if k not in plain}, plain=np.array(json.dumps(plain)))

    @classmethod
    def load(cls, path: Path) -> Trial:
        with np.load(path) as saved:
            arrays = {k: saved[k] for k in saved.files}
        return cls(**json.loads(str(arrays.pop("plain"))), **arrays)


class Truth:
    """What the stub says of one stream: its send stamps (CLOCK_REALTIME), and when the first chunk was due."""

    def __init__(self) -> None:
        self.stamps: list[int] = []
        self.due = 0

    def see(self, obj: dict[str, Any]) -> None:
        stamp = obj.get("stub_ns")
        if stamp is not None:
            if not self.stamps:
                self.due = obj["due_ns"]
            self.stamps.append(stamp)


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


# whywait


class Tapped(Client):
    """whywait's own client as it is, with a look at each event for the stub's stamp in it."""

    truth: list[Truth]

    def send(self, call: Call) -> None:
        super().send(call._replace(tap=self.truth[call.id].see))


def drive_whywait(job: Job, folder: Path) -> Trial:
    """The way ``whywait run`` goes: driver, client, recorder with its spool on disk, then the Run and its analysis."""
    clock = Clock()
    manifest = Manifest(zero_unix_ns=clock.zero_unix_ns)
    recorder = Recorder(folder / "run", manifest)
    client = Tapped(parse_url(job.urls[0]), recorder, clock)
    client.truth = [Truth() for _ in range(job.streams)]
    for i, url in enumerate(job.urls, 1):  # connections are opened ahead, as many to each stub
        client.endpoint = parse_url(url)
        client.warm(job.streams * i // len(job.urls))
    start_rate = job.streams * NS_PER_S / job.gap_ns
    schedule = open_schedule(Workload(arrivals="constant"), start_rate, job.streams)
    limit = clock.now() + round(job.patience_s * NS_PER_S)
    body = job.body
    driver = Driver(client, recorder, clock, lambda _row, _schedule: body,
                    stop=lambda _p: "far behind" if clock.now() > limit else "")  # fmt: skip
    driver.run(Point(0, "rate", start_rate, schedule))
    lag = client.facts()["read_lag_ms"]["p99"]
    run = recorder.finish(manifest)
    client.close()
    seen = content(run)
    between = gaps(seen)
    point = run.points.rows()[0]
    said = [np.array(truth.stamps, dtype=np.int64) for truth in client.truth]
    return matched(
        (seen.row.astype(np.int64), seen.t.astype(np.int64), np.where(seen.coalesced, seen.low, -1).astype(np.int64)),
        said,
        clock.zero_unix_ns,
        sent=run.requests["sent_ns"].astype(np.int64),
        first=np.nan_to_num(run.requests["first_ns"], nan=-1).astype(np.int64),
        due=np.array([truth.due for truth in client.truth], dtype=np.int64) - clock.zero_unix_ns,
        gap=between.value,
        cpu_ns=driver.cpu_ns[0],
        wall_ns=point["end_ns"] - point["start_ns"],
        streams_ok=int((run.requests["outcome"] == OK).sum()),
        read_lag_p99_ms=lag,
        withheld=bool(len(between.coalesced) and between.coalesced.mean() > WITHHOLD),
    )


def matched(chunks: tuple[Ints, Ints, Ints], said: Sequence[Ints], zero_unix_ns: int, **rest: Any) -> Trial:
    """Pair each chunk with the stub's stamp in it. A stream whose numbers differ is left out, so counts as lost."""
    stream, t, low = chunks
    counts = np.bincount(stream, minlength=len(said))
    agree = counts == [len(s) for s in said]
    keep = agree[stream]
    truth = np.concatenate([s for s, ok in zip(said, agree, strict=True) if ok] or [np.zeros(0, np.int64)])
    return Trial(stream[keep], t[keep], low[keep], truth - zero_unix_ns, **rest)


# aiohttp


@dataclass
class Answer:
    """One stream as a plain loop sees it; times are time.monotonic_ns()."""

    truth: Truth
    t: list[int]
    sent: int = 0
    ok: bool = False


async def read_answer(session: Any, url: str, body: bytes, answer: Answer) -> None:
    """POST, and stamp each event when it has been read: what a careful script does."""
    see, t = answer.truth.see, answer.t
    headers = {"Content-Type": "application/json"}
    answer.sent = time.monotonic_ns()
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
        rest = b""
        async for piece in response.content.iter_any():
            now = time.monotonic_ns()
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: "):
                    continue
                if event == b"data: [DONE]":
                    answer.ok = True
                    continue
                obj = orjson.loads(event[6:])
                if obj["choices"] and obj["choices"][0]["delta"].get("content"):
                    t.append(now)
                    see(obj)


async def start_at(due: int, session: Any, url: str, body: bytes, answer: Answer) -> None:
    await asyncio.sleep((due - time.monotonic_ns()) / NS_PER_S)
    await read_answer(session, url, body, answer)


async def drive_answers(job: Job) -> tuple[list[Answer], int, int, int]:
    """(answers, start, end, CPU ns). Given the same favours as our own: connections open, the collector off."""
    import aiohttp

    answers = [Answer(Truth(), []) for _ in range(job.streams)]
    urls = [job.urls[i % len(job.urls)] for i in range(job.streams)]
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        warm = dataclasses.replace(job, tokens=1).body
        await asyncio.gather(*(read_answer(session, url, warm, Answer(Truth(), [])) for url in urls))
        with no_collector():
            cpu = time.process_time_ns()
            start = time.monotonic_ns() + 20 * NS_PER_MS
            tasks = [
                asyncio.create_task(start_at(start + i * job.gap_ns // job.streams, session, url, job.body, answer))
                for i, (url, answer) in enumerate(zip(urls, answers, strict=True))
            ]
            await asyncio.wait(tasks, timeout=job.patience_s)
            end, cpu = time.monotonic_ns(), time.process_time_ns() - cpu
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answers, start, end, cpu


def drive_aiohttp(job: Job, _folder: Path) -> Trial:
    answers, start, end, cpu = asyncio.run(drive_answers(job))
    counts = [len(a.t) for a in answers]
    stream = np.repeat(np.arange(job.streams), counts)
    t = np.array([x for a in answers for x in a.t], dtype=np.int64) - start
    zero_unix_ns = start + bracket()[0]
    return matched(
        (stream, t, np.full(len(t), -1, np.int64)),
        [np.array(a.truth.stamps, dtype=np.int64) for a in answers],
        zero_unix_ns,
        sent=np.array([a.sent for a in answers], dtype=np.int64) - start,
        first=np.array([a.t[0] - start if a.t else -1 for a in answers], dtype=np.int64),
        due=np.array([a.truth.due for a in answers], dtype=np.int64) - zero_unix_ns,
        gap=np.diff(t)[np.diff(stream) == 0].astype(np.float64),
        cpu_ns=cpu,
        wall_ns=end - start,
        streams_ok=sum(a.ok for a in answers),
    )


DRIVERS: dict[str, Callable[[Job, Path], Trial]] = {"whywait": drive_whywait, "aiohttp": drive_aiohttp}


def run_trial(job: Job, folder: Path) -> Trial:
    """Run one of ``DRIVERS`` in a process of its own.

    Raises:
        RuntimeError: it failed; the message is its last line.
    """
    (folder / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=job.patience_s + 60, check=False)
    if done.returncode:
        raise RuntimeError(f"{job.client}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return Trial.load(folder / "trial.npz")


# AIPerf

TOKENIZER: dict[str, Any] = {
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
}  # fmt: skip


def run_aiperf(binary: str, job: Job, folder: Path) -> list[dict[str, Any]]:
    """Records of AIPerf's per-request export (``profile_export.jsonl``), the warm-up left out.

    The load is as near to the others' as its flags allow: one request per stream, connections opened by a warm-up,
    tokens counted by the server (its loader still wants some tokenizer). Starts are spread over at least one gap, and
    over more where the stub would need so long to take them all: the timetable must stay the truth.

    Raises:
        RuntimeError: it failed; the message says where its log is.
    """
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "prompts.jsonl").write_text('{"text": "calibration"}\n' * job.streams)
    streams, out = str(job.streams), folder / "aiperf"
    command = [
        binary, "profile", "--model", "stub", "--endpoint-type", "chat", "--streaming", "--url", job.urls[0],
        "--input-file", str(folder / "prompts.jsonl"), "--custom-dataset-type", "single_turn",
        "--tokenizer", str(folder / "tokenizer"), "--use-server-token-count",
        "--extra-inputs", json.dumps({"max_tokens": job.tokens}),
        "--concurrency", streams, "--request-count", streams, "--warmup-request-count", streams,
        "--request-rate", f"{job.streams / job.aiperf_ramp_s:g}", "--request-rate-mode", "constant",
        "--export-level", "records", "--output-artifact-dir", str(out), "--ui", "none",
        "--no-server-metrics", "--no-gpu-telemetry",
    ]  # fmt: skip
    log = folder / "aiperf.log"
    before = os.sched_getaffinity(0) if job.cpus else set()
    pin(job.cpus)  # its many processes inherit this
    try:
        with log.open("wb") as f:
            code = subprocess.run(command, stdout=f, stderr=f, timeout=job.patience_s + 120, check=False).returncode
    finally:
        pin(tuple(before))
    export = out / "profile_export.jsonl"
    if code or not export.exists():
        tail = [line for line in log.read_text(errors="replace").splitlines() if " ERROR " in line][-1:] or ["no log"]
        raise RuntimeError(f"aiperf: exit code {code}; {tail[0][:300]}")
    records = [json.loads(line) for line in export.read_text().splitlines()]
    return [r for r in records if r["metadata"]["benchmark_phase"] == "profiling"]


def main(folder: Path) -> None:
    raw: dict[str, Any] = json.loads((folder / "job.json").read_text())
    job = Job(**{**raw, "urls": tuple(raw["urls"]), "cpus": tuple(raw["cpus"])})
    pin(job.cpus)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    DRIVERS[job.client](job, folder).save(folder / "trial.npz")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
