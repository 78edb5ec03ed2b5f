"""The verdicts of a report: what leads in a strip, and each as a card with its evidence."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from whywait.judge.vocabulary import CAUSES, told
from whywait.report.svg import Html, cat, details, tag, unbroken
from whywait.units import percent

STATES = {"holds": "● Holds", "undecided": "◐ Undecided", "fails": "○ Not the cause"}


def leading(verdicts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The verdict that is ranked first, unless it is one that was ruled out."""
    return verdicts[0] if verdicts and verdicts[0]["state"] != "fails" else None


def strip(verdicts: list[dict[str, Any]], doubts: int) -> Html:
    """What stands below the headline: how sure it is, how much it is, what would change it, and how many doubts."""
    v = leading(verdicts)
    link = f"{doubts} doubt{'' if doubts == 1 else 's'} about these figures" if doubts else "no doubt was found"
    doubted = tag("a", link, href="#doubts")
    if v is None:
        said = "nothing holds and nothing is open" if verdicts else "this run was not judged"
        return tag("div", tag("p", tag("b", said.capitalize()) + "; " + doubted), class_="strip fails")
    head = tag("span", STATES[v["state"]], class_="state") + f" · {v['how']}"
    share = tag("b", percent(v["share"])) + f" of {v['of']}" if v["share"] is not None else Html()
    where = f"at {v['where']}" if v["where"] else ""
    first = cat([head, *([" · ", share] if share else []), " ", where, " · ", doubted])
    rest = [tag("p", tag("b", f"{name}: ") + unbroken(v[key])) for key, name in
            (("lever", "What would change it"), ("next_step", "To settle it")) if v[key]]  # fmt: skip
    return tag("div", tag("p", first) + cat(rest), class_=f"strip {v['state']}")


def cards(verdicts: list[dict[str, Any]]) -> Html:
    """Every verdict with its evidence, the leading one first."""
    if not verdicts:
        return tag("p", "This run was not judged.")
    lead = leading(verdicts)
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
    what = _what(v["cause"])
    head = state + tag("h3", v["claim"]) + share
    kind = f"card verdict {v['state']}{' lead' if lead else ''}"
    if lead:
        return tag("article", head + tag("div", facts + tag("div", lever + step), class_="cols") + what, class_=kind)
    if v["state"] == "undecided":
        lever, step = lever + step, Html()
    words = [f"{name.lower()} ({len(items)})" for name, items in why] + (["next step"] if step else [])
    fold = details(", ".join(words).capitalize(), facts + step) if words else ""
    return tag("article", head + lever + fold + what, class_=kind)


def _what(cause: str) -> Html:
    """What this wait is, folded. The report is mailed without docs/: it names page and command, and links nowhere."""
    if cause not in CAUSES:  # of a run that another version has judged
        return Html()
    t = told(cause)
    command = tag("code", f"whywait catalog {PurePosixPath(t['page']).stem}")
    more = tag("p", cat([f"How it looks and what changes it: {t['page']}. In the terminal: ", command]), class_="note")
    return details(f"what “{cause}” is", tag("p", f"{t['meaning'][0].upper()}{t['meaning'][1:]}. {t['what']}") + more)
