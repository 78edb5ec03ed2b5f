"""The journey of ``whywait quality``: two arms asked the same, one after the other; do they still answer alike?

Part of the application layer. What is kept (``quality.json``) are figures per position and per case, never a text or a
token unless that was asked for; all else is judged from them, again by ``whywait show``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whywait import __version__, tasking
from whywait.analyze import agreement
from whywait.core import bounded, secrets
from whywait.core.run import write_json
from whywait.core.tasks import Answered, Case
from whywait.errors import ServiceError, UsageError, WhywaitError
from whywait.grading import Grading
from whywait.judge import agreed
from whywait.lab.arms import Arm
from whywait.lab.state import Engine
from whywait.load import forced, preflight
from whywait.load.given import Given
from whywait.load.lmeval import Sample, Suites
from whywait.session import CANCELLED, Options, Say, stderr
from whywait.starting import allowed, endpoint_of, started

NOTE = "quality.json"
ANSWERS = "answers.jsonl"
PARTS = ("agreement", "tasks")
#: Positions scored in all: where each is a request of its own, and where a whole text is one.
POSITIONS = {True: 400, False: 4000}
#: Per cent: perplexity of B above A's, positions whose most probable token differs, points of accuracy lost.
MARGINS: Mapping[str, float] = {"perplexity": 2.0, "top1": 5.0, "accuracy": 2.0}
AT_ONCE = 4


@dataclass(frozen=True)
class Plan:
    """All that is to be asked. ``positions``: scored in all texts together (None: by POSITIONS); ``context``: tokens of
    a text at most; ``top``: length of the lists; ``cases``: [] where tasks are not asked."""

    a: Arm
    b: Arm
    options: Options
    texts: tuple[Given, ...] = ()
    cases: tuple[Case, ...] = ()
    tasks: str = ""  # what the cases were chosen by
    suites: Suites | None = None  # of lm-eval
    positions: int | None = None
    context: int = 512
    top: int = 50
    margins: Mapping[str, float] = field(default_factory=lambda: dict(MARGINS))
    at_once: int = AT_ONCE
    keep_text: bool = False

    @property
    def same(self) -> bool:
        """A against itself: whatever is found is noise."""
        return self.a == self.b

    def as_dict(self) -> dict[str, Any]:
        names = ("tasks", "positions", "context", "top", "at_once", "keep_text")
        return {"a": self.a.text, "b": self.b.text, "same": self.same, "texts": len(self.texts),
                "cases": len(self.cases), "suites": list(self.suites.names) if self.suites else [],
                "seed": self.options.seed, "margins": dict(self.margins),
                **{k: getattr(self, k) for k in names}}  # fmt: skip


@dataclass
class Comparison:
    """A comparison as far as it has come. ``error`` is what ended it before its time; Ctrl-C is ``interrupted``."""

    plan: Mapping[str, Any]
    directory: Path
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    texts: list[dict[str, Any]] = field(default_factory=list)
    cases: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""  # there is no agreement of distributions
    partial: str = "it was cut off"
    error: WhywaitError | None = None
    interrupted: bool = False

    def result(self) -> dict[str, Any]:
        """All there is to say of it once it is whole, or as whole as it will be: plain JSON values."""
        return self._result

    @functools.cached_property
    def _result(self) -> dict[str, Any]:
        ways = {k: a["way"] for k, a in self.arms.items() if a.get("way")}
        kept = {"texts": self.texts, "why": self.why, "ways": ways,
                "k": min((a["k"] for a in self.arms.values() if a.get("k")), default=None)}  # fmt: skip
        found = agreed.agreement_of(kept, self.plan["margins"])
        tasks = tasking.judged(self.cases, self.plan["margins"]["accuracy"], self.plan["seed"]) if self.cases else None
        claims = [*found["claims"], *(tasks["claims"] if tasks else [])]
        same = bool(self.plan["same"])
        return {
            "whywait_version": __version__, "kind": "quality", "headline": agreed.headline(claims, same),
            "plan": dict(self.plan), "partial": bool(self.partial), "partial_reason": self.partial, "arms": self.arms,
            "claims": claims, "agreement": found, "tasks": tasks,
            "doubts": [*agreed.doubts(found, self.arms, same), *(tasks["doubts"] if tasks else [])],
            "texts": self.texts, "cases": self.cases,
        }  # fmt: skip

    def _repr_html_(self) -> str:
        from whywait.report import notebook
        from whywait.report.quality import print_quality

        return notebook.as_html(lambda out: print_quality(self.result(), str(self.directory), out))

    def save(self) -> dict[str, Any]:
        found: dict[str, Any] = secrets.cleaned(self.result())
        write_json(self.directory / NOTE, found)
        return found


def qualify(plan: Plan, directory: Path, say: Say = stderr) -> Comparison:
    """Ask A, then B; compare. Ctrl-C and a failing service leave what both were asked, labelled PARTIAL.

    Raises:
        WhywaitError: before anything could be compared.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} is not empty", "choose a new folder for --out")
    _allowed(plan)
    c, sides = Comparison(plan.as_dict(), directory), {"A": _Side(), "B": _Side()}
    with contextlib.closing(Grading()) as by:
        _both(plan, c, sides, by, _heard(say))
        _at_last(plan, c, sides, by)
    if c.error is not None and not c.texts and not c.cases:
        raise c.error
    directory.mkdir(parents=True, exist_ok=True)
    c.save()
    if plan.keep_text:
        tasking.keep_texts(directory / ANSWERS, plan.cases, {k: s.answers for k, s in sides.items()})
    return c


