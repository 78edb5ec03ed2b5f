"""Small servers for tests: pages of metrics that grow as told, and an imitation of the Prometheus HTTP API."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, str, bytes]
Ask = Callable[[str, dict[str, str], Mapping[str, str]], Answer]


@contextmanager
def serving(ask: Ask) -> Iterator[str]:
    """Base URL of a server that answers GET and POST (forms) by ``ask(path, form, headers)``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            self._answer(parts.path, parts.query)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(urlsplit(self.path).path, body.decode())

        def _answer(self, path: str, form: str) -> None:
            fields = {k: v[0] for k, v in parse_qs(form).items()}
            status, kind, body = ask(path, fields, {k.lower(): v for k, v in self.headers.items()})
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def vllm_page(running: float, waiting: float, done: float, kv: float = 0.5, tokens_each: int = 20) -> str:
    """A vLLM page after ``done`` requests, each of 10 prompt tokens, queue 0.3 s, prefill 0.1 s, decode 0.6 s."""
    label = 'engine="0",model_name="m"'
    lines = [
        f"vllm:num_requests_running{{{label}}} {running}",
        f"vllm:num_requests_waiting{{{label}}} {waiting}",
        f"vllm:kv_cache_usage_perc{{{label}}} {kv}",
        f'vllm:request_success_total{{{label},finished_reason="length"}} {done}',
        f"vllm:prompt_tokens_total{{{label}}} {10 * done}",
        f"vllm:generation_tokens_total{{{label}}} {tokens_each * done}",
        f"vllm:num_preemptions_total{{{label}}} 0",
    ]
    for name, each in (("time_to_first_token_seconds", 0.4), ("request_queue_time_seconds", 0.3),
                       ("request_prefill_time_seconds", 0.1), ("request_decode_time_seconds", 0.6),
                       ("e2e_request_latency_seconds", 1.0)):  # fmt: skip
        lines += [f'vllm:{name}_bucket{{{label},le="{le}"}} {done if float(le) >= each else 0}'
                  for le in ("0.05", "0.25", "0.5", "2.0", "+Inf")]  # fmt: skip
        lines += [f"vllm:{name}_sum{{{label}}} {each * done}", f"vllm:{name}_count{{{label}}} {done}"]
    return "\n".join(lines) + "\n"


@contextmanager
def engine(page: Callable[[float], str], seen: list[Mapping[str, str]] | None = None) -> Iterator[str]:
    """A service that only has a model list and a metrics page; ``page`` is told the seconds since it started."""
    began = time.monotonic()

    def ask(path: str, _form: dict[str, str], headers: Mapping[str, str]) -> Answer:
        if seen is not None:
            seen.append({"path": path, **headers})
        if path == "/metrics":
            return 200, "text/plain", page(time.monotonic() - began).encode()
        if path == "/v1/models":
            return 200, "application/json", json.dumps({"data": [{"id": "m", "owned_by": "vllm"}]}).encode()
        return 404, "application/json", b"{}"

    with serving(ask) as url:
        yield url


class FakePrometheus:
    """Of its API what we use: instant queries with one range selector, query_range, label values with match[]."""

    def __init__(self, scraped: dict[str, list[tuple[float, str]]], token: str = "", refuse_raw: bool = False) -> None:
        """``scraped``: instance -> (Unix time, page) in order."""
        from whywait.probe.prometheus import parse

        self.token, self.refuse_raw = token, refuse_raw
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        for instance, pages in scraped.items():
            for t, text in pages:
                scrape = {"job": "svc", "instance": instance}
                for s in parse(text).samples:
                    self._add({"__name__": s.name, **s.labels, **scrape}, t, s.value)
                self._add({"__name__": "up", **scrape}, t, 1.0 if text else 0.0)

    def _add(self, labels: dict[str, str], t: float, value: float) -> None:
        self.series.setdefault(tuple(sorted(labels.items())), []).append((t, value))

    def __call__(self, path: str, form: dict[str, str], headers: Mapping[str, str]) -> Answer:
        self.asked.append((path, form))
        if self.token and headers.get("authorization") != f"Bearer {self.token}":
            return 401, "text/plain", b"no"
        if path == "/api/v1/label/__name__/values":
            lo, hi = float(form["start"]), float(form["end"])
            found = {dict(k)["__name__"] for k in self._matching(form["match[]"]) if self._between(k, lo, hi)}
            return self._data(sorted(found))
        if path == "/api/v1/query":
            selector, _, length = form["query"].rpartition("[")
            if self.refuse_raw:
                return self._error("query processing would load too many samples into memory")
            if not length.endswith("s]"):
                return self._error("no range")
            end = float(form["time"])
            return self._matrix({k: self._between(k, end - float(length[:-2]), end) for k in self._matching(selector)})
        if path == "/api/v1/query_range":
            start, end, step = (float(form[k]) for k in ("start", "end", "step"))
            grid = [start + i * step for i in range(int((end - start) / step) + 1)]
            return self._matrix({k: self._on(k, grid) for k in self._matching(form["query"])})
        return 404, "text/plain", b"page not found"

    def _matching(self, selector: str) -> list[tuple[tuple[str, str], ...]]:
        name, inside = re.fullmatch(r"(\w*)(?:\{(.*)\})?", selector, re.S).groups()  # type: ignore[union-attr]
        wanted = [("__name__", "=", name)] if name else []
        for key, how, text in re.findall(r'(\w+)(=~|=)"((?:[^"\\]|\\.)*)"', inside or ""):
            wanted.append((key, how, text.replace("\\\\", "\\")))
        hits = {"=": lambda have, want: have == want, "=~": lambda have, want: re.fullmatch(want, have) is not None}
        return [k for k in self.series if all(hits[how](dict(k).get(key, ""), text) for key, how, text in wanted)]

    def _between(self, key: tuple[tuple[str, str], ...], start: float, end: float) -> list[tuple[float, float]]:
        return [(t, v) for t, v in self.series[key] if start <= t <= end]

    def _on(self, key: tuple[tuple[str, str], ...], grid: list[float]) -> list[tuple[float, float]]:
        out = []
        for t in grid:
            before = [v for at, v in self.series[key] if t - 300 < at <= t]
            if before:
                out.append((t, before[-1]))
        return out

    def _matrix(self, found: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]]) -> Answer:
        result = [{"metric": dict(k), "values": [[t, f"{v:g}" if v < 1e5 else repr(v)] for t, v in values]}
                  for k, values in found.items() if values]  # fmt: skip
        return self._data({"resultType": "matrix", "result": result})

    def _data(self, data: object) -> Answer:
        return 200, "application/json", json.dumps({"status": "success", "data": data}).encode()

    def _error(self, said: str) -> Answer:
        return (
            422,
            "application/json",
            json.dumps({"status": "error", "errorType": "execution", "error": said}).encode(),
        )
