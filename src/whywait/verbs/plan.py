"""The verb ``plan``: candidates and a load in, the argument for one of them out; kept as JSON, CSV and a page."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whywait import deciding, planning, planning_space
from whywait.core.recorder import refuse_used
from whywait.errors import EXIT_OK, EXIT_UNDECIDED, UsageError
from whywait.load.recipe import mean_rate
from whywait.physics.prices import TERMS, Offer, offer_of, parse_currency, parse_owned, read_offers, shipped
from whywait.report import live
from whywait.session import new_directory, stderr
from whywait.sim import catalog
from whywait.verbs import measure
from whywait.verbs.signals import sigterm_as_ctrl_c
from whywait.verbs.somewhere import somewhere


def plan(args: argparse.Namespace) -> int:
    try:
        with sigterm_as_ctrl_c():
            found = planned(args, shown=True)
    except KeyboardInterrupt:
        if not (args.ray or args.cells):
            stderr("stopped: nothing of this plan is kept; fewer machines, engines, layouts or --draws take less time")
        raise
    return _tell(args, found, str(found.directory))


def planned(args: argparse.Namespace, shown: bool = False) -> deciding.Planned:
    """The plan that the flags ask for, kept in its folder. ``shown``: how far it is, on stderr."""
    ask = _again(args) if args.again else _ask(args)
    directory = new_directory(args.out)
    with _folder(directory):
        with somewhere(args):
            found = deciding.plan(ask, _progress() if shown else None)
        return dataclasses.replace(found, directory=found.keep(directory))


@contextmanager
def _folder(directory: Path) -> Iterator[None]:
    """The folder is made before the work, which may be minutes; it goes again where nothing came to be kept.

    Raises:
        UsageError: it holds something, is a file, or cannot be written to.
    """
    refuse_used(directory)
    made = [p for p in (directory, *directory.parents) if not p.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as exc:
        _unmade(made)
        raise UsageError(f"cannot write to {directory}: {exc.strerror}", "give another folder by --out") from None
    try:
        yield
    except BaseException:
        _unmade(made)
        raise


def _unmade(made: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):  # not empty, or never made
        for p in made:
            p.rmdir()


def show(args: argparse.Namespace) -> int:
    """``whywait show`` of a plan's folder."""
    found = deciding.planned(args.run_dir)
    try:
        first = found.found["first"]
        if first is not None and first not in [r["name"] for r in found.found["rows"]]:
            raise ValueError(f"its first, {first}, is none of its rows")
        if args.html:
            _write(found.html(), args.html)
        return _tell(args, found, args.run_dir)
    except (KeyError, TypeError, ValueError) as exc:
        raise UsageError(f"{args.run_dir}: the plan is not whole, or of another version ({exc!r})",
                         f"whywait plan --again {args.run_dir}") from None  # fmt: skip


def _write(page: str, path: str) -> None:
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}", "give another file by --html") from None


def _tell(args: argparse.Namespace, plan: deciding.Planned, directory: str) -> int:
    found = plan.found
    if args.json:
        json.dump({**found, "run": directory}, sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        plan.print(directory)
    return EXIT_UNDECIDED if args.strict and (found["first"] is None or found["ties"]) else EXIT_OK


def _again(args: argparse.Namespace) -> planning.Ask:
    raw = deciding.planned(args.again).found["inputs"]
    return dataclasses.replace(planning.Ask.from_dict(raw), jobs=args.jobs)


def _ask(args: argparse.Namespace) -> planning.Ask:
    catalog.use(args.catalog)  # a price may be of a machine in it
    workload = measure.workload_of(args)
    if args.baseline and not args.run:
        raise UsageError("--baseline says what a run does not tell, and there is no --run", "--run whywait-runs/…")
    rate = args.rate or mean_rate(workload)
    if rate is None:
        raise UsageError("at which rate?", "--rate 8 (requests per second), or a workload that brings its own")
    space = planning_space.read_space(args.candidates) if args.candidates else planning_space.Space(args.model or "")
    lists = (("machines", args.machines, ","), ("engines", args.engines, ","), ("layouts", args.layouts, ";"))
    changes: dict[str, Any] = {k: tuple(_parts(v, by)) for k, v, by in lists if v}
    if args.apply is not None:
        changes["apply"] = tuple(p.strip() for p in args.apply.split(";"))
    if args.counts:
        changes["counts"] = tuple(round(c) for c in args.counts)
    changes |= {"model": args.model or space.model, "precision": args.precision or space.precision}
    space = dataclasses.replace(space, **changes)
    if not space.model:
        raise UsageError("which model?", "--model llama-3.1-70b ('whywait catalog models')")
    return planning.Ask(
        space, workload, float(rate), measure.slo(args.slo) or measure.common_slo(workload), args.share, args.growth,
        offers=_offers(args), terms=args.terms, currency=parse_currency(args.currency) or None,
        budget=_budget(args.budget), runs=tuple(args.run), quality=tuple(_quality(q) for q in args.quality),
        own_prices=bool(args.price or args.price_per_hour or args.owned), workload_file=args.workload,
        catalog=args.catalog, seed=workload.seed, draws=args.draws, jobs=args.jobs, calibrate=args.calibrate,
        baseline=args.baseline,
    )  # fmt: skip


def _parts(text: str, by: str) -> list[str]:
    return [p.strip() for p in text.split(by) if p.strip()]


def _budget(text: str | None) -> float | None:
    """``20/h`` → 20 in the currency of the offers."""
    if text is None:
        return None
    amount, _, per = text.partition("/")
    try:
        value = float(amount)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf or per.strip() not in ("", "h"):
        raise UsageError(f"--budget: {text!r} is not an amount an hour", "such as 20/h, in the currency of the prices")
    return value


def _quality(text: str) -> tuple[str, str]:
    """``fp8-weights+fp8-kv=DIR`` or ``DIR``."""
    name, equals, directory = text.partition("=")
    return (name.strip(), directory.strip()) if equals else ("", text.strip())


def _offers(args: argparse.Namespace) -> tuple[Offer, ...]:
    """What the flags give; the shipped book only where they give nothing.

    Raises:
        UsageError: an amount without its currency, or an offer that cannot be.
    """
    if args.terms and args.terms not in TERMS:
        raise UsageError(f"--terms: {args.terms!r}", f"one of: {', '.join(TERMS)}")
    date = args.price_date or datetime.date.today().isoformat()
    given: list[Offer] = list(read_offers(args.price)) if args.price else []
    currency = parse_currency(args.currency)
    if (args.price_per_hour or args.owned) and not currency:
        raise UsageError("in which currency?", "such as --currency EUR; nothing is converted")
    for part in _parts(args.price_per_hour or "", ","):
        machine, equals, amount = part.partition("=")
        try:
            price = float(amount if equals else machine)
        except ValueError:
            raise UsageError(f"--price-per-hour: {part!r}", "2.5, or h100=2.5,h200=3.1") from None
        name = f"given for {machine}" if equals else "given"
        entry: dict[str, Any] = {"name": name, "terms": "on demand", "date": date, "currency": currency,
                                 "source": "the command line", "per_device_hour": price}  # fmt: skip
        if equals:
            entry["machines"] = [catalog.machine_named(machine).name]
        given.append(offer_of(entry, "--price-per-hour"))
    if args.owned:
        given.append(parse_owned(args.owned, currency, date))
    return tuple(given) or shipped()


def _progress() -> Callable[[str, int, int], None]:
    if not live.can_move(sys.stderr):
        stderr("planning: bounds first, then one replica of each, then whole services in draws")
    return live.Counter()
