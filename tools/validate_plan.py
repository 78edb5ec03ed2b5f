"""How often the ranking of machines that ``whywait plan`` rests on is right, on services that others measured:
``python tools/validate_plan.py [--table e2e …] [--most N] [--data ../shared/measured] [--json FILE]``.

Two machines are a pair where the record has both under the same load, model, engine, type of numbers and number of
devices (of offline peaks: the same model and lengths, each machine as its maker ran it). The pair counts when their
measured throughput per device differs by more than 15 %; it is right when the simulator puts the same one ahead.

Nothing of the rows was seen by the prediction: within ``operations_only`` the simulator knows data sheets and measured
kernels, and of whole services only what was assumed before any was looked at (what ships was fitted on closed loops of
this record). But for one figure: what MI300X reaches of its data sheet was set by MLPerf's rows of it, which are left
out, and by half the models of the static batches, which are counted apart. ``--folds`` fits what services do beyond
their kernels on four fifths of the closed loops and predicts the last, as ``validate_sim.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from validate_plan_tables import TABLES, Case, e2e, first_of_each
from validate_sim_fit import askers_of, first_guess, folds, operations_only, population
from validate_sim_record import groups, read, usable
from whywait.errors import WhywaitError

ROOT = Path(__file__).resolve().parents[1]
DECIDED = 1.28  # standard deviations: 90 % to be right
APART, ASKED = 0.15, 0.9  # pairs count beyond this difference; the share of them that must be right


class Pair(NamedTuple):
    """Ratios of the first machine to the second; ``sd`` of the predicted one's logarithm. What lies inside it is a tie
    to ``whywait plan``: it ranks neither first. ``seen``: a row of it had a part in a figure of its machine."""

    table: str
    machines: tuple[str, str]
    measured: float
    predicted: float
    sd: float
    seen: bool = False

    @property
    def decided(self) -> bool:
        return abs(math.log(self.predicted)) > DECIDED * self.sd if self.predicted > 0 else False

    @property
    def right(self) -> bool:
        return (self.measured > 1) == (self.predicted > 1)


def pairs_of(name: str, cases: Sequence[Case], most: int | None, say: Callable[[str], None]) -> list[Pair]:
    """All pairs of machines under one key that differ enough; with ``most``, of so many keys spread evenly."""
    by_key: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for c in first_of_each(cases):
        by_key[c.key].append(c)
    keys = [k for k, cs in by_key.items() if any(_apart(a, b) for a, b in itertools.combinations(cs, 2))]
    if most is not None and len(keys) > most:
        keys = [keys[i] for i in (round(j * (len(keys) - 1) / max(most - 1, 1)) for j in range(most))]
    out = []
    for key in keys:
        said = {}
        for c in by_key[key]:
            with contextlib.suppress(WhywaitError):  # it does not fit as simulated: counted as wrong
                said[c.machine] = c.ask()
        for a, b in itertools.combinations(by_key[key], 2):
            if _apart(a, b):
                know = a.machine in said and b.machine in said
                ratio = said[a.machine] / said[b.machine] if know else math.nan
                sd, seen = math.hypot(a.sd, b.sd), a.seen or b.seen
                out.append(Pair(name, (a.machine, b.machine), a.measured / b.measured, ratio, sd, seen))
    say(f"{name}: {len(cases)} rows, {len(keys)} loads with machines that differ by more than {APART:.0%}")
    return out


def _apart(a: Case, b: Case) -> bool:
    return a.machine != b.machine and max(a.measured, b.measured) > (1 + APART) * min(a.measured, b.measured)


def by_folds(data: Path, most: int | None, say: Callable[[str], None]) -> Iterator[Pair]:
    """The closed loops, each machine's row predicted by what four fifths of the configurations taught that do not hold
    it."""
    configs = groups(usable(read(data)))
    askers = askers_of(configs)
    cases: list[Case] = []
    for fit, predicting in folds(configs, 5):
        pop = population({g: askers[g] for g in fit}, first_guess())
        cases += e2e(data, pop, predicting)
        say(f"fitted on {len(fit)} configurations")
    yield from pairs_of("e2e, folds", cases, most, say)


def text(pairs: Sequence[Pair]) -> str:
    """A table by source and by pair of machines."""
    rows = ["| of | pairs that differ by > 15 % | right | share | outside the error | right | share |",
            "|---|---|---|---|---|---|---|"]  # fmt: skip
    groups_: dict[str, list[Pair]] = defaultdict(list)
    for p in pairs:
        groups_["all"].append(p)
        groups_["all, without rows that a figure of a machine was fitted on"].extend([] if p.seen else [p])
        groups_[p.table].append(p)
        groups_[f"{p.table}: fitted on"].extend([p] if p.seen else [])
        groups_[f"{p.table}: {' / '.join(sorted(p.machines))}"].append(p)
    for name, mine in groups_.items():
        if not mine:
            continue
        right = sum(p.right for p in mine if not math.isnan(p.predicted))
        sure = [p for p in mine if p.decided]
        well = sum(p.right for p in sure)
        rows.append(f"| {name} | {len(mine)} | {right} | {right / len(mine):.0%} | {len(sure)} | {well} | "
                    f"{f'{well / len(sure):.0%}' if sure else '–'} |")  # fmt: skip
    return "\n".join(rows)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "measured", help="the record")
    parser.add_argument("--table", action="append", choices=tuple(TABLES), help="all when left out")
    parser.add_argument("--most", type=int, help="loads per table at most, spread evenly")
    parser.add_argument("--folds", action="store_true", help="closed loops with what services do fitted in five folds")
    parser.add_argument("--json", type=Path, help="keep the pairs there")
    args = parser.parse_args(argv)
    if not (args.data / "e2e_silicon.csv").is_file():
        print(f"no record in {args.data}: give --data", file=sys.stderr)
        return 2
    begun, found = time.monotonic(), list[Pair]()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {line}", file=sys.stderr, flush=True)

    with operations_only():
        if args.folds:
            found += by_folds(args.data, args.most, say)
        for name in args.table or (() if args.folds else TABLES):
            found += pairs_of(name, TABLES[name](args.data), args.most, say)
    print(text(found))
    if args.json:
        args.json.write_text(json.dumps([p._asdict() for p in found], indent=1), encoding="utf-8")
    right = sum(p.right for p in found if not math.isnan(p.predicted))
    return 0 if found and right >= ASKED * len(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
