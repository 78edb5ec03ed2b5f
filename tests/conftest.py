"""Hypothesis for all tests: the same examples every time, and no deadline, which on a busy box says nothing about us.

``pytest --hypothesis-profile=default`` explores new ones.
"""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

settings.register_profile("whywait", deadline=None, derandomize=True)
settings.load_profile("whywait")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A job in the background ignores Ctrl-C, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def busy_box_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late sends make a run's exit code 6; of a shared box that tells nothing. ``test_invalid.py`` has its own say."""
    monkeypatch.setattr("whywait.verbs.measure.raise_invalid", lambda _invalid: None)
