"""The HTML report: it says what the summary says, stands alone, and keeps every foreign word text."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.analysis_runs import MS, S, Service, gauge_rows, join, make_run, messy_runs
from whywait.analyze.phases import account
from whywait.analyze.summary import summarize
from whywait.core.run import Run
from whywait.core.table import Table
from whywait.judge.diagnose import headline, judge
from whywait.report import svg
from whywait.report.html import render
from whywait.report.neighbours import beside, focus
from whywait.report.per_request import MOST_REQUESTS
from whywait.report.text import console, print_result

MB = 1_000_000
VOID = {"meta", "link", "br", "hr", "img", "input"}
TAGS = {
    "html", "head", "meta", "link", "title", "style", "body", "header", "main", "footer", "nav", "section", "article",
    "figure", "figcaption", "div", "span", "p", "h1", "h2", "h3", "ul", "li", "dl", "dt", "dd", "a", "b", "small",
    "code", "strong", "abbr", "details", "summary", "table", "caption", "thead", "tbody", "tr", "th", "td", "svg",
    "defs", "pattern", "g", "rect", "line", "path", "circle", "text", "desc",
}  # fmt: skip
HOSTILE = (
    "<script>alert(1)</script>",
    "</svg><img src=x onerror=alert(1)>",
    "]]><!-- ",
    '"\' onmouseover=\'alert(1)" x="',
    "</style></title><iframe src='https://evil.example'>",
    "&lt;b&gt; &amp; ${x} {{x}}",
)


class Page(HTMLParser):
    """A parsed page: its elements with attributes, and its text; complains of elements that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({k for k, _ in attrs}) == len(attrs), f"an attribute twice in <{tag}>"
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.get_starttag_text() is not None and self._open and self._open[-1] == tag:
            self._open.pop()
        else:
            raise AssertionError(f"</{tag}> closes {self._open[-3:]}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_data(self, data: str) -> None:
        self.words.setdefault(self._open[-1] if self._open else "", []).append(data)

    def all(self, tag: str, **attrs: str) -> list[dict[str, str]]:
        return [a for t, a in self.elements if t == tag and all(a.get(k.rstrip("_")) == v for k, v in attrs.items())]

    @property
    def text(self) -> str:
        return "\n".join(w for t, words in self.words.items() if t != "style" for w in words)


def analysed(run: Run, **more: Any) -> dict[str, Any]:
    summary = summarize(run)
    verdicts = judge(run, summary)
    return {**summary, "verdicts": [v.as_dict() for v in verdicts], "headline": headline(verdicts), **more}


def page(run: Run, **more: Any) -> Page:
    return checked(render(run, analysed(run, **more)))


def checked(text: str) -> Page:
    """What holds for every page: it nests, knows its elements, loads nothing, and names what it draws."""
    found = Page(text)
    assert {t for t, _ in found.elements} <= TAGS
    ids = [a["id"] for _, a in found.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attrs in found.elements:
        assert not [k for k in attrs if k.startswith("on") or k in {"src", "srcset", "action", "formaction"}]
        assert re.fullmatch(r"#[\w-]+|data:,", attrs.get("href", "#x"))
        assert "://" not in " ".join(v for k, v in attrs.items() if k not in {"title", "aria-label"})
        assert set(attrs.get("aria-labelledby", "").split()) <= set(ids)
        assert not re.search(r"\b(nan|inf)\b", " ".join(attrs.values()))
    css = "".join(found.words["style"])
    assert "@import" not in css
    assert set(re.findall(r"url\(([^)]*)\)", css)) <= {"#hatch", "#hatch-kv", "#hatch-hot"}
    [policy] = [a["content"] for a in found.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "script" not in policy
    for picture in found.all("svg", role="img"):
        assert len(picture["aria-labelledby"].split()) == 2
    assert len(found.all("figure")) == len(found.all("p", class_="reading")) - len(
        found.all("details", class_="card")
    ) + (found.text.count("has the stamps that it takes to draw it"))
    assert all(a.get("aria-label") and a.get("tabindex") == "0" for a in found.all("div", role="region"))
    assert len(text) < 6 * MB
    return found


def sweep(levels: tuple[int, ...] = (1, 4, 8, 16), **more: Any) -> Run:
    """A service with 4 slots under rising concurrency, its gauges read; the last level again as a labelled point."""
    runs = []
    for c in [*levels, levels[-1]]:
        run = Service(slots=4, noise=0.2, seed=c).closed(c, 40)
        span = range(int(run.points["start_ns"][0]), int(run.points["end_ns"][0]), 100 * MS)
        rows = [r for name, v in (("running", min(c, 4)), ("waiting", max(c - 4, 0)), ("kv_use", c / 20))
                for r in gauge_rows(name, [(t, float(v)) for t in span])]  # fmt: skip
        rows = [{"answered_ns": r["asked_ns"] + MS, **r} for r in rows]
        runs.append(dataclasses.replace(run, readings=Table.from_rows("readings", rows)))
    whole = join(runs)
    label = np.array([None] * len(levels) + ["long prompts mixed in"], dtype=object)
    manifest = dataclasses.replace(whole.manifest, **more)
    return dataclasses.replace(whole, points=whole.points.replace(label=label), manifest=manifest)


def failed() -> Run:
    rows: list[dict[str, Any]] = [
        {
            "outcome": "http_error",
            "fault": "service",
            "due_ns": S + i * MS,
            "sent_ns": S + i * MS,
            "end_ns": S + 90 * MS,
        }
        for i in range(30)
    ]
    return make_run([*rows, {"outcome": "never_sent", "fault": "client", "due_ns": S}], points=[{"mode": "rate"}])


def test_an_ordinary_run_has_every_part():
    run = sweep(slo={"ttft_ms": 200.0}, engine={"slots": 4, "model": "smol"}, command=["diagnose", "--budget", "3 m"])
    summary = analysed(run)
    found = checked(render(run, summary))
    assert found.words["h1"] == [summary["headline"]]
    heads = (
        "Verdicts, Against load, Who waits for what, All figures, Latency distributions, Timeline of requests, Doubts"
    )
    assert found.words["h2"] == [*heads.split(", "), "Definitions", "To repeat it"]
    assert len(found.all("article")) == len(summary["verdicts"])
    assert {a["aria-labelledby"] for a in found.all("figure")} == {
        f"{k}-h"
        for k in (
            "phases",
            "occupancy",
            "curve-ttft",
            "curve-e2e",
            "ecdf-ttft",
            "ecdf-tpot",
            "ecdf-e2e",
            "bands-e2e",
            "bands-ttft",
        )
    }
    # The charts, a timeline of each point, and one of a request for the least, the knee, the most load and the other.
    assert len(found.all("svg", role="img")) == 9 + 5 + 4
    assert len(found.all("table")) >= 9 + 5 + 4 + 3
    for words in ("4 ◂", "16 ◆", "SLO 200 ms", "KV space in use, %", "whywait diagnose --budget '3 m'", "smol",
                  "definitions 2", "The client's own floor was not measured."):  # fmt: skip
        assert words in found.text, words
    assert "PARTIAL" not in found.text


def test_readings_say_in_words_what_the_charts_show():
    found = page(sweep())
    said = " ".join(found.words["p"])
    assert re.search(
        r"From 4 to 16 in flight output tokens/s (stay at [\d.]+|go from [\d.]+ to [\d.]+ \(\S+ %\)) while TTFT goes",
        said,
    )
    assert re.search(
        r"From 1 to 16 in flight a request's mean time grows from .* added time is queue \(slot limit\)", said
    )
    assert "With “long prompts mixed in”" in said
    assert "The engine's own queue held up to 12." in said
    assert "The engine's own queue stayed empty." in said
    assert "Not visible with what was told: frontend." in said


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (make_run([]), "No request left the stamps"),
        (make_run([], points=[]), "0 load points"),
        (failed(), "Nothing to draw: no load point has both"),
        (Service().closed(4, 1), "At 4 in flight a request takes"),
        (join([Service().open([200 * MS] * 30, rate=r) for r in (5, 9)]), "requests/s"),
    ],
)
def test_sparse_runs_have_a_page_that_says_so(run: Run, words: str):
    assert words in page(run).text


def test_a_run_that_was_not_judged_says_so():
    run = Service().closed(1, 4)
    found = checked(render(run, summarize(run)))
    assert "This run was not judged" in found.words["h1"]


def test_partial_simulated_and_imported_runs_are_labelled_at_the_top():
    run = Service().closed(4, 20)
    for made_by in ("simulated", "imported"):
        m = dataclasses.replace(run.manifest, made_by=made_by, partial=True, partial_reason="interrupted")
        text = render(dataclasses.replace(run, manifest=m), analysed(dataclasses.replace(run, manifest=m)))
        top = text[text.index("<header>") : text.index("<h1")]
        assert made_by.upper() in top
        assert "PARTIAL" in top
        assert "interrupted" in top


def test_null_is_a_dash_and_an_unknown_upper_bound_a_question_mark():
    run = sweep()
    summary = analysed(run)
    for p in summary["points"]:
        p["cached_share"] = None
    summary["points"][0]["cached_share"] = 0.5
    text = render(run, summary)
    row = re.search(r"<tr><th[^>]*>prompt tokens cached</th>(.*?)</tr>", text)
    assert row is not None
    assert re.sub("<[^>]+>", " ", row[1]).split() == ["50", "%", "–", "–", "–", "–"]
    assert "power" not in checked(text).words["th"]  # a row that is unknown everywhere is left out; the doubts say why
    row = re.search(r"<tr><th[^>]*>end to end p99</th>(.*?)</tr>", text)
    assert row is not None
    assert row[1].count('<abbr title="upper 95 % bound unknown: too few requests"> ?</abbr>') == 5


def test_withheld_percentiles_show_their_certain_bounds():
    run = Service().closed(2, 20)
    summary = analysed(run)
    for q in ("p50", "p90", "p95", "p99", "mean"):
        summary["points"][0]["chunk_gap_ms"][q] = None
    summary["points"][0]["chunk_gap_ms"]["bounds"] = {"p50": [1.0, 40.0]}
    assert "1.00 ms – 40.0 ms" in checked(render(run, summary)).text


def test_hostile_strings_stay_text():
    run = sweep()
    bad = np.array([HOSTILE[i % len(HOSTILE)] for i in range(len(run.requests))], dtype=object)
    requests = run.requests.replace(**{"class": bad, "detail": bad, "trace_id": bad, "finish_reason": bad})
    label = np.array([None, *HOSTILE[:4]], dtype=object)
    doubts = [{"what": h, "why": h, "next": h} for h in HOSTILE]
    facts = dict(zip(HOSTILE, HOSTILE, strict=True))
    manifest = dataclasses.replace(
        run.manifest, command=list(HOSTILE), engine={"model": HOSTILE[0], "name": HOSTILE[1], **facts}, workload=facts,
        machine={"client": {"cpu": HOSTILE[2]}}, doubts=doubts, endpoint={"url": HOSTILE[4]}, partial=True,
        partial_reason=HOSTILE[1], client={"list": [*HOSTILE, facts]}, whywait_version=HOSTILE[3],
    )  # fmt: skip
    run = Run(manifest, run.points.replace(label=label), requests, run.chunks, run.steps, run.readings)
    verdict = {"cause": "x", "claim": HOSTILE[0], "state": "holds", "share": 0.5, "of": HOSTILE[1], "where": HOSTILE[2],
               "how": HOSTILE[3], "evidence": list(HOSTILE), "against": list(HOSTILE), "lever": HOSTILE[4],
               "next_step": HOSTILE[5], "point": 0}  # fmt: skip
    verdicts = [verdict, {**verdict, "state": "undecided"}, {**verdict, "state": "fails"}]
    found = checked(render(run, {**summarize(run), "verdicts": verdicts, "headline": " ".join(HOSTILE)}))
    assert found.words["h1"] == [" ".join(HOSTILE)]
    for text in HOSTILE:
        assert text in found.words["li"]  # evidence, word for word
        assert text in found.words["td"]
    assert not {"script", "iframe", "img"} & {t for t, _ in found.elements}


def test_what_is_not_for_reading_does_not_reach_the_page():
    run = Service().closed(1, 4)
    text = render(run, analysed(run, headline="a\x00b\u202ec\ud800d\x1b[31me"))
    assert text.encode("utf-8")
    assert checked(text).words["h1"] == ["a\ufffdb\ufffdc\ufffdd\ufffd[31me"]


def test_two_hundred_thousand_chunks_and_sixty_points_stay_small():
    many = Service(slots=64, tokens=200).closed(64, 1000)
    assert len(many.chunks) == 200_000
    found = page(many)
    assert f"{MOST_REQUESTS} of 1000 requests drawn" in found.text
    sixty = join([Service(slots=8, tokens=4).closed(c, 12) for c in range(1, 61)])
    assert re.search(r"2[45] of 60 points are drawn", page(sixty).text)


def test_a_timeline_draws_every_phase_to_scale():
    run = Service(slots=1, prefill_ms=50, gap_ms=20, tokens=6).closed(2, 6)
    acc = account(run)
    text = render(run, analysed(run))
    groups = re.findall(r"<g><title>request (\d+) .*?</g>", text)
    assert sorted(map(int, groups)) == list(range(6))
    span = (acc.total_ns + run.requests["sent_ns"]).max() - run.requests["sent_ns"].min()
    for number, body in re.findall(r"<g><title>request (\d+) [^<]*</title>(.*?)</g>", text):
        i = int(number)
        for phase in ("queue", "prefill", "decode"):
            drawn = sum(float(w) for w in re.findall(rf'width="([\d.]+)%" height="[\d.]+" class="f-{phase}"', body))
            true = acc.phases[i, ["client", "network", "frontend", "queue", "prefill", "decode"].index(phase)] / span
            assert drawn / 100 == pytest.approx(true, abs=1e-3)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=40), st.integers(1, 5))
