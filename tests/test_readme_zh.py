"""README.zh.md is kept in step with README.md by structure: headings, code, rows of tables, links, names in code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))
MIXED = "README.zh.md and README.md differ"


def parts(text: str) -> tuple[list[tuple[str, list[str]]], str]:
    """Blocks of code as (language, lines without comments), and the text around them."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    code = [(lang, [re.sub(r"\s+# .*$", "", line).rstrip() for line in body.splitlines()]) for lang, body in found]
    return code, re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def links(text: str) -> list[str]:
    return [x for x in re.findall(r"\]\(([^)]+)\)", text) if not re.fullmatch(r"README(\.zh)?\.md", x)]


def rows(text: str) -> list[tuple[int, str]]:
    """(cells, first cell) of each row that begins with a path."""
    return [(line.count(" | "), line.split(" | ")[0]) for line in text.splitlines() if line.startswith("| `")]


def test_headings_and_paragraphs_correspond() -> None:
    levels = [[len(h) for h in re.findall(r"^(#+) ", parts(t)[1], re.MULTILINE)] for t in (ENGLISH, CHINESE)]
    assert levels[0] == levels[1], MIXED
    kinds = [[p[:1] if p[:1] in "#|-!" else "text" for p in parts(t)[1].split("\n\n") if p.strip()]
             for t in (ENGLISH, CHINESE)]  # fmt: skip
    assert kinds[0] == kinds[1], MIXED
    bullets = [len(re.findall(r"^- ", parts(t)[1], re.MULTILINE)) for t in (ENGLISH, CHINESE)]
    assert bullets[0] == bullets[1], MIXED


def test_code_is_the_same_but_for_comments() -> None:
    english, chinese = parts(ENGLISH)[0], parts(CHINESE)[0]
    assert [lang for lang, _ in english] == [lang for lang, _ in chinese], MIXED
    for (_, a), (_, b) in zip(english, chinese, strict=True):
        assert a == b, MIXED


def test_tables_and_links_are_the_same() -> None:
    assert rows(ENGLISH) == rows(CHINESE), MIXED
    assert links(ENGLISH) == links(CHINESE), MIXED


def test_flags_paths_and_exit_codes_in_the_text_are_the_same() -> None:
    named = [sorted(re.findall(r"`([^`]+)`", parts(t)[1])) for t in (ENGLISH, CHINESE)]
    assert named[0] == named[1], MIXED
    codes = [re.findall(r"\b\d+\b", next(p for p in t.split("\n\n") if "`--strict`" in p)) for t in (ENGLISH, CHINESE)]
    assert sorted(codes[0]) == sorted(codes[1]), MIXED


def test_it_is_chinese_and_each_leads_to_the_other() -> None:
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", parts(CHINESE)[1])
    assert len(re.findall(r"[\u4e00-\u9fff]", prose)) > 1_000
    assert "](README.zh.md)" in ENGLISH
    assert "](README.md)" in CHINESE


def test_readme_lists_every_page_of_docs() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert f"docs/{page.name}" in ENGLISH or page.name == "index.md", f"README does not list docs/{page.name}"


def test_the_picture_is_small_and_of_a_kept_run() -> None:
    picture = (ROOT / "docs/img/report.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 300_000
    named = re.findall(r"`(exam/[\w-]+)`", ENGLISH)
    assert named
    assert all((ROOT / n).is_dir() for n in named)
