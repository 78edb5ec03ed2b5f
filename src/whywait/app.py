"""Whole journeys, and the public Python API: ``run``, ``sweep``, ``diagnose``, ``show``, ``plan``.

Only this layer knows both halves: the producers that make a Run and the analysis that reads one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whywait.analyze import singles
from whywait.analyze.bill import Ask
from whywait.analyze.phases import account
from whywait.analyze.remote import with_agents
from whywait.analyze.summary import summarize
from whywait.analyze.trust import foreign
from whywait.analyze.whole_point import whole_point
from whywait.analyze.window import with_windows
from whywait.core.memory import kept
from whywait.core.recorder import discard_spool, full_disk
from whywait.core.resume import differences, joined, whole_points
from whywait.core.run import Run, before_point, write_json
from whywait.core.schedule import Lengths, RequestClass, Workload
from whywait.engines import by_name
from whywait.errors import UsageError, WhywaitError
from whywait.judge.diagnose import failures, headline, judge
from whywait.judge.evidence import MIXED
from whywait.judge.verdict import Verdict
from whywait.lab import disagg
from whywait.lab.cpus import cpu_split
from whywait.lab.launch import launched, start_command, start_embedded
from whywait.lab.settings import Settings
from whywait.lab.state import Engine
from whywait.load.driver import Progress
from whywait.load.recipe import Load
from whywait.probe.spans import joined as with_spans
from whywait.session import KEPT, Options, Say, Session, stderr

FOREIGN_STOP = 0.05  # growth of the engine's counters beyond what we sent, as a share of it
Watch = Callable[[Progress], None]


@dataclass(frozen=True, repr=False)
class Result:
    """What a journey hands back. ``directory`` holds the saved Run, ``summary.json`` and, of diagnose, the report."""

    run: Run
    summary: dict[str, Any]
    verdicts: list[Verdict]
    directory: Path
    interrupted: bool = False

    @property
    def headline(self) -> str:
        said: str = self.summary["headline"]
        return said

    def __repr__(self) -> str:
        n = len(self.run.points)
        points = f"{n} load point{'' if n == 1 else 's'}"
        return f"Result({str(self.directory)!r}, {self.run.manifest.made_by}, {points}: {self.headline})"

    def _repr_html_(self) -> str:
        from whywait.report import notebook, told

        kept = str(self.directory) if self.directory != Path() else ""
        return notebook.as_html(lambda out: told.print_told(self.summary, self.verdicts, kept, out))


def measure(
    options: Options,
    loads: Sequence[Load],
    say: Say = stderr,
    watch: Watch | None = None,
    engine: Engine | None = None,
) -> Result:
    """Measure the given load points one after another: what ``whywait run`` and ``whywait sweep`` do.

    Raises:
        WhywaitError: before anything was measured. Afterwards what there is comes back, labelled PARTIAL.
    """
    options = dataclasses.replace(options, loads=tuple(loads))
    with Session(options, say, watch, engine) as s:
        for load in loads:
            if not _point(s, load):
                break
        return _complete(s)


def diagnose(
    options: Options,
    budget_s: float = 180.0,
    say: Say = stderr,
    watch: Watch | None = None,
    engine: Engine | None = None,
) -> Result:
    """Sweep concurrency adaptively inside ``budget_s`` seconds, mix long prompts in once, account and judge.

    A service on another machine gets single streams only unless ``options.load_ok``.
    """
    began = time.monotonic()
    deadline = began + budget_s
    options = dataclasses.replace(options, single_stream_ok=True, climbs=True)
    with Session(options, say, watch, engine) as s:
        only_one = not (s.target.endpoint.loopback or options.load_ok)
        if only_one:
            s.doubt("only one stream at a time was sent", "the service is not on this machine", "add --load")
        _ladder(s, deadline, only_one)
        return _complete(s)


def show(directory: str | Path) -> Result:
    """Read a saved Run, whole or cut off, and analyse it again."""
    run = with_spans(Run.load(directory)).run  # of a run that was cut off nobody has looked at the spans yet
    return analysed(run, Path(directory))


def options_of(directory: str | Path) -> Options:
    """The options a saved or cut-off Run was measured with; headers, proxy and keys, which it never holds, left out.

    Raises:
        UsageError: it does not say what was to be measured (a diagnosis decides that as it goes).
    """
    manifest = Run.load(directory).manifest
    if not manifest.journey.get("loads"):
        raise UsageError(f"{directory} does not say what was to be measured", "only run and sweep can be resumed")
    workload = Workload.from_dict(manifest.workload, f"{directory}: workload")
    loads = tuple(Load(**load) for load in manifest.journey["loads"])
    options = {k: v for k, v in manifest.journey["options"].items() if k in KEPT}
    return Options(**options, workload=workload, loads=loads)


def resume(
    directory: str | Path, options: Options, anyway: bool = False, say: Say = stderr, watch: Watch | None = None
) -> Result:
    """Measure what is missing of a cut-off Run and join both into a new one; the old one stays as it is.

    ``options`` from :func:`options_of`, with what that leaves out. Points that were whole are taken over.

    Raises:
        UsageError: nothing is missing, or the service is not the one measured before (unless ``anyway``).
    """
    old = Run.load(directory)
    done = whole_points(old)
    if done >= len(options.loads):
        raise UsageError(f"{directory} is whole: nothing is missing", f"whywait show {directory}")
    say(f"{done} of {len(options.loads)} points are taken over")
    taken = before_point(old, done)
    with Session(options, say, watch) as s:
        different = differences(old.manifest, s.recorder.manifest)
        if different and not anyway:
            s.forget()
            raise UsageError(f"this is not what was measured before: {'; '.join(different)}", "--anyway to join them")
        for what in different:
            s.doubt("the halves of this run were measured on different services", what, "measure all of it again")
        s.go_on_from(done, int(taken.requests["id"].max()) + 1 if len(taken.requests) else 0)
        for load in options.loads[done:]:
            if not _point(s, load):
                break
        result = keep(joined(taken, s.finish(), str(directory)), s.directory)
        discard_spool(s.directory)
        return dataclasses.replace(result, interrupted=s.interrupted)


@contextlib.contextmanager
def embedded(settings: Settings | None = None, say: Say = stderr) -> Iterator[Engine]:
    """The embedded engine, for as long as the block runs; pinned apart from this process where there is room."""
    engine_cpus, client_cpus = cpu_split()
    settings = settings or Settings()
    if engine_cpus and not settings.cpus:
        settings = dataclasses.replace(settings, cpus=engine_cpus)
    with launched(lambda: start_embedded(settings, say=say)) as engine, _pinned(client_cpus):
        yield engine


@contextlib.contextmanager
def fleet(settings: disagg.Fleet, say: Say = stderr) -> Iterator[Engine]:
    """A split, or replicas, of embedded engines while the block runs; engines pinned apart where there is room."""
    _, client_cpus = disagg.placed(settings)
    with launched(lambda: disagg.start(settings, say=say)) as engine, _pinned(client_cpus):
        yield engine


@contextlib.contextmanager
def command(
    cmdline: str, url: str | None = None, say: Say = stderr, ready_timeout_s: float = 900.0
) -> Iterator[Engine]:
    """An engine by its command line (``--launch``) while the block runs; ``url`` where the command does not tell."""
    with launched(lambda: start_command(cmdline, ready_timeout_s=ready_timeout_s, url=url, say=say)) as engine:
        yield engine


def _point(s: Session, load: Load) -> bool:
    """Drive a point; on a service that is not ours, go no further once somebody else's traffic is seen there."""
    if not s.point(load):
        return False
    if not s.target.endpoint.loopback:
        run = s.snapshot()
        others = [f for f in foreign(run, int(run.points["point"].max())) if f.excess > FOREIGN_STOP * f.sent_high]
        if others:
            s.stop(f"foreign traffic: {others[0].name} grew by {others[0].excess:.0f} more than was sent")
            return False
    return True