def test_lanes_hold_one_request_at_a_time(pairs: list[tuple[int, int]], most: int):
    spans = sorted((a, a + n) for a, n in pairs)
    place = svg.lanes(spans, most)
    assert set(place.values()) <= set(range(most))
    for lane in set(place.values()):
        mine = [spans[i] for i, k in place.items() if k == lane]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))
    if max((sum(a <= t < b for a, b in spans) for t in range(75)), default=0) <= most:
        assert len(place) == len(spans)


@given(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=9), st.booleans(), st.integers(3, 8))
def test_scales_hold_their_values_and_have_ticks_inside(values: list[float], zero: bool, most: int):
    scale = svg.scale_for(values, zero=zero)
    at = [scale(v) for v in sorted(values)]
    assert at == sorted(at)
    assert all(0 <= x <= 1 for x in at)
    ticks = scale.ticks(most)
    assert 1 <= len(ticks) <= most + 2
    assert all(scale.low * 0.999 <= t <= scale.high * 1.001 for t in ticks)
    assert all(a < b for a, b in itertools.pairwise(ticks))
    assert len({svg.tick_text(t) for t in ticks}) > len(ticks) // 2


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(messy_runs(orderly=False))
def test_any_run_has_a_page(run: Run):
    page(run)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on PATH to open the page with")
