"""The journey of ``--vary NAME=V1,V2,…``: a paired trial per value of one setting of B, one after another, one table.

Part of the application layer. Each trial is one like any other, in a folder of its own below; ``vary.json`` says which
they are, and the table is made from them again whenever it is shown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whywait import __version__, app, trying
from whywait.core import bounded
from whywait.core.run import write_json
from whywait.core.secrets import cleaned
from whywait.errors import UsageError, WhywaitError
from whywait.judge.vary import OPEN, error_of, in_order, said_of, turns
from whywait.lab.arms import arm_of, varied
from whywait.session import Say, stderr

NOTE = "vary.json"
MOST = 32
_FORM = re.compile(r"\s*([A-Za-z_][\w.]*)\s*=\s*(.+)", re.DOTALL)


@dataclass
class Varied:
    """Trials by value, as far as they have come."""

    name: str
    directory: Path
    values: tuple[str, ...]
    trials: list[tuple[str, trying.Trial]] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        return any(t.interrupted for _, t in self.trials)

    @property
    def error(self) -> WhywaitError | None:
        return next((t.error for _, t in self.trials if t.error), None)

    def result(self) -> dict[str, Any]:
        """All there is to say of them together: plain JSON values."""
        found = [(v, t.result()) for v, t in self.trials]
        rows = [{**row, "said": said_of(row)} for row in turns(found)]
        told = [
            {"value": v, "directory": folder_of(self.name, v), "pairs": r["pairs"], "decided": r["decided"],
             "headline": r["headline"], "partial": r["partial"], "partial_reason": r["partial_reason"],
             "b": r["plan"]["b"], "doubts": r["doubts"], "handover": _handover(r)}
            for v, r in in_order(found)
        ]  # fmt: skip
        plan = found[0][1]["plan"] if found else {}
        return {
            "whywait_version": __version__, "kind": "vary", "name": self.name, "values": list(self.values),
            "a": plan.get("a", ""), "technique": plan.get("technique", ""), "trials": told, "turns": rows,
            "headline": headline(self.name, rows), "error_probability": error_of(len(found)),
            "missing": [v for v in self.values if v not in dict(self.trials)],
        }  # fmt: skip

    def save(self) -> None:
        write_json(self.directory / NOTE, cleaned(self.result()))


def parse(text: str) -> tuple[str, tuple[str, ...]]:
    """``delay_ms=0,100,400`` → its name and values.

    Raises:
        UsageError: it is not of that form, or a value comes twice.
    """
    found = _FORM.fullmatch(text)
    values = tuple(v.strip() for v in found[2].split(",")) if found else ()
    if not found or not all(values) or not 2 <= len(values) <= MOST or len(set(values)) < len(values):
        raise UsageError(f"--vary {text!r} is not NAME=V1,V2,…", "a setting of B and 2 to 32 values, each once")
    return found[1], values


def vary(
    plan: trying.Plan, what: tuple[str, Sequence[str]], directory: Path, say: Say = stderr,
    watch: Callable[[], app.Watch | None] = lambda: None,
) -> Varied:  # fmt: skip
    """Run the trial of ``plan`` with B's setting at each value; trials that are whole already are taken as they are.

    Raises:
        WhywaitError: before a single pair of the first was measured.
    """
    name, values = what
    if "{" + name + "}" in plan.a.text:
        raise UsageError(f"arm A has {{{name}}} too", "what is varied is B's")
    plans = [dataclasses.replace(plan, b=arm_of(varied(plan.b.text, name, v))) for v in values]
    with trying.alone(directory):
        return _vary(plans, (name, values), directory, say, watch)


def _vary(
    plans: Sequence[trying.Plan], what: tuple[str, Sequence[str]], directory: Path, say: Say,
    watch: Callable[[], app.Watch | None],
) -> Varied:  # fmt: skip
    name, values = what
    if (directory / NOTE).exists():
        if _kept(directory) != (name, tuple(values)):
            raise UsageError(f"{directory} varies something else", "choose a new folder for --out")
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} is not empty", "choose a new folder for --out")
    directory.mkdir(parents=True, exist_ok=True)
    found = Varied(name, directory, tuple(values))
    found.save()
    for value, one in zip(values, plans, strict=True):
        say(f"{name}={value}, {len(found.trials) + 1} of {len(values)}")
        try:
            t = _whole(one, directory / folder_of(name, value))
            t = t or trying.trial(one, directory / folder_of(name, value), say, watch())
        except WhywaitError:
            if not found.trials:
                (directory / NOTE).unlink(missing_ok=True)
                raise
            found.save()
            raise
        found.trials.append((value, t))
        found.save()
        if t.interrupted or t.error:
            break
    return found


def load(directory: str | Path) -> Varied:
    """What was kept, judged again.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    name, values = _kept(Path(directory))
    out = Varied(name, Path(directory), values)
    for v in values:
        if (out.directory / folder_of(name, v) / trying.NOTE).exists():
            out.trials.append((v, trying.load(out.directory / folder_of(name, v))))
    return out


def folder_of(name: str, value: str) -> str:
    """Of a value's trial, below the table's. No two values have the same: where letters had to go, a mark is added."""
    text = f"{name}={value}"
    safe = re.sub(r"[^\w.=+-]", "_", text)
    return safe if safe == text and len(text) <= 100 else f"{safe[:90]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _kept(directory: Path) -> tuple[str, tuple[str, ...]]:
    """Name and values of the table that is kept there.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    path = directory / NOTE
    hint = "give the folder of whywait ab or try --vary"
    try:
        kept = bounded.read_json(path)
        name, values = kept["name"], kept["values"]
        if not isinstance(name, str) or not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise ValueError("name and values are no texts")
        return parse(f"{name}={','.join(values)}")
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}", hint) from None
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        raise UsageError(f"{path} holds no table of trials: {exc}", hint) from None
    except UsageError:
        raise UsageError(f"{path} holds no table of trials: it varies nothing", hint) from None


def headline(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: what turns, or that nothing does."""
    found = [f"{r['claim'].removeprefix('B ')}: {r['said']}" for r in rows if r["turns"]]
    sure = [r for r in rows if any(x["outcome"] != OPEN for x in r["at"])]
    none = "no claim turns between gain and loss here" if sure else "no claim is decided at any value"
    return f"by {name}: " + ("; ".join(found) if found else none)


def _whole(plan: trying.Plan, directory: Path) -> trying.Trial | None:
    """The trial in ``directory`` if it is this very one, and all of it."""
    if not (directory / trying.NOTE).exists():
        return None
    t = trying.load(directory)
    same = cleaned(json.loads(json.dumps(plan.as_dict()))) == json.loads(json.dumps(dict(t.plan)))
    return t if same and not t.partial else None


def _handover(result: Mapping[str, Any]) -> dict[str, float | None]:
    """B's hand-over figures at the main load, where it has any."""
    effects: Mapping[str, Any] = next(iter(result["effects"].values()), {})
    return {n: e["b"] for n, e in effects.items() if n.startswith(("handover", "restore_stall")) and e["b"] is not None}
