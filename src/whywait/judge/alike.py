"""May two runs be compared at all, and what was changed between them.

What makes figures mean something else (definitions, workload, model, SLO, load) is *unlike*: it is named, and it takes
a word to compare all the same. What one changes to see what it does (engine, flags, machine) is *changed*: it is
listed. What a source does not tell can be neither.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from whywait.analyze.digest import Digest
from whywait.errors import UsageError

KINDS = ("definitions", "workload", "model", "slo", "load")
#: Part of a workload that is not what was asked for: seeds give other requests of the same recipe.
_FREE = ("seed", "slo")
_WHERE = ("--out", "--html", "--report")  # of a command: flags with a value that say where results go
_MOST = 160  # characters of a value


class Unlike(NamedTuple):
    """``kind`` is one of ``KINDS``; ``what`` the field, ``a`` and ``b`` its values as text."""

    kind: str
    what: str
    a: str
    b: str

    @property
    def said(self) -> str:
        return f"{self.what}: {self.a} → {self.b}"


def unlike(a: Digest, b: Digest) -> list[Unlike]:
    """Every difference that makes figures mean something else, the load aside (see :func:`loads`)."""
    out = []
    for key in ("schema_version", "definitions"):
        out += _compared("definitions", key, a.facts.get(key), b.facts.get(key))
    out += _compared("model", "model", a.facts.get("model"), b.facts.get("model"))
    out += list(_fields("workload", "workload", *(_recipe(d.facts.get("workload")) for d in (a, b))))
    for key in ("slo", "slo_of_classes"):
        out += list(_fields("slo", key, a.facts.get(key), b.facts.get(key), absent=True))
    return out


def untold(a: Digest, b: Digest) -> list[str]:
    """What one of them does not tell, so that it cannot be held against it."""
    names = {"model": "the model", "workload": "the workload", "definitions": "the definitions"}
    return [said for key, said in names.items() if a.facts.get(key) is None or b.facts.get(key) is None]


def changed(a: Digest, b: Digest) -> list[Unlike]:
    """Engine, flags, machine, whywait itself: what one changes, as fields of both manifests that differ."""
    out: list[Unlike] = []
    for key in ("made_by", "whywait_version", "described", "seed"):
        out += _compared("changed", key, a.facts.get(key), b.facts.get(key))
    out += _commands(a.facts.get("command"), b.facts.get("command"))
    both = _tell_alike(a, b)
    for key in ("engine", "machine", "asked"):
        if a.facts.get(key) is not None and b.facts.get(key) is not None:
            out += list(_fields("changed", key, a.facts[key], b.facts[key], absent=both))
    return out


def _tell_alike(a: Digest, b: Digest) -> bool:
    """That what one tells the other would tell too if it had it: made the same way, not imported, of one engine."""
    ways, engines = ({str(v) for v in x} for x in (
        (d.facts.get("made_by") for d in (a, b)), ((d.facts.get("engine") or {}).get("name") for d in (a, b))
    ))  # fmt: skip
    return len(ways) == len(engines) == 1 and "imported" not in ways


def loads(a: Digest, b: Digest, anyway: bool) -> tuple[list[tuple[int, int]], list[str], list[str]]:
    """Load points that are the same in both, as indices, and the names of those that only one has. Of several of one
    name the first goes with the first, the second with the second. ``anyway`` pairs the one point of each where none is
    the same.

    Raises:
        UsageError: no load point is in both.
    """
    if not a.points or not b.points:
        side = a if not a.points else b
        raise UsageError(f"{side.name} has no load point: nothing was measured", "choose another run")
    at = {place: i for i, place in enumerate(a.places)}
    pairs = [(at[place], j) for j, place in enumerate(b.places) if place in at]
    if not pairs and anyway and len(a.points) == len(b.points) == 1:
        pairs = [(0, 0)]
    if not pairs:
        lists = [", ".join(p.load for p in d.points) for d in (a, b)]
        one = len(a.points) == len(b.points) == 1
        hint = "--allow load compares them all the same" if one else "measure both at the same --concurrency or --rate"
        raise UsageError(f"no load point is in both: {lists[0]} → {lists[1]}", hint)
    seen_a, seen_b = {i for i, _ in pairs}, {j for _, j in pairs}
    only_a = [p.load for i, p in enumerate(a.points) if i not in seen_a]
    return pairs, only_a, [p.load for j, p in enumerate(b.points) if j not in seen_b]


def several(a: Digest, b: Digest) -> list[str]:
    """Load points that both have and one has more than once, by name."""
    many = [p.load for d in (a, b) for p, (_, before) in zip(d.points, d.places, strict=True) if before]
    both = {p.load for p in a.points} & {p.load for p in b.points}
    return [load for load in dict.fromkeys(many) if load in both]


def check(found: Sequence[Unlike], allowed: Sequence[str], name: str) -> None:
    """
    Raises:
        UsageError: a difference of a kind that was not allowed; every one is named.
    """
    refused = [u for u in found if u.kind not in allowed]
    if not refused:
        return
    kinds = list(dict.fromkeys(u.kind for u in refused))
    said = "; ".join(u.said for u in refused)
    raise UsageError(f"{name} is not comparable with A: {said}",
                     f"to compare all the same: --allow {','.join(kinds)}")  # fmt: skip


def allowed_kinds(texts: Sequence[str]) -> tuple[str, ...]:
    """``workload,slo`` (repeatable).

    Raises:
        UsageError: there is no such kind.
    """
    out = [k.strip() for text in texts for k in text.split(",") if k.strip()]
    for k in out:
        if k not in KINDS:
            raise UsageError(f"--allow: {k!r} is not a kind of difference", f"one of: {', '.join(KINDS)}")
    return tuple(dict.fromkeys(out))


def _commands(a: Any, b: Any) -> list[Unlike]:
    """The words in which two command lines differ; where results went does not matter."""
    if not isinstance(a, list) or not isinstance(b, list) or not a or not b:
        return []
    x, y = ([str(w) for i, w in enumerate(c) if w not in _WHERE and (not i or c[i - 1] not in _WHERE)] for c in (a, b))
    parts = [op for op in difflib.SequenceMatcher(None, x, y, autojunk=False).get_opcodes() if op[0] != "equal"]
    if not parts:
        return []
    gone, come = (" … ".join(shlex.join(c[lo:hi]) for lo, hi in spans if hi > lo)
                  for c, spans in ((x, [p[1:3] for p in parts]), (y, [p[3:5] for p in parts])))  # fmt: skip
    return [Unlike("changed", "command", _text(gone or None), _text(come or None))]


def _recipe(workload: Any) -> Any:
    """A workload without seed and SLO."""
    if not isinstance(workload, Mapping):
        return None
    out = {k: v for k, v in workload.items() if k not in _FREE}
    if isinstance(out.get("classes"), list):
        out["classes"] = [{k: v for k, v in c.items() if k not in _FREE} if isinstance(c, Mapping) else c
                          for c in out["classes"]]  # fmt: skip
    return out


def _fields(kind: str, name: str, a: Any, b: Any, absent: bool = False) -> Iterator[Unlike]:
    """``absent``: a field that one side lacks is a difference too; else what is not told is not held against it."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            if absent or (key in a and key in b):
                yield from _fields(kind, f"{name}.{key}", a.get(key), b.get(key), absent)
        return
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and any(isinstance(x, Mapping) for x in a):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _fields(kind, f"{name}.{i}", x, y, absent)
        return
    yield from _compared(kind, name, a, b, absent)


def _compared(kind: str, what: str, a: Any, b: Any, absent: bool = False) -> list[Unlike]:
    if not absent and (a is None or b is None):
        return []
    return [] if a == b or (not a and not b and a != 0 and b != 0) else [Unlike(kind, what, _text(a), _text(b))]


def _text(value: Any) -> str:
    if value is None or value == {}:
        return "–"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST else text[: _MOST - 1] + "…"
