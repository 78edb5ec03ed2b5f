"""Writes docs/waits/*.md, a page per cause: ``python tools/wait_pages.py`` (``--check`` only compares).

What the code knows comes from the code: the vocabulary, what a wait is, the rules' place, the flags of each engine,
what techniques promise, the cases of the exam. How the verdict did is read off the tables of docs/exam.md, what is
needed to say it and what it is confused with off docs/verdicts.md. The rest is written by hand in ``waits.toml``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from whywait.engines import ENGINES, LIMITS
from whywait.judge.vocabulary import CAUSES, page
from whywait.judge.what import WHAT
from whywait.lab.exam import Case, cases
from whywait.lab.techniques import TECHNIQUES
from whywait.sim.techniques import TECHNIQUES as SIMULATED

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = DOCS / "waits"
WRITTEN = Path(__file__).with_name("waits.toml")
FAMILIES: Mapping[str, str] = {
    "queue": "Waiting for a place",
    "cache": "Prompts computed again",
    "work": "The work itself",
    "host": "The machine around the device",
    "path": "The way there and back",
    "load": "What is asked for",
    "device": "The devices",
    "none": "Where nothing can be said",
}
NOTE = "<!-- Made by: python tools/wait_pages.py, from tools/waits.toml and the code. Do not edit. -->"


class Sat(NamedTuple):
    """How the verdict did in one recorded case: a row of docs/exam.md."""

    put: str
    mark: str
    claimed: str


def slug(cause: str) -> str:
    """The name of a cause's page, without ``.md``."""
    return Path(page(cause)).stem


def written() -> dict[str, dict[str, Any]]:
    """The hand-written part by cause.

    Raises:
        ValueError: a cause is missing or unknown, or something in it names what does not exist.
    """
    found: dict[str, dict[str, Any]] = tomllib.loads(WRITTEN.read_text(encoding="utf-8"))
    if found.keys() != CAUSES.keys():
        raise ValueError(f"waits.toml and the vocabulary differ: {sorted(found.keys() ^ CAUSES.keys())}")
    known: dict[str, Mapping[str, Any]] = {"limits": LIMITS, "try": TECHNIQUES, "what_if": SIMULATED}
    for cause, part in found.items():
        for key, names in known.items():
            if strange := [n for n in part.get(key, ()) if n not in names]:
                raise ValueError(f"waits.toml, {cause}: {key} {strange} do not exist")
    return found


def pages() -> dict[str, str]:
    """File name under docs/waits -> text."""
    parts, sat, simulated, said, trials = written(), _sat(), _simulated(), _said(), _trials()
    out = {"README.md": _overview(parts)}
    for cause, part in parts.items():
        blocks = [
            f"# {cause}\n\n{NOTE}",
            _what(cause, part),
            *_evidence(cause, said.get(cause)),
            *_levers(part),
            *_techniques(cause, part, trials),
            *_exam(cause, sat, simulated.get(cause)),
            f"## The cheapest test\n\n{part['test']}",
        ]
        if part.get("not_yet"):
            blocks.append(f"## Not known yet\n\n{part['not_yet']}")
        out[f"{slug(cause)}.md"] = "\n\n".join(blocks) + "\n"
    return out


def _what(cause: str, part: Mapping[str, Any]) -> str:
    meaning = CAUSES[cause].meaning
    rows = "\n".join(f"| `{figure}` | {how} |" for figure, how in part["moves"])
    return (
        f"**{meaning[0].upper()}{meaning[1:]}.** {WHAT[cause]}\n\n## How it looks\n\n"
        f"| figure ([metrics](../metrics.md)) | how it moves |\n|---|---|\n{rows}"
    )


