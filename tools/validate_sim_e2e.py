"""Cases 1, 2 and 6: closed loops of real services, calibrated on a few loads or not at all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from validate_sim_fit import Guess, Population, askers_of, calibrated, first_guess, folds, population, unseen
from validate_sim_record import LOOKED_AT, Row, groups, read, usable
from validate_sim_replay import TPOT, TTFT
from validate_sim_tables import summary, worst
from whywait.judge.calibrate_check import LEVEL, Interval

FOLDS = 5
Say = Callable[[str], None]
EXPECTED = {1: {TPOT: "≤ 6 %", TTFT: "≤ 15 %"}, 2: {TPOT: "≤ 12 %", TTFT: "≤ 35 %"}}

#: What is known of why a group is off, by a part of its name.
_REPLICAS = "one row; how many replicas shared the load is not recorded"
_BALANCE = "attention over data-parallel parts waits until all have a prompt; only roughly simulated"
_DRAFTS = "some runs take 0.6 of the time per token that others of the same name take: drafts, probably; not recorded"
WHY: Mapping[str, str] = {
    "sglang|nan|agg|1.0|1.0": "65 of 67 GB are weights; the KV space is what is left of two large numbers",
    "8B-Instruct|h100_sxm|trtllm|nan|agg|8.0|1.0": "from 64 in flight first tokens wait where no step explains it: one "
    "frontend for 12,000 streamed tokens/s, probably",
    "Qwen3-32B|h100_sxm|trtllm|fp8|agg|1.0|1.0": "KV space a sixth smaller than computed: loads at its edge queue",
    "b200_sxm|vllm|fp8|agg|4.0|1.0": "prefill steps take 75 ms more than their operations (outside of graphs)",
    "agg|1.0|0.0": _REPLICAS,
    "agg|2.0|0.0": _REPLICAS,
    "agg|8.0|0.0": _REPLICAS,
    "8B-Instruct|h100_sxm|trtllm|nan|agg|1.0|1.0": "with 128 in flight TTFT is twice what prefill explains",
    "MiniMax-M2.5|h": "experts in 8-bit blocks on Hopper: three times slower in vLLM's operation table than served",
    "trtllm|fp8|agg|1.0|8.0": _BALANCE,
    "trtllm|fp4|agg|1.0|8.0": _BALANCE,
    "trtllm|fp4|agg|1.0|4.0": _BALANCE,
    "DeepSeek-R1|h200_sxm|trtllm": _DRAFTS,
    "DeepSeek-R1|b200_sxm|trtllm": _DRAFTS,
    "DeepSeek-R1|gb200|trtllm": "tp of 20 to 64: columns of a service of several parts; what ran is not recorded",
    "DeepSeek-V3.1-NVFP4": "one or two rows of unknown launch",
    "DeepSeek-R1-NVFP4": "one or two rows of unknown launch",
    "DeepSeek-V3|b200_sxm|sglang": "measured TTFT is erratic itself (5.6 s with 4 in flight, 2.9 s with 128)",
    "b300_sxm|vllm|fp4|agg|2.0|4.0": "KV space and sequence limit at 2,048 in flight are guesses",
}


@dataclass
class Found:
    """Predictions of both cases, and the population that all configurations together give."""

    calibrated: list[Guess]
    unseen: list[Guess]
    population: Population


def run(rows: Sequence[Row], say: Say) -> Found:
    """Every configuration predicted by what others taught: the population of its fold is fitted without it."""
    configs = groups(rows)
    askers = askers_of(configs)
    found: list[Found] = []
    for k, (fit, predict) in enumerate(folds(configs, FOLDS)):
        pop = population({g: askers[g] for g in fit}, first_guess())
        say(f"fold {k + 1}: fitted on {len(fit)} configurations, predicting {len(predict)}")
        one = Found([], [], pop)
        for g in predict:
            one.unseen += unseen(configs[g], pop)
            if len({r.load for r in configs[g]}) >= 5:
                one.calibrated += calibrated(configs[g], pop)
        found.append(one)
    return joined(found)


def joined(found: Sequence[Found]) -> Found:
    """All folds together, each one's intervals widened (or narrowed) by what the other folds' intervals lacked."""
    out = Found([], [], found[0].population)
    for k, one in enumerate(found):
        others = [f for i, f in enumerate(found) if i != k]
        out.calibrated += widened(one.calibrated, [g for f in others for g in f.calibrated])
        out.unseen += widened(one.unseen, [g for f in others for g in f.unseen])
    return out


def widened(guesses: Sequence[Guess], learnt_on: Sequence[Guess]) -> list[Guess]:
    """Intervals whose reach in logarithms is multiplied, by metric, so that ``LEVEL`` of ``learnt_on`` were inside."""
    factor = {}
    for metric in (TTFT, TPOT):
        lacks = [abs(math.log(g.measured / g.predicted.median)) / max(reach(g.predicted), 1e-9)
                 for g in learnt_on if g.metric == metric and not g.seen]  # fmt: skip
        factor[metric] = float(np.quantile(lacks, LEVEL)) if lacks else 1.0
    return [dataclasses.replace(g, predicted=scaled(g.predicted, factor[g.metric])) for g in guesses]


def reach(i: Interval) -> float:
    return math.log(i.high / i.median)


def scaled(i: Interval, factor: float) -> Interval:
    wide = math.exp(reach(i) * factor)
    return Interval(i.median, i.median / wide, i.median * wide)


def scopes(guesses: Sequence[Guess]) -> dict[str, Callable[[Guess], bool]]:
    engines = {"vLLM": "vllm", "SGLang": "sglang", "TensorRT-LLM": "trtllm"}
    found: dict[str, Callable[[Guess], bool]] = {"all": lambda _: True}
    for name, key in engines.items():
        if any(g.row.backend == key for g in guesses):
            found[name] = lambda g, key=key: g.row.backend == key  # type: ignore[misc]
    if any(g.row.group in LOOKED_AT for g in guesses):
        found["groups never looked at"] = lambda g: g.row.group not in LOOKED_AT
    return found


def texts(found: Found, kind: str) -> dict[str, str]:
    """By marker."""
    out = {}
    for case, guesses in ((1, found.calibrated), (2, found.unseen)):
        out[f"case {case} {kind}"] = summary(guesses, scopes(guesses), EXPECTED[case] if kind == "dense" else {})
        out[f"case {case} {kind} worst"] = worst(guesses, WHY)
    return out


def deviations(folder: Path) -> dict[str, str]:
    """Medians of the multipliers by engine and kind of model, all configurations together, on top of what ships."""
    out = {}
    for kind in ("dense", "experts"):
        found = population(askers_of(groups(load(folder, kind))), first_guess())
        for engine, mean in found.mean.items():
            out[f"{kind}, {engine}"] = ", ".join(f"{k} {math.exp(v):.2f}" for k, v in mean.items())
        out[f"{kind}, log-sd"] = ", ".join(f"{k} {v:.2f}" for k, v in found.sd.items())
    return out


def load(folder: Path, kind: str) -> list[Row]:
    """``dense`` models or the others (experts, latent or linear attention)."""
    return [r for r in usable(read(folder)) if r.dense == (kind == "dense")]
