"""The frame of a page about two arms: headline, arms, sections with links to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whywait.report import svg
from whywait.report.html import HEAD
from whywait.report.svg import Html, cat, clip, tag


def page(result: Mapping[str, Any], parts: Sequence[tuple[str, str, Html]], brand: str, kept: str) -> str:
    """``result`` has ``headline, plan, partial, partial_reason, whywait_version``; ``parts`` are (id, title, body);
    ``kept`` says what there is of a partial one."""
    title = str(result["headline"])
    links = tag("ul", cat(tag("li", tag("a", name, href=f"#{key}")) for key, name, _ in parts))
    top = [tag("p", brand, class_="brand")]
    if result["partial"]:
        why = clip(str(result["partial_reason"]).splitlines()[0], 300)
        top.append(tag("p", tag("strong", "PARTIAL") + f": {why}. {kept}", class_="banner"))
    arms = " · ".join(f"{k.upper()}: {clip(result['plan'][k], 160)}" for k in ("a", "b"))
    top += [tag("h1", title, class_="long" if len(title) > 110 else None), tag("p", arms, class_="meta")]
    header = tag("header", cat(top) + tag("nav", links, aria_label="Sections"))
    main = tag("main", cat(tag("section", tag("h2", name) + part, id=key) for key, name, part in parts))
    foot = tag("footer", f"whywait {result['whywait_version']}", class_="note")
    head = HEAD + tag("title", f"whywait: {clip(title, 120)}") + Html(f"<style>{svg.STYLE}</style>")
    return (f'<!doctype html>\n<html lang="en"><head>{head}</head>\n'
            f"<body>{cat([svg.PATTERNS, header, main, foot])}</body></html>\n")  # fmt: skip
