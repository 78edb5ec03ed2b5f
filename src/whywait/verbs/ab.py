"""``whywait ab`` and ``whywait try``: flags in, a paired trial run, claims and effects out, an exit code back."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.markup import escape

from whywait import app, trying
from whywait.core import secrets
from whywait.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNDECIDED, GateFailed, UsageError, WhywaitError
from whywait.judge.gates import Gate
from whywait.judge.paired import Asked, asked_of, promise_of
from whywait.judge.trial import can_gate, gate, surely_worse
from whywait.lab.arms import EMBEDDED, Arm, answers_may_differ, arm_of, program_of, roomy
from whywait.lab.disagg import OWN
from whywait.lab.technique import Point, Technique
from whywait.lab.techniques import TECHNIQUES
from whywait.load.recipe import mean_rate
from whywait.report import live, trial_html
from whywait.report.text import console
from whywait.report.trial import print_trial
from whywait.session import new_directory, stderr
from whywait.verbs import gated, measure, quality, reading
from whywait.verbs.gated import gates_of, tell, write_page
from whywait.verbs.signals import sigterm_as_ctrl_c

EXAMPLE = "such as 'worse' or 'output_tokens_per_s.ratio_high<1'; docs/ab.md has all"


def ab(args: argparse.Namespace) -> int:
    gates = gates_of(args.fail_if)
    return _run(args, compared(args), gates)


def compared(args: argparse.Namespace) -> trying.Plan:
    """The trial that the flags of ``ab`` say."""
    a = arm_of(args.a)
    if args.b is None and args.aa != "only":
        raise UsageError("which is the other arm?", "give --b, or --aa for A against itself")
    b = arm_of(args.b) if args.b is not None else a
    if {a.kind, b.kind} <= {EMBEDDED, *OWN} and not args.workload:
        lengths = measure.DIAGNOSE_LENGTHS["embedded"]
        args.prompt_tokens = args.prompt_tokens or lengths[0]
        args.output_tokens = args.output_tokens or lengths[1]
    options = _options(args)
    load = _load(args, options)
    asked = tuple(map(asked_of, args.metric)) or _usual(load, options)
    if args.promise:
        promise_of(args.promise)
    _may_ask_quality(args, a == b)
    plan = _plan(args, (a, b), options, ((load,), asked, args.promise))
    return dataclasses.replace(plan, changes_answers=answers_may_differ(a, b))


def try_technique(args: argparse.Namespace) -> int:
    if args.list:
        return _list(args)
    gates = gates_of(args.fail_if)
    return _run(args, tried(args), gates)


def tried(args: argparse.Namespace) -> trying.Plan:
    """The trial of a technique."""
    found = TECHNIQUES.get(args.technique or "")
    if found is None:
        what = f"there is no technique {args.technique!r}" if args.technique else "which technique?"
        raise UsageError(what, f"one of {', '.join(TECHNIQUES)}; whywait try --list tells of each")
    _may_ask_quality(args, False)
    secrets.hide_command(args.engine)
    texts = found.arms(args.engine, "" if args.engine == EMBEDDED else program_of(args.engine))
    if texts is None:
        known = ", ".join(found.flags)
        hint = f"there are some for {known}; or whywait ab --a … --b …"
        if not known:
            page = f"docs/techniques/{args.technique}.md"
            hint = f"it takes more than flags: start both services ({page}), then whywait ab --a URL --b URL"
        raise UsageError(f"{args.technique} has no recipe for {args.engine!r}", hint)
    options = dataclasses.replace(_options(args), workload=measure.workload_of(args, found.workload))
    loads = tuple(_load_of(p, args) for p in found.points)
    asked = tuple(Asked(s.metric, s.up, s.at, s.price) for s in found.shows)
    plan = _plan(args, (arm_of(texts[0]), arm_of(texts[1])), options, (loads, asked, found.promise))
    return dataclasses.replace(plan, technique=args.technique, changes_answers=found.changes_answers)


def _load_of(p: Point, args: argparse.Namespace) -> app.Load:
    """A point of a technique; what is said of the workload on the command line holds for one of its own too."""
    own = p.workload and measure.workload_of(args, p.workload)
    return app.Load(p.mode, float(p.target), p.requests, label=p.label or None, workload=own)


def show(args: argparse.Namespace) -> int:
    """``whywait show`` of a trial's folder."""
    gates = gates_of(args.fail_if)
    measure._writable(args.html)
    t = trying.load(args.run_dir)
    if args.html:
        write_page(Path(args.html), trial_html.render(t.result()), "the trial itself is")
    return _finish(args, t, gates, shown=True)


