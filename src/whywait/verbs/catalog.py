"""The verb ``catalog``: what the simulator knows by name, each with its source, and the waits that verdicts name."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import json
import sys
from pathlib import Path
from typing import Any

from whywait.errors import EXIT_OK, UsageError
from whywait.judge.vocabulary import CAUSES, page, told
from whywait.physics.machines import sources_in_full
from whywait.report import catalog as report
from whywait.sim import catalog as known
from whywait.sim.engines import ENGINES, engine_of
from whywait.sim.techniques import TECHNIQUES, technique_named

KINDS = ("machines", "models", "techniques", "engines", "waits")


def catalog(args: argparse.Namespace) -> int:
    found = looked_up(args)
    if args.json:
        json.dump(found, sys.stdout, indent=2, allow_nan=False, default=str)
        print()
    elif isinstance(entry := next(iter(found.values())), dict):
        report.print_entry(entry)
    else:
        report.print_lists(found)
    return EXIT_OK


def looked_up(args: argparse.Namespace) -> dict[str, Any]:
    """By kind: the entries, or the one that was named.

    Raises:
        UsageError: there is none of that name.
    """
    known.use(args.catalog)
    kinds, name = [args.what] if args.what else list(KINDS), args.name
    if args.what and args.what not in KINDS:  # an entry's own name stands for its kind, too
        kinds, name = [_kind_of(args.what)], args.what
    return {kind: _one(kind, name) if name else _all(kind) for kind in kinds}


def _kind_of(name: str) -> str:
    """
    Raises:
        UsageError: nothing in the catalogue has that name.
    """
    for kind in KINDS:
        with contextlib.suppress(UsageError):
            _one(kind, name)
            return kind
    raise UsageError(f"the catalogue has neither a kind nor an entry {name!r}", f"kinds: {', '.join(KINDS)}")


def _all(kind: str) -> list[dict[str, Any]]:
    if kind == "machines":
        return [_machine(m) for m in known.all_machines()]
    if kind == "models":
        return [dataclasses.asdict(m) for m in known.all_models()]
    if kind == "techniques":
        return [_technique(name) for name in TECHNIQUES]
    if kind == "waits":
        return [told(name) for name in CAUSES]
    return [{"name": name, **dataclasses.asdict(e)} for name, e in ENGINES.items()]


def _one(kind: str, name: str) -> dict[str, Any]:
    """
    Raises:
        UsageError: there is none of that name; the nearest are named.
    """
    if kind == "machines":
        return _machine(known.machine_named(name))
    if kind == "models":
        return dataclasses.asdict(known.model_named(name))
    if kind == "techniques":
        return _technique(technique_named(name).name)
    if kind == "waits":
        return told(_wait(name))
    return {"name": name, **dataclasses.asdict(engine_of(name))}


def _wait(name: str) -> str:
    """A cause by its name, or by that of its page (``slot-limit``).

    Raises:
        UsageError: there is none of that name; the nearest are named.
    """
    by_page = {Path(page(c)).stem: c for c in CAUSES}
    if found := by_page.get(Path(page(name)).stem):
        return found
    near = difflib.get_close_matches(name, CAUSES, 3, 0.4) or list(CAUSES)
    raise UsageError(f"there is no wait {name!r}", f"such as {', '.join(near)}")


def _machine(m: Any) -> dict[str, Any]:
    found = {k: v for k, v in dataclasses.asdict(m).items() if k not in ("words", "unless", "scatter")}
    return {**found, "source": sources_in_full(m)}


def _technique(name: str) -> dict[str, Any]:
    t = TECHNIQUES[name]
    return {"name": t.name, "syntax": t.syntax, "changes": t.changes, "cuts": t.cuts, "price": t.price,
            "keys": dict(t.keys), "source": t.source or "none needed: the setting itself"}  # fmt: skip
