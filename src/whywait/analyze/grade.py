"""An answer and what is right → right or wrong. Pure, and the same for both arms.

What is graded is the answer after the thinking. In it the *final answer* is what follows the last of ``\\boxed{…}``,
``#### …`` and a marker ("Answer:", "the answer is", "Antwort:" …); where there is none, the whole of it. A number is
then the first after the marker, else the last of the text. An answer that was cut off before a marker counts only when
nothing else could be meant: a half-way number is not a result. What its form does not decide is wrong.
"""

from __future__ import annotations

import re

from whywait.analyze.grade_checks import failed_check
from whywait.analyze.grade_choice import choice
from whywait.analyze.grade_final import final_answer, plain, same_text, taken_back
from whywait.analyze.grade_json import json_grade
from whywait.analyze.grade_numbers import numeric
from whywait.core.tasks import UNGRADABLE, Answered, Case, Grade, Grader


def unanswered(answered: Answered) -> Grade | None:
    """The grade of what is no answer: a request that failed, an empty one, an unfinished thought. None where there is
    an answer to grade."""
    if not answered.ok:
        return Grade(False, "", answered.outcome)
    if answered.unclosed:
        return Grade(False, "", "the thinking never ended")
    return None if answered.text.strip() else Grade(False, "", "empty")


def grade(case: Case, answered: Answered) -> Grade:
    """Whether the answer is right. A request that failed, an empty answer and an unfinished thought are wrong."""
    return unanswered(answered) or safely(case.grader, answered.text, answered.cut)


def safely(grader: Grader, text: str, cut: bool = False) -> Grade:
    """A text graded; whatever goes wrong in that is said as the reason, and the answer is wrong: what both arms were
    asked must not be lost by one grader."""
    try:
        return grade_text(grader, text, cut)
    except Exception as exc:
        return Grade(False, "", f"{UNGRADABLE}: {type(exc).__name__}")


def grade_text(grader: Grader, text: str, cut: bool = False) -> Grade:
    """A text graded; ``cut``: it was stopped by the limit on its length.

    Raises:
        MissingExtra: graded by a JSON schema, and ``jsonschema`` is not installed.
        Exception: whatever a user's own pattern, schema or checks make of it.
    """
    kind = grader.kind
    if kind == "numeric":
        return numeric(grader, text, cut)
    if kind == "choice":
        return choice(grader, text)
    if kind == "exact":
        return _exact(grader, text)
    if kind == "regex":
        found = re.search(grader.pattern, text)
        return Grade(found is not None, found[0][:200] if found else "", "" if found else "no match")
    if kind == "checks":
        failed = failed_check(grader.checks, text)
        return Grade(not failed, "", failed)
    return json_grade(grader, text)


def _exact(grader: Grader, text: str) -> Grade:
    """The final answer or the whole text; its last line only where no final answer is marked."""
    marked = final_answer(plain(text))
    lines = [line for line in text.splitlines() if line.strip()]
    tries = [text, lines[-1]] if marked is None else [marked.text, text]
    got = next((t for t in tries if any(same_text(t, str(a)) for a in grader.answers)), None)
    if got is not None and got is not text and marked is not None and taken_back(marked.after).strip():
        return Grade(False, got[:200], "taken back")
    return Grade(got is not None, (tries[0] if got is None else got)[:200], "" if got is not None else "another text")
