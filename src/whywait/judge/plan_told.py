"""What a plan says of the runs that calibrate its candidates. Pure: plain JSON values in, sentences out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whywait.units import number

USED, REFUSED, ELSEWHERE, CANNOT = "used", "refused", "of nothing here", "not possible"
MEASURED, CALIBRATED, OTHER, PRIOR = "measured", "calibrated", "calibrated elsewhere", "prior"
_NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "output_tokens_per_s": "tokens/s"}
#: For a narrow column.
SHORT = {MEASURED: "meas.", "simulated": "sim.", "imported": "imp.", CALIBRATED: "cal.", OTHER: "cal.*", PRIOR: "prior"}


def said(story: Mapping[str, Any]) -> str:
    """One run's part in a plan, in a sentence."""
    own, other = story["own"], story["other_machine"]
    if story["state"] == REFUSED:
        return f"{story['run']} calibrates nothing, the prior is kept: {story['why']}{_taken(story)}"
    if story["state"] != USED:
        return f"{story['run']} calibrates nothing: {story['why']}"
    whom = ", ".join(own) + ("; less surely " if own else "less surely, from another machine: ") * bool(other)
    whom += ", ".join(other)
    error = ", ".join(f"{_NAMES[k]} {v:+.0%}".replace("-", "−").replace("%", " %") for k, v in story["worst"].items())
    out = (f"calibrated on {story['run']} ({len(story['points'])} loads): {whom}; its own error: loads left out are "
           f"missed by {error or 'nothing known'} at worst")  # fmt: skip
    if story["covered"] is not None:
        n, most = story["outside"], story["figures"]
        out += f", {most - n} of {most} figures inside their 80 % intervals"
    return out + ("; a simulated run: that check is circular" if story["circular"] else "") + _taken(story)


def _taken(story: Mapping[str, Any]) -> str:
    """Which service the run is taken to have been of, and whether its devices are an assumption."""
    if not story.get("deployment"):
        return ""
    out = f"; taken to be of {story['deployment']}"
    return out + "".join(f" (devices assumed: {f['why']})" for f in story["baseline"]
                         if f["what"] == "devices" and f["how"] == "assumed")  # fmt: skip


def foot(p: Mapping[str, Any]) -> list[str]:
    """What the words of the column say, where there is more than the prior."""
    if not p["calibrations"] and all(r["basis"] == PRIOR for r in p["rows"]):
        return []
    return ["from: meas(ured), sim(ulated) run; cal(ibrated) on a run of that machine and engine, cal.* on one of "
            "another machine; prior: the simulator's fits"]  # fmt: skip


def made(p: Mapping[str, Any]) -> str:
    """How the figures of those that decide (the first and its ties; without a first all) were made, in a sentence;
    empty where they were all measured."""
    deciding = [r for r in p["rows"] if r["name"] == p["first"] or r["name"] in p["ties"]] or p["rows"]
    model = [r for r in deciding if r["kind"] == "simulated"]
    if deciding and not model:
        return ""
    which = ""
    if len(model) < len(deciding):
        which = (
            f"; measured: {', '.join(r['name'] for r in deciding if r not in model)}, none of the others that decide"
        )
    elif any(r["kind"] != "simulated" for r in p["rows"]):
        which = "; what was measured is neither the first nor a tie"
    on = [c["run"] for c in p["calibrations"] if c["state"] == USED and c["made_by"] == MEASURED]
    used = [run for run in on if any(r["calibrated_by"] == run for r in model)]
    if used:
        by = f"a simulator that was calibrated on {', '.join(used)}"
        return f"MODELLED: made by {by}{which or '; no candidate was measured'}"
    return f"MODELLED: made by a simulator; {which.removeprefix('; ') or 'nothing was measured for it'}"


def changed(p: Mapping[str, Any]) -> str:
    """What the runs changed, against the prior alone, in a sentence; empty where none calibrates what may be first."""
    prior, money = p.get("by_prior"), p["basis"]["currency"]
    if not prior:
        return ""
    n = prior["kinds"]
    whose = f"by the prior alone, of the {n} kind{'s' if n > 1 else ''} looked at closely that may be first,"
    if prior["first"] is None:
        return f"{whose} none would surely keep the SLO" if p["first"] else ""
    was = f"{prior['first']} ({number(prior['cost'])} {money} per 1,000 good requests)"
    if prior["first"] == p["first"]:
        return f"{whose} the same would be first: {was}"
    now = next((r for r in p["rows"] if r["shape"] == prior["shape"] and r["eligible"]), None)
    if now is None:
        then = "no size of that kind surely keeps the SLO"
    else:
        cost = f"{number(now['figures']['cost']['value'])} {money}"
        then = f"it costs {cost}" if now["name"] == prior["first"] else f"that kind is {now['name']} ({cost})"
    return f"{whose} {was} would be first; by the run {then}"
