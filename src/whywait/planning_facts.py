"""What a plan is told from outside: the workload, runs that were measured, comparisons of answers. Part of the
application layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whywait import app, qualifying
from whywait.analyze.bill import Ask as BillAsk
from whywait.analyze.bill import bill
from whywait.analyze.energy_model import the_machine
from whywait.analyze.goodput import goodput
from whywait.convert.fit import describe
from whywait.convert.traces import from_schedule
from whywait.core.schedule import Workload
from whywait.errors import UsageError, WhywaitError
from whywait.judge.plan import Row, state_of
from whywait.judge.plan_money import per_hour
from whywait.load.recipe import mean_rate, open_schedule
from whywait.physics.arch import Arch
from whywait.physics.prices import Offer
from whywait.sim.catalog import model_named

NEAR = 0.1  # a measured rate counts as a whole part of the one asked for if it is so near
REPEAT = 0.03  # sd of the log of two measurements of one service
LENGTHS = 0.25  # difference of mean lengths from which a run is of another load


@dataclass(frozen=True)
class Tested:
    """A comparison of answers: which techniques it speaks of, and its state (holds, undecided, fails)."""

    techniques: tuple[str, ...]
    directory: str
    state: str
    note: str
    headline: str

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "techniques": list(self.techniques)}


def workload_facts(w: Workload, rate: float, own_file: str | None) -> dict[str, Any]:
    """What the load is like and where it is from, as plain values: ``kind`` is fitted, trace, stages or recipe."""
    kind = "fitted" if w.fitted else "trace" if w.trace else "stages" if w.stages else "recipe"
    schedule = open_schedule(w, None if kind != "recipe" else rate, None if kind != "recipe" else 2000)
    seen = describe(from_schedule(schedule))
    keys = ("requests", "span_s", "rate_per_s", "gap_cv", "prompt_tokens", "output_tokens", "length_correlation",
            "prefix", "sessions", "rate_over_time", "classes")  # fmt: skip
    thinking = schedule.thinking_tokens
    fixed = [f"{k} {getattr(c, k)}" for c in w.classes for k in ("prompt_tokens", "output_tokens")
             if getattr(c, k).kind == "fixed"] if kind in ("recipe", "stages") else []  # fmt: skip
    shared = float((np.minimum(schedule.prefix_tokens, schedule.prompt_tokens)).sum() / schedule.prompt_tokens.sum())
    return {"kind": kind, "file": own_file, "fixed": fixed, "own_rate": mean_rate(w), "rate": rate,
            "arrivals": w.arrivals,
            "thinking_tokens_mean": float(thinking.mean()) if thinking.any() else None,
            "shared_share": shared if kind == "recipe" else None, **{k: seen[k] for k in keys}}  # fmt: skip


def quality_of(pairs: Sequence[tuple[str, str]], model: Arch, wanted: Sequence[tuple[str, ...]]) -> list[Tested]:
    """The comparisons by what they are of: (techniques joined by +, or '' , folder of ``whywait quality``). Without
    techniques the only kind of narrower numbers among the candidates is meant.

    Raises:
        UsageError: a folder holds no comparison, or it cannot be told what it is of.
    """
    out = []
    kinds = sorted(set(wanted))
    for name, directory in pairs:
        found = qualifying.load(directory).result()
        techniques = tuple(sorted(filter(None, name.split("+"))))
        if not techniques:
            if len(kinds) != 1:
                told = ", ".join("+".join(k) for k in kinds) or "none"
                raise UsageError(f"--quality {directory}: of which candidates?",
                                 f"--quality fp8-weights={directory}; narrower numbers among them: {told}")  # fmt: skip
            techniques = tuple(sorted(kinds[0]))
        state, note = _quality_state(found, model)
        out.append(Tested(techniques, str(directory), state, note, str(found["headline"])))
    return out


def _quality_state(found: Mapping[str, Any], model: Arch) -> tuple[str, str]:
    states = [c["state"] for c in found["claims"]]
    for arm in found["arms"].values():
        try:
            if model_named(str(arm.get("model") or "")).name != model.name:
                return "undecided", f"it is of {arm['model']}, not of {model.name}"
        except WhywaitError:
            own = model.name.rpartition("/")[2]
            called = f"the service called its model {arm.get('model')!r}, which may be another"
            return "undecided", f"{called}: serve it as {own}"
    if found["plan"]["same"]:
        return "undecided", "it compares an arm with itself"
    if found["partial"] or not states:
        return "undecided", "it was cut short" if found["partial"] else "it claims nothing"
    state = "fails" if "fails" in states else "holds" if all(s == "holds" for s in states) else "undecided"
    return state, ""


def quality_state(need: tuple[str, ...], tested: Sequence[Tested]) -> tuple[str, str]:
    """State of a candidate whose numbers are narrower by ``need``, and why in words. Techniques that were tested apart
    are not tested together."""
    if not need:
        return "as published", "numbers as the model was published in"
    want = tuple(sorted(need))
    mine = [t for t in tested if t.techniques == want]
    if mine:
        worst = max(mine, key=lambda t: ("holds", "undecided", "fails").index(t.state))
        return worst.state, f"{worst.directory}: {worst.headline}" + (f" ({worst.note})" if worst.note else "")
    if any(t.state == "fails" and set(t.techniques) <= set(want) for t in tested):
        return "fails", "a part of it fails alone"
    if all(any(t.techniques == (n,) and t.state == "holds" for t in tested) for n in want):
        return "untested", "each tested alone, not together"
    return "untested", "no comparison of its answers was given"


@dataclass(frozen=True)
class Measured:
    """A run as a candidate: ``copies`` of the service that was measured."""

    row: Row
    entry: dict[str, Any]


def measured(
    directory: str, want: Any, price: Callable[[str | None], Offer | None], like: tuple[float, float, str]
) -> tuple[list[Measured], dict[str, Any]]:
    """Candidates of a saved run, one per load point whose rate is a whole part of the one asked for; and what the run
    tells of where time goes. ``want`` is ``planning_search.Want``.

    Raises:
        UsageError: there is no such run.
    """
    result = app.show(directory)
    run, summary = result.run, result.summary
    machine = the_machine(run)
    name = machine.name if machine else None
    offer = price(name)
    slo = dict(want.slo) or dict(run.manifest.slo)
    billed = bill(run, BillAsk(tuple([offer] if offer else ()), slo=slo))
    other, surely = _other_model(str(run.manifest.engine.get("model") or ""), like[2])
    out: list[Measured] = []
    unused: list[str] = []
    for p, b in zip(summary["points"], billed["points"], strict=True):
        at = p["target"] if p["mode"] == "rate" else p["offered"].get("sent_per_s") if p["mode"] == "trace" else None
        copies = max(1, round(want.rate / at)) if at else 0
        where = f"{directory}, {p['mode']} {p['target'] if p['target'] is not None else ''}".strip()
        if surely:
            unused.append(f"{where}: {other}")
            continue
        if not at or abs(copies * at / want.rate - 1) > NEAR:
            unused.append(f"{where}: " + ("a closed loop has no rate of its own" if not at else
                          f"{at:g}/s is no whole part of {want.rate:g}/s"))  # fmt: skip
            continue
        out.append(_candidate(run, (p, b), (directory, name, copies, at), (want, slo, like, offer)))
    story = {
        "other": other,
        "run": directory, "made_by": summary["made_by"], "headline": result.headline, "described": summary["described"],
        "verdicts": [v.as_dict() for v in result.verdicts[:3]], "unused": unused,
        "points": [{"mode": p["mode"], "target": p["target"], "label": p["label"], "phases": p["phases"],
                    "occupancy": p["occupancy"]} for p in summary["points"]],
    }  # fmt: skip
    return out, story


def _candidate(
    run: Any, of: tuple[Any, Any], at: tuple[str, str | None, int, float], how: tuple[Any, Any, Any, Offer | None]
) -> Measured:  # fmt: skip
    (p, b), (directory, machine, copies, rate) = of, at
    want, slo, like, offer = how
    one = run.point(p["point"])
    good = goodput(one, slo)
    n = max(len(one.requests), 1)
    share = good.share or 0.0
    rng = np.random.default_rng([want.seed, 17])
    noise = np.exp(rng.normal(0.0, REPEAT, want.draws))
    shares = np.clip(rng.beta(share * n + 0.5, (1 - share) * n + 0.5, want.draws), 0, 1)
    devices = (b["energy"]["devices"] or len(run.manifest.machine.get("gpus") or ()) or 1) * copies
    joules, watts = b["energy"]["per_good_request"]["value"], b["energy"]["watts"]
    watts = None if watts is None else watts * copies
    hour = per_hour(offer, devices, watts, _idle_each(b["energy"], devices // copies))
    rated = share * rate * copies
    cost = None if hour is None or not rated else hour / (rated * 3600) * 1000
    limit = [p[k]["p95"] / v for k, v in slo.items() if k in p and p[k]["p95"] is not None]
    latency = max(limit) if limit else None
    figures = {"cost": cost, "goodput": rated, "latency": latency, "energy": joules, "share": share, "hourly": hour,
               "ttft_ms_p95": p["ttft_ms"]["p95"], "tpot_ms_p95": p["tpot_ms"]["p95"], "power_w": watts}  # fmt: skip
    lost = share / np.maximum(shares, 1e-9)
    draws = {"goodput": shares * rate * copies, "share": shares}
    for key, each in (
        ("cost", lost),
        ("energy", lost * noise),
        ("latency", noise),
        ("ttft_ms_p95", noise),
        ("tpot_ms_p95", noise),
    ):
        if (value := figures[key]) is not None:
            draws[key] = value * each
    made = "measured" if run.manifest.made_by == "measured" else run.manifest.made_by
    name = f"{made}: {Path(directory).name}" + (f" × {copies}" if copies > 1 else "")
    other, _ = _other_model(str(run.manifest.engine.get("model") or ""), like[2])
    doubts = [*([other] if other else []), *_other_load(one, like[:2])]
    state = state_of(shares, want.share)
    if doubts and state == "holds":  # of another load, or perhaps another model, it shows nothing for sure
        state = "undecided"
    row = Row(name, f"run {directory}", f"run {directory}", figures, draws, state, "as published")
    if copies > 1:
        doubts.append(
            f"{copies} services of the one measured at {rate:g}/s, the load dealt out evenly: not measured together"
        )
    entry = {"kind": made, "basis": made, "calibrated_by": None,
             "narrow": [], "machine": machine, "devices": devices, "replicas": copies, "run": directory,
             "doubts": doubts,
             "state_of_energy": b["energy"]["state"]}  # fmt: skip
    return Measured(row, {**entry, "served": _served(run)})


def _idle_each(energy: dict[str, Any], devices: int) -> float | None:
    """What one of the devices of a bill draws with nothing to do (W), its part of the host in it where that is in the
    bill's energy."""
    total = energy["idle"]["all_watts"]
    return None if total is None else float(total) / devices


