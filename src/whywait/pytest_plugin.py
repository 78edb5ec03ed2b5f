"""A pytest plugin: ``whywait_gate`` holds a run against a baseline that lies beside the tests; ``pytest
--whywait-save`` makes it anew. Loads nothing of whywait before a test asks for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

FOLDER = "whywait-baselines"
_HELP = "folder of the baselines of whywait_gate, from the root of the tests"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("whywait")
    group.addoption("--whywait-save", action="store_true", help="write the baselines of whywait_gate, compare nothing")
    group.addoption("--whywait-baselines", metavar="DIR", default=None, help=_HELP)
    parser.addini("whywait_baselines", _HELP, default=FOLDER)


@pytest.fixture
def whywait_gate(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any] | None]:
    """A function ``gate(run, *more, name="", fail_if=("worse",), strict=False, allow=())``: fails the test where
    ``run`` is worse than the baseline NAME.json (default: the name of the test). ``more`` are further runs of the same,
    kept in the baseline so that it knows how much runs differ; compared is the first. Returns the comparison, None when
    the baseline was saved. ``gate.ready(name="")``, before anything is measured, fails the test where there is no
    baseline to compare with."""
    config = request.config
    folder = Path(config.rootpath) / str(config.getoption("--whywait-baselines") or config.getini("whywait_baselines"))

    def path_of(name: str) -> Path:
        file = re.sub(r"[^A-Za-z0-9_.-]+", "-", name or request.node.name).strip("-.") or "baseline"
        return folder / f"{file}.json"

    def ready(name: str = "") -> None:
        __tracebackhide__ = True
        if not config.getoption("--whywait-save") and not path_of(name).exists():
            pytest.fail(f"there is no baseline {path_of(name)}; make it with: pytest --whywait-save", pytrace=False)

    def gate(
        run: Any, *more: Any, name: str = "", fail_if: Sequence[str] = ("worse",), **options: Any
    ) -> dict[str, Any] | None:
        __tracebackhide__ = True
        from whywait import testing
        from whywait.errors import UsageError

        path = path_of(name)
        try:
            if config.getoption("--whywait-save"):
                folder.mkdir(parents=True, exist_ok=True)
                testing.save_baseline(path, run, *more)
                return None
            ready(name)
            return testing.assert_no_worse(run, path, fail_if, **options)
        except testing.Worse as exc:
            pytest.fail(str(exc), pytrace=False)
        except UsageError as exc:
            pytest.fail(f"{exc.message}\n  → {exc.hint}", pytrace=False)

    gate.ready = ready  # type: ignore[attr-defined]
    return gate
