"""The page of a comparison of answers: claims, distributions, tasks, degeneration. Stands alone, no script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from whywait.report import quality as rows
from whywait.report.html import STATES
from whywait.report.page import page
from whywait.report.svg import Html, Plot, cat, clip, figure, flat, table, tag

LOOKS = {"holds": "fails", "fails": "holds", "undecided": "undecided"}  # the report's alarm is a cause that holds
MOST = 24  # categories drawn; the table has all
BINS = 36
_ROW = 24
LEAST_KL = 1e-6  # nats; below it the chart has one bar


def render(result: Mapping[str, Any]) -> str:
    """The page of ``qualifying.Comparison.result``."""
    parts = [("claims", "Claims", tag("div", cat(map(_card, result["claims"])), class_="grid two"))]
    found, tasks = result["agreement"], result["tasks"]
    if found["figures"]:
        body = table(rows.AGREEMENT_HEAD, rows.agreement_rows(found["figures"]), "Distributions over the next token")
        body += _histogram(result["texts"]) + table(rows.KIND_HEAD, rows.kind_rows(found["kinds"]), "By kind of text")
        parts.append(("agreement", "Distributions", body))
    if tasks:
        body = _changes(tasks["accuracy"]) + table(rows.TASK_HEAD, rows.task_rows(tasks["accuracy"]), "Accuracy")
        parts.append(("tasks", "Tasks", body))
        body = table(rows.SIGN_HEAD, rows.sign_rows(tasks["degeneration"]), "Signs of degeneration")
        parts.append(("degeneration", "Degeneration", body))
    notes = cat(tag("p", line, class_="note") for line in rows.ways(result))
    parts += [
        ("doubts", "Doubts", notes + _doubts(result)),
        ("repeat", "To repeat it", table(["fact", "value"], flat("plan", dict(result["plan"])), "The plan", "text")),
    ]
    return page(result, parts, "whywait comparison of answers", "What both arms were asked is here.")


def _card(c: Mapping[str, Any]) -> Html:
    show = rows.ANYHOW[c["figure"]]
    state = tag("p", STATES[c["state"]].replace("Not the cause", "Fails"), class_="state")
    value = "–" if c["value"] is None else show(c["value"])
    share = tag("p", tag("b", value) + f" ({rows.between(c['low'], c['high'], show)})", class_="share")
    more = [("To settle it", c["next_step"])] if c["next_step"] else []
    facts = cat(tag("dt", n) + tag("dd", x) for n, x in more)
    body = state + tag("h3", c["claim"]) + share + (tag("dl", facts) if facts else "")
    return tag("article", body, class_=f"card verdict {LOOKS[c['state']]}")


def _histogram(texts: Sequence[Mapping[str, Any]]) -> Html:
    """How KL is spread over positions, on a logarithmic axis: a mean hides a few bad ones."""
    kls = [v for t in texts for v in t["kl"] if v is not None]
    high = max([*kls, 10 * LEAST_KL])
    if not kls:
        return Html()
    low, top = math.log10(LEAST_KL), math.log10(high)
    counts = [0] * BINS
    for v in kls:
        share = (math.log10(max(v, LEAST_KL)) - low) / (top - low)
        counts[min(int(share * BINS), BINS - 1)] += 1
    plot = Plot(150, left=54, bottom=40)
    y, most = 150.0, max(counts)
    for i, n in enumerate(counts):
        if n:
            tall = y * n / most
            end = 10 ** (low + (i + 1) / BINS * (top - low))
            plot.rect((i / BINS, y - tall), (0.9 / BINS, tall), "f-decode", f"{n} positions up to {end:.2g} nats")
    plot.line((0, y), (1, y), "axis")
    for exponent in range(math.ceil(low), math.floor(top) + 1):
        plot.text(((exponent - low) / (top - low), y + 16), f"1e{exponent}", "tick", "middle")
    plot.text((0.5, y + 34), "KL(A‖B) of a position, nats (at least)", "tick", "middle")
    plot.text((0, 10), str(most), "tick", "end", -6)
    reading = f"Positions by how far B's distribution is from A's; the first bar has all below {LEAST_KL:g} nats."
    return figure("Divergence, position by position", reading, [plot.svg("Divergence", reading, "kl")], "kl")


def _changes(found: Sequence[Mapping[str, Any]]) -> Html:
    """The change of accuracy per category with its interval, around none."""
    told = [r for r in found if r["drop"] is not None and r["low"] is not None][:MOST]
    if not told:
        return Html()
    most = max([0.05, *(abs(v) for r in told for v in (r["low"], r["high"]))]) * 1.1

    def at(value: float) -> float:
        return 0.5 + 0.5 * float(min(max(value / most, -1.0), 1.0))

    plot = Plot(len(told) * _ROW, left=160, right=70, top=6, bottom=34)
    plot.line((0.5, 0), (0.5, plot.height), "axis")
    for t in (-0.9 * most, 0.0, 0.9 * most):
        plot.text((at(t), plot.height + 16), rows.points(t) if t else "no change", "tick", "middle")
    for i, r in enumerate(told):
        y = (i + 0.5) * _ROW
        name = r["name"].partition(": ")[2] or "all"
        plot.text((0, y + 4), clip(name, 24), "label", "end", -8)
        plot.line((at(r["low"]), y), (at(r["high"]), y), "axis")
        plot.mark((at(r["drop"]), y), "dot", "f-decode", f"{name}: {rows.points(r['drop'])} points")
        plot.text((1, y + 4), rows.points(r["drop"]), "value", dx=6)
    reading = "Change of accuracy from A to B in points, with intervals; those of categories hold together."
    return figure("Accuracy", reading, [plot.svg("Accuracy", reading, "accuracy")], "accuracy")


def _doubts(result: Mapping[str, Any]) -> Html:
    told = ([d["what"], d["why"], d["next"] or "–"] for d in result["doubts"])
    head = ["what is doubtful", "why", "what to do"]
    return table(head, told, "What may be wrong with this comparison", "text") if result["doubts"] else Html()
