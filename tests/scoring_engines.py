"""Stub services that score given text, each in the dialect of an engine, with one little model behind them all.

The shapes are those of llama.cpp's server and vLLM as they answered here, and of SGLang and the old completions API by
their documentation.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from whywait.engines import by_name
from whywait.load.preflight import Target
from whywait.net.endpoint import parse_url

VOCABULARY = 60
Handler = Callable[[str, dict[str, Any]], tuple[int, Any]]
Asked = list[tuple[str, dict[str, Any]]]


def tokens_of(text: str) -> list[int]:
    """A token per character; 1 stands before them all."""
    return [1, *(2 + ord(c) % (VOCABULARY - 2) for c in text)]


def model(before: list[int], heat: float = 1.0) -> dict[int, float]:
    """Log-probabilities of all tokens, by the last and how many there were: the next character but one is likely."""
    score = {t: -((t - 3 * before[-1] - len(before)) % VOCABULARY) / (6 * heat) for t in range(VOCABULARY)}
    total = math.log(sum(math.exp(v) for v in score.values()))
    return {t: v - total for t, v in score.items()}


def top(found: dict[int, float], k: int) -> list[tuple[int, float]]:
    return sorted(found.items(), key=lambda t: -t[1])[:k]


def llama(heat: float = 1.0, broken: frozenset[int] = frozenset()) -> Handler:
    """``broken``: tokens that are parts of characters, for which it tells no probabilities."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize":
            return 200, {"tokens": tokens_of(body["content"])}
        found = model(body["prompt"], heat)
        biased = body["logit_bias"][0][0]
        if biased in broken:
            return 200, {"content": "\ufffd", "tokens": []}
        listed = [{"id": t, "token": chr(t), "bytes": [t], "logprob": v} for t, v in top(found, body["n_probs"])]
        one = {"id": biased, "token": chr(biased), "bytes": [biased], "logprob": found[biased], "top_logprobs": listed}
        return 200, {"content": chr(biased), "tokens": [], "completion_probabilities": [one]}

    return answer


def vllm(heat: float = 1.0, most: int = 20) -> Handler:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize":
            return 200, {"tokens": tokens_of(body["prompt"]), "count": 1, "max_model_len": 100}
        k, ids = body["prompt_logprobs"], body["prompt"]
        if k > most:
            return 400, {"error": {"message": f"prompt logprobs of {k}, which is greater than max allowed: {most}"}}
        rows: list[Any] = [None]
        for i in range(1, len(ids)):
            found = model(ids[:i], heat)
            listed = dict([*top(found, k), (ids[i], found[ids[i]])])
            rows.append({str(t): {"logprob": v, "rank": 1, "decoded_token": "x"} for t, v in listed.items()})
        return 200, {"choices": [{"text": "x", "prompt_logprobs": rows}]}

    return answer


def sglang(heat: float = 1.0) -> Handler:
    def answer(_path: str, body: dict[str, Any]) -> tuple[int, Any]:
        ids, k = tokens_of(body["text"]), body["top_logprobs_num"]
        founds = [model(ids[:i], heat) for i in range(1, len(ids))]
        own = [[None, ids[0], None], *([f[t], t, None] for f, t in zip(founds, ids[1:], strict=True))]
        tops = [None, *([[v, t, None] for t, v in top(f, k)] for f in founds)]
        return 200, {"text": "x", "meta_info": {"input_token_logprobs": own, "input_top_logprobs": tops}}

    return answer


def echo(heat: float = 1.0) -> Handler:
    def answer(_path: str, body: dict[str, Any]) -> tuple[int, Any]:
        ids, words = tokens_of(body["prompt"]), ["", *body["prompt"]]
        founds = [model(ids[:i], heat) for i in range(1, len(ids))]
        told = {
            "tokens": words,
            "token_logprobs": [None, *(f[t] for f, t in zip(founds, ids[1:], strict=True))],
            "top_logprobs": [None, *({f"t{t}": v for t, v in top(f, body["logprobs"])} for f in founds)],
        }
        return 200, {"choices": [{"text": body["prompt"], "logprobs": told}]}

    return answer


def deaf(_path: str, _body: dict[str, Any]) -> tuple[int, Any]:
    """It takes the request and answers as if nothing special had been asked."""
    return 200, {"choices": [{"text": "a fine day", "logprobs": None}]}


def whole(scores: Handler, says: Callable[[str], str], pages: dict[str, Any]) -> Handler:
    """A service with everything that ``whywait quality`` asks: scores, answers (``says``: by the question), pages."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in pages:
            return 200, pages[path]
        if path.endswith("/chat/completions"):
            text = says(body["messages"][-1]["content"])
            choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 9, "completion_tokens": max(1, len(text.split())), "total_tokens": 10}
            return 200, [{"id": "c", "model": "m", "choices": [choice]}, {"id": "c", "choices": [], "usage": usage}]
        if not body:
            return 404, {"error": {"message": "no such page"}}
        return scores(path, body)

    return answer


MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]}
VLLM_PAGES: dict[str, Any] = {"/v1/models": MODELS, "/metrics": "# TYPE vllm:num_requests_running gauge\n"
                              "vllm:num_requests_running{model_name=\"m\"} 0.0\n"}  # fmt: skip


@contextmanager
def served(answer: Handler, engine: str | None, **limits: Any) -> Iterator[tuple[Target, Asked]]:
    """The target of a service that answers so, and all that it was asked."""
    asked: Asked = []

    class Stub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            self._send(*answer(self.path, body))

        def do_GET(self) -> None:
            self._send(*answer(self.path, {}))

        def _send(self, status: int, found: Any) -> None:
            kind, data = "application/json", json.dumps(found).encode()
            if isinstance(found, str):
                kind, data = "text/plain", found.encode()
            elif isinstance(found, list):  # a stream
                events = [f"data: {json.dumps(e)}\n\n" for e in found]
                kind, data = "text/event-stream", "".join([*events, "data: [DONE]\n\n"]).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        yield Target(parse_url(url), "m", engine=by_name(engine) if engine else None, limits=limits), asked
    finally:
        server.shutdown()
        server.server_close()
