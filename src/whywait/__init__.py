"""whywait: what is your LLM service actually waiting on, and what would fix it?

The functions of :mod:`whywait.api` are here by name (``whywait.run(…)``), loaded when first used;
``__init__.pyi`` tells their types.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = [
    "Result",
    "Trial",
    "WhywaitError",
    "__version__",
    "ab",
    "aio",
    "bill",
    "catalog",
    "compare",
    "diagnose",
    "doctor",
    "export",
    "find",
    "history",
    "import_results",
    "plan",
    "probe_service",
    "quality",
    "resume",
    "run",
    "show",
    "simulate",
    "sweep",
    "try_technique",
    "watch",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name == "aio":
        return importlib.import_module("whywait.aio")
    if name == "WhywaitError":
        return importlib.import_module("whywait.errors").WhywaitError
    if name in __all__:
        return getattr(importlib.import_module("whywait.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*(k for k in globals() if k.startswith("__")), *__all__})
