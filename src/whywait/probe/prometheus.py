"""Prometheus text exposition → samples → canonical rows. Pure: text in, values out.

``parse`` + ``canonical`` say what is right; ``PageReader`` gives the same rows from page after page at a twentieth of
the cost: of a line whose name and labels it has seen before, it reads only the number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from whywait.engines.table import EngineTable, Metric
from whywait.probe import Row

_LINE = re.compile(
    r'\s*([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s*(?<=[\s}])([^\s_]+)(?:\s+-?[\d.]+)?\s*(?:#.*)?'
)
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")
MEMO_LIMIT, MEMO_LINE = 50_000, 4096  # lines remembered, and their characters
SUFFIXES = ("_bucket", "_sum", "_count")


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


class Page(NamedTuple):
    """``skipped`` counts lines that were neither blank, nor comments, nor samples."""

    samples: list[Sample]
    skipped: int


def parse(text: str) -> Page:
    """All samples of a page in their order. Timestamps and exemplars are dropped; a bad line is skipped and counted."""
    samples = []
    skipped = 0
    for line in text.split("\n"):
        if not line or line[0] == "#" or line.isspace():
            continue
        sample = parse_line(line)
        if sample is None:
            skipped += line.strip()[:1] != "#"
        else:
            samples.append(sample)
    return Page(samples, skipped)


def parse_line(line: str) -> Sample | None:
    """One sample line, or None when it is not one."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    name, body, number = match.groups()
    labels = _labels(body) if body else {}
    try:
        value = float(number)
    except ValueError:
        return None
    return None if labels is None else Sample(name, labels, value)


def _labels(body: str) -> dict[str, str] | None:
    out: dict[str, str] = {}
    at = 0
    end = len(body.rstrip())
    while at < end:
        match = _LABEL.match(body, at)
        if match is None:
            return None
        key, raw = match.groups()
        out[key] = _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], raw) if "\\" in raw else raw
        at = match.end()
    return out


def label_json(labels: Mapping[str, str]) -> str | None:
    """Labels as they stand in a reading: a JSON object with sorted keys, None when there are none.

    Whoever names a process or a label must not write to our user's terminal: what does not print becomes a question
    mark.
    """
    if labels and not all(k.isprintable() and v.isprintable() for k, v in labels.items()):
        labels = {_printed(k): _printed(v) for k, v in labels.items()}
    return json.dumps(labels, sort_keys=True, separators=(",", ":"), ensure_ascii=False) if labels else None


