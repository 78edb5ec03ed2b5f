"""What agents on the engine's machines read, as if it had been read here: the accounts and the judge know one set of
sources (``process/engine``, ``host``, ``gpu``), wherever the engine runs."""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from whywait.core.run import Run

AGENT = "agent/"
TAKEN = ("process/engine", "host", "gpu")


def with_agents(run: Run) -> Run:
    """``run`` with the readings of its agents under the sources that they are readings ``of``.

    A source that was also read here stays as it is: then the engine is on this machine and the agent says nothing new.
    Of several agents each keeps its number as a label, so that their counters add up instead of mixing.
    """
    source, labels = run.readings["source"], run.readings["labels"]
    theirs = np.flatnonzero([s.startswith(AGENT) for s in source.tolist()])
    if not len(theirs):
        return run
    here = set(source.tolist())
    several = len({source[i] for i in theirs}) > 1
    known: dict[tuple[str, str | None], tuple[str, str | None] | None] = {}
    source, labels = source.copy(), labels.copy()
    for i in theirs.tolist():
        key = (source[i], labels[i])
        if key not in known:
            known[key] = _placed(*key, several, here)
        found = known[key]
        if found is not None:
            source[i], labels[i] = found
    return dataclasses.replace(run, readings=run.readings.replace(source=source, labels=labels))


def _placed(source: str, raw: str | None, several: bool, here: set[str]) -> tuple[str, str | None] | None:
    labels = json.loads(raw) if raw else {}
    of = labels.pop("of", "")
    if of in here or of not in TAKEN:
        return None
    if several:
        labels["agent"] = source.removeprefix(AGENT)
    return of, json.dumps(labels, sort_keys=True) if labels else None
