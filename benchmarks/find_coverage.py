"""How often ``whywait find`` holds the true knee, on queues whose knee is known.

The knee is computed apart from the search: by formula (Erlang C) or by bisection on long simulations.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "src")]

from tests.queue_models import MODELS, run_searches, true_knee  # noqa: E402 - after the path is set

RANGES = {"M/D/4": (4.0, 16.0), "M/G/8": (4.0, 16.0), "batching": (2.0, 20.0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--base", type=int, default=0, help="first seed: a base never used before is a fresh sample")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds of (simulated) time for each search")
    parser.add_argument("--model", action="append", choices=list(MODELS))
    args = parser.parse_args()
    print(f"{args.seeds} searches each from seed {args.base}, budget {args.budget:.0f} s")
    for name in args.model or MODELS:
        began = time.perf_counter()
        model = MODELS[name]
        knee = model.knee or true_knee(model, *RANGES[name])
        batch = 500
        found = [f for k in range(0, args.seeds, batch)
                 for f in run_searches(model, min(batch, args.seeds - k), args.budget, seed=args.base + k)]  # fmt: skip
        holds = np.mean([f.holds(knee) for f in found])
        both = [f.search for f in found if f.search.low and f.search.high]
        wrong = [sum((f.search.low or 0) > knee for f in found), sum((f.search.high or np.inf) < knee for f in found)]
        width = np.median([s.high / s.low for s in both]) if both else np.nan
        print(
            f"{name:9s} knee {knee:6.3f}/s  holds {holds:6.1%} (low too high {wrong[0]}, high too low {wrong[1]})  "
            f"both ends {len(both) / len(found):6.1%}  median high/low {width:5.2f}  "
            f"requests {np.median([f.requests for f in found]):6.0f}  "
            f"seconds {np.median([f.seconds for f in found]):4.0f}  "
            f"probes {np.mean([len(f.probes) for f in found]):4.1f}"
            f"  [{time.perf_counter() - began:.0f} s]",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