def _printed(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def canonical(samples: Iterable[Sample], table: EngineTable) -> list[Sample]:
    """The samples under canonical names and units; names the table does not know are left out.

    A value that is NaN or infinite is left out too (absent is null). An old name counts only where no current name
    gave the same.
    """
    rows: list[Row] = []
    old: list[Row] = []
    for s in samples:
        for target in targets_of(s.name, s.labels, table):
            (old if target.old else rows).extend(target.rows(s.value))
    return [Sample(name, json.loads(labels or "{}"), value) for name, labels, value in finish(rows, old, table)]


def page_facts(samples: Iterable[Sample], table: EngineTable) -> dict[str, str]:
    """What the engine's info metric says of its configuration; for the manifest."""
    for sample in samples:
        if sample.name in table.info:
            return {k: sample.labels[k] for k in table.facts if sample.labels.get(k, "None") != "None"}
    return {}


class Target(NamedTuple):
    """What a native name and its labels become, once the value is known; info metrics carry it in their labels."""

    name: str
    labels: str | None
    scale: float = 1.0
    old: bool = False  # by a name that newer versions have replaced
    fixed: float | None = None

    def rows(self, value: float) -> list[Row]:
        if self.fixed is not None:
            value = self.fixed
        return [(self.name, self.labels, value * self.scale)] if math.isfinite(value) else []


def targets_of(name: str, labels: Mapping[str, str], table: EngineTable) -> list[Target]:
    out = []
    for metrics, old in ((table.metrics, False), (table.old_metrics, True)):
        for metric in metrics.get(name, ()):
            if _holds(metric, labels):
                kept = {k: v for k, v in labels.items() if (k, v) not in metric.where}
                out.append(Target(metric.name, label_json(kept), metric.scale, old))
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            base = name[: -len(suffix)]
            for histograms, old in ((table.histograms, False), (table.old_histograms, True)):
                if base in histograms:
                    out.append(Target(histograms[base] + suffix, label_json(labels), old=old))
    for ours, alternatives in table.info.get(name, {}).items():
        value = _product(labels, alternatives)
        if value is not None:
            kept = {k: labels[k] for k in ("engine",) if k in labels}
            out.append(Target(ours, label_json(kept), fixed=value))
    return out


def _holds(metric: Metric, labels: Mapping[str, str]) -> bool:
    return all(labels.get(k) == v for k, v in metric.where)


def _product(labels: Mapping[str, str], alternatives: Iterable[tuple[str, ...]]) -> float | None:
    for names in alternatives:
        try:
            return math.prod(float(labels[n]) for n in names)
        except (KeyError, ValueError):
            continue
    return None


def finish(rows: list[Row], old: list[Row], table: EngineTable) -> list[Row]:
    """Old names in where no current one gave the same; counters that are sums of others in."""
    if old:
        current = {row[0] for row in rows}
        rows = rows + [row for row in old if row[0] not in current]
    for name, parts in table.sums.items():
        if any(row[0] == name for row in rows):
            continue
        by_labels: dict[str | None, dict[str, float]] = {}
        for part, labels, value in rows:
            if part in parts:
                by_labels.setdefault(labels, {})[part] = value
        rows = rows + [(name, k, sum(got.values())) for k, got in by_labels.items() if len(got) == len(parts)]
    return rows


T = TypeVar("T")


class Lines(Generic[T]):
    """What ``learn`` makes of the name and labels of each line, and the line's value, page after page.

    ``learn`` is asked once for what comes again with every page. Lines it has nothing to say of (falsy) are left out.
    """

    def __init__(self, learn: Callable[[Sample], T]) -> None:
        self._learn = learn
        self._memo: dict[str, T] = {}  # "name{labels}" -> what it becomes

    def read(self, text: str, prefixes: str | tuple[str, ...]) -> Iterator[tuple[T, float]]:
        memo = self._memo
        if len(memo) > MEMO_LIMIT:  # labels that never come back must not fill our memory
            memo.clear()
        for line in text.split("\n"):
            if not line.startswith(prefixes):
                continue
            head, _, tail = line.rpartition(" ")
            known = memo.get(head)
            if known is not None and "_" not in tail:
                if not known:
                    continue
                try:
                    yield known, float(tail)
                except ValueError:
                    continue
            elif (sample := parse_line(line)) is not None:
                new = self._learn(sample)
                # With a timestamp or an exemplar behind the value, the text before the last blank is not name and
                # labels.
                match = _LINE.fullmatch(line)
                fits = len(head) <= MEMO_LINE and match is not None and match.span(3) == (len(head) + 1, len(line))
                if fits:
                    memo[head] = new
                if new:
                    yield new, sample.value


class PageReader:
    """Rows of successive pages of one engine; equal to ``canonical(parse(page).samples, table)``, only cheaper."""

    def __init__(self, table: EngineTable) -> None:
        self.table = table
        self._lines = Lines(lambda sample: targets_of(sample.name, sample.labels, table))

    def read(self, text: str) -> list[Row]:
        rows: list[Row] = []
        old: list[Row] = []
        for targets, value in self._lines.read(text, self.table.metric_prefixes):
            for target in targets:
                if target.old or target.fixed is not None or not math.isfinite(value):
                    (old if target.old else rows).extend(target.rows(value))
                else:
                    rows.append((target.name, target.labels, value * target.scale))
        return finish(rows, old, self.table)
