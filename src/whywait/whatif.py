"""The journey of ``whywait what-if``: what a change would do to the service of a measured Run, with intervals.

Calibrate on the run, see how wrong that is on loads left out, and only then simulate the service with and without the
change, by the same draws of what is not known. Part of the application layer.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whywait.analyze.observed import Observed
from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.judge.calibrate import Calibration, Knobs, family
from whywait.judge.calibrate_check import Check, Miss, helps
from whywait.judge.calibrate_claims import Claim, Pairs, claims, doubted, headline
from whywait.physics.arch import arch_of
from whywait.sim import techniques
from whywait.sim.deployment import Deployment
from whywait.sim.loads import prepare
from whywait.sim.spread import Progress
from whywait.twin.asked import Asked, drawn, longer
from whywait.twin.baseline import Baseline, as_rows, bits_told
from whywait.twin.draws import AFTER, BEFORE, Cell, outcomes
from whywait.twin.fitting import begin, fit
from whywait.twin.limits import possible
from whywait.twin.model import Twin, measured_figures
from whywait.twin.price import hourly, priced, prices
from whywait.twin.spread import Fact
from whywait.twin.told import carried
from whywait.twin.waits import Promise, Waiting, promises, waiting

SEEDS = 24  # draws of what is not known, where nobody says how many; always by the size of the load, not by the clock
LEAST_SEEDS = 8
HEAVY = 60_000  # requests simulated for the comparison, of all loads and draws
SLOW_S = 2.0  # a first simulation that takes longer was compiling
CHANCE_SD = 0.4  # log-sd of the exponent on acceptance of drafts that nobody has measured on this service


@dataclass(frozen=True)
class Ask:
    """What is to be changed. ``apply`` as of ``--apply``; ``bound``: errors allowed on loads left out, by family."""

    apply: str = ""
    machine: str | None = None
    model: str | None = None
    layout: str | None = None
    load: str | None = None
    slo: Mapping[str, float] | None = None
    bound: Mapping[str, float] = field(default_factory=dict)
    baseline: str = ""
    seeds: int | None = None
    jobs: int = 0
    knobs: Knobs = field(default_factory=Knobs)

    @property
    def changes(self) -> str:
        """Everything that changes, in the words of ``--apply``."""
        parts = [f"machine={self.machine}" if self.machine else "", self.layout or "", self.apply]
        return ",".join(p for p in parts if p)

    @property
    def changed(self) -> bool:
        """Whether the service is another, and not only the load."""
        return bool(self.changes or self.model)

    @property
    def words(self) -> str:
        """The same for people."""
        parts = [f"model={self.model}" if self.model else "", self.changes]
        said = ", ".join(p.replace(",", ", ") for p in parts if p)
        return said or f"the same service at {self.load}"


@dataclass(frozen=True)
class WhatIf:
    """The answer. ``refused`` says why nothing is claimed, if so, and ``advice`` which measurement would help;
    ``claims`` are the figures; ``promises`` what each technique was to cut and whether it does."""

    run: str
    ask: Ask
    headline: str
    refused: str
    advice: str
    facts: tuple[Fact, ...]
    before: str
    after: str
    calibration: Calibration
    check: Check
    claims: tuple[Claim, ...]
    promises: tuple[Promise, ...]
    waits: tuple[Waiting, ...]
    notes: tuple[str, ...]
    draws: int
    took_s: float
    made_by: str = "measured"  # of the run: "simulated" makes the check circular

    def _repr_html_(self) -> str:
        from whywait.report import notebook
        from whywait.report.whatif import print_what_if
        from whywait.sim.jit import COMPILED

        return notebook.as_html(lambda out: print_what_if(self.as_dict(), out, compiled=COMPILED))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "run": self.run, "made_by": self.made_by, "changed": self.ask.changed, "what_if": self.ask.words,
            "headline": self.headline, "refused": self.refused or None,
            "advice": self.advice or None, "baseline": as_rows(self.facts), "before": self.before, "after": self.after,
            "calibration": {
                "kind": self.calibration.kind, "points": [p.name for p in self.calibration.points],
                "parameters": [{**dataclasses.asdict(p), "moved": p.moved} for p in self.calibration.parameters()],
                "discrepancy": dict(self.calibration.discrepancy),
            },
            "check": {"bound": dict(self.check.bound), "passes": self.check.passes,
                      "circular": self.made_by == "simulated", "covered": self.check.covered,
                      "errors": [_miss(m) for m in self.check.misses]},
            "claims": [c.as_dict() for c in self.claims], "techniques": [p.as_dict() for p in self.promises],
            "waits": [w.as_dict() for w in self.waits], "notes": list(self.notes), "draws": self.draws,
            "took_s": round(self.took_s, 2),
        }  # fmt: skip


def what_if(run_dir: str | Path, ask: Ask | None = None, progress: Progress | None = None, **more: Any) -> WhatIf:
    """What a change would do to the service of the Run in ``run_dir``.

    Args:
        ask: the change; or its fields by name: ``what_if("runs/1", apply="fp8-kv,prefix-cache", machine="h200")``.

    Raises:
        UsageError: the run cannot be read or does not say enough, or the change is impossible; the hint says what to
            do.
    """
    return answer(Run.load(run_dir), str(run_dir), ask or Ask(**more), progress)


def answer(run: Run, name: str, ask: Ask, progress: Progress | None = None) -> WhatIf:
    """As :func:`what_if`, of a Run that is read already.

    Raises:
        UsageError: see there.
    """
    if not ask.changes and not ask.model and not ask.load:
        raise UsageError("nothing is changed", "--apply fp8-kv, --machine h200, --layout tp=4 or --load concurrency=64")
    begun = begin(run, name, ask.baseline, ask.slo)
    seen, base, twin = begun.seen, begun.base, begun.twin
    after = changed(base.deployment, ask)
    loads = _loads(run, ask, twin)
    for a in loads:
        prepare(
            after, a.schedule, a.mode, a.target, 0, options=twin.options(a, "none")
        )  # what cannot be is refused at once
    began = time.monotonic()
    fitted = fit(begun, ask.knobs, ask.bound)
    began += fitted.compiling
    twin, found, checked, slo = fitted.twin, fitted.calibration, fitted.check, dict(fitted.twin.slo)
    after = changed(twin.deployment, ask)
    refused = fitted.refused
    compared = _Compared(twin, dataclasses.replace(twin, deployment=after), found, base.cpu)
    draws = ask.seeds or _draws(loads)
    said: list[Claim] = []
    spoilt = bool(refused)
    measured = _measured(loads, seen)
    found_pairs = compared.pairs(run, list(zip(loads, measured, strict=True)), draws, (ask.jobs, progress))
    for o, pairs in zip(measured, found_pairs, strict=True):
        figures = measured_figures(run, o, slo, compared.before) if o is not None else {}
        told = claims(found, pairs, figures, refused, changed=after != twin.deployment)
        told = priced(told, twin.deployment, after)
        sure = doubted(told, checked, ask.changed, slo)
        spoilt |= sure != told
        said += sure
    waits = [waiting(compared.before, compared.after, compared.median, a) for a in loads]
    notes = [*_notes(base, loads, compared), *_terms(twin.deployment, after)]
    if fitted.compiling > SLOW_S:
        notes.append(f"{fitted.compiling:.0f} s more to compile the simulator, which the next what-if will not need")
    return WhatIf(
        name, ask, headline(ask.words, said, refused, ask.changed), refused,
        helps(found, checked) if spoilt else "", fitted.facts,
        describe(twin.deployment, run, twin.deployment), describe(after, run, twin.deployment),
        found, checked, tuple(said),
        promises(ask.changes, waits), tuple(waits), tuple(notes), draws, time.monotonic() - began,
        run.manifest.origin,
    )  # fmt: skip


def changed(d: Deployment, ask: Ask) -> Deployment:
    """The deployment with the change.

    Raises:
        UsageError: an unknown technique, machine or model, or one that does not go with this deployment.
    """
    possible(d, ask.changes, ask.layout, ask.machine, ask.model)
    if ask.model:
        arch = arch_of(ask.model)
        types = dataclasses.replace(d.precision, weights=arch.native, experts=arch.native_experts or None)
        d = dataclasses.replace(d, model=arch, precision=types, engine=dataclasses.replace(d.engine, kv_blocks=None))
    return techniques.apply(ask.changes, d)


def describe(d: Deployment, run: Run | None = None, own: Deployment | None = None) -> str:
    """In a line: model, precision, devices, layout, engine. Of a ``run`` whose type of weights is a guess its bits,
    where the weights are still its ``own``."""
    kept = own is not None and (own.model, own.precision.weights) == (d.model, d.precision.weights)
    bits = bits_told(run) if run is not None and kept else None
    p, at = d.precision, d.layout
    ways = [f"{k}={getattr(at, k)}" for k in ("tp", "pp", "dp", "ep") if getattr(at, k) > 1]
    ways += [f"pd={d.split.prefill}:{d.split.decode}"] if d.split else []
    ways += [f"replicas={d.replicas}"] if d.replicas > 1 else []
    count = f"{d.devices} × " if d.machine.words else ""
    where = f"{count}{d.machine.name}{' (' + ', '.join(ways) + ')' if ways else ''}"
    applied = f", with {', '.join(d.applied)}" if d.applied else ""
    weights = p.weights if bits is None else f"about {bits:.1f} bits a weight"
    return f"{d.model.name} ({weights}, KV {p.kv}) on {where}, {d.engine.policy}, {d.engine.max_seqs} at once{applied}"


class _Compared:
    """Before and after by the same draws; after also with what is less sure there."""

    def __init__(self, before: Twin, after: Twin, found: Calibration, cpu: bool) -> None:
        here, there = hourly(before.deployment, after.deployment)
        self.before, self.after = dataclasses.replace(before, usd_h=here), dataclasses.replace(after, usd_h=there)
        self.found = found
        self.carried = carried(before.deployment, after.deployment, cpu)
        spec = after.deployment.speculation
        self.guessed = spec is not None and spec != before.deployment.speculation
        self.median = found.multipliers()

    def pairs(
        self, run: Run, loads: Sequence[tuple[Asked, Observed | None]], n: int, how: tuple[int, Progress | None]
    ) -> list[Pairs]:
        """``n`` draws at each load; what is drawn does not depend on which load it is. ``how``: over how many
        processes, and who is told how far it is."""
        rng = np.random.default_rng([n, 5])
        theta = self.found.draws(n, rng)
        z = {k: rng.standard_normal(n) for k in (*self.carried.wider, *self.carried.fresh)}
        chance = np.exp(rng.standard_normal(n) * CHANCE_SD)
        cells: list[Cell] = []
        for a, o in loads:
            for i in range(n):
                here = self.found.multipliers(theta[i])
                load = a if o is not None else drawn_again(run, self.before, a, i)
                cells.append(Cell(BEFORE, here, load, i))
                there = self.carried.there(here, {k: float(v[i]) for k, v in z.items()})
                cells.append(Cell(AFTER, there, load, i, float(chance[i]) if self.guessed else None))
        found = outcomes((self.before, self.after), cells, *how)
        out = []
        for k, (a, o) in enumerate(loads):
            joules = [t.joules(self.median, a) for t in (self.before, self.after)]
            mine = found[2 * n * k : 2 * n * (k + 1)]
            before, after = [[_with_energy(f, j) for f in mine[i::2]] for i, j in enumerate(joules)]
            out.append(Pairs(a.name, o.at if o is not None else a.at, theta, before, after, _sampling(o)))
        return out


def _sampling(o: Observed | None) -> dict[str, float]:
    """Log-sd of a measured point's figures by family: of the least sure one that is not a tail."""
    out: dict[str, float] = {}
    for metric, figure in (o.figures if o is not None else {}).items():
        if not metric.endswith(".p90"):
            out[family(metric)] = max(out.get(family(metric), 0.0), figure.log_se)
    return out


