"""The page of a paired trial: claims, effects with intervals, waits that moved, rounds. Stands alone, no script."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from whywait.analyze.compare import RATIO
from whywait.judge.paired import said
from whywait.report.html import STATES
from whywait.report.page import page
from whywait.report.svg import Html, Plot, cat, clip, figure, flat, table, tag
from whywait.report.trial import (
    EFFECT_HEAD,
    WAIT_HEAD,
    effect_rows,
    notes,
    quality_lines,
    round_rows,
    told,
    turn_head,
    turn_rows,
    turn_title,
    wait_rows,
)

LOOKS = {"holds": "fails", "fails": "holds", "undecided": "undecided"}  # the report's alarm is a cause that holds
KINDS = {"price": "expected price", "promise": "promise", "metric": "claim"}
MOST = 16  # figures drawn; the table has all
_ROW = 24


def render(result: Mapping[str, Any]) -> str:
    """The page of ``trying.Trial.result()``."""
    parts = [("claims", "Claims", tag("div", cat(map(_card, result["claims"])), class_="grid two"))]
    if lines := quality_lines(result):
        parts.append(("quality", "Quality of the answers", cat(tag("p", line) for line in lines)))
    if result["turns"]:
        body = cat(table(turn_head(t), turn_rows(t), turn_title(t)) for t in result["turns"])
        parts.append(("turns", f"Effect against {result['turns'][0]['mode']}", body))
    for i, load in enumerate(result["effects"]):
        found = told(result, load)
        name = f"Effects at {load}" if load else "Effects"
        body = forest(found, f"effects-{i}") + table(EFFECT_HEAD, effect_rows(found), name)
        if rows := wait_rows(result["waits"][load]):
            body += table(WAIT_HEAD, rows, "Waits that moved: mean per request, and share of the device's time")
        parts.append((f"effects-{i}", name, body))
    head, rows = round_rows(result)
    parts += [
        ("rounds", "Rounds", table(head, rows, "Rounds in the order they were run", "text")),
        ("doubts", "Doubts", cat(tag("p", line, class_="note") for line in notes(result)) + _doubts(result)),
        ("repeat", "To repeat it", table(["fact", "value"], flat("plan", dict(result["plan"])), "The plan", "text")),
    ]
    return page(result, parts, "whywait paired trial", "What was measured is kept.")


def _card(c: Mapping[str, Any]) -> Html:
    kind = tag("span", f" · {KINDS[c['kind']]}", class_="how")
    state = tag("p", STATES[c["state"]].replace("Not the cause", "Fails") + kind, class_="state")
    share = tag("p", tag("b", said(c["value"], c["scale"], c["unit"])) + f" in {c['pairs']} pairs", class_="share")
    rows = [("Evidence", c["evidence"]), ("Against", c["against"]), ("To settle it", [c["next_step"]])]
    facts = cat(tag("dt", n) + tag("dd", tag("ul", cat(tag("li", x) for x in xs))) for n, xs in rows if any(xs))
    body = state + tag("h3", c["claim"]) + share + (tag("dl", facts) if facts else "")
    return tag("article", body, class_=f"card verdict {LOOKS[c['state']]}")


def forest(effects: Mapping[str, Any], key: str, over: str = "the pairs of rounds") -> Html:
    """The ratio of every positive figure with its interval, on one logarithmic axis around no change."""
    known = [e for e in effects.values() if e["scale"] == RATIO and e["ratio"][0]]
    rows = known[:MOST]
    if not rows:
        return Html()
    ends = [abs(math.log(v)) for e in rows for v in e["ratio"] if v]
    most = min(max([*ends, 0.05]) * 1.1, math.log(50))  # an interval of two rounds may be without end

    def at(value: float | None, missing: float) -> float:
        share = math.log(value) / most if value else missing
        return 0.5 + 0.5 * min(max(share, -1.0), 1.0)

    plot = Plot(len(rows) * _ROW, left=190, right=70, top=6, bottom=34)
    plot.line((0.5, 0), (0.5, plot.height), "axis")
    for t in (-most * 0.9, 0.0, most * 0.9):
        label = "no change" if not t else said(math.exp(t), RATIO, "")
        plot.text((0.5 + 0.5 * t / most, plot.height + 16), label, "tick", "middle")
    for i, e in enumerate(rows):
        y = (i + 0.5) * _ROW
        value, low, high = e["ratio"]
        tip = f"{e['title']}: {said(value, RATIO, '')}"
        plot.text((0, y + 4), clip(e["title"], 28), "label", "end", -8)
        if low or high:  # a bound that is unknown reaches to the edge; without any there is no interval
            plot.line((at(low, -1.0), y), (at(high, 1.0), y), "axis")
        plot.mark((at(value, 0.0), y), "dot", "f-decode", tip)
        plot.text((1, y + 4), said(value, RATIO, ""), "value", dx=6)
    reading = f"B against A, with the 95 % interval of each figure over {over}."
    bare = sum(1 for e in rows if not any(e["ratio"][1:]))
    reading += f" {bare} without a line {'has' if bare == 1 else 'have'} no interval." if bare else ""
    reading += f" The first {MOST} of {len(known)}; the table has all." if len(known) > MOST else ""
    return figure("Effects", reading, [plot.svg("Effects of B against A", reading, key)], key)


def _doubts(result: Mapping[str, Any]) -> Html:
    rows = ([d["what"], d["why"], d["next"] or "–"] for d in result["doubts"])
    head = ["what is doubtful", "why", "what to do"]
    return table(head, rows, "What may be wrong with this trial", "text") if result["doubts"] else Html()
