"""Canonical readings from an existing Prometheus, for a span that may lie in the past. Its HTTP API, nothing else.

Samples are asked for by a range selector (``name[60s]`` in an instant query): that answers what was scraped, at the
times of the scrapes. ``query_range`` answers at a grid instead, and repeats a value for five minutes after the target
is gone; it is the way for long spans, and where the other is refused. Times are the Prometheus's own clock.
"""

from __future__ import annotations

import http.client
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from whywait import __version__
from whywait.core import bounded
from whywait.core.secrets import clean
from whywait.engines import tables
from whywait.engines.table import EngineTable
from whywait.errors import NotAnEndpoint, Unauthorized, Unreachable, UsageError
from whywait.net.reach import Reach, bound, open_page
from whywait.probe import Row
from whywait.probe.prometheus import SUFFIXES, finish, label_json, targets_of
from whywait.units import NS_PER_S

MAX_BYTES = 64 << 20
RAW_S = 2 * 3600  # up to this span samples are asked for as they were scraped
GRID = 480  # steps of a longer one
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Prometheus:
    """``match`` is the inside of a selector (``job="vllm"``); the token is sent as a bearer token, never shown."""

    url: str
    match: str = ""
    token: str | None = field(default=None, repr=False)
    reach: Reach = field(default_factory=Reach)

    def table(self, start_unix_s: float, end_unix_s: float) -> EngineTable:
        """The engine whose metrics it holds in that span.

        Raises:
            UsageError: it holds those of none, or of several.
        """
        prefixes = {prefix: t for t in tables().values() for prefix in t.metric_prefixes}
        among = "|".join(f"{_quoted(p)}.+" for p in prefixes)
        params = {"match[]": self.selector(among), "start": _time(start_unix_s), "end": _time(end_unix_s)}
        names = self.ask("label/__name__/values", params, method="GET")
        if not isinstance(names, list):
            raise NotAnEndpoint(f"{self.url} does not answer a list of names", "is it a Prometheus?")
        found = {t.name: t for n in names for p, t in prefixes.items() if str(n).startswith(p)}
        if len(found) == 1:
            return next(iter(found.values()))
        where = f"{self.url} in that time" + (f" with {self.match}" if self.match else "")
        if found:
            several = ", ".join(sorted(found))
            raise UsageError(f"{where} holds metrics of {several}", """choose by --prometheus-match 'job="…"'""")
        known = ", ".join(tables())
        raise UsageError(
            f"{where} holds no metrics of an engine whywait knows",
            f"known: {known}; another by --engine-file; or look at --prometheus-match",
        )

    def selector(self, names: str) -> str:
        """``{__name__=~"…",job="vllm"}``"""
        return "{" + f'__name__=~"{names}"' + (f",{self.match}" if self.match else "") + "}"

    def readings(self, table: EngineTable, span_unix_ns: tuple[int, int], zero_unix_ns: int) -> list[dict[str, Any]]:
        """Rows of the ``readings`` table, sources ``promql/0``, ``promql/1``, … by replica; times after ``zero``."""
        names = "|".join(_quoted(n) for n in native_names(table))
        found = self._samples(self.selector(names), span_unix_ns)
        rows = _Rows(table, zero_unix_ns)
        for series in found:
            rows.add(*series)
        up = "up" + (f"{{{self.match}}}" if self.match else "")
        for series in self._samples(up, span_unix_ns):
            rows.up(*series)
        return rows.out()

    def _samples(self, selector: str, span: tuple[int, int]) -> list[_Series]:
        start, end = span[0] / NS_PER_S, span[1] / NS_PER_S
        if end - start <= RAW_S:
            params = {"query": f"{selector}[{math.ceil(end - start)}s]", "time": _time(end)}
            try:
                return _matrix(self.ask("query", params), self.url)
            except _Refused:
                pass  # more samples than it gives at once
        step = max(5, math.ceil((end - start) / GRID))
        params = {"query": selector, "start": _time(start), "end": _time(end), "step": str(step)}
        return _matrix(self.ask("query_range", params), self.url)

    def ask(self, path: str, params: Mapping[str, str], method: str = "POST") -> Any:
        """``data`` of an answer of the API.

        Raises:
            Unreachable, Unauthorized, NotAnEndpoint: whatever answers is not a Prometheus that lets us read.
            UsageError: it says what is wrong with the query.
        """
        base, form = f"{self.url.rstrip('/')}/api/v1/{path}", urlencode(params)
        connection, target, headers = open_page(f"{base}?{form}" if method == "GET" else base, self.reach, TIMEOUT_S)
        headers = {"User-Agent": f"whywait/{__version__}", **headers}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        body = None
        if method == "POST":
            body, headers["Content-Type"] = form, "application/x-www-form-urlencoded"
        try:
            bound(connection, TIMEOUT_S)
            connection.request(method, target, body, headers)
            with connection.getresponse() as response:
                status, raw = response.status, response.read(MAX_BYTES + 1)
        except TimeoutError:
            raise Unreachable(f"{self.url}: no whole answer in {TIMEOUT_S:g} s", "a shorter --last, or later") from None
        except (OSError, http.client.HTTPException) as exc:
            raise Unreachable(f"{self.url}: {exc or type(exc).__name__}", "is that the Prometheus's URL?") from None
        finally:
            connection.close()
        if len(raw) > MAX_BYTES:
            raise UsageError(
                f"{self.url} answers more than {MAX_BYTES >> 20} MiB", "a shorter --last, a closer --prometheus-match"
            )
        if status in (401, 403):
            raise Unauthorized(f"{self.url} answers {status}", "give --prometheus-token-env or --prometheus-token-file")
        return _data(raw, status, self.url)


