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
import random
import resource
import signal
import ssl
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any

import orjson

import whywait
from whywait.errors import InternalError, UsageError, WhywaitError
from whywait.load.stub_plan import Ask, Options, Plan, Writer, error, parse_fault, read_ask, sse
from whywait.net.clock import bracket
from whywait.net.serve import Reply, Request, Server
from whywait.units import NS_PER_MS, NS_PER_S

SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
GOLDEN = 0.6180339887498949  # multiples of it fill a circle evenly, however many there are

COUNTERS = ("prompt_tokens_total", "prompt_tokens_cached_total", "prompt_seconds_total", "tokens_predicted_total",
            "tokens_predicted_seconds_total")  # fmt: skip


class Stream:
    """One answer on its way. ``tick`` is the hot path: one template filled, one send."""

    def __init__(self, stub: Stub, ask: Ask, reply: Reply, serial: int) -> None:
        self.stub, self.ask, self.reply, self.serial = stub, ask, reply, serial
        self.over = self.waited = False
        self.n = 0  # tokens sent
        self.origin = self.due = self.grid = 0
        self.gap, self.jitter = ask.gap_ns, int(ask.plan.jitter_ms * NS_PER_MS)
        self.left, self.size, self.frame = 0, 0, b""
        self.held: list[tuple[bytes, int, int]] = []
        reply.on_gone = self.gone

    def start(self) -> None:
        """A slot is ours: the timetable begins, for a request that had to wait for it, now."""
        ask, plan, loop, now = self.ask, self.ask.plan, self.stub.server, monotonic_ns()
        accepted = self.reply.request.accepted_ns
        self.wall = bracket()[0]  # once per stream, so that its due times are exactly gap apart
        self.writer = Writer(ask, self.serial, (accepted + self.wall) // NS_PER_S)
        origin = (now if self.waited else accepted) + ask.ttft_ns
        if self.gap and (plan.spread or plan.shared_step):
            phase = 0 if plan.shared_step else int(self.serial * GOLDEN % 1 * self.gap)
            origin += (phase - origin) % self.gap
        self.origin = self.grid = self.due = origin
        if self.jitter:
            self.random = random.Random(self.stub.options.seed * 1_000_003 + self.serial)
            self.due += int(self.random.random() * self.jitter)
        runs = list(plan.layout(ask.tokens))
        if not ask.stream:
            self.due += max(0, sum(count for count, _, _ in runs) - 1) * self.gap
            loop.call_at(self.due, self.answer)
            return
        if ask.fault == "split":
            self.reply.request.conn.limit_send(1)
        self.reply.start(200, SSE, ask.fault != "close_delimited", self.writer.role(accepted + self.wall))
        self.push, chunked = self.reply.push, self.reply.chunked
        self.runs = [(count, size, self.writer.content(size, reasoning, chunked)) for count, size, reasoning in runs]
        slow = self.jitter or ask.fault == "coalesce"
        loop.call_at(self.due, (self.tick_slowly if slow else self.tick) if self.next_run() else self.finish)

    def next_run(self) -> bool:
        if self.runs:
            self.left, self.size, self.frame = self.runs.pop(0)
        return self.left > 0

    def tick(self) -> int | None:
        if self.over:
            return None
        due = self.due
        self.n += self.size
        self.push(self.frame % (time_ns(), due + self.wall, self.n))
        self.left -= 1
        if not self.left and not self.next_run():
            self.finish()
            return None
        self.due = due = due + self.gap
        return due

    def tick_slowly(self) -> int | None:
        """The same with jitter, and with several events kept back for one send."""
        if self.over:
            return None
        self.n += self.size
        self.held.append((self.frame, self.due + self.wall, self.n))
        self.left -= 1
        more = self.left > 0 or self.next_run()
        if not more or self.ask.fault != "coalesce" or len(self.held) >= (self.ask.number or 4):
            now = time_ns()
            self.push(b"".join(frame % (now, due, n) for frame, due, n in self.held))
            self.held.clear()
        if not more:
            self.finish()
            return None
        self.grid += self.gap
        late = int(self.random.random() * self.jitter) if self.jitter else 0
        self.due = max(self.due, self.grid + late)
        return self.due

    def finish(self) -> None:
        """The last token is out: say so, or do what the fault wants."""
        fault, reply, writer = self.ask.fault, self.reply, self.writer
        if self.over or fault == "hang":  # one that hangs keeps its slot until the client gives up
            return
        self.over = True
        if fault == "reset":
            reply.abort()
        elif fault == "truncate":
            reply.end()
        elif fault == "error_event":
            reply.end(sse(error("the stub was told to fail", "server_error", 500)))
        elif self.ask.plan.tail_ms:
            reply.write(writer.finish())
            later = self.due + int(self.ask.plan.tail_ms * NS_PER_MS)
            self.stub.server.call_at(later, lambda: reply.end(writer.trailer()))
        else:
            reply.end(writer.finish() + writer.trailer())
        self.stub.release(self)

    def answer(self) -> None:
        """Everything at once, for a request that did not ask for a stream."""
        fault, reply = self.ask.fault, self.reply
        if self.over or fault == "hang":
            return
        self.over, self.n = True, self.ask.tokens
        if fault == "split":
            reply.request.conn.limit_send(1)
        body = self.writer.whole(time_ns(), self.due + self.wall)
        if fault == "reset":
            reply.abort()
        elif fault == "truncate":
            reply.start(200, {"Content-Type": "application/json", "Content-Length": str(len(body))}, False)
            reply.end(body[: len(body) // 2])
        elif fault == "error_event":
            reply.send(500, orjson.dumps(error("the stub was told to fail", "server_error", 500)))
        elif fault == "close_delimited":
            reply.start(200, {"Content-Type": "application/json"}, False, body)
            reply.end()
        else:
            reply.send(200, body)
        self.stub.release(self)

    def gone(self) -> None:
        if not self.over:
            self.over = True
            self.stub.release(self, gone=True)

    def spent(self) -> dict[str, float]:
        """This stream's part in the counters of /metrics; times are the timetable's."""
        if not self.n:
            return {}
        cached = min(self.ask.plan.cached_tokens, self.ask.prompt_tokens)
        return {
            "prompt_tokens_total": self.ask.prompt_tokens - cached,
            "prompt_tokens_cached_total": cached,
            "prompt_seconds_total": self.ask.ttft_ns / NS_PER_S,
            "tokens_predicted_total": self.n,
            "tokens_predicted_seconds_total": max(0, min(self.due, monotonic_ns()) - self.origin) / NS_PER_S,
        }


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
        elif request.method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
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
            ask = read_ask(request.body, request.path.endswith("/chat/completions"), plan, options.model)
        except ValueError as exc:
            self._refuse(reply, 400, str(exc), "invalid_request_error")
            return
        fault, number = ask.fault, ask.number
        if fault == "wrong_model" or (options.strict_model and ask.model != options.model):
            self._refuse(reply, 404, f"The model `{ask.model}` does not exist.", "NotFoundError")
        elif fault.startswith("http_"):
            code = int(fault[5:])
            self._refuse(reply, code, "the stub was told to fail", retry_s=(number or 1) if code in (429, 503) else 0)
        elif fault == "html":
            reply.send(200, b"<!doctype html><title>Welcome</title><p>Not an API.", "text/html")
        elif fault != "hang" or number is not None:  # without a number it never answers at all
            self._admit(Stream(self, ask, reply, self.requests))

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

    def __enter__(self) -> StubProcess:
        # The child must find this very package, also where it is only on sys.path.
        here = str(Path(whywait.__file__).parents[1])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
        command = [sys.executable, "-m", "whywait.load.stub", "--die-with-stdin", *self.flags]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
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
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # a full collection in the middle of a run is milliseconds of lateness
    print(json.dumps({"port": server.port, "pid": os.getpid(), "url": server.url}), flush=True)
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