def _run(args: argparse.Namespace, plan: trying.Plan, gates: list[Gate]) -> int:
    measure._writable(args.html)
    gated.check(gates, lambda path: can_gate(path, _classes(plan)), EXAMPLE)
    with sigterm_as_ctrl_c():
        if args.vary:
            from whywait.verbs import vary

            return vary.run(args, plan)
        directory = new_directory(args.out)
        with trying.alone(directory):
            return _measured(args, plan, directory, gates)


def _classes(plan: trying.Plan) -> list[str]:
    return [c.name for w in (plan.options.workload, *(x.workload for x in plan.loads)) if w for c in w.classes]


def _measured(args: argparse.Namespace, plan: trying.Plan, directory: Path, gates: list[Gate]) -> int:
    noise = ""
    if args.aa == "only":
        plan = trying.plan_of_aa(plan)
    elif args.aa == "first":
        noise = str(directory.with_name(directory.name + "-aa"))
        stderr("first A against itself")
        before = trying.trial(trying.plan_of_aa(plan), Path(noise), watch=live.watcher(), whole_ok=True)
        live.done()
        if before.interrupted or before.error:
            return _done(args, before, gates)
        stderr(before.result()["headline"])
    elif not plan.same:
        stderr("how much do two rounds of the same differ here? the same command with --aa tells (--aa first: before)")
    t = trying.trial(plan, directory, watch=live.watcher(), noise_of=noise, whole_ok=bool(args.quality))
    live.done()
    if args.quality and not t.interrupted and t.error is None:
        _quality(args, plan, t)
    return _done(args, t, gates)


def _quality(args: argparse.Namespace, plan: trying.Plan, t: trying.Trial) -> None:
    """Hold the arms' answers against each other and keep what is said beside the trial's claims. What fails here takes
    nothing from the trial. After one that was cut off all is asked again, and kept beside what is left of that."""
    names = ("quality", *(f"quality-{i}" for i in range(2, 1000)))
    folder = next(x for n in names if not (x := t.directory / n).exists())
    stderr("the rounds are done; now what the arms answer")
    try:
        c = quality.beside(roomy(plan.a), roomy(plan.b), plan.options, folder, args.quality)
    except WhywaitError as exc:
        t.error = exc
        return
    found = c.result()
    t.quality = {**{k: found[k] for k in ("headline", "claims", "partial", "partial_reason")},
                 "directory": str(c.directory)}  # fmt: skip
    t.interrupted, t.error = c.interrupted, c.error
    t.save()


def _may_ask_quality(args: argparse.Namespace, same: bool) -> None:
    if args.quality and (same or args.aa == "only"):
        raise UsageError("--quality compares two arms", "of one against itself: whywait quality A --aa")


def _done(args: argparse.Namespace, t: trying.Trial, gates: list[Gate]) -> int:
    page = Path(args.html) if args.html else t.directory / "report.html"
    try:
        return _finish(args, t, gates)
    finally:
        write_page(page, trial_html.render(t.result()), "the trial itself is")
        stderr(f"report: {page}")


def _finish(args: argparse.Namespace, t: trying.Trial, gates: list[Gate], shown: bool = False) -> int:
    result = t.result()
    tell(args.json, result, t.directory, print_trial)
    if t.interrupted:
        return EXIT_INTERRUPTED
    if t.error is not None:
        raise t.error
    worse = [f"B is surely worse: {what}" for what in surely_worse(result)]
    if failed := gated.failed(gates, worse, lambda path: gate(result, path), EXAMPLE):
        raise GateFailed("; ".join(failed))
    if not shown:
        measure.raise_invalid(invalid(t, result))
    false = result["plan"]["same"] and any(c["way"] in ("above", "below") for c in result["claims"])
    return EXIT_UNDECIDED if args.strict and (false or not result["decided"]) else EXIT_OK


def invalid(t: trying.Trial, result: dict[str, Any]) -> list[str]:
    """Why rounds that count are not to be trusted; empty if all are."""
    left_out = {x["pair"] for x in result["excluded"]}
    bad = [r for r in t.rounds if r["invalid"] and r["pair"] not in left_out]
    where = ", ".join(f"{r['number'] + 1} ({r['arm']})" for r in bad)
    return [f"in rounds {where}, as in the first of them {bad[0]['invalid'][0]}"] if bad else []


