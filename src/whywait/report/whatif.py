"""The answer of ``whywait what-if``: first how wrong the simulator is on this very service, then what it claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from whywait.report import svg
from whywait.report.html import HEAD
from whywait.report.svg import Html, cat, table, tag
from whywait.report.text import console
from whywait.units import ms, number, percent

Show = Callable[[float | None], str]
PER_TABLE = 3


def _dollars(value: float | None) -> str:
    return number(value, "$")


ROWS: tuple[tuple[str, str, Show], ...] = (
    ("TTFT p50", "ttft_ms.p50", ms), ("TTFT p99", "ttft_ms.p99", ms), ("TPOT p50", "tpot_ms.p50", ms),
    ("TPOT p99", "tpot_ms.p99", ms), ("end to end p50", "e2e_ms.p50", ms),
    ("output tokens/s", "output_tokens_per_s", number), ("requests/s", "requests_per_s", number),
    ("goodput, requests/s", "goodput_requests_per_s", number), ("KV space in use", "kv_use", percent),
    ("J per output token", "energy_j_per_token", number),
    ("$ per M tokens", "usd_per_million_tokens", _dollars),
)  # fmt: skip
ERRORS = (("TTFT", "ttft_ms.mean"), ("p50", "ttft_ms.p50"), ("TPOT", "tpot_ms.mean"), ("p50", "tpot_ms.p50"),
          ("tokens/s", "output_tokens_per_s"), ("prefill", "prefill_ms.mean"), ("queue", "queue_ms.mean"),
          ("KV", "kv_use"))  # fmt: skip
STYLE = {"better": "bold green", "worse": "bold red", "undecided": "yellow", "same": "dim"}
PARAMETERS = {
    "weights": "weight reads", "compute": "compute", "experts": "experts", "kv": "KV reads",
    "pairs": "prefill attention", "link": "collectives", "step": "host per step", "sequence": "host per sequence",
    "token": "host per token", "prefill_step": "a step with prompts", "frontend": "frontend", "reply": "reply",
    "kv_space": "KV space",
}  # fmt: skip
CAPTION = "error of the simulator on what was {how}, with and without that load; * outside its 80 % interval"
SIMULATED = "simulated by this tool"
CIRCULAR = ("the run was simulated by this tool: the check is circular (the simulator against itself) and says nothing "
            "of a real service")  # fmt: skip
CLAIM_HEAD = ("what if (80 %)", "change (80 %)", "")
PREDICTED_HEAD = ("predicted (80 %)", "")


def print_what_if(found: dict[str, Any], out: Console | None = None, compiled: bool = True) -> None:
    """``found`` is ``WhatIf.as_dict()``; ``compiled``: whether the simulator ran compiled."""
    out = out or console()
    out.print()
    out.print(Text(found["headline"], style="bold"))
    if found["advice"]:
        out.print(Text(f"  to settle it: {found['advice']}", style="yellow"))
    out.print(Text(f"\n{source(found)}: {found['before']}\nwhat if:  {found['after']}"))
    for line in assumed(found):
        out.print(Text(f"  assumed: {line}", style="dim"))
    _calibration(out, found)
    _errors(out, found)
    for load, claims in by_load(found).items():
        out.print()
        if found["changed"] and all(c["state"] == "same" for c in claims):
            out.print(Text(f"{load}: nothing that matters changes"))
        else:
            out.print(_claims(load, claims, found))
            for line in reasons(claims, found):
                out.print(Text(f"  {line}", style="yellow"))
    for line in promised(found):
        out.print(Text(line))
    for line in accounts(found):
        out.print(Text(line, style="dim"))
    out.print()
    for note in found["notes"]:
        out.print(Text(note, style="dim"))
    slow = "" if compiled else "; the extra 'sim' makes the simulator faster"
    out.print(Text(f"modelled, {found['draws']} draws, {found['took_s']:.1f} s{slow}", style="dim"))


def by_load(found: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The claims of each load, in order."""
    out: dict[str, list[dict[str, Any]]] = {}
    for c in found["claims"]:
        out.setdefault(c["load"], []).append(c)
    return out


def assumed(found: Mapping[str, Any]) -> list[str]:
    """What the baseline takes from defaults, with why."""
    return [f"{f['what']} {f['value']} ({f['why']})" for f in found["baseline"] if f["how"] == "assumed"]


def _calibration(out: Console, found: Mapping[str, Any]) -> None:
    told, prior = learnt(found)
    c = found["calibration"]
    how = {"posterior": "calibrated on", "one point": "NOT calibrated, one load point only:",
           "prior": "NOT calibrated"}[c["kind"]]  # fmt: skip
    out.print(Text(f"\n{how} {', '.join(c['points'])}", style="bold"))
    out.print(Text(f"  the run told:  {'; '.join(told) or 'nothing that the prior did not say'}"))
    out.print(Text(f"  still prior:   {', '.join(prior) or 'nothing'}", style="dim"))


