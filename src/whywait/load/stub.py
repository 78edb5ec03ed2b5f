"""A stub LLM service whose truth is known: an absolute timetable, a send stamp in every chunk, faults on demand.

``python -m whywait.load.stub --port 0`` prints ``{"port": …, "pid": …}`` and serves. Chunk *i* of a stream is due at
``accepted + ttft + i × gap``, however late the ones before it went; each content event says when it was due
(``due_ns``) and when it was sent (``stub_ns``), both CLOCK_REALTIME, and how many tokens there are so far (``stub_n``):
so whoever receives it can work out the error of its own stamps, and what it lost.
"""

from __future__ import annotations

import argparse
import gc
import hmac
import ipaddress
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import orjson

import whywait
from whywait.errors import InternalError, UsageError, WhywaitError
from whywait.load.stub_plan import Ask, Options, Plan, parse_fault, read_ask
from whywait.load.stub_stream import Stream
from whywait.net.dialect import PATHS
from whywait.net.limits import many_sockets
from whywait.net.reply import error
from whywait.net.serve import Reply, Request, Server

COUNTERS = ("prompt_tokens_total", "prompt_tokens_cached_total", "prompt_seconds_total", "tokens_predicted_total",
            "tokens_predicted_seconds_total")  # fmt: skip

DIALECTS = {f"/v1/{path}": dialect for dialect, path in PATHS.items()}


class Stub:
    """The service: routes, slots, counters."""

    def __init__(self, options: Options) -> None:
        self.options = options
        parse_fault(options.plan.fault)
        tls = None
        if options.tls_cert:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(options.tls_cert, options.tls_key or None)
        self.server = Server(self.handle, options.host, options.port, tls)
        self.active: set[Stream] = set()
        self.queue: deque[Stream] = deque()
        self.requests = self.finished = self.gone = self.refused = 0
        self._totals = dict.fromkeys(COUNTERS, 0.0)
        self._seen: set[str] = set()  # every prefix of every prompt, where the stub has a prefix cache
        self._admitting = False
        self._pages: dict[str, Callable[[], bytes]] = {
            "/health": lambda: b'{"status":"ok"}',
            "/v1/models": lambda: orjson.dumps({"object": "list", "data": [{"id": options.model, "object": "model"}]}),
            "/props": lambda: orjson.dumps({"total_slots": options.slots or None, "model_alias": options.model}),
            "/slots": lambda: orjson.dumps(self._slots()),
            "/stub": lambda: orjson.dumps(self.truth()),
        }

    def handle(self, request: Request, reply: Reply) -> None:
        key, path = self.options.api_key, request.path
        given = request.headers.get("authorization", "")
        if key and path.startswith("/v1/") and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            self._refuse(reply, 401, "Invalid API key", "authentication_error")
        elif request.method == "POST" and path in DIALECTS:
            self._generate(request, reply)
        elif request.method in ("GET", "HEAD") and path in self._pages:
            reply.send(200, self._pages[path]())
        elif request.method in ("GET", "HEAD") and path == "/metrics":
            reply.send(200, self.metrics(), "text/plain; version=0.0.4")
        else:
            self._refuse(reply, 404, "File Not Found", "not_found_error")

    def _refuse(self, reply: Reply, code: int, message: str, kind: str = "server_error", retry_s: int = 0) -> None:
        headers = {"Retry-After": str(retry_s)} if retry_s else {"WWW-Authenticate": "Bearer"} if code == 401 else {}
        self.refused += 1
        reply.send(code, orjson.dumps(error(message, kind, code)), headers=headers)

    def _generate(self, request: Request, reply: Reply) -> None:
        options, plan = self.options, self.options.plan
        self.requests += 1
        if self.requests % options.fault_every:
            plan = replace(plan, fault="")
        try:
            ask = read_ask(request.body, DIALECTS[request.path], plan, options.model)
        except ValueError as exc:
            self._refuse(reply, 400, str(exc), "invalid_request_error")
            return
        if options.prefix_cache:
            ask = self._cached(ask)
        fault, number = ask.fault, ask.number
        if fault == "wrong_model" or (options.strict_model and ask.model != options.model):
            self._refuse(reply, 404, f"The model `{ask.model}` does not exist.", "NotFoundError")
        elif fault.startswith("http_"):
            code = int(fault[5:])
            self._refuse(reply, code, "the stub was told to fail", retry_s=(number or 1) if code in (429, 503) else 0)
        elif fault == "html":
            reply.send(number or 200, b"<!doctype html><title>Welcome</title><p>Not an API.", "text/html")
        elif fault != "hang" or number is not None:  # without a number it never answers at all
            self._admit(Stream(self, ask, reply, self.requests))

    def _cached(self, ask: Ask) -> Ask:
        """As much of the prompt as an earlier one began with costs no prefill, in whole blocks."""
        size = self.options.prefix_cache
        words = ask.text.split()
        prefixes = [" ".join(words[:n]) for n in range(size, len(words) + 1, size)]
        hit = next((n for n, prefix in enumerate(prefixes) if prefix not in self._seen), len(prefixes))
        self._seen.update(prefixes)
        return replace(ask, plan=replace(ask.plan, cached_tokens=hit * size))

    def _admit(self, stream: Stream | None = None) -> None:
        """Start what has a slot. Starting may end a stream at once (its client has gone), which comes back here."""
        slots = self.options.slots or sys.maxsize
        if stream:
            stream.waited = bool(self.queue) or len(self.active) >= slots
            self.queue.append(stream)
        if self._admitting:
            return
        self._admitting = True
        try:
            while self.queue and len(self.active) < slots:
                stream = self.queue.popleft()
                self.active.add(stream)
                stream.start()
        finally:
            self._admitting = False

    def release(self, stream: Stream, gone: bool = False) -> None:
        self.finished += not gone
        self.gone += gone
        if stream in self.active:
            self.active.remove(stream)
            for name, value in stream.spent().items():
                self._totals[name] += value
        else:
            self.queue.remove(stream)
        self._admit()

    # --- pages

    def truth(self) -> dict[str, Any]:
        """What a client's own account must agree with."""
        totals = self._totals.copy()
        for stream in self.active:
            for name, value in stream.spent().items():
                totals[name] += value
        counts = {name: getattr(self, name) for name in ("requests", "finished", "gone", "refused")}
        return {**counts, "active": len(self.active), "queued": len(self.queue), **totals}

    def metrics(self) -> bytes:
        """As llama.cpp's server writes them, as far as the stub has a truth for them."""
        truth = self.truth()
        lines = [f"# TYPE llamacpp:{name} counter\nllamacpp:{name} {truth[name]:.10g}" for name in COUNTERS]
        for name, value in (("requests_processing", truth["active"]), ("requests_deferred", truth["queued"])):
            lines.append(f"# TYPE llamacpp:{name} gauge\nllamacpp:{name} {value}")
        return ("\n".join(lines) + "\n").encode()

    def _slots(self) -> list[dict[str, Any]]:
        busy = sorted(self.active, key=lambda stream: stream.serial)
        out = [{"id": i, "is_processing": True, "id_task": s.serial, "n_decoded": s.n} for i, s in enumerate(busy)]
        return out + [{"id": i, "is_processing": False} for i in range(len(busy), self.options.slots)]


