"""The journey of ``whywait ab`` and ``whywait try``: rounds of two arms in turn, paired, until all is decided.

Part of the application layer. A round is a Run like any other (``app.measure``), in a folder of its own; the trial
keeps what it takes from each in ``trial.json``, after every round, and is judged from that alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whywait import __version__, app
from whywait.analyze.compare import figures
from whywait.analyze.disturbed import disturbances
from whywait.core import bounded
from whywait.core.run import write_json
from whywait.core.secrets import cleaned
from whywait.errors import ServiceError, UsageError, WhywaitError
from whywait.judge.kept import check_trial
from whywait.judge.paired import MARGIN, Asked
from whywait.judge.trial import judged
from whywait.lab.arms import Arm, roomy
from whywait.lab.cpus import cpu_split
from whywait.lab.faults import calibration_ms
from whywait.lab.places import claimed
from whywait.lab.state import Engine
from whywait.load.recipe import Load
from whywait.session import Options, Say, stderr
from whywait.starting import allowed, started

NOTE = "trial.json"
WARM_UP = "warm-up"
ENOUGH = 4  # pairs, below which only the plainest effects are decided
LOOPS = 3  # of the fixed piece of work before and after each round; the best counts
FACTS = ("name", "model", "kind", "slots", "ctx_per_slot", "kv_tokens", "threads")


@dataclass(frozen=True)
class Plan:
    """A trial, all of it said before the first round. ``loads``: the first is the main one, further ones have a label.

    ``low`` and ``high`` are rounds of each arm, so pairs. ``exclude`` names rules (of ``analyze.disturbed``) by which
    a pair with a disturbed round does not count. ``warm`` is how many requests are sent before each round's points.
    """

    a: Arm
    b: Arm
    options: Options
    loads: tuple[Load, ...]
    asked: tuple[Asked, ...]
    promise: str = ""
    margin: float = MARGIN
    low: int = 4
    high: int = 12
    exclude: tuple[str, ...] = ()
    seed: int = 1
    warm: int | None = None
    technique: str = ""
    changes_answers: bool = False  # so quality is part of the price, and a trial that does not measure it says so

    @property
    def same(self) -> bool:
        """An A/A trial: whatever it finds is false."""
        return self.a == self.b

    def as_dict(self) -> dict[str, Any]:
        """What ``trial.json`` keeps of it, and what a trial that is gone on with must have in common."""
        loads = [{k: getattr(x, k) for k in ("mode", "target", "requests", "duration_s", "label")} for x in self.loads]
        for row, x in zip(loads, self.loads, strict=True):
            if x.workload:
                row["workload"] = x.workload.as_dict()
        o = self.options
        return {
            "a": self.a.text, "b": self.b.text, "same": self.same, "loads": loads,
            "asked": [dataclasses.asdict(a) for a in self.asked], "promise": self.promise, "margin": self.margin,
            "low": self.low, "high": self.high, "exclude": list(self.exclude), "seed": self.seed, "warm": self.warm,
            "technique": self.technique, "workload": o.workload.as_dict(), "slo": dict(o.slo), "model": o.model,
            "dialect": o.dialect, "stream": o.stream, "body": o.body, "headers": [name for name, _ in o.reach.headers],
            **({"quality_arms": [roomy(a).text for a in (self.a, self.b)]} if self.changes_answers else {}),
        }  # fmt: skip


def order(seed: int, rounds: int) -> list[str]:
    """Arms of so many rounds: blocks of A B B A or B A A B, tossed up, so that drift favours neither."""
    rng = np.random.default_rng([seed, 7])
    blocks = ["BAAB" if toss else "ABBA" for toss in rng.integers(2, size=-(-rounds // 4))]
    return list("".join(blocks))[:rounds]


@dataclass
class Trial:
    """A trial as far as it has come. ``error`` is what ended it before its time; Ctrl-C is ``interrupted``."""

    plan: Mapping[str, Any]
    directory: Path
    rounds: list[dict[str, Any]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    partial: str = "it was cut off"
    error: WhywaitError | None = None
    interrupted: bool = False
    noise_of: str = ""  # the folder of the A/A trial before it
    quality: dict[str, Any] | None = None  # what ``whywait quality`` said of the arms afterwards; None: not asked
    salt: str = field(default_factory=lambda: os.urandom(4).hex())  # keeps its prompts apart from other trials'

    def result(self) -> dict[str, Any]:
        """All there is to say of it: plain JSON values."""
        head = {"whywait_version": __version__, "kind": "trial", "plan": dict(self.plan), "order": self.order,
                "partial": bool(self.partial), "partial_reason": self.partial, "aa": self.noise_of,
                "salt": self.salt, "quality": self.quality}  # fmt: skip
        found: dict[str, Any] = {**head, **judged(self.plan, self.rounds), "rounds": self.rounds}
        if self.quality:
            states = {c["state"] for c in self.quality["claims"]}
            worst = next((x for x in ("fails", "undecided", "holds") if x in states), "undecided")
            found["headline"] += f"; quality of the answers: {worst}"
        whole: dict[str, Any] = cleaned(found)
        return whole

    def _repr_html_(self) -> str:
        from whywait.report import notebook
        from whywait.report.trial import print_trial

        return notebook.as_html(lambda out: print_trial(self.result(), str(self.directory), out))

    def save(self) -> dict[str, Any]:
        found = self.result()
        write_json(self.directory / NOTE, found)
        return found


def trial(
    plan: Plan, directory: Path, say: Say = stderr, watch: app.Watch | None = None, *, noise_of: str = "",
    whole_ok: bool = False,
) -> Trial:  # fmt: skip
    """Run rounds until every claim is decided, at most ``plan.high`` of each arm; go on where ``directory`` holds a
    part of this very trial. ``whole_ok``: the answers are compared next, so a whole trial whose comparison is missing
    or was cut off comes back as it is.

    Raises:
        WhywaitError: before a single pair was measured. Afterwards what there is comes back, with ``error``.
    """
    allowed((plan.a, plan.b), plan.options)
    if plan.high < ENOUGH:
        say(f"{plan.high} pairs seldom decide anything: --rounds {ENOUGH} or more")
    with alone(directory):
        return _trial(plan, _begun(plan, directory, noise_of, whole_ok), say, watch)


def alone(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Two processes with one --out would write over each other's trial: the second is refused (UsageError)."""
    return claimed(directory)


