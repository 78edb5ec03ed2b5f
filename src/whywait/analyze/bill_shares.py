"""The bill by class and by length of prompt: a point's joules and money shared among its requests by a named rule.

Every rule that can be applied is (``sharing``); the shares of the groups sum to the total exactly, in whole nanojoules
and billionths of the currency. Within a group, too, what was not good is charged to the good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from whywait.analyze.bill_work import Work
from whywait.analyze.classes import UNNAMED
from whywait.analyze.phases import RequestAccount
from whywait.analyze.sharing import NANO, RULES, apportion, weights
from whywait.analyze.streams import Content
from whywait.analyze.window import UNCOUNTED, Window
from whywait.core.run import Run
from whywait.core.table import Array

EDGES = (128, 512, 2048, 8192, 32768, 131072)  # prompt tokens: the last of each bucket
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Groups:
    """What the shares of a point are made from; ``mine`` are its rows in the account ``acc``."""

    c: Content
    w: Window
    work: Work
    acc: RequestAccount
    mine: Array

    @property
    def account(self) -> RequestAccount:
        a = self.acc
        return RequestAccount(a.ids[self.mine], a.point[self.mine], a.phases[self.mine], a.total_ns[self.mine], a.how,
                              {}, a.causes, [])  # fmt: skip


def shared(
    one: Run, g: Groups, joules: float | None, money: Sequence[Mapping[str, Any]], first: str
) -> list[dict[str, Any]]:
    """An entry per rule, ``first`` first: ``rule``, ``why`` (where it cannot be applied), ``prefill`` (the part of the
    whole that is prefill's), ``spent_on`` (shares by ``Work.kinds``), ``by_class`` and ``by_prompt``.

    Rows: ``name, requests, good_requests, effective_tokens, nanojoules, j_per_good_request,
    j_per_million_effective_tokens, why`` and ``money`` by offer: ``billionths, per_good_request,
    per_million_effective_tokens``.
    """
    out: list[dict[str, Any]] = []
    for rule in sorted(RULES, key=lambda r: r != first):
        found = weights(one, g.w, g.c, g.account, rule)
        if found.values is None or not found.values.any():
            why = found.why or "no request was in work in the window"
            out.append({"rule": rule, "why": why, "prefill": None, "spent_on": None, "by_class": [], "by_prompt": []})
            continue
        each = None if joules is None else apportion(round(joules * NANO), found.values)
        by = _Shared(g.work, found.values, each, money)
        out.append({
            "rule": rule, "why": None, "prefill": found.prefill, "spent_on": _spent(g.work, found.values),
            "by_class": by.rows(_classes(one)), "by_prompt": by.rows(_prompts(one)),
        })  # fmt: skip
    return out


def shares_of(one: Run, g: Groups, amounts: Sequence[float | None], rule: str) -> list[list[int] | None]:
    """Of each amount (joules, money) the billionths of each request of a point under a rule; None where that cannot be
    said."""
    w = weights(one, g.w, g.c, g.account, rule).values
    return [None if total is None or w is None else apportion(round(total * NANO), w) for total in amounts]


@dataclass(frozen=True)
class _Shared:
    work: Work
    weights: Array
    each: list[int] | None
    money: Sequence[Mapping[str, Any]]

    def rows(self, groups: dict[str, Array]) -> list[dict[str, Any]]:
        amounts = np.array([self.weights[mine].sum() for mine in groups.values()])
        paid = {m["name"]: apportion(round(m["total"] * NANO), amounts) for m in self.money if m["total"] is not None}
        return [self._row(name, mine, {k: v[i] for k, v in paid.items() if v is not None})
                for i, (name, mine) in enumerate(groups.items())]  # fmt: skip

    def _row(self, name: str, mine: Array, paid: dict[str, int]) -> dict[str, Any]:
        w = self.work
        good = float(w.here[mine & w.good].sum())
        tokens = w.tokens[mine & w.good]
        counted = np.isnan(tokens).sum() <= UNCOUNTED * max(len(tokens), 1)
        effective = float(np.nansum(tokens)) if counted else None
        nano = None if self.each is None else sum(self.each[i] for i in np.flatnonzero(mine).tolist())
        joules = None if nano is None else nano / NANO
        money = {k: {"billionths": v, "per_good_request": _over(v / NANO, good),
                     "per_million_effective_tokens": _over(v / 1000, effective)} for k, v in paid.items()}  # fmt: skip
        return {
            "name": name,
            "requests": float(w.here[mine].sum()),
            "good_requests": good,
            "effective_tokens": effective,
            "nanojoules": nano,
            "j_per_good_request": _over(joules, good),
            "j_per_million_effective_tokens": _over(None if joules is None else joules * 1e6, effective),
            "money": money,
            "why": None if good else "none of them was good: what they cost is stated, a good one has no cost",
        }


def _over(amount: float | None, by: float | None) -> float | None:
    return None if amount is None or not by else amount / by


def _spent(work: Work, values: Array) -> dict[str, float]:
    total = float(values.sum())
    return {k: float(values[mine].sum()) / total for k, mine in work.kinds.items()}


def _classes(one: Run) -> dict[str, Array]:
    name = np.array([n or UNNAMED for n in one.requests["class"]], dtype=object)
    return {str(n): name == n for n in sorted(set(name.tolist()))}


def _prompts(one: Run) -> dict[str, Array]:
    """Buckets of prompt length by the service's count, else by what was asked for; empty ones are left out."""
    length = one.requests["prompt_tokens"]
    length = np.where(np.isnan(length), one.requests["asked_prompt_tokens"], length)
    at = np.searchsorted(np.array(EDGES), np.nan_to_num(length), side="left")
    at = np.where(np.isnan(length), len(EDGES) + 1, at)
    names = [f"up to {EDGES[0]:,}", *(f"{a + 1:,} to {b:,}" for a, b in pairwise(EDGES)),
             f"above {EDGES[-1]:,}", UNKNOWN]  # fmt: skip
    return {name: at == i for i, name in enumerate(names) if (at == i).any()}
