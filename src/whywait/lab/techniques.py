"""All that ``whywait try`` can run, by name; each kind in a module of its own."""

from __future__ import annotations

from typing import Final

from whywait.lab import (
    tech_batching,
    tech_disagg,
    tech_memory,
    tech_placement,
    tech_precision,
    tech_speculation,
)
from whywait.lab.technique import Technique

TECHNIQUES: Final[dict[str, Technique]] = {
    **tech_batching.TECHNIQUES,
    **tech_memory.TECHNIQUES,
    **tech_placement.TECHNIQUES,
    **tech_disagg.TECHNIQUES,
    **tech_precision.TECHNIQUES,
    **tech_speculation.TECHNIQUES,
}
