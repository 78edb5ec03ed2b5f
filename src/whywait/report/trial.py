"""A paired trial as text for a terminal: claims first, then every effect, the waits that moved, the rounds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from whywait.analyze.compare import RATIO, metric_of
from whywait.judge.paired import said
from whywait.report.text import DEVICE_NAMES, PHASE_NAMES, console
from whywait.report.text_parts import print_doubt_lines, print_table
from whywait.units import in_short, ms, number, percent, size

MARK = {"holds": ("●", "bold green"), "undecided": ("?", "yellow"), "fails": ("○", "bold red")}
NEED_SLO = ("goodput", "effective")  # what is the same as all of it where nothing was asked
SHARES = ("phases.", "causes.", "occupancy.")
EFFECT_HEAD = ("figure", "A", "B", "B against A", "95 %", "B higher in")
WAIT_HEAD = ("wait", "A", "B", "moved by", "B against A", "95 %", "")
TURN_HEAD = ("in flight", "A", "B", "B against A", "95 %", "")
ROUND_HEAD = ("round", "arm", "fixed loop", "run", "disturbed")


def amount(value: float | None, unit: str) -> str:
    show: dict[str, Callable[[float | None], str]] = {"ms": ms, "share": percent, "bytes": size}
    return show[unit](value) if unit in show else number(value)


def told(result: Mapping[str, Any], load: str) -> dict[str, Any]:
    """The effects at a load that are worth a row: known in an arm, no waits, goodput only where an SLO asks for it."""
    plan = result["plan"]
    asked = bool(plan["slo"]) or any(c.get("slo") for c in plan["workload"].get("classes") or ())
    left = SHARES if asked else (*SHARES, *NEED_SLO)
    ends = () if asked else (".goodput_share",)  # of a class
    found: Mapping[str, Any] = result["effects"][load]
    rows = {n: e for n, e in found.items() if not n.startswith(left) and not n.endswith(ends)}
    return {n: e for n, e in rows.items() if e["a"] or e["b"]}


def effect_rows(effects: Mapping[str, Any]) -> list[list[str]]:
    """A row of EFFECT_HEAD each of :func:`told`."""
    out = []
    for e in effects.values():
        value, low, high = e["ratio"] if e["scale"] == RATIO else e["difference"]
        unit = e["unit"]
        out.append([e["title"], amount(e["a"], unit), amount(e["b"], unit), said(value, e["scale"], unit),
                    _between(low, high, e["scale"], unit) if e["n"] else "–",
                    f"{e['higher']} of {e['n']}" if e["n"] else "–"])  # fmt: skip
    return out


def wait_rows(waits: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row of WAIT_HEAD per wait that moved; the last cell says what that has to do with the promise."""
    out = []
    for w in waits:
        grew = w["way"] == "above" and w["account"] == "request"
        against = "promised to fall" if w["promised"] else "grew" if grew else "not sure" if w["way"] == "open" else ""
        if w["promised"] and w["way"] == "above":
            against = "promised to fall, and grew"
        unit, scale = w["unit"], w["scale"]
        ratio = said(w["value"], scale, unit) if scale == RATIO else ""
        out.append([wait_name(w), amount(w["a"], unit), amount(w["b"], unit), said(w["difference"], "difference", unit),
                    ratio, _between(w["low"], w["high"], scale, unit), against])  # fmt: skip
    return out


def turn_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """A row of TURN_HEAD per load point of one figure (``judge/turns.py``)."""
    unit = found["unit"]
    return [
        [f"{p['target']:g}", amount(p["a"], unit), amount(p["b"], unit), said(p["value"], p["scale"], unit),
         _between(p["low"], p["high"], p["scale"], unit), p["way"]]
        for p in found["points"]
    ]  # fmt: skip


def turn_title(found: Mapping[str, Any]) -> str:
    return f"effect against {found['mode']}: {found['title']}: {found['said']}"


def turn_head(found: Mapping[str, Any]) -> tuple[str, ...]:
    return TURN_HEAD if found["mode"] == "concurrency" else ("per second", *TURN_HEAD[1:])


def wait_name(w: Mapping[str, Any]) -> str:
    kind, _, rest = str(w["name"]).partition(".")
    if kind == "occupancy":
        return f"device: {DEVICE_NAMES.get(rest, rest)}"
    phase, _, cause = rest.partition(".")
    return PHASE_NAMES.get(phase, phase) + (f": {cause}" if cause else "")


