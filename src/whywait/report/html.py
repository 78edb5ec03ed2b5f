"""The report: one HTML page that stands alone. It asks nothing of any server; every foreign word is escaped. Its only
script makes the timelines zoomable (``zoom.js``), allowed by its hash; without it nothing is missing but that."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import json
import shlex
from importlib.resources import files
from typing import Any

from whywait.analyze.bill import Ask
from whywait.analyze.phases import account
from whywait.core.run import Run
from whywait.core.secrets import clean, cleaned
from whywait.report import curves, svg, timelines
from whywait.report.cards import STATES, cards, strip
from whywait.report.cost import cost
from whywait.report.cost import figures as billed
from whywait.report.definitions import DEFINITIONS
from whywait.report.ecdf import distributions
from whywait.report.figures import figures
from whywait.report.knee import headline as found_in_words
from whywait.report.neighbours import neighbours
from whywait.report.parts import bands, classes
from whywait.report.stacks import occupancy, phases
from whywait.report.svg import Html, cat, clip, details, table, tag
from whywait.report.text import INVALID
from whywait.report.view import View
from whywait.units import NS_PER_S, ms, number, percent

__all__ = ["HEAD", "STATES", "render"]

MOST_FACTS, MOST_MANIFEST = 300, 60_000
MADE_BY = {"simulated": "SIMULATED: made by a model, not measured on any hardware.",
           "imported": "IMPORTED: measured by another tool; what it did not record is unknown here."}  # fmt: skip


def head(script: str = "") -> Html:
    """What stands in the head of a page: nothing may be loaded; ``script``, if any, may run and no other."""
    allowed = ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed = f"script-src 'sha256-{digest}'; "
    return Html(
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f"{allowed}img-src data:; base-uri 'none'; form-action 'none'\">"
        '<meta name="referrer" content="no-referrer">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
    )


HEAD = head()


def render(run: Run, summary: dict[str, Any], ask: Ask | None = None) -> str:
    """The page for ``run``; ``summary`` is ``analyze.summary.summarize(run)`` with ``verdicts`` (``Verdict.as_dict``)
    and ``headline`` filled in; ``ask`` is what it is billed by, if not by the shipped offers. Needs nothing beside it;
    well below 6 MB, since what is drawn is capped and said so."""
    view = View(run, summary, account(run))
    title = str(summary.get("headline") or "This run was not judged")
    parts, zoomable = _parts(view, ask)
    links = tag("ul", cat(tag("li", tag("a", name, href=f"#{key}")) for key, name, _ in parts))
    top = tag("header", cat(_top(view, title)) + tag("nav", links, aria_label="Sections"))
    main = tag("main", cat(_section(*part) for part in parts), id="main")
    foot = tag("footer", f"whywait {run.manifest.whywait_version}, definitions {summary['definitions']}", class_="note")
    skip = tag("a", "Skip to the charts", class_="skip", href="#main")
    script, code = Html(), ""
    if zoomable:
        code = files("whywait.report").joinpath("zoom.js").read_text("utf-8")
        script = _data(timelines.data(view, zoomable)) + Html(f"<script>{code}</script>")
    first = head(code) + tag("title", f"whywait: {clip(title, 120)}") + Html(f"<style>{svg.STYLE}</style>")
    body = cat([svg.PATTERNS, skip, top, main, foot, script])
    return f'<!doctype html>\n<html lang="en"><head>{first}</head>\n<body>{body}</body></html>\n'


def _parts(view: View, ask: Ask | None) -> tuple[list[tuple[str, str, Html]], list[timelines.Drawn]]:
    """(key, title, body) of each section, and the timelines that can be zoomed."""
    verdicts, doubts = view.summary.get("verdicts") or [], view.summary["doubts"]
    lead = curves.leading(view)
    others = [curves.curve(view, m, n) for m, n in curves.SHAPES.items() if m != lead]
    seen = [phases(view), occupancy(view), curves.curve(view, lead, curves.SHAPES[lead]),
            cost(view, billed(view.run, ask))]  # fmt: skip
    lanes, zoomable = timelines.timelines(view)
    shapes = distributions(view)
    parts = [
        ("glance", "At a glance", strip(verdicts, len(doubts)) + tag("div", cat(seen), class_="grid two four")),
        ("verdicts", "Verdicts", cards(verdicts)),
        ("load", "Against load", tag("div", cat(others), class_="grid two")),
        ("parts", "Who waits for what", tag("div", cat([bands(view), classes(view)]), class_="grid two")),
        ("latency", "Latency distributions", tag("div", shapes, class_="grid two four")),
        ("timeline", "Timeline of requests", neighbours(view) + lanes),
        ("figures", "All figures", figures(view)),
        ("doubts", "Doubts", _doubts(doubts)),
        ("definitions", "Definitions", _definitions(view.summary)),
        ("repeat", "To repeat it", _repeat(view.run)),
    ]
    if view.summary.get("find"):
        parts.insert(2, ("find", "The highest rate", _find(view.summary["find"])))
    if view.passive:  # no request of ours: these would be empty frames
        told = any(p[m]["p50"] is not None for p in view.points for m in curves.SHAPES)
        empty = {"parts"} | (set() if told else {"load"}) | (set() if shapes else {"latency"})
        parts = [p for p in parts if p[0] not in empty]
        parts = [(k, "Timeline", body) if k == "timeline" else (k, name, body) for k, name, body in parts]
    return parts, zoomable


def _section(key: str, title: str, body: Html) -> Html:
    return tag("section", tag("h2", title, id=f"{key}-title") + body, id=key, aria_labelledby=f"{key}-title")


def _data(found: dict[str, Any]) -> Html:
    """As a block that is data and never runs; no ``<`` in it, so that nothing can end it."""
    text = json.dumps(cleaned(found), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="timelines-data">{text}</script>')


def _top(view: View, title: str) -> list[Html]:
    m = view.run.manifest
    out = [tag("p", "whywait report", class_="brand")]
    if m.made_by in MADE_BY:
        what = f" {clip(m.engine['described'], 300)}" if m.made_by == "simulated" and m.engine.get("described") else ""
        out.append(tag("p", tag("strong", MADE_BY[m.made_by]) + what, class_="banner", role="note"))
    if m.partial or view.summary["partial"]:
        why = clip(m.partial_reason, 300) or "it was cut short"
        said = tag("strong", "PARTIAL") + f": {why}. What was measured until then is kept."
        out.append(tag("p", said, class_="banner", role="note"))
    for why in view.summary["invalid"]:
        out.append(tag("p", tag("strong", INVALID.partition(":")[0]) + INVALID.partition(":")[2] + f" {why}.",
                       class_="banner", role="note"))  # fmt: skip
    out.append(tag("h1", title, class_="long" if len(title) > 110 else None))
    machine = m.machine.get("client")
    cpu = machine.get("cpu") if isinstance(machine, dict) else None
    points = f"{len(view.points)} load point{'' if len(view.points) == 1 else 's'}"
    sent = "watched, nothing was sent" if view.passive else f"{len(view.run.requests):,} requests"
    facts = [m.engine.get("model"), m.engine.get("name"), cpu, _when(m.zero_unix_ns), f"{sent} at {points}"]
    return [*out, tag("p", " · ".join(clip(f, 120) for f in facts if f), class_="meta")]


def _when(unix_ns: int) -> str:
    try:
        t = datetime.datetime.fromtimestamp(unix_ns / NS_PER_S, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return ""
    return t.strftime("%Y-%m-%d %H:%M:%S UTC") if unix_ns > 0 else ""


def _find(find: dict[str, Any]) -> Html:
    """What ``whywait find`` found: its interval in a sentence, and a row per probe."""
    rows = []
    for p in sorted(find["probes"], key=lambda p: float(p["rate"])):
        worst = min(p["rules"], key=lambda r: 1.0 if r["share"] is None else r["share"])
        low, high = worst["share_interval"]
        rows.append([number(p["rate"]), p["answer"], percent(worst["share"]), f"{low:.1%} – {high:.1%}",
                     worst["requests"], f"{p['seconds']:.0f}"])  # fmt: skip
    head = ["requests/s", "kept", "good", "surely between", "requests", "seconds"]
    words = found_in_words(find)
    said = tag("p", f"{words[:1].upper()}{words[1:]}.")
    return said + table(
        head, rows, f"Probes of the search; all answers right with {percent(1 - find['error_probability'])}"
    )


def _doubts(found: list[dict[str, str]]) -> Html:
    rows = ([d["what"], d["why"], d.get("next") or "–"] for d in found)
    head = ["what is doubtful", "why", "what to do"]
    return table(head, rows, "What may be wrong with these figures", "text") if found else tag("p", "None was found.")


def _definitions(summary: dict[str, Any]) -> Html:
    body = tag("dl", cat(tag("div", tag("dt", n) + tag("dd", text)) for n, text in DEFINITIONS.items()), class_="facts")
    return tag("div", body + tag("p", f"Definitions version {summary['definitions']}.", class_="note"), class_="card")


def _repeat(run: Run) -> Html:
    m = run.manifest
    command = shlex.join(["whywait", *(clean(str(word)) for word in m.command)]) if m.command else "–"
    versions = {"whywait": m.whywait_version, "schema": m.schema_version, "definitions": m.definitions}
    groups = {"versions": versions, "made by": m.made_by, "began": _when(m.zero_unix_ns), "seed": m.seed, "SLO": m.slo,
              "endpoint": m.endpoint, "engine": m.engine, "workload": m.workload, "machine": m.machine,
              "client": m.client, "clock": m.clock, "journey": m.journey}  # fmt: skip
    rows = [pair for key, value in groups.items() for pair in svg.flat(key, value)]
    more = len(rows) - MOST_FACTS
    caption = "The manifest of this run" + (f"; {more} more facts are in manifest.json" if more > 0 else "")
    told = tag("p", tag("code", clip(command, 2000))) + tag("p", _floor(m.client.get("floor")))
    whole = json.dumps(cleaned(dataclasses.asdict(m)), indent=1, default=str, ensure_ascii=False)
    cut = len(whole) - MOST_MANIFEST
    name = "The manifest as JSON" + (f", less its last {cut:,} characters (manifest.json has them)" if cut > 0 else "")
    raw = tag("pre", tag("code", whole[:MOST_MANIFEST]), tabindex="0", role="region", aria_label=name)
    facts = table(["fact", "value"], rows[:MOST_FACTS], caption, "text")
    return told + facts + details(name, raw, class_="data noprint")


def _floor(floor: Any) -> str:
    error = floor.get("stamp_error_ms") if isinstance(floor, dict) else None
    if not isinstance(error, dict) or error.get("p99") is None:
        return "The client's own floor was not measured."
    return (f"Client floor: at {floor.get('streams')} streams chunks were stamped {ms(error.get('p50'))} (p50), "
            f"{ms(error['p99'])} (p99) after they were sent; what is below that is the client.")  # fmt: skip
