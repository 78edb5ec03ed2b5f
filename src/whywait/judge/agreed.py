"""What a comparison of two engines' answers comes to: the claims, the sentence above all, what is in doubt. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from whywait.analyze import agreement, degeneration
from whywait.core.run import doubt

MOST_OUTSIDE = 0.05  # of A's probability lumped, on average: above it KL is a weak bound
MOST_UNTOLD = 0.05
FEW_TEXTS = 8


def agreement_of(kept: Mapping[str, Any], margins: Mapping[str, float]) -> dict[str, Any]:
    """Figures and claims of the part that was kept: ``texts`` (rows of ``analyze.agreement.positions``), ``why`` it is
    missing (else ''), ``ways``, ``k``."""
    texts = kept["texts"]
    out: dict[str, Any] = {**{k: kept[k] for k in ("why", "ways", "k")}, "figures": None, "kinds": {}, "claims": []}
    if texts:
        out["figures"] = agreement.figures(texts)
        out["kinds"] = agreement.by_kind(texts)
        out["claims"] = agreement.claims(out["figures"], margins)
    return out


def headline(claims: Sequence[Mapping[str, Any]], same: bool) -> str:
    """In one sentence: worse, not worse, or not known."""
    if not claims:
        return "Nothing could be compared"
    fails = [in_short(c) for c in claims if c["state"] == "fails"]
    open_ = [in_short(c) for c in claims if c["state"] == "undecided"]
    held = [in_short(c) for c in claims if c["state"] == "holds"]
    if fails:
        begin = "A against itself is found worse, which is false" if same else "B is worse than allowed"
        return f"{begin}: {', '.join(fails)}"
    if open_:
        return f"Undecided: {', '.join(open_)}" + (f"; within bounds: {', '.join(held)}" if held else "")
    begin = "A against itself: nothing is found, as it should be" if same else "B is not worse than allowed"
    return f"{begin}: {', '.join(held)}"


def in_short(c: Mapping[str, Any]) -> str:
    """The figure of a claim in a few words."""
    value = c["value"]
    if c["figure"] == "perplexity_ratio":
        return "perplexity" if value is None else f"perplexity ×{value:.3g}"
    if c["figure"] == "top1":
        return "first choice" if value is None else f"same first choice in {value:.0%}"
    return "accuracy" if value is None else f"accuracy {100 * value:+.1f} points".replace("-", "−")


def doubts(found: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]], same: bool) -> list[dict[str, str]]:
    """``found``: of :func:`agreement_of`; ``arms``: what is known of each side."""
    out = []
    f = found["figures"]
    if f and f["outside"] is not None and f["outside"] > MOST_OUTSIDE:
        out.append(doubt("KL is only a lower bound", f"{f['outside']:.0%} of A's probability is of tokens that are "
                          f"not among both arms' {found['k']} most probable", "--top K: longer lists"))  # fmt: skip
    if f and f["untold"] and f["untold"] > MOST_UNTOLD:
        out.append(doubt("perplexity leaves positions out", f"an arm did not tell the probability of the real token "
                          f"at {f['untold']:.0%} of them", "--top K: longer lists"))  # fmt: skip
    if f and f["impossible"]:
        out.append(doubt("B's perplexity is infinite", f"at {f['impossible']:.2%} of the positions it gives the real "
                          "token no probability at all; the figure is of the others",
                          "see whether B's probabilities are broken"))  # fmt: skip
    if f and f["texts"] < FEW_TEXTS:
        out.append(doubt("few texts", f"{f['texts']} texts say little of others", "--text FILE, repeatable"))
    a, b = arms.get("A", {}), arms.get("B", {})
    if not same and a.get("model") and b.get("model") and a["model"] != b["model"]:
        out.append(doubt("the arms serve models of different names", f"{a['model']} and {b['model']}",
                          "well if that is the change"))  # fmt: skip
    if f and len(set(found["ways"].values())) > 1:
        out.append(doubt("the arms were scored in different ways", "; ".join(found["ways"].values()),
                          "the engines' own numerics are part of the difference"))  # fmt: skip
    return out


def gate(result: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """A figure for ``--fail-if``: ``agreement.NAME``; ``accuracy.NAME`` or ``accuracy.CATEGORY.NAME`` with NAME ``a``,
    ``b`` (per cent), ``drop``, ``drop_low``, ``drop_high`` (points that B lost); ``degeneration.SIGN.NAME`` likewise,
    but with ``rise`` for what B has more of. None where it is unknown.

    Raises:
        KeyError: there is no such figure.
    """
    part, rest = path[0], path[1:]
    if part == "agreement" and len(rest) == 1:
        figures = result["agreement"]["figures"]
        empty = agreement.figures([])
        found: float | None = (figures or empty)[rest[0]]
        return found if figures else None
    names = POINTS.get(part)
    if names is None or not rest or rest[-1] not in names:
        raise KeyError(".".join(path))
    if not result["tasks"]:
        return None
    rows = {r["name"]: r for r in result["tasks"][part]}
    wanted = part if len(rest) == 1 else f"{part}: {rest[0]}" if part == "accuracy" else rest[0]
    if wanted not in rows:
        if part == "degeneration" and wanted in SIGN_NAMES:
            return None  # too few answers tell it
        if part == "accuracy" and {c["category"] for c in result["cases"]} == {rest[0]}:
            wanted = part  # the only category has no row of its own
    name, scale = names[rest[-1]]
    value: float | None = rows[wanted][name]
    return None if value is None else scale * value


def known(path: Sequence[str], categories: Collection[str] | None) -> bool:
    """Whether a comparison of such tasks has this figure for ``--fail-if`` (see :func:`gate`), known or not.
    ``categories`` None: they are known only at the end."""
    part, rest = path[0], path[1:]
    if part == "agreement":
        return len(rest) == 1 and rest[0] in agreement.figures([])
    names = POINTS.get(part)
    if names is None or not 1 <= len(rest) <= 2 or rest[-1] not in names:
        return False
    if part == "degeneration":
        return len(rest) == 2 and rest[0] in SIGN_NAMES
    return len(rest) == 1 or categories is None or rest[0] in categories


SIGN_NAMES = frozenset((*degeneration.SIGNS.values(), *degeneration.FIGURES.values()))


#: What a gate calls a figure → what the paired comparison calls it, and what it is multiplied by. A loss is above 0.
POINTS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "accuracy": {"a": ("a", 100), "b": ("b", 100), "drop": ("drop", -100), "drop_low": ("high", -100),
                 "drop_high": ("low", -100)},
    "degeneration": {"a": ("a", 100), "b": ("b", 100), "rise": ("drop", 100), "rise_low": ("low", 100),
                     "rise_high": ("high", 100)},
}  # fmt: skip
