"""Reads TOML tables: those that ship with the package and a user's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from whywait.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse(text: str, name: str) -> dict[str, Any]:
    """
    Raises:
        UsageError: not TOML.
    """
    try:
        return dict(tomllib.loads(text))
    except ValueError as exc:
        raise UsageError(f"{name} cannot be read as TOML: {exc}") from exc


def load(path: Path, page: str = "docs/simulate.md") -> dict[str, Any]:
    """``page`` is where the documentation tells what such a file holds.

    Raises:
        UsageError: no such file, not text, not TOML.
    """
    try:
        return parse(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} cannot be read: {exc}", f"a TOML file that exists; see {page}") from exc
