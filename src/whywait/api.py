"""The Python API: the verbs of the command line as functions, for notebooks and for pytest, sync and async.

    import whywait
    result = whywait.run("http://127.0.0.1:8000", concurrency=8, requests=64, slo={"ttft": 500})
    result = await whywait.aio.run(…)         # the same, beside a running event loop

Each takes the flags of its verb as keywords (:mod:`whywait.keywords`), prints nothing but what ``verbose=True`` asks
for, and hands back what the verb would have printed. What goes wrong is raised as
:class:`whywait.errors.WhywaitError`, with the exit code the verb would have ended with. A sync call is fine inside a
running event loop (it blocks it, as any call).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whywait import app, cli, keywords, trying
from whywait.core.schedule import Workload
from whywait.errors import UsageError
from whywait.options import QUIET, new_directory

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from whywait.simulating import Simulated
    from whywait.whatif import WhatIf

Result = app.Result
Trial = trying.Trial

TIMES = ("duration", "timeout", "budget", "ramp", "last")  # a bare number of these is seconds


def run(url: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Run]) -> Result:
    """Measure one load point of a service, as ``whywait run``.

    Raises:
        WhywaitError: before anything was measured. Afterwards what there is comes back, labelled PARTIAL.
    """
    from whywait.verbs import measure

    args = arguments("run", [url], flags)
    with _talk(verbose):
        return measure.measured(args, measure.point_of(args))


def sweep(url: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Sweep]) -> Result:
    """Measure several load points, as ``whywait sweep``: ``concurrency=[1, 4, 16]``.

    Raises:
        WhywaitError: as :func:`run`.
    """
    from whywait.verbs import measure

    args = arguments("sweep", [url], flags)
    with _talk(verbose):
        return measure.measured(args, measure.points_of(args))


def diagnose(url: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Diagnose]) -> Result:
    """Find out what a service waits on, as ``whywait diagnose``; without a URL the embedded engine.

    Raises:
        WhywaitError: as :func:`run`.
    """
    from whywait.verbs import measure

    args = arguments("diagnose", [url], flags)
    with _talk(verbose):
        return measure.past(args) if args.last else measure.diagnosed(args)


def find(url: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Find]) -> Result:
    """The highest rate that keeps an SLO, as ``whywait find``; ``result.summary["find"]`` has the interval.

    Raises:
        WhywaitError: as :func:`run`.
    """
    from whywait.verbs import find as verb

    with _talk(verbose):
        return verb.searched(arguments("find", [url], flags))


def show(run_dir: str | PathLike[str]) -> Result:
    """Read a saved run again and judge it anew.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    return app.show(run_dir if isinstance(run_dir, Path) else fspath(run_dir))


def simulate(*, verbose: bool = False, **flags: Unpack[keywords.Simulate]) -> Simulated:
    """What a machine, a model and a layout would do under a load, as ``whywait simulate``; modelled.

    Raises:
        UsageError: a name is unknown, or the parts do not go together.
    """
    from whywait.verbs import simulate as verb

    with _talk(verbose):
        return verb.simulated(arguments("simulate", [], flags))


def what_if(run_dir: str | PathLike[str], *, verbose: bool = False, **flags: Unpack[keywords.WhatIf]) -> WhatIf:
    """What a change would do to the service of a saved run, as ``whywait what-if``; modelled, its error beside it.

    Raises:
        UsageError: the run does not say enough, or the change is impossible; the hint says what to do.
    """
    from whywait.verbs import whatif as verb

    with _talk(verbose):
        return verb.answered(arguments("what-if", [run_dir], flags))


def ab(a: str, b: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Ab]) -> Trial:
    """Two arms of an engine in alternating rounds, paired, as ``whywait ab``; ``trial.result()`` has the claims.

    Raises:
        WhywaitError: what the flags say cannot be. What befalls an arm later is in ``trial.error``, the rest kept.
    """
    from whywait.verbs import ab as verb

    args = arguments("ab", [], {"a": a, **({} if b is None else {"b": b}), **flags})
    with _talk(verbose):
        return _tried(verb.compared(args), args)


def try_technique(technique: str, *, verbose: bool = False, **flags: Unpack[keywords.Try]) -> Trial:
    """A technique for real, against not having it, as ``whywait try``.

    Raises:
        WhywaitError: as :func:`ab`.
    """
    from whywait.verbs import ab as verb

    args = arguments("try", [technique], flags)
    with _talk(verbose):
        return _tried(verb.tried(args), args)


def _tried(plan: trying.Plan, args: argparse.Namespace) -> Trial:
    directory = new_directory(args.out)
    with trying.alone(directory):
        return trying.trial(trying.plan_of_aa(plan) if args.aa else plan, directory)


def arguments(verb: str, positional: Sequence[Any], flags: Mapping[str, Any]) -> argparse.Namespace:
    """What the command line would make of these.

    Raises:
        UsageError: a keyword that is no flag of the verb, or a value that the flag does not take.
    """
    parser = _parser(verb)
    known = {_keyword(a): a for a in parser._actions if a.option_strings and a.dest not in ("help", "json")}
    words, objects = [], {}
    for name, value in flags.items():
        if name not in known:
            raise UsageError(f"{verb} has no keyword {name!r}", f"there are: {', '.join(sorted(known))}")
        if isinstance(value, Workload):
            objects[name] = value
        elif value is not None:
            words += _words(known[name], name, value)
    words += ["--", *(fspath(p) for p in positional if p is not None)] if any(p is not None for p in positional) else []
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parser.parse_args(words)
    except SystemExit:
        text = said.getvalue().strip().splitlines()
        raise UsageError(text[-1].partition(": error: ")[2] or text[-1] if text else f"{verb}: {words}") from None
    for name, value in objects.items():
        setattr(args, name, value)
    return args


@functools.cache
def _parser(verb: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=verb, allow_abbrev=False)
    cli.flags_of(verb)(made)
    return made


def _keyword(action: argparse.Action) -> str:
    """``--prompt-tokens`` → ``prompt_tokens``; ``--no-stream``, which turns something off, by what it turns off."""
    if isinstance(action, argparse._StoreFalseAction):
        return action.dest
    return action.option_strings[-1].lstrip("-").replace("-", "_")


def _words(action: argparse.Action, name: str, value: Any) -> list[str]:
    flag = action.option_strings[-1]
    if action.nargs == 0:
        return [flag] if bool(value) == bool(action.const) else []
    if action.nargs == "?" and isinstance(value, bool):
        return [flag] if value else []
    if isinstance(action, argparse._AppendAction):
        many = [value] if isinstance(value, (str, PathLike)) else list(value)
        return [word for v in many for word in (f"{flag}={fspath(v)}",)]
    return [f"{flag}={_text(name, value)}"]


def _text(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        if name == "body":
            import json

            return json.dumps(value)
        unit = "ms" if name == "slo" else ""
        return ",".join(f"{k.removesuffix('_ms') if unit else k}={_number(v, unit)}" for k, v in value.items())
    if isinstance(value, (str, PathLike)):
        return fspath(value)
    if isinstance(value, (list, tuple, range)):
        return ",".join(map(_number, value))
    return _number(value, "s" if name in TIMES else "")


def _number(value: Any, unit: str = "") -> str:
    return f"{value}{unit}" if isinstance(value, (int, float)) else str(value)


@contextlib.contextmanager
def _talk(verbose: bool) -> Iterator[None]:
    """What a journey says on stderr is for the terminal."""
    before = QUIET.set(not verbose)
    try:
        yield
    finally:
        QUIET.reset(before)
