"""Where the grids of a verb are simulated, by its flags ``--ray`` and ``--cells``; what is kept of one cut short."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from whywait.errors import WhywaitError
from whywait.session import stderr
from whywait.sim.journal import Journal
from whywait.sim.spread import Where, over

FOLDER = Path("whywait-runs")
ASIDE = ("ray", "jobs", "json", "html", "out", "strict", "fail_if")  # they do not change what is simulated


@contextlib.contextmanager
def somewhere(args: argparse.Namespace) -> Iterator[None]:
    """All grids inside go there. Over a cluster what is done is kept in a file even where none is named, until the
    whole is done: by the question, so that the same command finds it.

    Raises:
        UsageError: there is no such cluster, or the file is another kind of file.
    """
    ray, cells = getattr(args, "ray", None) or "", getattr(args, "cells", None)
    passing = FOLDER / f"cells-{_question(args)}.jsonl" if ray and not cells else None
    file = str(cells or passing or "")
    if cells:
        Journal(cells).close()  # another kind of file is told before anything is simulated, and nothing is kept in it
    with over(Where(ray, file)):
        try:
            yield
        except (KeyboardInterrupt, WhywaitError):
            if file and Path(file).exists():
                stderr(f"what was simulated is kept in {file}: the same command goes on from there")
            raise
    if passing is not None:
        passing.unlink(missing_ok=True)


def _question(args: argparse.Namespace) -> str:
    asked = sorted((k, repr(v)) for k, v in vars(args).items() if k not in ASIDE and not callable(v))
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:12]