#: Labels, and samples as (Unix time in ns, value).
_Series = tuple[dict[str, str], list[tuple[int, float]]]


class _Refused(UsageError):
    """The query was understood and not answered."""


class _Rows:
    """Series in, readings out. Samples of one scrape have one time: old names and sums are settled scrape by scrape."""

    def __init__(self, table: EngineTable, zero_unix_ns: int) -> None:
        self._table, self._zero = table, zero_unix_ns
        self._at: dict[tuple[str, str], dict[int, tuple[list[Row], list[Row]]]] = {}
        self._up: dict[tuple[str, str], list[tuple[int, float]]] = {}

    def add(self, metric: Mapping[str, str], values: list[tuple[int, float]]) -> None:
        labels = {k: v for k, v in metric.items() if k not in ("__name__", "job")}
        kept = targets_of(metric.get("__name__", ""), labels, self._table)
        if not kept:
            return
        replica = self._at.setdefault((metric.get("job", ""), metric.get("instance", "")), {})
        for t, value in self._points(values):
            rows, old = replica.setdefault(t, ([], []))
            for target in kept:
                (old if target.old else rows).extend(target.rows(value))

    def up(self, metric: Mapping[str, str], values: list[tuple[int, float]]) -> None:
        self._up[metric.get("job", ""), metric.get("instance", "")] = list(self._points(values))

    def _points(self, values: list[tuple[int, float]]) -> Iterator[tuple[int, float]]:
        for t, value in values:
            yield t - self._zero, value

    def out(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for i, (replica, scrapes) in enumerate(sorted(self._at.items())):
            source, up = f"promql/{i}", dict(self._up.get(replica, ()))
            answers, named = up or dict.fromkeys(scrapes, 1.0), label_json({"instance": replica[1]})
            mine: list[tuple[int, Row]] = [(t, ("answered", named, 1.0 if v == 1 else 0.0)) for t, v in answers.items()]
            for t, (rows, old) in scrapes.items():
                mine += [(t, row) for row in finish(rows, old, self._table)]
            mine.sort(key=lambda pair: pair[0])
            found += [_reading(t, source, *row) for t, row in mine]
        return found


def _reading(t: int, source: str, name: str, labels: str | None, value: float) -> dict[str, Any]:
    return {"asked_ns": t, "answered_ns": t, "source": source, "name": name, "labels": labels, "value": value}


def native_names(table: EngineTable) -> list[str]:
    """Every series name of an engine's page that a reading is made of."""
    plain = {*table.metrics, *table.old_metrics, *table.info}
    buckets = {base + suffix for base in (*table.histograms, *table.old_histograms) for suffix in SUFFIXES}
    return sorted(plain | buckets)


def parse_match(text: str | None) -> str:
    """The inside of a selector, with or without its braces.

    Raises:
        UsageError: not of that form.
    """
    inside = (text or "").strip()
    if inside.startswith("{") and inside.endswith("}"):
        inside = inside[1:-1].strip()
    one = r'\s*[a-zA-Z_][a-zA-Z0-9_]*\s*(?:=~|!~|!=|=)\s*"(?:[^"\\]|\\.)*"\s*'
    if inside and not re.fullmatch(rf"{one}(?:,{one})*,?", inside):
        raise UsageError(f"--prometheus-match {text!r} is not a selector", """such as 'job="vllm",namespace="prod"'""")
    return inside.rstrip(",").strip()


def _quoted(name: str) -> str:
    return re.sub(r"([.+*?()\[\]{}|^$\\])", r"\\\\\1", name)


def _time(unix_s: float) -> str:
    return f"{unix_s:.3f}"


def _data(raw: bytes, status: int, url: str) -> Any:
    try:
        answer = bounded.loads(raw)
        if answer["status"] == "success":
            return answer["data"]
        said = "".join(c if c.isprintable() else " " for c in clean(str(answer.get("error", "no word")))[:300])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotAnEndpoint(
            f"{url} answers {status}, and not as a Prometheus does", "give its base URL, without /api/v1"
        ) from None
    raise _Refused(f"{url} refuses the query: {said}", "check --prometheus-match")


def _matrix(data: Any, url: str) -> list[_Series]:
    """Its series; those without plain samples (native histograms) are left out."""
    try:
        if data["resultType"] != "matrix":
            raise ValueError
        plain = [s for s in data["result"] if "values" in s]
        return [({str(k): clean(str(v)) for k, v in s["metric"].items()}, [_sample(*pair) for pair in s["values"]])
                for s in plain]  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise NotAnEndpoint(f"{url} does not answer a matrix", "is it a Prometheus?") from None


def _sample(at: Any, text: Any) -> tuple[int, float]:
    """Unix time in ns (it counts in whole milliseconds), value."""
    return round(float(at) * 1000) * 1_000_000, float(text)
