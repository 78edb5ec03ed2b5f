"""The HTML report: it says what the summary says, stands alone, and keeps every foreign word text."""

from __future__ import annotations

import dataclasses
import html
import io
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.analysis_runs import MS, Service, join, make_run, messy_runs
from tests.pages import HOSTILE, analysed, checked, failed, hostile, mixed, page, sweep
from whywait.analyze.phases import account
from whywait.analyze.summary import summarize
from whywait.core.run import Run
from whywait.core.secrets import MASK, forget, hide
from whywait.judge.vocabulary import page as page_of_wait
from whywait.judge.what import WHAT
from whywait.report import svg
from whywait.report.html import render
from whywait.report.neighbours import beside, focus
from whywait.report.text import console, print_result
from whywait.report.timelines import MOST_REQUESTS

ROOT = Path(__file__).parents[1]
CHARTS = 12  # of a run with load points of our own


def test_an_ordinary_run_has_every_part():
    run = sweep(slo={"ttft_ms": 200.0}, engine={"slots": 4, "model": "smol"}, command=["diagnose", "--budget", "3 m"])
    summary = analysed(run)
    found = checked(render(run, summary))
    assert found.words["h1"] == [summary["headline"]]
    heads = (
        "At a glance, Verdicts, Against load, Who waits for what, Latency distributions, Timeline of requests, "
        "All figures, Doubts, Definitions, To repeat it"
    )
    assert found.words["h2"] == heads.split(", ")
    assert len(found.all("article")) == len(summary["verdicts"])
    assert {a["aria-labelledby"] for a in found.all("figure")} == {
        f"{k}-h"
        for k in (
            "phases",
            "occupancy",
            "curve-ttft",
            "curve-tpot",
            "curve-e2e",
            "cost",
            "ecdf-ttft",
            "ecdf-tpot",
            "ecdf-e2e",
            "ecdf-itl",
            "bands-e2e",
            "bands-ttft",
        )
    }
    # The charts, a timeline of each point, and one of a request for the least, the knee, the most load and the other.
    assert len(found.all("svg", role="img")) == CHARTS + 5 + 4
    assert len(found.all("table")) >= CHARTS + 2 * 5 + 4 + 3
    for words in ("4 ◂", "16 ◆", "SLO 200 ms", "KV space in use, %", "whywait diagnose --budget '3 m'", "smol",
                  "definitions 2", "The client's own floor was not measured."):  # fmt: skip
        assert words in found.text, words
    assert "PARTIAL" not in found.text
    regions = [a["aria-label"] for a in found.all("div", role="region")]
    assert len(set(regions)) == len(regions)  # somebody who jumps from one to the next knows which it is


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


def test_each_verdict_says_what_its_wait_is_and_where_more_is():
    run = sweep(slo={"ttft_ms": 200.0}, engine={"slots": 4, "model": "smol"})
    summary = analysed(run)
    text = html.unescape(render(run, summary))
    assert len(summary["verdicts"]) > 1
    for v in summary["verdicts"]:
        assert f"<summary>what “{v['cause']}” is</summary>" in text
        assert WHAT[v["cause"]].replace("`", "") in text
        page_of = Path(page_of_wait(v["cause"]))
        assert (ROOT / page_of).exists()
        assert str(page_of) in text
        assert f"whywait catalog {page_of.stem}</code>" in text
    summary["verdicts"][0]["cause"] = "a wait of tomorrow"
    assert "what “a wait of tomorrow”" not in render(run, summary)


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
    found = checked(render(*hostile(sweep())))
    assert found.words["h1"] == [" ".join(HOSTILE)]
    for text in HOSTILE:
        assert text in found.words["li"]  # evidence, word for word
        assert text in found.words["td"]
    assert not {"iframe", "img"} & {t for t, _ in found.elements}


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
    groups = re.findall(r'<g data-r="\d+"><title>request (\d+) .*?</g>', text)
    assert sorted(map(int, groups)) == list(range(6))
    span = (acc.total_ns + run.requests["sent_ns"]).max() - run.requests["sent_ns"].min()
    for number, body in re.findall(r'<g data-r="\d+"><title>request (\d+) [^<]*</title>(.*?)</g>', text):
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


def test_the_slowest_and_the_classes_have_bars_of_their_own():
    found = page(mixed())
    assert "by-class-h" in {a["aria-labelledby"] for a in found.all("figure")}
    assert "stalled decode (neighbour's prefill)" in found.text
    for words in ("p0-50", "p99+", "What each class waits for", "What requests wait for, by quantile of TTFT"):
        assert words in found.text, words


def test_the_p99_request_is_shown_with_whom_its_tokens_waited_for():
    run = mixed()
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
    print_result(analysed(mixed()), [], "runs/x", console(out))
    text = out.getvalue()
    assert "what the slowest wait for" in text
    assert re.search(r"p99\+ +1 ", text)
    assert "stalled decode" in text


def test_keys_are_cut_out_before_escaping_could_disguise_them_and_never_out_of_the_script():
    key, word = "p&ss<w'rd\"=x", "const"  # the second is a word of the script
    hide(key, word)
    try:
        run = sweep()
        label = np.array([None, key, "a" * 52 + key, word, None], dtype=object)
        classes = np.array([f"class {key}"] * len(run.requests), dtype=object)
        manifest = dataclasses.replace(run.manifest, command=["run", "--header", f"X: {key}"], engine={"name": key})
        run = Run(manifest, run.points.replace(label=label), run.requests.replace(**{"class": classes}), run.chunks,
                  run.steps, run.readings)  # fmt: skip
        text = render(run, analysed(run, doubts=[{"what": key, "why": key, "next": key}]))
        found = checked(text)  # the script is what its hash says
        code = found.words["script"][-1]
        assert "const " in code
        rest = text.replace(code, "")
        for part in (key, key[:7]):
            for form in (
                part,
                html.escape(part),
                json.dumps(part)[1:-1],
                json.dumps(part)[1:-1].replace("<", "\\u003c"),
            ):
                assert form not in rest, form
        assert MASK in found.text
        assert word not in rest
    finally:
        forget()


def test_of_a_simulated_service_the_page_calls_nothing_measured():
    run = sweep()
    m = dataclasses.replace(run.manifest, made_by="simulated")
    simulated = dataclasses.replace(run, manifest=m)
    how = re.compile(r"(?:>|, )measured(?=<)")
    assert how.search(render(run, analysed(run)))
    text = render(simulated, analysed(simulated))
    assert not how.search(text)
    assert re.search(r"(?:>|, )modelled(?=<)", text)
