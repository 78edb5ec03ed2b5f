"""What each step of a plan takes per candidate, as ratios within one run: a busy machine slows all of them alike.

    python benchmarks/plan_speed.py [--machines h100,h200,mi300x] [--engines vllm,sglang] [--rate 8] [--jobs 1]

A candidate is a shape (machine, engine, layout, techniques) and how many of it. The bound looks at every shape and
settles which sizes come in question; one replica is simulated per size that is tried; whole services are simulated
once and in twelve draws. Seconds by the clock, figures and ratios, no verdicts.
"""

from __future__ import annotations

import argparse
import os
import time

from whywait.core.schedule import Workload
from whywait.judge import plan_money
from whywait.physics.prices import shipped
from whywait.planning_loads import Want
from whywait.planning_search import Search, finalists
from whywait.planning_space import Space, low_precision, shapes_of
from whywait.sim.jit import COMPILED

LOAD = {"prompt_tokens": "lognormal(1000,0.9)", "output_tokens": "lognormal(250,0.6)"}
SLO = {"ttft_ms": 1000.0, "tpot_ms": 40.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-70b")
    parser.add_argument("--machines", default="h100,h200,mi300x")
    parser.add_argument("--engines", default="vllm,sglang")
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    space = Space(args.model, tuple(args.machines.split(",")), tuple(args.engines.split(",")))
    want = Want(Workload.from_dict(dict(LOAD)), args.rate, SLO, jobs=args.jobs)
    clock = [time.perf_counter()]

    def lap() -> float:
        clock.append(time.perf_counter())
        return clock[-1] - clock[-2]

    shapes, refused = shapes_of(space)
    made = lap()
    money = plan_money.basis(shipped(), list(dict.fromkeys(s.machine for s in shapes)))
    search = Search(want, money.offers)
    search.loads.sample  # noqa: B018 - the load is made, and the kernel compiled, outside the clock
    search.run([search.cell(shapes[-1].deployment, args.rate / 4, 50)], "")
    search.simulated = 0
    lap()
    sized, dropped = search.screen(shapes)
    screened = lap()
    candidates = sum(len(x.ladder) for x in sized) + len(dropped) + len(refused)
    search.least(sized, lambda s: not low_precision(s.deployment))
    tried, took_tried = search.simulated, lap()
    chosen = finalists(sized, lambda s: not low_precision(s.deployment))
    drawn = search.draw(chosen)
    took_drawn = lap()
    each = (screened / candidates, took_tried / max(tried, 1), took_drawn / max(len(drawn), 1))
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; compiled: {COMPILED}")
    print(f"candidates made out   {candidates:>7,} in {made:6.2f} s ({len(shapes) + len(refused):,} shapes)")
    rows = (("by the bound", candidates, screened), ("one replica simulated", tried, took_tried),
            ("whole, in draws", len(drawn), took_drawn))  # fmt: skip
    for (name, n, took), cost in zip(rows, each, strict=True):
        rate, times = n / max(took, 1e-9), cost / each[0]
        print(f"{name:<22}{n:>7,} in {took:6.2f} s: {rate:10,.1f} a second, {times:8,.0f} times the bound's")
    took = screened + took_tried + took_drawn
    print(f"in all {candidates / took:,.0f} candidates a second; each of them whole would take "
          f"{candidates * each[2] / took:,.0f} times as long")  # fmt: skip


if __name__ == "__main__":
    main()
