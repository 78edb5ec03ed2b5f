"""The grid of a what-if: every load, before and after the change, in every draw of what is not known.

Part of the application layer. Each cell stands for itself, so that they can be simulated anywhere (``sim.spread``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whywait.sim.grid import ALONE
from whywait.sim.journal import digests
from whywait.sim.spread import Progress, Work, spread
from whywait.twin.asked import Asked
from whywait.twin.model import Twin

BEFORE, AFTER = 0, 1


@dataclass(frozen=True)
class Cell:
    """One outcome: of which twin, with which multipliers, at which load; ``chance``: exponent on the acceptance of
    drafts, None where nothing is guessed of it."""

    twin: int
    multipliers: Mapping[str, float]
    load: Asked
    seed: int
    chance: float | None = None


def outcomes(
    twins: tuple[Twin, Twin], cells: Sequence[Cell], jobs: int = 0, progress: Progress | None = None
) -> list[dict[str, float]]:
    """:meth:`Twin.outcome` of each, in their order; the same bits wherever they are simulated.

    Raises:
        UsageError: see :func:`whywait.sim.spread.spread`.
    """
    tokens = sum(int(c.load.schedule.output_tokens.sum()) for c in cells)
    named = digests()

    def about(c: Cell) -> tuple[Any, ...]:
        return named(twins[c.twin]), named(c.load), c.multipliers, c.seed, c.chance

    found = spread(Work(_outcome, list(cells), twins, about), jobs, tokens < ALONE, progress)
    return [dict(f) for f in found]  # type: ignore[arg-type]


def _outcome(c: Cell, twins: tuple[Twin, Twin]) -> dict[str, float | None]:
    twin = twins[c.twin] if c.chance is None else twins[c.twin].with_chance(c.chance)
    return dict(twin.outcome(c.multipliers, c.load, c.seed))
