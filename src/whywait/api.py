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
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from whywait import app, keywords, trying
from whywait.calling import arguments, path_of, talk
from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.options import new_directory

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from whywait.comparing import Compared
    from whywait.deciding import Billed, Planned
    from whywait.doctoring import Findings
    from whywait.importing import Imported
    from whywait.listing import Listed
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
    with talk(verbose):
        return measure.measured(args, measure.point_of(args))


def sweep(url: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Sweep]) -> Result:
    """Measure several load points, as ``whywait sweep``: ``concurrency=[1, 4, 16]``.

    Raises:
        WhywaitError: as :func:`run`.
    """
    from whywait.verbs import measure

    args = arguments("sweep", [url], flags)
    with talk(verbose):
        return measure.measured(args, measure.points_of(args))


def diagnose(url: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Diagnose]) -> Result:
    """Find out what a service waits on, as ``whywait diagnose``; without a URL the embedded engine.

    Raises:
        WhywaitError: as :func:`run`.
    """
    from whywait.verbs import measure

    args = arguments("diagnose", [url], flags)
    with talk(verbose):
        return measure.past(args) if args.last else measure.diagnosed(args)


def find(url: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Find]) -> Result:
    """The highest rate that keeps an SLO, as ``whywait find``; ``result.summary["find"]`` has the interval.

    Raises:
        WhywaitError: as :func:`run`.
    """
    from whywait.verbs import find as verb

    with talk(verbose):
        return verb.searched(arguments("find", [url], flags))


def probe_service(url: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Probe]) -> Result:
    """What one stream costs, as ``whywait probe``; ``result.summary["probe"]`` has the figures. Without a URL the
    embedded engine.

    Raises:
        WhywaitError: as :func:`run`.
    """
    from whywait.verbs import probe as verb

    with talk(verbose):
        return verb.probed(arguments("probe", [url], flags))


def resume(run: Folder, *, verbose: bool = False, **flags: Unpack[keywords.Resume]) -> Result:
    """Finish a run or sweep that was cut off, as ``whywait resume``; into a new run, the old one stays.

    Raises:
        WhywaitError: as :func:`run`; also where there is nothing to finish, or the service is another now.
    """
    from whywait.verbs import resume as verb

    with talk(verbose):
        return verb.resumed(arguments("resume", [run], flags))


def watch(url: str | None = None, *, length: float | str | None = None, each: Callable[[Result], object] | None = None,
          verbose: bool = False, **flags: Unpack[keywords.Watch]) -> Result:  # fmt: skip
    """What a service in production waits on, by its metrics alone, as ``whywait watch``: for one window, or for
    ``length`` (the verb's ``--for``), and ``each`` is called with every window as it ends.

    Returns:
        The kept run of all windows with ``out=…``, else the last window, which is in no folder.

    Raises:
        WhywaitError: nothing can be read there.
        KeyboardInterrupt: ended before a window was whole.
    """
    from whywait.verbs import watch as verb

    args = arguments("watch", [url], flags, **{"for": length})
    args.once = length is None
    with talk(verbose):
        return verb.watched(args, each or (lambda _window: None))


def doctor(url: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Doctor]) -> Findings:
    """What this machine and a service can and cannot measure, as ``whywait doctor``: ``states`` by name, ``sections``
    with what would help. What kept it from the service is in ``error``, the rest told.

    Raises:
        UsageError: a flag names what cannot be used.
    """
    from whywait.verbs import doctor as verb

    with talk(verbose):
        return verb.examined(arguments("doctor", [url], flags))


def history(
    directory: str | PathLike[str] = "whywait-runs", *, verbose: bool = False, **flags: Unpack[keywords.History]
) -> Listed:
    """The runs of a folder one after another, as ``whywait history``; ``found`` is what ``--json`` prints.

    Raises:
        UsageError: no such folder, or no such figure.
    """
    from whywait.verbs import history as verb

    with talk(verbose):
        return verb.listed(arguments("history", [directory], flags))


def catalog(what: str | None = None, name: str | None = None, *, verbose: bool = False,
            **flags: Unpack[keywords.Catalog]) -> dict[str, Any]:  # fmt: skip
    """What the simulator knows by name, each with its source, as ``whywait catalog --json``: ``catalog("machines")``,
    ``catalog("h200")``.

    Raises:
        UsageError: there is nothing of that name.
    """
    from whywait.verbs import catalog as verb

    with talk(verbose):
        return verb.looked_up(arguments("catalog", [what, name], flags))


