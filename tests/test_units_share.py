"""A share that is not the whole is not called the whole, and one that is not nothing is not called nothing."""

from __future__ import annotations

import pytest

from whywait.units import percent


@pytest.mark.parametrize(("share", "said"), [
    (0.0, "0 %"), (1.0, "100 %"), (0.9996, "99.9 %"), (0.996, "99.6 %"), (0.9949, "99 %"), (1.004, "100 %"),
    (0.0001, "<0.1 %"), (0.0006, "0.1 %"), (0.05, "5.0 %"), (0.42, "42 %"), (None, "–"), (float("nan"), "–"),
])  # fmt: skip
def test_percent(share: float | None, said: str) -> None:
    assert percent(share) == said
