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
from typing import TYPE_CHECKING, Any, TypeAlias

from whywait import app, cli, keywords, trying
from whywait.core.run import Run
from whywait.core.schedule import Workload
from whywait.errors import UsageError
from whywait.options import QUIET, new_directory

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from whywait.comparing import Compared
    from whywait.deciding import Billed, Planned
    from whywait.importing import Imported
    from whywait.qualifying import Comparison
    from whywait.simulating import Simulated
    from whywait.whatif import WhatIf

Result = app.Result
Trial = trying.Trial
Folder: TypeAlias = str | PathLike[str] | app.Result
Source: TypeAlias = str | PathLike[str] | app.Result | Run


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


def quality(a: str, b: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Quality]) -> Comparison:
    """Whether two arms still answer alike, as ``whywait quality``; ``result()`` has the claims. ``aa=True`` in place of
    ``b`` holds A against itself.

    Raises:
        WhywaitError: before anything could be compared. What befalls an arm later is in ``error``, the rest kept.
    """
    from whywait.verbs import quality as verb

    args = arguments("quality", [a, b], flags)
    with _talk(verbose):
        return verb.compared(args, verb.plan_of(args))


def plan(*, verbose: bool = False, **flags: Unpack[keywords.Plan]) -> Planned:
    """Which hardware, how much of it, and why, as ``whywait plan``; modelled. ``found`` is what ``plan.json`` holds.

    Raises:
        UsageError: nothing to try, no SLO, an unknown name, or nothing that fits.
    """
    from whywait.verbs import plan as verb

    with _talk(verbose):
        return verb.planned(arguments("plan", [], flags), shown=verbose)


def bill(run: Folder, *, verbose: bool = False, **flags: Unpack[keywords.Bill]) -> Billed:
    """What a good request of a saved run costs, as ``whywait bill``; ``found`` is what ``--json`` prints.

    Raises:
        UsageError: there is no such run, or an offer cannot be.
    """
    from whywait.verbs import bill as verb

    with _talk(verbose):
        return verb.billed(arguments("bill", [run], flags))


def compare(a: Source, *bs: Source, verbose: bool = False, **flags: Unpack[keywords.Compare]) -> Compared:
    """Each of ``bs`` against ``a``, as ``whywait compare``: folders, files of baselines, results, runs in memory.
    ``found`` is what ``--json`` prints; gates as a test: :mod:`whywait.testing`.

    Raises:
        UsageError: what is given is no run, or is not comparable; each difference is named.
    """
    from whywait.verbs import compare as verb

    for given in (a, *bs):
        if not isinstance(given, Run):
            _path(given)
    args = arguments("compare", ["a", *("b" for _ in bs)], flags)
    args.runs = [a, *bs]
    with _talk(verbose):
        return verb.answered(args)


def import_results(
    files: str | PathLike[str] | Sequence[str | PathLike[str]], out: str | PathLike[str], *, verbose: bool = False,
    **flags: Unpack[keywords.Import],
) -> Imported:  # fmt: skip
    """Result files of another load tool as a run in the folder ``out``, as ``whywait import``; ``result`` is that run,
    ``checked`` the tool's own figures beside ours.

    Raises:
        UsageError: a file cannot be read or is of no known format, or ``out`` holds something.
    """
    from whywait.verbs import importing as verb

    many = files if isinstance(files, Sequence) and not isinstance(files, str) else [files]
    with _talk(verbose):
        return verb.imported(arguments("import", many, flags, out=out))


def export(run: Folder, to: str, out: str | PathLike[str] = "", *, verbose: bool = False,
           **flags: Unpack[keywords.Export]) -> dict[str, Any]:  # fmt: skip
    """A saved run in the form ``to`` of another tool, as ``whywait export``; what was written, as ``--json`` prints it.

    Raises:
        WhywaitError: no such run or form, it cannot be written, or the collector did not take it.
    """
    from whywait.verbs import export as verb

    if _path(out) == "-":
        raise UsageError("stdout is for the terminal", "give a file or a folder")
    with _talk(verbose):
        return verb.exported(arguments("export", [run], flags, to=to, out=out))


