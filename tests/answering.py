"""A small OpenAI-compatible service that says what a test tells it to: ``with Answering(say) as url``.

``say`` is given the messages and returns what to do: a text, or a dict of ``content``, ``reasoning`` (thoughts set
apart), ``finish`` (finish reason), ``status`` (an HTTP error) and ``cut`` (the stream just ends).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Answering:
    def __init__(self, say: Callable[[list[dict[str, str]]], str | dict[str, Any]]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most = self.now = 0
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                known = self.path == "/v1/models"
                body = json.dumps({"data": [{"id": "told"}]} if known else {}).encode()
                self.send_response(200 if known else 404)
                self._rest(body, "application/json")

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.bodies.append(asked)
                    outer.now += 1
                    outer.most = max(outer.most, outer.now)
                try:
                    self._answer(asked, say(asked["messages"]))
                finally:
                    with lock:
                        outer.now -= 1

            def _answer(self, asked: dict[str, Any], found: str | dict[str, Any]) -> None:
                do = {"content": found} if isinstance(found, str) else found
                if "status" in do:
                    self.send_response(do["status"])
                    self._rest(b'{"error": {"type": "made_up"}}', "application/json")
                    return
                deltas: list[dict[str, Any]] = [{"role": "assistant"}]
                deltas += [{"reasoning_content": p} for p in _pieces(do.get("reasoning", ""))]
                deltas += [{"content": p} for p in _pieces(do.get("content", ""))]
                events = [{"id": "x", "choices": [{"index": 0, "delta": d}]} for d in deltas]
                n = len(deltas) - 1
                if not do.get("cut"):
                    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": do.get("finish", "stop")}]})
                    events.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": max(1, n)}})
                body = b"".join(b"data: %b\n\n" % json.dumps(e).encode() for e in events)
                self.send_response(200)
                self._rest(body + (b"" if do.get("cut") else b"data: [DONE]\n\n"), "text/event-stream")

            def _rest(self, body: bytes, kind: str) -> None:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Answering:
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _pieces(text: str) -> list[str]:
    return [text[i : i + 7] for i in range(0, len(text), 7)]
