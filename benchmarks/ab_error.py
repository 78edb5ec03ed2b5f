"""The error and the power of ``whywait ab``, on simulated rounds: ``python benchmarks/ab_error.py [--repeats N]``.

Prints the table of docs/ab.md: how often a trial of A against itself finds something, how often a true effect is found,
how often all its intervals hold the truth, and after how many pairs it stops.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.paired_rounds import HIGH, KINDS, LOW, NOISE, PRIMARY, differences, rounds, stopped  # noqa: E402

from whywait.judge.paired import ABOVE, ALPHA, BELOW  # noqa: E402
from whywait.judge.sequential import mean_half_width  # noqa: E402

EFFECTS = (0.1, 0.2, 0.4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=20261130)
    args = parser.parse_args()
    print(f"{args.repeats:,} trials a row, {len(PRIMARY)} figures, noise {NOISE:.0%}, {LOW} to {HIGH} pairs\n")
    heads = " | ".join(f"{e:.0%} found, pairs" for e in EFFECTS)
    print(f"| rounds | A/A finds something | intervals hold | {heads} |\n|{'---|' * (3 + len(EFFECTS))}")
    for kind in KINDS:
        x = rounds(kind, np.random.default_rng(args.seed), args.repeats)
        d = differences(x)
        said, pairs = stopped(d)
        false = ((said == ABOVE) | (said == BELOW)).any(axis=1).mean()
        held = [(np.abs(e[:, :n].mean(-1)) <= mean_half_width(e[:, :n], ALPHA / len(PRIMARY))).all()
                for e, n in zip(d, pairs, strict=True)]  # fmt: skip
        cells = [kind, f"{false:.1%}", f"{np.mean(held):.1%}"]
        for size in EFFECTS:
            said, pairs = stopped(differences(x, size))
            cells.append(f"{(said == ABOVE).mean():.0%}, {np.median(pairs):.0f}")
        print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
