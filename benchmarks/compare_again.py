"""How often ``whywait compare`` finds a change between two real runs of the very same, on this machine.

    python benchmarks/compare_again.py --runs 12                      # against the stub service (streams with jitter)
    python benchmarks/compare_again.py --runs 12 --engine embedded    # against the embedded engine
    python benchmarks/compare_again.py trial …                        # rounds of one arm of kept trials (whywait ab)

Runs of one group follow one another and differ in nothing that was asked but their texts; every pair of them is
compared, with one run of A and with ``--repeat`` (A and the two runs after it, against each run later than those). A
*finding* is a figure called better or worse, at any load point: all of them are false. Printed: pairs, pairs with a
finding, the share. Pairs of few runs share runs, so their number says nothing of how sure the share is.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import whywait  # noqa: E402
from whywait import app, comparing  # noqa: E402
from whywait.analyze.digest import Digest  # noqa: E402
from whywait.core.run import Run  # noqa: E402
from whywait.errors import WhywaitError  # noqa: E402
from whywait.lab.settings import Settings  # noqa: E402
from whywait.load.stub import StubProcess  # noqa: E402

STUB = ("--ttft-ms", "60", "--gap-ms", "12", "--jitter-ms", "3", "--slots", "3")
REPEATS = 2  # further runs of A


@contextlib.contextmanager
def service(engine: str) -> Iterator[str]:
    if engine == "embedded":
        with app.embedded(Settings(slots=4)) as started:
            yield started.url
    else:
        with StubProcess(*STUB) as stub:
            yield stub.url


def made(engine: str, runs: int, requests: int, folder: Path) -> list[Run]:
    """So many runs of one service, one after another; no two send the same texts, as two runs of a user would not."""
    out = []
    with service(engine) as url:
        for k in range(runs):
            result = whywait.run(url, concurrency=4, requests=requests, prompt_tokens=64, output_tokens=16, floor=False,
                                 seed=k + 1, out=folder / f"{k:02}")  # fmt: skip
            if result.interrupted:
                raise KeyboardInterrupt
            out.append(result.run)
            print(f"run {k + 1} of {runs}", file=sys.stderr, flush=True)
    return out


def arms(trial: Path) -> Iterator[list[Run]]:
    """The rounds of each arm of a kept trial, in the order they were run."""
    for arm in "ab":
        rounds = []
        for folder in sorted(trial.glob(f"round-*-{arm}")):
            with contextlib.suppress(WhywaitError):
                rounds.append(Run.load(folder))
        if len(rounds) > 1:
            yield rounds


def found(a: Digest, b: Digest, more: Sequence[Digest] = ()) -> bool:
    """Whether a figure is called better or worse at some load point."""
    result = comparing.compare(a, [b], repeats=list(more))
    figures = (f for c in result["comparisons"] for p in c["points"] for f in p["figures"])
    return any(f["claimed"] and f["state"] in ("better", "worse") for f in figures)


def counted(groups: Sequence[Sequence[Run]]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(pairs, with a finding) with one run of A, then with ``REPEATS`` more of them."""
    single, repeated = [], []
    for runs in groups:
        ds: list[Digest] = [comparing.of_run(r, comparing.Options(), str(i)) for i, r in enumerate(runs)]
        single += [found(a, b) for a, b in itertools.combinations(ds, 2)]
        for i in range(len(ds) - REPEATS - 1):
            more = ds[i + 1 : i + 1 + REPEATS]
            repeated += [found(ds[i], b, more) for b in ds[i + 1 + REPEATS :]]
    return (len(single), sum(single)), (len(repeated), sum(repeated))


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("trials", nargs="*", type=Path, help="folders of whywait ab; without them runs are made")
    p.add_argument("--runs", type=int, default=12)
    p.add_argument("--requests", type=int, default=40, help="of a run (default 40)")
    p.add_argument("--engine", choices=["stub", "embedded"], default="stub")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        groups = [runs for t in args.trials for runs in arms(t)] if args.trials else [
            made(args.engine, args.runs, args.requests, Path(tmp))]  # fmt: skip
        for name, (n, false) in zip(("one run of A", f"{1 + REPEATS} runs of A"), counted(groups), strict=True):
            print(f"{name}: {false} of {n} pairs show a finding" + (f" ({false / n:.1%})" if n else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
