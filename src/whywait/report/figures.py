"""All figures of a report as one table with a column per load point; a table by class where classes are mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whywait.report.model_rows import model_rows
from whywait.report.svg import Html, clip, interval, table, tag
from whywait.report.text import CLASS_HEAD, DEVICE_NAMES, PHASE_NAMES, class_rows
from whywait.report.view import View
from whywait.units import ms, number, percent, size

METRICS = {"ttft_ms": "TTFT", "ttfa_ms": "time to first answer token", "tpot_ms": "TPOT", "itl_ms": "ITL",
           "chunk_gap_ms": "gap between chunks", "e2e_ms": "end to end", "tail_ms": "tail"}  # fmt: skip
_Cell = Callable[[dict[str, Any]], object]


def figures(view: View) -> Html:
    """Every figure of the summary that is known at some point, with its interval."""
    points = view.points
    rows: list[list[object]] = [["point", *(p["point"] for p in points)]]
    if any(p["label"] for p in points):
        rows.append(["label", *(clip(p["label"] or "") for p in points)])
    for name, cell in _rows(view.summary):
        cells = [cell(p) for p in points]
        rows += [[name, *cells]] if any(c != "–" for c in cells) else []
    head = [f"load ({view.axis})", *(view.short(p) for p in points)]
    note = "Small: 95 % intervals. ? upper bound unknown, too few requests. – unknown. ◂ knee. ◆ for another purpose."
    whole = table(head, rows, "All figures by load point") + tag("p", note, class_="note")
    mixed = class_rows(points)
    if not mixed:
        return whole
    said = "Each class is held to its own SLO; the share is of all its due requests, failed ones included."
    return whole + table(list(CLASS_HEAD), mixed, "By class of request") + tag("p", said, class_="note")


def _rows(summary: dict[str, Any]) -> list[tuple[str, _Cell]]:
    def value(key: str, show: Callable[[float | None], str] = number) -> _Cell:
        return lambda p: show(p.get(key))

    points = summary["points"]
    bad = [k for k in (points[0]["counts"] if points else []) if k != "ok" and any(p["counts"][k] for p in points)]
    rows: list[tuple[str, _Cell]] = [
        ("requests ok / planned", _own(lambda p: f"{p['counts'].get('ok', 0)} / {sum(p['counts'].values())}")),
        *((f"ended {k.replace('_', ' ')}", _within("counts", k, str)) for k in bad),
        ("requests/s", value("requests_per_s")),
        ("output tokens/s", _tokens_per_s),
        ("peak tokens/s", _own(value("peak_tokens_per_s"))),
        ("tokens/s of failed requests", _own(value("wasted_tokens_per_s"))),
    ]  # fmt: skip
    if summary["slo"] or summary["slo_of_classes"]:
        rows += [("goodput, requests/s", value("goodput_requests_per_s")),
                 ("goodput, share of due", value("goodput_share", percent)),
                 ("effective tokens/s", value("effective_tokens_per_s"))]  # fmt: skip
    thinks = any(p["ttfa_ms"]["p50"] != p["ttft_ms"]["p50"] for p in points)
    names = {k: v for k, v in METRICS.items() if thinks or k != "ttfa_ms"}
    if any((p.get("engine_ttft_ms") or {}).get("n") for p in points if "passive" not in p):
        names["engine_ttft_ms"] = "TTFT by the engine itself,"
    rows += [(f"{n} {q}", _quantile(k, q)) for k, n in names.items() for q in ("p50", "p90", "p95", "p99", "mean")]
    rows += [
        ("in flight, mean", lambda p: number(p["in_flight"]["mean"])),
        ("in flight, peak", lambda p: number(p["in_flight"]["peak"])),
        ("engine queue, mean", value("queue")), ("engine queue, peak", value("queue_max")),
        ("KV space in use, mean", value("kv_use", percent)), ("KV space in use, peak", value("kv_use_max", percent)),
        ("prompt tokens cached", value("cached_share", percent)), ("engine memory", value("memory_bytes", size)),
        ("power", value("power_w", lambda v: number(v, "W"))),
        ("energy per good request", value("energy_j_per_good_request", lambda v: number(v, "J"))),
        ("energy per million effective tokens", value("energy_j_per_million_effective_tokens",
                                                      lambda v: number(v, "J"))),
        ("may the energy be believed?", lambda p: p.get("energy_state") or "–"),
    ]  # fmt: skip
    rows += [(f"waits: {n}", _within("phases", k, _share)) for k, n in PHASE_NAMES.items()]
    rows += [(f"device: {n}", _within("occupancy", k, percent)) for k, n in DEVICE_NAMES.items()]
    return rows + model_rows()


def _own(cell: _Cell) -> _Cell:
    """A figure of our own requests: does not apply where the service was only watched."""
    return lambda p: "–" if "passive" in p else cell(p)


def _tokens_per_s(p: dict[str, Any]) -> object:
    low, high = (None, None) if "passive" in p else p.get("output_tokens_per_s_ci") or (None, None)
    return interval(p["output_tokens_per_s"], None if low is None else (low, high), number)


def _within(group: str, key: str, show: Callable[[Any], str]) -> _Cell:
    return lambda p: show((p[group]["shares"] if group == "occupancy" else p[group]).get(key))


def _share(phase: dict[str, Any] | None) -> str:
    return percent(phase["share"] if phase else None)


def _quantile(key: str, q: str) -> _Cell:
    def cell(p: dict[str, Any]) -> object:
        found, bounds = p[key], (p[key].get("bounds") or {}).get(q) or [None]
        if found[q] is None and bounds[0] is not None:
            return f"{ms(bounds[0])} – {ms(bounds[1])}"
        return interval(found[q], (found.get("ci") or {}).get(q), ms)

    return cell
