"""Engines as data. ``detect`` finds which one answers; ``by_name`` looks one up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whywait.engines import llama_cpp, vllm
from whywait.engines.table import COUNTERS, GAUGES, HISTOGRAMS, LIMITS, EngineTable, Metric

__all__ = ["COUNTERS", "ENGINES", "GAUGES", "HISTOGRAMS", "LIMITS", "EngineTable", "Metric", "by_name", "detect"]

ENGINES: dict[str, EngineTable] = {t.name: t for t in (llama_cpp.TABLE, vllm.TABLE)}


def by_name(name: str | None) -> EngineTable | None:
    """The table of that name (``llama.cpp``, ``vllm``), or None."""
    return ENGINES.get(name or "")


def detect(
    metrics_text: str | None = None, headers: Mapping[str, str] | None = None, models_json: Any = None
) -> EngineTable | None:
    """Which engine gave these, by metric names, then the ``Server`` header, then ``owned_by`` of ``/v1/models``.

    In that order because proxies rewrite headers and gateways rewrite model lists, but nobody renames metrics.
    None when nothing matches: no guess.
    """
    if metrics_text:
        lines = metrics_text.splitlines()
        for table in ENGINES.values():
            if any(line.startswith(table.metric_prefixes) for line in lines):
                return table
    server = next((v for k, v in (headers or {}).items() if k.lower() == "server"), "").lower()
    owners = _owners(models_json)
    for table in ENGINES.values():
        if server and server.startswith(table.server_headers):
            return table
    for table in ENGINES.values():
        if owners.intersection(table.owned_by):
            return table
    return None


def _owners(models_json: Any) -> set[str]:
    data = models_json.get("data") if isinstance(models_json, Mapping) else None
    if not isinstance(data, list):
        return set()
    return {str(m["owned_by"]) for m in data if isinstance(m, Mapping) and "owned_by" in m}