def test_chromium_opens_the_page_without_complaint(tmp_path: Path):
    run = sweep(slo={"ttft_ms": 200.0})
    report = tmp_path / "report.html"
    report.write_text(render(run, analysed(run)), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync",
               f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND",
               "--enable-logging=stderr", "--dump-dom", report.as_uri()]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("chromium did not answer within two minutes")
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    assert done.stdout.count('role="img"') == 9 + 5 + 4
    assert re.search(r"</footer>\s*</body></html>", done.stdout)
    assert len(re.findall(r"<(\w+)", done.stdout)) == len(re.findall(r"<(\w+)", report.read_text(encoding="utf-8")))


def _mixed():
    """Short requests whose decode a long prompt holds up: every eighth has a prefill of 200 ms, in which all stand."""
    rows, chunks = [], []
    t = S
    for i in range(40):
        long = i % 8 == 4
        first = t + (200 if long else 20) * MS
        gaps = [20] * 20
        if i % 8 == 3:
            gaps[5] = 220
        times = [first + int(v) * MS for v in np.cumsum([0, *gaps])]
        rows.append({"sent_ns": t, "first_ns": first, "last_ns": times[-1], "end_ns": times[-1], "rtt_ns": 0,
                     "connect_ns": 0, "engine_prefill_ms": 200.0 if long else 20.0, "engine_queue_ms": 0.0,
                     "class": "long" if long else "short", "output_tokens": 21, "content_chunks": 21,
                     "prompt_tokens": 4000 if long else 64})  # fmt: skip
        chunks += [{"id": i, "t_ns": v} for v in times]
        t += 120 * MS if i % 8 == 3 else 450 * MS
    return make_run(rows, chunks)


