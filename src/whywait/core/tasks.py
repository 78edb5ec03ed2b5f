"""Tasks with an answer that can be checked: what is asked, how it is graded, and what came back.

The types that the asking (a producer) and the grading (the analysis) agree on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

#: How an answer is judged. The first six are a user's to choose in a JSONL, ``checks`` is of the built-in sets.
GRADERS: Final = ("exact", "numeric", "choice", "regex", "json", "json_schema", "checks")


@dataclass(frozen=True)
class Grader:
    """``kind`` is one of ``GRADERS``.

    ``answers``: what is right (any of them), texts for exact and choice, numbers for numeric, a JSON value for json.
    ``tolerance``: numeric: how far off still counts, absolute; ``relative``: as a share of the answer; the larger wins.
    ``pattern``: regex, searched for in the final answer. ``schema``: json_schema. ``checks``: name → value, all of
    which must hold (``analyze/grade.py`` lists them). ``language``: ISO 639-1, where the answer must be in it.
    """

    kind: str
    answers: tuple[Any, ...] = ()
    tolerance: float = 0.0
    relative: float = 0.0
    pattern: str = ""
    schema: Mapping[str, Any] | None = None
    checks: Mapping[str, Any] = field(default_factory=dict)
    language: str = ""


@dataclass(frozen=True)
class Case:
    """One task. ``group`` names what it shares with others (one document, one template): cases of a group are
    resampled together; empty: it stands alone. ``level`` orders the difficulty inside a category."""

    id: str
    category: str
    messages: tuple[tuple[str, str], ...]  # (role, content)
    grader: Grader
    max_tokens: int = 256
    group: str = ""
    level: int = 0

    @property
    def prompt(self) -> str:
        return "\n\n".join(content for _, content in self.messages)


@dataclass(frozen=True)
class Answered:
    """What came back for a case. ``text`` is the answer without the thinking; an outcome other than ``ok`` stays in
    every denominator. ``unclosed``: a thought was begun and never ended. ``generated`` is false where only
    likelihoods were compared: there is no text to look at. Tokens None: not said; ``took_ns`` from sending to the
    end."""

    case: str
    text: str = ""
    thinking: str = ""
    outcome: str = "never_sent"
    detail: str = ""
    finish_reason: str | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    took_ns: int | None = None
    unclosed: bool = False
    generated: bool = True

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def cut(self) -> bool:
        """It was stopped by the limit on its length."""
        return self.finish_reason in ("length", "max_tokens", "max_output_tokens")
