"""Escaped HTML and SVG, made here: text that stays text, scales, plots whose letters keep their size, tables, figures.

A plot is an ``<svg>`` without a view box: x is a share of its width (0..1), y is in pixels, so it can be any width while
text stays readable. Lines of many points lie in a nested, stretched ``<svg>``.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whywait.units import number

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
CHAR = 6.3  # px, about the width of a letter of a plot's text


class Html(str):
    """Markup that is safe already; any other string is escaped by :func:`esc`."""

    __slots__ = ()


def esc(value: object) -> Html:
    """``value`` as text inside markup or a quoted attribute; characters that are not for reading become U+FFFD."""
    return value if isinstance(value, Html) else Html(html.escape(_HIDDEN.sub("\ufffd", str(value)), quote=True))


def tag(name: str, body: object = "", **attrs: object) -> Html:
    """``<name …>body</name>``, all escaped; ``class_`` and ``aria_label`` become class and aria-label; None is left out."""
    text = "".join(f' {k.rstrip("_").replace("_", "-")}="{esc(v)}"' for k, v in attrs.items() if v is not None)
    return Html(f"<{name}{text}>{esc(body)}</{name}>")


def cat(parts: Iterable[object], between: str = "") -> Html:
    return Html(between.join(esc(p) for p in parts))


@dataclass(frozen=True)
class Scale:
    """Values to 0..1, linear or logarithmic; what lies outside is drawn at the edge."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)

    def ticks(self, most: int = 6) -> list[float]:
        """At most about ``most`` round values inside."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [m * 10.0**e for e in range(first, last + 1) for m in steps]
                found = [t for t in found if self.low <= t <= self.high * 1.000001]
                if len(found) <= most:
                    break
            return found[:: max(1, math.ceil(len(found) / most))]
        raw = (self.high - self.low) / max(most - 1, 1)
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def scale_for(values: Iterable[float | None], log: bool | None = None) -> Scale:
    """A scale that holds ``values`` with some room; logarithmic (by default where they span 1 : 12), else from 0."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    positive = [v for v in known if v > 0]
    if not positive:
        return Scale(0.0, 1.0)
    low, high = min(positive), max(positive)
    if log is None:
        log = len(positive) == len(known) and high / low > 12
    if log:
        room = max((high / low) ** 0.05, 1.15)
        return Scale(low / room, high * room, True)
    return Scale(0.0, high * 1.08)


def tick_text(value: float) -> str:
    """A round value for an axis: three figures without trailing zeros."""
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


