"""What ``whywait record`` adds to a request: ``python benchmarks/record_latency.py [ROUNDS]`` (default 6).

The same streams against the stub, directly and through the proxy, in turns within one run: a busy machine is as busy
for both. Per chunk: from the stub's own send stamp (it is in every chunk) to the kernel's receive stamp at the client.
First token: from sent to the first token, less the time the stub was told to take. Quantiles are of each round; printed
are the medians over rounds, and the median of the differences of the two turns of a round: that is what the proxy adds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from whywait.core.events import Accepted, Failed, Finished, Sent
from whywait.load.stub import StubProcess
from whywait.net.client import Call, Client
from whywait.net.clock import Clock
from whywait.net.dialect import chat_body
from whywait.net.endpoint import parse_url
from whywait.units import NS_PER_MS

TTFT_MS, GAP_MS, TOKENS = 60.0, 20.0, 40
CASES = ((1, 100), (16, 100), (64, 100), (1, 8000), (16, 8000), (64, 8000))  # streams, words of the prompt


class Seen:
    """First tokens and chunk delays of one turn, ns."""

    def __init__(self) -> None:
        self.sent: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.chunks: dict[int, list[int]] = {}
        self.truth: dict[int, list[int]] = {}
        self.bad = 0

    def event(self, e: Sent | Accepted | Finished | Failed) -> None:
        if isinstance(e, Sent):
            self.sent[e.id] = e.t_ns
        elif isinstance(e, Failed):
            self.bad += 1

    def chunk(self, id_: int, t_ns: int, t_low_ns: int, meta: int) -> None:  # noqa: ARG002
        if meta & 0b1110:  # no role chunk
            self.first.setdefault(id_, t_ns)
            self.chunks.setdefault(id_, []).append(t_ns)

    def tap(self, id_: int) -> Any:
        mine = self.truth.setdefault(id_, [])
        return lambda obj: mine.append(obj["stub_ns"]) if "stub_ns" in obj else None

    def delays(self, zero: int) -> tuple[np.ndarray, np.ndarray]:
        first = np.array([self.first[i] - self.sent[i] for i in self.first]) / NS_PER_MS - TTFT_MS
        parts = [
            np.array(t) - (np.array(self.truth[i]) - zero)
            for i, t in self.chunks.items()
            if len(t) == len(self.truth[i])
        ]
        return first, np.concatenate(parts) / NS_PER_MS


def turn(url: str, streams: int, words: int) -> tuple[np.ndarray, np.ndarray]:
    clock, seen = Clock(), Seen()
    client = Client(parse_url(url), seen, clock)
    options = {"stream": True, "stub": {"ttft_ms": TTFT_MS, "gap_ms": GAP_MS, "tokens": TOKENS}}
    try:
        client.warm(streams)
        start = clock.now() + 20 * NS_PER_MS
        # Bodies are made before, and differ, as prompts do; starts are spread over a gap, as they are in real traffic.
        bodies = [chat_body("stub", " ".join(f"w{k}{i % 97}" for i in range(words)), TOKENS, options)
                  for k in range(streams)]  # fmt: skip
        start = max(start, clock.now() + NS_PER_MS)
        sent = 0
        while sent < streams or client.in_flight:
            due = start + round(sent * GAP_MS * NS_PER_MS / streams)
            if sent < streams and clock.now() >= due:
                client.send(Call(sent, sent, due, bodies[sent], tap=seen.tap(sent)))
                sent += 1
                continue
            client.poll(max(0, due - clock.now()) if sent < streams else 100 * NS_PER_MS)
    finally:
        client.close()
    if seen.bad:
        raise SystemExit(f"{seen.bad} of {streams} requests failed")
    return seen.delays(clock.zero_unix_ns)


def case(direct: str, proxied: str, streams: int, words: int, rounds: int) -> dict[str, Any]:
    figures: dict[str, list[list[float]]] = {"first": [], "chunk": []}
    turn(direct, 1, words), turn(proxied, 1, words)  # not counted
    for r in range(rounds):
        found = {}
        for which in ("direct", "proxied") if r % 2 else ("proxied", "direct"):
            found[which] = turn(direct if which == "direct" else proxied, streams, words)
        for i, name in enumerate(("first", "chunk")):
            a, b = (np.quantile(found[w][i], (0.5, 0.99)) for w in ("direct", "proxied"))
            figures[name].append([*a, *b])
    out: dict[str, Any] = {"streams": streams, "prompt_words": words}
    for name, rows in figures.items():
        x = np.array(rows)
        a50, a99, b50, b99 = np.median(x, axis=0)
        added = np.median(x[:, 2:] - x[:, :2], axis=0)
        out[name] = {"direct_ms": [round(a50, 3), round(a99, 3)], "proxied_ms": [round(b50, 3), round(b99, 3)],
                     "added_ms": [round(float(v), 3) for v in added]}  # fmt: skip
    return out


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    with StubProcess() as stub, tempfile.TemporaryDirectory() as tmp:
        command = [sys.executable, "-m", "whywait", "record", "--upstream", stub.url, "--out", f"{tmp}/recording"]
        proxy = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            assert proxy.stderr is not None
            proxied = proxy.stderr.readline().split()[1]  # "recording URL → …"
            print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; p50 / p99 in ms")
            print(f"{'streams':>7} {'words':>6} {'first: direct':>15} {'proxied':>15} {'added':>15}"
                  f" {'chunk: direct':>15} {'proxied':>15} {'added':>15}")  # fmt: skip
            rows = []
            for streams, words in CASES:
                rows.append(row := case(stub.url, proxied, streams, words, rounds))
                cells = [f"{v[0]:.2f} / {v[1]:.2f}" for name in ("first", "chunk") for v in row[name].values()]
                print(f"{streams:>7} {words:>6} " + " ".join(f"{c:>15}" for c in cells), flush=True)
            print(f"load of the machine {os.getloadavg()[0]:.1f} at the end")
            print(json.dumps(rows))
        finally:
            proxy.send_signal(signal.SIGINT)
            proxy.wait(20)


if __name__ == "__main__":
    main()
