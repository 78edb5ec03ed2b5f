"""Sources that are HTTP pages of the engine: ``/metrics`` and llama.cpp's ``/slots``. Keep-alive, bounded in time."""

from __future__ import annotations

import dataclasses
import http.client
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import orjson

from whywait import __version__
from whywait.engines import by_name, detect
from whywait.engines.llama_cpp import slot_gauges
from whywait.net.reach import Reach, bound, open_page
from whywait.probe import Row
from whywait.probe.prometheus import PageReader

MAX_BYTES = 8 << 20


class Fetcher:
    """GETs one URL over a kept connection. ``get`` gives the body, or None; then ``why`` says what went wrong."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, reach: Reach | None = None) -> None:
        self._url, self._reach, self._path = url, reach or Reach(), "/"
        self._own = {"User-Agent": f"whywait/{__version__}", **headers}
        self._headers: dict[str, str] = {}
        self._timeout = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self.why = ""

    def get(self) -> bytes | None:
        end = time.monotonic() + self._timeout
        for fresh in (self._connection is None, True):
            try:
                return self._get(end)
            except (OSError, http.client.HTTPException, ValueError) as exc:  # the last of a URL that cannot be sent
                self.close()
                plain = type(exc) is http.client.HTTPException
                self.why = str(exc) if plain else type(exc).__name__
                # A kept connection the server has closed in the meantime is no failure: try once on a new one.
                if fresh or time.monotonic() >= end:
                    return None
        return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _get(self, end: float) -> bytes | None:
        self.why = ""
        connection = self._connection
        if connection is None:
            connection = self._connection = self._new()
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        bound(connection, left)
        connection.request("GET", self._path, headers=self._headers)
        with connection.getresponse() as response:
            body = response.read(MAX_BYTES + 1)
            if len(body) > MAX_BYTES:
                raise http.client.HTTPException("page too large")
            if response.length:  # a body cut short: half a number is a wrong number
                raise http.client.IncompleteRead(body, response.length)
        if response.will_close:
            self.close()
        if response.status != 200:
            self.why = f"HTTP {response.status}"
            return None
        return body

    def _new(self) -> http.client.HTTPConnection:
        connection, self._path, given = open_page(self._url, self._reach, self._timeout)
        named = {name.lower() for name in given}
        self._headers = {name: value for name, value in self._own.items() if name.lower() not in named} | given
        return connection


def fetcher(url: str, headers: Mapping[str, str], timeout_s: float, reach: Reach, home: str) -> Fetcher:
    """For the page of a replica: the user's key and headers are for the service's host, not for every host named.

    ``home``: that host; as a https:// URL where they must not go there in the clear either. Empty: everywhere.
    """
    page, secure = urlsplit(url), home.startswith("https://")
    host = urlsplit(home).hostname if secure else home
    if home and not url.startswith("unix:") and (page.hostname != host or (secure and page.scheme != "https")):
        return Fetcher(url, {}, timeout_s, dataclasses.replace(reach, headers=()))
    return Fetcher(url, headers, timeout_s, reach)


class MetricsPage:
    """``/metrics`` of one replica under canonical names. The engine is found from the first page when not told."""

    def __init__(self, name: str, fetcher: Fetcher, engine: str | None = None) -> None:
        self.name, self._fetcher = name, fetcher
        table = by_name(engine)
        self._reader = PageReader(table) if table else None
        self._read = False  # it has been the engine's page

    @property
    def why(self) -> str:
        return self._fetcher.why or "not what was expected"

    def sample(self) -> list[Row] | None:
        body = self._fetcher.get()
        if body is None:
            return None
        text = body.decode("utf-8", "replace")
        if self._reader is None:
            table = detect(metrics_text=text)
            self._reader = PageReader(table) if table else None
        rows = self._reader.read(text) if self._reader else []
        if not rows and self._read:
            return None  # a login page, or a proxy's: the engine no longer answers here
        self._read = self._read or bool(rows)
        return rows

    def close(self) -> None:
        self._fetcher.close()


class SlotsPage:
    """``/slots`` of llama.cpp. Once the slots were seen to hold more than one slot's context, they are known to be
    separate."""

    def __init__(self, name: str, fetcher: Fetcher, unified: bool | None = None) -> None:
        self.name, self._fetcher = name, fetcher
        self._unified = unified

    @property
    def why(self) -> str:
        return self._fetcher.why or "not what was expected"

    def sample(self) -> list[Row] | None:
        body = self._fetcher.get()
        try:
            slots = orjson.loads(body) if body is not None else None
            if not isinstance(slots, list) or not slots or not all(isinstance(s, dict) for s in slots):
                return None  # of no slots it does not say that there are none
            gauges = slot_gauges(slots, self._unified)
        except (ValueError, TypeError, AttributeError, ArithmeticError):
            return None
        if self._unified is None and len(slots) > 1 and "kv_use" in gauges:
            self._unified = False
        return [(name, None, value) for name, value in gauges.items()]

    def close(self) -> None:
        self._fetcher.close()
