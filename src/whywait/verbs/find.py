"""``whywait find``: flags in, the search run, an interval out, an exit code back."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from whywait import finding
from whywait.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_SERVICE, EXIT_UNDECIDED, UsageError
from whywait.judge.slo import parse_rules
from whywait.net.endpoint import parse_url
from whywait.report import knee, live
from whywait.session import stderr
from whywait.verbs import measure


def find(args: argparse.Namespace) -> int:
    rules = parse_rules(args.slo or "", args.share)
    budget_s = measure.duration(args.budget, "--budget")
    args.slo = None  # the rules say it, with their shares
    if args.url and args.max_rate is None and not parse_url(args.url).loopback:
        raise UsageError("this would drive a service that is not this machine past its limit", "give --max-rate")
    with measure._service(args) as engine:
        options = measure._options(args, engine)
        if args.max_rate is not None:
            options = dataclasses.replace(options, max_requests=round(args.max_rate * budget_s))
        stderr(f"searching {options.url} for about {budget_s:.0f} s")
        result = finding.find(options, rules, budget_s, args.max_rate, watch=live.watcher(), engine=engine)
        live.done()
    if args.json:
        json.dump({**result.summary, "run": str(result.directory)}, sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        knee.print_find(result.summary, str(result.directory))
    if result.interrupted:
        return EXIT_INTERRUPTED
    if result.run.manifest.partial:
        stderr(f"whywait: cut short: {result.run.manifest.partial_reason}")
        return EXIT_SERVICE
    if not any(p["counts"].get("ok") for p in result.summary["points"]):
        stderr("whywait: no request succeeded")
        return EXIT_SERVICE
    return EXIT_UNDECIDED if args.strict and not result.summary["find"]["decided"] else EXIT_OK
