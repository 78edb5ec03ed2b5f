"""Engines as data. ``detect`` finds which one answers; ``by_name`` looks one up."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from whywait.engines import llama_cpp, sglang, tensorrt_llm, user, vllm
from whywait.engines.table import COUNTERS, GAUGES, HISTOGRAMS, LIMITS, LOG_FACTS, EngineTable, Metric

__all__ = ["COUNTERS", "ENGINES", "GAUGES", "HISTOGRAMS", "LIMITS", "LOG_FACTS", "EngineTable", "Metric", "by_name",
           "detect", "metrics_paths", "request_fields", "tables", "use_file"]  # fmt: skip

ENGINES: dict[str, EngineTable] = {t.name: t for t in (llama_cpp.TABLE, vllm.TABLE, sglang.TABLE, tensorrt_llm.TABLE)}
#: Names the file of a user's own table: our child processes (sampler, shards) find it there too.
FILE_ENV = "WHYWAIT_ENGINE_FILE"


def tables() -> dict[str, EngineTable]:
    """All tables by name, a user's own first: it may replace one of ours.

    Raises:
        UsageError: the user's file is not a table.
    """
    return _with(os.environ.get(FILE_ENV, ""))


@functools.lru_cache(maxsize=8)
def _with(path: str) -> dict[str, EngineTable]:
    if not path:
        return ENGINES
    own = user.load(path)
    return {own.name: own, **{name: t for name, t in ENGINES.items() if name != own.name}}


def use_file(path: str) -> EngineTable:
    """Use a user's own table from here on, in this process and those it starts.

    Raises:
        UsageError: it is not a table.
    """
    name = user.load(path).name
    os.environ[FILE_ENV] = os.path.abspath(path)
    _with.cache_clear()  # the file may have changed since it was read
    return tables()[name]


def request_fields() -> Mapping[str, str]:
    """Where in the last stream events engines report of themselves -> columns of the requests table; all tables."""
    return {path: column for table in tables().values() for path, column in table.request_fields.items()}


def metrics_paths() -> tuple[str, ...]:
    """Where engines publish their metrics, the usual place first."""
    return tuple(dict.fromkeys(["/metrics", *(t.metrics_path for t in tables().values())]))


def by_name(name: str | None) -> EngineTable | None:
    """The table of that name (``llama.cpp``, ``vllm``), or None."""
    return tables().get(name or "")


def detect(
    metrics_text: str | None = None, headers: Mapping[str, str] | None = None, models_json: Any = None
) -> EngineTable | None:
    """Which engine gave these, by metric names, then the ``Server`` header, then ``owned_by`` of ``/v1/models``.

    In that order because proxies rewrite headers and gateways rewrite model lists, but nobody renames metrics.
    None when nothing matches: no guess.
    """
    if metrics_text:
        lines = metrics_text.splitlines()
        for table in tables().values():
            if any(line.startswith(table.metric_prefixes) for line in lines):
                return table
    server = next((v for k, v in (headers or {}).items() if k.lower() == "server"), "").lower()
    owners = _owners(models_json)
    for table in tables().values():
        if server and server.startswith(table.server_headers):
            return table
    for table in tables().values():
        if owners.intersection(table.owned_by):
            return table
    return None


def _owners(models_json: Any) -> set[str]:
    data = models_json.get("data") if isinstance(models_json, Mapping) else None
    if not isinstance(data, list):
        return set()
    return {str(m["owned_by"]) for m in data if isinstance(m, Mapping) and "owned_by" in m}
