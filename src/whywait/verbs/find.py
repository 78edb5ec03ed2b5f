"""``whywait find``: flags in, the search run, an interval out, an exit code back."""

from __future__ import annotations

import argparse
import dataclasses

from whywait import app, finding
from whywait.analyze.offered import invalid
from whywait.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_SERVICE, EXIT_UNDECIDED, GateFailed, UsageError
from whywait.judge.gates import Gate, failed_gates, parse_gates
from whywait.judge.slo import parse_rules
from whywait.net.endpoint import parse_url
from whywait.report import live
from whywait.session import stderr
from whywait.verbs import measure


def find(args: argparse.Namespace) -> int:
    gates = parse_gates(args.fail_if)
    result = searched(args, live.watcher(budget_s=measure.duration(args.budget, "--budget")))
    live.done()
    return _finish(args, result, gates)


def searched(args: argparse.Namespace, watch: app.Watch | None = None) -> app.Result:
    """The journey of ``find`` by its flags, nothing printed of what it found."""
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
        return finding.find(options, rules, budget_s, args.max_rate, watch=watch, engine=engine)


def _finish(args: argparse.Namespace, result: app.Result, gates: list[Gate]) -> int:
    measure.tell(args, result)
    summary = result.summary
    if result.interrupted:
        return EXIT_INTERRUPTED
    if result.run.manifest.partial:
        stderr(f"whywait: cut short: {result.run.manifest.partial_reason}")
        return EXIT_SERVICE
    if failed := failed_gates(gates, summary):
        raise GateFailed("; ".join(failed))
    if not any(p["counts"].get("ok") for p in summary["points"]):
        stderr("whywait: no request succeeded")
        return EXIT_SERVICE
    find = summary["find"]
    ends = {
        p["point"] for p in find["probes"] if p["answer"] != "undecided" and p["rate"] in (find["low"], find["high"])
    }
    measure.raise_invalid(invalid([p for p in summary["points"] if p["point"] in ends]))
    return EXIT_UNDECIDED if args.strict and not find["decided"] else EXIT_OK
