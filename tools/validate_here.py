"""What-ifs against engines that really were changed: ``python tools/validate_here.py [FOLDER] [--write]``.

``FOLDER`` holds runs recorded by ``record_here.py`` (those kept for the tests when left out). A run is asked what a
change would do, and the answer is held against the run in which the change was made. Each thing was measured twice;
what the two measurements differ by is the noise. ``--write`` puts the table into ``docs/simulator.md``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from whywait.analyze.observed import observed
from whywait.core.run import Run, before_point
from whywait.judge.calibrate_claims import BETTER, WORSE
from whywait.whatif import Ask, WhatIf, answer

ROOT: Final = Path(__file__).resolve().parents[1]
KEPT: Final = ROOT / "tests" / "data" / "whatif"
PAGE: Final = ROOT / "docs" / "simulator.md"
BEGIN, END = "<!-- real engines -->", "<!-- /real engines -->"
REPEATS: Final = ("a", "b")
#: Without an SLO every token of an answer that came whole is a good one.
GOODPUT, TTFT, TPOT = "output_tokens_per_s", "ttft_ms.p50", "tpot_ms.p50"
METRICS: Final = (GOODPUT, TTFT, TPOT)
BOUND: Final = 0.15  # error of goodput allowed, or …
NOISE_TIMES: Final = 2.0  # … so many times what two measurements of the same thing differ by
SOME: Final = 0.03  # a smaller change is none
CALIBRATED_ON: Final = 2  # load points, of those whose heavier ones are predicted
SEEDS: Final = 8
#: How each engine was started beside what the run tells (``--baseline``), and with its prefix cache off.
STARTED: Final = {"llama": "", "vllm": "token-budget=512,block=32"}
CACHE_OFF: Final = "prefix-cache=off"


@dataclass(frozen=True)
class Case:
    """``change`` of ``before`` gives ``after`` (names of recorded runs without their repeat); ``load`` empty: at every
    load of ``before``, else calibrated on the first ``CALIBRATED_ON`` loads and asked for that one."""

    engine: str
    what: str
    before: str
    after: str
    change: str = ""
    load: str = ""
    baseline: str = ""
    alike: str = ""  # a load at which the change does nothing


@dataclass(frozen=True)
class Row:
    """One figure of one case at one load. ``was`` is the figure before the change (of the heaviest load calibrated on,
    where only the load changes), ``measured`` the one after it: the geometric mean of both repeats. ``noise`` is what
    repeats differ by (log), ``predicted`` with its 80 % interval the what-if's, and ``change`` its ratio to the figure
    that it started from: that of its own repeat."""

    case: Case
    repeat: str
    load: str
    metric: str
    was: float
    measured: float
    noise: float
    predicted: float
    low: float
    high: float
    change: float
    state: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def bound(self) -> float:
        return max(BOUND, NOISE_TIMES * math.expm1(self.noise))

    @property
    def inside(self) -> bool:
        return abs(self.error) <= self.bound

    @property
    def direction(self) -> bool | None:
        """Whether the figure is predicted to move the way it moved; None where it moved no further than the noise."""
        moved = math.log(self.measured / self.was)
        if abs(moved) <= max(SOME, NOISE_TIMES * self.noise):
            return None
        said = math.log(self.change)
        return said * moved > 0 and abs(said) > SOME / 3


def cases(engines: Sequence[str] = ("llama", "vllm")) -> Iterator[Case]:
    for engine in engines:
        places = {"llama": "slots", "vllm": "seqs"}[engine]
        few, many = f"{engine}-{places}-2", f"{engine}-{places}-8"
        started = STARTED[engine]
        for name in (few, many):
            for load in ("concurrency=16", "concurrency=32"):
                yield Case(engine, f"load, {name[-1]} places", name, name, "", load, started)
        yield Case(engine, "places 2 → 8", few, many, "max-seqs=8", "", started, "concurrency 1")
        off = ",".join(filter(None, (started, CACHE_OFF)))
        yield Case(
            engine, "prefix cache off → on", f"{engine}-prefix-off", f"{engine}-prefix-on", "prefix-cache=on", "", off
        )


def rows(case: Case, folder: Path = KEPT, repeats: Sequence[str] = REPEATS, seeds: int = SEEDS) -> list[Row]:
    """What-ifs from each of ``repeats``, against the mean of both measurements."""
    out = []
    for repeat in repeats:
        said = asked(case, folder, repeat, seeds)
        for claim in said.claims:
            if claim.metric not in METRICS or claim.after is None:
                continue
            before = figures(folder, case.before, claim.metric)
            at = claim.load if not case.load else list(before)[CALIBRATED_ON - 1]
            after = figures(folder, case.after, claim.metric).get(claim.load)
            if after is None or at not in before:
                continue
            noise = max(abs(math.log(pair[0] / pair[1])) for pair in (before[at], after))
            if case.alike:  # with one request in flight both engines do the same: what they differ by is noise as well
                there = figures(folder, case.after, claim.metric)
                noise = max(noise, abs(math.log(_mean(before[case.alike]) / _mean(there[case.alike]))))
            told = claim.after
            own = before[at][REPEATS.index(repeat)]
            out.append(Row(case, repeat, claim.load, claim.metric, _mean(before[at]), _mean(after), noise, told.median,
                           told.low, told.high, told.median / own, claim.state))  # fmt: skip
    return out


def asked(case: Case, folder: Path, repeat: str, seeds: int = SEEDS) -> WhatIf:
    run = Run.load(folder / f"{case.before}-{repeat}")
    if case.load:
        run = before_point(run, CALIBRATED_ON)
    ask = Ask(apply=case.change, load=case.load or None, baseline=case.baseline, seeds=seeds)
    return answer(run, case.before, ask)


@cache
def figures(folder: Path, name: str, metric: str) -> dict[str, tuple[float, ...]]:
    """A figure of both repeats, by load."""
    seen = [{o.name: o.figures for o in observed(Run.load(folder / f"{name}-{r}"))} for r in REPEATS]
    both = [load for load in seen[0] if all(load in s and metric in s[load] for s in seen)]
    return {load: tuple(s[load][metric].value for s in seen) for load in both}


def _mean(pair: Sequence[float]) -> float:
    return math.exp(sum(math.log(x) for x in pair) / len(pair))


def table(found: Sequence[Row]) -> str:
    """Markdown: what was achieved in a sentence, then every case; errors are of both repeats' predictions."""
    good = [r for r in found if r.metric == GOODPUT]
    told = [r for r in found if r.direction is not None]
    right, inside = sum(bool(r.direction) for r in told), sum(r.inside for r in good)
    open_ = [r for r in good if r.low < r.high]  # no change at all has no interval
    held = sum(r.low <= r.measured <= r.high for r in open_)
    moved = [r for r in good if r.case.change and r.direction is not None]
    sure = [r for r in moved if r.state in (BETTER, WORSE)]
    agree = sum(bool(r.direction) for r in sure)
    columns = ("engine", "change", "load", "tokens/s before → after", "predicted", "error", "bound", "TTFT p50 error",
               "TPOT p50 error", "direction", "said")  # fmt: skip
    lines = [
        f"Direction right in {right} of {len(told)} figures that moved by more than their noise; goodput within its "
        f"bound in {inside} of {len(good)}; median error of goodput {_median(good):.1%}, TTFT {_of(found, TTFT):.0%}, "
        f"TPOT {_of(found, TPOT):.0%}. The 80 % intervals of goodput hold what was measured in {held} of {len(open_)}. "
        f"Where the engine was changed and goodput moved, {len(sure)} of {len(moved)} changes were claimed, {agree} of "
        "them rightly; the others were called undecided.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for r in good:
        same = {x.metric: x for x in found if (x.case, x.repeat, x.load) == (r.case, r.repeat, r.load)}
        ways = [x.direction for x in same.values() if x.direction is not None]
        word = "–" if not ways else "right" if all(ways) else "WRONG"
        more = " | ".join(f"{same[m].error:+.0%}" if m in same else "–" for m in (TTFT, TPOT))
        over = "" if r.inside else " **over**"
        cells = (r.case.engine, f"{r.case.what} ({r.repeat})", r.load, f"{r.was:.1f} → {r.measured:.1f}",
                 f"{r.predicted:.1f} ({r.low:.1f} … {r.high:.1f})", f"{r.error:+.1%}{over}", f"{r.bound:.0%}", more,
                 word, r.state if r.case.change else "–")  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _median(found: Sequence[Row]) -> float:
    errors = sorted(abs(r.error) for r in found)
    return errors[len(errors) // 2] if errors else math.nan


def _of(found: Sequence[Row], metric: str) -> float:
    return _median([r for r in found if r.metric == metric])


def write(text: str, page: Path = PAGE) -> None:
    """Put the table between the markers of the page.

    Raises:
        SystemExit: the page has no markers.
    """
    whole = page.read_text(encoding="utf-8")
    if BEGIN not in whole or END not in whole:
        raise SystemExit(f"{page} has no {BEGIN} … {END}")
    head, tail = whole[: whole.index(BEGIN) + len(BEGIN)], whole[whole.index(END) :]
    page.write_text(f"{head}\n{text}\n{tail}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=KEPT, help="of the recorded runs")
    parser.add_argument("--engine", action="append", choices=["llama", "vllm"], help="only these")
    parser.add_argument("--repeat", action="append", choices=REPEATS, help="only what is predicted from these")
    parser.add_argument("--json", action="store_true", help="every figure as JSON on stdout")
    parser.add_argument("--write", action="store_true", help="put the table into docs/simulator.md")
    args = parser.parse_args(argv)
    found: list[Row] = []
    for case in cases(args.engine or ("llama", "vllm")):
        found += rows(case, args.folder, args.repeat or REPEATS)
        print(f"{case.engine}: {case.what} {case.load}", file=sys.stderr)
    if args.json:
        print(json.dumps([{**dataclasses.asdict(r), "error": r.error, "bound": r.bound} for r in found], indent=1))
    else:
        print(table(found))
    if args.write:
        write(table(found))
    return (
        0 if all(r.inside for r in found if r.metric == GOODPUT) and all(r.direction is not False for r in found) else 1
    )


if __name__ == "__main__":
    raise SystemExit(main())
