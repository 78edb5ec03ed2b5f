"""Hypothesis for all tests: the same examples every time, and no deadline, which on a busy box says nothing about us.

``pytest --hypothesis-profile=default`` explores new ones.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("whywait", deadline=None, derandomize=True)
settings.load_profile("whywait")
