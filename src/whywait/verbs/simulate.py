"""The verb ``simulate``: a deployment by its flags, the journey of ``simulating`` run, a table or JSON out."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable

from whywait import simulating
from whywait.core.schedule import Workload
from whywait.errors import EXIT_OK, GateFailed, UsageError
from whywait.judge.gates import failed_gates, parse_gates
from whywait.load.recipe import Load, mean_rate
from whywait.report import live
from whywait.report import simulate as report
from whywait.sim import catalog, techniques
from whywait.sim.deployment import Deployment
from whywait.sim.result import describe
from whywait.verbs import measure
from whywait.verbs.somewhere import somewhere

LOADS = (1.0, 4.0, 16.0, 64.0)


def simulate(args: argparse.Namespace) -> int:
    gates = parse_gates(args.fail_if)
    found = simulated(args, _progress())
    if args.json:
        json.dump(found.as_dict(), sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        report.print_simulated(describe(found.plan.deployment), found.as_dict(), found.result.headline)
    failed = failed_gates(gates, found.result.summary)
    if failed:
        raise GateFailed("; ".join(failed))
    return EXIT_OK


def simulated(args: argparse.Namespace, progress: Callable[[int, int], None] | None = None) -> simulating.Simulated:
    """The journey of ``simulate`` by its flags, nothing printed."""
    catalog.use(args.catalog)
    deployment = deployment_of(args)
    workload = measure.workload_of(args)
    loads, remarks = tuple(_loads(args, workload)), []
    if _layout_is_open(args, deployment):
        deployment, why = simulating.laid_out(deployment, workload, loads)
        remarks.append(why)
    plan = simulating.Plan(
        deployment, workload, loads, measure.slo(args.slo) or measure.common_slo(workload), workload.seed, args.draws,
        args.jobs, args.out, tuple(sys.argv[1:]), tuple(remarks),
    )  # fmt: skip
    with somewhere(args):
        return simulating.simulate(plan, progress=progress)


def deployment_of(args: argparse.Namespace) -> Deployment:
    """From the flags, limits and techniques applied.

    Raises:
        UsageError: a name is unknown, or the parts do not go together.
    """
    missing = [name for name in ("machine", "model") if not getattr(args, name)]
    if missing:
        hint = "such as --machine h200 --model llama-3.1-8b; 'whywait catalog' lists them"
        raise UsageError(f"which {', which '.join(missing)}?", hint)
    layout = {part.partition("=")[0].strip() for part in (args.layout or "").split(",")}
    for technique, _ in techniques.parse(args.apply or ""):
        if technique.name in layout:
            raise UsageError(f"both --layout and --apply say {technique.name}", "say it once")
    d = simulating.deployment_of(
        args.machine, args.model, args.engine, precision=args.precision, count=args.count, layout=args.layout or ""
    )
    limits = {"max_seqs": args.max_seqs, "token_budget": args.token_budget, "memory_share": args.memory_share,
              "kv_blocks": args.kv_blocks}  # fmt: skip
    d = dataclasses.replace(
        d,
        engine=dataclasses.replace(d.engine, **{k: v for k, v in limits.items() if v is not None}),
        efficiency=dataclasses.replace(d.efficiency, kernels=args.kernels),
    )
    return techniques.apply(args.apply or "", d)


def _layout_is_open(args: argparse.Namespace, d: Deployment) -> bool:
    """Whether devices are given and nobody said how they are used. A count of KV blocks is of one layout."""
    said = {t.name for t, _ in techniques.parse(args.apply or "")} & {"tp", "pp", "dp", "ep", "replicas", "pd"}
    return (args.count or 1) > 1 and not args.layout and not said and d.engine.kv_blocks is None


def _loads(args: argparse.Namespace, workload: Workload) -> list[Load]:
    if args.rate:
        return [measure.load_of(args, "rate", r) for r in args.rate]
    if args.concurrency is None and (own := mean_rate(workload)):
        return [measure.load_of(args, "rate" if workload.stages else "trace", own)]
    return [measure.load_of(args, "concurrency", c) for c in args.concurrency or LOADS]


def _progress() -> Callable[[int, int], None]:
    return functools.partial(live.Counter(), "draws simulated")
