"""A mistake in what prices and growth are given by is said as it was typed, with the page that tells the right form."""

from __future__ import annotations

import pytest

from whywait.cli import main

PLAN = ["plan", "--model", "llama-3.1-8b", "--slo", "ttft=1s", "--rate", "3", "--machines", "h100"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bill", "RUN", "--price-per-hour", "-1", "--currency", "EUR"], "'-1' is not a number above 0"),
        ([*PLAN, "--growth", "-1"], "'-1' is not a number above 0"),
        ([*PLAN, "--currency", "euro"], "--currency: 'euro' is no ISO 4217 code"),
        ([*PLAN, "--price-per-hour", "h100=2", "--currency", "euro"], "--currency: 'euro' is no ISO 4217 code"),
        ([*PLAN, "--price", "none.toml"], "see docs/bill.md"),
        ([*PLAN, "--candidates", "none.toml"], "see docs/plan.md"),
        (["catalog", "machines", "--catalog", "none.toml"], "see docs/simulate.md"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    try:
        code = main(words)
    except SystemExit as exc:
        code = int(exc.code or 0)
    err = capsys.readouterr().err
    assert code == 2
    assert said in err
    assert "requests per second" not in err
    assert "EURO" not in err
