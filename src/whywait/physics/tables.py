"""Reads TOML tables: those that ship with the package and a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whywait.core import bounded
from whywait.errors import UsageError


def parse(text: str, name: str) -> dict[str, Any]:
    """
    Raises:
        UsageError: not TOML.
    """
    try:
        return bounded.toml(text)
    except ValueError as exc:
        raise UsageError(f"{name} cannot be read as TOML: {exc}") from exc


def load(path: Path, page: str = "docs/simulate.md") -> dict[str, Any]:
    """``page`` is where the documentation tells what such a file holds.

    Raises:
        UsageError: no such file, not text, not TOML.
    """
    try:
        return parse(bounded.read_text(path, 16 * bounded.MIB), str(path))
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} cannot be read: {exc}", f"a TOML file that exists; see {page}") from exc
