"""A deployment under loads as a function of its multipliers: what a calibration asks, and what a what-if compares.

Part of the application layer. Figures are taken from a simulated load by the functions that take them from a measured
one (``analyze.observed``), of the same requests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from whywait.analyze.observed import Observed, statistics
from whywait.asked import Asked
from whywait.judge.calibrate import Point, Prior, Seen, family
from whywait.physics.efficiency import Efficiency
from whywait.physics.kernels import RESOURCES
from whywait.sim import service
from whywait.sim.deployment import Deployment
from whywait.sim.loads import Options
from whywait.sim.power import WORDS, drawn

REPLY = "reply"  # the way of a token to the client: beside the fields of Efficiency
FIELDS = tuple(f.name for f in fields(Efficiency) if isinstance(f.default, float))
#: Log-sd of the multipliers before anything was measured, on a machine whose operations were fitted: what the fits of
#: one configuration leave for another; and of this machine's processor, where kernels were not fitted at all.
FITTED_SD = {"weights": 0.12, "compute": 0.15, "experts": 0.25, "kv": 0.2, "pairs": 0.25, "link": 0.3,
             "step": 0.4, "sequence": 0.5, "token": 0.5, "prefill_step": 0.6, "frontend": 0.7, REPLY: 0.7,
             "kv_space": 0.03}  # fmt: skip
CPU_SD = {"weights": 0.6, "compute": 0.8, "experts": 0.8, "kv": 0.8, "pairs": 0.8, "link": 0.3,
          "step": 1.5, "sequence": 1.2, "token": 1.2, "prefill_step": 1.2, "frontend": 1.2, REPLY: 1.0, "kv_space": 0.02}  # fmt: skip
HOST = ("step", "sequence", "token", "prefill_step", "frontend", REPLY)
PERCENTILES = {"ttft_ms.p50": ("ttft_s", 0.5), "ttft_ms.p99": ("ttft_s", 0.99), "tpot_ms.p50": ("tpot_s", 0.5),
               "tpot_ms.p99": ("tpot_s", 0.99), "e2e_ms.p50": ("e2e_s", 0.5)}  # fmt: skip


@dataclass(frozen=True)
class Waits:
    """Where a load's time goes, per request: seconds of ``queue``, ``prefill`` and ``decode`` as the request sees them
    (``stalled``: the part of decode spent in other requests' prefill), and of device time by resource."""

    request_s: Mapping[str, float]
    device_s: Mapping[str, float]


@dataclass(frozen=True)
class Twin:
    """``loads`` in the order that ``predict`` is asked in; ``slo`` by keys as ``ttft_ms``."""

    deployment: Deployment
    loads: tuple[Asked, ...]
    slo: Mapping[str, float] = dataclasses.field(default_factory=dict)

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
        out["usd_per_million_tokens"] = self._price(f["output_tokens_per_s"])
        return out

    def waits(self, multipliers: Mapping[str, float], a: Asked) -> tuple[Waits, float]:
        """The account of one load, and the joules per output token (NaN: power is not known)."""
        d = self.at(multipliers)
        prepared, found, t = service.run_point(d, a.schedule, a.mode, a.target, 0, self._options(a, "steps"))
        parts = drawn(d, prepared, found)
        ok = t.ok
        n = max(int(ok.sum()), 1)
        s = found.steps
        stalled = _stalled(parts.parts, s)
        request = {"queue": _mean((t.scheduled - t.accepted)[ok]), "prefill": _mean((t.first - t.scheduled)[ok]),
                   "decode": _mean((t.last - t.first)[ok]), "stalled": stalled / n}  # fmt: skip
        device = {WORDS[r]: float(parts.parts[i].sum()) / n for i, r in enumerate(RESOURCES)}
        tokens = float(a.schedule.output_tokens[ok].sum())
        span = float(np.nanmax(t.end, initial=0.0)) - float(np.nanmin(t.sent, initial=0.0))
        busy = float(s.took_s.sum())
        joules = float((parts.watts * s.took_s).sum()) + parts.idle_w * max(span - busy, 0.0)
        return Waits(request, device), joules / tokens if tokens else math.nan

    def _figures(self, multipliers: Mapping[str, float], a: Asked, seed: int) -> dict[str, Any]:
        return service.figures(self.at(multipliers), a.schedule, a.mode, a.target, seed, self._options(a, "none"))

    def _options(self, a: Asked, keep: str) -> Options:
        return Options(keep=keep, warm=a.warm)

    def _good(self, f: Mapping[str, Any], counted: Any) -> float:
        good = f["ok"].copy()
        for key, bound in self.slo.items():
            name = {"ttfa_ms": "ttft_s", "itl_ms": "tpot_s"}.get(key, key.replace("_ms", "_s"))
            if name in f:
                good &= ~(f[name] * 1e3 > bound)
        return float(good[counted].mean()) if counted.any() else math.nan

    def _price(self, tokens_per_s: float) -> float:
        price = self.deployment.machine.price_usd_h
        if price is None or not tokens_per_s > 0:
            return math.nan
        return (price[0] + price[1]) / 2 * self.deployment.devices / 3600 / tokens_per_s * 1e6


def prior_of(d: Deployment, cpu: bool) -> Prior:
    """The multipliers that can matter to a deployment, and how far each may be from 1."""
    sd = dict(CPU_SD if cpu else FITTED_SD)
    if not cpu:
        for k in ("weights", "compute", "kv", "pairs"):
            sd[k] = max(sd[k], d.machine.scatter)
    if not d.model.experts:
        del sd["experts"]
    if d.layout.devices == 1 and d.split is None:
        del sd["link"]
    if d.engine.kv_blocks is not None:
        del sd["kv_space"]
    return Prior(sd)


def unsure(before: Deployment, after: Deployment, prior: Prior) -> dict[str, float]:
    """How much less the multipliers of ``before`` are known for ``after``, log-sd by name: what was found on one
    machine, model or engine holds of another only as far as these differ among themselves. A share of the prior's
    spread, since that is how the fits differ between configurations."""
    out: dict[str, float] = {}
    if before.machine.name != after.machine.name:
        kernels = [k for k in prior.log_sd if k not in HOST]
        out.update({k: 0.7 * max(FITTED_SD[k], after.machine.scatter) for k in kernels if k != "kv_space"})
        out.update({k: 0.3 * FITTED_SD[k] for k in prior.log_sd if k in HOST})
    if before.model.name != after.model.name:
        for k in prior.log_sd:
            out[k] = math.hypot(out.get(k, 0.0), 0.4 * FITTED_SD[k])
    if before.engine.policy != after.engine.policy:
        for k in prior.log_sd:
            out[k] = math.hypot(out.get(k, 0.0), (1.0 if k in HOST else 0.4) * FITTED_SD[k])
    if before.layout != after.layout and "link" in prior.log_sd:
        out["link"] = math.hypot(out.get("link", 0.0), 0.5 * FITTED_SD["link"])
    return out


def _stalled(parts: Any, s: Any) -> float:
    """Seconds that decoding requests spent in steps for the sake of others' prompts: of each mixed step what prompts
    add to it, taken as their share of the tokens in compute."""
    mixed = (s.prefill_tokens > 0) & (s.decode_seqs > 0)
    share = s.prefill_tokens[mixed] / np.maximum(s.prefill_tokens[mixed] + s.decode_seqs[mixed], 1)
    compute = parts[RESOURCES.index("compute")][mixed]
    return float((compute * share * s.decode_seqs[mixed]).sum())


def _quantile(x: Any, q: float) -> float:
    known = x[np.isfinite(x)]
    return float(np.quantile(known, q)) if len(known) else math.nan


def _mean(x: Any) -> float:
    known = x[np.isfinite(x)]
    return float(known.mean()) if len(known) else 0.0


def points_of(found: Sequence[Observed]) -> list[Point]:
    """Observed load points as a calibration takes them: end to end is the sum of the others and says nothing new."""
    return [
        Point(o.name, o.at, {m: Seen(f.value, f.log_se) for m, f in o.figures.items() if family(m) != "e2e_ms"})
        for o in found
    ]