def _trial(plan: Plan, t: Trial, say: Say, watch: app.Watch | None) -> Trial:
    try:
        while not _over(plan, t):
            _round(plan, t, say, watch)
            t.save()
            if t.interrupted:
                break
    except KeyboardInterrupt:
        t.interrupted = True
    except WhywaitError as exc:
        t.error = exc
        if len(t.rounds) < 2 and not any(r["whole"] for r in t.rounds):
            _tidy(t)
            raise
    t.partial = "interrupted" if t.interrupted else t.error.message if t.error else ""
    t.save()
    return t


def load(directory: str | Path) -> Trial:
    """A trial that was kept.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    path = Path(directory) / NOTE
    try:
        kept = bounded.read_json(path)
        check_trial(kept)
        t = Trial(kept["plan"], Path(directory), kept["rounds"], kept["order"], kept["partial_reason"],
                  noise_of=kept["aa"], quality=kept.get("quality"), salt=kept["salt"])  # fmt: skip
        t.result()  # whatever else is wrong shows in judging it
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}", "give the folder of whywait ab") from None
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise UsageError(f"{path} holds no whywait trial: {exc}", "give the folder of whywait ab") from None
    return t


def _begun(plan: Plan, directory: Path, noise_of: str, whole_ok: bool) -> Trial:
    if not (directory / NOTE).exists():
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UsageError(f"{directory} is not empty", "choose a new folder for --out")
        directory.mkdir(parents=True, exist_ok=True)
        return Trial(plan.as_dict(), directory, order=order(plan.seed, 2 * plan.high), noise_of=noise_of)
    t = load(directory)
    mine = cleaned(json.loads(json.dumps(plan.as_dict())))
    other = [k for k in mine if mine[k] != t.plan.get(k)]
    if other:
        raise UsageError(f"{directory} holds another trial: {', '.join(other)} differ", "choose a new folder for --out")
    t.rounds = [r for r in t.rounds if r["whole"]]
    if len(t.rounds) % 2:  # the second of a pair comes right after the first, or they are no pair
        t.rounds.pop()
    if _over(plan, t):
        if whole_ok and (t.quality is None or t.quality["partial"]):
            return t
        raise UsageError(f"{directory} holds this trial, and it is whole", f"whywait show {directory}")
    # What is measured again must not be found in the cache of a service that ran on.
    t.partial, t.salt = t.partial or "it was cut off", os.urandom(4).hex()
    return t


def _over(plan: Plan, t: Trial) -> bool:
    """After whole blocks of four, so that both orders were seen equally often; or when all rounds are used up."""
    if len(t.rounds) >= 2 * plan.high:
        return True
    if not t.rounds or len(t.rounds) % 4:
        return False
    found = judged(t.plan, t.rounds)
    return bool(found["pairs"] >= plan.low and found["decided"])


def _round(plan: Plan, t: Trial, say: Say, watch: app.Watch | None) -> None:
    number, name = len(t.rounds), t.order[len(t.rounds)]
    arm, pair = (plan.a if name == "A" else plan.b), number // 2
    rounds = f"{2 * plan.low}–{2 * plan.high}" if plan.low < plan.high else f"{2 * plan.high}"
    say(f"round {number + 1} of {rounds}, arm {name}: {arm.text}")
    began = time.monotonic()
    with started(arm, name, say) as engine:
        cpus = engine.cpus if engine is not None else cpu_split()[0]
        before = calibration_ms(cpus, LOOPS)
        options = _options(plan, t, (name, pair), engine)
        result = app.measure(options, points_of(plan), say if not number else _quiet, watch, engine)
        after = calibration_ms(cpus, LOOPS)
    told = _told(result, plan)
    t.rounds.append({
        "number": number, "arm": name, "pair": pair, "run": result.directory.name, "whole": not told["partial"],
        "seconds": round(time.monotonic() - began, 1), "calibration_ms": [before, after], **told,
    })  # fmt: skip
    t.interrupted = result.interrupted
    if result.interrupted:
        return
    if told["partial"]:
        raise ServiceError(f"round {number + 1} (arm {name}) was cut short: {told['partial']}", "its run is kept")
    if not any(p["counts"].get("ok") for p in result.summary["points"] if p["label"] != WARM_UP):
        t.rounds[-1]["whole"] = False
        raise ServiceError(f"no request of round {number + 1} (arm {name}) succeeded", f"whywait show {options.out}")
    say("  " + _in_short(t.rounds[-1], plan))


def _options(plan: Plan, t: Trial, at: tuple[str, int], engine: Engine | None) -> Options:
    """Of a round. Both arms of a pair are sent the same prompts, and pairs different ones."""
    name, pair = at
    arm, o = (plan.a if name == "A" else plan.b), plan.options
    # Two rounds on one service that runs on would find each other's prompts in its cache.
    own = name.lower() if plan.same and not arm.restarts else ""
    folder = t.directory / f"round-{len(t.rounds) + 1:02d}-{name.lower()}"
    if folder.exists():  # of a round that was cut off
        folder = folder.with_name(f"{folder.name}-{time.strftime('%H%M%S')}")
    return dataclasses.replace(
        o,
        url=engine.url if engine is not None else arm.text,
        out=str(folder),
        salt=f"{t.salt}-{pair}{own}",
        text_seed=o.workload.seed + int(t.salt, 16) + 1_000_003 * pair + (500_009 if own == "b" else 0),
        floor=o.floor and not t.rounds,
    )


def points_of(plan: Plan) -> list[Load]:
    """The load points of every round: its warm-up, in no figure, and what is asked."""
    main = plan.loads[0]
    width = int(main.target) if main.mode == "concurrency" else 4
    n = max(2, width) if plan.warm is None else plan.warm
    first = [Load("concurrency", min(width, max(n, 1)), requests=n, label=WARM_UP)] if n else []
    return [*first, *plan.loads]


def _told(result: app.Result, plan: Plan) -> dict[str, Any]:
    """What the trial keeps of a round."""
    run, summary = result.run, result.summary
    named = {p["label"] or "": p for p in summary["points"] if p["label"] != WARM_UP}
    labels = [x.label or "" for x in plan.loads]
    engine = run.manifest.engine
    return {
        "partial": run.manifest.partial_reason if run.manifest.partial else "",
        "disturbed": disturbances(run, summary),
        "doubts": [d["what"] for d in summary["doubts"]],
        "invalid": list(summary["invalid"]),
        "engine": {k: engine.get(k) for k in FACTS if engine.get(k) is not None},
        "figures": {name: figures(run, named[name]) for name in labels if name in named},
    }


def _in_short(r: Mapping[str, Any], plan: Plan) -> str:
    found = r["figures"].get("", {})
    said = [f"{a.metric} {found[a.metric]:.4g}" for a in plan.asked if not a.load and found.get(a.metric) is not None]
    return ", ".join([*said, *r["disturbed"].values()])


def _tidy(t: Trial) -> None:
    """Nothing was measured: leave no folder behind, unless something is in it."""
    if t.rounds:
        t.save()
        return
    (t.directory / NOTE).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        t.directory.rmdir()


def _quiet(_line: str) -> None:
    pass


def plan_of_aa(plan: Plan, arm: str = "a") -> Plan:
    """The A/A trial of a plan: the same in all but the second arm. It shows what two rounds of the same differ by."""
    one = plan.a if arm == "a" else plan.b
    return dataclasses.replace(plan, a=one, b=one, promise="", asked=_metrics_only(plan.asked),
                               changes_answers=False)  # fmt: skip


def _metrics_only(asked: Sequence[Asked]) -> tuple[Asked, ...]:
    return tuple(a for a in asked if not a.price) or tuple(asked)
