"""How often ``whywait compare`` finds a change where there is none, and how often it finds one that is there.

``python benchmarks/compare_error.py [--seeds 100]`` prints the tables of ``docs/compare.md``. Two kinds of run:

- *simulated*: a GPU, a model and an engine of numbers (``sim``) under two draws of one workload. Nothing but the
  requests differs between A and B, so nothing pairs up.
- *noisy*: a service with slots whose speed wanders while it runs (autocorrelated), sent one schedule twice, so that
  requests pair up; with ``drift`` whole runs differ as well, which is what runs on a real machine do.

A *finding* is a figure that is called better or worse; under no change any of them is false.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.comparable_runs import NOISY, SIMULATED, noisy, simulated  # noqa: E402

from whywait import comparing  # noqa: E402
from whywait.analyze.digest import Digest  # noqa: E402
from whywait.core.run import Run  # noqa: E402


def found(a: Any, b: Any, repeats: list[Any] | None = None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Figures called better or worse, and waits that moved."""
    result = comparing.compare(a, [b], repeats=repeats or ())
    (point,) = result["comparisons"][0]["points"]
    return ([f for f in point["figures"] if f["claimed"] and f["state"] in ("better", "worse")],
            [w for w in point["waits"] if w["state"] in ("better", "worse", "moved")])  # fmt: skip


def digests(make: Callable[[int], Run], seeds: range) -> list[Digest]:
    return [comparing.of_run(make(s), comparing.Options(), f"seed {s}") for s in seeds]


def table(seeds: int) -> Iterator[tuple[str, int, int, int, list[float]]]:
    """Per case: name, comparisons, of them with a false finding, with a false wait, and how often a change of 5, 10 and
    20 % of the time per token is found (noisy ones only)."""
    for case in SIMULATED:
        ds = digests(lambda s, c=case: simulated(c, s), range(1, 2 * seeds + 1))  # type: ignore[misc]
        yield (case, *_false(ds[::2], ds[1::2]), [])
    for case in NOISY:
        ds = digests(lambda s, c=case: noisy(c, s), range(1, 2 * seeds + 1))  # type: ignore[misc]
        power = []
        for slower in (0.05, 0.1, 0.2):
            bs = digests(lambda s, c=case, k=slower: noisy(c, s, k), range(2, 2 * seeds + 1, 2))  # type: ignore[misc]
            hits = sum(_worse(found(a, b)[0]) for a, b in zip(ds[::2], bs, strict=True))
            power.append(hits / seeds)
        yield (case, *_false(ds[::2], ds[1::2]), power)


def drifting(seeds: int, repeats: int, drift: float = 0.05) -> tuple[int, int]:
    """Comparisons of runs that differ as wholes, and how many have a finding, with so many runs of A."""
    case = "8 in flight, speed wanders 5 %"
    false = 0
    for k in range(seeds):
        ds = digests(lambda s: noisy(case, s, drift=drift), range(1000 * k + 1, 1000 * k + repeats + 2))
        false += bool(found(ds[0], ds[-1], ds[1:-1])[0])
    return seeds, false


def _false(a: list[Digest], b: list[Digest]) -> tuple[int, int, int]:
    each = [found(x, y) for x, y in zip(a, b, strict=True)]
    return len(each), sum(bool(f) for f, _ in each), sum(bool(w) for _, w in each)


def _worse(figures: list[dict[str, Any]]) -> bool:
    return any(f["name"] == "tpot_ms.p50" and f["state"] == "worse" for f in figures)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--seeds", type=int, default=100)
    args = p.parse_args()
    print(
        "| runs | A/A finds something | a wait moved | 5 % found | 10 % found | 20 % found |\n|---|---|---|---|---|---|"
    )
    for name, n, figures, moved, power in table(args.seeds):
        tail = " | ".join(f"{x:.0%}" for x in power) if power else "– | – | –"
        print(f"| {name} | {figures} of {n} | {moved} of {n} | {tail} |", flush=True)
    for repeats in (1, 3, 5):
        n, false = drifting(args.seeds, repeats)
        print(f"runs that differ by 5 % as wholes, {repeats} of A: {false} of {n} find something", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
