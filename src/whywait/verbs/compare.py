"""The verb ``compare``: saved runs and baselines in, what changed out, an exit code back."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from whywait import comparing
from whywait.errors import EXIT_OK, EXIT_UNDECIDED, GateFailed, UsageError
from whywait.judge import alike, change_gates
from whywait.judge.change_gates import FAILS, UNDECIDED
from whywait.physics.prices import Offer, read_offers
from whywait.report import compared, compared_html
from whywait.session import stderr
from whywait.verbs import bill, measure
from whywait.verbs.gated import write_page


def compare(args: argparse.Namespace) -> int:
    if args.save_baseline:
        return _save(args, options(args))
    if args.html:
        measure._writable(args.html)
    result = answered(args).found
    if args.html:
        write_page(Path(args.html), compared_html.render(result), "the runs are")
        stderr(f"report: {args.html}")
    if args.json:
        sys.stdout.write(json.dumps(result, indent=2, allow_nan=False) + "\n")
    else:
        compared.print_compared(result)
    return _code(args, result)


def answered(args: argparse.Namespace) -> comparing.Compared:
    """The comparison that the flags ask for."""
    o = options(args)
    if len(args.runs) < 2:
        raise UsageError("compared with what?", "whywait compare A B, or --save-baseline FILE A")
    return comparing.Compared(comparing.compare(args.runs[0], args.runs[1:], o, args.repeat))


def options(args: argparse.Namespace) -> comparing.Options:
    """
    Raises:
        UsageError: a flag that cannot be.
    """
    if args.devices is not None and args.devices < 1:
        raise UsageError("--devices must be 1 or more")
    return comparing.Options(
        allow=alike.allowed_kinds(args.allow),
        at=tuple(args.at),
        metrics=tuple(change_gates.ALIASES.get(m, m) for m in args.metric),
        threshold=share(args.threshold, "--threshold"),
        slo=measure.slo(args.slo) if args.slo else None,
        run_noise=share(args.run_noise, "--run-noise") if args.run_noise else 0.0,
        gates=tuple(change_gates.parse(args.fail_if)),
        offers=_offers(args),
        devices=args.devices,
    )


def _offers(args: argparse.Namespace) -> tuple[Offer, ...] | None:
    """What the flags give; None: the shipped book."""
    given = argparse.Namespace(**{**vars(args), "price": None})
    one = bill.offers_of(given, None) if args.price_per_hour or args.currency else ()
    return (*one, *(read_offers(args.price) if args.price else ())) or None


def share(text: str, flag: str) -> float:
    """``5%`` or ``0.05`` → 0.05.

    Raises:
        UsageError: it is no share from 0 to 1.
    """
    amount = text.strip()
    try:
        value = float(amount.rstrip("%")) / (100 if amount.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(f"{flag}: {text!r} is not a share below 1", "such as 5% or 0.05")
    return value


def _save(args: argparse.Namespace, o: comparing.Options) -> int:
    if args.fail_if or args.html or args.json:
        raise UsageError("--save-baseline compares nothing", "leave out --fail-if, --html and --json")
    path = Path(args.save_baseline)
    kept = comparing.save_baseline(path, [*args.runs, *args.repeat], o)
    runs = "1 run" if kept.runs == 1 else f"{kept.runs} runs"
    stderr(f"baseline of {runs}: {path} ({path.stat().st_size / 1000:.0f} kB); whywait compare {path} RUN")
    if kept.runs == 1:
        stderr("several runs of the same would tell what differs from run to run; --save-baseline FILE RUN RUN RUN")
    return EXIT_OK


def _code(args: argparse.Namespace, result: dict[str, Any]) -> int:
    """
    Raises:
        GateFailed: a gate fails.
    """
    bad = [g for g in result["gates"] if g["state"] == FAILS]
    open_ = [g for g in result["gates"] if g["state"] == UNDECIDED]
    for g in open_:
        stderr(f"whywait: undecided: {g['b']}: {compared.gate_line(g)}")
    if bad:
        raise GateFailed("; ".join(f"{g['b']}: {compared.gate_line(g)}" for g in bad))
    if not result["gates"]:
        open_ = [f for c in result["comparisons"] for p in c["points"] for f in p["figures"]
                 if f["claimed"] and f["state"] == "open"]  # fmt: skip
    return EXIT_UNDECIDED if args.strict and open_ else EXIT_OK