def as_benchmark(result: Result) -> list[dict[str, Any]]:
    """Each load point of a result as serving benchmarks count it; see ``analyze.whole_point``."""
    return [whole_point(result.run, n) for n in result.run.points["point"].tolist()]


def write_report(result: Result, path: Path, ask: Ask | None = None) -> None:
    """The self-contained HTML report of a result; ``ask``: what its good requests are billed by.

    Raises:
        UsageError: it cannot be written there.
    """
    from whywait.report.html import render

    with kept(len(result.run.chunks)):
        # it cuts keys and passwords out of all text, not out of its script
        page = render(result.run, result.summary, ask)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write the report to {path}: {exc.strerror}", "the run itself is kept") from None


def _ladder(s: Session, deadline: float, only_one: bool) -> None:
    """Concurrency 1, the slots (or 4), then twice as much each time until throughput stops growing; then the mix.

    Time is dealt out as it is left: each point gets an even share of what remains for those still expected, so that
    a slow service is measured at few points well rather than at many badly.
    """
    slots = int(s.slots or 4)
    steps = [1] if only_one else [1, *(slots << k for k in range(6) if slots << k > 1)]
    best, flat, at_best = 0.0, 0, 1
    took_at: dict[int, float] = {}
    for i, c in enumerate(steps):
        expected = 1 if only_one else max(3, 5 - i)  # points still to come, the mixed one among them
        took = s.last_e2e_s or 0.0
        share = (deadline - time.monotonic()) / expected
        # The last requests drain after the span; a fast service needs no more than a few hundred of them.
        span = min(share - took, max(8.0, 100 * took) if i else 20.0)
        if i and span < max(2.0, 1.5 * took):
            s.doubt(f"concurrency {c} and above were not measured", "the time budget ran out", "--budget 10m")
            break
        if not _point(s, Load("concurrency", c, duration_s=max(span, 2.0))):
            return
        rate, took_at[c] = s.last_tokens_per_s or 0.0, s.last_e2e_s or 1.0
        flat = flat + 1 if rate < 1.1 * best else 0
        if rate > best:
            best, at_best = rate, c
        if flat >= (1 if s.slots and c > s.slots else 2) or rate == 0:
            break
    width = min(max(at_best, 2), slots) if s.slots else max(at_best, 2)
    left = deadline - time.monotonic() - 3 * took_at.get(width, s.last_e2e_s or 1.0)
    if only_one:
        return
    if left < 3.0:
        s.doubt("long prompts were not mixed in", "the time budget ran out", "--budget 10m")
    else:
        s.point(Load("concurrency", width, duration_s=left, label=MIXED, workload=_mixed(s)))


