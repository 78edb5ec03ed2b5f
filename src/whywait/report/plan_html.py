"""The page of a plan: an argument that somebody can read who never saw a profiler. Stands alone, no script."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from whywait.judge.plan_told import changed, made
from whywait.judge.plan_worded import device_hour, hour, looked, tied, whole_nodes
from whywait.physics.prices import HOURS_A_MONTH
from whywait.report import plan as rows
from whywait.report import svg
from whywait.report.html import HEAD
from whywait.report.svg import Html, Labels, Plot, cat, clip, figure, flat, scale_for, table, tag
from whywait.units import number, percent

STATES = {"answered": ("● Answered", "fails"), "in part": ("◐ In part", "undecided"), "open": ("○ Open", "holds")}
_ROW = 26
MOST = 14


def render(p: Mapping[str, Any]) -> str:
    """The page of ``planning.plan``."""
    parts = [
        ("decision", "The decision", _decision(p)),
        ("questions", "Five questions", tag("div", cat(map(_card, enumerate(p["questions"], 1))), class_="grid two")),
        ("candidates", "The candidates", _candidates(p)),
        ("turns", "What would turn it over", _list(rows.turning(p)) + _turns(p)),
        ("experiment", "The cheapest experiment", _list(rows.experiment(p))),
        ("screened", "What was left out, and by what", _list(rows.screening(p)) + _left_out(p)),
        ("prices", "Prices and data sheets", _prices(p) + _list(rows.resting(p))),
        ("repeat", "To make it again", _again(p)),
    ]  # fmt: skip
    title = str(p["headline"])
    links = tag("ul", cat(tag("li", tag("a", name, href=f"#{key}")) for key, name, _ in parts))
    top = [tag("p", "whywait plan", class_="brand")]
    if how := made(p):
        word, _, rest = how.partition(":")
        top.append(tag("p", tag("strong", word) + f":{rest}.", class_="banner"))
    top += [tag("h1", title, class_="long" if len(title) > 110 else None)]
    top += [tag("p", line, class_="meta") for line in (rows.asked(p), rows.money(p), looked(p), changed(p)) if line]
    header = tag("header", cat(top) + tag("nav", links, aria_label="Sections"))
    main = tag("main", cat(tag("section", tag("h2", name) + part, id=key) for key, name, part in parts))
    foot = tag("footer", f"whywait {p['whywait_version']}", class_="note")
    page = HEAD + tag("title", f"whywait: {clip(title, 120)}") + Html(f"<style>{svg.STYLE}</style>")
    return (f'<!doctype html>\n<html lang="en"><head>{page}</head>\n'
            f"<body>{cat([svg.PATTERNS, header, main, foot])}</body></html>\n")  # fmt: skip


def _candidates(p: Mapping[str, Any]) -> Html:
    told = table(_head(p), rows.rows_of(p), "Candidates looked at closely")
    return _costs(p) + _front(p) + told + _list(rows.marks(p, True))


def _again(p: Mapping[str, Any]) -> Html:
    how = "whywait plan --again plan.json, beside this page: the same inputs give the same figures."
    kept = {k: v for k, v in p["inputs"].items() if k != "offers"}
    return tag("p", how) + table(["fact", "value"], flat("inputs", kept), "Inputs", "text")


def _decision(p: Mapping[str, Any]) -> Html:
    """In sentences: what, what it costs, how sure, what is still open."""
    by = {r["name"]: r for r in p["rows"]}
    money, out = p["basis"]["currency"], []
    first = by.get(p["first"]) if p["first"] else None
    if first is None:
        out.append(tag("p", p["headline"] + "."))
    else:
        f = first["figures"]
        each, month = number(f["cost"]["value"]), number(first["paid"] * HOURS_A_MONTH)
        terms = (p["basis"]["offers"].get(first["machine"]) or p["basis"])["terms"]
        when = " if it is rented all the time" if terms == "on demand" else ", used or not"
        low, high = number(f["cost"]["low"]), number(f["cost"]["high"])
        span = "" if low == high else (f"; {low} to {high} {money} (80 %) with as many devices as it may turn out to "
                                       "need")  # fmt: skip
        out.append(tag("p", f"Take {first['name']}. It costs {hour(p, first)}; about {month} {money} a month "
                       f"are paid{when}. 1,000 requests that are served as promised come to {each} {money}"
                       f"{span}."))  # fmt: skip
        out.append(tag("p", _room(p, first)))
        if nodes := whole_nodes(p):
            out.append(tag("p", nodes[:1].upper() + nodes[1:] + "."))
        why, others = tied(p, first)
        if others:
            out.append(tag("p", f"It is not surely cheaper than {', '.join(others)}: the difference is {why}, so other "
                           f"reasons may decide between them. In brackets: {money} paid an hour for the size listed, "
                           "which surely does; it may turn out that fewer do."))  # fmt: skip
    open_ = [f"{i}. {q['question']}" for i, q in enumerate(p["questions"], 1) if q["state"] != "answered"]
    if open_:
        out.append(tag("p", tag("strong", "Not, or not wholly, answered: ") + " ".join(open_)))
    return cat(out)


def _room(p: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """What it has left, in sentences: for more load, for the growth that was named, for a node that is lost."""
    said = f"It has room for {rows._headroom(first)} more load."
    share, more = first["growth"], p["want"]["growth"]
    if share is not None:
        enough = "" if share >= p["want"]["share"] else (": too few, so plan for it with "
                                                         f"--rate {p['want']['rate'] * (1 + more):g}")  # fmt: skip
        said += f" With the growth of {percent(more)}, {percent(share)} of the requests are good{enough}."
    if first["loss"]:
        keeps = first["loss"]["keeps"]
        left = percent(first["loss"]["share"])
        said += (" It keeps its promise when a node is lost." if keeps else
                 f" When a node is lost it does not keep its promise: {left} are good.")  # fmt: skip
    return said


def _card(of: tuple[int, Mapping[str, Any]]) -> Html:
    i, q = of
    said, look = STATES[q["state"]]
    facts = [("Evidence", tag("ul", cat(tag("li", e) for e in q["evidence"])))] if q["evidence"] else []
    if q["command"]:
        facts.append(("To answer it", tag("code", q["command"])))
    body = tag("p", said, class_="state") + tag("h3", f"{i}. {q['question']}") + tag("p", q["answer"])
    body += tag("dl", cat(tag("dt", n) + tag("dd", x) for n, x in facts)) if facts else Html()
    return tag("article", body, class_=f"card verdict {look}")


def _head(p: Mapping[str, Any]) -> list[str]:
    return [f"{h}, {p['basis']['currency']}" if h.startswith(("per ", "paid ")) else h for h in rows.HEAD]


def _costs(p: Mapping[str, Any]) -> Html:
    """Cost of 1,000 good requests with its interval, a row per candidate."""
    mine = [r for r in rows.shown(p, MOST) if r["figures"]["cost"]["value"] is not None]
    if not mine:
        return Html()
    ends = [v for r in mine for v in (r["figures"]["cost"][k] for k in ("value", "low", "high")) if v is not None]
    scale = scale_for(ends, log=False)
    plot = Plot(len(mine) * _ROW, left=236, right=60, top=6, bottom=40)
    plot.x_axis(scale, f"{p['basis']['currency']} per 1,000 good requests")
    for i, r in enumerate(mine):
        y, f = (i + 0.5) * _ROW, r["figures"]["cost"]
        plot.text((0, y + 4), clip(rows._sign(p, r).strip() + " " + r["name"], 29), "label", "end", -8)
        if f["low"] is not None:
            plot.line((scale(f["low"]), y), (scale(f["high"]), y), "axis")
        tip = f"{r['name']}: {number(f['value'])} ({r['meets']}, {r['quality']})"
        plot.mark((scale(f["value"]), y), *(("dot", "p50") if r["eligible"] else ("cross", "cross")), tip)
        plot.text((1, y + 4), number(f["value"]), "value", dx=6)
    reading = "Dots may be ranked first; crosses may not: they may miss the SLO, or their answers are not tested. "
    reading += "Lines: with as many as it turns out to need, 80 %."
    return figure("What 1,000 good requests cost", reading, [plot.svg("Costs", reading, "costs")], "costs")


def _front(p: Mapping[str, Any]) -> Html:
    """Money an hour against latency; the front is named."""
    able = [r for r in rows.shown(p, 4 * MOST) if r["meets"] != "fails" and r["paid"] is not None]
    mine = [r for r in able if r["figures"]["latency"]["value"] is not None]
    if len(mine) < 2:
        return Html()
    x = scale_for([r["paid"] for r in mine], log=False)
    y = scale_for([r["figures"]["latency"]["value"] for r in mine] + [1.0], log=False)
    plot = Plot(260, left=54, bottom=44)
    plot.x_axis(x, f"{p['basis']['currency']} paid an hour")
    plot.y_axis(y, "95th percentile over its limit")
    plot.line((0, 260 * (1 - y(1.0))), (1, 260 * (1 - y(1.0))), "axis")
    labels = Labels(plot)
    for r in mine:
        at = (x(r["paid"]), 260 * (1 - y(r["figures"]["latency"]["value"])))
        plot.mark(at, *(("diamond", "p50") if r["front"] else ("cross", "cross")), r["name"])
        labels.keep_clear(at)
    for r in [r for r in mine if r["front"]][:5]:
        labels.put((x(r["paid"]), 260 * (1 - y(r["figures"]["latency"]["value"]))), clip(r["name"], 26))
    reading = (
        "Diamonds: nobody is better in everything (cost, goodput, latency, energy). Below the line the limits are kept."
    )
    return figure("Money against latency", reading, [plot.svg("Front", reading, "front")], "front")


def _turns(p: Mapping[str, Any]) -> Html:
    told = [[f"{f['assumption']} {f['by']}", f["first"] or f["note"], "yes" if f["flips"] else "no",
             "–" if f["margin"] is None or not math.isfinite(f["margin"]) else f"{f['margin']:.0%}".replace("%", " %")]
            for f in p["sensitivity"]["flips"]]  # fmt: skip
    return (
        table(
            ["assumption", "first then", "another one?", "ahead of the next by"],
            told,
            "Assumptions moved one at a time",
        )
        if told
        else Html()
    )


def _left_out(p: Mapping[str, Any]) -> Html:
    told = [[d["name"], d["by"], d["why"]] for d in p["screened"]] + [
        [r["name"], "cannot be", r["why"]] for r in p["refused"]
    ]
    return table(["kind", "left out by", "why"], told, "Kinds of engine left out", "text") if told else Html()


def _prices(p: Mapping[str, Any]) -> Html:
    told = [[m, "–", "–", "–", "no offer"] if o is None else
            [m, device_hour(o), o["terms"], o["date"], f"{o['name']}; {o['source']}"]
            for m, o in p["basis"]["offers"].items()]  # fmt: skip
    return table(["machine", "a device-hour", "terms", "date", "source"], told, "The prices compared by", "text")


def _list(lines: list[str]) -> Html:
    return tag("ul", cat(tag("li", tag("code", x[2:]) if x.startswith("→ ") else x) for x in lines))
