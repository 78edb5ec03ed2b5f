"""A Grafana dashboard for what the OpenMetrics export writes, opened on the time of the run.

Every query is made of the families in ``export_families``; the data source, the run and its points are variables, so
one dashboard serves all runs that were put into a Prometheus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whywait import __version__
from whywait.report import export_families as f
from whywait.report.export import Chosen
from whywait.report.export_families import Family
from whywait.report.export_metrics import step_of
from whywait.units import NS_PER_S

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
PICK = '{run=~"$run",point=~"$point"}'
SCHEMA = 39  # of the dashboard's JSON, Grafana 11
_Query = tuple[str, str]  # PromQL, legend


def dashboard(chosen: Chosen) -> dict[str, Any]:
    """The dashboard as Grafana imports it (Dashboards → New → Import)."""
    start, end = chosen.span
    window = max(5, round(4 * step_of(chosen) / NS_PER_S))
    panels: list[dict[str, Any]] = []
    for place, panel in enumerate(_panels()):
        x, y = 12 * (place % 2), 8 * (place // 2)
        panels.append({"id": place + 1, "datasource": SOURCE, "gridPos": {"h": 8, "w": 12, "x": x, "y": y}, **panel})
    return {
        "uid": "whywait-run",
        "title": "whywait: what a run waited on",
        "description": f"Made by whywait {__version__} for {chosen.title}. Fill it with 'whywait export RUN --to "
        "openmetrics' and 'promtool tsdb create-blocks-from openmetrics'.",
        "tags": ["whywait", "llm", "inference"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "",
        "time": {"from": chosen.iso(start - 2 * NS_PER_S), "to": chosen.iso(end + 5 * NS_PER_S)},
        "templating": {"list": _variables(window)},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def queries(board: dict[str, Any]) -> list[str]:
    """The PromQL of every panel and variable."""
    found = [t["expr"] for p in board["panels"] for t in p["targets"]]
    return [*found, *(v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query")]


def _variables(window_s: int) -> list[dict[str, Any]]:
    windows = sorted({window_s, 5, 15, 30, 60, 300})
    named: list[dict[str, Any]] = [{"name": "datasource", "label": "Data source", "type": "datasource",
                                    "query": "prometheus", "current": {}, "hide": 0}]  # fmt: skip
    for name, label, of in (("run", "Run", f.INFO.name + "_info"), ("point", "Load point", _info('{run=~"$run"}'))):
        query = {"query": f"label_values({of}, {name})", "refId": name}
        named.append({"name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query,
                      "definition": query["query"], "multi": True, "includeAll": True, "allValue": ".*", "refresh": 2,
                      "sort": 3, "current": {"text": ["All"], "value": ["$__all"]}})  # fmt: skip
    texts = [f"{w}s" for w in windows]
    options = [{"text": t, "value": t, "selected": t == f"{window_s}s"} for t in texts]
    now = {"text": f"{window_s}s", "value": f"{window_s}s"}
    named.append({"name": "window", "label": "Rates over", "type": "custom", "query": ",".join(texts),
                  "options": options, "current": now})  # fmt: skip
    return named


def _panels() -> list[dict[str, Any]]:
    by_point = "sum by (run, point, load)"
    return [
        _lines("Requests in each phase", "short", [(f"sum by (phase) ({_rate(f.PHASE)})", "{{phase}}")], stack=True,
               about="Seconds of a phase per second: how many requests were in it at a time. Entered when they end."),
        _lines("Where the requests are", "short", [
            (f"{by_point} ({_of(f.IN_FLIGHT)})", "in flight, {{load}}"),
            (f"sum by (run, point) ({_of(f.READINGS['running'])})", "running, by the engine"),
            (f"sum by (run, point) ({_of(f.READINGS['waiting'])})", "waiting, by the engine")]),
        _lines("Time to first token", "s", _quantiles(f.TTFT)),
        _lines("Time per output token", "s", _quantiles(f.TPOT)),
        _lines("Gap between chunks", "s", _quantiles(f.GAP)),
        _lines("End to end", "s", _quantiles(f.E2E)),
        _lines("Output tokens per second", "short", [(f"{by_point} ({_rate(f.OUTPUT)})", "{{load}}"),
                                                     (f"sum ({_rate(f.TOTALS['output_tokens_total'])})",
                                                      "by the engine's counter")]),
        _lines("Requests per second", "reqps", [(f"sum by (outcome) ({_rate(f.REQUESTS)})", "{{outcome}}"),
                                                (f"sum ({_rate(f.GOOD)})", "within the SLO")]),
        _lines("KV space in use", "percentunit", [(_of(f.READINGS["kv_use"]), "{{source}}, {{load}}")], most=1),
        _lines("Power", "watt", [(_of(f.READINGS["power_watts"]), "{{source}} {{gpu}}")]),
        _lines("Device busy", "percentunit", [(_of(f.READINGS["busy_share"]), "{{source}} {{gpu}}")], most=1),
        _lines("CPU cores in use", "short", [(_rate(f.TOTALS["cpu_seconds_total"]), "{{source}}")]),
        _bars("What the devices were in (steady window)", "percentunit", f.WINDOW_DEVICE, "{{state}}, {{load}}"),
        _bars("Goodput: share of all due requests", "percentunit", f.WINDOW_SHARE, "{{load}}"),
        _bars("TTFT of the steady window (exact)", "s", f.WINDOW_TTFT, "p{{quantile}}, {{load}}"),
        _bars("Energy by good request", "joule", f.ENERGY, "{{load}}"),
    ]  # fmt: skip


def _info(pick: str) -> str:
    return f"{f.INFO.name}_info{pick}"


def _of(family: Family) -> str:
    return f"{family.name}{PICK}"


def _rate(family: Family) -> str:
    return f"rate({family.name}_total{PICK}[$window])"


def _quantiles(family: Family) -> list[_Query]:
    grown = f"sum by (le) (rate({family.name}_bucket{PICK}[$window]))"
    found = [(f"histogram_quantile({q}, {grown})", f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)]
    mean = f"sum (rate({family.name}_sum{PICK}[$window])) / sum (rate({family.name}_count{PICK}[$window]))"
    return [*found, (mean, "mean")]


def _targets(of: Sequence[_Query], instant: bool = False) -> list[dict[str, Any]]:
    return [{"refId": chr(65 + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend, "instant": instant,
             "range": not instant} for i, (expr, legend) in enumerate(of)]  # fmt: skip


def _lines(title: str, unit: str, of: Sequence[_Query], stack: bool = False, **more: Any) -> dict[str, Any]:
    custom = {"lineWidth": 1, "fillOpacity": 60 if stack else 8, "showPoints": "auto", "spanNulls": 15_000,
              "stacking": {"mode": "normal" if stack else "none", "group": "A"}}  # fmt: skip
    defaults: dict[str, Any] = {"unit": unit, "min": 0, "custom": custom}
    if "most" in more:
        defaults["max"] = more["most"]
    return {"type": "timeseries", "title": title, "description": more.get("about", ""), "targets": _targets(of),
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": {"legend": {"displayMode": "table", "placement": "right", "calcs": ["mean", "max"]},
                        "tooltip": {"mode": "multi", "sort": "desc"}}}  # fmt: skip


def _bars(title: str, unit: str, family: Family, legend: str) -> dict[str, Any]:
    """A figure of the whole steady window: one sample a point, looked up over the range that is shown."""
    of = [(f"last_over_time({_of(family)}[$__range])", legend)]
    return {"type": "bargauge", "title": title, "description": family.about, "targets": _targets(of, instant=True),
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "options": {"displayMode": "basic", "orientation": "horizontal", "valueMode": "color",
                        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}}  # fmt: skip
