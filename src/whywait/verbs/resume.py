"""``whywait resume``: finish a run or sweep that was cut off, into a new Run."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from whywait import app
from whywait.errors import UsageError
from whywait.judge.gates import parse_gates
from whywait.report import live
from whywait.verbs import measure


def resume(args: argparse.Namespace) -> int:
    gates = parse_gates(args.fail_if)
    measure.as_bench(args)
    result = resumed(args, live.watcher())
    live.done()
    return measure._finish(args, result, gates)


def resumed(args: argparse.Namespace, watch: app.Watch | None = None) -> app.Result:
    """The journey by its flags, nothing printed of what it found."""
    if (Path(args.run_dir) / "trial.json").exists():
        raise UsageError(f"{args.run_dir} is a paired trial", "the same whywait ab command goes on with it")
    options = dataclasses.replace(
        app.options_of(args.run_dir),
        api_key_file=args.api_key_file,
        load_ok=args.load,
        out=args.out,
        floor=args.floor,
        command=measure._command(args),
        reach=measure._reach(args),
    )
    if args.url:
        options = dataclasses.replace(options, url=args.url)
    if args.ray:
        here = args.ray == "none"
        options = dataclasses.replace(options, ray="" if here else args.ray, processes=1 if here else options.processes)
    return app.resume(args.run_dir, options, args.anyway, watch=watch)