class StubThread:
    """The stub on a thread of this process, for tests: ``with StubThread(Options(…)) as s: s.url``."""

    def __init__(self, options: Options | None = None) -> None:
        self.stub = Stub(options or Options())
        self.url = self.stub.server.url
        self._thread = threading.Thread(target=self.stub.server.run, name="whywait-stub", daemon=True)

    def __enter__(self) -> StubThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stub.server.stop()
        self._thread.join()


class StubProcess:
    """The stub as its own process, on own CPUs where asked: ``with StubProcess("--slots", "4", cpus={0}) as s:``."""

    def __init__(self, *flags: str, cpus: Iterable[int] | None = None) -> None:
        self.flags, self.cpus = flags, cpus
        self.url, self.pid = "", 0

    def command(self) -> list[str]:
        """What is started; it says on its first line what this stub says."""
        return [sys.executable, "-m", "whywait.load.stub", "--die-with-stdin", *self.flags]

    def __enter__(self) -> StubProcess:
        # The child must find this very package, also where it is only on sys.path.
        here = str(Path(whywait.__file__).parents[1])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
        self._process = subprocess.Popen(self.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        if self.cpus is not None and sys.platform == "linux":
            os.sched_setaffinity(self._process.pid, self.cpus)
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self.__exit__()
            raise InternalError(f"the stub service did not start (exit code {self._process.returncode})")
        said = json.loads(line)
        self.url, self.pid = said["url"], said["pid"]
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process.stdin is not None
        process.stdin.close()  # --die-with-stdin: this ends it
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()


def parse_args(argv: Sequence[str] | None) -> tuple[Options, bool]:
    parser = argparse.ArgumentParser(
        prog="python -m whywait.load.stub", description="A stub LLM service with a known timetable."
    )
    for f in (*fields(Plan), *fields(Options)):
        flag = "--" + f.name.replace("_", "-")
        if isinstance(f.default, bool):
            parser.add_argument(flag, action="store_true")
        elif f.name != "plan":
            parser.add_argument(flag, type=type(f.default), default=f.default)
    parser.add_argument("--die-with-stdin", action="store_true", help="end when stdin is closed")
    given = vars(parser.parse_args(argv))
    die_with_stdin = given.pop("die_with_stdin")
    plan = Plan(**{f.name: given.pop(f.name) for f in fields(Plan)})
    return Options(plan=plan, **given), die_with_stdin


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options, die_with_stdin = parse_args(argv)
        if options.host != "localhost" and not ipaddress.ip_address(options.host).is_loopback and not options.api_key:
            raise UsageError(f"{options.host} is not a loopback address", "give an --api-key to listen there")
        stub = Stub(options)
    except (ValueError, OSError, WhywaitError) as exc:
        print(f"whywait stub: {exc}", file=sys.stderr)
        return 2
    server = stub.server
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    # Ctrl-C reaches a whole terminal's processes; a stub that belongs to another process leaves with that one.
    signal.signal(signal.SIGINT, signal.SIG_IGN if die_with_stdin else lambda *_: server.stop())
    if die_with_stdin:
        server.loop.watch(0, lambda _: None if os.read(0, 4096) else server.stop())
    many_sockets()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # a full collection in the middle of a run is milliseconds of lateness
    print(json.dumps({"port": server.port, "pid": os.getpid(), "url": server.url}), flush=True)
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
