"""The journeys that decide: the bill of a run, and a plan. Part of the application layer."""

from __future__ import annotations

import csv
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whywait import planning
from whywait.analyze.bill import Ask, offered
from whywait.analyze.bill import bill as of_run
from whywait.core import bounded
from whywait.core.run import Run
from whywait.core.secrets import clean
from whywait.errors import UsageError
from whywait.physics.prices import shipped
from whywait.report import bill_html, plan_html
from whywait.report.bill import headline as in_a_sentence
from whywait.report.bill import print_bill
from whywait.report.plan import CSV_HEAD, csv_rows, print_plan
from whywait.sim import catalog

PLAN = "plan.json"  # what a plan is kept as


def bill(run: Run | str | Path, ask: Ask | None = None) -> dict[str, Any]:
    """What a good request and a million effective tokens of a saved Run cost: the dict of ``analyze.bill.bill``, with
    ``run`` (the folder, None of a Run in memory) and ``headline``. Nothing is sent.

    ``ask`` without offers takes the shipped ones for the run's machine.
    """
    held = run if isinstance(run, Run) else Run.load(run)
    found = of_run(held, offered(held, ask))
    return {"run": None if isinstance(run, Run) else str(run), "headline": in_a_sentence(found), **found}


@dataclass(frozen=True)
class Billed:
    """What a bill says: ``found`` are plain JSON values, those of :func:`bill`."""

    found: dict[str, Any]

    @property
    def headline(self) -> str:
        return in_a_sentence(self.found)

    def _repr_html_(self) -> str:
        from whywait.report import notebook

        return notebook.as_html(lambda out: print_bill(self.found, out))

    def html(self) -> str:
        """The bill as one page that stands alone."""
        return clean(bill_html.render(self.found))


@dataclass(frozen=True)
class Planned:
    """What a plan says: ``found`` are plain JSON values, all that its reports are made from; ``directory`` where it is
    kept, if it is."""

    found: dict[str, Any]
    directory: Path | None = field(default=None, compare=False)

    @property
    def headline(self) -> str:
        said: str = self.found["headline"]
        return said

    def _repr_html_(self) -> str:
        from whywait.report import notebook

        return notebook.as_html(lambda out: print_plan(self.found, str(self.directory or ""), out))

    def print(self, directory: str) -> None:
        """On stdout; ``directory`` is where it is kept."""
        print_plan(self.found, directory)

    def html(self) -> str:
        """The argument as one page that stands alone."""
        return clean(plan_html.render(self.found))

    def keep(self, directory: str | Path) -> Path:
        """Write ``plan.json``, ``plan.html`` and ``plan.csv`` there.

        Raises:
            UsageError: it cannot be written.
        """
        at = Path(directory)
        try:
            at.mkdir(parents=True, exist_ok=True)
            (at / PLAN).write_text(clean(json.dumps(self.found, indent=1, allow_nan=False)), encoding="utf-8")
            (at / "plan.html").write_text(self.html(), encoding="utf-8")
            with (at / "plan.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([CSV_HEAD, *csv_rows(self.found)])
        except OSError as exc:
            raise UsageError(f"cannot write the plan to {at}: {exc.strerror}", "give a folder by --out") from None
        return at


def plan(ask: planning.Ask, progress: planning.Progress | None = None) -> Planned:
    """Which hardware, and why: what ``whywait plan`` does. Without offers in ``ask`` the shipped prices are taken.

    ``plan(Ask(Space("llama-3.1-70b", ("h100", "h200")), Workload(), 8.0, {"ttft_ms": 1000, "tpot_ms": 40}))`` with
    ``Ask`` and ``Space`` of ``whywait.planning``.

    Raises:
        UsageError: nothing to try, no SLO, an unknown name, or nothing that fits.
    """
    catalog.use(ask.catalog)
    return Planned(planning.plan(ask if ask.offers else dataclasses.replace(ask, offers=shipped()), progress))


def planned(path: str | Path) -> Planned:
    """A plan that was kept: its folder or its ``plan.json``.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    at = Path(path)
    at = at / PLAN if at.is_dir() else at
    try:
        raw = bounded.read_json(at, 512 * bounded.MIB)
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else f"it is damaged ({exc})"
        raise UsageError(f"{at} holds no plan: {why}", "the folder or plan.json of whywait plan") from None
    if not isinstance(raw, dict) or raw.get("kind") != "plan" or not isinstance(raw.get("inputs"), dict):
        raise UsageError(f"{at} holds no plan: it is something else", "the folder or plan.json of whywait plan")
    return Planned(raw, at.parent)
