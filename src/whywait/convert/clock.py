"""Times as logs write them → seconds since 1970 (or since whatever the log counts from)."""

from __future__ import annotations

import math
import re
from datetime import datetime, timezone
from typing import Any

from whywait.convert.traces import Bad, shown

# 2023-11-16 18:17:03.9799600, 2023-11-16T18:17:03Z, 2023-11-16T18:17:03.5+02:00. Python 3.10 reads neither seven digits
# nor a Z, hence by hand.
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?\s*(Z|UTC|[+-]\d\d:?\d\d)?")
# A number this large cannot be seconds (year 5138), milliseconds …: the unit is told by the size.
_UNITS = ((1e11, 1.0), (1e14, 1e-3), (1e17, 1e-6), (math.inf, 1e-9))


def seconds(value: Any, what: str = "a time") -> float:
    """Seconds; dates without a zone are taken as UTC. Unix times in ms, µs and ns are told by their size.

    Raises:
        Bad: neither a number nor an ISO date.
    """
    if isinstance(value, str) and ("-" in value or ":" in value):
        return _date(value, what)
    x = number(value, what)
    return x * next(scale for limit, scale in _UNITS if x < limit)


def number(value: Any, what: str) -> float:
    """A finite number of at least 0, as it is.

    Raises:
        Bad: it is none.
    """
    try:
        x = float(value)
    except (TypeError, ValueError):
        x = -1.0
    if isinstance(value, bool) or not math.isfinite(x) or x < 0:
        raise Bad(f"{what}, found {shown(value)}")
    return x


def _date(text: str, what: str) -> float:
    form = _ISO.fullmatch(text.strip())
    if form is None:
        raise Bad(f"{what} such as 2023-11-16 18:17:03.98 or a Unix time")
    zone = form[4] or "Z"
    try:
        base = datetime.fromisoformat(f"{form[1]}T{form[2]}").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        raise Bad(f"{what} that is in the calendar") from None
    offset = 0.0
    if zone not in ("Z", "UTC"):
        offset = (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60) * (1 if zone[0] == "+" else -1)
    return base - offset + float(f"0.{form[3] or 0}")