def drawn_again(run: Run, twin: Twin, a: Asked, seed: int) -> Asked:
    """Another draw of a load that was not measured."""
    base = twin.loads[-1]
    return drawn(run, base, f"{a.mode}={a.target:g}", len(a.schedule), seed)


def _with_energy(said: dict[str, float], power: float) -> dict[str, float]:
    """Joules per token from the power of the median and the draw's own rate of tokens."""
    rate = said.get("output_tokens_per_s", math.nan)
    said["energy_j_per_token"] = power / rate if rate > 0 else math.nan
    return said


def _loads(run: Run, ask: Ask, twin: Twin) -> tuple[Asked, ...]:
    if ask.load is None:
        return tuple(longer(a) for a in twin.loads)
    mode, _, amount = ask.load.partition("=")
    same = [a for a in twin.loads if a.mode == mode and amount and f"{a.target:g}" == amount.strip()]
    return tuple(longer(a) for a in same[:1]) or (drawn(run, twin.loads[-1], ask.load),)


def _measured(loads: Sequence[Asked], seen: Sequence[Observed]) -> list[Observed | None]:
    by_name = {o.name: o for o in seen}
    return [by_name.get(a.name) for a in loads]


def _draws(loads: Sequence[Asked]) -> int:
    rows = sum(len(a.schedule) for a in loads)
    return max(LEAST_SEEDS, min(SEEDS, HEAVY // max(2 * rows, 1)))


def _unseen_width(had: int, gets: int, loads: Sequence[Asked]) -> float | None:
    """How many requests a step can hold after the change where the run never held so many; None where it did."""
    most = max((min(float(gets), a.target) if a.mode == "concurrency" else float(gets) for a in loads), default=0.0)
    return most if gets > had and most > had else None


def _notes(base: Baseline, loads: Sequence[Asked], compared: _Compared) -> list[str]:
    before, after, found = base.deployment, compared.after.deployment, compared.found
    out = [f"{a.name}: {a.note}" for a in loads if a.note]
    if after.machine.name != before.machine.name:
        out.append(f"{after.machine.name} was not measured: what the run told of {before.machine.name} holds there "
                   "only in part, and the intervals are wider for it")  # fmt: skip
    elif compared.carried.wider:
        out.append(f"the change makes these less sure than the run told: {', '.join(sorted(compared.carried.wider))}")
    if (wide := _unseen_width(before.engine.max_seqs, after.engine.max_seqs, loads)) is not None:
        out.append(f"steps of up to {wide:g} requests at once were never seen: the run had {before.engine.max_seqs} at "
                   "most, and how wrong the model is was checked only there")  # fmt: skip
    if compared.guessed:
        out.append("how many drafts this traffic would accept was not measured: published figures, drawn widely")
    if base.cpu:
        out.append("a processor has no fitted kernels: all it does is learnt from this run, from wide priors")
    if found.silent:
        out.append(f"measured but not simulated: {', '.join(found.silent[:4])}")
    if not found.calibrated:
        out.append("the figures rest on one load point and the prior, and are no calibration")
    return out


def _terms(before: Deployment, after: Deployment) -> list[str]:
    """What the figures stand for, beside how they were made."""
    out = prices(before, after)
    if after.devices > before.devices and not before.machine.words:
        out.append(f"{before.machine.name} is one device: {after.devices} of them are as many such machines")
    return out


def _miss(m: Miss) -> dict[str, Any]:
    p = m.predicted
    return {"point": m.point, "metric": m.metric, "measured": m.measured, "predicted": p.median, "low": p.low,
            "high": p.high, "error": m.error, "held_out": not m.seen, "from_points": m.from_points}  # fmt: skip
