"""Results of other load tools as a Run that everything here reads: the journey of ``whywait import``.

It joins the producer, which knows the formats, with the analysis, which holds the Run against the tool's own figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from whywait import app
from whywait.analyze import published
from whywait.convert import results
from whywait.convert.results_build import Given, build
from whywait.convert.results_part import definitions
from whywait.core.check import violations
from whywait.core.run import Run
from whywait.engines import by_name, tables
from whywait.errors import InternalError, UsageError
from whywait.physics.machines import machine


@dataclasses.dataclass(frozen=True)
class Imported:
    """``checked`` are the tool's own figures beside ours."""

    result: app.Result
    checked: list[published.Figure]

    def _repr_html_(self) -> str:
        return self.result._repr_html_()


def given(engine: str | None = None, model: str | None = None, on: tuple[str, int] | None = None,
          slots: int | None = None, slo: dict[str, float] | None = None) -> Given:  # fmt: skip
    """What a user knows of the service and files do not say. ``on``: a machine of the catalogue, and how many.

    Raises:
        UsageError: no such engine, no such machine.
    """
    facts: dict[str, object] = {}
    if engine:
        if by_name(engine) is None:
            raise UsageError(f"--engine {engine}: no such engine", f"one of: {', '.join(tables())}")
        facts["name"] = engine
    if model:
        facts["model"] = model
    if slots:
        facts["slots"] = slots
    where: dict[str, object] = {}
    if on:
        where["gpus"] = [{"name": machine(on[0]).name}] * on[1]
        facts["devices"] = on[1]
    return Given(engine=facts, machine=where, slo=slo or {})


def import_results(
    paths: Sequence[str | Path], directory: str | Path, form: str = "auto", more: Given | None = None
) -> Imported:
    """Read result files of other tools, several of them as several load points, and keep them as a Run.

    Raises:
        UsageError: a file cannot be read or is of no known format, or the folder cannot be written.
    """
    more = more or Given()
    sources = results.read([Path(p) for p in paths], form, more.chunks)
    run = build(sources, more)
    wrong = violations(run)
    if wrong:
        raise InternalError(f"the imported run would break a rule of runs: {wrong[0]}",
                            "please report it, with the version of the tool")  # fmt: skip
    parts = [(s, p) for s in sources for p in s.parts]
    checked = published.figures(run, {i: p.published for i, (_, p) in enumerate(parts)})
    why = {i: definitions(s, p) for i, (s, p) in enumerate(parts)}
    del sources, parts  # as large as what is judged now
    run = _doubted(run, published.disagreements(checked, why), published.table(checked))
    return Imported(app.keep(run, Path(directory)), checked)


def _doubted(run: Run, found: list[dict[str, str]], table: dict[str, object]) -> Run:
    m = run.manifest
    client = {**m.client, "imported": {**m.client["imported"], "checked": table}}
    return dataclasses.replace(run, manifest=dataclasses.replace(m, doubts=[*m.doubts, *found], client=client))
