"""Logs of OpenAI-style requests, one JSON object a line: a gateway's, a proxy's, a batch file's.

There is no one format. What is looked for, at the top and one or two levels down (``request``, ``response``, ``body``):
a time, ``usage``, and the request's own fields. Prompts are hashed in memory with a secret made for this one reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whywait.convert.clock import seconds
from whywait.convert.formats import json_row
from whywait.convert.traces import Bad, Record, Skip, whole
from whywait.core.prefix import chain, new_secret, prompt_texts

Row = dict[str, Any]
# The first that is there counts. ``created`` is the answer's and in whole seconds: better than nothing.
TIMES = ("timestamp", "ts", "time", "start_time", "startTime", "started_at", "arrival_time", "request_time",
         "created_at", "date", "created")  # fmt: skip
SESSIONS = ("session_id", "conversation_id", "thread_id", "chat_id", "session")
INPUT, OUTPUT = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")


class OpenAiLog:
    """``parse`` takes a line. One object for all files of a log: its secret makes their prefixes comparable."""

    def __init__(self) -> None:
        self._secret = new_secret()

    def parse(self, line: str) -> Record:
        row = json_row(line)
        places = list(_places(row))
        at = next((p[k] for k in TIMES for p in places if p.get(k) is not None), None)
        if at is None:
            raise Bad(f"a time in one of {', '.join(TIMES[:4])} …")
        if _failed(places):
            raise Skip("requests that failed")
        usage = next((p["usage"] for p in reversed(places) if isinstance(p.get("usage"), dict)), None)
        if usage is None:
            usage = next((p for p in places if any(k in p for k in OUTPUT)), None)
        if usage is None:
            raise Skip("requests without usage (streams need stream_options.include_usage)")
        prompt = whole(_first(usage, INPUT), "a whole number of at least 1 in usage.prompt_tokens", 1)
        output = whole(_first(usage, OUTPUT), "a whole number in usage.completion_tokens")
        if not output:
            raise Skip("requests without an answer (0 output tokens)")
        body = next((p for p in places if any(k in p for k in ("messages", "prompt", "input"))), None)
        blocks = chain(self._secret, prompt_texts(body)).hashes if body else []
        session = next((p[k] for k in SESSIONS for p in places if isinstance(p.get(k), (str, int))), None)
        name = row.get("class")
        return Record(seconds(at, "a time"), prompt, output, blocks, session,
                      klass=name if isinstance(name, str) and name else "default")  # fmt: skip


def _places(row: Row) -> Iterator[Row]:
    """Where a field may be, the outermost first."""
    yield row
    for key in ("metadata", "request", "body", "response"):
        inner = row.get(key)
        # A stream kept as its events: the last ones hold usage.
        for part in inner if isinstance(inner, list) else [inner]:
            if isinstance(part, dict):
                yield part
                for deeper in ("metadata", "body"):
                    if isinstance(part.get(deeper), dict):
                        yield part[deeper]


def _failed(places: list[Row]) -> bool:
    statuses = [p[k] for p in places for k in ("status_code", "status", "http_status") if isinstance(p.get(k), int)]
    return any(s >= 400 for s in statuses) or any(p.get("error") for p in places)


def _first(row: Row, keys: tuple[str, ...]) -> Any:
    return next((row[k] for k in keys if row.get(k) is not None), None)