def _mixed(s: Session) -> Workload:
    """The same workload with one request in five bringing a prompt eight times as long, and a short answer."""
    base = s.options.workload
    usual = base.classes[0]
    room = int(s.target.limits.get("ctx_per_slot") or 4096) - 128
    long = min(int(usual.prompt_tokens.a * 8), room)
    classes = (
        dataclasses.replace(usual, name="short", share=0.8),
        RequestClass("long prompt", 0.2, Lengths("fixed", long), Lengths("fixed", 8)),
    )
    return dataclasses.replace(base, classes=classes)


def _complete(s: Session) -> Result:
    result = keep(s.finish(), s.directory)
    discard_spool(s.directory)
    return dataclasses.replace(result, interrupted=s.interrupted)


def keep(run: Run, directory: Path) -> Result:
    """Save a Run just made, then analyse it: whatever befalls the analysis, what was measured is on disk by then.

    Raises:
        UsageError: the disk is full.
    """
    try:
        run.save(directory)
        run = with_windows(run)
        run.save(directory)
        result = analysed(run, directory)
        write_json(directory / "summary.json", result.summary)
    except OSError as exc:
        raise full_disk(directory, exc.strerror or str(exc)) from exc
    return result


def analysed(run: Run, directory: Path) -> Result:
    """The summary and the verdicts of a Run; nothing is written."""
    with kept(len(run.chunks)):
        return _analysed(run, directory)


def _analysed(run: Run, directory: Path) -> Result:
    seen = with_agents(run)
    acc = account(seen)
    summary = summarize(seen, acc)
    table = by_name(run.manifest.engine.get("name"))
    flags = dict(table.flags) if table else {}
    if run.manifest.engine.get("kind") == "embedded":  # what was typed was whywait, not the engine's command
        flags["slots"] = f"{flags.get('slots')} of the server, --slots N of diagnose"
    verdicts = judge(seen, summary, flags, acc)
    summary["verdicts"] = [v.as_dict() for v in verdicts]
    find = run.manifest.journey.get("find")
    if find:  # what the search had found when it was noted last; a killed one could not say that it was cut short
        summary["find"] = {**find, "cut_short": find["cut_short"] or run.manifest.partial_reason}
    summary["headline"] = ". ".join(filter(None, (failures(summary["points"]), headline(verdicts))))
    if singles.is_probe(run):
        summary["probe"] = singles.figures(run)
    return Result(run, summary, verdicts, directory)


@contextlib.contextmanager
def _pinned(cpus: tuple[int, ...]) -> Iterator[None]:
    if not cpus or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


__all__ = [
    "Load",
    "Options",
    "Result",
    "WhywaitError",
    "command",
    "diagnose",
    "embedded",
    "measure",
    "show",
]
