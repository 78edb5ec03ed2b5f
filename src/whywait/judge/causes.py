"""The rules: each looks at the evidence for one family of causes; verdicts, or none where it has no business.

A rule never guesses: without evidence its verdict is ``undecided`` with the cheapest step that would decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from whywait.judge.evidence import Evidence
from whywait.judge.rules_cache import reuse
from whywait.judge.rules_device import device, unexplained
from whywait.judge.rules_host import host
from whywait.judge.rules_load import shedding, want_of_load
from whywait.judge.rules_path import path
from whywait.judge.rules_queue import queue
from whywait.judge.rules_work import decode, neighbours_prefill, prefill, speculation
from whywait.judge.verdict import Verdict

RULES: Final[tuple[Callable[[Evidence], list[Verdict]], ...]] = (
    path, shedding, queue, host, reuse, prefill, neighbours_prefill, speculation, decode, want_of_load, device,
    unexplained,
)  # fmt: skip
