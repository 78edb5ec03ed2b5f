"""What a plan is told from outside: the workload, and runs that were measured. Part of the application layer."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whywait import app
from whywait.analyze.bill import Ask as BillAsk
from whywait.analyze.bill import bill
from whywait.analyze.energy import told_devices
from whywait.analyze.energy_model import the_machine
from whywait.analyze.goodput import goodput
from whywait.convert.fit import describe
from whywait.convert.traces import from_schedule
from whywait.core.run import Run
from whywait.core.schedule import Workload
from whywait.errors import UsageError, WhywaitError
from whywait.judge.plan import Row, state_of
from whywait.judge.plan_money import paid, per_hour, whole_nodes, within
from whywait.load.recipe import mean_rate, open_schedule
from whywait.physics.arch import Arch
from whywait.physics.dtypes import known
from whywait.physics.layout import Layout, Precision
from whywait.physics.memory import weights_bytes
from whywait.physics.models import Shape
from whywait.physics.prices import Offer
from whywait.planning_quality import Tested, quality_state
from whywait.planning_space import narrower
from whywait.sim.catalog import model_named
from whywait.twin.baseline import baseline_of
from whywait.units import number

NEAR = 0.1  # a measured rate counts as a whole part of the one asked for if it is so near
REPEAT = 0.03  # sd of the log of two measurements of one service
NARROW = 0.9  # weights of so much of the published size or less are in narrower numbers
LENGTHS = 0.25  # difference of mean lengths from which a run is of another load


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


@dataclass(frozen=True)
class Measured:
    """A run as a candidate: ``copies`` of the service that was measured."""

    row: Row
    entry: dict[str, Any]


class Told(NamedTuple):
    """What the user tells beside the runs: comparisons of answers, and what runs do not tell (``--baseline``)."""

    tested: Sequence[Tested] = ()
    baseline: str = ""


class _IsOf(NamedTuple):
    """What a run's service is: narrower numbers and the state of their test, and what is not known of it."""

    narrow: tuple[str, ...]
    quality: str
    note: str
    doubts: list[str]


def measured(
    directory: str, want: Any, price: Callable[[str | None], Offer | None], like: tuple[float, float, str],
    told: Told | None = None,
) -> tuple[list[Measured], dict[str, Any]]:  # fmt: skip
    """Candidates of a saved run, one per load point whose rate is a whole part of the one asked for; and what the run
    tells of where time goes. ``want`` is ``planning_search.Want``, ``like`` the mean lengths and the model of the plan.

    Raises:
        UsageError: there is no such run.
    """
    told, result = told or Told(), app.show(directory)
    run, summary = result.run, result.summary
    machine = the_machine(run)
    name = machine.name if machine else None
    offer = price(name)
    slo, foreign = dict(want.slo), _foreign_classes(run, want)
    run = _held_to(run, want.workload)
    devices, counted = devices_of(run, told.baseline)
    billed = bill(run, BillAsk(tuple([offer] if offer else ()), devices, slo=slo))
    other, surely = _other_model(str(run.manifest.engine.get("model") or ""), like[2])
    narrow, unsure = numbers_of(run, like[2], told.baseline)
    state, note = quality_state(narrow, told.tested)
    if unsure and not narrow:
        state, note = "undecided", unsure
    is_of = _IsOf(narrow, state, note, [d for d in (other, unsure, counted) if d])
    out: list[Measured] = []
    unused: list[str] = []
    for p, b in zip(summary["points"], billed["points"], strict=True):
        at = p["target"] if p["mode"] == "rate" else p["offered"].get("sent_per_s") if p["mode"] == "trace" else None
        copies = max(1, round(want.rate / at)) if at else 0
        where = f"{directory}, {p['mode']} {p['target'] if p['target'] is not None else ''}".strip()
        if surely or foreign:
            unused.append(f"{where}: {other if surely else foreign}")
            continue
        if not at or abs(copies * at / want.rate - 1) > NEAR:
            unused.append(f"{where}: " + ("a closed loop has no rate of its own" if not at else
                          f"{at:g}/s is no whole part of {want.rate:g}/s"))  # fmt: skip
            continue
        out.append(_candidate(run, (p, b), (directory, name, copies, at), (want, slo, like, offer), is_of))
    story = {
        "other": other, "doubts": _cut(run), "run": directory, "made_by": run.manifest.origin,
        "headline": result.headline, "described": summary["described"],
        "verdicts": [v.as_dict() for v in result.verdicts[:3]], "unused": unused,
        "points": [{"mode": p["mode"], "target": p["target"], "label": p["label"], "phases": p["phases"],
                    "occupancy": p["occupancy"]} for p in summary["points"]],
    }  # fmt: skip
    return out, story


