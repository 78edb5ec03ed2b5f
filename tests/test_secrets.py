"""No key, password or token that a user gives reaches anything that is written or said, whatever the service echoes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whywait import errors
from whywait.core import secrets

# Of the characters that JSON, URLs and regular expressions write in their own way.
KEY = 'sk-"T0p\\Secret/+%&=?*'
HEADER = "hdr-S3cret-9f8e7d"
PROXY = "prx-S3cret-1a2b3c"
FAST = ["--no-floor", "--prompt-tokens", "16", "--output-tokens", "4", "--requests", "12", "--concurrency", "2"]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    secrets.forget()


class Echo(BaseHTTPRequestHandler):
    """A service that repeats what it was sent wherever it can: headers, pages, error types, codes and messages."""

    protocol_version = "HTTP/1.1"
    mode = "ok"
    calls = 0

    def said(self) -> str:
        return " ".join(self.headers.get(n, "") for n in ("Authorization", "X-Gateway-Key", "Proxy-Authorization"))

    def do_GET(self) -> None:
        if self.path.endswith("/models"):
            models = [{"id": "echo", "owned_by": self.said()}]
            self.answer(200, json.dumps({"object": "list", "data": models}).encode(), "application/json")
        elif self.path == "/metrics":
            label = self.said().replace("\\", "\\\\").replace('"', '\\"')
            page = f'# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing{{who="{label}"}} 1\n'
            self.answer(200, page.encode(), "text/plain")
        else:
            self.answer(404, self.said().encode(), "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).calls += 1
        first = self.calls <= 8  # preflight and calibration go well
        said = self.said()
        if self.mode == "401" or (self.mode != "ok" and not first):
            error = {"message": f"bad key {said}", "type": f"type {said}", "code": f"code {said}", "param": said}
            self.answer(401 if self.mode == "401" else 500, json.dumps({"error": error}).encode(), "application/json")
            return
        usage = {"prompt_tokens": 16, "completion_tokens": 2}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"content": "a b"}, "finish_reason": f"stop {said}"}
            whole = {"id": said, "model": said, "choices": [choice], "usage": usage}
            self.answer(200, json.dumps(whole).encode(), "application/json")
            return
        events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": t}}]} for t in "ab"]
        end = "stop" if first else f"stop {said}"
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": end}], "usage": usage})
        data = "".join(f"data: {json.dumps({'id': said, 'model': said, **e})}\n\n" for e in events)
        self.answer(200, (data + "data: [DONE]\n\n").encode(), "text/event-stream")

    def answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status, f"Reason {self.said()}")
        self.send_header("Content-Type", kind)
        self.send_header("X-Request-Id", self.said())
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(params=["ok", "500", "401"])
def echo(request: pytest.FixtureRequest) -> Iterator[ThreadingHTTPServer]:
    handler = type("Handler", (Echo,), {"mode": request.param, "calls": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _forms(secret: str) -> list[bytes]:
    return [x.encode() for x in (secret, json.dumps(secret)[1:-1], json.dumps(json.dumps(secret))[3:-3])]


def _leaks(folder: Path, said: dict[str, bytes], words: list[str]) -> list[str]:
    texts = {str(f): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.suffix != ".key"}
    for name in list(texts):
        if name.endswith(".parquet"):  # compressed: read what it holds
            import arro3.io as aio

            rows = aio.read_parquet(name).read_all()
            texts[name] = json.dumps(
                [rows.column(c).to_pylist() for c in rows.column_names], ensure_ascii=False
            ).encode()
    return [f"{where}: {word}" for where, text in {**texts, **said}.items() for word in words
            if any(form in text for form in _forms(word))]  # fmt: skip


def _run(argv: list[str], env: dict[str, str], folder: Path) -> tuple[int, dict[str, bytes]]:
    clean = {k: v for k, v in os.environ.items() if not k.lower().endswith(("_proxy", "_api_key"))}
    clean["PYTHONPATH"] = str(Path(errors.__file__).parents[1])
    command = [sys.executable, "-m", "whywait", *argv]
    done = subprocess.run(command, capture_output=True, env={**clean, **env}, cwd=folder, timeout=120, check=False)
    return done.returncode, {"stdout": done.stdout, "stderr": done.stderr}


WAYS = ["env", "file", "header", "processes", "debug"]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_and_said_holds_no_secret(echo: ThreadingHTTPServer, tmp_path: Path, way: str) -> None:
    url, env, flags = f"http://127.0.0.1:{echo.server_port}", {}, []
    if way == "file":
        (tmp_path / "a.key").write_text(KEY)
        flags = ["--api-key-file", "a.key"]
    else:
        env = {"WHYWAIT_API_KEY": KEY}
    if way == "header":
        flags = ["--header", f"X-Gateway-Key: {HEADER}"]
    if way == "processes":
        flags = ["--processes", "2"]
    if way == "debug":
        env["WHYWAIT_DEBUG"] = "1"
    code, said = _run(["run", url, *FAST, *flags, "--out", "r", "--json"], env, tmp_path)
    assert code in (0, 4, 6), said
    assert code == 4 or (tmp_path / "r" / "manifest.json").exists()
    if (tmp_path / "r").exists():
        _, more = _run(["show", "r", "--html", "report.html"], env, tmp_path)
        said.update({f"show {k}": v for k, v in more.items()})
        assert b"Traceback" not in more["stderr"]
    assert _leaks(tmp_path, said, [KEY, HEADER]) == []


def test_the_passwords_of_a_proxy_stay_out(tmp_path: Path) -> None:
    """The echoing service stands where the proxy is: it is sent the proxy's credentials."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Echo,), {"calls": 0}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        proxy = f"http://user-name:{PROXY}@127.0.0.1:{server.server_port}"
        argv = ["run", "http://127.0.0.1:9", *FAST, "--proxy", proxy, "--out", "r"]
        _, said = _run(argv, {"WHYWAIT_API_KEY": KEY}, tmp_path)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert _leaks(tmp_path, said, [KEY, PROXY]) == []
    import base64

    basic = base64.b64encode(f"user-name:{PROXY}".encode()).decode()
    assert _leaks(tmp_path, said, [basic]) == []