def test_the_slowest_and_the_classes_have_bars_of_their_own():
    found = page(_mixed())
    assert "by-class-h" in {a["aria-labelledby"] for a in found.all("figure")}
    assert "stalled decode (neighbour's prefill)" in found.text
    for words in ("p0-50", "p99+", "What each class waits for", "What requests wait for, by quantile of TTFT"):
        assert words in found.text, words


def test_the_p99_request_is_shown_with_whom_its_tokens_waited_for():
    run = _mixed()
    row = focus(run, np.ones(40, dtype=bool))
    taken = (run.requests["end_ns"] - run.requests["sent_ns"])[row]
    assert taken == (run.requests["end_ns"] - run.requests["sent_ns"]).max()
    assert row % 8 == 3
    assert row + 1 in beside(run, row)
    far = make_run(
        [{"sent_ns": 0, "end_ns": 9}, {"sent_ns": 5, "end_ns": 20, "replica": 1}, {"sent_ns": 9, "end_ns": 12}]
    )
    assert beside(far, 0) == []


def test_the_terminal_shows_the_bands_too():
    out = io.StringIO()
    print_result(analysed(_mixed()), [], "runs/x", console(out))
    text = out.getvalue()
    assert "what the slowest wait for" in text
    assert re.search(r"p99\+ +1 ", text)
    assert "stalled decode" in text