def _held_to(run: Run, w: Workload) -> Run:
    """The run with the plan's SLO for each class, whatever it was asked for itself."""
    classes = [{"name": c.name, "slo": dict(c.slo)} for c in w.classes]
    manifest = dataclasses.replace(run.manifest, workload={**run.manifest.workload, "classes": classes})
    return dataclasses.replace(run, manifest=manifest)


def _foreign_classes(run: Run, want: Any) -> str:
    """What to say where there are requests that the plan has no SLO for: each class has its own, and theirs is none of
    them."""
    if want.slo:
        return ""
    others = sorted({str(c) for c in run.requests["class"]} - {c.name for c in want.workload.classes})
    return f"its requests are of {', '.join(others)}, a class without an SLO in this plan (--slo)" if others else ""


def _candidate(
    run: Any, of: tuple[Any, Any], at: tuple[str, str | None, int, float], how: tuple[Any, Any, Any, Offer | None],
    is_of: _IsOf,
) -> Measured:  # fmt: skip
    (p, b), (directory, machine, copies, rate) = of, at
    node = found.node if (found := the_machine(run)) else 1
    want, slo, like, offer = how
    one = run.point(p["point"])
    good = goodput(one, slo)
    n = max(len(one.requests), 1)
    share = good.share or 0.0
    rng = np.random.default_rng([want.seed, 17])
    noise = np.exp(rng.normal(0.0, REPEAT, want.draws))
    shares = np.clip(rng.beta(share * n + 0.5, (1 - share) * n + 0.5, want.draws), 0, 1)
    each = b["energy"]["devices"]  # that serve in one copy
    devices = None if each is None else each * copies
    joules, watts = b["energy"]["per_good_request"]["value"], b["energy"]["watts"]
    watts = None if watts is None else watts * copies
    hour, nodes = None, None
    if devices is not None and each is not None:
        whose = (offer, devices, watts, _idle_each(b["energy"], each), node)
        hour, nodes = per_hour(*whose), whole_nodes(*whose)
    rated = share * rate * copies
    cost = None if hour is None or not rated else hour / (rated * 3600) * 1000
    limit = [p[k]["p95"] / v for k, v in want.limits.items() if k in p and p[k]["p95"] is not None]
    latency = max(limit) if limit else None
    figures = {"cost": cost, "goodput": rated, "latency": latency, "energy": joules, "share": share, "hourly": hour,
               "paid": paid(offer, hour),
               "ttft_ms_p95": p["ttft_ms"]["p95"], "tpot_ms_p95": p["tpot_ms"]["p95"], "power_w": watts}  # fmt: skip
    lost = share / np.maximum(shares, 1e-9)
    draws = {"goodput": shares * rate * copies, "share": shares}
    for key, spread in (
        ("cost", lost),
        ("energy", lost * noise),
        ("latency", noise),
        ("ttft_ms_p95", noise),
        ("tpot_ms_p95", noise),
    ):
        if (value := figures[key]) is not None:
            draws[key] = value * spread
    made = run.manifest.origin
    name = f"{made}: {Path(directory).name}" + (f" × {copies}" if copies > 1 else "")
    doubts = [*is_of.doubts, *_other_load(one, like[:2]), *_cut(run), *_late(p)]
    state = state_of(shares, want.share)
    if doubts and state == "holds":  # of another load or not a whole one, or perhaps another model: not for sure
        state = "undecided"
    afford = within(figures["paid"], want.budget)
    row = Row(name, f"run {directory}", f"run {directory}", figures, draws, state, is_of.quality, afford)
    if copies > 1:
        doubts.append(
            f"{copies} services of the one measured at {rate:g}/s, the load dealt out evenly: not measured together"
        )
    entry = {"kind": made, "basis": made, "calibrated_by": None,
             "narrow": list(is_of.narrow), "quality_note": is_of.note, "machine": machine, "devices": devices,
             "replicas": copies, "run": directory, "doubts": doubts, "whole_nodes": nodes,
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


def devices_of(run: Run, baseline: str = "") -> tuple[int | None, str]:
    """How many devices ``baseline`` says that a run's service has, where the run does not tell it (None: the run tells,
    or nobody does); and what is not known of it, in words."""
    if told_devices(run)[0] is not None:
        return None, ""
    if any(p.strip().partition("=")[0] in ("tp", "pp", "dp", "pd") for p in baseline.split(",")):
        with contextlib.suppress(UsageError):
            return baseline_of(run, baseline).deployment.devices, ""
    return None, "it does not tell how many devices serve: those that were busy are counted, if any (--baseline tp=N)"


def numbers_of(run: Run, model: str, baseline: str = "") -> tuple[tuple[str, ...], str]:
    """What of a run's service was stored narrower than ``model`` was published, techniques by name (``8-bit-weights``
    where only the size of the weights tells); and what of its numbers is not known, in words.

    A simulated run holds its precision. Else ``baseline`` (``bf16-weights,fp8-kv``) is believed; then weights by the
    size of the files, unless the engine was launched to narrow them, and KV by the engine's word.
    """
    try:
        arch = model_named(model)
    except WhywaitError:
        return (), f"how {model} was published is not known here, and so not whether its numbers are narrower"
    engine = run.manifest.engine
    made = (engine.get("deployment") or {}).get("precision")
    if isinstance(made, Mapping):
        types = {k: made[k] for k in ("weights", "kv", "compute", "experts") if made.get(k)}
        return narrower(Precision(**types), arch), ""
    given = {kind: name for p in baseline.split(",") for name, _, kind in (p.strip().rpartition("-"),)
             if kind in ("weights", "kv") and known(name)}  # fmt: skip
    out: list[str] = []
    lacking = []
    bits = _bits(Shape.from_dict(engine.get("model_shape")), arch)
    if "weights" in given:
        out += narrower(Precision(given["weights"]), arch)
    elif bits:
        out.append(f"{bits}-bit-weights")
    elif bits is None or _launched_with(run, "--quantization", "-q"):
        lacking.append("weights")
    kv = given.get("kv") or str(engine.get("kv_dtype") or engine.get("cache_dtype") or "").lower()
    kv = "bf16" if kv == "auto" else "fp8" if kv.startswith("fp8") else kv
    if known(kv):
        out += [n for n in narrower(Precision(kv=kv), arch) if n.endswith("-kv")]
    else:
        lacking.append("KV")
    if not lacking:
        return tuple(out), ""
    said = ",".join(f"bf16-{k.lower()}" for k in lacking)
    return tuple(out), f"it does not tell in which numbers its {' and '.join(lacking)} are (--baseline {said}, if so)"


def _bits(shape: Shape | None, a: Arch) -> int | None:
    """Bits of a weight about, where it takes less room than published; 0 where it does not, None where not known."""
    if shape is None:
        return None
    own = weights_bytes(a, Precision(a.native, experts=a.native_experts or None), Layout())
    published = own / (weights_bytes(a, Precision(), Layout()) / 2)
    each = shape.bytes_per_param
    return 0 if each > NARROW * published else min((8, 4, 2), key=lambda b: abs(math.log(b / 8 / each)))


def _launched_with(run: Run, *flags: str) -> bool:
    """Whether one of the flags stands in the command by which the run started its service."""
    return any(w.partition("=")[0] in flags for part in run.manifest.command if " " in part for w in part.split())


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


def _cut(run: Any) -> list[str]:
    m = run.manifest
    return [f"PARTIAL: the run was cut short ({m.partial_reason or 'no reason is kept'})"] if m.partial else []


def _late(p: Any) -> list[str]:
    """That a load point was not the load that was asked for."""
    o = p["offered"]
    if o["valid"] is not False:
        return []
    asked, sent = o["asked_per_s"], o["sent_per_s"]
    both = "" if asked is None or sent is None else f": {number(sent)} of {number(asked)} requests/s were sent"
    return [f"INVALID: the client was late{both}"]


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