def show(run_dir: str | PathLike[str]) -> Result:
    """Read a saved run again and judge it anew.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    return app.show(run_dir if isinstance(run_dir, Path) else _path(run_dir))


def simulate(*, verbose: bool = False, **flags: Unpack[keywords.Simulate]) -> Simulated:
    """What a machine, a model and a layout would do under a load, as ``whywait simulate``; modelled.

    Raises:
        UsageError: a name is unknown, or the parts do not go together.
    """
    from whywait.verbs import simulate as verb

    with _talk(verbose):
        return verb.simulated(arguments("simulate", [], flags))


def what_if(run_dir: Folder, *, verbose: bool = False, **flags: Unpack[keywords.WhatIf]) -> WhatIf:
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

    args = arguments("ab", [], flags, a=a, b=b)
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


def arguments(verb: str, positional: Sequence[Any], flags: Mapping[str, Any], **own: Any) -> argparse.Namespace:
    """What the command line would make of these; ``own`` are flags that a function has as parameters.

    Raises:
        UsageError: a keyword that is no flag of the verb, or a value that the flag does not take.
    """
    parser = _parser(verb)
    known, typed = {_keyword(a): a for a in parser._actions if a.option_strings}, keywords.OF[verb].__optional_keys__
    if wrong := sorted(flags.keys() - typed):
        raise UsageError(f"{verb} has no keyword {wrong[0]!r}", f"there are: {', '.join(sorted(typed))}")
    words, objects = [], {}
    for name, value in {**own, **flags}.items():
        if isinstance(value, Workload):
            objects[name] = value
        elif value is not None:
            words += _words(known[name], value)
    given = [_path(p) for p in positional if p is not None]
    words += ["--", *given] if given else []
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


def _path(given: Any) -> str:
    """
    Raises:
        UsageError: it is no path and no URL.
    """
    try:
        path: str = fspath(given.directory if isinstance(given, Result) else given)
    except TypeError:
        raise UsageError(f"{given!r:.60} is no path and no URL", "give text, a path, or a result") from None
    return path


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


def _words(action: argparse.Action, value: Any) -> list[str]:
    flag = action.option_strings[-1]
    if action.nargs == 0:
        return [flag] if bool(value) == bool(action.const) else []
    if action.nargs == "?" and isinstance(value, bool):
        return [flag] if value else []
    if isinstance(action, argparse._AppendAction):
        many = [value] if isinstance(value, (str, PathLike)) else list(value)
        return [word for v in many for word in (f"{flag}={fspath(v)}",)]
    return [f"{flag}={_text(action, value)}"]


def _text(action: argparse.Action, value: Any) -> str:
    if isinstance(value, Mapping):
        if action.dest == "body":
            import json

            return json.dumps(value)
        unit = "ms" if action.dest == "slo" else ""
        return ",".join(f"{k.removesuffix('_ms') if unit else k}={_number(v, unit)}" for k, v in value.items())
    if isinstance(value, (str, PathLike)):
        return fspath(value)
    if isinstance(value, (list, tuple, range)):
        return ",".join(map(_number, value))
    return _number(value, "s" if action.metavar == "TIME" else "")


def _number(value: Any, unit: str = "") -> str:
    return f"{value}{unit}" if isinstance(value, (int, float)) else str(value)


@contextlib.contextmanager
def _talk(verbose: bool) -> Iterator[None]:
    """What a journey says on stderr is for the terminal. A full disk is the caller's error, as there."""
    before = QUIET.set(not verbose)
    try:
        yield
    except OSError as exc:
        if (wrong := cli.of_the_machine(exc)) is None:
            raise
        raise wrong from None
    finally:
        QUIET.reset(before)
