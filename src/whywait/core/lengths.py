"""Lengths in tokens (and pauses in milliseconds): fixed, uniform, lognormal, or as a list or a file says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whywait.core import bounded
from whywait.errors import UsageError

NO_CAP = 1 << 20
MOST_POINTS = 201  # of a file of lengths so many quantiles are kept: a manifest holds them, and the tails are there
_FORMS = "use 128, uniform(64,512), lognormal(256,0.6,max=2048), quantiles(10,20,90) or file(lengths.txt)"
_PLAIN = re.compile(r"(?:(uniform|lognormal|fixed)\()?([\d.]+)(?:,([\d.]+))?(?:,max=(\d+))?\)?")
_LISTED = re.compile(r"quantiles\(([\d.,]+?)(?:,max=(\d+))?\)")
_FILE = re.compile(r"file\((.+?)(?:,max=(\d+))?\)")


@dataclass(frozen=True)
class Lengths:
    """At least 1 and at most ``cap``: ``fixed(a)``, ``uniform(a, b)``, ``lognormal(median a, sigma b)`` or
    ``quantiles``: ``points`` are evenly spaced quantiles, the least and the largest included, and ``a`` their median.
    """

    kind: str = "fixed"
    a: float = 128
    b: float = 0
    cap: int = NO_CAP
    points: tuple[float, ...] = ()

    @classmethod
    def parse(cls, value: Any, folder: Path | None = None) -> Lengths:
        """``128``, ``"uniform(64,512)"``, ``"lognormal(256,0.6,max=2048)"``, ``"quantiles(10,20,90)"``, a list of
        quantiles, or ``"file(lengths.txt)"``: numbers apart by white space or commas, found from ``folder``.

        Raises:
            UsageError: none of these forms, not positive, or the file cannot be read.
        """
        listed = f"quantiles({','.join(map(str, value))})" if isinstance(value, (list, tuple)) else None
        text = (listed or str(value)).strip()
        if named := _FILE.fullmatch(text):
            return cls._of_file((folder or Path()) / named[1].strip(), int(named[2] or NO_CAP))
        text = text.replace(" ", "")
        bad = UsageError(f"{value!r} is not a length", _FORMS)
        try:
            if found := _LISTED.fullmatch(text):
                return cls.quantiles([float(x) for x in found[1].split(",")], int(found[2] or NO_CAP))
            form = _PLAIN.fullmatch(text)
            if not form or bool(form[1]) != text.endswith(")"):
                raise bad
            a, b, cap = float(form[2]), float(form[3] or 0), int(form[4] or NO_CAP)
        except ValueError:
            raise bad from None
        kind = form[1] or "fixed"
        if a < 1 or cap < 1 or (kind == "uniform" and b < a) or (kind == "fixed" and form[3]):
            raise bad
        return cls(kind, a, b, cap)

    @classmethod
    def quantiles(cls, points: list[float], cap: int = NO_CAP) -> Lengths:
        """Evenly spaced quantiles from the least to the largest.

        Raises:
            ValueError: fewer than two, below 1, or they decrease.
        """
        if len(points) < 2 or points[0] < 1 or cap < 1 or any(b < a for a, b in pairwise(points)):
            raise ValueError("quantiles are at least two numbers from 1 up that do not decrease")
        return cls("quantiles", float(np.median(points)), 0, cap, tuple(float(p) for p in points))

    @classmethod
    def of_values(cls, values: NDArray[Any], cap: int = NO_CAP) -> Lengths:
        """As observed: every quantile kept is a value that was there; one that never varies is fixed."""
        if len(values) == 0 or np.min(values) < 1:
            raise ValueError("lengths are numbers from 1 up")
        at = np.linspace(0, 1, min(MOST_POINTS, max(2, len(values))))
        points = np.quantile(np.asarray(values, dtype=float), at, method="nearest")
        if points[0] == points[-1]:
            return cls("fixed", float(points[0]), 0, cap)
        return cls.quantiles(points.tolist(), cap)

    @classmethod
    def _of_file(cls, path: Path, cap: int) -> Lengths:
        try:
            words = bounded.read_text(path).replace(",", " ").split()
            return cls.of_values(np.array([float(w) for w in words]), cap)
        except OSError as exc:
            raise UsageError(f"cannot read the lengths in {path}: {exc.strerror}") from None
        except ValueError as exc:
            hint = "numbers from 1 up, apart by white space"
            raise UsageError(f"{path} does not hold lengths: {exc}", hint) from None

    def sample(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """``n`` lengths, each ≥ 1 and ≤ ``cap``."""
        if self.kind == "uniform":
            x = rng.integers(int(self.a), int(self.b) + 1, n).astype(np.float64)
        elif self.kind == "lognormal":
            x = self.a * np.exp(self.b * rng.standard_normal(n))
        elif self.kind == "quantiles":
            x = np.interp(rng.random(n), np.linspace(0, 1, len(self.points)), self.points)
        else:
            x = np.full(n, self.a)
        return np.clip(np.rint(x), 1, self.cap).astype(np.int64)

    @property
    def mean(self) -> float:
        """About how long on average; the cap is not reckoned with except as a bound."""
        if self.kind == "uniform":
            x = (self.a + self.b) / 2
        elif self.kind == "lognormal":
            x = self.a * float(np.exp(self.b**2 / 2))
        elif self.kind == "quantiles":
            x = (sum(self.points) - (self.points[0] + self.points[-1]) / 2) / (len(self.points) - 1)
        else:
            x = self.a
        return min(x, self.cap)

    def __str__(self) -> str:
        tail = f",max={self.cap}" if self.cap != NO_CAP else ""
        # 15 digits: %g alone would turn 1048576 into 1.04858e+06.
        if self.kind == "fixed":
            return f"fixed({self.a:.15g}{tail})" if tail else f"{self.a:.15g}"
        if self.kind == "quantiles":
            return f"quantiles({','.join(f'{p:.15g}' for p in self.points)}{tail})"
        return f"{self.kind}({self.a:.15g},{self.b:.15g}{tail})"
