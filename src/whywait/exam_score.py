"""Scores recorded cases by today's rules: what is claimed first, against what is known to be true.

Part of the application layer, beside ``exam``. It reads the Runs as ``whywait show`` does and needs no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from whywait import app
from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.exam import NOTE
from whywait.exam_blind import SETS, blinded, described
from whywait.judge.verdict import Verdict
from whywait.lab.exam import Case, by_name

#: right: the first cause that holds is accepted. half: it is, but of two put in together one is not named. symptom: it
#: is true, but not the cause. wrong: it holds and is none of these (confident and wrong). undecided: nothing holds.
MARKS: Final = ("right", "half", "symptom", "wrong", "undecided")
BLIND_BEGIN, BLIND_END = "<!-- blind: begin -->", "<!-- blind: end -->"
BEGIN, END = "<!-- score: begin -->", "<!-- score: end -->"


@dataclass(frozen=True)
class Marked:
    """A case and what was claimed of it: ``claimed`` are the causes that hold, in rank order, each once."""

    case: Case
    claimed: tuple[str, ...]
    undecided: tuple[str, ...]
    false_alarms: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        if not self.claimed:
            return "undecided"
        first, case = self.claimed[0], self.case
        if first in case.accepted:
            return "half" if case.together and not set(case.accepted) <= set(self.claimed) else "right"
        return "symptom" if first in case.symptoms else "wrong"

    @property
    def in_two(self) -> bool:
        """Whether an accepted cause is among the first two; of two put in together, both."""
        found = set(self.claimed[:2]) & set(self.case.accepted)
        return len(found) == 2 if self.case.together else bool(found)


def score(folder: Path, blind: Sequence[str] = (), names: Collection[str] | None = None) -> list[Marked]:
    """Judge every case recorded in ``folder`` (of these ``names``), without what ``blind`` takes away.

    Raises:
        UsageError: there is none.
    """
    known = by_name()
    wanted = known if names is None else set(names) & set(known)
    there = sorted(p.parent for p in folder.glob(f"*/{NOTE}") if p.parent.name in wanted)
    if not there:
        raise UsageError(f"no recorded case in {folder}", "whywait exam record, or give the folder of the kept runs")
    marked = [mark(known[p.name], app.analysed(blinded(Run.load(p), blind), p).verdicts) for p in there]
    claims = {m.case.name: m.claimed for m in marked}
    return [_with_alarms(m, marked, claims) for m in marked]


def mark(case: Case, verdicts: Sequence[Verdict]) -> Marked:
    """What these verdicts, in their order, say of a case."""
    held = tuple(dict.fromkeys(v.cause for v in verdicts if v.state == "holds"))
    open_ = tuple(dict.fromkeys(v.cause for v in verdicts if v.state == "undecided"))
    return Marked(case, held, open_)


def _with_alarms(base: Marked, marked: Sequence[Marked], claims: dict[str, tuple[str, ...]]) -> Marked:
    """For a base: the causes claimed of it that belong to faults which are not in it."""
    absent = {c for m in marked if m.case.base == base.case.name for c in m.case.accepted}
    absent -= {*base.case.accepted, *base.case.symptoms}
    alarms = tuple(c for c in claims[base.case.name] if c in absent)
    return Marked(base.case, base.claimed, base.undecided, alarms)


def as_dict(marked: Sequence[Marked]) -> dict[str, Any]:
    """The score in plain JSON values."""
    return {
        "totals": {"all": _totals(marked), **{e: _totals([m for m in marked if m.case.engine == e])
                                               for e in sorted({m.case.engine for m in marked})}},
        "confusion": [{"true": true, "claimed": claimed, "cases": n} for (true, claimed), n in _confusion(marked)],
        "cases": [
            {"name": m.case.name, "engine": m.case.engine, "fault": m.case.fault or None, "mark": m.mark,
             "in_two": m.in_two, "claimed": list(m.claimed), "undecided": list(m.undecided),
             "accepted": list(m.case.accepted), "false_alarms": list(m.false_alarms)}
            for m in marked
        ],
    }  # fmt: skip


def confident_wrongs(marked: Sequence[Marked]) -> list[Marked]:
    """Ranked first, holds, and is not so; a fault claimed of a base that lacks it is one too."""
    return [m for m in marked if m.mark == "wrong" or m.false_alarms]


def _totals(marked: Sequence[Marked]) -> dict[str, int]:
    counts = Counter(m.mark for m in marked)
    return {
        "cases": len(marked),
        **{name: counts[name] for name in MARKS},
        "right_in_two": sum(m.in_two for m in marked),
        "bases": sum(not m.case.fault for m in marked),
        "bases_with_false_alarm": sum(bool(m.false_alarms) for m in marked),
    }


def truth(case: Case) -> str:
    """The row of the confusion matrix."""
    if not case.fault:
        return "(base)"
    return " + ".join(case.accepted) if case.together else case.accepted[0]


def _confusion(marked: Sequence[Marked]) -> list[tuple[tuple[str, str], int]]:
    pairs = Counter((truth(m.case), m.claimed[0] if m.claimed else "undecided") for m in marked)
    return sorted(pairs.items(), key=lambda x: (x[0][0], -x[1], x[0][1]))


def text(marked: Sequence[Marked]) -> str:
    """For a terminal: a line per case, then the totals."""
    wide = max(len(m.case.name) for m in marked)
    lines = [f"{m.case.name:<{wide}}  {m.mark:<9}  {_said(m)}" for m in marked]
    return "\n".join([*lines, "", *(_sentence(k, v) for k, v in as_dict(marked)["totals"].items())])


def _said(m: Marked) -> str:
    said = ", ".join(m.claimed[:3]) or f"undecided ({', '.join(m.undecided[:2]) or 'nothing found'})"
    wanted = "" if m.mark == "right" else f"; true: {_causes(m.case)}"
    alarm = f"; not there: {', '.join(m.false_alarms)}" if m.false_alarms else ""
    return said + wanted + alarm


def _causes(case: Case) -> str:
    return (" and " if case.together else " or ").join(case.accepted)


def _sentence(name: str, t: dict[str, int]) -> str:
    n = t["cases"]
    return (f"{name}: {n} cases, right first {t['right']} ({t['right'] / n:.0%}), among the first two "
            f"{t['right_in_two']} ({t['right_in_two'] / n:.0%}), half of two {t['half']}, a symptom "
            f"first {t['symptom']}, undecided {t['undecided']}, confident and wrong {t['wrong']}; a fault claimed of "
            f"a base without it: {t['bases_with_false_alarm']} of {t['bases']}")  # fmt: skip


def markdown(marked: Sequence[Marked]) -> str:
    """The generated part of ``docs/exam.md``."""
    out = ["| engine | cases | right first | right in two | half of two | symptom first | undecided | "
           "confident and wrong | bases with a false alarm |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, t in as_dict(marked)["totals"].items():
        n = t["cases"]
        out.append(f"| {name} | {n} | {t['right']} ({t['right'] / n:.0%}) | {t['right_in_two']} "
                   f"({t['right_in_two'] / n:.0%}) | {t['half']} | {t['symptom']} | {t['undecided']} | {t['wrong']} | "
                   f"{t['bases_with_false_alarm']} of {t['bases']} |")  # fmt: skip
    out += ["", *_matrix(marked), "", "| case | what was put in | mark | claimed, in rank order |", "|---|---|---|---|"]
    out += [f"| {m.case.name} | {_put(m.case)} | {m.mark} | {_said(m)} |" for m in marked]
    return "\n".join(out) + "\n"


def _matrix(marked: Sequence[Marked]) -> list[str]:
    """True cause (rows) against the cause ranked first (columns)."""
    pairs = dict(_confusion(marked))
    rows, columns = sorted({t for t, _ in pairs}), sorted({c for _, c in pairs})
    out = [f"| true cause ↓, claimed first → | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    return out + [f"| {r} | {' | '.join(str(pairs.get((r, c), '')) for c in columns)} |" for r in rows]


def _put(case: Case) -> str:
    args = ", ".join(f"{k} {v:g}" for k, v in case.args.items())
    load = ", ".join(f"{'c' if p.mode == 'concurrency' else 'rate'} {p.target:g}" for p in case.points)
    return f"{case.fault or 'nothing'}{f' ({args})' if args else ''}; {load}"


def into_page(page: str, part: str, begin_mark: str = BEGIN, end_mark: str = END) -> str:
    """``page`` with ``part`` between its markers.

    Raises:
        UsageError: the page has no markers.
    """
    head, begin, rest = page.partition(begin_mark)
    _, end, tail = rest.partition(end_mark)
    if not begin or not end:
        raise UsageError(f"the page has no {begin_mark} … {end_mark}", "put the two lines where the score belongs")
    return f"{head}{begin_mark}\n{part}{end_mark}{tail}"


def blind_rows(folder: Path, names: Collection[str] | None = None) -> list[dict[str, Any]]:
    """For each set of what is taken away: counts of cases, and the names of what is confident and wrong then."""
    rows = []
    for taken in ((), *SETS):
        marked = score(folder, taken, names)
        t, bad = _totals(marked), confident_wrongs(marked)
        rows.append(
            {
                "taken": described(taken),
                **{k: t[k] for k in ("cases", "right", "half", "symptom", "undecided")},
                "wrong_cases": [m.case.name for m in bad],
                "wrong": [f"{m.case.name} without {described(taken)}" for m in bad],
            }
        )
    return rows


def blind_table(found: Sequence[dict[str, Any]]) -> str:
    """The rows of :func:`blind_rows` in Markdown."""
    rows = []
    for r in found:
        counts = [str(r[k]) for k in ("right", "half", "symptom", "undecided")]
        wrong = r["wrong_cases"]
        rows.append(f"| {' | '.join([r['taken'], *counts, str(len(wrong)), ', '.join(wrong)])} |")
    columns = ("right first", "half of two", "a symptom", "undecided", "confident and wrong", "which")
    head = f"| taken away ({found[-1]['cases']} cases) | {' | '.join(columns)} |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows]) + "\n"


def listed(chosen: Sequence[Case], folder: Path) -> list[dict[str, Any]]:
    """As :func:`listing`, as data."""
    return [{"name": c.name, "recorded": (folder / c.name / NOTE).exists(), "put": _put(c), "causes": _causes(c)}
            for c in chosen]  # fmt: skip


def listing(chosen: Sequence[Case], folder: Path) -> str:
    """All cases and whether they are recorded."""
    wide = max(len(c.name) for c in chosen)
    lines = [f"{'recorded' if (folder / c.name / NOTE).exists() else '–':<9} {c.name:<{wide}}  {_put(c)}  → "
             f"{_causes(c)}" for c in chosen]  # fmt: skip
    return "\n".join([*lines, f"{len(chosen)} cases, {sum(x.startswith('recorded') for x in lines)} recorded"])
