"""The report: one HTML page that stands alone. No script, no request to anywhere; every foreign word is escaped."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Callable
from typing import Any

from whywait.analyze.phases import account
from whywait.core.run import Run
from whywait.report import svg
from whywait.report.charts import View, curve, occupancy, phases, samples
from whywait.report.model_rows import model_rows
from whywait.report.neighbours import neighbours
from whywait.report.parts import bands, classes
from whywait.report.per_request import ecdf, timelines
from whywait.report.svg import Html, cat, clip, details, interval, table, tag
from whywait.report.text import CLASS_HEAD, DEVICE_NAMES, INVALID, PHASE_NAMES, class_rows
from whywait.units import NS_PER_S, ms, number, percent, size

MOST_FACTS = 300
STATES = {"holds": "● Holds", "undecided": "◐ Undecided", "fails": "○ Ruled out"}
MADE_BY = {"simulated": "SIMULATED: made by a model, not measured on any hardware.",
           "imported": "IMPORTED: measured by another tool; what it did not record is unknown here."}  # fmt: skip
METRICS = {"ttft_ms": "TTFT", "ttfa_ms": "time to first answer token", "tpot_ms": "TPOT", "itl_ms": "ITL",
           "chunk_gap_ms": "gap between chunks", "e2e_ms": "end to end", "tail_ms": "tail"}  # fmt: skip
DEFINITIONS = {
    "TTFT": "Time to first token: first token − origin. The origin is when the request was due in an open loop (rate), "
    "so that every lateness counts, and when it was sent in a closed loop (concurrency).",
    "ITL": "Inter-token latency: each gap between chunks divided by the tokens of its chunk, pooled over requests, by "
    "token. A chunk is not a token; gaps whose tokens are unknown are left out, and a doubt says so.",
    "TPOT": "Time per output token: (last − first token) ÷ (tokens − tokens of the first chunk), one per request. Does "
    "not apply where all tokens came at once; an interval where the service does not count its tokens.",
    "End to end": "Last token − origin. What comes after the last token (usage, end of stream) is the tail, apart.",
    "Goodput": "Requests per second that ended well within every SLO; its share is of all requests that were due, with "
    "the failed, truncated and timed-out ones in the denominator. Effective tokens are those of the good ones.",
    "Phases": "Every nanosecond of a request is in exactly one of client, network, frontend, queue, prefill, decode, "
    "stalled decode (a long gap inside another request's prefill), tail, not explained; they add up exactly.",
    "Device": "Wall time × devices, every instant in one category by what our requests show. Without the engine's "
    "steps it is seen from outside. Idle with work queued: requests waited while the device was not fed.",
    "Intervals": "Two-sided 95 %. “?” is a bound that so few requests cannot give (36 bound p90, 72 p95, 368 p99); "
    "“–” is unknown or does not apply, and never zero.",
}  # fmt: skip
HEAD = Html(
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    'img-src data:; base-uri \'none\'; form-action \'none\'"><meta name="referrer" content="no-referrer">'
    '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
)
_Cell = Callable[[dict[str, Any]], object]


def render(run: Run, summary: dict[str, Any]) -> str:
    """The page for ``run``; ``summary`` is ``analyze.summary.summarize(run)`` with ``verdicts`` (``Verdict.as_dict``)
    and ``headline`` filled in. Needs nothing beside it; well below 6 MB, since what is drawn is capped and said so."""
    view = View(run, summary, account(run))
    title = str(summary.get("headline") or "This run was not judged")
    found = samples(view)
    shapes = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2e_ms", "end-to-end time"))
    curves = (curve(view, metric, name) for metric, name in (shapes[0], shapes[2]))
    parts = (
        ("verdicts", "Verdicts", _cards(summary.get("verdicts") or [])),
        ("load", "Against load", tag("div", cat([phases(view), occupancy(view), *curves]), class_="grid two")),
        ("parts", "Who waits for what", tag("div", cat([bands(view), classes(view)]), class_="grid two")),
        ("figures", "All figures", _figures(view)),
        ("latency", "Latency distributions", tag("div", cat(ecdf(view, found, m, n) for m, n in shapes),
                                                 class_="grid three")),
        ("timeline", "Timeline of requests", neighbours(view) + timelines(view)),
        ("doubts", "Doubts", _doubts(summary["doubts"])),
        ("definitions", "Definitions", _definitions(summary)),
        ("repeat", "To repeat it", _repeat(run)),
    )  # fmt: skip
    links = tag("ul", cat(tag("li", tag("a", name, href=f"#{key}")) for key, name, _ in parts))
    top = tag("header", cat(_top(view, title)) + tag("nav", links, aria_label="Sections"))
    main = tag("main", cat(tag("section", tag("h2", name) + part, id=key) for key, name, part in parts))
    foot = tag("footer", f"whywait {run.manifest.whywait_version}, definitions {summary['definitions']}", class_="note")
    skip = tag("a", "Skip to the verdicts", class_="skip", href="#verdicts")
    head = HEAD + tag("title", f"whywait: {clip(title, 120)}") + Html(f"<style>{svg.STYLE}</style>")
    body = cat([svg.PATTERNS, skip, top, main, foot])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _top(view: View, title: str) -> list[Html]:
    m = view.run.manifest
    out = [tag("p", "whywait report", class_="brand")]
    if m.made_by in MADE_BY:
        out.append(tag("p", tag("strong", MADE_BY[m.made_by]), class_="banner", role="note"))
    if m.made_by == "simulated" and m.engine.get("described"):
        out.append(tag("p", "simulated: " + clip(str(m.engine["described"]), 300)))
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
    facts = [m.engine.get("model"), m.engine.get("name"), cpu, _when(m.zero_unix_ns),
             f"{len(view.run.requests):,} requests at {points}"]  # fmt: skip
    return [*out, tag("p", " · ".join(clip(f, 120) for f in facts if f), class_="meta")]


def _when(unix_ns: int) -> str:
    try:
        t = datetime.datetime.fromtimestamp(unix_ns / NS_PER_S, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return ""
    return t.strftime("%Y-%m-%d %H:%M:%S UTC") if unix_ns > 0 else ""


def _cards(verdicts: list[dict[str, Any]]) -> Html:
    if not verdicts:
        return tag("p", "This run was not judged.")
    lead = verdicts[0] if verdicts[0]["state"] != "fails" else None
    rest = tag("div", cat(_card(v, False) for v in verdicts if v is not lead), class_="grid")
    return (_card(lead, True) if lead else Html()) + rest


def _card(v: dict[str, Any], lead: bool) -> Html:
    state = tag("p", STATES[v["state"]] + tag("span", f" · {v['how']}", class_="how", title="how it is known"),
                class_="state")  # fmt: skip
    open_ = v["state"] != "fails"
    where = f"of {v['of']}" + (f" · {v['where']}" if v["where"] else "")
    share = tag("p", tag("b", percent(v["share"])) + where, class_="share") if v["share"] is not None and open_ else ""
    why = [(name, v[key]) for key, name in (("evidence", "Evidence"), ("against", "Against")) if v[key]]
    said = cat(tag("dt", n) + tag("dd", tag("ul", cat(tag("li", x) for x in items))) for n, items in why)
    facts = tag("dl", said) if why else Html()
    lever, step = (
        tag("dl", tag("dt", name) + tag("dd", v[key])) if v[key] and open_ else Html()
        for name, key in (("What would change it", "lever"), ("To settle it", "next_step"))
    )
    head = state + tag("h3", v["claim"]) + share
    kind = f"card verdict {v['state']}{' lead' if lead else ''}"
    if lead:
        return tag("article", head + tag("div", facts + tag("div", lever + step), class_="cols"), class_=kind)
    if v["state"] == "undecided":
        lever, step = lever + step, Html()
    words = [f"{name.lower()} ({len(items)})" for name, items in why] + (["next step"] if step else [])
    fold = details(", ".join(words).capitalize(), facts + step) if words else ""
    return tag("article", head + lever + fold, class_=kind)


def _figures(view: View) -> Html:
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
        ("requests ok / planned", lambda p: f"{p['counts'].get('ok', 0)} / {sum(p['counts'].values())}"),
        *((f"ended {k.replace('_', ' ')}", _within("counts", k, str)) for k in bad),
        ("requests/s", value("requests_per_s")),
        ("output tokens/s", _tokens_per_s),
        ("peak tokens/s", value("peak_tokens_per_s")), ("tokens/s of failed requests", value("wasted_tokens_per_s")),
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
        ("may the energy be believed?", lambda p: p["energy_state"] or "–"),
    ]  # fmt: skip
    rows += [(f"waits: {n}", _within("phases", k, _share)) for k, n in PHASE_NAMES.items()]
    rows += [(f"device: {n}", _within("occupancy", k, percent)) for k, n in DEVICE_NAMES.items()]
    return rows + model_rows()


def _tokens_per_s(p: dict[str, Any]) -> object:
    low, high = p.get("output_tokens_per_s_ci") or (None, None)
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


def _doubts(found: list[dict[str, str]]) -> Html:
    rows = ([d["what"], d["why"], d.get("next") or "–"] for d in found)
    head = ["what is doubtful", "why", "what to do"]
    return table(head, rows, "What may be wrong with these figures", "text") if found else tag("p", "None was found.")


def _definitions(summary: dict[str, Any]) -> Html:
    body = tag("dl", cat(tag("div", tag("dt", n) + tag("dd", text)) for n, text in DEFINITIONS.items()), class_="facts")
    return tag("div", body + tag("p", f"Definitions version {summary['definitions']}.", class_="note"), class_="card")


def _repeat(run: Run) -> Html:
    m = run.manifest
    command = shlex.join(["whywait", *map(str, m.command)]) if m.command else "–"
    versions = {"whywait": m.whywait_version, "schema": m.schema_version, "definitions": m.definitions}
    groups = {"versions": versions, "made by": m.made_by, "began": _when(m.zero_unix_ns), "seed": m.seed, "SLO": m.slo,
              "endpoint": m.endpoint, "engine": m.engine, "workload": m.workload, "machine": m.machine,
              "client": m.client, "clock": m.clock}  # fmt: skip
    rows = [pair for key, value in groups.items() for pair in svg.flat(key, value)]
    more = len(rows) - MOST_FACTS
    caption = "The manifest of this run" + (f"; {more} more facts are in manifest.json" if more > 0 else "")
    told = tag("p", tag("code", clip(command, 2000))) + tag("p", _floor(m.client.get("floor")))
    return told + table(["fact", "value"], rows[:MOST_FACTS], caption, "text")


def _floor(floor: Any) -> str:
    error = floor.get("stamp_error_ms") if isinstance(floor, dict) else None
    if not isinstance(error, dict) or error.get("p99") is None:
        return "The client's own floor was not measured."
    return (f"Client floor: at {floor.get('streams')} streams chunks were stamped {ms(error.get('p50'))} (p50), "
            f"{ms(error['p99'])} (p99) after they were sent; what is below that is the client.")  # fmt: skip