def test_the_check_itself_sees_a_leak(tmp_path: Path) -> None:
    from whywait.core.table import Table

    (tmp_path / "x.json").write_text(json.dumps({"a": KEY}))
    row = {"asked_ns": 0, "answered_ns": 0, "source": "s", "name": "n", "labels": json.dumps({"k": KEY})}
    Table.from_rows("readings", [row]).save(tmp_path / "readings.parquet")
    assert len(_leaks(tmp_path, {"stdout": KEY.encode()}, [KEY])) == 3


# The means


@given(st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=secrets.LEAST, max_size=30))
def test_a_secret_is_cut_out_in_every_form_it_is_written(secret: str) -> None:
    secrets.forget()
    secrets.hide(secret)
    for text in (f"x {secret} y", json.dumps({"a": f"x{secret}y"}), json.dumps([secret], ensure_ascii=False)):
        left = secrets.clean(text)
        assert secret not in left.replace(secrets.MASK, "") or secret in secrets.MASK
        assert secrets.MASK in left
        assert secrets.clean_bytes(text.encode()) == left.encode()
    secrets.forget()


def test_an_error_holds_no_secret_in_its_message_hint_or_cause() -> None:
    secrets.hide("hunter2-hunter2")
    error = errors.ServiceError("it said hunter2-hunter2", "not hunter2-hunter2")
    assert (str(error), error.hint) == ("it said [secret]", "not [secret]")
    cause, effect = ValueError("because of hunter2-hunter2", 7), RuntimeError("hunter2-hunter2")
    effect.__cause__ = cause
    errors.scrub(effect)
    assert effect.args == ("[secret]",)
    assert cause.args == ("because of [secret]", 7)


@pytest.mark.parametrize(
    "name", ["Authorization", "X-Api-Key", "api-key", "Cookie", "X-Auth-Token", "Proxy-Authorization"]
)
def test_telling_headers_are_secret_and_others_are_not(name: str) -> None:
    secrets.hide_header(name, "Bearer abcdefgh1234")
    secrets.hide_header("X-Tenant", "tenant-name")
    assert secrets.clean("abcdefgh1234 tenant-name") == "[secret] tenant-name"


def test_short_words_are_left_alone() -> None:
    secrets.hide("abc", "", None)
    secrets.hide_url("http://me:pass-word-1@proxy:3128")
    secrets.hide_url("http://proxy:3128")
    assert secrets.clean("abc http://me:pass-word-1@proxy") == "abc http://me:[secret]@proxy"
    assert re.search("proxy", secrets.clean("proxy"))
