"""What a response amounts to: outcome, whose fault, and the service's own figures. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import orjson

from whywait.core.columns import STRANGE
from whywait.core.secrets import clean
from whywait.engines import request_fields
from whywait.net.dialect import Answer, count
from whywait.net.wire import Response

# What an error's type and code look like. Anything else might be a message, and messages echo prompts.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,60}", re.ASCII)
_WHERE = re.compile(r"[A-Za-z0-9_.~:/%@+\[\]-]+", re.ASCII)
MAX_WHERE = 200
REDIRECTS = (301, 302, 303, 307, 308)
_FIGURE = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?", re.ASCII)
_SPENT = re.compile(r'([A-Za-z0-9_-]{1,60})\s*;[^,]*?\bdur="?([0-9]{1,12}(?:\.[0-9]{1,9})?)', re.ASCII)
_WAIT = re.compile(r"[A-Za-z0-9,: .+-]{1,40}", re.ASCII)  # seconds, or a date


def facts_of(response: Response, chunks: int) -> dict[str, Any]:
    """Columns of the requests table that the response itself decides. ``chunks``: content chunks seen."""
    answer = response.answer
    if response.status == 200 and not response.stream:
        answer.whole(bytes(response.body))
    outcome, fault, detail = _outcome(response, chunks)
    out: dict[str, Any] = {"outcome": outcome, "fault": fault, "detail": detail, "status": response.status or None,
                           "finish_reason": answer.finish_reason, "trace_id": answer.request_id}  # fmt: skip
    out.update(_usage(answer.usage))
    for name in ("prompt_tokens", "output_tokens") if chunks else ():
        out[name] = out[name] or None  # no answer is of no tokens: some gateways fill the field with zeros
    for column, value in _reported(answer, response.headers).items():
        if out.get(column) is None:  # tokens by the usage first
            out[column] = value
    return out


def _outcome(r: Response, chunks: int) -> tuple[str, str, str | None]:
    if r.status in (429, 503):
        wait = r.headers.get("retry-after", "")
        return "shed", "service", f"{r.status}, Retry-After {wait}" if _WAIT.fullmatch(wait) else str(r.status)
    if r.status != 200:
        # A redirect is the user's: the URL given is not where the service is.
        fault = "user" if 300 <= r.status < 500 else "service"
        what = _leads_to(r) if r.status in REDIRECTS else ""
        return "http_error", fault, f"{r.status} {what or _error_type(r)}".strip()
    if r.answer.error is not None:
        return "inband_error", "service", _code_of(r.answer.error) or "error event"
    if r.not_sse:
        return "protocol", "service", f"{_kind(r) or 'no content type'} instead of an event stream"
    if not r.stream and r.complete:
        return ("ok", "none", None) if r.answer.parsed else ("protocol", "service", f"{_kind(r)} that is no answer")
    if r.answer.finished:
        odd = (bool(r.answer.bad_events), r.answer.late)
        return "ok", "none", "; ".join(what for what, is_so in zip(STRANGE, odd, strict=True) if is_so) or None
    if r.lenient and r.complete and chunks:
        return "ok", "none", "neither finish_reason nor [DONE], taken for an end (--lenient-eof)"
    if r.stream:
        return "truncated", "service", f"ended after {chunks} chunks without finish_reason or [DONE]"
    return "truncated", "service", "the answer is cut short"


def _leads_to(r: Response) -> str:
    """Where a redirect points: scheme, host and path. A query or a user's name there may be a secret, or an echo."""
    try:
        to = urlsplit(r.headers.get("location", "").strip())
        host = f"{to.scheme or 'http'}://{to.netloc.rpartition('@')[2]}" if to.netloc else ""
    except ValueError:
        return ""
    where = f"{host}{to.path}"
    if len(where) > MAX_WHERE:  # no secret may be cut in two before it is cut out
        where = clean(where)[:MAX_WHERE]
    return f"redirects to {where}" if _WHERE.fullmatch(where) else ""


def _kind(r: Response) -> str:
    kind = r.headers.get("content-type", "").split(";")[0].strip()[:60]
    return kind if _NAME.fullmatch(kind) else ""


def _error_type(r: Response) -> str:
    """Type or code of an error body, never its message; of one that is not JSON its media type."""
    try:
        obj = orjson.loads(bytes(r.body))
    except orjson.JSONDecodeError:
        return _kind(r) if r.body and "json" not in _kind(r) else ""
    error = obj.get("error", obj) if isinstance(obj, dict) else None
    if isinstance(error, dict):
        return _code_of(error)
    return _code_of({"type": obj.get("error_type")}) if isinstance(obj, dict) else ""


def _code_of(error: dict[str, Any]) -> str:
    parts = [str(error[k]) for k in ("type", "code") if isinstance(error.get(k), (str, int))]
    return " ".join(p for p in parts if _NAME.fullmatch(p))


def _first(source: dict[str, Any], *names: str) -> int | None:
    """The first count found under one of these names, a dot leading into an object."""
    for name in names:
        value: Any = source
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if (found := count(value)) is not None:
            return found
    return None


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    prompt = _first(usage, "prompt_tokens", "input_tokens")
    output = _first(usage, "completion_tokens", "output_tokens")
    thought = _first(usage, "completion_tokens_details.reasoning_tokens", "output_tokens_details.reasoning_tokens",
                     "reasoning_tokens")  # fmt: skip
    cached = _first(usage, "prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens",
                    "prompt_cache_hit_tokens")  # fmt: skip
    if output is not None and thought and prompt is not None:
        if _first(usage, "total_tokens") == prompt + output + thought:
            output += thought  # it counts its thoughts beside its answer; ours are a part of the output
        elif thought > output:
            thought = None  # a part that is larger than the whole says nothing
    return {"prompt_tokens": prompt, "output_tokens": output, "reasoning_tokens": thought, "cached_tokens": cached}


def _reported(answer: Answer, headers: Mapping[str, str]) -> dict[str, Any]:
    """What the engine says of its own stages, beside the answer or in its headers, as the engine tables have it."""
    beside = {"timings": answer.timings, "metrics": answer.metrics, "usage": answer.usage}
    out: dict[str, Any] = {}
    if any(path.startswith("headers.") for path in request_fields()):
        beside["headers"] = _figures(headers)
    for path, column in request_fields().items():
        found = _number(beside, path)
        if out.get(column) is None:
            out[column] = found if found is None or column.endswith("_ms") else count(found)
    return out


def _figures(headers: Mapping[str, str]) -> dict[str, Any]:
    """Headers that are numbers, by name; of ``server-timing`` the durations (ms) by metric (W3C Server Timing)."""
    out: dict[str, Any] = {name: float(text) if "." in text else int(text)
                           for name, text in headers.items() if _FIGURE.fullmatch(text.strip())}  # fmt: skip
    spent = _SPENT.findall(headers.get("server-timing", "")[:512])
    return {**out, "server-timing": {name: float(dur) for name, dur in spent}}


def _number(source: dict[str, Any], path: str) -> float | None:
    value: Any = source
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    sane = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15
    return (float(value) if path.endswith("_ms") else value) if sane else None