def _served(run: Any) -> dict[str, str | None]:
    """The engine of a run and its layout (``tp=2,pp=2``), as far as the run tells them."""
    engine = run.manifest.engine
    kept = engine.get("deployment") or {}
    sizes, split = engine.get("layout") or kept.get("layout") or {}, kept.get("split")
    words = [f"{k}={v}" for k, v in sizes.items() if v > 1 or k == "tp"]
    words += [f"pd={split['prefill']}:{split['decode']}"] if split else []
    return {"engine": engine.get("name") or None, "layout": ",".join(words) or None}


def _other_model(called: str, wanted: str) -> tuple[str, bool]:
    """What to say where a run is not, or not surely, of the plan's model; and whether it surely is of another."""
    try:
        found = model_named(called).name if called else ""
    except WhywaitError:
        found = ""
    if found == wanted:
        return "", False
    if found:
        return f"it is of {found}, not of {wanted}", True
    return f"it is of a model called {called!r}, not surely {wanted}", False


def _other_load(one: Any, lengths: tuple[float, float]) -> list[str]:
    out = []
    for name, want in zip(("prompt_tokens", "output_tokens"), lengths, strict=True):
        seen = one.requests[name]
        seen = seen[np.isfinite(seen)]
        if len(seen) and abs(math.log(max(float(seen.mean()), 1.0) / max(want, 1.0))) > math.log(1 + LENGTHS):
            out.append(
                f"its {name.replace('_', ' ')} are {seen.mean():.0f} in the mean, the plan's {want:.0f}: another load"
            )
    return out
