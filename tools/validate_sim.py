"""How wrong the simulator is on services that were measured: ``python tools/validate_sim.py [--case 3] [--data …]``.

Writes the tables of ``docs/simulator.md`` between their markers. The record lies beside the repository
(``../shared/measured``); some minutes per case with the compiled kernel (extra ``[sim]``), far more without.

``dense`` and ``experts`` (cases 1, 2 and 6 of the table of expected errors): closed loops of real GPUs, calibrated on a
few loads or not at all, and how often the interval holds. 3: two runs request by request. 4: Poisson arrivals (MLPerf).
``fit`` prints what closed loops deviate by, per engine, from what ships.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import validate_sim_e2e as e2e
import validate_sim_mlperf as mlperf
import validate_sim_timelines as timelines
from validate_sim_fit import operations_only
from validate_sim_tables import put

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "simulator.md"
CASES = ("dense", "experts", "3", "4")
FIT = "fit"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=(*CASES, FIT), help="all when left out; may be given again")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "measured", help="the record")
    parser.add_argument("--print", action="store_true", help="print the tables, leave the document alone")
    args = parser.parse_args(argv)
    if not (args.data / "e2e_silicon.csv").is_file():
        print(f"no record in {args.data}: give --data", file=sys.stderr)
        return 2
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", flush=True)

    for case in args.case or CASES:
        if case == FIT:
            print("\n".join(f"{name}: {text}" for name, text in e2e.deviations(args.data).items()))
            continue
        for name, text in tables(case, args.data, say).items():
            if args.print:
                print(f"\n{name}\n{text}")
            else:
                put(PAGE, name, text)
    return 0


def tables(case: str, data: Path, say: e2e.Say) -> dict[str, str]:
    """By marker."""
    if case in ("dense", "experts"):
        with operations_only():
            return e2e.texts(e2e.run(e2e.load(data, case), say), case)
    if case == "3":
        return timelines.texts(data)
    return mlperf.texts(data, say)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
