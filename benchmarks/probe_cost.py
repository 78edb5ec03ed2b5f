"""What the sampler costs with every probe on: ``python benchmarks/probe_cost.py [SECONDS]``.

A stand-in engine of many threads, two replicas' vLLM pages, a DCGM page, an agent, two fake NVIDIA devices (where there
is a C compiler) and an exporter of spans; the sampler's CPU time by source, as a share of one core.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.test_gpu import DCGM, MORE, RATES, SOURCE  # noqa: E402
from tests.test_otlp import VLLM, export, span, trace  # noqa: E402

from whywait.engines import by_name  # noqa: E402
from whywait.probe.agent import Agent, serve  # noqa: E402
from whywait.probe.sampler import Config, SamplerProcess  # noqa: E402

THREADS, SPANS_PER_S = 64, 100
ENGINE = f"""
import threading, time
def work():
    while True:
        time.sleep(0.2); sum(range(20000))
for _ in range({THREADS} - 1): threading.Thread(target=work, daemon=True).start()
input()
"""


def engine_page() -> str:
    """As long as vLLM's own: every name we know, histograms of 30 buckets that grow from page to page."""
    table, n = by_name("vllm"), time.monotonic_ns() // 100_000_000
    assert table is not None
    who = 'engine="0",model_name="model"'
    lines = [f"{name}{{{who}}} {n}.0" for name in table.metrics]
    for name in table.histograms:
        lines += [f'{name}_bucket{{{who},le="{k}.0"}} {n}.0' for k in range(30)]
        lines += [
            f'{name}_bucket{{{who},le="+Inf"}} {n}.0',
            f"{name}_sum{{{who}}} {n}.5",
            f"{name}_count{{{who}}} {n}.0",
        ]
    return "\n".join(lines) + "\n"


class Pages(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = (DCGM if self.path == "/dcgm" else engine_page()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def export_spans(url: str, stop: threading.Event) -> None:
    """A batch a second, as exporters do."""
    n = 0
    while not stop.wait(1.0):
        body = export(*(span(trace(n + i), **VLLM) for i in range(SPANS_PER_S)))
        urlopen(Request(url, body, {"Content-Type": "application/x-protobuf"})).read()
        n += SPANS_PER_S


def main(seconds: float) -> None:
    folder = Path(tempfile.mkdtemp(prefix="whywait-cost-"))
    env = {}
    if cc := shutil.which("cc"):
        (folder / "nvml.c").write_text(SOURCE + RATES + MORE)
        subprocess.run([cc, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True)
        env["LD_LIBRARY_PATH"] = str(folder)
    pages = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    agent = serve(Agent(pids=(os.getpid(),)), socket.create_server(("127.0.0.1", 0)), None)
    for server in (pages, agent):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    spans = socket.create_server(("127.0.0.1", 0))
    base, stop = f"http://127.0.0.1:{pages.server_address[1]}", threading.Event()
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE) as engine:
        config = Config(
            zero_unix_ns=time.time_ns(), spool=str(folder / "spool"), engine="vllm",
            metrics_urls=(f"{base}/metrics", f"{base}/metrics"), gpu_urls=(f"{base}/dcgm",),
            agents=(f"http://127.0.0.1:{agent.server_address[1]}",), otlp_fd=spans.fileno(),
            trace_prefix="00000000000000aa", pids={"engine": (engine.pid,), "client": (os.getpid(),)},
        )  # fmt: skip
        with SamplerProcess(config, env) as sampler:
            url = f"http://127.0.0.1:{spans.getsockname()[1]}/v1/traces"
            threading.Thread(target=export_spans, args=(url, stop), daemon=True).start()
            time.sleep(2.0)
            before, first, began = cpu_s(sampler.pid or 0), last(sampler), time.monotonic()
            time.sleep(seconds)
            used, took = cpu_s(sampler.pid or 0) - before, time.monotonic() - began
            second, rows = last(sampler), sampler.rows
        stop.set()
        engine.communicate(b"\n")
    print("| source | % of a core | late p99, ms |\n|---|---|---|")
    for source in sorted(second):
        labels = f'{{"source":"{source}"}}'
        late = sorted(r["value"] for r in rows if r["name"] == "lateness_ms" and r["labels"] == labels)
        share = 100 * (second[source] - first.get(source, 0.0)) / took
        print(f"| `{source}` | {share:.2f} | {late[int(0.99 * len(late))]:.1f} |")
    print(f"| all of it, spans ({SPANS_PER_S}/s) included | {100 * used / took:.2f} | |")
    print(f"{len(rows) / (took + 2):.0f} readings/s, {(folder / 'spool').stat().st_size / (took + 2) / 1e3:.0f} kB/s")
    shutil.rmtree(folder)


def last(sampler: SamplerProcess) -> dict[str, float]:
    """CPU seconds of each source so far."""
    rows = [r for r in sampler.rows if r["source"] == "sampler" and r["name"] == "cpu_seconds_total"]
    return {str(r["labels"]).split('"')[3]: r["value"] for r in rows}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0)
