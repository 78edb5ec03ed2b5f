"""A fake engine for the front of a fleet: slots that can be saved and restored, streams at a pace, and faults on order.

It speaks as llama-server does, as far as the front asks. Everything is noted in ``calls``; ``held`` are the slots with
KV in them, by the text of the prompt.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whywait.net.reply import DONE, SSE, Reply, Request, sse
from whywait.net.serve import Server


class StubEngine:
    """``faults``: path (or "chat") → status to answer with, "reset" to break off, "hang" to say nothing."""

    def __init__(self, folder: Path, tokens: int = 4, gap_s: float = 0.002, prefill_s: float = 0.0) -> None:
        self.folder, self.tokens, self.gap_s, self.prefill_s = folder, tokens, gap_s, prefill_s
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.faults: dict[str, Any] = {}
        self.silent: tuple[str, ...] = ()  # fields of timings that it does not tell
        self.held: dict[int, str] = {}
        self.cancelled = 0
        self.streams = self.most_streams = 0
        self._server = Server(self._handle)
        self.url = self._server.url
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> StubEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._thread.join()

    def seen(self, path: str) -> list[dict[str, Any]]:
        return [body for p, body in self.calls if p == path]

    def _handle(self, request: Request, reply: Reply) -> None:
        body = json.loads(request.body) if request.body else {}
        action = request.query.partition("action=")[2]
        path = action or request.path
        self.calls.append((path, body))
        fault = self.faults.get(path)
        if fault == "reset":
            reply.abort()
        elif fault == "hang":
            reply.on_gone = self._gone
        elif isinstance(fault, int):
            reply.send(fault, json.dumps({"error": {"message": "as ordered", "code": fault}}).encode())
        elif action:
            self._later(fault or 0.0, lambda: self._slot(request, body, action, reply))
        elif path == "/v1/chat/completions":
            self._answer(body, reply)
        elif path == "/metrics":
            lines = [f"llamacpp:{n} {v}" for n, v in (("prompt_tokens_total", 10), ("prompt_tokens_cached_total", 0),
                     ("tokens_predicted_total", 7), ("n_decode_total", 3), ("requests_deferred", 0))]  # fmt: skip
            reply.send(200, "\n".join(lines).encode(), "text/plain")
        elif path == "/slots":
            reply.send(200, json.dumps([{"id": i, "n_ctx": 64} for i in range(2)]).encode())
        elif path == "/props":
            reply.send(200, json.dumps({"total_slots": 2, "default_generation_settings": {"n_ctx": 64}}).encode())
        else:
            reply.send(200, b'{"status":"ok"}')

    def _slot(self, request: Request, body: dict[str, Any], action: str, reply: Reply) -> None:
        slot, path = int(request.path.rsplit("/", 1)[1]), self.folder / body["filename"]
        if action == "save":
            path.write_text(self.held[slot] * 100)
            found: dict[str, Any] = {"n_saved": 10, "n_written": path.stat().st_size, "timings": {"save_ms": 1.0}}
        else:
            self.held[slot] = path.read_text()[: len(path.read_text()) // 100]
            found = {"n_restored": 10, "timings": self._told({"restore_ms": 2.0})}
        reply.send(200, json.dumps(found).encode())

    def _answer(self, body: dict[str, Any], reply: Reply) -> None:
        prompt, slot = body["messages"][0]["content"], body.get("id_slot", 0)
        if not body.get("stream"):
            self.held[slot] = prompt
            timings = self._told({"prompt_n": 10, "prompt_ms": 5.0, "cache_n": 0, "predicted_n": 1})
            usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}
            said = {"choices": [{"message": {"content": prompt}}], "timings": timings, "usage": usage}
            reply.on_gone = self._gone
            self._later(self.prefill_s, lambda: reply.send(200, json.dumps(said).encode()))
            return
        self.streams += 1
        self.most_streams = max(self.most_streams, self.streams)
        reply.on_gone = self._gone
        reply.start(200, SSE)
        left = [self.tokens]
        known = self.held.get(slot) == prompt

        def tick() -> int | None:
            if reply.done:
                return None
            if left[0]:
                left[0] -= 1
                if self.faults.get("stream") == self.tokens - left[0]:
                    self.streams -= 1
                    reply.abort()
                    return None
                reply.write(sse({"choices": [{"delta": {"content": prompt}, "finish_reason": None}]}))
                return time.monotonic_ns() + int(self.gap_s * 1e9)
            timings = {"prompt_n": 1 if known else 10, "prompt_ms": 1.0 if known else 50.0, "predicted_n": self.tokens}
            timings = self._told(timings)
            usage = {
                "prompt_tokens": 10,
                "completion_tokens": self.tokens,
                "prompt_tokens_details": {"cached_tokens": 9},
            }
            self.streams -= 1
            reply.end(sse({"choices": [], "usage": usage, "timings": timings}) + DONE)
            return None

        self._server.call_at(0, tick)

    def _told(self, timings: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in timings.items() if k not in self.silent}

    def _gone(self) -> None:
        self.cancelled += 1

    def _later(self, seconds: float, then: Callable[[], object]) -> None:
        def once() -> None:
            then()

        if seconds:
            self._server.call_at(time.monotonic_ns() + int(seconds * 1e9), once)
        else:
            then()
