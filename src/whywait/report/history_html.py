"""The page of the runs of a folder: a figure over time, and every run in a table. Stands alone, no script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whywait.report import svg
from whywait.report.history import kinds, state, trend
from whywait.report.html import HEAD
from whywait.report.svg import Html, Plot, cat, clip, figure, scale_for, table, tag
from whywait.report.trial import amount

MOST = 400  # runs drawn; the table has all
_COLUMNS = (("ttft_ms.p95", "TTFT p95", "ms"), ("tpot_ms.p50", "TPOT p50", "ms"),
            ("goodput_share", "goodput, share", "share"), ("failed_share", "failed", "share"))  # fmt: skip


def render(result: Mapping[str, Any]) -> str:
    """The page of ``listing.history``."""
    title = f"{len(result['runs'])} runs in {clip(result['directory'], 120)}"
    body = [_chart(result), tag("section", tag("h2", "Runs") + _table(result))]
    if result["broken"]:
        rows = [[b["name"], b["why"]] for b in result["broken"]]
        body.append(
            tag("section", tag("h2", "Not read") + table(["folder", "why"], rows, "What could not be read", "text"))
        )
    header = tag("header", tag("p", "whywait history", class_="brand") + tag("h1", title))
    head = HEAD + tag("title", f"whywait: {title}") + Html(f"<style>{svg.STYLE}</style>")
    foot = tag("footer", f"whywait {result['whywait_version']}", class_="note")
    return (f'<!doctype html>\n<html lang="en"><head>{head}</head>\n'
            f"<body>{cat([header, tag('main', cat(body)), foot])}</body></html>\n")  # fmt: skip


def _chart(result: Mapping[str, Any]) -> Html:
    known = [r for r in result["runs"] if r["value"] is not None][-MOST:]
    name = f"{result['title']} over the runs"
    if len(known) < 2:
        return figure(name, "Fewer than two runs know this figure.", [], "trend")
    scale = scale_for([r["value"] for r in known], log=False)
    plot = Plot(220)
    plot.y_axis(scale, result["unit"])
    places = [(i / (len(known) - 1), 220 * (1 - scale(r["value"]))) for i, r in enumerate(known)]
    plot.line((0, 220), (1, 220), "axis")
    for i in (0, len(known) - 1):
        plot.text((places[i][0], 236), (known[i]["date"] or "–")[:10], "tick", "start" if not i else "end")
    at_of = {id(r): at for r, at in zip(known, places, strict=True)}
    for several in kinds(result).values():
        line = [at_of[id(r)] for i in several if id(r := result["runs"][i]) in at_of]
        plot.path(line, "line-p50") if len(line) > 1 else None
    for r, at in zip(known, places, strict=True):
        tip = f"{r['name']}, {r['date'] or 'no date'}, {r['at']}: {amount(r['value'], result['unit'])} {state(r)}"
        shape = "diamond" if r["made_by"] in ("simulated", "imported") else "dot"
        plot.mark(at, *((shape, "p50") if r["state"] == "whole" else ("cross", "cross")), tip)
    note = tag("p", "In the order of their dates, evenly spaced; a line joins runs of the same load that were made the "
               "same way. A cross is a run that is not whole, a diamond one that was simulated or imported.",
               class_="note")  # fmt: skip
    return figure(name, trend(result), [plot.svg(name, trend(result), "trend"), note], "trend")


def _table(result: Mapping[str, Any]) -> Html:
    rows, columns = [], [c for c in _COLUMNS if c[0] != result["figure"]]
    for r in result["runs"]:
        figures: Mapping[str, Any] = next((p["figures"] for p in r["points"] if p["load"] == r["at"]), {})
        told = "; ".join(filter(None, (r["verdict"], r["why"])))
        rows.append([r["name"], (r["date"] or "–")[:16].replace("T", " "), state(r) or "whole", r["engine"] or "–",
                     clip(r["model"] or "–"), clip(r["machine"] or "–"), r["at"] or "–",
                     amount(r["value"], result["unit"]), *(amount(figures.get(k), unit) for k, _, unit in columns),
                     clip(told or "–", 200)])  # fmt: skip
    head = ["run", "date", "state", "engine", "model", "machine", "load", result["title"], *(t for _, t, _ in columns),
            "verdict"]  # fmt: skip
    return table(head, rows, "Every run, oldest first")
