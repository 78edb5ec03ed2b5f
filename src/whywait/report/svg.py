"""Escaped HTML and SVG, made here: text that stays text, scales, plots, tables, figures, and how they look.

A plot is an ``<svg>`` without a view box: x is a share of its width (0..1), y is in pixels, so it can have any width
while its text stays readable. Lines of many points lie in a nested, stretched ``<svg>``. A place ``at`` is (x, y).
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from whywait.core.secrets import clean
from whywait.units import number

At = tuple[float, float]
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_PROSE = {"dd", "h1", "h3", "li", "p", "td"}
_LETTER = 6.6  # px, about the width of a letter of a plot's text


class Html(str):
    """Markup that is safe already; any other string is escaped by :func:`esc`."""

    __slots__ = ()

    def __add__(self, other: object) -> Html:
        return Html(str.__add__(self, esc(other)))

    def __radd__(self, other: object) -> Html:
        return Html(str.__add__(esc(other), self))


def esc(value: object) -> Html:
    """``value`` as text inside markup or a quoted attribute; characters that are not for reading become U+FFFD. Keys
    and passwords are cut out here, before escaping could disguise them."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(_HIDDEN.sub("\ufffd", clean(str(value))), quote=True))


def tag(name: str, body: object = "", **attrs: object) -> Html:
    """``<name …>body</name>``, all escaped; ``class_`` and ``aria_label`` become class and aria-label; None is left
    out. Flags in the text of prose and cells stay whole (:func:`unbroken`)."""
    text = unbroken(body) if name in _PROSE else esc(body)
    return Html(f"<{name}{_attrs(attrs)}>{text}</{name}>")


def unbroken(text: object) -> Html:
    """``text`` escaped, its command-line flags (``--max-seqs``) not to be broken at their hyphens; markup as it is."""
    return esc(text) if isinstance(text, Html) else Html(_FLAG.sub(r'<span class="flag">\g<0></span>', esc(text)))


def cat(parts: Iterable[object]) -> Html:
    return Html("".join(esc(p) for p in parts))


def clip(value: object, most: int = 60) -> str:
    text = clean(str(value))  # before it is cut: a part of a key is one too
    return text if len(text) <= most else text[: most - 1] + "…"


def flat(key: str, value: Any) -> Iterable[tuple[str, str]]:
    """Nested facts as dotted names and short texts; null is –."""
    if isinstance(value, dict) and value:
        for k, v in value.items():
            yield from flat(f"{key}.{clip(k)}", v)
    elif isinstance(value, (list, tuple)) and any(isinstance(v, dict) for v in value):
        for i, v in enumerate(value):
            yield from flat(f"{key}.{i}", v)
    elif isinstance(value, (list, tuple)):
        yield key, clip(", ".join(map(str, value)) or "–", 600)
    else:
        yield key, "–" if value is None or value in ({}, "") else clip(value, 600)


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
        for step in (unit * m for m in (10, 5, 2, 1, 0.5, 0.2)):  # the first that is fine enough and leaves two ticks
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            if last - first >= 1 and (step < raw * 1.999 or last - first >= most - 2):
                break
        return [i * step for i in range(first, last + 1)]


def scale_for(values: Iterable[float | None], log: bool | None = None, zero: bool = True) -> Scale:
    """A scale that holds ``values`` with some room; logarithmic (by default where they span 1 : 12), else from 0
    (without ``zero``: from about the lowest)."""
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
    room = max(high - low, 0.1 * high) * 0.15
    return Scale(0.0 if zero or low < 0.2 * high else max(low - room, 0.0), high * 1.08 if zero else high + room)


def ms_scale(values: Iterable[float | None], zero: bool = True) -> tuple[Scale, float, str]:
    """A scale for milliseconds, what to divide them by, and the unit that leaves."""
    known = [v for v in values if v is not None]
    per, unit = (1000.0, "s") if known and max(known) >= 10_000 else (1.0, "ms")
    return scale_for((v / per for v in known), None, zero), per, unit


def tick_text(value: float) -> str:
    """A round value for an axis: three figures without trailing zeros."""
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


