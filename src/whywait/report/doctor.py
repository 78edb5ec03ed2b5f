"""What can and cannot be measured, as text: a line each, grouped, with what would enable the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from whywait.core.ability import STATES, Ability, counted
from whywait.report.text import console

STYLE = {"can": "green", "partly": "yellow", "cannot": "red", "unknown": "dim"}
WORD, NAME = 8, 20


def print_doctor(sections: Mapping[str, Sequence[Ability]], out: Console | None = None) -> None:
    """State, name, what was seen; below, where it cannot be measured, what rests on it and what would enable it."""
    out = out or console()
    for title, lines in sections.items():
        out.print(Text(f"\n{title}", style="bold"))
        for a in lines:
            head = Text.assemble("  ", (f"{a.state:<{WORD}}", STYLE[a.state]), f"{a.name:<{NAME}} ", a.seen)
            out.print(head, soft_wrap=True)
            if a.state != "can" and a.serves:
                out.print(Text(f"{'':<{WORD + NAME + 3}}for: {a.serves}", style="dim"), soft_wrap=True)
            if a.enable:
                out.print(Text(f"{'':<{WORD + NAME + 3}}→ {a.enable}"), soft_wrap=True)
    n = counted(a for lines in sections.values() for a in lines)
    out.print(Text("\n" + ", ".join(f"{n[s]} {s}" for s in STATES if n[s]), style="bold"))
