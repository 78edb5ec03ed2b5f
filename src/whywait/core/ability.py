"""One line of what can be measured: its name, whether it can be, what was seen, what rests on it, what enables it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

#: ``unknown``: it could not be found out without load, or without the other machine's help.
STATES = ("can", "partly", "cannot", "unknown")


@dataclass(frozen=True)
class Ability:
    """``seen`` is what was found, ``serves`` the figures and verdicts that rest on it, ``enable`` the command or flag
    that would change it ('' where there is nothing to do, or nothing can be done)."""

    name: str
    state: str
    seen: str
    serves: str = ""
    enable: str = ""

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"{self.state!r} is no state of an ability")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def counted(found: Iterable[Ability]) -> dict[str, int]:
    """How many are in each state."""
    states = [a.state for a in found]
    return {s: states.count(s) for s in STATES}
