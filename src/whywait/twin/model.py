"""A deployment under loads as a function of its multipliers: what a calibration asks, and what a what-if compares.

Part of the application layer. Figures are taken from a simulated load by the functions that take them from a measured
one (``analyze.observed``), of the same requests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from whywait.analyze.counters import gauge
from whywait.analyze.goodput import goodput
from whywait.analyze.latency import per_request
from whywait.analyze.observed import Observed, statistics
from whywait.analyze.window import request_rate
from whywait.core.run import Run
from whywait.judge.calibrate import Point, Prior, Seen, family
from whywait.physics import fitted
from whywait.physics.efficiency import Efficiency
from whywait.physics.fitted import FAMILIES
from whywait.sim import service
from whywait.sim.deployment import Deployment
from whywait.sim.loads import Options
from whywait.twin.asked import Asked

REPLY = "reply"  # the way of a token to the client: beside the fields of Efficiency
FIELDS = tuple(f.name for f in fields(Efficiency) if isinstance(f.default, float))
#: Log-sd of the multipliers on this machine's processor, at least: its kernels were not fitted at all.
CPU_SD = {"weights": 0.6, "compute": 0.8, "experts": 0.8, "kv": 0.8, "pairs": 0.8, "link": 0.3,
          "step": 1.5, "sequence": 1.2, "token": 1.2, "prefill_step": 1.2, "frontend": 1.2, REPLY: 1.0,
          "kv_space": 0.02}  # fmt: skip
UNKNOWN_SD = 0.2  # of a multiplier that the fits do not speak of
#: Medians on a processor whose weights are packed: a core spends on unpacking about half of what its rates say it
#: spends on reading, and multiplies slower than in plain 32 bits. Of the exam's runs of llama.cpp (Q4_0, one core):
#: 18 ms for a token alone, 3.9 ms for one of a prompt.
UNPACKING = {"weights": 1.5, "compute": 2.0}
KERNELS = ("weights", "compute", "experts", "kv", "pairs")
HOST = ("step", "sequence", "token", "prefill_step", "frontend", REPLY)
PERCENTILES = {"ttft_ms.p50": ("ttft_s", 0.5), "ttft_ms.p99": ("ttft_s", 0.99), "tpot_ms.p50": ("tpot_s", 0.5),
               "tpot_ms.p99": ("tpot_s", 0.99), "e2e_ms.p50": ("e2e_s", 0.5)}  # fmt: skip


@dataclass(frozen=True)
class Twin:
    """``loads`` in the order that ``predict`` is asked in; ``slo`` by keys as ``ttft_ms``; ``usd_h`` what a device-hour
    costs (NaN: not known)."""

    deployment: Deployment
    loads: tuple[Asked, ...]
    slo: Mapping[str, float] = dataclasses.field(default_factory=dict)
    usd_h: float = math.nan

    def at(self, multipliers: Mapping[str, float]) -> Deployment:
        """The deployment with these multipliers on its efficiency and its reply."""
        d = self.deployment
        own = {k: getattr(d.efficiency, k) * v for k, v in multipliers.items() if k in FIELDS}
        engine = dataclasses.replace(d.engine, reply_s=d.engine.reply_s * multipliers.get(REPLY, 1.0))
        if d.engine.kv_blocks is not None:  # the log told how many: nothing to be uncertain about
            own.pop("kv_space", None)
        return dataclasses.replace(d, efficiency=dataclasses.replace(d.efficiency, **own), engine=engine)

    def predict(self, multipliers: Mapping[str, float], index: int) -> Mapping[str, float]:
        """What ``analyze.observed`` takes from a measured point, of the same requests of the simulated one."""
        a = self.loads[index]
        f = self._figures(multipliers, a, 0)
        use = a.counted & f["ok"]
        out: dict[str, float] = {}
        for name, key in (("ttft_ms", "ttft_s"), ("tpot_ms", "tpot_s"), ("e2e_ms", "e2e_s")):
            out.update(statistics(name, f[key][use] * 1e3))
        for name, key in (("queue_ms.mean", "queue_s"), ("prefill_ms.mean", "prefill_s")):
            values = f[key][use]
            out[name] = float(np.mean(values) * 1e3) if len(values) else math.nan
        out["output_tokens_per_s"] = f["output_tokens_per_s"]
        out["kv_use"] = f["kv_use"]
        return out

    def outcome(self, multipliers: Mapping[str, float], a: Asked, seed: int) -> dict[str, float]:
        """The figures of a what-if (ms, per second, shares); NaN where a figure is not known."""
        f = self._figures(multipliers, a, seed)
        use = a.counted & f["ok"]
        out = {k: _quantile(f[key][use], q) * 1e3 for k, (key, q) in PERCENTILES.items()}
        out["output_tokens_per_s"], out["requests_per_s"] = f["output_tokens_per_s"], f["requests_per_s"]
        out["goodput_requests_per_s"] = f["requests_per_s"] * self._good(f, a.counted) if self.slo else math.nan
        out["kv_use"] = f["kv_use"]
        out["usd_per_million_tokens"] = self.price_of(f["output_tokens_per_s"])
        return out

    def price_of(self, tokens_per_s: float) -> float:
        """Dollars per million output tokens; NaN where there is no price."""
        return self.usd_h * self.deployment.devices / 3600 / tokens_per_s * 1e6 if tokens_per_s > 0 else math.nan

    def joules(self, multipliers: Mapping[str, float], a: Asked) -> float:
        """Watts of all devices over a load; NaN where the machine's power is not known."""
        if self.deployment.machine.tdp_w is None:
            return math.nan
        found = service.figures(self.at(multipliers), a.schedule, a.mode, a.target, 0, options=self.options(a, "steps"))
        return float(found.get("power_w") or math.nan)

    def with_chance(self, exponent: float) -> Twin:
        """Drafts accepted with these chances to the power of ``exponent``."""
        spec = self.deployment.speculation
        if spec is None:
            return self
        chances = tuple(c**exponent for c in spec.acceptance)
        d = dataclasses.replace(self.deployment, speculation=dataclasses.replace(spec, acceptance=chances))
        return dataclasses.replace(self, deployment=d)

    def options(self, a: Asked, keep: str) -> Options:
        return Options(keep=keep, warm=a.warm)

    def _figures(self, multipliers: Mapping[str, float], a: Asked, seed: int) -> dict[str, Any]:
        return service.figures(
            self.at(multipliers), a.schedule, a.mode, a.target, seed, options=self.options(a, "none")
        )

    def _good(self, f: Mapping[str, Any], counted: Any) -> float:
        good = f["ok"].copy()
        for key, bound in self.slo.items():
            name = {"ttfa_ms": "ttft_s", "itl_ms": "tpot_s"}.get(key, key.replace("_ms", "_s"))
            if name in f:
                good &= ~(f[name] * 1e3 > bound)
        return float(good[counted].mean()) if counted.any() else math.nan


