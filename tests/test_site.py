"""The site of docs/: every page is in it, every link leads somewhere, and nothing is fetched from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def nav() -> list[str]:
    return re.findall(r"([\w./-]+\.md)\b", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1])


def prose(page: Path) -> str:
    """Without blocks of code, and without code in a line: what stands there is no link."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE) + re.findall(
        r"^#+ (.+)$", page.read_text(), re.MULTILINE
    )
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", h.lower())).strip("-") for h in heads}


def test_the_nav_holds_every_page_once() -> None:
    listed = nav()
    assert sorted(listed) == sorted({*listed}), "a page is listed twice"
    pages = {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}
    assert not pages - {*listed}, f"add to nav of mkdocs.yml: {sorted(pages - {*listed})}"
    assert not {*listed} - pages, f"not there: {sorted({*listed} - pages)}"


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "README.zh.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link
        if DOCS in page.parents and path:
            assert DOCS in target.resolve().parents, f"{link} leads out of the site"


def test_the_site_builds_strictly_and_needs_no_network(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs the 'docs' extra: pip install 'whywait[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(nav())
    for page in pages:
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)\"", text)
        fetched += re.findall(r"<link\b[^>]*\brel=\"(?:stylesheet|icon|shortcut icon|preload|preconnect)\"[^>]*>", text)
        assert fetched, page
        assert not [f for f in fetched if re.search(r"(?:https?:)?//\w", f)], page
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", sheet.read_text()), sheet
