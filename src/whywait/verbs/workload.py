"""``whywait workload fit|show``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from whywait.convert.fit import describe, errors, fit, to_toml, write_text
from whywait.convert.read import read
from whywait.convert.traces import from_schedule, write_schedule
from whywait.core.workload import Workload
from whywait.errors import UsageError
from whywait.load.recipe import open_schedule
from whywait.report.workload import print_workload
from whywait.session import stderr

DEFAULT_OUT = "workload.toml"
DRAWN = 1000


def workload(args: argparse.Namespace) -> int:
    return _fit(args) if args.action == "fit" else _show(args)


def _fit(args: argparse.Namespace) -> int:
    out = Path(args.out or DEFAULT_OUT)
    replay = out.with_suffix(".schedule.jsonl")
    sources = [Path(f) for f in args.files]
    if any(each.resolve() in (out.resolve(), replay.resolve()) for each in sources):
        raise UsageError("the result would replace the log it is learnt from", "give another name by --out")
    trace = read(sources, args.format)
    fitted = fit(trace)
    worst = _round(errors(trace, fitted.sample(seed=args.seed)))
    write_schedule(trace, replay)
    write_text(out, to_toml(fitted, trace, replay.name))
    for note in trace.notes:
        stderr(note)
    if args.json:
        _json({"workload": str(out), "schedule": str(replay), "requests": len(trace), "format": trace.source,
               "errors": worst, "notes": trace.notes})  # fmt: skip
        return 0
    print(f"{len(trace):,} requests ({trace.source})")
    print(f"{out}: draws traffic like it; {replay}: the same requests one by one. Neither holds any text.")
    lengths, gap = max(worst["prompt_tokens"], worst["output_tokens"]), worst["gap_s"]
    print(f"drawn once and compared, p10 to p99: lengths within {lengths:.1%}, gaps within {gap:.1%}", end="")
    if "turns" in worst:
        print(f", turns within {worst['turns']:.1%}", end="")
        if "think_s" in worst:
            print(f", think time within {worst['think_s']:.1%}", end="")
        else:
            print("; the log does not say when answers ended: turns keep their distance from start to start", end="")
    if worst["hit_rate"] is not None:
        print(f"; prefix hit rate {worst['hit_rate_drawn']:.1%}, in the log {worst['hit_rate']:.1%}", end="")
    print()
    return 0


def _show(args: argparse.Namespace) -> int:
    sources = [Path(f) for f in args.files]
    if any(path.suffix == ".toml" for path in sources):
        facts = _drawn(sources, args.seed)
    else:
        facts = describe(read(sources, args.format))
    if args.json:
        _json(facts)
    else:
        print_workload(facts)
    return 0


def _drawn(sources: list[Path], seed: int) -> dict[str, Any]:
    """A workload file is shown by what it would send: its own requests, else 1,000 drawn at 1/s."""
    if len(sources) > 1:
        raise UsageError("show takes one workload file at a time")
    made = dataclasses.replace(Workload.from_toml(sources[0]), seed=seed)
    own = made.stages or made.trace or made.fitted
    return describe(from_schedule(open_schedule(made, None if own else 1.0, None if own else DRAWN)))


def _round(worst: dict[str, float | None]) -> dict[str, Any]:
    return {k: None if v is None else round(v, 5) for k, v in worst.items()}


def _json(value: dict[str, Any]) -> None:
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    print()