def prior_of(d: Deployment, cpu: bool) -> Prior:
    """The multipliers that can matter to a deployment, and how far each may be from 1."""
    sd = spreads(d)
    if cpu:
        sd = {k: max(v, CPU_SD[k]) for k, v in sd.items()}
    if not d.model.experts:
        del sd["experts"]
    if d.layout.devices == 1 and d.split is None:
        del sd["link"]
    if d.engine.kv_blocks is not None:
        del sd["kv_space"]
    return Prior(sd, {k: math.log(v) for k, v in UNPACKING.items()} if cpu and _packed(d) else {})


def _packed(d: Deployment) -> bool:
    return d.precision.weights.startswith(("q", "iq", "int4", "int8"))


def spreads(d: Deployment) -> dict[str, float]:
    """Log-sd of every multiplier before anything was measured, as the fits of operations leave it."""
    family = d.engine.policy if d.engine.policy in FAMILIES else "vllm"
    known = fitted.prior_of(d.machine, family).sd
    found = {k: known.get(k, UNKNOWN_SD) for k in FIELDS}
    return {**found, REPLY: found["frontend"]}


def unsure(before: Deployment, after: Deployment, prior: Prior) -> dict[str, float]:
    """How much less the multipliers of ``before`` are known for ``after``, log-sd by name: what was found on one
    machine, model or engine holds of another only as far as these differ among themselves. A share of the prior's
    spread, since that is how the fits differ between configurations."""
    sd, out = spreads(after), dict[str, float]()

    def add(names: Iterable[str], share: float) -> None:
        out.update({k: math.hypot(out.get(k, 0.0), share * sd[k]) for k in names})

    if before.machine.name != after.machine.name:
        add(KERNELS, 0.7)
        add(HOST, 0.3)
    if before.precision.weights != after.precision.weights:
        add(("weights", "compute", "experts"), 0.5)
    if before.precision.kv != after.precision.kv:
        add(("kv", "pairs"), 0.5)
    if before.model.name != after.model.name:
        add((*KERNELS, *HOST), 0.4)
    if before.engine.policy != after.engine.policy:
        add(KERNELS, 0.4)
        add(HOST, 1.0)
    if before.layout != after.layout:
        add(("link",), 0.5)
    return {k: v for k, v in out.items() if k in prior.log_sd}


def _quantile(x: Any, q: float) -> float:
    known = x[np.isfinite(x)]
    return float(np.quantile(known, q)) if len(known) else math.nan


def measured_figures(run: Run, o: Observed, slo: Mapping[str, float], twin: Twin) -> dict[str, float]:
    """The figures of :meth:`Twin.outcome` as they were measured, where they were."""
    one = run.point(o.point)
    lat, rows = per_request(one), np.searchsorted(np.flatnonzero(run.requests["point"] == o.point), o.rows)
    values = {"ttft_s": lat.ttft_ms, "tpot_s": lat.tpot_ms, "e2e_s": lat.e2e_ms}
    out = {k: _quantile(values[key][rows], q) for k, (key, q) in PERCENTILES.items()}
    w = o.window
    if "output_tokens_per_s" in o.figures:
        out["output_tokens_per_s"] = o.figures["output_tokens_per_s"].value
        out["usd_per_million_tokens"] = twin.price_of(out["output_tokens_per_s"])
    out["requests_per_s"] = request_rate(one, w, lat.ok) or math.nan
    if slo:
        good = goodput(one, slo, w).requests_per_s
        out["goodput_requests_per_s"] = math.nan if good is None else good
    span = (w.start_ns, w.end_ns)
    kv, power = gauge(run.readings, "kv_use", span, combine="mean"), gauge(run.readings, "power_watts", span, "gpu")
    if kv is not None:
        out["kv_use"] = kv.mean
    if power is not None and out.get("output_tokens_per_s"):
        out["energy_j_per_token"] = power.mean / out["output_tokens_per_s"]
    return {k: v for k, v in out.items() if math.isfinite(v)}


def points_of(found: Sequence[Observed]) -> list[Point]:
    """Observed load points as a calibration takes them: end to end is the sum of the others and says nothing new."""
    return [
        Point(o.name, o.at, {m: Seen(f.value, f.log_se) for m, f in o.figures.items() if family(m) != "e2e_ms"})
        for o in found
    ]
