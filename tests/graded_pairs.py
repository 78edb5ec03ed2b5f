"""Constructed answers whose grade is known: (grader, text, right, cut)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from whywait.core.tasks import Grader

Pair = tuple[Grader, str, bool]


def number(value: float, tolerance: float = 0.0, language: str = "", relative: float = 0.0) -> Grader:
    return Grader("numeric", (value,), tolerance=tolerance, relative=relative, language=language)


def letter(answer: str, options: tuple[str, ...] = ()) -> Grader:
    return Grader("choice", (answer,), checks={"options": list(options)} if options else {})


WORDED = (
    "Answer: {}", "The answer is {}.", "So 3 apples and 4 pears make\n\nAnswer: {} apples", "#### {}",
    "**Answer:** {}", "Final answer: **{}**", "We get \\boxed{{{}}}.", "The final answer is $\\boxed{{{}}}$",
    "Answer: \\boxed{{{}}}", "Antwort: {}", "Respuesta: {}", "La réponse est {}", "答案：{}", "答案是{}。", "答え: {}",
    "Ответ: {}", "الجواب: {}", "{}", "It is {}", "1 + 1 = 2\n2 + 3 = {}",
    "Let me see: 7, then 9, so {} in the end.", "Answer: 2 + 5 = {}", "Answer:\n{}",
    "Answer: 11. No, wait.\nAnswer: {}", "I thought 5.\nThe correct answer is: {}", "RESULT: {}", "result = {}",
)  # fmt: skip

#: Ways to write numbers: text, value.
WRITTEN: tuple[tuple[str, float], ...] = (
    ("42", 42), ("-7", -7), ("−7", -7), ("+7", 7), ("3.5", 3.5), ("0.25", 0.25), ("1,234", 1234),
    ("1,234,567.5", 1234567.5), ("$1,200", 1200), ("€ 15", 15), ("12%", 12), ("4２", 42), ("٤٢", 42), ("१२", 12),
    ("1\u202f234", 1234), ("1\u00a0234\u00a0567", 1234567), ("1'234", 1234), ("1e3", 1000), ("2.5e-2", 0.025),
    ("3 × 10^4", 30000), ("1/2", 0.5), ("\\frac{3}{4}", 0.75), ("\\$18", 18), ("18 dollars", 18),
    ("18 km/h", 18), ("72.", 72), ("1.234.567", 1234567), ("1.234,5", 1234.5), ("3,14", 3.14), ("-$5", -5),
    ("1{,}250", 1250), ("٣٫٥", 3.5),
)  # fmt: skip

TRICKY: tuple[Pair, ...] = (
    (number(18), "Answer: 17 or so. #### 18", True),
    (number(18), "#### 18\nThat was step 17.", True),
    (number(5), "Answer: five", False),
    (number(5), "There are no numbers here", False),
    (number(1234, language="de"), "Antwort: 1.234", True),
    (number(1.234, language="de"), "Antwort: 1,234", True),
    (number(1234), "Answer: 1.234", False),
    (number(3.14159, tolerance=0.01), "Answer: 3.14", True),
    (number(3.14159, tolerance=0.001), "Answer: 3.14", False),
    (number(1000, relative=0.05), "about 1040", True),
    (number(1000, relative=0.05), "about 1060", False),
    (number(0), "Answer: 0", True),
    (number(0), "Answer: -0.0", True),
    (number(12), "It is 10-2, so Answer: 10 + 2 = 12", True),
    (number(8), "From 10-2 I get 8", True),
    (number(2), "In 2024 there were 2", True),
    (number(50), "The answer is 50% of the cake", True),
    (number(7), "Answer: x = 7", True),
    (number(7), "Answer: (7)", True),
    (number(7), "Answer: `7`", True),
    (number(7), "Answer: 7th", True),
    (number(3), "model2b says 3", True),
    (letter("B"), "B", True),
    (letter("B"), "(B)", True),
    (letter("B"), "B.", True),
    (letter("B"), "B) Paris", True),
    (letter("B"), "**B**", True),
    (letter("B"), "Answer: B", True),
    (letter("B"), "answer: b", True),
    (letter("B"), "The correct option is (B) because A is wrong", True),
    (letter("B"), "I think the answer is B", True),
    (letter("B"), "The answer is \\boxed{B}", True),
    (letter("B"), "Option B is the best, since it rains", True),
    (letter("B"), "Antwort: B", True),
    (letter("B"), "答案是B", True),
    (letter("B"), "Let's see. A) is out. C) is out. So it must be B)", True),
    (letter("A"), "A good question. The answer is (C).", False),
    (letter("C"), "A good question. The answer is (C).", True),
    (letter("A"), "A dog is an animal", False),
    (letter("I"), "I think so", False),
    (letter("B"), "Answer: A or B", False),
    (letter("A"), "Answer: A or B", False),
    (letter("A"), "Answer: A, B", False),
    (letter("B"), "Answer: C", False),
    (letter("B"), "", False),
    (letter("B"), "Paris", False),
    (letter("B"), "Vitamin B is good. Answer: D", False),
    (letter("D"), "Vitamin B is good. Answer: D", True),
    (letter("Bob", ("Ann", "Bob", "Bobby")), "Answer: Bob", True),
    (letter("Bob", ("Ann", "Bob", "Bobby")), "Answer: Bobby", False),
    (letter("Bobby", ("Ann", "Bob", "Bobby")), "Bobby has it", True),
    (letter("Bob", ("Ann", "Bob", "Bobby")), "Ann gave it to Bob.", True),
    (letter("Bob", ("Ann", "Bob", "Bobby")), "Bob has it, not Ann.", True),
    (letter("Ann", ("Ann", "Bob", "Bobby")), "Bob has it, not Ann.", False),
    (letter("yes", ("yes", "no")), "Yes, it is.", True),
    (letter("no", ("yes", "no")), "No.", True),
    (letter("no", ("yes", "no")), "Nothing of the kind", False),
    (Grader("exact", ("Paris",)), "Paris", True),
    (Grader("exact", ("Paris",)), "paris.", True),
    (Grader("exact", ("Paris",)), "  **Paris**\n", True),
    (Grader("exact", ("Paris",)), "The answer is Paris.", True),
    (Grader("exact", ("Paris",)), "Long ago.\n\nParis", True),
    (Grader("exact", ("Paris",)), "Paris, the city of lights", False),
    (Grader("exact", ("Paris",)), "Not Paris", False),
    (Grader("exact", ("Paris", "Lutetia")), "Lutetia", True),
    (Grader("exact", ("(2, 3)",)), "(1, 2)\nAnswer: (2, 3)", True),
    (Grader("exact", ("(2, 3)",)), "(2, 3)\nAnswer: (1, 2)", False),
    (Grader("exact", ("(-2, 3)",)), "Answer: (−2, 3)", True),
    (Grader("exact", ("(-2, 3)",)), "Answer: (2, 3)", False),
    (Grader("regex", pattern=r"^\d{3}-\d{4}$"), "555-1234", True),
    (Grader("regex", pattern=r"^\d{3}-\d{4}$"), "call 555-1234", False),
    (Grader("regex", pattern=r"(?i)refund"), "You get a Refund.", True),
    (Grader("json", ({"a": 1},)), '{"a": 1}', True),
    (Grader("json", ({"a": 1},)), '```json\n{"a": 1.0}\n```', True),
    (Grader("json", ({"a": 1},)), 'Here it is: {"a": 1} as asked', True),
    (Grader("json", ({"a": 1},)), '{"a": true}', False),
    (Grader("json", ({"a": True},)), '{"a": 1}', False),
    (Grader("json", ({"a": 1},)), '{"a": 1', False),
    (Grader("json", ({"a": 1},)), "{'a': 1}", False),
    (Grader("json", ({"a": 1},)), '{"a": NaN}', False),
    (Grader("json", ({"a": 1, "b": 2},)), '{"b": 2, "a": 1}', True),
    (Grader("json", ([1, 2],)), "[2, 1]", False),
    (Grader("json", ([1, 2],)), "[1, 2]", True),
    (Grader("json", ({"a": {"b": [None]}},)), '{"a": {"b": [null]}}', True),
    (Grader("json", ({"a": "x"},)), '{"a": "x", "b": 1}', False),
)


def numeric_pairs() -> Iterator[Pair]:
    """Every wording with a right and a wrong number, and every way to write one."""
    rng = random.Random(5)
    for worded in WORDED:
        for _ in range(3):
            value = rng.choice((rng.randint(12, 99), rng.randint(100, 99999), round(rng.uniform(20, 90), 2)))
            yield number(value), worded.format(value), True
            yield number(value), worded.format(value + rng.choice((-1, 1, 10))), False
    for text, value in WRITTEN:
        for worded in ("Answer: {}", "{}", "So it is {}"):
            yield number(value), worded.format(text), True
            yield number(value + 1), worded.format(text), False
