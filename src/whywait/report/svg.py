"""Escaped HTML and SVG, made here: text that stays text, scales, plots, tables, figures, and how they look.

A plot is an ``<svg>`` without a view box: x is a share of its width (0..1), y is in pixels, so it can have any width
while its text stays readable. Lines of many points lie in a nested, stretched ``<svg>``. A place ``at`` is (x, y).
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from whywait.units import number

At = tuple[float, float]
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_LETTER = 6.6  # px, about the width of a letter of a plot's text


class Html(str):
    """Markup that is safe already; any other string is escaped by :func:`esc`."""

    __slots__ = ()

    def __add__(self, other: object) -> Html:
        return Html(str.__add__(self, esc(other)))

    def __radd__(self, other: object) -> Html:
        return Html(str.__add__(esc(other), self))


def esc(value: object) -> Html:
    """``value`` as text inside markup or a quoted attribute; characters that are not for reading become U+FFFD."""
    return value if isinstance(value, Html) else Html(html.escape(_HIDDEN.sub("\ufffd", str(value)), quote=True))


def tag(name: str, body: object = "", **attrs: object) -> Html:
    """``<name …>body</name>``, all escaped; ``class_`` and ``aria_label`` become class and aria-label; None is left
    out."""
    text = "".join(f' {k.rstrip("_").replace("_", "-")}="{esc(v)}"' for k, v in attrs.items() if v is not None)
    return Html(f"<{name}{text}>{esc(body)}</{name}>")


def cat(parts: Iterable[object]) -> Html:
    return Html("".join(esc(p) for p in parts))


def clip(value: object, most: int = 60) -> str:
    text = str(value)
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

    def group(self, tip: object) -> None:
        """What follows, up to :meth:`end_group`, shares a tip."""
        self._parts.append(f"<g><title>{esc(tip)}</title>")

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

    def put(self, at: At, text: str, class_: str = "label halo", wide: bool = False) -> None:
        """Beside ``at`` (``wide``: clear of a ring); left out where no place is free, since the table has it."""
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
                return


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


STYLE = """
:root{--bg:#f6f6f3;--card:#fff;--ink:#1b1f27;--mute:#596070;--line:#dfe2e8;--link:#24599f;--warn:#fff3d6;--slo:#a2321a;
--client:#535355;--network:#ad6db5;--frontend:#36896d;--queue:#e6a413;--prefill:#7bb3d8;--decode:#3f5fa0;
--stall:#cc4726;--tail:#c7c08b;--unknown:#d5d7dd;--hatch:#8a8f9a;--idle:#f1f2f4;--holds:#a83a1c;--undecided:#7d5a00;
--fails:#2d6f55;--curve:#3f5fa0;--s0:#76c788;--s1:#3fb792;--s2:#10a399;--s3:#038d9a;--s4:#027797;--s5:#026197;
--s6:#26488c;--s7:#343078;--s8:#38185f}
@media screen and (prefers-color-scheme:dark){:root{--bg:#14171c;--card:#1c2027;--ink:#e7e9ee;--mute:#a3abb9;
--line:#333944;--link:#8fb8f2;--warn:#3d3213;--slo:#ff9d84;--client:#848993;--network:#c681ea;--frontend:#79bb9c;
--queue:#f4b13b;--prefill:#90dbf7;--decode:#246eb8;--stall:#db5b3a;--tail:#e1e79d;--unknown:#46484b;--hatch:#8b909a;
--idle:#272c35;--holds:#ff9d84;--undecided:#f0c469;--fails:#8fd3b4;--curve:#6da8ea;--s0:#7466b5;--s1:#627eca;
--s2:#4997d4;--s3:#2aaed4;--s4:#27c3ca;--s5:#52d4ba;--s6:#86e1a7;--s7:#baea96;--s8:#ecef8e}}
*{box-sizing:border-box}html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif}
header,main,footer{max-width:1280px;margin:0 auto;padding:0 20px;overflow-wrap:anywhere}header{padding-top:18px}
h1{font-size:clamp(20px,2.2vw,26px);line-height:1.25;margin:4px 0 6px}h1.long{font-size:clamp(18px,1.7vw,21px)}
h2{font-size:19px;margin:28px 0 8px}h3{font-size:15px;line-height:1.35;margin:0}p{margin:0 0 6px}
a{color:var(--link)}:focus-visible{outline:2px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-9999px}.skip:focus{left:8px;top:8px;background:var(--card);padding:6px 10px}
.brand{font-weight:600;color:var(--mute);margin:0}.meta,.note,.how{color:var(--mute);font-size:13px}
nav ul{display:flex;flex-wrap:wrap;gap:2px 16px;list-style:none;margin:4px 0 0;padding:0;font-size:14px}
.banner{background:var(--warn);border:1px solid var(--undecided);border-radius:8px;padding:7px 12px;margin:8px 0 0}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,225px),1fr));margin-bottom:14px}
.grid.two{grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr))}
.grid.three{grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:11px 15px;margin:0;min-width:0}
details.card{margin-bottom:10px}details.card>summary{font-size:15px;font-weight:600}
.verdict{border-left:4px solid var(--state)}.verdict h3{font-size:14.5px}.lead{margin-bottom:14px}
.lead h3{font-size:16px}
.state{color:var(--state);font-weight:600;
font-size:13px;margin:0}.state .how{font-weight:400}.holds{--state:var(--holds)}.undecided{--state:var(--undecided)}
.fails{--state:var(--fails)}.cols{display:grid;gap:0 28px;
grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr))}
.share{font-size:13.5px;margin:1px 0 2px}.share b{font-size:18px;margin-right:5px}.lead .share b{font-size:24px}
dl{margin:0;font-size:14px}dt{color:var(--mute);font-size:12.5px;margin-top:4px}dd{margin:0}
.facts{display:grid;gap:0 28px;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr))}.facts dt{
font-weight:600}.verdict ul{margin:0;padding-left:17px}summary{cursor:pointer;color:var(--link);font-size:13.5px;
padding:3px 0}
.reading{font-size:14px;margin:2px 0 6px}.legend{display:flex;flex-wrap:wrap;gap:2px 14px;list-style:none;
margin:0 0 4px;padding:0;font-size:12.5px}.legend li{display:flex;align-items:center;gap:5px}
.swatch{width:13px;height:13px}
.plot svg{display:block;overflow:visible}.plot text{font-size:12px;fill:var(--ink)}.plot path{fill:none}
.plot .tick{fill:var(--mute);font-size:11.5px}.plot .label{font-weight:600}.plot .ink{font-size:11.5px;fill:#14171c}
.plot .halo{paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}.axis{stroke:var(--mute)}
.rule{stroke:var(--line)}.plot path{vector-effect:non-scaling-stroke}.line-p50{stroke:var(--curve);stroke-width:2}
.line-p95{stroke:var(--curve);stroke-width:1.3;stroke-dasharray:4 4}.whisker{stroke:var(--curve);stroke-width:3;
opacity:.5}.thin{stroke-width:1.2}.plot .p50{fill:var(--curve);stroke:var(--card)}.plot .p95{fill:var(--card);
stroke:var(--curve);stroke-width:1.5}.plot .knee{fill:none;stroke:var(--queue);stroke-width:3}.slo{stroke:var(--slo);
stroke-width:1.5;stroke-dasharray:7 4}.plot .slo-label{fill:var(--slo)}.bound{stroke:var(--ink);stroke-width:2}
.ecdf{stroke-width:2}.dashed{stroke-dasharray:5 3}.cross{stroke:var(--slo);stroke-width:2}.g-running,.g-kv_use{
stroke:var(--ink);stroke-width:1.6}.g-waiting{stroke:var(--queue);stroke-width:2.2}.seg{stroke:var(--card)}
.plot .i-decode,.plot .i-stall,.plot .i-client,.plot .i-frontend{fill:#fff}.plot .i-idle{fill:var(--mute)}
@media screen and (prefers-color-scheme:dark){.plot .i-client,.plot .i-frontend,.plot .i-stall{fill:#14171c}
.plot .i-unknown{fill:#fff}}
.f-client{fill:var(--client)}.f-network{fill:var(--network)}.f-frontend{fill:var(--frontend)}
.f-queue{fill:var(--queue)}
.f-prefill{fill:var(--prefill)}.f-decode{fill:var(--decode)}.f-stall{fill:var(--stall)}.f-tail{fill:var(--tail)}
.f-unknown{fill:url(#hatch)}.f-kv{fill:url(#hatch-kv)}.f-throttled{fill:url(#hatch-hot)}
.f-idle{fill:var(--idle);stroke:var(--hatch);stroke-width:.7}
.s0{stroke:var(--s0)}.s1{stroke:var(--s1)}.s2{stroke:var(--s2)}.s3{stroke:var(--s3)}.s4{stroke:var(--s4)}
.s5{stroke:var(--s5)}.s6{stroke:var(--s6)}.s7{stroke:var(--s7)}.s8{stroke:var(--s8)}
.scroll{overflow-x:auto;max-width:100%;margin:4px 0}.tall{max-height:420px;overflow-y:auto}
table{border-collapse:collapse;overflow-wrap:break-word;font-size:13px;font-variant-numeric:tabular-nums;
background:var(--card)}
caption{text-align:left;color:var(--mute);padding:2px 0 4px}th,td{padding:3px 10px;text-align:right;font-weight:400;
border-bottom:1px solid var(--line);vertical-align:top;white-space:nowrap}thead th{font-weight:600;
vertical-align:bottom}tbody th,
thead th:first-child{text-align:left}th{white-space:normal}tbody th{min-width:118px;position:sticky;left:0;
background:var(--card)}
td small{display:block;
color:var(--mute);font-size:11.5px;white-space:nowrap}abbr{text-decoration:none;cursor:help}.text td,.text th{
text-align:left}.text td{min-width:150px;white-space:pre-wrap}code{font:13px/1.45 ui-monospace,monospace;
white-space:pre-wrap}footer{padding:20px 20px 40px}
@media(max-width:600px){header,main,footer{padding-left:12px;padding-right:12px}.card{padding:10px 11px}}
@media print{@page{margin:12mm}body{background:#fff;font-size:12px}nav,.skip,.noprint{display:none}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}figure.card,article,tr{break-inside:avoid}h2,h3,summary{
break-after:avoid}.scroll{overflow:visible;max-height:none}details:not(.noprint)::details-content{
content-visibility:visible;block-size:auto}.grid.two,.grid.three{grid-template-columns:1fr}td,th{
white-space:normal;padding:2px 6px}table{font-size:10.5px}}
"""
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
