"""Errors of predictions as tables, and the tables in ``docs/simulator.md`` between their markers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from validate_sim_fit import Guess
from validate_sim_replay import TPOT, TTFT

NAME = {TTFT: "TTFT", TPOT: "TPOT"}
RESAMPLES = 2000


def cell(guesses: Sequence[Guess], metric: str) -> list[str]:
    """Median and mean of the absolute error, bias, coverage of the 80 % interval with its own 95 % interval, sizes."""
    mine = [g for g in guesses if g.metric == metric and not g.seen]
    if not mine:
        return ["–"] * 5
    error = np.array([g.error for g in mine])
    inside = np.array([g.predicted.holds(g.measured) for g in mine])
    low, high = by_cluster(inside, [g.row.group for g in mine])
    return [f"{np.median(np.abs(error)):.1%}", f"{np.abs(error).mean():.1%}", f"{np.median(error):+.1%}",
            f"{inside.mean():.0%} ({low:.0%}–{high:.0%})",
            f"{len({g.row.group for g in mine})} / {len(mine)}"]  # fmt: skip


def by_cluster(inside: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], groups: Sequence[str]) -> tuple[float, float]:
    """95 % interval of a share, configurations drawn as wholes: rows of one are wrong together."""
    found: dict[str, list[bool]] = defaultdict(list)
    for g, x in zip(groups, inside.tolist(), strict=True):
        found[g].append(x)
    hits = np.array([sum(v) for v in found.values()])
    sizes = np.array([len(v) for v in found.values()])
    drawn = np.random.default_rng(1).integers(0, len(hits), (RESAMPLES, len(hits)))
    shares = hits[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return float(np.quantile(shares, 0.025)), float(np.quantile(shares, 0.975))


def summary(
    guesses: Sequence[Guess], scopes: Mapping[str, Callable[[Guess], bool]], expected: Mapping[str, str]
) -> str:
    """A line per scope and metric."""
    head = [
        "of",
        "metric",
        "expected",
        "median abs. error",
        "mean",
        "median error",
        "80 % interval covers",
        "groups / rows",
    ]
    lines = []
    for name, keep in scopes.items():
        mine = [g for g in guesses if keep(g)]
        for metric in (TPOT, TTFT):
            lines.append([name, NAME[metric], expected.get(metric, ""), *cell(mine, metric)])
    return table(head, lines)


def worst(guesses: Sequence[Guess], why: Mapping[str, str], most: int = 8) -> str:
    """The configurations with the largest median error, by the sum over metrics of error over its scale."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for g in guesses:
        if not g.seen:
            found[g.row.group][g.metric].append(abs(g.error))
    medians = {k: {m: float(np.median(v[m])) for m in v} for k, v in found.items()}
    order = sorted(medians, key=lambda k: -(medians[k].get(TPOT, 0) / 0.06 + medians[k].get(TTFT, 0) / 0.15))
    lines = []
    for k in order[:most]:
        shown, count = (
            [f"{medians[k].get(m, np.nan):.1%}" for m in (TPOT, TTFT)],
            max(len(v) for v in found[k].values()),
        )
        lines.append([f"`{k.replace('|', ' ')}`", *shown, str(count), reason(k, why)])
    return table(["group", "TPOT", "TTFT", "rows", "why"], lines)


def reason(group: str, why: Mapping[str, str]) -> str:
    return next((text for part, text in why.items() if part in group), "not found")


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *(list(line) for line in lines)]
    return "\n".join("| " + " | ".join(r) + " |" for r in rows)


def put(document: Path, name: str, text: str) -> None:
    """Writes ``text`` between the markers ``<!-- name -->`` and ``<!-- /name -->``.

    Raises:
        ValueError: the document has no such markers.
    """
    old = document.read_text("utf-8")
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.S)
    if not pattern.search(old):
        raise ValueError(f"{document} has no markers for {name}")
    document.write_text(pattern.sub(lambda m: f"{m[1]}{text}\n{m[2]}", old), "utf-8")
