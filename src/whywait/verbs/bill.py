"""The verb ``bill``: a saved Run and prices in, what a good request cost out, an exit code back."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from whywait import deciding
from whywait.analyze.bill import Ask, by_request
from whywait.analyze.energy_model import parse_model, the_machine
from whywait.analyze.sharing import RULES
from whywait.core.run import Run
from whywait.errors import EXIT_OK, EXIT_UNDECIDED, UsageError
from whywait.physics.prices import Offer, of_machine, offer_of, parse_currency, parse_owned, read_offers
from whywait.report.bill import print_bill
from whywait.session import stderr
from whywait.verbs import measure


def bill(args: argparse.Namespace) -> int:
    found = billed(args)
    if args.html:
        _page(found, Path(args.html))
    if args.json:
        json.dump(found.found, sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        print_bill(found.found)
    sure = all(p["energy"]["state"] == "holds" for p in found.found["points"])
    return EXIT_UNDECIDED if args.strict and not sure else EXIT_OK


def billed(args: argparse.Namespace) -> deciding.Billed:
    """The bill that the flags ask for; ``--requests`` is written."""
    if args.share_by not in RULES:
        raise UsageError(f"--share-by: there is no rule {args.share_by!r}", f"one of: {', '.join(RULES)}")
    run = Run.load(args.run_dir)
    ask = dataclasses.replace(ask_of(args, run), rule=args.share_by, slo=measure.slo(args.slo) if args.slo else None)
    found = deciding.Billed({**deciding.bill(run, ask), "run": args.run_dir})
    if args.requests:
        _write(Path(args.requests), by_request(run, ask, found.found))
        stderr(f"requests: {args.requests}")
    return found


def ask_of(args: argparse.Namespace, run: Run) -> Ask:
    """What ``run`` is billed by, of the flags of ``flags.priced``.

    Raises:
        UsageError: as :func:`offers_of`, or watts that cannot be.
    """
    machine = the_machine(run)
    return Ask(offers_of(args, machine.name if machine else None), args.devices, parse_model(args.power_model))


def _page(found: deciding.Billed, path: Path) -> None:
    """
    Raises:
        UsageError: it cannot be written there.
    """
    try:
        path.write_text(found.html(), encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}", "give a file in a folder that exists") from None
    stderr(f"page: {path}")


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """
    Raises:
        UsageError: it cannot be written there.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            out: csv.DictWriter[str] | None = None
            for row in rows:
                if out is None:
                    out = csv.DictWriter(file, list(row))
                    out.writeheader()
                out.writerow(row)
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}", "give a file in a folder that exists") from None


def offers_of(args: argparse.Namespace, machine: str | None) -> tuple[Offer, ...]:
    """What the flags give; nothing where they give nothing, and the shipped book counts.

    Raises:
        UsageError: an amount without its currency, an offer that cannot be, or none for this machine.
    """
    given: list[Offer] = []
    date = args.price_date or datetime.date.today().isoformat()
    if (args.price_per_hour or args.owned) and not args.currency:
        raise UsageError("in which currency?", "such as --currency EUR; nothing is converted")
    if args.currency and not (args.price_per_hour or args.owned):
        raise UsageError("--currency converts nothing", "it is that of --price-per-hour or --owned: give one of them")
    currency = parse_currency(args.currency)
    if args.price_per_hour:
        price = {"name": "given", "terms": "on demand", "per_device_hour": args.price_per_hour}
        said = {"currency": currency, "date": date, "source": "the command line"}
        given.append(offer_of({**price, **said}, "--price-per-hour"))
    if args.owned:
        given.append(parse_owned(args.owned, currency, date))
    if args.price:
        book = read_offers(args.price)
        mine = of_machine(book, machine)
        if not mine:
            raise UsageError(f"{args.price} has no offer for {machine or 'a machine that the run does not name'}",
                             "an offer without 'machines' is for any")  # fmt: skip
        given += mine
    names = [o.name for o in given]
    if len(set(names)) < len(names):
        raise UsageError("two offers have the same name", f"of {', '.join(names)}: rename that of the price book")
    return tuple(given)
