"""A paired trial as a whole: its rounds in, claims, effects, waits, drift and doubts out. Pure, and from plain values.

``plan`` and ``rounds`` are those of ``trial.json`` (``trying.Plan.as_dict``), so that a trial that was kept is judged
again by the same code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whywait.analyze.compare import CLASS, Effect, effects, metric_of
from whywait.analyze.disturbed import RULES
from whywait.analyze.stats import Doubt, Estimate
from whywait.core.run import doubt
from whywait.judge import paired, turns
from whywait.judge.paired import Asked, Claim
from whywait.units import percent

LENGTHS = 0.02  # mean tokens of the arms may differ by this share and still be the same work
MOST_DOUBTS = 8
DRIFT = 0.05  # of the fixed loop, and of the main figure from the first round to the last
_Round = Mapping[str, Any]


def judged(plan: Mapping[str, Any], rounds: Sequence[_Round]) -> dict[str, Any]:
    """``pairs`` (that count), ``excluded``, ``decided``, ``headline``, ``claims``, ``effects`` (by load, then figure),
    ``turns`` (see ``turns.py``), ``waits``, ``noise``, ``drift`` and ``doubts``, as plain JSON values."""
    kept, out = _pairs(plan, rounds)
    loads = [x["label"] or "" for x in plan["loads"]]
    found = {name: effects([(a["figures"].get(name, {}), b["figures"].get(name, {})) for a, b in kept])
             for name in loads}  # fmt: skip
    asked = [Asked(**a) for a in plan["asked"]]
    claims = paired.claims(found, asked, plan["promise"], plan["margin"])
    main = found[loads[0]]
    names = [a.metric for a in asked if not a.load]
    drift = _drift(plan, rounds, names)
    return {
        "pairs": len(kept),
        "excluded": out,
        "decided": paired.decided(claims),
        "headline": headline(plan, claims, len(kept)),
        "claims": [_plain(c.as_dict()) for c in claims],
        "effects": {load: {n: _effect(e) for n, e in found[load].items()} for load in loads},
        "turns": _plain(turns.against(plan["loads"], found, names)),
        "waits": {load: paired.waits(found[load], plan["promise"]) for load in loads},
        "noise": {"at": len(kept), **paired.noise(main, names, max(len(kept), 2))} if plan["same"] else {},
        "drift": drift,
        "doubts": _doubts(plan, rounds, kept, drift),
        "error_probability": paired.ALPHA,
    }


def headline(plan: Mapping[str, Any], claims: Sequence[Claim], pairs: int) -> str:
    """One sentence."""
    if not pairs:
        return "no pair of rounds was measured"
    if plan["same"]:
        false = [c for c in claims if c.way in ("above", "below")]
        if false:
            what = ", ".join(f"{c.metric} {paired.said(c.value, c.scale, c.unit)}" for c in false)
            return f"A/A: a FALSE finding ({what}): something beside the arms tells the rounds apart"
        return f"A/A: no false finding in {pairs} pairs"
    parts = []
    for c in claims:
        if c.state == "holds":
            parts.append(f"{_short(c)} {paired.said(c.value, c.scale, c.unit)}")
        elif c.state == "fails":
            why = "no change" if c.way == "same" else paired.said(c.value, c.scale, c.unit)
            parts.append(f"{_short(c)} {why} (fails)")
    if open_ := [_short(c) for c in claims if c.state == "undecided"]:
        parts.append(f"undecided: {', '.join(open_)}")
    return "B against A: " + "; ".join(parts)


def gate(result: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """A figure of a trial for ``--fail-if``: ``FIGURE[@LOAD].ratio``, ``.ratio_low``, ``.ratio_high``, ``.difference``,
    ``.difference_low``, ``.difference_high``, ``.a`` or ``.b``. Bounds of what was claimed are the always-valid ones.

    None where no round knew it.

    Raises:
        KeyError: there is no such figure.
    """
    name, key = ".".join(path[:-1]), path[-1]
    if not can_gate(path):
        raise KeyError(name)
    load = next(iter(result["effects"]))
    e = result["effects"][load].get(name)
    if e is None:
        return None
    what, _, side = key.partition("_")
    if key in ("a", "b"):
        return None if e[key] is None else float(e[key])
    at = {"": 0, "low": 1, "high": 2}[side]
    bounds = list(e[{"ratio": "ratio", "difference": "difference"}[what]])
    for c in result["claims"]:
        if c["metric"] == name and c["load"] == load and c["scale"] == what:
            bounds = [c["value"], c["low"], c["high"]]
    return None if bounds[at] is None else float(bounds[at])


#: What ``gate`` tells of a figure.
TOLD = ("a", "b", *(f"{what}{side}" for what in ("ratio", "difference") for side in ("", "_low", "_high")))


def can_gate(path: Sequence[str], classes: Sequence[str] | None = None) -> bool:
    """Whether a trial can have this figure (``classes``: of a workload with these), whatever its rounds will know."""
    name = ".".join(path[:-1])
    try:
        metric_of(name)
    except KeyError:
        return False
    mine = classes is None or not name.startswith(CLASS) or any(name.startswith(f"{CLASS}{c}.") for c in classes)
    return mine and path[-1] in TOLD


def surely_worse(result: Mapping[str, Any]) -> list[str]:
    """The claims whose figure surely became worse, in words, quality where it was measured among them; not what was
    named as the price."""
    found = [c for c in result["claims"] if c["kind"] == "metric"]
    named = [Claim(**{**c, "evidence": tuple(c["evidence"]), "against": tuple(c["against"])}) for c in found]
    quality = (result.get("quality") or {}).get("claims") or ()
    return [
        *(f"{c.metric} {paired.said(c.value, c.scale, c.unit)}" for c in named if paired.worse(c)),
        *(f"quality of the answers (not so: {c['claim']})" for c in quality if c["state"] == "fails"),
    ]


def _pairs(
    plan: Mapping[str, Any], rounds: Sequence[_Round]
) -> tuple[list[tuple[_Round, _Round]], list[dict[str, Any]]]:
    """Whole pairs as (A, B); and what a rule named before left out."""
    kept, out = [], []
    for first, second in zip(rounds[::2], rounds[1::2], strict=False):
        if not (first["whole"] and second["whole"] and first["pair"] == second["pair"]):
            continue
        why = {k: v for r in (first, second) for k, v in r["disturbed"].items() if k in plan["exclude"]}
        if why:
            out.append({"pair": first["pair"], "why": [f"{RULES[k]}: {v}" for k, v in why.items()]})
            continue
        kept.append((first, second) if first["arm"] == "A" else (second, first))
    return kept, out


def _drift(plan: Mapping[str, Any], rounds: Sequence[_Round], names: Sequence[str]) -> dict[str, Any]:
    """How a fixed piece of work, and the first figure asked for, changed from the first round to the last (shares).

    Of the figure each arm is taken against its own mean; the trend is a straight line over the rounds, with Student's t
    in ``figure_sure``.
    """
    out: dict[str, Any] = {"loop": None, "figure": None, "figure_sure": False, "name": names[0] if names else ""}
    loop = [np.nanmean([np.nan if v is None else v for v in r["calibration_ms"]] or [np.nan]) for r in rounds
            if r["whole"] and any(v is not None for v in r["calibration_ms"])]  # fmt: skip
    if len(loop) > 2:
        out["loop"] = float(max(loop) / min(loop) - 1)
    if not names:
        return out
    load = plan["loads"][0]["label"] or ""
    seen: dict[str, list[tuple[int, float]]] = {"A": [], "B": []}
    for r in rounds:
        value = r["figures"].get(load, {}).get(names[0])
        if r["whole"] and value is not None and value > 0:
            seen[r["arm"]].append((r["number"], math.log(value)))
    at = np.array([n for arm in seen.values() for n, _ in arm], dtype=np.float64)
    if min(map(len, seen.values())) < 3:
        return out
    off = np.concatenate([np.array([v for _, v in arm]) - np.mean([v for _, v in arm]) for arm in seen.values()])
    at -= at.mean()
    slope = float((at @ off) / (at @ at))
    rest = off - slope * at
    se = math.sqrt(float(rest @ rest) / max(len(at) - 3, 1) / float(at @ at))
    out["figure"], out["figure_sure"] = math.expm1(slope * (len(rounds) - 1)), abs(slope) > 2.5 * se
    return out


def _doubts(
    plan: Mapping[str, Any], rounds: Sequence[_Round], kept: Sequence[tuple[_Round, _Round]], drift: Mapping[str, Any]
) -> list[Doubt]:
    found: list[Doubt] = []
    for rule, what in RULES.items():
        at = [r for r in rounds if rule in r["disturbed"]]
        if at:
            where = ", ".join(f"{r['number'] + 1} ({r['arm']})" for r in at)
            left = "their pairs are left out, as was said before" if rule in plan["exclude"] else "they count"
            next_ = "" if rule in plan["exclude"] else f"--exclude {rule} in the next trial, or a quieter machine"
            worst = max(at, key=lambda r: _first_number(r["disturbed"][rule]))
            said = f"in round {worst['number'] + 1}: " if len(at) > 1 else ""
            found.append(doubt(f"rounds {where}: {what}", f"{said}{worst['disturbed'][rule]}; {left}", next_))
    if drift["loop"] is not None and drift["loop"] > DRIFT:
        why = f"a fixed piece of work took up to {percent(drift['loop'])} longer in some rounds"
        found.append(doubt("the machine itself did not stay the same", why, "a machine of its own, fixed clocks"))
    if drift["figure"] is not None and drift["figure_sure"] and abs(drift["figure"]) > DRIFT:
        why = f"{drift['name']} moved by {drift['figure']:+.0%} from the first round to the last, in both arms"
        found.append(doubt("the rounds drift", why, "pairs cancel a steady drift; find what warms up or fills"))
    for name in ("mean_prompt_tokens", "mean_output_tokens"):
        both = [[r["figures"].get(plan["loads"][0]["label"] or "", {}).get(name) for r in p] for p in kept]
        known = [(a, b) for a, b in both if a and b]
        if known and abs(ratio := float(np.mean([b / a for a, b in known])) - 1) > LENGTHS:
            what = name.removeprefix("mean_").replace("_", " ")
            next_ = "the same model and tokenizer in both; let the workload ignore end-of-sequence"
            found.append(doubt("the arms did not do the same work", f"B had {ratio:+.0%} {what} per request", next_))
    found += _of_runs(rounds)
    by_arm = {arm: {_name(r["engine"].get("model")) for r in rounds if r["arm"] == arm} for arm in "AB"}
    # Where other numbers are what is tried, names differ with them.
    if len(by_arm["A"] | by_arm["B"]) > 1 and rounds and not plan.get("quality_arms"):
        found.append(doubt("the arms serve models of different names", " and ".join(sorted(by_arm["A"] | by_arm["B"])),
                            "sure that this is the comparison you want?"))  # fmt: skip
    return found


def _of_runs(rounds: Sequence[_Round]) -> list[Doubt]:
    """The runs' own doubts, each once, with the rounds of each arm that have it; what was not read is left out."""
    seen: dict[str, list[_Round]] = {}
    for r in rounds:
        for what in dict.fromkeys(re.sub(r"\d[\d.,]*", "…", d) for d in r["doubts"] if "unknown" not in d):
            seen.setdefault(what, []).append(r)
    found = []
    for what, at in sorted(seen.items(), key=lambda x: -len(x[1]))[:MOST_DOUBTS]:
        by_arm = [sum(r["arm"] == arm for r in at) for arm in "AB"]
        why = f"so say the runs of {by_arm[0]} rounds of A and {by_arm[1]} of B"
        found.append(doubt(what, why, f"whywait show …/{at[0]['run']}"))
    return found


def _first_number(text: str) -> float:
    found = re.search(r"\d[\d,]*(?:\.\d+)?(?= %| ms)", text)
    return float(found[0].replace(",", "")) if found else 0.0


def _name(value: object) -> str:
    return "?" if value is None else str(value)


def _short(c: Claim) -> str:
    name = metric_of(c.metric).title + (f" at {c.load}" if c.load else "")
    return f"{name} (promised to fall)" if c.kind == "promise" else name


def _effect(e: Effect) -> dict[str, Any]:
    def three(x: Estimate) -> list[float | None]:
        return [x.value, x.lo, x.hi]

    out: dict[str, Any] = _plain({
        "title": e.metric.title, "unit": e.metric.unit, "better": e.metric.better, "a": e.a, "b": e.b, "n": e.n,
        "scale": e.scale, "ratio": three(e.ratio), "difference": three(e.difference), "higher": e.higher,
        "moved": e.moved, "note": e.note,
    })  # fmt: skip
    return out


def _plain(value: Any) -> Any:
    """JSON has no infinity: a bound that is not there is null."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
