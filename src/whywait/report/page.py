"""The frame of a page: its sentence, what it is of, sections with links to them; and that of a page about two arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from whywait.report import svg
from whywait.report.html import HEAD
from whywait.report.svg import Html, cat, clip, tag
from whywait.units import in_short


def page(result: Mapping[str, Any], parts: Sequence[tuple[str, str, Html]], brand: str, kept: str) -> str:
    """``result`` has ``headline, plan, partial, partial_reason, whywait_version``; ``parts`` are (id, title, body);
    ``kept`` says what there is of a partial one."""
    banners = []
    if result["partial"]:
        why = clip(in_short(str(result["partial_reason"])), 300)
        banners.append(tag("strong", "PARTIAL") + f": {why}. {kept}")
    arms = " · ".join(f"{k.upper()}: {clip(result['plan'][k], 160)}" for k in ("a", "b"))
    top = Top(brand, str(result["headline"]), arms, tuple(banners))
    return frame(top, parts, f"whywait {result['whywait_version']}")


class Top(NamedTuple):
    """What a page begins with: whose it is, its sentence, what it is of, and what must be known before reading on."""

    brand: str
    title: str
    meta: str
    banners: tuple[Html, ...] = ()


def frame(top: Top, parts: Sequence[tuple[str, str, Html]], foot: str) -> str:
    """A page that stands alone, without a script; ``parts`` are (id, title, body)."""
    links = tag("ul", cat(tag("li", tag("a", name, href=f"#{key}")) for key, name, _ in parts))
    head = [tag("p", top.brand, class_="brand"), *(tag("p", b, class_="banner") for b in top.banners)]
    head += [tag("h1", top.title, class_="long" if len(top.title) > 110 else None), tag("p", top.meta, class_="meta")]
    header = tag("header", cat(head) + tag("nav", links, aria_label="Sections"))
    main = tag("main", cat(tag("section", tag("h2", name) + part, id=key) for key, name, part in parts))
    meta = HEAD + tag("title", f"whywait: {clip(top.title, 120)}") + Html(f"<style>{svg.STYLE}</style>")
    body = cat([svg.PATTERNS, header, main, tag("footer", foot, class_="note")])
    return f'<!doctype html>\n<html lang="en"><head>{meta}</head>\n<body>{body}</body></html>\n'
