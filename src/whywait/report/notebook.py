"""What the terminal is told, as HTML for a notebook: one rendering of a result, in both places."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console

from whywait.report.text import Plain

WIDTH = 120
STYLE = "white-space:pre;overflow-x:auto;line-height:1.25;font-family:Menlo,Consolas,monospace"
FRAME = f'<pre style="{STYLE}">{{code}}</pre>'


def as_html(tell: Callable[[Console], None]) -> str:
    """What ``tell`` prints on a console, as one ``<pre>`` with the styles in it; what a service said stays text."""
    out = Plain(file=io.StringIO(), record=True, width=WIDTH, force_terminal=False, color_system=None, highlight=False)
    tell(out)
    return out.export_html(inline_styles=True, code_format=FRAME)
