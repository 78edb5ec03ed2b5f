"""The error and the power of the tasks of ``whywait quality``, simulated: ``python benchmarks/quality_error.py``.

Prints the tables of docs/quality-tasks.md: how often two arms that do not differ give a finding of any kind (overall,
in a category, in a sign of degeneration, or "not inferior" that fails), how often the interval holds the truth, and how
often a true loss is found.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.paired_answers import World, finding, judged  # noqa: E402

SIZES, ACCURACIES = (20, 50, 100, 300, 1000), (0.05, 0.2, 0.5, 0.8, 0.95)
DROPS = (0.05, 0.1, 0.2)
MARGIN = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=20261130)
    args = parser.parse_args()
    worlds = [(f"{n:,} cases, {a:.0%} right", World(n, a)) for n in SIZES for a in ACCURACIES]
    base = World(200, 0.6)
    worlds += [
        ("200, nothing steady", replace(base, steady=0.0)),
        ("200, 95 % steady", replace(base, steady=0.95)),
        ("200, 10 categories", replace(base, categories=10)),
        ("200, one category", replace(base, categories=1)),
        ("200, groups of 5", replace(base, groups=5)),
        ("200, groups of 10", replace(base, groups=10)),
    ]
    print(f"{args.repeats:,} comparisons a row of arms that do not differ\n")
    print("| cases | finds something | with signs | overall interval holds 0 | all intervals hold 0 |")
    print("|---|---|---|---|---|")
    worst = 0.0
    for name, world in worlds:
        found = [judged(world, args.seed + i) for i in range(args.repeats)]
        signed = [judged(world, args.seed + i, True) for i in range(min(args.repeats, 200, 40_000 // world.n))]
        false, with_signs = rate(found, finding), rate(signed, finding)
        worst = max(worst, false, with_signs)
        whole = rate(found, lambda f: holds(f[0]))
        every = rate(found, lambda f: all(holds(x) for x in f))
        print(f"| {name} | {false:.1%} | {with_signs:.1%} ({len(signed)}) | {whole:.1%} | {every:.1%} |", flush=True)
    print(f"\nworst: {worst:.1%}\n")
    power(args.repeats, args.seed)
    return 0


def power(repeats: int, seed: int) -> None:
    print("| cases | " + " | ".join(f"{d:.0%} lost: found, fails" for d in DROPS)
          + " | 20% lost in one of 4 | no loss: not inferior within 2, 5 points | 2 points lost: holds within 2 |\n|"
          + "---|" * (len(DROPS) + 4))  # fmt: skip
    for n in SIZES:
        base = World(n, 0.6, steady=0.9)
        cells = [f"{n:,}"]
        for drop in DROPS:
            found = [judged(replace(base, drop=drop), seed + i) for i in range(repeats)]
            cells.append(f"{rate(found, lambda f: f[0].found):.0%}, {rate(found, lambda f: f[0].state == 'fails'):.0%}")
        one = [judged(replace(base, drop=0.2, where=2), seed + i) for i in range(repeats)]
        cells.append(f"{rate(one, lambda f: any(x.found for x in f)):.0%}")
        same = [judged(base, seed + i) for i in range(repeats)]
        cells.append(f"{rate(same, lambda f: f[0].state == 'holds'):.0%}, {rate(same, lambda f: f[0].low > -0.05):.0%}")
        edge = [judged(replace(base, drop=MARGIN), seed + i) for i in range(repeats)]
        cells.append(f"{rate(edge, lambda f: f[0].state == 'holds'):.1%}")
        print(f"| {' | '.join(cells)} |", flush=True)


def rate(found, true) -> float:  # type: ignore[no-untyped-def]
    return sum(map(true, found)) / len(found)


def holds(f) -> bool:  # type: ignore[no-untyped-def]
    return f.low <= 0 <= f.high


if __name__ == "__main__":
    sys.exit(main())
