"""A verdict: what holds a service back, whether the evidence bears it out, and what would decide it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

STATES = ("holds", "fails", "undecided")
#: A wait can be taken away and leaves the work; work is what is left when nothing waits. Of both, the larger share
#: leads, but a wait that matters leads before all work.
WAIT, WORK = 0, 1
MATTERS = 0.10  # share from which a wait is named before the work
#: A lack of cores stretches all that the engine does. What would be this share of the time at full speed too leads.
CONSTANT = ("network latency",)  # not the engine's doing: full speed does not shorten it
STRETCHERS, STRUCTURAL = ("noisy neighbour", "cpu quota"), 0.25


@dataclass(frozen=True)
class Verdict:
    """``share`` is the part of the requests' time (or of the device's, by ``of``) the cause accounts for, 0..1.

    ``state`` is ``holds`` (the evidence shows it), ``fails`` (the evidence rules it out) or ``undecided``. ``how`` says
    what the figure rests on: measured, derived, inferred or modelled. ``lever`` is what would change it, by the
    engine's own flag where that is known, with what it should gain and what it may cost. ``kind`` is ``WAIT`` or
    ``WORK``; ``beyond`` marks what only a load above the user's own waits on.
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
    gain: str = ""
    cost: str = ""
    kind: int = WAIT
    beyond: bool = False

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state must be one of {STATES}")
        if self.state == "holds" and not self.evidence:
            raise ValueError("a verdict without evidence can only be undecided")

    def as_dict(self) -> dict[str, Any]:
        out = asdict(self)
        out["evidence"], out["against"] = list(self.evidence), list(self.against)
        out["kind"] = ("wait", "work")[self.kind]
        return out


def rank(verdicts: list[Verdict]) -> list[Verdict]:
    """Those that hold, then the undecided, then what was ruled out; what is only beyond the user's load comes last of
    its state. Of those that hold waits that matter go before work, and both by share; but a lack of cores, which makes
    everything else longer, comes after a wait that would be a good part of the time at full speed too."""
    order = {"holds": 0, "undecided": 1, "fails": 2}
    lost = max(
        (v.share or 0.0 for v in verdicts if v.cause in STRETCHERS and v.state == "holds" and not v.beyond), default=0.0
    )

    work = [v for v in verdicts if v.kind == WORK and v.state == "holds" and not v.beyond and v.of == "request time"]
    top = max(work, key=lambda v: v.share or 0.0).cause if work else ""

    def key(v: Verdict) -> tuple[Any, ...]:
        share = v.share or 0.0
        minor = v.kind == WORK or share < MATTERS
        full = (
            share
            if v.of != "request time" or v.cause not in CONSTANT
            else share / max(share + (1 - share) * (1 - lost), 1e-9)
        )
        led = v.cause in STRETCHERS or full < STRUCTURAL
        holds = v.state == "holds"
        # How the few that there are spend their time does not matter before that there are few; and that a step
        # mostly reads weights is what a small batch comes to.
        few = (
            minor and holds and v.cause == "want of load" and (share >= STRUCTURAL or top == "weight-read-bound decode")
        )
        return order[v.state], v.beyond, minor and holds, holds and led and not few, not few, -share

    return sorted(verdicts, key=key)
