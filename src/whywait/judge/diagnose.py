"""Ranks causes: every rule looks at the evidence, the verdicts are put in order, one sentence leads."""

from __future__ import annotations

from typing import Any

from whywait.core.run import Run
from whywait.judge.causes import RULES
from whywait.judge.evidence import gather
from whywait.judge.verdict import Verdict, rank


def judge(run: Run, summary: dict[str, Any], flags: dict[str, str] | None = None) -> list[Verdict]:
    """Verdicts of a Run, first the causes that hold (largest share first), then the undecided, then those ruled out.

    ``summary`` is that of the same run; ``flags`` are the engine's own names for its limits (``engines`` table).
    """
    evidence = gather(run, summary, flags)
    if not any(p.ok for p in evidence.points):
        return [_idle(summary) if any("passive" in p for p in summary["points"]) else _nothing()]
    return rank([v for rule in RULES for v in rule(evidence)])


def headline(verdicts: list[Verdict]) -> str:
    """The verdict in one sentence: the strongest cause of each load point that has one, at most three."""
    leads: dict[int | None, Verdict] = {}
    for v in verdicts:
        if v.state == "holds" and v.of == "request time":
            leads.setdefault(v.point, v)
    claims = [v.claim for v in sorted(list(leads.values())[:3], key=lambda v: -1 if v.point is None else v.point)]
    if claims:
        return ". ".join(claims)
    lead = next((v for v in verdicts if v.state == "holds"), None)
    if lead is not None:
        return lead.claim
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


def _nothing() -> Verdict:
    return Verdict("no success", "No request succeeded, so nothing can be said about waiting", "undecided",
                   next_step="see the outcomes above the latencies, and the service's log")  # fmt: skip


def _idle(summary: dict[str, Any]) -> Verdict:
    """Only watched, and nothing was in work."""
    seen = [p["passive"]["in_flight"] for p in summary["points"]]
    if any(x is None for x in seen):
        return Verdict("unexplained", "Whether any request was in work cannot be seen", "undecided", how="unknown",
                       next_step="read the engine's own metrics: --metrics-url, --prometheus")  # fmt: skip
    return Verdict("want of load", "No request was in work or waiting", "holds", 1.0, of="device time", how="derived",
                   evidence=("running and waiting were 0 whenever the engine was asked",))  # fmt: skip
