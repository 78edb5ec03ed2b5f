"""Comparisons of answers that a plan is given, and what they say of its candidates. Part of the application layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whywait import qualifying
from whywait.errors import UsageError, WhywaitError
from whywait.physics.arch import Arch
from whywait.sim.catalog import model_named


@dataclass(frozen=True)
class Tested:
    """A comparison of answers: which techniques it speaks of, and its state (holds, undecided, fails)."""

    techniques: tuple[str, ...]
    directory: str
    state: str
    note: str
    headline: str

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "techniques": list(self.techniques)}


def quality_of(pairs: Sequence[tuple[str, str]], model: Arch, wanted: Sequence[tuple[str, ...]]) -> list[Tested]:
    """The comparisons by what they are of: (techniques joined by +, or '' , folder of ``whywait quality``). Without
    techniques the only kind of narrower numbers among the candidates is meant.

    Raises:
        UsageError: a folder holds no comparison, or it cannot be told what it is of.
    """
    out = []
    kinds = sorted(set(wanted))
    for name, directory in pairs:
        found = qualifying.load(directory).result()
        techniques = tuple(sorted(filter(None, name.split("+"))))
        if not techniques:
            if len(kinds) != 1:
                told = ", ".join("+".join(k) for k in kinds) or "none"
                raise UsageError(f"--quality {directory}: of which candidates?",
                                 f"--quality fp8-weights={directory}; narrower numbers among them: {told}")  # fmt: skip
            techniques = tuple(sorted(kinds[0]))
        state, note = _quality_state(found, model)
        out.append(Tested(techniques, str(directory), state, note, str(found["headline"])))
    return out


def _quality_state(found: Mapping[str, Any], model: Arch) -> tuple[str, str]:
    states = [c["state"] for c in found["claims"]]
    for arm in found["arms"].values():
        try:
            if model_named(str(arm.get("model") or "")).name != model.name:
                return "undecided", f"it is of {arm['model']}, not of {model.name}"
        except WhywaitError:
            own = model.name.rpartition("/")[2]
            called = f"the service called its model {arm.get('model')!r}, which may be another"
            return "undecided", f"{called}: serve it as {own}"
    if found["plan"]["same"]:
        return "undecided", "it compares an arm with itself"
    if found["partial"] or not states:
        return "undecided", "it was cut short" if found["partial"] else "it claims nothing"
    state = "fails" if "fails" in states else "holds" if all(s == "holds" for s in states) else "undecided"
    return state, ""


def quality_state(need: tuple[str, ...], tested: Sequence[Tested]) -> tuple[str, str]:
    """State of a candidate whose numbers are narrower by ``need``, and why in words. Techniques that were tested apart
    are not tested together."""
    if not need:
        return "as published", "numbers as the model was published in"
    want = tuple(sorted(need))
    mine = [t for t in tested if t.techniques == want]
    if mine:
        worst = max(mine, key=lambda t: ("holds", "undecided", "fails").index(t.state))
        return worst.state, f"{worst.directory}: {worst.headline}" + (f" ({worst.note})" if worst.note else "")
    if any(t.state == "fails" and set(t.techniques) <= set(want) for t in tested):
        return "fails", "a part of it fails alone"
    if all(any(t.techniques == (n,) and t.state == "holds" for t in tested) for n in want):
        return "untested", "each tested alone, not together"
    return "untested", "no comparison of its answers was given"
