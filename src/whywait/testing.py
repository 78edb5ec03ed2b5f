"""Performance as a test: a run held against a stored baseline, for pytest and anything else that knows ``assert``.

::

    from whywait import app, testing

    def test_chat_is_no_slower():
        run = app.measure(app.Options(url=URL), [app.Load("concurrency", 8, requests=200)])
        testing.assert_no_worse(run, "baselines/chat.json", fail_if=["goodput<-5%", "ttft_ms.p95>+10%"])

``whywait.pytest_plugin`` adds the fixture ``whywait_gate``. Needs no extra and no pytest.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whywait import comparing
from whywait.judge import alike, change_gates
from whywait.judge.change_gates import FAILS, UNDECIDED

Source = Any  # a path, app.Result, core.run.Run


class UndecidedWarning(UserWarning):
    """A condition that the interval of the change neither fails nor passes."""


class Worse(AssertionError):
    """``result`` is the whole comparison, as ``whywait compare --json`` gives it."""

    def __init__(self, text: str, result: dict[str, Any]) -> None:
        super().__init__(text)
        self.result = result


def assert_no_worse(
    run: Source,
    baseline: Source,
    fail_if: Sequence[str] = ("worse",),
    *,
    strict: bool = False,
    allow: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """That no condition on the change of ``run`` against ``baseline`` is met (the grammar of ``--fail-if``).

    Args:
        run: what was measured: a folder, a summary.json, ``app.Result`` or ``Run``.
        baseline: the same, or a file of :func:`save_baseline`.
        fail_if: such as ``goodput<-5%``, ``ttft_ms.p95>+20ms``; ``worse`` any figure that surely became worse by 5 %
            (undecided while one may be; ``metrics=("tpot_ms.p50",)`` claims fewer).
        strict: what is undecided fails too; else it is an :class:`UndecidedWarning`.
        allow: kinds of difference to compare in spite of: workload, model, slo, load, definitions.
        options: further fields of ``comparing.Options``, such as ``threshold`` or ``at``.

    Returns:
        the comparison, as ``whywait compare --json`` has it.

    Raises:
        Worse: a condition is met (an AssertionError).
        UsageError: what is given cannot be compared; each difference is named.
    """
    gates = tuple(change_gates.parse(list(fail_if)))
    wanted = comparing.Options(allow=alike.allowed_kinds(list(allow)), gates=gates, **options)
    result = comparing.compare(baseline, [run], wanted)
    bad = [g for g in result["gates"] if g["state"] == FAILS]
    unsure = [g for g in result["gates"] if g["state"] == UNDECIDED]
    if bad or (strict and unsure):
        raise Worse(_text(result, bad, unsure), result)
    for g in unsure:
        warnings.warn(_line(g), UndecidedWarning, stacklevel=2)
    return result


def save_baseline(path: str | os.PathLike[str], *runs: Source, **options: Any) -> Path:
    """Keep one run, or better several of the same, as a small JSON to compare with later.

    Raises:
        UsageError: the runs are not alike, or it cannot be written.
    """
    comparing.save_baseline(Path(path), runs, comparing.Options(**options))
    return Path(path)


def _line(g: dict[str, Any]) -> str:
    return f"{g['gate']} {g['state']} at {g['load']}: {g['why']}"


def _text(result: dict[str, Any], bad: Sequence[dict[str, Any]], unsure: Sequence[dict[str, Any]]) -> str:
    changed = [f"changed: {u['what']}: {u['a']} → {u['b']}" for c in result["comparisons"] for u in c["changed"]]
    doubts = [f"doubt: {d['what']}: {d['why']}" for d in result["doubts"]]
    return "\n".join([result["headline"], *map(_line, [*bad, *unsure]), *changed, *doubts])