def _evidence(cause: str, row: tuple[str, str] | None) -> Iterator[str]:
    rules = [
        p.name
        for p in sorted((ROOT / "src/whywait/judge").glob("*.py"))
        if p.name not in ("vocabulary.py", "what.py") and f'"{cause}"' in p.read_text(encoding="utf-8")
    ]
    first = [r for r in rules if r.startswith("rules_")] or rules
    where = f"\n\nThe rule: {', '.join(f'`src/whywait/judge/{r}`' for r in first)}." if first else ""
    if row is None:
        raise ValueError(f"docs/verdicts.md has no row for {cause}")
    holds, confused = row
    begin = "" if holds.startswith(("always", "nothing")) else "It holds when: "
    holds = begin + (holds if begin else holds[0].upper() + holds[1:])
    yield f"## What whywait asks for\n\n{holds}.{where} How verdicts are ranked: [verdicts](../verdicts.md)."
    if confused and not confused.startswith("not yet"):
        yield f"## What it is confused with\n\n{confused[0].upper()}{confused[1:]}{'' if confused[-1] in '.!' else '.'}"


def _levers(part: Mapping[str, Any]) -> Iterator[str]:
    limits = part.get("limits", [])
    if not limits and not part.get("other"):
        return
    out = "## What would change it"
    if limits:
        tables = [t for t in ENGINES.values() if any(x in t.flags for x in limits)]
        heads = [t.title + ("" if t.driven else " (by its documentation)") for t in tables]
        out += f"\n\n| limit | {' | '.join(heads)} |\n|---|{'---|' * len(tables)}"
        for x in limits:
            flags = (f"`{_cell(t.flags[x])}`" if x in t.flags else "–" for t in tables)
            out += f"\n| {LIMITS[x]} | {' | '.join(flags)} |"
    yield out + (f"\n\n{part['other']}" if part.get("other") else "")


def _techniques(cause: str, part: Mapping[str, Any], trials: Mapping[str, str]) -> Iterator[str]:
    promised = [n for n, t in TECHNIQUES.items() if t.promise == cause]
    real = [*promised, *(n for n in part.get("try", []) if n not in promised)]
    cut = [n for n, t in SIMULATED.items() if t.cuts == cause]
    modelled = [*cut, *(n for n in part.get("what_if", []) if n not in cut)]
    if not real and not modelled:
        return
    out = ["## Tried, and simulated"]
    if real:
        rows = (
            f"| [`whywait try {n}`](../techniques/{trials[n]}) | {TECHNIQUES[n].says} | "
            f"{'yes' if n in promised else 'no'} | {TECHNIQUES[n].cost} |"
            for n in real
        )
        out.append(
            "For real, on the embedded engine or yours; what does not promise to cut it bears on it:\n\n"
            "| technique | what B has over A | promises to cut this | price |\n|---|---|---|---|\n" + "\n".join(rows)
        )
    if modelled:
        rows = (f"| `{_cell(SIMULATED[n].syntax)}` | {SIMULATED[n].changes} | {SIMULATED[n].price} |" for n in modelled)
        out.append(
            "By the simulator, `whywait what-if RUN --apply NAME` ([what-if](../what-if.md)), modelled:\n\n"
            "| name | what it changes | price |\n|---|---|---|\n" + "\n".join(rows)
        )
    yield "\n\n".join(out)


def _exam(cause: str, sat: Mapping[str, Sat], simulated: list[str] | None) -> Iterator[str]:
    put = [c for c in cases() if c.fault and cause in c.accepted]
    bases = [c for c in cases() if not c.fault and cause in c.accepted]
    false = [n for n, s in sat.items() if s.claimed.split(", ")[0] == cause and s.mark == "wrong"] + _wrong(cause)
    out = ["## How the verdict did"]
    if put:
        known = [c for c in put if c.name in sat]
        right = sum(sat[c.name].mark == "right" for c in known)
        out.append(
            f"Put into real engines in {len(put)} cases of the [exam](../exam.md), {len(known)} of them recorded: "
            f"{right} right first."
        )
        out.append(
            "| case | what was put in | mark | claimed, in rank order |\n|---|---|---|---|\n"
            + "\n".join(_case(c, sat.get(c.name)) for c in put)
        )
    else:
        out.append("It is put into no case of the [exam](../exam.md) on real engines.")
    if bases:
        claimed = [c.name for c in bases if c.name in sat and sat[c.name].claimed.split(", ")[0] == cause]
        out.append(
            f"Of the healthy engines {len(bases)} take it for a right answer; claimed first in "
            f"{f'{len(claimed)}: ' + ', '.join(f'`{n}`' for n in claimed) if claimed else 'none'}."
        )
    out.append(
        f"Claimed first where it was wrong: {', '.join(f'`{n}`' for n in false) if false else 'in no recorded case'}."
    )
    if simulated:
        out.append(
            "Built into simulated services:\n\n| built in | services | right first | symptom first | undecided | "
            "confident and wrong |\n|---|---|---|---|---|---|\n" + "\n".join(simulated)
        )
    yield "\n\n".join(out)