def _heard(say: Say) -> Say:
    """``say`` that also ends it where the task that awaits it was cancelled."""

    def told(line: str) -> None:
        if (cancelled := CANCELLED.get()) is not None and cancelled.is_set():
            raise KeyboardInterrupt
        say(line)

    return told


def _both(plan: Plan, c: Comparison, sides: dict[str, _Side], by: Grading, say: Say) -> None:
    """Ask A, then B."""
    try:
        for name, arm in (("A", plan.a), ("B", plan.b)):
            say(f"arm {name}: {arm.text}")
            with started(arm, name, say) as engine:
                told = _keeping(plan, c, sides, by, say) if name == "B" else say
                _ask(plan, c, sides, (name, arm, engine), told)
        c.partial = ""
    except KeyboardInterrupt:
        c.interrupted, c.partial = True, "interrupted"
    except WhywaitError as exc:
        c.error, c.partial = exc, exc.message


def _at_last(plan: Plan, c: Comparison, sides: Mapping[str, _Side], by: Grading) -> None:
    """Compare what there is; Ctrl-C in that leaves what has been compared until then."""
    try:
        _compare(plan, c, sides, by)
    except KeyboardInterrupt:
        c.interrupted, c.partial = True, c.partial or "interrupted"


def _keeping(plan: Plan, c: Comparison, sides: Mapping[str, _Side], by: Grading, say: Say) -> Say:
    """``say`` that also keeps what both arms have been asked so far: no ending, however sudden, loses more than the
    piece that was under way."""

    def told(line: str) -> None:
        say(line)
        part = dataclasses.replace(c, texts=[], cases=[])
        _compare(plan, part, sides, by)
        if part.texts or part.cases:
            c.directory.mkdir(parents=True, exist_ok=True)
            part.save()

    return told