def quality(a: str, b: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Quality]) -> Comparison:
    """Whether two arms still answer alike, as ``whywait quality``; ``result()`` has the claims. ``aa=True`` in place of
    ``b`` holds A against itself.

    Raises:
        WhywaitError: before anything could be compared. What befalls an arm later is in ``error``, the rest kept.
    """
    from whywait.verbs import quality as verb

    args = arguments("quality", [a, b], flags)
    with talk(verbose):
        return verb.compared(args, verb.plan_of(args))


def plan(*, verbose: bool = False, **flags: Unpack[keywords.Plan]) -> Planned:
    """Which hardware, how much of it, and why, as ``whywait plan``; modelled. ``found`` is what ``plan.json`` holds.

    Raises:
        UsageError: nothing to try, no SLO, an unknown name, or nothing that fits.
    """
    from whywait.verbs import plan as verb

    with talk(verbose):
        return verb.planned(arguments("plan", [], flags), shown=verbose)


def bill(run: Folder, *, verbose: bool = False, **flags: Unpack[keywords.Bill]) -> Billed:
    """What a good request of a saved run costs, as ``whywait bill``; ``found`` is what ``--json`` prints.

    Raises:
        UsageError: there is no such run, or an offer cannot be.
    """
    from whywait.verbs import bill as verb

    with talk(verbose):
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
            path_of(given)
    args = arguments("compare", ["a", *("b" for _ in bs)], flags)
    args.runs = [a, *bs]
    with talk(verbose):
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
    with talk(verbose):
        return verb.imported(arguments("import", many, flags, out=out))


def export(run: Folder, to: str, out: str | PathLike[str] = "", *, verbose: bool = False,
           **flags: Unpack[keywords.Export]) -> dict[str, Any]:  # fmt: skip
    """A saved run in the form ``to`` of another tool, as ``whywait export``; what was written, as ``--json`` prints it.

    Raises:
        WhywaitError: no such run or form, it cannot be written, or the collector did not take it.
    """
    from whywait.verbs import export as verb

    if path_of(out) == "-":
        raise UsageError("stdout is for the terminal", "give a file or a folder")
    with talk(verbose):
        return verb.exported(arguments("export", [run], flags, to=to, out=out))


def show(run_dir: str | PathLike[str]) -> Result:
    """Read a saved run again and judge it anew.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    return app.show(run_dir if isinstance(run_dir, Path) else path_of(run_dir))


def simulate(*, verbose: bool = False, **flags: Unpack[keywords.Simulate]) -> Simulated:
    """What a machine, a model and a layout would do under a load, as ``whywait simulate``; modelled.

    Raises:
        UsageError: a name is unknown, or the parts do not go together.
    """
    from whywait.verbs import simulate as verb

    with talk(verbose):
        return verb.simulated(arguments("simulate", [], flags))


def what_if(run_dir: Folder, *, verbose: bool = False, **flags: Unpack[keywords.WhatIf]) -> WhatIf:
    """What a change would do to the service of a saved run, as ``whywait what-if``; modelled, its error beside it.

    Raises:
        UsageError: the run does not say enough, or the change is impossible; the hint says what to do.
    """
    from whywait.verbs import whatif as verb

    with talk(verbose):
        return verb.answered(arguments("what-if", [run_dir], flags))


def ab(a: str, b: str | None = None, *, verbose: bool = False, **flags: Unpack[keywords.Ab]) -> Trial:
    """Two arms of an engine in alternating rounds, paired, as ``whywait ab``; ``trial.result()`` has the claims.

    Raises:
        WhywaitError: what the flags say cannot be. What befalls an arm later is in ``trial.error``, the rest kept.
    """
    from whywait.verbs import ab as verb

    args = arguments("ab", [], flags, a=a, b=b)
    with talk(verbose):
        return _tried(verb.compared(args), args)


def try_technique(technique: str, *, verbose: bool = False, **flags: Unpack[keywords.Try]) -> Trial:
    """A technique for real, against not having it, as ``whywait try``.

    Raises:
        WhywaitError: as :func:`ab`.
    """
    from whywait.verbs import ab as verb

    args = arguments("try", [technique], flags)
    with talk(verbose):
        return _tried(verb.tried(args), args)


def _tried(plan: trying.Plan, args: argparse.Namespace) -> Trial:
    directory = new_directory(args.out)
    with trying.alone(directory):
        return trying.trial(trying.plan_of_aa(plan) if args.aa else plan, directory)
