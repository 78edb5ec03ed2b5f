"""ServeGen: per client a table of rates in windows and a file of length distributions. They hold no requests, so these
are drawn: as many as the rate says, gaps of the window's own form, lengths by its frequencies; the seed is fixed."""

from __future__ import annotations

import ast
import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whywait.convert.traces import Record
from whywait.core import bounded
from whywait.errors import UsageError

SEED = 1
WINDOW_S = 600.0
MOST = 5_000_000  # requests of one client
MOST_PMF = 1 << 20  # characters of one table of lengths, parsed at a hundred times its size
_NAME = re.compile(r"(.*?)-?(trace\.csv|dataset\.json)")
Pmf = tuple[NDArray[np.int64], NDArray[np.float64]]


def pair(path: Path) -> tuple[Path, Path]:
    """Both files of the client that ``path`` is one of.

    Raises:
        UsageError: the other one is not beside it.
    """
    form = _NAME.fullmatch(path.name)
    stem = form[1] if form else path.stem
    trace, dataset = path.with_name(f"{stem}-trace.csv"), path.with_name(f"{stem}-dataset.json")
    for each in (trace, dataset):
        if not each.is_file():
            raise UsageError(f"{path}: a ServeGen client is two files, and {each.name} is not beside it")
    return trace, dataset


def client(path: Path, number: int) -> list[Record]:
    """The requests of one client, drawn.

    Raises:
        UsageError: a file is not as ServeGen writes it; the message names the line or the window.
    """
    trace, dataset = pair(path)
    lengths = _lengths(dataset)
    rng = np.random.default_rng([SEED, number])
    out: list[Record] = []
    for start, rate, form, shape in _windows(trace):
        n = round(min(rate * WINDOW_S, MOST + 1))
        if not n:
            continue
        if len(out) + n > MOST:
            raise UsageError(f"{trace}: more than {MOST:,} requests would be drawn", "give a part of its windows")
        gaps = rng.weibull(shape, n + 1) if form == "weibull" else rng.gamma(shape, size=n + 1)
        at = start + np.cumsum(gaps)[:n] / gaps.sum() * WINDOW_S
        # The lengths of the latest window that has any; before the first, those of the first.
        key = max((k for k in lengths if k <= start), default=min(lengths, default=None))
        if key is None:
            raise UsageError(f"{dataset}: no window has input_tokens and output_tokens")
        prompt, output = (rng.choice(values, n, p=p) for values, p in lengths[key])
        out += [Record(*row) for row in zip(at.tolist(), prompt.tolist(), output.tolist(), strict=True)]
    return out


def _windows(path: Path) -> list[tuple[float, float, str, float]]:
    out = []
    with path.open(encoding="utf-8", newline="") as f:
        for line, cells in enumerate(csv.reader(f), 1):
            try:
                start, rate, cv, form, shape, _scale = (c.strip() for c in cells)
                row = (float(start), float(rate), form.lower(), float(shape))
                float(cv)
            except ValueError:
                wanted = "start, rate, cv, Gamma or Weibull, shape, scale"
                raise UsageError(f"{path}: line {line}: expected {wanted}") from None
            if row[1] > 0 and (row[2] not in ("gamma", "weibull", "exponential") or not 0 < row[3] < np.inf):
                raise UsageError(f"{path}: line {line}: expected Gamma or Weibull with a shape above 0")
            # A gamma of shape 1 is the exponential.
            out.append((*row[:2], "gamma", 1.0) if row[2] == "exponential" else row)
    return out


def _lengths(path: Path) -> dict[float, tuple[Pmf, Pmf]]:
    try:
        raw = bounded.read_json(path)
        windows = {float(k): (_pmf(v["input_tokens"]), _pmf(v["output_tokens"])) for k, v in raw.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SyntaxError, RecursionError, MemoryError) as exc:
        wanted = "windows with input_tokens and output_tokens, each {length: share}"
        raise UsageError(f"{path}: expected {wanted} ({type(exc).__name__})") from None
    return {k: (i, o) for k, (i, o) in windows.items() if len(i[0]) and len(o[0])}


def _pmf(text: Any) -> Pmf:
    """``"{60: 0.2, 61: 0.8}"`` (Python's own writing) as values and shares."""
    if isinstance(text, str) and len(text) > MOST_PMF:
        raise ValueError("a table of lengths that long is none")
    table = ast.literal_eval(text) if isinstance(text, str) else text
    if not isinstance(table, dict):
        raise TypeError("no table")
    pairs = sorted((int(k), float(v)) for k, v in table.items() if float(v) > 0 and int(k) > 0)
    share = np.array([v for _, v in pairs], np.float64)
    return np.array([k for k, _ in pairs], np.int64), share / max(share.sum(), 1e-300)