def _case(case: Case, sat: Sat | None) -> str:
    if sat is None:
        return f"| `{case.name}` | {case.fault} | not recorded yet | |"
    return f"| `{case.name}` | {sat.put} | {sat.mark} | {sat.claimed} |"


def _overview(parts: Mapping[str, Any]) -> str:
    out = [
        f"# The waits, a page each\n\n{NOTE}\n\nThe list is closed: `whywait` names these causes and no others. How "
        "they are ranked and when a verdict is withheld: [verdicts](../verdicts.md)."
    ]
    for family, title in FAMILIES.items():
        rows = [
            f"| [{c}]({slug(c)}.md) | {CAUSES[c].meaning} | `{parts[c]['moves'][0][0]}`: {parts[c]['moves'][0][1]} |"
            for c in CAUSES
            if CAUSES[c].family == family
        ]
        out.append(f"## {title}\n\n| cause | what it is | seen first |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(out) + "\n"


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield [x.strip() for x in re.split(r"(?<!\\)\|", line)[1:-1]]


def _sat() -> dict[str, Sat]:
    text = (DOCS / "exam.md").read_text(encoding="utf-8").split("<!-- score: begin -->")[1]
    names = {c.name for c in cases()}
    return {r[0]: Sat(*r[1:]) for r in _rows(text) if len(r) == 4 and r[0] in names}


def _simulated() -> dict[str, list[str]]:
    text = (DOCS / "exam.md").read_text(encoding="utf-8")
    text = text.split("<!-- simulated: begin -->")[1].split("<!-- simulated: end -->")[0]
    out: dict[str, list[str]] = {}
    for row in _rows(text):
        found = re.fullmatch(r"([\w-]+) \((.+)\)", row[0])
        for cause in found[2].split(" or ") if found else ():
            out.setdefault(cause, []).append(f"| {' | '.join(row)} |")
    return out


def _wrong(cause: str) -> list[str]:
    """Simulated services in which it was claimed first and is not what was built in."""
    text = (DOCS / "exam.md").read_text(encoding="utf-8")
    found = re.findall(r"^- (sim-\S+): wrong; claimed ([^;]+);", text, re.MULTILINE)
    return [name for name, claimed in found if claimed.split(", ")[0] == cause]


def _said() -> dict[str, tuple[str, str]]:
    """Cause -> (holds when, confused with) of the table in docs/verdicts.md, whose links lead from docs/."""
    out = {}
    for row in _rows((DOCS / "verdicts.md").read_text(encoding="utf-8").split("## Causes")[1]):
        for cause in re.findall(r"`([^`]+)`", row[0]):
            out[cause] = (row[1].rstrip(". "), row[2] if len(row) > 2 else "")
    return out


def _trials() -> dict[str, str]:
    """Technique of ``whywait try`` -> its page, by the table of docs/techniques/README.md."""
    text = (DOCS / "techniques" / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `([\w-]+)` \(\[page\]\(([^)]+)\)\)", text, re.MULTILINE))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    made = pages()
    if "--check" in sys.argv:
        kept = {p.name: p.read_text(encoding="utf-8") for p in PAGES.glob("*.md")}
        return 0 if kept == made else 1
    PAGES.mkdir(exist_ok=True)
    for old in PAGES.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (PAGES / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