def load(directory: str | Path) -> Comparison:
    """A comparison that was kept.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    path = Path(directory) / NOTE
    try:
        kept = bounded.read_json(path, 512 * bounded.MIB)
        c = Comparison(kept["plan"], Path(directory), kept["arms"], kept["texts"], kept["cases"],
                       kept["agreement"]["why"], str(kept["partial_reason"]))  # fmt: skip
        c.result()  # whatever is damaged below those is found here
        return c
    except (OSError, LookupError, TypeError, AttributeError, ArithmeticError, ValueError, AssertionError) as exc:
        raise UsageError(f"{path} holds no whywait comparison: {exc}", "give the folder of whywait quality") from None


@dataclass
class _Side:
    """What one arm answered: scores by index of the text, answers in the order of the cases."""

    scores: dict[int, forced.Score] = field(default_factory=dict)
    answers: list[Answered] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


def _ask(plan: Plan, c: Comparison, sides: dict[str, _Side], at: tuple[str, Arm, Engine | None], say: Say) -> None:
    name, arm, engine = at
    target = _found(plan, arm, engine)
    c.arms[name] = {"text": arm.text, "model": target.model, "engine": target.engine.name if target.engine else None,
                    "kv_tokens": engine.kv_tokens if engine is not None else None}  # fmt: skip
    if plan.texts and not c.why:
        try:
            _score(plan, c, sides, (name, target), say)
        except forced.Untold as exc:
            c.why = f"arm {name} does not tell its distributions ({exc})"
        if c.why:
            tasks = plan.cases or plan.suites
            say(f"  {c.why}; only tasks are compared" if tasks else f"  {c.why}")
            if not tasks:
                raise ServiceError(f"distributions cannot be compared: {c.why}", "compare tasks: leave out --only")
    if plan.cases:
        how = (plan.at_once, plan.options.workload.timeout_s)
        tasking.asked(target, plan.cases, how, say, sides[name].answers)
    if plan.suites is not None:
        keep = c.directory / f"lm-eval-{name.lower()}" if plan.keep_text else None
        sides[name].samples = tasking.suites_run(target, plan.suites, keep, say)


def _score(plan: Plan, c: Comparison, sides: dict[str, _Side], at: tuple[str, preflight.Target], say: Say) -> None:
    name, target = at
    way = forced.way_of(target, plan.top)
    c.arms[name] |= {"way": way.says, "k": way.k, "each": way.each}
    each = _each(plan, bool(c.arms["A"]["each"]))
    asked = forced.requests_at_most(way, len(plan.texts), each)
    say(f"  distributions: {way.says}; lists of {way.k}; at most {asked:,} requests")
    other = sides["A"].scores if name == "B" else {}
    found = forced.score(target, way, plan.texts, each, plan.context)
    with contextlib.closing(found):
        for i, one in found:
            if i in other and other[i].digest != one.digest:
                c.why = "the arms cut the same text into different tokens: their distributions cannot be compared"
                return
            sides[name].scores[i] = one
            done = len(sides[name].scores)
            if done % 10 == 0 or done == len(plan.texts):
                say(f"  {done} of {len(plan.texts)} texts scored")


def _compare(plan: Plan, c: Comparison, sides: Mapping[str, _Side], by: Grading) -> None:
    """What both arms did; the rest of a comparison that was cut off compares nothing."""
    a, b = sides["A"].scores, sides["B"].scores
    if not c.why:
        for i in sorted(set(a) & set(b)):
            g = plan.texts[i]
            found = agreement.positions(a[i].scored, b[i].scored)
            c.texts.append({"name": g.name, "kind": g.kind, "tokens": a[i].tokens, **found})
    tasking.graded(plan.cases, sides["A"].answers, sides["B"].answers, by, c.cases)
    c.cases += tasking.joined(sides["A"].samples, sides["B"].samples)


def _each(plan: Plan, one_by_one: bool) -> int:
    most = plan.positions or POSITIONS[one_by_one]
    return max(1, -(-most // max(len(plan.texts), 1)))


def _allowed(plan: Plan) -> None:
    """
    Raises:
        UsageError: a service of another machine would be sent this without a word.
    """
    each = _each(plan, True)
    requests = len(plan.texts) * (each + 2) + len(plan.cases)
    allowed((plan.a, plan.b), dataclasses.replace(plan.options, max_requests=requests))


def ceiling(plan: Plan) -> str:
    """What each arm is sent at most, in words."""
    out = []
    if plan.texts:
        out.append(f"{len(plan.texts)} texts of up to {plan.context:,} tokens to score, "
                   f"one request each or one per position ({_each(plan, True) * len(plan.texts):,})")  # fmt: skip
    if plan.cases:
        tokens = sum(case.max_tokens for case in plan.cases)
        out.append(f"{len(plan.cases)} tasks (at most {tokens:,} tokens of answers)")
    if plan.suites:
        documents = f"{plan.suites.limit} documents each" if plan.suites.limit else "all documents"
        out.append(f"what lm-eval asks for {', '.join(plan.suites.names)} ({documents})")
    return "each arm is sent " + " and ".join(out)


def _found(plan: Plan, arm: Arm, engine: Engine | None) -> preflight.Target:
    endpoint = endpoint_of(plan.options, engine.url if engine is not None else arm.text)
    return dataclasses.replace(preflight.find(endpoint, plan.options.model), extra=plan.options.body)


def claims_open(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Claims that were not decided."""
    return [c for c in result["claims"] if c["state"] == "undecided"]
