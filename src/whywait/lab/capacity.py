"""What an engine's own log says: of its KV cache, and of its death. Pure text work.

Wordings, from the engines' sources and logs:

* vLLM V1: ``GPU KV cache size: 25,088 tokens`` and ``Maximum concurrency for 2,048 tokens per request: 12.25x``, on two
  lines or (lately) one; ``CPU``, ``XPU``, ``GPU + host`` in place of ``GPU``. With data parallelism each
  ``EngineCore_DPn`` says its own; old versions repeat it per tensor-parallel worker, where the least counts.
* vLLM V0: only ``Maximum concurrency for N tokens per request: X x``.
* SGLang: ``max_total_num_tokens=171008, …, max_running_requests=48, context_len=32768``.
* TensorRT-LLM: ``Allocated 12.3 GiB for max tokens in paged KV cache (100352)``.
* llama.cpp: ``n_slots = 4, n_ctx_slot = 2048, kv_unified = 'false'``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NUMBER: Final = r"(\d[\d,]*)"
_VLLM: Final = re.compile(rf"KV cache size: {_NUMBER} tokens")
_VLLM_REQUEST: Final = re.compile(rf"Maximum concurrency for {_NUMBER} tokens per request: ([\d.,]+)x")
_VLLM_CORE: Final = re.compile(r"EngineCore_DP\d+")
_SGLANG: Final = re.compile(r"max_total_num_tokens=(\d+)")
_SGLANG_RUNNING: Final = re.compile(r"max_running_requests=(\d+)")
_SGLANG_CONTEXT: Final = re.compile(r"context_len=(\d+)")
_TRT: Final = re.compile(r"max tokens in paged KV cache \((\d+)\)")
_LLAMA: Final = re.compile(r"n_slots = (\d+), n_ctx_slot = (\d+), kv_unified = '(true|false)'")
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
    log = _ESCAPES.sub("", log)
    if found := _LLAMA.findall(log):
        slots, context, unified = found[-1]
        per_slot = int(context)
        return Capacity(per_slot if unified == "true" else per_slot * int(slots), per_slot, int(slots))
    if sizes := _SGLANG.findall(log):
        return Capacity(int(sizes[-1]), _last(_SGLANG_CONTEXT, log), _last(_SGLANG_RUNNING, log))
    if (size := _last(_TRT, log)) is not None:
        return Capacity(size)
    return _vllm(log.splitlines())


def _vllm(lines: Iterable[str]) -> Capacity:
    per_core: dict[str, int] = {}
    per_request, implied = None, None
    for line in lines:
        if size := _VLLM.search(line):
            core = _VLLM_CORE.search(line)
            key, tokens = core.group() if core else "", _int(size.group(1))
            per_core[key] = min(per_core.get(key, tokens), tokens)
        if request := _VLLM_REQUEST.search(line):
            per_request = _int(request.group(1))
            implied = round(per_request * float(request.group(2).replace(",", "")))
    return Capacity(sum(per_core.values()) if per_core else implied, per_request)


def _last(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.findall(text)
    return _int(found[-1]) if found else None


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
