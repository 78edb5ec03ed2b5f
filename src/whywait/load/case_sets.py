"""The built-in sets of tasks: seeded generators, whose answers are computed as the text is made, and our own writing.

Every set has levels, from what a tiny model can do to what large ones miss, so that a loss can be seen at some level of
any model: a case that both arms always solve, or never, tells nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from whywait.core.tasks import Case, Grader
from whywait.errors import UsageError
from whywait.load.corpus import texts

WORDS_TO_TOKENS = 1.5  # at most, of English by common tokenizers
NAMES: Final = ("Ann", "Bob", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana")
THINGS: Final = ("red ball", "blue cup", "green hat", "yellow book", "white key", "black coin", "grey stone")
CITIES: Final = ("Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Accra", "Quito", "Riga", "Hanoi", "Perth", "Tunis")

CHAIN_LEVELS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # steps
COUNT_LEVELS: Final = (1, 2, 3, 4, 6, 8, 12)  # small steps
TRACK_LEVELS: Final = (1, 2, 3, 4, 6, 8, 12)  # swaps
WALK_LEVELS: Final = (2, 3, 4, 6, 8, 12)  # moves
NEEDLE_LEVELS: Final = (60, 120, 250, 500, 1000, 2000, 4000, 8000, 16000, 32000)  # words of the text around it
GRID: Final = (
    "You are on a grid at (0, 0). East adds to the first number, west takes away from it; north adds to the second, "
    "south takes away."
)
STEPWISE: Final = "Work step by step, one line for each step, and end with a line that begins with 'Answer:'."

Turn = tuple[str, str]  # role, content
Made = tuple[tuple[Turn, ...], Grader, int]  # messages, grader, most tokens


def chain(rng: random.Random, steps: int) -> tuple[str, int, str]:
    """An arithmetic chain: (its text, its result, the working as a right answer writes it). Values stay in 0 … 999."""
    value = rng.randint(2, 20)
    text, work = [f"Start with {value}."], []
    for _ in range(steps):
        kind = rng.choice(("add", "add", "subtract", "multiply") if steps > 1 else ("add", "subtract"))
        n = rng.randint(2, 9) if steps < 8 else rng.randint(2, 19)
        if kind == "multiply" and value * (n % 3 + 2) <= 300:
            n = n % 3 + 2
            text.append(f"Multiply by {n}.")
            work.append(f"{value} * {n} = {value * n}")
            value *= n
        elif kind == "subtract" and value >= n:
            text.append(f"Subtract {n}.")
            work.append(f"{value} - {n} = {value - n}")
            value -= n
        else:
            text.append(f"Add {n}.")
            work.append(f"{value} + {n} = {value + n}")
            value += n
    return " ".join(text), value, "\n".join(work)


def _shown(question: str, working: str, answer: object) -> tuple[Turn, Turn]:
    return ("user", question), ("assistant", f"{working}\nAnswer: {answer}")


def count_on(rng: random.Random, steps: int) -> tuple[str, int, str]:
    """A chain of steps so small that even a tiny model can go some of the way: what grows is the way, not the step."""
    value = rng.randint(3, 9)
    text, work = [f"Start with {value}."], []
    for _ in range(steps):
        n, up = rng.choice((1, 1, 2)), rng.random() < 0.7 or value < 4
        text.append(f"{'Add' if up else 'Subtract'} {n}.")
        work.append(f"{value} {'+' if up else '-'} {n} = {value + n if up else value - n}")
        value += n if up else -n
    return " ".join(text), value, "\n".join(work)


def _counting(rng: random.Random, level: int) -> Made:
    return _worked(count_on, rng, level)


def _chains(rng: random.Random, level: int) -> Made:
    return _worked(chain, rng, level)


def _worked(make: Callable[[random.Random, int], tuple[str, int, str]], rng: random.Random, level: int) -> Made:
    turns: list[Turn] = [("system", STEPWISE)]
    for i in range(2):  # the same two worked examples for all cases of a level
        text, result, working = make(random.Random(100 * level + i), min(level, 3))
        turns += _shown(text, working, result)
    text, result, _ = make(rng, level)
    return (*turns, ("user", text)), Grader("numeric", (result,)), 32 + 14 * level


def swaps(rng: random.Random, n: int) -> tuple[str, str, str, str]:
    """People who swap what they hold: (text, question, answer, working)."""
    people = rng.sample(NAMES, 3 if n < 4 else 4)
    things = rng.sample(THINGS, len(people))
    holds = dict(zip(people, things, strict=True))
    said = [" ".join(f"{p} has the {t}." for p, t in holds.items())]
    work = []
    for _ in range(n):
        a, b = rng.sample(people, 2)
        holds[a], holds[b] = holds[b], holds[a]
        said.append(f"{a} and {b} swap.")
        work.append(f"{a} has the {holds[a]}, {b} has the {holds[b]}.")
    who = rng.choice(people)
    thing = holds[who]
    return " ".join(said), f"Who has the {thing} now?", who, "\n".join(work)


def _tracking(rng: random.Random, level: int) -> Made:
    turns: list[Turn] = [("system", STEPWISE)]
    for i in range(2):
        text, question, who, working = swaps(random.Random(100 * level + i), min(level, 2))
        turns += _shown(f"{text} {question}", working, who)
    text, question, who, _ = swaps(rng, level)
    grader = Grader("choice", (who,), checks={"options": list(NAMES)})
    return (*turns, ("user", f"{text} {question}")), grader, 32 + 24 * level


MOVES: Final = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


def walk(rng: random.Random, n: int) -> tuple[str, tuple[int, int], str]:
    """A walk on a grid from (0, 0), x to the east and y to the north: (text, where it ends, working)."""
    x = y = 0
    said, work = [], []
    for _ in range(n):
        way, far = rng.choice(list(MOVES)), rng.randint(1, 4)
        x, y = x + MOVES[way][0] * far, y + MOVES[way][1] * far
        said.append(f"Go {far} {way}.")
        work.append(f"({x}, {y})")
    return " ".join(said), (x, y), "\n".join(work)


def _walks(rng: random.Random, level: int) -> Made:
    turns: list[Turn] = [("system", f"{GRID} {STEPWISE}")]
    for i in range(2):
        text, end, working = walk(random.Random(100 * level + i), min(level, 3))
        turns += _shown(text, working, end)
    text, at, _ = walk(rng, level)
    grader = Grader("exact", (f"({at[0]}, {at[1]})", f"({at[0]},{at[1]})"))
    return (*turns, ("user", text)), grader, 32 + 10 * level


def _needle(rng: random.Random, level: int) -> Made:
    """One code among others, somewhere in a text of ``level`` words."""
    hay = ["".join(s).strip() for s in texts("en").sentences]
    rng.shuffle(hay)
    lines: list[str] = []
    words = 0
    while words < level:
        line = hay[len(lines) % len(hay)]
        lines.append(line)
        words += len(line.split())
    cities = rng.sample(CITIES, 1 if level < 120 else 2 if level < 500 else 4)
    codes = rng.sample(range(1000, 9999), len(cities))
    for city, code in zip(cities, codes, strict=True):
        lines.insert(rng.randint(0, len(lines)), f"The door code of the {city} office is {code}.")
    question = f"What is the door code of the {cities[0]} office? Reply with the code only."
    text = "Read this text.\n\n" + " ".join(lines) + "\n\n" + question
    return (("user", text),), Grader("numeric", (codes[0],)), 20


def _record(rng: random.Random, fields: int) -> tuple[str, dict[str, Any]]:
    """Facts in sentences, and the same as an object of ``fields`` fields."""
    whole: dict[str, Any] = {
        "name": rng.choice(NAMES), "city": rng.choice(CITIES), "age": rng.randint(18, 80),
        "thing": rng.choice(THINGS), "price": rng.randint(2, 99), "paid": rng.choice((True, False)),
    }  # fmt: skip
    said = {
        "name": "The customer is called {}.", "city": "The customer lives in {}.", "age": "The customer's age is {}.",
        "thing": "The customer bought a {}.", "price": "It costs {} euros.",
    }  # fmt: skip
    value = dict(list(whole.items())[:fields])
    lines = [said[k].format(v) for k, v in value.items() if k != "paid"]
    if "paid" in value:
        lines.append("It is paid." if value["paid"] else "It is not paid.")
    return " ".join(lines), value


def _records(rng: random.Random, level: int) -> Made:
    turns: list[Turn] = [("system", "Put the facts into one JSON object. Reply with the object only.")]
    for i in range(2):
        text, value = _record(random.Random(100 * level + i), level)
        turns += [("user", text), ("assistant", json.dumps(value))]
    text, value = _record(rng, level)
    return (*turns, ("user", text)), Grader("json", (value,)), 32 + 14 * level


Maker = Callable[[random.Random, int], Made]
#: Long reasoning first: it is what low precision hurts first. Set → how a case is made, its levels, whether it draws
#: from a book beside it. ``tokens`` of a case, at most, decide what fits a context.
MADE: Final[Mapping[str, tuple[Maker, Sequence[int]]]] = {
    "chains": (_chains, CHAIN_LEVELS),
    "counting": (_counting, COUNT_LEVELS),
    "tracking": (_tracking, TRACK_LEVELS),
    "walks": (_walks, WALK_LEVELS),
    "needle": (_needle, NEEDLE_LEVELS),
    "records": (_records, (1, 2, 3, 4, 5, 6)),
}
BOOKS: Final = ("instructions", "languages", "json")
SETS: Final = (*MADE, *BOOKS)


def made(name: str, draw: tuple[int, int], context: int, span: tuple[int, int] | None = None) -> list[Case]:
    """Cases of a generated set, spread evenly over its levels.

    Args:
        draw: seed, how many. Same seed, same cases; the first ones of many are those of few.
        context: tokens a request may have: longer needles are left out, unless ``span`` asks for them.
        span: only levels from … to.

    Raises:
        UsageError: no level lies in ``span``.
    """
    seed, n = draw
    maker, levels = MADE[name]
    if span is not None:
        kept = [v for v in levels if span[0] <= v <= span[1]]
        if not kept:
            raise UsageError(
                f"{name} has no level in {span[0]}-{span[1]}", f"its levels: {', '.join(map(str, levels))}"
            )
        levels = kept
    elif name == "needle":
        levels = [w for w in levels if w * WORDS_TO_TOKENS + 120 <= context] or [levels[0]]
    out = []
    for i in range(n):
        level = levels[i % len(levels)]
        turns, grader, most = maker(random.Random(f"{seed}/{name}/{level}/{i // len(levels)}"), level)
        out.append(Case(f"{name}-{level}-{i}", name, turns, grader, min(most, context // 2), "", level))
    return out


def book(name: str) -> list[Mapping[str, Any]]:
    """The lines of a hand-written set. Each has a ``right`` and a ``wrong`` answer, which a test holds against its
    grader."""
    text = (Path(__file__).parent / "casebook" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]
