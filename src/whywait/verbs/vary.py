"""``--vary`` of ``whywait ab`` and ``whywait try``, and ``whywait show`` of its folder: one table of trials."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from whywait import trying, varying
from whywait.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNDECIDED, UsageError
from whywait.report import live, trial_html
from whywait.report import vary as told
from whywait.session import new_directory, stderr
from whywait.verbs import ab, measure
from whywait.verbs.gated import write_page


def run(args: argparse.Namespace, plan: trying.Plan) -> int:
    if args.aa:
        raise UsageError("--aa compares A with itself: it has nothing to vary", "leave out --aa or --vary")
    if args.fail_if:
        hint = f"whywait show of a value's folder, with --fail-if {args.fail_if[0]}"
        raise UsageError("--fail-if is for one trial", hint)
    what = varying.parse(args.vary)
    found = varying.vary(plan, what, new_directory(args.out), stderr, live.watcher)
    live.done()
    for value, t in found.trials:
        write_page(t.directory / "report.html", trial_html.render(t.result()), "the trials are")
        stderr(f"{found.name}={value}: {t.result()['headline']}")
    page = Path(args.html) if args.html else found.directory / "report.html"
    write_page(page, told.render(found.result()), "the trials are")
    stderr(f"report: {page}")
    return _finish(args, found, new=True)


def show(args: argparse.Namespace) -> int:
    found = varying.load(args.run_dir)
    if args.html:
        write_page(Path(args.html), told.render(found.result()), "the trials are")
    return _finish(args, found)


def _finish(args: argparse.Namespace, found: varying.Varied, new: bool = False) -> int:
    result = found.result()
    if args.json:
        json.dump({**result, "run": str(found.directory)}, sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        told.print_vary(result, str(found.directory))
    if found.interrupted:
        return EXIT_INTERRUPTED
    if found.error is not None:
        raise found.error
    if new:
        bad = [f"{found.name}={v}: {why}" for v, t in found.trials for why in ab.invalid(t, t.result())]
        measure.raise_invalid(bad)
    open_ = not all(t["decided"] for t in result["trials"]) or bool(result["missing"])
    return EXIT_UNDECIDED if args.strict and open_ else EXIT_OK
