"""The page of a comparison of runs: findings, figures with intervals, waits that moved, gates, what was changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whywait.report.compared import HEAD, STATES, WAIT_HEAD, figure_rows, how, side, wait_rows, why_open
from whywait.report.page import page
from whywait.report.svg import Html, cat, clip, table, tag
from whywait.report.trial_html import forest

RULE = ("A change is sure where chance makes one seem so in less than 5 % of comparisons like this that show none; it "
        "counts where it is as large as the threshold. Neither says the other.")  # fmt: skip


def render(result: Mapping[str, Any]) -> str:
    """The page of ``comparing.compare``."""
    parts = [
        ("findings", "Findings", cat(map(_summary, result["comparisons"])) + tag("p", _rule(result), class_="note"))
    ]
    if result["gates"]:
        rows = [[g["gate"], g["state"], g["why"], g["b"], g["load"]] for g in result["gates"]]
        parts.append(
            ("gates", "Gates", table(["gate", "result", "why", "B", "load"], rows, "Conditions (--fail-if)", "text"))
        )
    many = len(result["comparisons"]) > 1
    for i, c in enumerate(result["comparisons"]):
        for k, p in enumerate(c["points"]):
            name = f"{c['b']['name']} at {p['load']}" if many else f"At {p['load']}"
            parts.append((f"load-{i}-{k}", name, _point(p, f"load-{i}-{k}-chart")))
    parts += [("changed", "What was changed", cat(map(_changed, result["comparisons"]))),
              ("doubts", "Doubts", _doubts(result))]  # fmt: skip
    names = ", ".join(c["b"]["name"] for c in result["comparisons"])
    frame = {"headline": result["headline"], "plan": {"a": side(result["a"]), "b": names}, "partial": False,
             "partial_reason": "", "whywait_version": result["whywait_version"]}  # fmt: skip
    return page(frame, parts, "whywait comparison", "")


def _rule(result: Mapping[str, Any]) -> str:
    return f"{RULE} The threshold is {result['threshold'] * 100:g} %."


def _summary(c: Mapping[str, Any]) -> Html:
    told: dict[str, list[str]] = {}
    for p in c["points"]:
        for f in p["figures"]:
            if f["claimed"]:
                told.setdefault(f["state"], []).append(f"{f['title']} at {p['load']}")
    rows = [[STATES[s], str(len(told[s])), ", ".join(told[s])] for s in STATES if s in told]
    return tag("p", c["headline"]) + table(["", "figures", "which"], rows, clip(side(c["b"]), 160), "text")


def _point(p: Mapping[str, Any], key: str) -> Html:
    drawn = {
        f["name"]: {**f, "ratio": [f["value"], f["low"], f["high"]]} for f in p["figures"] if f["value"] is not None
    }
    over = "the pairs of requests" if p["paired"] else "the requests and pieces of both windows"
    body = tag("p", how(p), class_="meta") + forest(drawn, key, over)
    body += table(*_answer_first(HEAD, figure_rows(p)), f"Figures at {p['load']}")
    if rows := wait_rows(p):
        caption = "Waits that moved: mean per request, and share of the device's time"
        body += table(*_answer_first(WAIT_HEAD, rows), caption)
    lines = [*why_open(p), *(f"{name}: by {note}" for name, note in p["notes"].items())]
    return body + cat(tag("p", line, class_="note") for line in lines)


def _answer_first(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The last column beside the name: a narrow screen shows no more than these two."""
    return [head[0], "result", *head[1:-1]], [[r[0], r[-1], *r[1:-1]] for r in rows]


def _changed(c: Mapping[str, Any]) -> Html:
    rows = [[u["what"], u["a"], u["b"]] for u in c["changed"]]
    rows += [[f"unlike: {u['what']}", u["a"], u["b"]] for u in c["unlike"]]
    if not rows:
        return tag("p", f"{c['b']['name']}: nothing that the runs tell of.")
    return table(["what", "A", "B"], rows, clip(f"A and {c['b']['name']}", 160), "text")


def _doubts(result: Mapping[str, Any]) -> Html:
    rows = [[d["what"], d["why"], d["next"] or "–"] for d in result["doubts"]]
    if not rows:
        return tag("p", "None.")
    return table(["what is doubtful", "why", "what to do"], rows, "What may be wrong with this comparison", "text")