class Plot:
    """Collects marks; :meth:`svg` gives the whole, with its title and description for those who cannot see it."""

    def __init__(self, height: int, left: int = 50, right: int = 16, top: int = 12, bottom: int = 34) -> None:
        self.height, self._left = height, left
        self._padding = f"{top}px {right}px {bottom}px {left}px"
        self._parts: list[str] = []

    def text(self, at: At, value: object, class_: str = "", anchor: str = "start", dx: float = 0) -> None:
        shift = f' dx="{dx:g}"' if dx else ""
        align = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(f"<text{_at('x y', at)}{shift}{align}{_class(class_)}>{esc(value)}</text>")

    def rect(self, at: At, size: At, class_: str = "", tip: object = "") -> None:
        self._parts.append(f"<rect{_at('x y', at)}{_at('width height', size)}{_class(class_)}{_tip('rect', tip)}")

    def line(self, a: At, b: At, class_: str = "") -> None:
        self._parts.append(f"<line{_at('x1 y1', a)}{_at('x2 y2', b)}{_class(class_)}/>")

    def mark(self, at: At, shape: str, class_: str = "", tip: object = "") -> None:
        """A small sign: ``dot``, ``ring``, ``diamond`` or ``cross``."""
        name, shape = {"dot": ("circle", 'r="4.5"'), "ring": ("circle", 'r="9"'),
                       "cross": ("path", 'd="M-3-3 3 3M3-3-3 3"'),
                       "diamond": ("path", 'd="M0-6.5 6.5 0 0 6.5-6.5 0z"')}[shape]  # fmt: skip
        self._parts.append(f"<svg{_at('x y', at)}><{name} {shape}{_class(class_)}{_tip(name, tip)}</svg>")

    def path(self, points: Sequence[At], class_: str = "", tip: object = "", steps: bool = False) -> None:
        """A line through the points; with ``steps`` each y holds until the next x."""
        out, before = [], ""
        for x, y in points:
            right, down = f"{x * 1000:.1f}".removesuffix(".0"), f"{y:.1f}".removesuffix(".0")
            out += [f"H{right}V{down}" if steps and before else f"L{right} {down}"]
            before = down
        if out:
            self._parts.append(
                f'<svg viewBox="0 0 1000 {self.height}" preserveAspectRatio="none" width="100%" height="{self.height}">'
                f'<path d="M{"".join(out)[1:]}"{_class(class_)}{_tip("path", tip)}</svg>'
            )

    def group(self, tip: object = "", **attrs: object) -> None:
        """What follows, up to :meth:`end_group`, shares a tip, or attributes (as in :func:`tag`)."""
        self._parts.append(f"<g{_attrs(attrs)}>" + (f"<title>{esc(tip)}</title>" if tip else ""))

    def end_group(self) -> None:
        self._parts.append("</g>")

    def x_axis(self, scale: Scale, title: str, most: int = 6) -> None:
        self.line((0, self.height), (1, self.height), "axis")
        for t in scale.ticks(most):
            self.line((scale(t), 0), (scale(t), self.height + 4), "rule")
            self.text((scale(t), self.height + 16), tick_text(t), "tick", "middle")
        self.text((1, self.height + 31), title, "tick", "end")

    def y_axis(self, scale: Scale, title: str, span: At | None = None, most: int = 6) -> None:
        """Between two heights (top, bottom); default the whole plot. The title stands above."""
        top, bottom = span or (0.0, float(self.height))
        for t in scale.ticks(most):
            y = bottom - scale(t) * (bottom - top)
            self.line((0, y), (1, y), "rule")
            self.text((0, y + 4), tick_text(t), "tick", "end", -7)
        self.text((0, top - 9), title, "tick halo", "start", 4 - self._left)

    def strip(self, top: float, title: str, scale: Scale, lines: Iterable[tuple[str, Sequence[At]]]) -> None:
        """A low panel with a scale of its own: lines as (class, points of (x, value)); a value holds until the next."""
        self.y_axis(scale, title, (top, top + 46), 4)
        for class_, points in lines:
            self.path([(x, top + 46 * (1 - scale(v))) for x, v in points], class_, "", True)

    def svg(self, title: str, desc: str, key: str) -> Html:
        return Html(
            f'<div class="plot" style="padding:{self._padding}">'
            f'<svg role="img" aria-labelledby="{key}-t {key}-d" width="100%" height="{self.height}">'
            f'<title id="{key}-t">{esc(title)}</title><desc id="{key}-d">{esc(desc)}</desc>'
            f"{''.join(self._parts)}</svg></div>"
        )


