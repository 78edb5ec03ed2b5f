"""What a response amounts to: outcome, whose fault, and the service's own figures. Pure."""

from __future__ import annotations

from typing import Any

from whywait.net.wire import Response


def facts_of(response: Response, chunks: int) -> dict[str, Any]:
    """Columns of the requests table that the response itself decides. ``chunks``: content chunks seen."""
    if response.status and not response.stream:
        response.read_whole()
    outcome, fault, detail = _outcome(response, chunks)
    out: dict[str, Any] = {"outcome": outcome, "fault": fault, "detail": detail, "status": response.status or None,
                           "finish_reason": response.finish_reason, "trace_id": response.request_id}  # fmt: skip
    out.update(_usage(response.usage), **_stages(response.timings, response.metrics))
    if out.get("output_tokens") is None and isinstance(response.timings.get("predicted_n"), int):
        out["output_tokens"] = response.timings["predicted_n"]
    return out


def _outcome(r: Response, chunks: int) -> tuple[str, str, str | None]:
    if r.status in (429, 503):
        wait = r.headers.get("retry-after")
        return "shed", "service", f"{r.status}, Retry-After {wait}" if wait else str(r.status)
    if r.status != 200:
        return "http_error", "user" if 400 <= r.status < 500 else "service", f"{r.status} {_error_type(r)}".strip()
    if r.error is not None:
        return "inband_error", "service", _code_of(r.error) or "error event"
    if r.not_sse:
        kind = r.headers.get("content-type", "no content type").split(";")[0][:60]
        return "protocol", "service", f"{kind} instead of an event stream"
    if r.finish_reason or r.saw_done:
        return "ok", "none", None
    return "truncated", "service", f"ended after {chunks} chunks without finish_reason or [DONE]"


def _error_type(r: Response) -> str:
    """Type or code of an error body, never its message: messages echo prompts."""
    import orjson

    try:
        obj = orjson.loads(bytes(r.body))
    except orjson.JSONDecodeError:
        return ""
    error = obj.get("error", obj) if isinstance(obj, dict) else None
    return _code_of(error) if isinstance(error, dict) else ""


def _code_of(error: dict[str, Any]) -> str:
    parts = [str(error[k]) for k in ("type", "code") if isinstance(error.get(k), (str, int)) and error[k] != ""]
    return " ".join(p for p in parts if len(p) <= 60 and p.isprintable())


def _count(source: dict[str, Any], *path: str) -> int | None:
    value: Any = source
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int) and value >= 0 else None


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt_tokens": _count(usage, "prompt_tokens"),
        "output_tokens": _count(usage, "completion_tokens"),
        "reasoning_tokens": _count(usage, "completion_tokens_details", "reasoning_tokens"),
        "cached_tokens": _count(usage, "prompt_tokens_details", "cached_tokens"),
    }


def _stages(timings: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """What the engine says of its own stages: llama.cpp's ``timings``, vLLM's ``metrics``, in the last event.

    vLLM counts ``time_to_first_token_ms`` from when the request was scheduled: its queue is not in it.
    """

    def number(source: dict[str, Any], key: str) -> float | None:
        v = source.get(key)
        return float(v) if isinstance(v, (int, float)) and v >= 0 else None

    if metrics:
        return {
            "engine_queue_ms": number(metrics, "queue_time_ms"),
            "engine_prefill_ms": number(metrics, "time_to_first_token_ms"),
            "engine_decode_ms": number(metrics, "generation_time_ms"),
        }
    return {
        "engine_prefill_ms": number(timings, "prompt_ms"),
        "engine_decode_ms": number(timings, "predicted_ms"),
        "engine_prefill_tokens": _count(timings, "prompt_n"),
    }