def _plan(
    args: argparse.Namespace,
    arms: tuple[Arm, Arm],
    options: app.Options,
    said: tuple[tuple[app.Load, ...], tuple[Asked, ...], str],
) -> trying.Plan:
    loads, asked, promise = said
    low, high = _rounds(args.rounds)
    if args.warm_up is not None and not 0 <= args.warm_up <= measure.MOST_ROWS:
        raise UsageError("--warm-up is a number of requests", f"0 for none, at most {measure.MOST_ROWS:,}")
    if args.metrics_url and arms[0] != arms[1] and arms[0].kind == arms[1].kind == "url":
        raise UsageError("--metrics-url would be read for both arms", "leave it out: each arm's own page is read")
    plan = trying.Plan(
        *arms, options, loads, asked, promise, _margin(args.margin), low, high, tuple(args.exclude),
        options.workload.seed, args.warm_up,
    )  # fmt: skip
    each = measure._ceiling(trying.points_of(plan), options.workload)
    options = dataclasses.replace(options, max_requests=None if each is None else 2 * high * each)
    return dataclasses.replace(plan, options=options)


def _options(args: argparse.Namespace) -> app.Options:
    args.url = args.launch = None
    reading.engine_file(args)
    return measure._options(args, None)


def _load(args: argparse.Namespace, options: app.Options) -> app.Load:
    mode, target = "concurrency", float(args.concurrency or 4)
    if args.rate:
        mode, target = "rate", args.rate
    elif args.concurrency is None and (own := mean_rate(options.workload)):
        mode, target = "rate" if options.workload.stages else "trace", own
    return measure.load_of(args, mode, target)


def _usual(load: app.Load, options: app.Options) -> tuple[Asked, ...]:
    """What is claimed unless it is said: at a given rate throughput is given, and cannot tell the arms apart."""
    closed = load.mode == "concurrency"
    names = []
    if options.slo or any(c.slo for c in options.workload.classes):
        names.append("goodput_requests_per_s" if closed else "goodput_share")
    elif closed:
        names.append("output_tokens_per_s")
    names += ["ttft_ms.p50", "tpot_ms.p50"] if options.stream else ["e2e_ms.p50"]
    return tuple(map(asked_of, names))


def _rounds(text: str) -> tuple[int, int]:
    """``4..12`` → (4, 12): rounds of each arm, so pairs; even, since a block of four rounds has two of each."""
    form = re.fullmatch(r"\s*(\d+)\s*(?:(?:\.\.|-|–)\s*(\d+))?\s*", text)
    low, high = (int(form[1]), int(form[2] or form[1])) if form else (0, 0)
    if not 1 <= low <= high <= 200:
        raise UsageError(f"--rounds {text!r} is not N..M", "such as 4..12: rounds of each arm, at least and at most")
    even = (low + low % 2, high + high % 2)
    if even != (low, high):
        stderr(f"rounds come in blocks of A B B A: {even[0]} to {even[1]} of each arm")
    return even


def _margin(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise UsageError(f"--margin {text!r} is not a share above 0", "such as 5% or 0.05")
    return value


def _list(args: argparse.Namespace) -> int:
    if args.json:
        json.dump({k: _as_dict(t) for k, t in TECHNIQUES.items()}, sys.stdout, indent=2)
        print()
        return EXIT_OK
    out = console()
    for name, t in TECHNIQUES.items():
        out.print(f"\n[bold]{escape(name)}[/bold]: {escape(t.says)}")
        out.print(f"  promises to cut: {escape(t.promise)}; its price: {escape(t.cost)}")
        a, b = t.arms() or ("–", "–")
        out.print(f"  here:   --a {escape(a)} --b {escape(b)}")
        for program, (off, on) in t.flags.items():
            out.print(f"  {program}: A {escape(off) or '(nothing)'}, B {escape(on) or '(nothing)'}")
    return EXIT_OK


def _as_dict(t: Technique) -> dict[str, Any]:
    a, b = t.arms() or ("", "")
    shows = [dataclasses.asdict(s) for s in t.shows]
    return {
        "says": t.says,
        "promise": t.promise,
        "cost": t.cost,
        "changes_answers": t.changes_answers,
        "a": a,
        "b": b,
        "shows": shows,
        "flags": dict(t.flags),
    }