class Labels:
    """Places short texts beside marks so that they do not cover each other or a mark."""

    _TRIES = ((9, 4, "start"), (-9, 4, "end"), (0, -10, "middle"), (0, 19, "middle"), (9, -9, "start"),
              (9, 17, "start"))  # fmt: skip

    def __init__(self, plot: Plot, width: float = 250.0) -> None:
        self._plot, self._width = plot, width  # that of a phone: what fits there fits everywhere
        self._taken: list[tuple[float, float, float, float]] = []

    def keep_clear(self, at: At, radius: float = 5) -> None:
        x = at[0] * self._width
        self._taken.append((x - radius, at[1] - radius, x + radius, at[1] + radius))

    def keep_line(self, points: Sequence[At]) -> None:
        """No text over the steps through ``points`` (share, px): each y holds until the next x."""
        for (x, y), (until, then) in itertools.pairwise(points):
            a, b = x * self._width, until * self._width
            self._taken += [(a, y - 1, b, y + 1), (b - 1, min(y, then), b + 1, max(y, then))]

    def put(self, at: At, text: str, class_: str = "label halo", wide: bool = False) -> bool:
        """Beside ``at`` (``wide``: clear of a ring); False and left out where no place is free, since the table has
        it."""
        long = len(text) * _LETTER
        for dx, dy, anchor in self._TRIES:
            if wide:
                dx, dy = round(dx * 1.5), dy + (-5 if dy < 0 else 5 if dy > 9 else 0)
            left = at[0] * self._width + dx - {"start": 0, "end": long, "middle": long / 2}[anchor]
            box = (left, at[1] + dy - 10, left + long, at[1] + dy + 2)
            inside = box[0] >= -4 and box[2] <= self._width + 10 and box[1] >= -8 and box[3] <= self._plot.height
            if inside and not any(_overlap(box, b) for b in self._taken):
                self._taken.append(box)
                self._plot.text((at[0], at[1] + dy), text, class_, anchor, dx)
                return True
        return False


def lanes(spans: Sequence[At], most: int) -> dict[int, int]:
    """Index of each span (ascending by start) → the lowest lane free then; what would need more lanes is left out."""
    free: list[float] = []
    out: dict[int, int] = {}
    for i, (begin, end) in enumerate(spans):
        lane = next((k for k, until in enumerate(free) if until <= begin), len(free))
        free[lane : lane + 1] = [end]
        if lane < most:
            out[i] = lane
    return out


def table(head: Sequence[object], rows: Iterable[Sequence[object]], caption: object, class_: str = "") -> Html:
    """A table in a box that scrolls and takes the keyboard; the first cell of a row is its heading."""
    top = cat(tag("th", h, scope="col") for h in head)
    body = cat(tag("tr", tag("th", row[0], scope="row") + cat(tag("td", c) for c in row[1:])) for row in rows)
    inner = tag("caption", caption) + tag("thead", tag("tr", top)) + tag("tbody", body)
    box = {"class_": f"scroll {class_}".strip(), "tabindex": "0", "role": "region", "aria_label": caption}
    return tag("div", tag("table", inner), **box)


def details(summary: object, body: object, open_: bool = False, class_: str = "data") -> Html:
    head = f'<details class="{class_}"{" open" if open_ else ""}>'
    return Html(f"{head}{tag('summary', summary)}{esc(body)}</details>")


def interval(value: float | None, ci: Any, show: Callable[[float | None], str]) -> object:
    """A value with its interval small below it, and a ? where the upper bound is unknown."""
    if value is None or not ci:
        return show(value)
    low, high = ("?" if v is None else show(v) for v in ci)
    if low.split()[1:] == high.split()[1:]:
        low = low.split()[0]
    sign = tag("abbr", " ?", title="upper 95 % bound unknown: too few requests") if ci[1] is None else ""
    return cat([show(value), sign, tag("small", f"{low} – {high}") if ci[0] is not None else ""])


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """(class of the fill, words) each."""
    box = '<svg class="swatch" aria-hidden="true"><rect width="100%" height="100%" class="{}"/></svg>'
    return tag("ul", cat(tag("li", Html(box.format(esc(c))) + words) for c, words in entries), class_="legend")


def figure(title: str, reading: str, body: Sequence[object], key: str) -> Html:
    """A chart with its one-line reading above it; ``body`` is what follows (legend, plot, notes, table)."""
    head = tag("figcaption", tag("h3", title, id=f"{key}-h") + tag("p", reading, class_="reading"))
    return tag("figure", head + cat(body), class_="card", aria_labelledby=f"{key}-h")


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _attrs(attrs: dict[str, object]) -> str:
    return "".join(f' {k.rstrip("_").replace("_", "-")}="{esc(v)}"' for k, v in attrs.items() if v is not None)


def _at(names: str, at: At) -> str:
    """Two attributes: a share of the width, and pixels."""
    across, down = names.split()
    share = f"{at[0] * 100:.2f}".rstrip("0").rstrip(".") + "%" if at[0] else "0"
    return f' {across}="{share}" {down}="{at[1]:.4g}"'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _tip(name: str, tip: object) -> str:
    """The end of an element: closed at once, or with a title inside."""
    return f"><title>{esc(tip)}</title></{name}>" if tip else "/>"


STYLE = files("whywait.report").joinpath("page.css").read_text("utf-8")
PATTERNS = Html(
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>'
    + "".join(
        f'<pattern id="hatch{key}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" style="fill:var(--{back})"/>'
        f'<rect width="1.6" height="6" style="fill:var(--{line})"/></pattern>'
        for key, back, line in (("", "unknown", "hatch"), ("-kv", "queue", "ink"), ("-hot", "stall", "ink"))
    )
    + "</defs></svg>"
)
