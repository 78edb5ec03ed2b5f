"""What ``whywait record`` wrote → records. Its hashes are keyed per file, so blocks never match across recordings."""

from __future__ import annotations

from typing import Any

from whywait.convert.formats import json_row
from whywait.convert.traces import Bad, Record, Skip, whole

HEAD = "whywait_recording"
KNOWN_VERSION = 1
FAILED = ("http_error", "shed", "inband_error", "protocol", "refused", "reset")


class Recording:
    """``parse`` takes the lines of one file, the head included; ``cut`` counts requests that have no end."""

    def __init__(self) -> None:
        self._key = ""
        self._open: set[Any] = set()

    @property
    def cut(self) -> int:
        return len(self._open)

    def parse(self, line: str) -> Record | None:
        row = json_row(line)
        if HEAD in row:
            if row[HEAD] != KNOWN_VERSION:
                raise Bad(f"version {KNOWN_VERSION} of a recording, found {row[HEAD]}")
            self._key = str(row.get("id"))
            return None
        what, number = row.get("event"), row.get("n")
        if what == "arrived":
            self._open.add(number)
            return None
        if what != "ended":
            raise Bad("an 'arrived' or 'ended' event")
        self._open.discard(number)
        if row.get("outcome") in FAILED:
            raise Skip(f"requests that failed ({row['outcome']})")
        if row.get("prompt_tokens") is None or row.get("output_tokens") is None:
            raise Skip("requests whose answer said no usage (streams need stream_options.include_usage)")
        if row["output_tokens"] == 0:
            raise Skip("requests without an answer (0 output tokens)")
        session = row.get("session")
        return Record(
            _at(row),
            whole(row["prompt_tokens"], "a whole number of at least 1 in prompt_tokens", 1),
            whole(row["output_tokens"], "a whole number in output_tokens"),
            [(self._key, b) for b in row.get("blocks") or ()],
            None if session is None else (self._key, session),
            klass=str(row.get("class") or "default"),
            took_s=_took(row),
        )


def _at(row: dict[str, Any]) -> float:
    at = row.get("at_unix_ns")
    if isinstance(at, bool) or not isinstance(at, int) or at < 0:
        raise Bad("whole nanoseconds in at_unix_ns")
    return at / 1e9


def _took(row: dict[str, Any]) -> float | None:
    """Until the last token, as the client saw it; a connection may stay open long after."""
    took = next((row[k] for k in ("last_ns", "end_ns") if row.get(k) is not None), None)
    return took / 1e9 if isinstance(took, int) and not isinstance(took, bool) and took >= 0 else None
