"""A headless Chromium driven over its DevTools pipe: no port, no WebSocket, nothing but the standard library."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BINARY = next((b for b in ("chromium", "chromium-browser", "google-chrome", "chrome") if shutil.which(b)), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-quic",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe",
)  # fmt: skip


class Unanswered(Exception):
    """The browser did not answer in time: a busy machine, not a fault of the page."""


class Browser:
    """One page of a browser. ``events`` holds all that it told: console, exceptions, requests."""

    _session: str | None = None

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._left, self._number = write, read, b"", 0
        self.events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        found = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._call(method, params)

    def open(self, path: Path, fragment: str = "", **media: str) -> None:
        """Load a file and wait until it is there; ``prefers_color_scheme="dark"`` asks for that."""
        features = [{"name": k.replace("_", "-"), "value": v} for k, v in media.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        before = len(self.events)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.as_uri() + fragment)
        deadline = time.monotonic() + 60
        while self.value("document.readyState + location.protocol") != "completefile:":
            if time.monotonic() > deadline:
                raise Unanswered("the page did not load")
            time.sleep(0.05)
        assert len(self.events) > before

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives.

        Raises:
            AssertionError: it throws.
        """
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self, expression: str) -> str:
        """The same, of text."""
        found = self.value(expression)
        assert isinstance(found, str), expression
        return found

    def key(self, key: str, text: str = "") -> None:
        """Press and release a key; ``text`` is what it would type."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "Escape": 27, " ": 32}
        more = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **({"text": text} if text else {}), **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **more)

    def size(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path, width: int = 1280, height: int = 1000, top: int = 0) -> None:
        self.size(width, height)
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        found = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    @property
    def complaints(self) -> list[str]:
        """What was written to the console or thrown, and what the browser itself logged."""
        said = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [json.dumps(e["params"])[:600] for e in self.events if e["method"] in said]

    @property
    def requested(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                result: dict[str, Any] = found["result"]
                return result
            if "method" in found:
                self.events.append(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            if not select.select([self._read], [], [], 60)[0]:
                raise Unanswered("no word for a minute")
            more = os.read(self._read, 1 << 20)
            if not more:
                raise Unanswered("it ended")
            self._left += more
        one, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(one)
        return found


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser of its own, ended with all its processes."""
    assert BINARY
    low_read, to_write = os.pipe()  # to the browser, which reads descriptor 3
    from_read, low_write = os.pipe()  # from the browser, which writes descriptor 4
    to_read, from_write = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (low_read, low_write))  # never 3 or 4 itself
    for fd in (low_read, low_write):
        os.close(fd)
    command = [BINARY, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    # A shell puts the pipes where the browser expects them, whatever numbers they have here.
    line = f'exec 3<&{to_read} 4>&{from_write}; exec "$@"'
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen(["bash", "-c", line, "bash", *command], pass_fds=(to_read, from_write), **quiet)
    os.close(to_read)
    os.close(from_write)
    try:
        yield Browser(to_write, from_read)
    finally:
        for fd in (to_write, from_read):
            os.close(fd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
