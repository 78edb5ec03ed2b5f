"""The verb ``what-if``: a saved Run and a change in, errors and claims out, an exit code back."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

from whywait import whatif
from whywait.core.secrets import clean
from whywait.errors import EXIT_OK, EXIT_UNDECIDED, UsageError
from whywait.report import live
from whywait.report import whatif as report
from whywait.session import stderr
from whywait.sim import catalog
from whywait.sim.jit import COMPILED
from whywait.verbs import measure
from whywait.verbs.somewhere import somewhere

BOUNDS = {"tpot": "tpot_ms", "ttft": "ttft_ms", "e2e": "e2e_ms", "throughput": "output_tokens_per_s"}


def what_if(args: argparse.Namespace) -> int:
    if args.html and (not Path(args.html).parent.is_dir() or Path(args.html).is_dir()):
        raise UsageError(f"cannot write a report to {args.html}", "give a file in a folder that exists")
    found = answered(args, functools.partial(live.Counter(), "outcomes simulated"))
    if args.calibration:
        stderr(f"calibration: {found.calibration.save(args.calibration)}")
    if args.json:
        json.dump(found.as_dict(), sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        report.print_what_if(found.as_dict(), compiled=COMPILED)
    if args.html:
        _write(Path(args.html), report.page(found.as_dict()))
        stderr(f"report: {args.html}")
    return EXIT_UNDECIDED if args.strict and not any(c.state in ("better", "worse") for c in found.claims) else EXIT_OK


def answered(args: argparse.Namespace, progress: Callable[[int, int], None] | None = None) -> whatif.WhatIf:
    """The answer to what the flags ask."""
    catalog.use(args.catalog)
    ask = whatif.Ask(
        apply=args.apply or "", machine=args.machine, model=args.model, layout=args.layout, load=args.load,
        slo=measure.slo(args.slo) if args.slo else None, bound=bounds(args.bound), baseline=args.baseline or "",
        seeds=args.seeds, jobs=args.jobs,
    )  # fmt: skip
    with somewhere(args):
        return whatif.what_if(args.run_dir, ask, progress)


def bounds(text: str | None) -> dict[str, float]:
    """``'20%'`` for all, or ``'tpot=20%,ttft=30%,throughput=0.2'``: largest error of a load left out, by family.

    Raises:
        UsageError: not of this form.
    """
    out: dict[str, float] = {}
    for part in (p.strip() for p in (text or "").split(",") if p.strip()):
        name, equals, value = (x.strip() for x in part.partition("="))
        if not equals:
            name, value = "", name
        try:
            share = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        except ValueError:
            share = 0.0
        if not 0 < share < 10 or (name and name not in BOUNDS):
            raise UsageError(f"--bound: {part!r} is not METRIC=SHARE",
                             f"20%, or tpot=20%,ttft=30%; metrics: {', '.join(BOUNDS)}")  # fmt: skip
        out.update({BOUNDS[name]: share} if name else dict.fromkeys(BOUNDS.values(), share))
    return out


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(clean(page), encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write the report to {path}: {exc.strerror}") from None