class Plot:
    """Collects marks; :meth:`svg` gives the whole, with its title and description for those who cannot see it."""

    def __init__(self, height: int, left: int = 50, right: int = 16, top: int = 12, bottom: int = 34) -> None:
        self.height = height
        self._margins = (top, right, bottom, left)
        self._parts: list[str] = []

    def text(self, x: float, y: float, value: object, class_: str = "", anchor: str = "start", dx: float = 0) -> None:
        shift = f' dx="{dx:g}"' if dx else ""
        align = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(f'<text x="{_pc(x)}" y="{y:.4g}"{shift}{align}{_class(class_)}>{esc(value)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, class_: str = "", tip: object = "") -> None:
        head = f'<rect x="{_pc(x)}" y="{y:.4g}" width="{_pc(width)}" height="{height:.4g}"{_class(class_)}'
        self._parts.append(head + (f"><title>{esc(tip)}</title></rect>" if tip else "/>"))

    def line(self, a: tuple[float, float], b: tuple[float, float], class_: str = "") -> None:
        ends = f'x1="{_pc(a[0])}" y1="{a[1]:.4g}" x2="{_pc(b[0])}" y2="{b[1]:.4g}"'
        self._parts.append(f"<line {ends}{_class(class_)}/>")

    def mark(self, x: float, y: float, shape: str, class_: str = "", tip: object = "") -> None:
        """A small sign: ``dot``, ``diamond``, ``ring`` or ``cross``."""
        body = {
            "dot": '<circle r="4.5"',
            "ring": '<circle r="9"',
            "diamond": '<path d="M0-6.5 6.5 0 0 6.5-6.5 0z"',
            "cross": '<path d="M-3-3 3 3M3-3-3 3"',
        }[shape]
        title = f"><title>{esc(tip)}</title></{body[1:].split()[0]}>" if tip else "/>"
        self._parts.append(f'<svg x="{_pc(x)}" y="{y:.4g}" class="free">{body}{_class(class_)}{title}</svg>')

    def path(self, points: Sequence[tuple[float, float]], class_: str = "", tip: object = "", steps: bool = False) -> None:
        """A line through (x, y); with ``steps`` each y holds until the next x."""
        if not points:
            return
        out, before = [], ""
        for x, y in points:
            here = f"{x * 1000:.1f}".removesuffix(".0"), f"{y:.1f}".removesuffix(".0")
            out.append(f"L{here[0]} {before}L{here[0]} {here[1]}" if steps and before else f"L{here[0]} {here[1]}")
            before = here[1]
        title = f"<title>{esc(tip)}</title>" if tip else ""
        self._parts.append(
            f'<svg viewBox="0 0 1000 {self.height}" preserveAspectRatio="none" width="100%" height="{self.height}">'
            f'<path d="M{"".join(out)[1:]}"{_class(class_)}>{title}</path></svg>'
        )

    def group(self, tip: object) -> None:
        """What follows, up to :meth:`end_group`, shares a tip."""
        self._parts.append(f"<g><title>{esc(tip)}</title>")

    def end_group(self) -> None:
        self._parts.append("</g>")

    def x_axis(self, scale: Scale, title: str, most: int = 6, y: float | None = None) -> None:
        y = self.height if y is None else y
        self.line((0, y), (1, y), "axis")
        for t in scale.ticks(most):
            x = scale(t)
            self.line((x, 0), (x, y + 4), "grid")
            self.text(x, y + 16, tick_text(t), "tick", "middle")
        self.text(1, y + 31, title, "tick", "end")

    def y_axis(self, scale: Scale, title: str, span: tuple[float, float] | None = None, most: int = 6) -> None:
        """Between two heights (top, bottom); default the whole plot. The title stands above."""
        top, bottom = span or (0.0, float(self.height))
        for t in scale.ticks(most):
            y = bottom - scale(t) * (bottom - top)
            self.line((0, y), (1, y), "grid")
            self.text(0, y + 4, tick_text(t), "tick", "end", -7)
        if title:
            self.text(0, top - 9, title, "tick", "start", -self._margins[3] + 4)

    def svg(self, title: str, desc: str, key: str) -> Html:
        top, right, bottom, left = self._margins
        return Html(
            f'<div class="plot" style="padding:{top}px {right}px {bottom}px {left}px">'
            f'<svg role="img" aria-labelledby="{key}-t {key}-d" width="100%" height="{self.height}">'
            f'<title id="{key}-t">{esc(title)}</title><desc id="{key}-d">{esc(desc)}</desc>'
            + "".join(self._parts)
            + "</svg></div>"
        )


class Labels:
    """Places short texts beside marks so that they do not cover each other or a mark."""

    _TRIES = ((9, 4, "start"), (-9, 4, "end"), (0, -10, "middle"), (0, 19, "middle"), (9, -9, "start"), (9, 17, "start"))

    def __init__(self, plot: Plot, width: float = 330.0) -> None:
        self._plot, self._width = plot, width  # narrower than most screens, so that a phone is served too
        self._taken: list[tuple[float, float, float, float]] = []

    def keep_clear(self, x: float, y: float, radius: float = 5) -> None:
        at = x * self._width
        self._taken.append((at - radius, y - radius, at + radius, y + radius))

    def put(self, x: float, y: float, text: str, class_: str = "label") -> None:
        """Beside (x, y); left out where no place is free (the table has it)."""
        wide = len(text) * CHAR
        for dx, dy, anchor in self._TRIES:
            left = x * self._width + dx - {"start": 0, "end": wide, "middle": wide / 2}[anchor]
            box = (left, y + dy - 10, left + wide, y + dy + 2)
            inside = box[0] >= -4 and box[2] <= self._width + 10 and box[1] >= -8 and box[3] <= self._plot.height
            if inside and not any(_overlap(box, b) for b in self._taken):
                self._taken.append(box)
                self._plot.text(x, y + dy, text, class_, anchor, dx)
                return


def table(head: Sequence[object], rows: Iterable[Sequence[object]], caption: object, class_: str = "") -> Html:
    """A table in a box that scrolls and takes the keyboard; the first cell of a row is its heading."""
    top = cat(tag("th", h, scope="col") for h in head)
    body = cat(
        Html(f"<tr>{tag('th', row[0], scope='row')}{cat(tag('td', c) for c in row[1:])}</tr>") for row in rows
    )
    inner = f"<caption>{esc(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return tag("div", Html(f"<table>{inner}</table>"), class_=f"scroll {class_}".strip(), tabindex="0", role="region",
               aria_label=caption)  # fmt: skip


def details(summary: object, body: object, open_: bool = False, class_: str = "data") -> Html:
    return Html(f'<details class="{class_}"{" open" if open_ else ""}><summary>{esc(summary)}</summary>{esc(body)}</details>')


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """(class of the fill, words) each."""
    items = cat(
        Html(f'<li><svg class="swatch" aria-hidden="true"><rect width="100%" height="100%" class="{esc(c)}"/></svg>'
             f"{esc(words)}</li>")
        for c, words in entries
    )  # fmt: skip
    return tag("ul", items, class_="legend")


def figure(title: str, reading: str, body: Sequence[object], key: str, wide: bool = False) -> Html:
    """A chart with its one-line reading above it; ``body`` is what follows (legend, plot, notes, table)."""
    head = f"<figcaption>{tag('h3', title, id=f'{key}-h')}{tag('p', reading, class_='reading')}</figcaption>"
    return tag("figure", cat([Html(head), *body]), class_="card wide" if wide else "card", aria_labelledby=f"{key}-h")


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _pc(share: float) -> str:
    return f"{share * 100:.2f}".rstrip("0").rstrip(".") + "%" if share else "0"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