def round_rows(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and a row per round, in the order they were run, with the figures that were claimed."""
    load = next(iter(result["effects"]), "")
    asked = [a["metric"] for a in result["plan"]["asked"] if not a["load"]]
    units = {n: metric_of(n) for n in asked}
    head = [*ROUND_HEAD[:2], *(m.title for m in units.values()), *ROUND_HEAD[2:]]
    out = []
    for r in result["rounds"]:
        found = r["figures"].get(load, {})
        loop = [v for v in r["calibration_ms"] if v is not None]
        why = ", ".join([*r["disturbed"], *([] if r["whole"] else ["cut short"])])
        out.append([str(r["number"] + 1), r["arm"], *(amount(found.get(n), m.unit) for n, m in units.items()),
                    ms(sum(loop) / len(loop)) if loop else "–", r["run"], why])  # fmt: skip
    return head, out


def quality_lines(result: Mapping[str, Any]) -> list[str]:
    """What is known of the answers, where B may answer otherwise than A; claims of ``whywait quality``, or that nobody
    asked, and what would."""
    plan, found = result["plan"], result.get("quality")
    if found:
        claims = [f"{c['claim']}: {c['state']}" for c in found["claims"]]
        return [f"Quality of the answers: {found['headline']}", *claims, f"kept in {found['directory']}"]
    if not plan.get("quality_arms"):
        return []
    command = f"whywait quality {' '.join(map(shlex.quote, plan['quality_arms']))}"
    return ["Quality of the answers was NOT measured, and B may answer otherwise than A.",
            f"to measure it: {command}  (after the next trial by itself: --quality)"]  # fmt: skip


def notes(result: Mapping[str, Any]) -> list[str]:
    """What is to be known of the figures as a whole, a line each."""
    out = []
    n, plan = result["pairs"], result["plan"]
    for e in result["effects"].get(next(iter(result["effects"]), ""), {}).values():
        if e["note"] and e["n"]:
            out.append(e["note"])
            break
    right, least_change = percent(1 - result["error_probability"]), percent(plan["margin"])
    out.append(f"Claims: all together right with {right} however often looked at; a change below {least_change} counts "
               "as none. Other figures: 95 % each, a description.")  # fmt: skip
    for name, least in result["noise"].items():
        if name != "at" and least is not None:
            scale = result["effects"][next(iter(result["effects"]))][name]
            seen = percent(least) if scale["scale"] == RATIO else amount(least, scale["unit"])
            out.append(f"Noise: {max(n, 2)} pairs like these surely see a change of {scale['title']} from {seen} on.")
    out += [f"Drafts: {line}." for line in draft_cost(result)]
    drift = result["drift"]
    if drift["loop"] is not None:
        moved = "" if drift["figure"] is None else f"; {drift['name']} {drift['figure']:+.1%} from first to last round"
        sure = "" if drift["figure"] is None or drift["figure_sure"] else " (no sure trend)"
        out.append(f"Drift: a fixed piece of work varied by {percent(drift['loop'])}{moved}{sure}.")
    out += [f"Pair {x['pair'] + 1} is left out: {'; '.join(x['why'])}." for x in result["excluded"]]
    return out


def draft_cost(result: Mapping[str, Any]) -> list[str]:
    """What a step costs more where only B speculates: proposing and checking together, a difference of the arms' steps
    and so derived. Of each load of one request in flight: beside others a step holds their work too."""
    out = []
    for load in (
        x["label"] or "" for x in result["plan"]["loads"] if x.get("mode") == "concurrency" and x.get("target") == 1
    ):
        e, drafted = (result["effects"].get(load, {}).get(k) for k in ("step_ms", "draft_tokens_per_request"))
        if not e or not e["n"] or not drafted or drafted["a"] or not drafted["b"] or e["difference"][0] is None:
            continue
        value, low, high = e["difference"]
        where = f" at {load}" if load else " at 1 in flight"
        between = _between(low, high, "difference", "ms")
        took = f"{said(value, 'difference', 'ms')} ({between})"
        out.append(f"a step of B takes {took} against one of A{where}, for proposing and checking together (derived: "
                   "TPOT times tokens per step, a difference of the arms)")  # fmt: skip
    return out


def print_trial(result: Mapping[str, Any], directory: str, out: Console | None = None) -> None:
    out = out or console()
    plan = result["plan"]
    out.print(Text(f"\n{result['headline']}", style="bold"))
    out.print(Text(f"  A: {plan['a']}\n  B: {plan['b']}", style="dim"))
    for c in result["claims"]:
        _claim(out, c)
    for i, line in enumerate(quality_lines(result)):
        out.print(Text(f"\n{line}" if not i else f"  {line}", style="" if i else "bold"))
    for t in result["turns"]:
        print_table(out, turn_head(t), turn_rows(t), turn_title(t))
    for load in result["effects"]:
        print_table(
            out,
            EFFECT_HEAD,
            effect_rows(told(result, load)),
            f"at {load}" if load else f"{result['pairs']} pairs of rounds",
        )
        if rows := wait_rows(result["waits"][load]):
            print_table(out, WAIT_HEAD, rows, "waits that moved, per request; and of the device's time")
    print_table(out, *round_rows(result), "rounds")
    out.print()
    for line in notes(result):
        out.print(Text(line, style="dim"))
    print_doubt_lines(out, result["doubts"])
    if result["partial"]:
        out.print(
            Text(f"PARTIAL: {in_short(result['partial_reason'])}; what was measured is kept.", style="bold yellow")
        )
    out.print(f"trial kept in {escape(directory)}, a run per round: whywait show {escape(directory)}/round-…")


def _claim(out: Console, c: Mapping[str, Any]) -> None:
    mark, style = MARK[c["state"]]
    kind = {"price": "  the price", "promise": "  the promise"}.get(c["kind"], "")
    out.print(Text.assemble((f"\n{mark} ", style), (c["claim"], "bold" if c["state"] == "holds" else ""),
                            (f"  {said(c['value'], c['scale'], c['unit'])}", "cyan"), (kind, "dim"),
                            (f"  [{c['state']}]", "dim")))  # fmt: skip
    for label, lines in (("evidence", c["evidence"]), ("against", c["against"])):
        for line in lines:
            out.print(Text(f"    {label}: {line}", style="dim" if label == "against" else ""))
    if c["next_step"]:
        out.print(Text(f"    to settle it: {c['next_step']}", style="dim"))


def _between(low: float | None, high: float | None, scale: str, unit: str) -> str:
    if low is None or high is None:
        return "?"
    return f"{said(low, scale, unit)} … {said(high, scale, unit)}"
