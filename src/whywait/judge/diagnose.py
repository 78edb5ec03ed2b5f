"""Ranks causes: every rule looks at the evidence, the verdicts are put in order, one sentence leads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whywait.analyze.phases import RequestAccount
from whywait.core.run import Run
from whywait.judge.causes import RULES
from whywait.judge.doubtful import lesser, withheld
from whywait.judge.evidence import Evidence
from whywait.judge.gather import gather, modelled
from whywait.judge.rules_load import shedding
from whywait.judge.verdict import MATTERS, STRETCHERS, WAIT, WORK, Verdict, rank


def judge(
    run: Run, summary: dict[str, Any], flags: dict[str, str] | None = None, acc: RequestAccount | None = None
) -> list[Verdict]:
    """Verdicts of a Run: of the load it is about, then of other loads; causes that hold first (``verdict.rank``).

    ``summary`` is that of the same run; ``flags`` are the engine's own names for its limits (``engines`` table);
    ``acc`` is the run's account when the caller has it.
    """
    return [replace(v, how=modelled(v.how, run)) for v in _judged(summary, gather(run, summary, flags, acc))]


def _judged(summary: dict[str, Any], evidence: Evidence) -> list[Verdict]:
    if not any(p.ok for p in evidence.points):
        if all("passive" in p for p in summary["points"]) and evidence.points:
            return [_idle(summary)]
        return [*_about(shedding(evidence), evidence)[:1], _nothing(summary)]
    found = lesser([withheld(v, evidence) for rule in RULES for v in rule(evidence)])
    return rank(_about(found, evidence))


def _about(found: list[Verdict], e: Evidence) -> list[Verdict]:
    """One verdict per cause and state: of the load in question where there is one; those of loads above it that only
    we asked for, and of our own mix of long prompts, say what lies beyond; those of smaller loads are left out where
    the load in question says better."""
    if e.focus is None:
        return found
    there = {(v.cause) for v in found if v.point == e.focus.number or v.point is None}
    labelled = {p.number for p in e.points if p.label}
    out: dict[tuple[str, str, bool], Verdict] = {}
    for v in found:
        mine = v.point in (None, e.focus.number)
        if not mine and v.state != "fails" and (v.point in e.beyond or v.point in labelled):
            named = any((x.cause, x.state, x.point) == (v.cause, v.state, e.focus.number) for x in found)
            if named and v.point not in labelled:
                continue
            v = replace(v, beyond=True)
        elif not mine and v.cause in there and v.state != "fails":
            continue
        elif not mine and v.state == "holds" and (v.kind == WORK or v.cause in STRETCHERS):
            continue  # work, or noise, of a smaller load: it would stand first where nothing is known of this one
        elif not mine and v.state == "holds":
            v = replace(v, beyond=True)  # of a smaller load only: true there, not what this load waits on
        key = (v.cause, v.state, v.beyond)
        if key not in out or (v.share or 0.0) > (out[key].share or 0.0):
            out[key] = v
    return list(out.values())


def headline(verdicts: list[Verdict]) -> str:
    """The verdict in one sentence: what holds first; a second cause of the same load that matters; other loads."""
    holding = [v for v in verdicts if v.state == "holds"]
    here = [v for v in holding if not v.beyond]
    if here:
        said = here[:1] + [v for v in here[1:] if v.kind == WAIT and (v.share or 0.0) >= MATTERS][:1]
        above = [v for v in holding if v.beyond and v.kind == WAIT][:1]
        claims = [v.claim for v in said] + [f"At other loads: {v.claim[0].lower()}{v.claim[1:]}" for v in above]
        return ". ".join(claims)
    if holding:
        return holding[0].claim
    if any(v.state == "undecided" for v in verdicts):
        return "Undecided: " + verdicts[0].claim[0].lower() + verdicts[0].claim[1:]
    return "Nothing was found that holds the service back at the load offered"


def tally(points: list[dict[str, Any]]) -> tuple[int, dict[str, int]]:
    """(Successes, failures by outcome) over all points; what we gave up ourselves is neither."""
    counts: dict[str, int] = {}
    for p in points:
        for outcome, n in p["counts"].items():
            counts[outcome] = counts.get(outcome, 0) + n
    ok = counts.pop("ok", 0)
    return ok, {k: n for k, n in counts.items() if n and k not in ("censored", "never_sent", "cancelled")}


def failures(points: list[dict[str, Any]]) -> str:
    """What failed, in one sentence, where it is more than one request in twenty; else ''."""
    ok, by_outcome = tally(points)
    failed = sum(by_outcome.values())
    if failed * 20 <= failed + ok:
        return ""
    worst = ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in sorted(by_outcome.items(), key=lambda x: -x[1]))
    return f"{failed} of {failed + ok} requests failed ({worst})"


def _nothing(summary: dict[str, Any]) -> Verdict:
    if summary["partial"] and not tally(summary["points"])[1]:  # whoever ended it did so before any had ended
        claim = "No request had ended when the run was cut off, so nothing can be said about waiting"
        return Verdict("no success", claim, "undecided", how="unknown", next_step="let it run for longer")
    return Verdict("no success", "No request succeeded, so nothing can be said about waiting", "undecided",
                   next_step="see the outcomes above the latencies, and the service's log")  # fmt: skip


def _idle(summary: dict[str, Any]) -> Verdict:
    """Only watched, and nothing was in work."""
    seen = [p["passive"]["in_flight"] for p in summary["points"] if "passive" in p]
    if any(x is None for x in seen):
        return Verdict("unexplained", "Whether any request was in work cannot be seen", "undecided", how="unknown",
                       next_step="read the engine's own metrics: --metrics-url, --prometheus")  # fmt: skip
    return Verdict("want of load", "No request was in work or waiting", "holds", 1.0, of="device time", how="derived",
                   evidence=("running and waiting were 0 whenever the engine was asked",))  # fmt: skip
