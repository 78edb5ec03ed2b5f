"""Cases 1, 2 and 6: closed loops of real services, calibrated on a few loads or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from validate_sim_fit import Guess, Population, askers_of, calibrated, first_guess, folds, population, unseen
from validate_sim_record import LOOKED_AT, Row, groups, read, usable
from validate_sim_tables import summary, worst
from validate_sim_replay import TPOT, TTFT

FOLDS = 5
EXPECTED = {1: {TPOT: "≤ 6 %", TTFT: "≤ 15 %"}, 2: {TPOT: "≤ 12 %", TTFT: "≤ 35 %"}}

#: What is known of why a group is off, by a part of its name.
WHY: Mapping[str, str] = {}


@dataclass
class Found:
    """Predictions of both cases, and the population that all configurations together give."""

    calibrated: list[Guess]
    unseen: list[Guess]
    population: Population


def run(rows: Sequence[Row], say: Callable[[str], None]) -> Found:
    """Every configuration predicted by what others taught: the population of its fold is fitted without it."""
    configs = groups(rows)
    askers = askers_of(configs)
    out = Found([], [], first_guess())
    for k, (fit, predict) in enumerate(folds(configs, FOLDS)):
        pop = population({g: askers[g] for g in fit}, first_guess())
        say(f"fold {k + 1}: fitted on {len(fit)} configurations, predicting {len(predict)}")
        for g in predict:
            mine = configs[g]
            out.unseen += unseen(mine, pop)
            if len({r.load for r in mine}) >= 5:
                out.calibrated += calibrated(mine, pop)
    return out


def scopes(guesses: Sequence[Guess]) -> dict[str, Callable[[Guess], bool]]:
    engines = {"vLLM": "vllm", "SGLang": "sglang", "TensorRT-LLM": "trtllm"}
    found: dict[str, Callable[[Guess], bool]] = {"all": lambda g: True}
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


def load(folder: Path, kind: str) -> list[Row]:
    """``dense`` models or the others (experts, latent or linear attention)."""
    return [r for r in usable(read(folder)) if r.dense == (kind == "dense")]