def learnt(found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Parameters that the data moved, with their value against the fits, and those that they did not."""
    told, prior = [], []
    for p in found["calibration"]["parameters"]:
        name = PARAMETERS.get(p["name"], p["name"])
        if p["moved"]:
            told.append(f"{name} × {number(p['median'])} ({number(p['low'])} … {number(p['high'])})")
        else:
            prior.append(name)
    return told, prior


def _errors(out: Console, found: Mapping[str, Any]) -> None:
    head, rows = error_rows(found)
    if not rows:
        return
    grid = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for i, name in enumerate(head):
        grid.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        grid.add_row(*row)
    out.print()
    out.print(grid)
    out.print(Text(caption(found), style="dim"))
    if simulated(found):
        out.print(Text(CIRCULAR, style="yellow"))


def error_rows(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A row per point as seen, and one as left out where it was; a column per metric that has any figure."""
    errors = found["check"]["errors"]
    by = {(e["point"], e["held_out"], e["metric"]): e for e in errors}
    places = list(dict.fromkeys((e["point"], e["held_out"]) for e in errors))
    shown = [(name, m) for name, m in ERRORS if any(k[2] == m for k in by)]
    rows = [
        [f"{p}{', left out' if out else ''}", *(_error(by.get((p, out, m))) for _, m in shown)] for p, out in places
    ]
    return ["how wrong it is", *(name for name, _ in shown)], rows


def _error(e: Mapping[str, Any] | None) -> str:
    if e is None:
        return "–"
    outside = e["held_out"] and not e["low"] <= e["measured"] <= e["high"]
    return f"{_signed(e['error'])} %{' *' if outside else ''}"


def _claims(load: str, claims: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    head = claim_head(found)
    for i, name in enumerate(head):
        grid.add_column(escape(load) if i == 0 else name, justify="right" if i and name else "left",
                        no_wrap=i in (0, 1, 2, len(head) - 1))  # fmt: skip
    for row in claim_rows(claims, found["changed"]):
        grid.add_row(*row[:-1], Text(row[-1], style=STYLE.get(row[-1], "")))
    return grid


def claim_head(found: Mapping[str, Any]) -> list[str]:
    """Heads of the columns of ``claim_rows``; the first is for the load."""
    head = ["", source(found), "simulated", *(CLAIM_HEAD if found["changed"] else PREDICTED_HEAD)]
    if simulated(found):
        head[1] = "the run"
    return head


def claim_rows(found: Sequence[Mapping[str, Any]], changed: bool = True) -> list[list[str]]:
    """Cells as of ``claim_head``, the state last: without a change of the service there is only what is predicted."""
    by = {c["metric"]: c for c in found}
    out = []
    for name, metric, show in ROWS:
        c = by.get(metric)
        if c is not None:
            sim, after = c["simulated"], c["after"]
            said = f"{show(after['median'])} ({_range(after, show)})" if after else "–"
            row = [name, show(c["measured"]), show(sim["median"] if sim else None), said]
            state = "" if not changed and c["state"] == "same" else c["state"]
            out.append([*row, *([_by_how_much(c)] if changed else []), state])
    return out


def _by_how_much(c: Mapping[str, Any]) -> str:
    if c["change"]:
        return f"{_change(c['change']['median'])} ({_changes(c['change'])})"
    if c["after"] and c["state"] in ("better", "worse"):
        return "from none" if c["after"]["median"] > 0 else "to none"
    return "–"


def reasons(claims: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> list[str]:
    """Why figures are undecided, where it is not that their intervals include no change; once per reason."""
    by: dict[str, list[str]] = {}
    named = {metric: name for name, metric, _ in ROWS}
    for c in claims:
        spans = c["change"] and c["change"]["low"] <= 1 <= c["change"]["high"]
        if c["state"] == "undecided" and c["why"] and c["metric"] in named and (not spans or not found["refused"]):
            by.setdefault(c["why"], []).append(named[c["metric"]])
    if found["refused"]:
        return ["undecided, whatever the interval: the reason is at the top"] if claims else []
    return [f"undecided {', '.join(names)}: {why}" for why, names in by.items() if "includes none" not in why]


def simulated(found: Mapping[str, Any]) -> bool:
    """Whether the run was made by the simulator, so that nothing in it was measured."""
    return bool(found["made_by"] == "simulated")


def source(found: Mapping[str, Any]) -> str:
    """How the run came to be, in place of "measured" where it was not."""
    return SIMULATED if simulated(found) else "measured"


def caption(found: Mapping[str, Any]) -> str:
    return CAPTION.format(how=source(found))


def _range(x: Mapping[str, float], show: Show) -> str:
    """Low and high; the unit once, where both have the same."""
    low, high = show(x["low"]), show(x["high"])
    unit = high.rpartition(" ")[2] if " " in high else ""
    if unit and low.endswith(f" {unit}"):
        return f"{low.removesuffix(f' {unit}')} … {high.removesuffix(f' {unit}')}"
    return f"{low} … {high}"


def _change(ratio: float) -> str:
    return f"× {number(ratio)}" if ratio > 3 else f"{_signed(ratio - 1)} %"


def _changes(x: Mapping[str, float]) -> str:
    if x["high"] > 3:
        return f"× {number(x['low'])} … {number(x['high'])}"
    return f"{_signed(x['low'] - 1)} … {_signed(x['high'] - 1)}"


def _signed(share: float) -> str:
    """Whole percents with their sign; none without one."""
    said = f"{100 * share:+.0f}"
    return "0" if said in ("+0", "-0") else said


def promised(found: Mapping[str, Any]) -> list[str]:
    """A paragraph per technique: the wait it promises to cut, what the account shows, its price."""
    out = []
    for p in found["techniques"]:
        said = {"cut": "cut", "not cut": "NOT cut", "grown": "GROWN", "nothing to cut": "there is nothing to cut"}
        shown = "the account does not show that wait by itself"
        if p["state"] in said:
            shown = (
                f"{p['shows']} {ms(p['before_ms'])} → {ms(p['after_ms'])} a request at {p['load']}: {said[p['state']]}"
            )
            if p["state"] == "cut" and not any(
                c["state"] in ("better", "worse") and c["load"] == p["load"] for c in found["claims"]
            ):
                shown += " in the simulation; what it does to the service is undecided, as said above"
        out.append(f"\n{p['technique']} promises to cut: {p['cuts']}. {shown}.")
        out.append(f"  price: {p['price']}" + (f"  [{p['source']}]" if p["source"] else ""))
    if len(found["techniques"]) > 1:
        out.append("  (applied together: the account is of all of them)")
    return out


def accounts(found: Mapping[str, Any]) -> list[str]:
    """Where a request's time goes before and after, per load, and what the device spends on it."""
    out = []
    for w in found["waits"]:
        for part, words in (
            ("request", "a request waits"),
            ("device", "a request's share of the engine's time (steps are shared)"),
        ):
            cells = [f"{k} {_both(v)}" for k, v in w[part].items()
                     if max(v["before_ms"], v["after_ms"]) > 0.005 * _whole(w[part])]  # fmt: skip
            out.append(f"{'' if part == 'device' else chr(10)}{w['load']}, {words}: {', '.join(cells) or '–'}")
    return out


def _both(v: Mapping[str, float]) -> str:
    was, then = ms(v["before_ms"]), ms(v["after_ms"])
    return was if was == then else f"{was} → {then}"


def _whole(part: Mapping[str, Any]) -> float:
    return float(sum(max(v["before_ms"], v["after_ms"]) for v in part.values()))


def page(found: dict[str, Any]) -> str:
    """The same as one HTML page that stands alone."""
    told, prior = learnt(found)
    head, rows = error_rows(found)
    tables = cat(
        table([k, *claim_head(found)[1:]], claim_rows(v, found["changed"]), f"What if, at {k}")
        + cat(tag("p", x) for x in reasons(v, found))
        for k, v in by_load(found).items()
    )
    circular = f" {CIRCULAR[:1].upper()}{CIRCULAR[1:]}." if simulated(found) else ""
    how = f"made by a simulator calibrated on this run, not measured.{circular}"
    top = [tag("p", "whywait what-if", class_="brand"),
           tag("p", tag("strong", "MODELLED") + f": {how}", class_="banner", role="note"),
           tag("h1", found["headline"], class_="long"),
           tag("p", f"{source(found)}: {found['before']}", class_="meta"),
           tag("p", f"what if: {found['after']}", class_="meta")]  # fmt: skip
    if found["advice"]:
        top.append(tag("p", f"To settle it: {found['advice']}", class_="banner"))
    lines = [*promised(found), *accounts(found)]
    sections = (
        ("How wrong the simulator is on this service",
         (table(head, rows, caption(found)) if rows else Html())
         + tag("p", f"The run told: {'; '.join(told) or 'nothing'}. Still prior: {', '.join(prior) or 'nothing'}.")),
        ("What it would do", tables),
        ("Which wait it cuts", cat(tag("p", line) for line in lines)),
        ("What this rests on", tag("ul", cat(tag("li", x) for x in [*found["notes"], *assumed(found)]))),
    )  # fmt: skip
    body = tag("header", cat(top)) + tag("main", cat(tag("section", tag("h2", n) + part) for n, part in sections))
    title = tag("title", f"whywait: what if {svg.clip(found['what_if'], 100)}") + Html(f"<style>{svg.STYLE}</style>")
    return f'<!doctype html>\n<html lang="en"><head>{HEAD + title}</head>\n<body>{body}</body></html>\n'
