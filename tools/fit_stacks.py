"""What share of its data sheet a machine reaches whose kernels were never measured, by what whole services on it
reached beside measured machines: ``python tools/fit_stacks.py [--data ../shared/measured] [--write]`` makes ``plain``,
``mi300`` of ``fitted.json`` (MI300X; it stands for MI325X and MI250 too, whose rows are not fitted).

How much of such a machine is reached is first of all a matter of software: its maker's tuned entry, a release built as
it comes, and one of a year later differ by more than a model or a load do. Each such *stack* therefore counts once,
however many rows it has: of each the median of (measured / simulated) relative to a measured machine under the same
load, in logarithms. The factor on all times is their mean. What another stack and another load may differ by
(``scatter`` in ``machines.toml``): the stacks' standard deviation, and that of the loads of one stack.

- AMD's own tuned vLLM 0.4.3, 2024-08: MLPerf v4.1 Offline, beside H100 and H200.
- vLLM 0.6.1 as its Dockerfile builds it, 2024-09: LLM-Inference-Bench, static batches, beside H100. Every second model;
  ``validate_plan.py`` counts the others apart.
- Not fitted, a check: vLLM of 2025-10, aimultiple.com: one MI300X at 74 % of one H200, Llama-3.1-8B.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import validate_plan_tables as tables
from fit_ops import dumps
from validate_sim_fit import operations_only
from whywait.physics import fitted as shipped
from whywait.physics.layout import Layout

ROOT = Path(__file__).resolve().parents[1]
FITTED = ROOT / "src" / "whywait" / "physics" / "fitted.json"
WHO, BASE, NAME = tables.STACKED, "mi", "mi300"
SCALED = ("product", "experts", "decode", "prefill")
#: MI300X over H200, Llama-3.1-8B in 16 bits, one device (https://research.aimultiple.com/multi-gpu, 2025-10-15). The
#: lengths are not given there; the ratio hardly depends on them.
LATER, LATER_SHAPE = 0.74, (512, 256)

Ask = Callable[[], float]


def pairs(data: Path) -> Mapping[str, list[tuple[float, Ask, Ask]]]:
    """By stack: measured ratio to the other machine, and how each of the two is asked."""
    found: dict[str, list[tuple[float, Ask, Ask]]] = defaultdict(list)
    got = {m: c for c in tables.mlperf(data, everyone=True) if c.key == ("llama2-70b-99",) for m in [c.machine]}
    for other in ("h100", "h200"):
        found["MLPerf v4.1"].append((got[WHO].measured / got[other].measured, got[WHO].ask, got[other].ask))
    by_key: dict[tuple[object, ...], dict[str, tables.Case]] = defaultdict(dict)
    for c in tables.argonne(data):
        by_key[c.key][c.machine] = c
    for cs in by_key.values():
        if WHO in cs and "h100" in cs and cs[WHO].seen:
            found["vLLM 0.6.1"].append((cs[WHO].measured / cs["h100"].measured, cs[WHO].ask, cs["h100"].ask))
    return found


def later() -> float:
    """Of the published figure that is not fitted, the log of measured over simulated."""
    one, other = (tables.deployment(m, "llama-3.1-8b", "vllm", "bf16", Layout(tp=1)) for m in (WHO, "h200"))
    return math.log(LATER * tables.peak(other, *LATER_SHAPE) / tables.peak(one, *LATER_SHAPE))


def off(stacks: Mapping[str, list[tuple[float, Ask, Ask]]]) -> dict[str, list[float]]:
    """Of each stack the logs of measured over simulated."""
    return {k: [math.log(r * b() / a()) for r, a, b in rows] for k, rows in stacks.items()}


def scaled(by: float) -> dict[str, Any]:
    """The shares of ``BASE`` with all that a kernel takes ``by`` times as long."""
    plain = shipped.fitted()["plain"]
    found = {**{k: plain["default"][k] for k in SCALED}, **copy.deepcopy(plain[BASE])}
    for k in SCALED:
        v = found[k]
        found[k] = [float(f"{x * by:.3g}") for x in v] if isinstance(v, list) else round(v * by, 2)
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "measured", help="the record")
    parser.add_argument("--write", action="store_true", help="write the result into fitted.json")
    args = parser.parse_args(argv)
    by = 1.0
    with operations_only():
        stacks = pairs(args.data)
        for _ in range(4):  # what the host takes is not scaled: a few rounds
            shipped.fitted()["plain"][NAME] = scaled(by)
            shipped.fit_of.cache_clear()
            rows = off(stacks)
            found = {k: float(np.median(v)) for k, v in rows.items()}
            mean, between = float(np.mean(list(found.values()))), float(np.std(list(found.values()), ddof=1))
            within = max(float(np.std(v)) for v in rows.values())
            said = ", ".join(f"{k} {v:+.2f} of {len(stacks[k])}" for k, v in found.items())
            print(f"× {by:.3f}: {said}; mean {mean:+.3f}, sd {between:.2f}, of loads {within:.2f}; "
                  f"not fitted: vLLM of 2025-10 {later():+.2f}")  # fmt: skip
            by *= math.exp(-mean)
    print(f"{NAME}: all kernels × {by:.2f} of {BASE}; scatter {math.hypot(between, within):.2f}")
    if args.write:
        kept = json.loads(FITTED.read_text("utf-8"))
        kept["plain"][NAME] = scaled(by)
        FITTED.write_text(dumps(kept), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
