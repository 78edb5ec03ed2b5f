"""``whywait quality``: flags in, two arms asked the same, claims and figures out, an exit code back."""

from __future__ import annotations

import argparse
import dataclasses
import io
from pathlib import Path
from typing import Any

from whywait import app, qualifying
from whywait.core.schedule import Workload
from whywait.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNDECIDED, GateFailed, UsageError
from whywait.judge.agreed import gate, known
from whywait.judge.gates import Gate
from whywait.lab.arms import EMBEDDED, Arm, arm_of
from whywait.load.cases import EACH, cases_of
from whywait.load.given import texts_of
from whywait.load.lmeval import suites_of
from whywait.report import quality_html
from whywait.report.quality import print_quality
from whywait.report.text import Plain
from whywait.session import new_directory, stderr
from whywait.verbs import gated, measure, reading
from whywait.verbs.gated import gates_of, tell, write_page
from whywait.verbs.signals import sigterm_as_ctrl_c

EXAMPLE = "such as 'worse', 'accuracy.drop_high>2' or 'agreement.kl_mean>0.1'; docs/quality.md has all"
MOST_TEXTS = 400
EACH_EMBEDDED = 6  # cases of a category where an arm is the embedded engine: it answers some ten tokens a second

#: The flags that say what is asked, as they are by default.
USUAL: dict[str, Any] = {
    "text": [], "positions": None, "context": 512, "top": 50, "tasks": None, "suite": None, "suite_path": "",
    "cases": None, "at_once": 4, "keep_text": False, "margin": 2.0, "margin_ppl": 2.0, "margin_top1": 5.0,
}  # fmt: skip


def quality(args: argparse.Namespace) -> int:
    gates = gates_of(args.fail_if)
    measure._writable(args.html)
    plan = plan_of(args)
    _check_gates(gates, plan)
    return _done(args, compared(args, plan), gates)


def plan_of(args: argparse.Namespace) -> qualifying.Plan:
    """What the flags ask to be compared."""
    if args.b is None and not args.aa:
        raise UsageError("which is the other arm?", "whywait quality A B, or --aa for A against itself")
    if args.b is not None and args.aa:
        raise UsageError("--aa is A against itself", "leave B out")
    a = arm_of(args.a)
    b = arm_of(args.b) if args.b is not None else a
    return _plan(args, qualifying.Plan(a, b, _options(args)))


def compared(args: argparse.Namespace, plan: qualifying.Plan) -> qualifying.Comparison:
    """Both arms asked, in the folder that the flags name."""
    stderr(qualifying.ceiling(plan))
    if not plan.same and not args.only:
        stderr("how much do two runs of the same differ here? the same command with --aa in place of B tells")
    with sigterm_as_ctrl_c():
        return qualifying.qualify(plan, new_directory(args.out))


def beside(a: Arm, b: Arm, options: app.Options, directory: Path, part: str) -> qualifying.Comparison:
    """What ``whywait quality A B`` does by default, for a trial that has just compared their speed. ``part``: all,
    agreement or tasks.

    Raises:
        WhywaitError: before anything could be compared.
    """
    args = argparse.Namespace(**USUAL, only=None if part == "all" else part)
    asking = dataclasses.replace(options, workload=Workload(timeout_s=options.workload.timeout_s), out=str(directory))
    plan = _plan(args, qualifying.Plan(a, b, asking))
    stderr(qualifying.ceiling(plan))
    c = qualifying.qualify(plan, directory)
    write_page(directory / "report.html", quality_html.render(c.result()), "the comparison is")
    return c


def show(args: argparse.Namespace) -> int:
    """``whywait show`` of a comparison's folder."""
    gates = gates_of(args.fail_if)
    measure._writable(args.html)
    c = qualifying.load(args.run_dir)
    try:
        page = quality_html.render(c.result())
        print_quality(c.result(), "", Plain(file=io.StringIO()))
    except Exception as exc:  # a file that was changed by hand
        what = f"{c.directory / qualifying.NOTE} is damaged: {type(exc).__name__}: {exc}"
        raise UsageError(what, "give the folder of whywait quality") from None
    if args.html:
        write_page(Path(args.html), page, "the comparison is")
    return _finish(args, c, gates)


def _done(args: argparse.Namespace, c: qualifying.Comparison, gates: list[Gate]) -> int:
    page = Path(args.html) if args.html else c.directory / "report.html"
    try:
        return _finish(args, c, gates)
    finally:
        write_page(page, quality_html.render(c.result()), "the comparison is")
        stderr(f"report: {page}")


def _finish(args: argparse.Namespace, c: qualifying.Comparison, gates: list[Gate]) -> int:
    result = c.result()
    tell(args.json, result, c.directory, print_quality)
    if c.interrupted:
        return EXIT_INTERRUPTED
    if c.error is not None:
        raise c.error
    worse = [f"not so: {c['claim']}" for c in result["claims"] if c["state"] == "fails"]
    if failed := gated.failed(gates, worse, lambda path: gate(result, path), EXAMPLE):
        raise GateFailed("; ".join(failed))
    undecided = bool(qualifying.claims_open(result)) or not result["claims"]
    false = c.plan["same"] and any(x["state"] == "fails" for x in result["claims"])
    return EXIT_UNDECIDED if args.strict and (undecided or false) else EXIT_OK


def _plan(args: argparse.Namespace, plan: qualifying.Plan) -> qualifying.Plan:
    margins = {"perplexity": args.margin_ppl, "top1": args.margin_top1, "accuracy": args.margin}
    for flag, value in (
        ("--margin-ppl", args.margin_ppl),
        ("--margin-top1", args.margin_top1),
        ("--margin", args.margin),
    ):
        if not 0 < value < 100:
            raise UsageError(f"{flag} of {value:g} is not between 0 and 100", "per cent; points of accuracy")
    most = args.positions or MOST_TEXTS
    texts = [] if args.only == "tasks" else texts_of(args.text, args.context, min(most, MOST_TEXTS))
    usual = EACH_EMBEDDED if EMBEDDED in (plan.a.kind, plan.b.kind) else EACH
    tasks = args.tasks or ("" if args.suite else "all")
    cases = []
    if tasks and args.only != "agreement":
        cases = cases_of(tasks, plan.options.seed, args.cases, usual=usual, say=stderr)
    suites = None
    if args.suite and args.only != "agreement":
        more = {"limit": args.cases or 0, "include": args.suite_path, "at_once": args.at_once}
        suites = suites_of(args.suite, timeout_s=plan.options.workload.timeout_s, **more)
    return dataclasses.replace(
        plan, suites=suites, texts=tuple(texts), cases=tuple(cases), tasks=tasks if cases else "",
        positions=args.positions, context=args.context, top=args.top, margins=margins, at_once=args.at_once,
        keep_text=args.keep_text,
    )  # fmt: skip


def _check_gates(gates: list[Gate], plan: qualifying.Plan) -> None:
    """
    Raises:
        UsageError: a condition on a figure that this comparison cannot have: said before anything is asked.
    """
    categories = None if plan.suites else {c.category for c in plan.cases}  # lm-eval's names are known at the end
    gated.check(gates, lambda path: known(path, categories), EXAMPLE)


def _options(args: argparse.Namespace) -> app.Options:
    reading.engine_file(args)
    seconds = measure.duration(args.timeout, "--timeout") if args.timeout else Workload().timeout_s
    return app.Options(
        model=args.model, dialect=args.dialect, api_key_file=args.api_key_file, workload=Workload(timeout_s=seconds),
        load_ok=args.load, out=args.out, seed=args.seed, reach=measure._reach(args), body=measure._body(args.body),
    )  # fmt: skip
