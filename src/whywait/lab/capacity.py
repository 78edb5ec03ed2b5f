"""What an engine's own log says: of its KV cache, and of its death. Pure text work.

The wordings are ``log_patterns`` of the engine tables. vLLM V1 writes the size of its cache and how many of the longest
requests fit, on two lines or (lately) one; with data parallelism each ``EngineCore_DPn`` says its own; old versions
repeat it per tensor-parallel worker, where the least counts; V0 says only how many requests fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from whywait.engines import tables

_CORE: Final = re.compile(r"EngineCore_DP\d+")
_FRAME: Final = re.compile(r"\s{4}|\s+File \"|\s*[\^~]+$|Traceback \(most|.*\bERROR\b[^\]]*\] {2,}")
_RAISED: Final = re.compile(r"(?:^|ERROR .*\] )((?:\w+\.)*[A-Z]\w*(?:Error|Exception): \S.*)")
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Capacity:
    """None is *not said*."""

    kv_tokens: int | None = None
    per_request: int | None = None  # the longest request the engine takes, in tokens
    max_num_seqs: int | None = None  # how many it runs at once


def kv_capacity(log: str) -> Capacity:
    """The first engine table whose patterns find a size in the log; the last time it is said counts."""
    log = _ESCAPES.sub("", log)
    lines = log.splitlines()
    for table in tables().values():
        found = _capacity(table.log_patterns, lines)
        if found != Capacity():
            return found
    return Capacity()


def _capacity(patterns: Mapping[str, str], lines: list[str]) -> Capacity:
    said: dict[str, str] = {}
    per_core: dict[str, int] = {}
    for line in lines:
        for fact, pattern in patterns.items():
            if (match := re.search(pattern, line)) is None:
                continue
            said[fact] = match.group(1)
            if fact == "kv_tokens":
                core = _CORE.search(line)
                key, size = core.group() if core else "", _int(match.group(1))
                per_core[key] = min(per_core.get(key, size), size)
    slots, context = (_int(said[k]) if k in said else None for k in ("slots", "context"))
    tokens: int | None = None
    if per_core:
        tokens = sum(per_core.values())
    elif "slot_tokens" in said:
        context = _int(said["slot_tokens"])
        unified = said.get("kv_unified") == "true"
        tokens = context if unified else context * slots if slots else None
    elif context is not None and "concurrency" in said:
        tokens = round(context * float(said["concurrency"].replace(",", "")))
    return Capacity(tokens, context, slots) if tokens is not None else Capacity()


def _int(text: str) -> int:
    return int(text.replace(",", ""))


def read_log(path: Path | str, limit: int = 4_000_000) -> str:
    """The first ``limit`` bytes of a log, where engines say what they are; empty when there is none."""
    try:
        with open(path, "rb") as handle:
            return handle.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


def last_lines(path: Path | str, count: int = 12) -> str:
    """The last lines that say anything, clipped to a screen's width or two; the frames of tracebacks say nothing."""
    lines = [line for line in _tail(path) if line.strip() and not _FRAME.match(line)]
    return "\n".join(_clip(line) for line in lines[-count:])


def first_error(path: Path | str) -> str | None:
    """The exception a dying engine raised first: those after it, in its parent processes, only say that it died."""
    return next((_clip(found.group(1)) for line in _tail(path) if (found := _RAISED.search(line))), None)


def _tail(path: Path | str, limit: int = 256_000) -> list[str]:
    try:
        with open(path, "rb") as handle:
            handle.seek(max(0, handle.seek(0, 2) - limit))
            text = handle.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in _ESCAPES.sub("", text).splitlines()]


def _clip(line: str, width: int = 240) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
