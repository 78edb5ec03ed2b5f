"""The few questions a launcher asks an engine over HTTP. Measuring goes through ``net``."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from whywait.net.reach import bound

_TIMEOUT_S = 3.0
_LIMIT = 4_000_000


@dataclass(frozen=True)
class Served:
    name: str = ""
    max_len: int | None = None  # the longest request, in tokens, where the engine says


def get(url: str, path: str) -> tuple[int, bytes] | None:
    """Status and body, up to ``_LIMIT``, or None when there is no HTTP answer."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    make = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = make(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        bound(connection, _TIMEOUT_S)
        connection.request("GET", parts.path.rstrip("/") + path, headers={"User-Agent": "whywait/lab"})
        with connection.getresponse() as answer:
            return answer.status, answer.read(_LIMIT)
    except (OSError, http.client.HTTPException, ssl.SSLError):
        return None
    finally:
        connection.close()


def get_json(url: str, path: str) -> Any:
    """The JSON of a 200, else None."""
    answer = get(url, path)
    if answer is None or answer[0] != 200:
        return None
    try:
        return json.loads(answer[1])
    except ValueError:
        return None


def ready(url: str) -> bool:
    """Whether it takes requests. ``/health`` first: while llama.cpp loads, it lists its model but answers 503 there."""
    health = get(url, "/health")
    if health is None:
        return False
    if health[0] == 200:
        return True
    if health[0] not in (401, 403, 404, 405):
        return False
    listing = get(url, "/v1/models")
    return listing is not None and listing[0] in (200, 401, 403)  # one that asks for a key is up


def listening(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), 1.0).close()
    except OSError:
        return False
    return True


def first_model(url: str) -> Served:
    try:
        entry = get_json(url, "/v1/models")["data"][0]
        limit = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")
        return Served(str(entry["id"]), int(limit) if limit else None)
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        return Served()


@dataclass(frozen=True)
class Slots:
    count: int | None = None
    ctx_per_slot: int | None = None


def llama_slots(url: str) -> Slots:
    """Slots and the context each got, which may be more than was asked: llama.cpp rounds up."""
    try:
        props = get_json(url, "/props")
        return Slots(int(props["total_slots"]), int(props["default_generation_settings"]["n_ctx"]))
    except (TypeError, KeyError, ValueError):
        return Slots()
