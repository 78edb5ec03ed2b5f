"""``whywait probe``: flags in, single streams sent, costs out, an exit code back."""

from __future__ import annotations

import argparse
import json
import sys

from whywait import app, probing
from whywait.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_SERVICE, EXIT_UNDECIDED, UsageError
from whywait.report import live
from whywait.report.probe import print_probe
from whywait.session import stderr
from whywait.verbs import measure


def probe(args: argparse.Namespace) -> int:
    result = probed(args, live.watcher(budget_s=measure.duration(args.budget, "--budget")))
    live.done()
    found = result.summary["probe"]
    if args.json:
        json.dump({**result.summary, "run": str(result.directory)}, sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        print_probe(result.summary, str(result.directory))
    if result.interrupted:
        return EXIT_INTERRUPTED
    if result.run.manifest.partial:
        stderr(f"whywait: cut short: {result.run.manifest.partial_reason}")
        return EXIT_SERVICE
    undecided = "undecided" in (found["prefill"]["state"], found["decode"]["state"])
    return EXIT_UNDECIDED if args.strict and undecided else EXIT_OK


def probed(args: argparse.Namespace, watch: app.Watch | None = None) -> app.Result:
    """The journey by its flags, nothing printed of what it found."""
    budget_s = measure.duration(args.budget, "--budget")
    if not args.stream:
        raise UsageError("probe needs streams: its figures are times of tokens", "leave out --no-stream")
    with measure._service(args, embedded_slots=4) as engine:
        options = measure._options(args, engine)
        requests, tokens = probing.ceiling(args.longest)
        stderr(
            f"probing {options.url}: at most {requests} requests, about {tokens:,} tokens, one stream at a time and "
            f"two for the pairs; for about {budget_s:.0f} s"
        )
        return probing.probe(options, budget_s, args.longest, watch=watch, engine=engine)
