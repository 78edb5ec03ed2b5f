"""Deltas, gauges and histogram quantiles over a window, with what the samples do not say as an interval."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whywait.analyze.counters import answered_share, delta, gauge, histogram, quantile, series
from whywait.core.table import Table
from whywait.probe.spool import Thinner

S = 1_000_000_000
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the box may be busy


def table(rows: list[tuple[Any, ...]]) -> Table:
    """(t_s, source, name, labels or None, value) → readings that took no time."""
    return Table.from_rows(
        "readings",
        [
            {"asked_ns": round(t * S), "answered_ns": round(t * S), "source": source, "name": name,
             "labels": json.dumps(labels) if labels else None, "value": value}
            for t, source, name, labels, value in rows
        ],
    )  # fmt: skip


def counter(*points: tuple[float, float], source: str = "metrics/0", labels: dict[str, str] | None = None) -> list[Any]:
    return [(t, source, "c_total", labels, v) for t, v in points]


def test_delta_reads_between_samples_and_bounds_it() -> None:
    d = delta(table(counter((0, 10), (10, 20), (20, 40), (30, 40))), "c_total", (5 * S, 25 * S))
    assert d is not None
    assert (d.value, d.low, d.high) == (
        25,
        20,
        30,
    )  # 15..40 by straight lines; samples at 10 and 20 inside; 0 and 30 outside
    assert (d.start_ns, d.end_ns, d.resets) == (5 * S, 25 * S, 0)
    assert d.per_s == 25 / 20


def test_delta_says_what_part_of_the_window_it_covers() -> None:
    d = delta(table(counter((10, 1), (20, 5))), "c_total", (0, 100 * S))
    assert d is not None
    assert (d.value, d.start_ns, d.end_ns) == (4, 10 * S, 20 * S)


def test_delta_bridges_resets() -> None:
    d = delta(table(counter((0, 100), (1, 110), (2, 4), (3, 6))), "c_total", (0, 3 * S))
    assert d is not None
    assert (d.value, d.resets) == (16, 1)


def test_delta_adds_series_and_can_be_narrowed() -> None:
    rows = counter((0, 0), (10, 5), labels={"e": "0"}) + counter((0, 0), (10, 7), labels={"e": "1"})
    rows += counter((0, 0), (10, 100), source="metrics/1") + counter((0, 0), (10, 1000), source="metrics2")
    t = table(rows)

    def value(**kw: Any) -> float:
        d = delta(t, "c_total", (0, 10 * S), **kw)
        assert d is not None
        return d.value

    assert value() == 1112
    assert value(source="metrics") == 112
    assert value(source="metrics/0") == 12
    assert value(source="metrics/0", where={"e": "1"}) == 7


def test_absent_is_none() -> None:
    t = table([*counter((0, 1), (1, None), (2, None)), (0, "x", "g", None, None)])
    assert delta(t, "c_total", (0, 9 * S)) is None  # one value is no growth
    assert delta(t, "other", (0, 9 * S)) is None
    assert delta(table(counter((0, 1), (1, 2))), "c_total", (5 * S, 9 * S)) is None  # nothing read in there
    assert gauge(t, "g", (0, 9 * S)) is None
    assert histogram(t, "h", (0, 9 * S)) is None
    assert quantile(None, 0.5) is None
    assert answered_share(t, "metrics/0", (0, 9 * S)) is None
    assert delta(Table.empty("readings"), "c_total", (0, S)) is None


@RELAXED
@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=30),
    st.lists(st.integers(0, 1000), min_size=3, max_size=12, unique=True),
    st.tuples(st.integers(0, 1000), st.integers(0, 1000)),
    st.integers(0, 50),
)
def test_delta_interval_holds_the_truth(events: list[int], looks: list[int], edges: tuple[int, int], slow: int) -> None:
    """Whatever the events and the looks (each takes a while and sees the value of some moment in it)."""
    looks = sorted(looks)
    looks = [t for i, t in enumerate(looks) if i == 0 or t > looks[i - 1] + slow]  # one is asked after the other
    rows = [
        {"asked_ns": t, "answered_ns": t + slow, "source": "m", "name": "c_total",
         "value": sum(e <= t + slow * (i % 3) // 2 for e in events)}
        for i, t in enumerate(looks)
    ]  # fmt: skip
    d = delta(Table.from_rows("readings", rows), "c_total", (min(edges), max(edges)))
    if d is None:
        return
    assert d.low <= d.value + 1e-9
    assert d.value <= d.high + 1e-9
    truth = sum(d.start_ns < e <= d.end_ns for e in events)
    assert d.low <= truth <= d.high


def test_gauge_is_weighted_by_time() -> None:
    rows = [(t, "metrics/0", "running", None, v) for t, v in ((0, 0), (1, 4), (2, 4), (10, 4))]
    g = gauge(table(rows), "running", (0, 10 * S))
    assert g is not None
    assert g.mean == pytest.approx(3.8)
    assert (g.low, g.high, g.last, g.n) == (0, 4, 4, 4)
    assert g.slope_per_s is not None
    assert g.slope_per_s > 0
    one = gauge(table(rows), "running", (0, S // 2))
    assert one is not None
    assert (one.mean, one.n, one.slope_per_s) == (0, 1, None)


def test_gauge_slope() -> None:
    g = gauge(table([(t, "m", "waiting", None, 3 + 2 * t) for t in range(10)]), "waiting", (0, 9 * S))
    assert g is not None
    assert g.slope_per_s == pytest.approx(2)


def test_gauge_of_several_series() -> None:
    rows = [(t, "metrics/0", "kv_use", None, 0.2) for t in (0, 2, 4)]
    rows += [(t, "metrics/1", "kv_use", None, 0.6) for t in (1, 3, 5)]
    for combine, want in (("sum", 0.8), ("mean", 0.4), ("max", 0.6)):
        g = gauge(table(rows), "kv_use", (0, 5 * S), combine=combine)
        assert g is not None
        assert g.mean == pytest.approx(want)
        assert g.n == 4  # from the second's first sample to the first's last


def buckets(t: float, counts: dict[str, float], total: float, source: str = "metrics/0") -> list[Any]:
    rows: list[Any] = [(t, source, "h_bucket", {"le": le}, v) for le, v in counts.items()]
    return [*rows, (t, source, "h_sum", None, total), (t, source, "h_count", None, counts["+Inf"])]


def test_histogram_delta_and_quantiles() -> None:
    rows = buckets(0, {"0.1": 5, "0.2": 5, "+Inf": 9}, 100) + buckets(1, {"0.1": 5, "0.2": 13, "+Inf": 19}, 104)
    h = histogram(table(rows), "h", (0, S))
    assert h is not None
    assert h.counts.tolist() == [0, 8, 2]
    assert (h.n, h.total, h.mean) == (10, 4, 0.4)
    q = quantile(h, 0.5)
    assert q is not None
    assert (q.low, q.high, q.n) == (0.1, 0.2, 10)
    assert q.value == pytest.approx(0.1625)
    top = quantile(h, 0.99)
    assert top is not None
    assert (top.value, top.low, top.high) == (None, 0.2, math.inf)
    bottom = quantile(h, 0.0)
    assert bottom is not None
    assert (bottom.low, bottom.high) == (0.1, 0.2)  # nothing fell below
    quiet = histogram(table(rows), "h", (S, 2 * S))
    assert quiet is not None
    assert quiet.n == 0
    assert quiet.mean is None
    assert quantile(quiet, 0.5) is None


def test_histograms_of_replicas_meet_at_shared_bounds() -> None:
    rows = buckets(0, {"1": 0, "2": 0, "+Inf": 0}, 0) + buckets(1, {"1": 2, "2": 4, "+Inf": 4}, 5)
    rows += buckets(0, {"1.0": 0, "3": 0, "+Inf": 0}, 0, "metrics/1") + buckets(
        1, {"1.0": 1, "3": 6, "+Inf": 6}, 9, "metrics/1"
    )
    h = histogram(table(rows), "h", (0, S))
    assert h is not None
    assert h.bounds.tolist() == [1, math.inf]
    assert h.counts.tolist() == [3, 7]
    assert h.total == 14


def test_histogram_reset() -> None:
    rows = (
        buckets(0, {"1": 50, "+Inf": 60}, 100) + buckets(1, {"1": 3, "+Inf": 4}, 2) + buckets(2, {"1": 5, "+Inf": 6}, 3)
    )
    h = histogram(table(rows), "h", (0, 2 * S))
    assert h is not None
    assert h.counts.tolist() == [5, 1]
    assert h.total == 3


def test_histogram_without_its_inf_bucket_is_refused() -> None:
    rows = [(t, "m", "h_bucket", {"le": "1"}, t) for t in (0, 1)]
    assert histogram(table(rows), "h", (0, S)) is None


@RELAXED
@given(st.lists(st.floats(0.001, 9.0), min_size=1, max_size=80), st.floats(0.0, 1.0))
def test_quantile_interval_holds_the_sample_quantile(values: list[float], q: float) -> None:
    bounds = [0.0, 0.5, 1.0, 2.0, 5.0]
    counts = {str(b): float(sum(v <= b for v in values)) for b in bounds} | {"+Inf": float(len(values))}
    zero = dict.fromkeys(counts, 0.0)
    found = quantile(histogram(table(buckets(0, zero, 0) + buckets(1, counts, sum(values))), "h", (0, S)), q)
    assert found is not None
    true = float(np.quantile(values, q, method="inverted_cdf"))
    assert found.low <= true <= found.high


@RELAXED
@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.tuples(st.integers(0, 45), st.integers(0, 45)))
def test_thinned_histograms_say_the_same(grows: list[int], edges: tuple[int, int]) -> None:
    """What the sampler leaves out changes no answer."""
    thinner = Thinner()
    full: list[Any] = []
    thin: list[Any] = []
    total = 0
    for t, more in enumerate(max(0, g - 1) for g in grows):
        total += more
        rows: list[Any] = [("h_bucket", '{"le":"1"}', total // 2), ("h_bucket", '{"le":"+Inf"}', total)]
        rows += [("h_sum", None, total), ("h_count", None, total), ("running", None, t)]
        full += [(t, row) for row in rows]
        thin += [(asked // S, row) for asked, _, part in thinner.split(t * S, t * S, rows) for row in part]
    thin += [(asked // S, row) for asked, _, part in thinner.rest() for row in part]
    assert len(thin) <= len(full)
    window = (min(edges) * S, max(edges) * S)
    answers: list[list[float | None]] = []
    for rows in (full, thin):
        t = table([(at, "m", name, json.loads(labels) if labels else None, v) for at, (name, labels, v) in rows])
        h, d = histogram(t, "h", window), delta(t, "h_count", window)
        g = gauge(t, "running", window)
        answers.append(
            [*(h.counts if h else [None]), *((d.value, d.start_ns, d.end_ns) if d else [None]), *(g or [None])]
        )
    assert answers[0] == pytest.approx(answers[1])


def test_answered_share() -> None:
    rows = [
        (t, "metrics/0", "answered", {"why": "x"} if v == 0 else None, v) for t, v in ((0, 1), (1, 1), (2, 0), (3, 1))
    ]
    assert answered_share(table(rows), "metrics/0", (0, 3 * S)) == 0.75
    assert answered_share(table(rows), "metrics", (2 * S, 2 * S)) == 0


def test_series_sorts_by_time() -> None:
    (s,) = series(table(counter((2, 5), (1, 3))), "c_total")
    assert s.values.tolist() == [3, 5]
    assert s.labels == {}
