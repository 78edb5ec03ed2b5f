"""Engine tables of a user's own, from TOML (``--engine-file``). What is not understood is refused, never passed over.

The format is told in ``docs/engines.md``, with a whole example.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from whywait.core import bounded
from whywait.core.columns import REQUESTS
from whywait.engines.table import COUNTERS, GAUGES, HISTOGRAMS, LIMITS, LOG_FACTS, EngineTable, Metric
from whywait.errors import UsageError

TEXTS = ("name", "title", "metrics_path")
LISTS = ("metric_prefixes", "server_headers", "owned_by", "late_counters")
TABLES = ("metrics", "histograms", "flags", "request_fields", "log_patterns", "bodies")
ROOTS = ("timings", "metrics", "usage", "headers")  # what of an answer is kept; see ``net/outcome.py``
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
COLUMNS = tuple(
    c.name
    for c in REQUESTS
    if c.name.startswith("engine_") or c.name in ("cached_tokens", "output_tokens", "draft_tokens", "accepted_tokens")
)
BODIES = {"extra": "extra_body", "per_token": "per_token_body", "no_cache": "no_cache_body"}


def load(path: str | Path) -> EngineTable:
    """The table in a TOML file.

    Raises:
        UsageError: unreadable, or something in it is not of the format; the message says what is allowed there.
    """
    try:
        raw = bounded.toml(bounded.read_text(Path(path), bounded.MIB))
    except OSError as exc:
        raise UsageError(f"--engine-file {path}: {exc.strerror}", "give a TOML file, see docs/engines.md") from None
    except ValueError as exc:
        raise UsageError(f"--engine-file {path} is not TOML: {exc}", "see docs/engines.md") from None
    return _table(raw, str(path))


def _table(raw: Mapping[str, Any], where: str) -> EngineTable:
    _only(raw, (*TEXTS, *LISTS, *TABLES, "ignore_eos"), where, "key")
    values: dict[str, Any] = {k: _text(raw[k], f"{where}: {k}") for k in TEXTS if k in raw}
    if not values.get("name") or not raw.get("metric_prefixes"):
        raise UsageError(f"{where}: name and metric_prefixes must be given", 'such as metric_prefixes = ["tgi_"]')
    values.setdefault("title", values["name"])
    if not values.get("metrics_path", "/").startswith("/"):
        raise UsageError(f"{where}: metrics_path must begin with /")
    for key in LISTS:
        if key in raw:
            values[key] = tuple(_text(v, f"{where}: {key}") for v in _list(raw[key], f"{where}: {key}"))
    if "late_counters" in values:
        _only(values["late_counters"], COUNTERS, where, "counter")
        values["late_counters"] = frozenset(values["late_counters"])
    if not isinstance(raw.get("ignore_eos", False), bool):
        raise UsageError(f"{where}: ignore_eos must be true or false")
    of = {k: _dict(raw.get(k, {}), f"{where}: [{k}]") for k in TABLES}
    flags, logs = _texts(of["flags"], f"{where}: [flags]"), _texts(of["log_patterns"], f"{where}: [log_patterns]")
    _only(flags, LIMITS, where, "limit in [flags]")
    _only(logs, LOG_FACTS, where, "fact in [log_patterns]")
    for name, pattern in logs.items():
        _one_group(pattern, f"{where}: [log_patterns] {name}")
    histograms = _texts(of["histograms"], f"{where}: [histograms]")
    _only(histograms.values(), HISTOGRAMS, where, "histogram")
    table = EngineTable(
        **values,
        driven=False,
        ignore_eos=raw.get("ignore_eos", False),
        metrics={native: _metrics(v, f"{where}: [metrics] {native}") for native, v in of["metrics"].items()},
        histograms=histograms,
        flags=flags,
        request_fields=_fields(of["request_fields"], where),
        log_patterns=logs,
    )
    table = dataclasses.replace(table, **_bodies(of["bodies"], where))
    for native in (*table.metrics, *table.histograms, *table.metric_prefixes):
        if not NAME.fullmatch(native):
            raise UsageError(f"{where}: {native!r} cannot be the name of a metric", "letters, digits, _ and : only")
    for native in (*table.metrics, *table.histograms):
        if not native.startswith(table.metric_prefixes):
            given = ", ".join(table.metric_prefixes)
            raise UsageError(f"{where}: {native} has none of the metric_prefixes", f"they are: {given}")
    return table


def _metrics(value: Any, where: str) -> tuple[Metric, ...]:
    """``"running"``, or ``{name = "…", scale = 0.001, where = {label = "value"}}``, or a list of these."""
    found = []
    for one in value if isinstance(value, list) else [value]:
        spec = {"name": one} if isinstance(one, str) else _dict(one, where)
        _only(spec, ("name", "scale", "where"), where, "key")
        name, scale = _text(spec.get("name"), f"{where}: name"), spec.get("scale", 1.0)
        _only([name], (*GAUGES, *COUNTERS), where, "gauge or counter")
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
            raise UsageError(f"{where}: scale must be a number above 0")
        labels = _texts(_dict(spec.get("where", {}), f"{where}: where"), f"{where}: where")
        found.append(Metric(name, float(scale), tuple(labels.items())))
    return tuple(found)


def _fields(raw: Mapping[str, Any], where: str) -> dict[str, str]:
    fields = _texts(raw, f"{where}: [request_fields]")
    _only(fields.values(), COLUMNS, where, "column in [request_fields]")
    _only([path.partition(".")[0] for path in fields], ROOTS, where, "beginning of a path in [request_fields]")
    return {path.lower() if path.startswith("headers.") else path: column for path, column in fields.items()}


def _bodies(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    _only(raw, BODIES, where, "key in [bodies]")
    return {BODIES[k]: _dict(v, f"{where}: [bodies] {k}") for k, v in raw.items()}


def _one_group(pattern: str, where: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as exc:
        raise UsageError(f"{where} is not a regular expression: {exc}") from None
    if groups != 1:
        raise UsageError(f"{where} must have one group, it has {groups}", r"such as 'KV tokens: (\d+)'")


def _only(given: Iterable[str], allowed: Collection[str], where: str, what: str) -> None:
    unknown = sorted({str(g) for g in given} - set(allowed))
    if unknown:
        raise UsageError(f"{where}: no such {what}: {', '.join(unknown)}", f"allowed: {', '.join(allowed)}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where} must be a text")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{where} must be a list")
    return value


def _dict(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be a table")
    return value


def _texts(raw: Mapping[str, Any], where: str) -> dict[str, str]:
    return {k: _text(v, f"{where} {k}") for k, v in raw.items()}
