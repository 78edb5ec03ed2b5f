"""A verdict: what holds a service back, whether the evidence bears it out, and what would decide it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

STATES = ("holds", "fails", "undecided")


@dataclass(frozen=True)
class Verdict:
    """``share`` is the part of the requests' time (or of the device's, by ``of``) the cause accounts for, 0..1.

    ``state`` is ``holds`` (the evidence shows it), ``fails`` (the evidence rules it out) or ``undecided``. ``how`` says
    what the figure rests on: measured, derived, inferred or modelled.
    """

    cause: str
    claim: str
    state: str
    share: float | None = None
    of: str = "request time"
    where: str = ""
    how: str = "measured"
    evidence: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    lever: str = ""
    next_step: str = ""
    point: int | None = field(default=None)

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state must be one of {STATES}")
        if self.state == "holds" and not self.evidence:
            raise ValueError("a verdict without evidence can only be undecided")

    def as_dict(self) -> dict[str, Any]:
        out = asdict(self)
        out["evidence"], out["against"] = list(self.evidence), list(self.against)
        return out


def rank(verdicts: list[Verdict]) -> list[Verdict]:
    """Those that hold by their share, then the undecided, then what was ruled out."""
    order = {"holds": 0, "undecided": 1, "fails": 2}
    return sorted(verdicts, key=lambda v: (order[v.state], -(v.share or 0.0)))
