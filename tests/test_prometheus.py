"""Prometheus text in, canonical rows out."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whywait.engines import ENGINES, EngineTable, Metric
from whywait.probe.prometheus import PageReader, Sample, canonical, label_json, page_facts, parse

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the box may be busy
SHARED = Path(__file__).parents[2] / "shared"
TABLE = EngineTable(
    name="t",
    title="t",
    metric_prefixes=("t:",),
    metrics={
        "t:run": (Metric("running"),),
        "t:ms_total": (Metric("prefill_seconds_total", 1e-3),),
        "t:a_total": (Metric("prompt_tokens_computed_total"),),
        "t:b_total": (Metric("cached_tokens_total"),),
        "t:src_total": (
            Metric("cached_tokens_total", where=(("source", "cache"),)),
            Metric("prefix_hits_total", where=(("source", "cache"),)),
        ),
    },
    old_metrics={"t:run_old": (Metric("running"),)},
    histograms={"t:gap": "itl_seconds"},
    old_histograms={"t:gap_old": "itl_seconds"},
    info={"t:info": {"kv_tokens_total": (("tokens",), ("blocks", "size"))}},
    facts=("blocks", "dtype"),
    sums={"prompt_tokens_total": ("prompt_tokens_computed_total", "cached_tokens_total")},
)


def rows(text: str) -> list[tuple[str, dict[str, str], float]]:
    return [tuple(s) for s in canonical(parse(text).samples, TABLE)]


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("a 1", Sample("a", {}, 1)),
        ("  a\t2.5e3  ", Sample("a", {}, 2500)),
        ("a{} 1", Sample("a", {}, 1)),
        ("ns:a_total 1", Sample("ns:a_total", {}, 1)),
        ('a{x="1",y="2"} 3', Sample("a", {"x": "1", "y": "2"}, 3)),
        ('a{ x = "1" , y="2", } 3', Sample("a", {"x": "1", "y": "2"}, 3)),
        ('a{x="q\\"b\\\\n\\nl}{,="} 3', Sample("a", {"x": 'q"b\\n\nl}{,='}, 3)),
        ('a{x="ü 漢"} 3', Sample("a", {"x": "ü 漢"}, 3)),
        ('a_bucket{le="+Inf"} +Inf', Sample("a_bucket", {"le": "+Inf"}, math.inf)),
        ("a -Inf", Sample("a", {}, -math.inf)),
        ("a 1 1395066363000", Sample("a", {}, 1)),
        ('a_bucket{le="1"} 5 # {trace_id="abc"} 0.7 1520879607.789', Sample("a_bucket", {"le": "1"}, 5)),
        ('a{x=""} 1', Sample("a", {"x": ""}, 1)),
        ("a 1\r", Sample("a", {}, 1)),
    ],
)
def test_lines_that_are_samples(line: str, want: Sample) -> None:
    page = parse(line)
    assert page.samples == [want]
    assert page.skipped == 0


@pytest.mark.parametrize("value", ["+Inf", "-Inf"])
def test_nor_is_what_is_infinite(value: str) -> None:
    """JSON could not say it, and no gauge of ours can be it."""
    assert rows(f"t:run {value}") == []
    reader = PageReader(TABLE)
    assert [reader.read(f"t:run {number}") for number in (1, value)] == [[("running", None, 1.0)], []]


def test_nan_is_parsed_but_is_no_reading() -> None:
    assert math.isnan(parse("t:run NaN").samples[0].value)
    assert rows("t:run NaN") == []


@pytest.mark.parametrize(
    "line",
    ["a", "a one", "1a 1", 'a{x="1} 2', "a{x=1} 2", 'a{x="1" y="2"} 3', 'a{="1"} 2', "a 1_000", "<html>", "a 1 2 3",
     "{} 1", 'a{x="1"', 'a{x="1\\"} 2'],
)  # fmt: skip
def test_garbage_is_skipped_and_counted(line: str) -> None:
    page = parse(f"ok 1\n{line}\nok 2")
    assert [s.value for s in page.samples] == [1, 2]
    assert page.skipped == 1


def test_comments_and_blanks_are_neither() -> None:
    assert parse("# HELP a b\n\n   \n  # TYPE a counter\n# EOF\n") == ([], 0)


@RELAXED
@given(
    st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), st.text(max_size=12), max_size=4),
    st.floats(allow_nan=False),
)
def test_round_trip(labels: dict[str, str], value: float) -> None:
    body = ",".join(
        '{}="{}"'.format(k, v.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for k, v in labels.items()
    )
    text = f"name{{{body}}} {value!r}"
    assert parse(text) == ([Sample("name", labels, value)], 0)


@RELAXED
@given(st.text(max_size=200))
def test_never_raises(text: str) -> None:
    page = parse(text)
    assert page.skipped >= 0
    canonical(page.samples, TABLE)
    PageReader(TABLE).read("t:" + text)


def test_names_units_and_labels() -> None:
    assert rows('t:run{e="0"} 3\nt:ms_total 1500\nother 9') == [
        ("running", {"e": "0"}, 3.0),
        ("prefill_seconds_total", {}, 1.5),
    ]


def test_one_native_name_may_be_two_of_ours_by_label() -> None:
    got = rows('t:src_total{source="cache",e="0"} 5\nt:src_total{source="compute",e="0"} 7')
    assert got == [("cached_tokens_total", {"e": "0"}, 5.0), ("prefix_hits_total", {"e": "0"}, 5.0)]


def test_old_names_count_only_alone() -> None:
    both = "t:run 1\nt:run_old 1\nt:gap_count 4\nt:gap_old_count 4"
    assert [r[0] for r in rows(both)] == ["running", "itl_seconds_count"]
    assert rows("t:run_old 2") == [("running", {}, 2.0)]
    assert [r[0] for r in rows("t:gap_old_sum 2")] == ["itl_seconds_sum"]


def test_sums_need_every_part_with_the_same_labels() -> None:
    assert ("prompt_tokens_total", {}, 12.0) in rows("t:a_total 5\nt:b_total 7")
    assert "prompt_tokens_total" not in {r[0] for r in rows("t:a_total 5")}
    apart = rows('t:a_total{e="0"} 5\nt:b_total{e="1"} 7')
    assert "prompt_tokens_total" not in {r[0] for r in apart}


def test_info_labels() -> None:
    assert rows('t:info{tokens="640",blocks="1",engine="2"} 1') == [("kv_tokens_total", {"engine": "2"}, 640.0)]
    assert rows('t:info{tokens="None",blocks="10",size="16"} 1') == [("kv_tokens_total", {}, 160.0)]
    assert rows('t:info{blocks="None"} 1') == []
    facts = page_facts(parse('t:info{blocks="10",dtype="None",private="x"} 1').samples, TABLE)
    assert facts == {"blocks": "10"}


def test_reader_equals_the_plain_way_page_after_page() -> None:
    reader = PageReader(TABLE)
    pages = [
        't:run{e="0"} 1\nt:a_total 1\nt:b_total 2\nx 1',
        't:run{e="0"} 2\nt:a_total 1\nt:b_total 2',
        "",
        "t:run 2\nt:bad",
    ]
    for text in pages:
        want = [(s.name, label_json(s.labels), s.value) for s in canonical(parse(text).samples, TABLE)]
        assert reader.read(text) == want


def test_label_json_is_stable() -> None:
    assert label_json({}) is None
    assert label_json({"b": "1", "a": "ü"}) == '{"a":"ü","b":"1"}'
    assert label_json({"process": "a\x1b[2Jb\n"}) == '{"process":"a?[2Jb?"}'  # nothing that a terminal obeys


@pytest.mark.shared
@pytest.mark.parametrize(("engine", "folder"), [("llama.cpp", "llama_cpp"), ("vllm", "vllm")])
def test_every_recorded_page(engine: str, folder: str) -> None:
    pages = sorted((SHARED / "engines" / folder).glob("*metrics*.txt"))
    if not pages:
        pytest.skip(f"no recorded pages in {SHARED}")
    reader = PageReader(ENGINES[engine])
    for path in pages:
        text = path.read_text()
        page = parse(text)
        assert page.skipped == 0, path
        assert len(page.samples) == sum(1 for line in text.splitlines() if line and line[0] != "#")
        rows = canonical(page.samples, ENGINES[engine])
        assert reader.read(text) == [(s.name, label_json(s.labels), s.value) for s in rows]
        seen = [(s.name, json.dumps(s.labels, sort_keys=True)) for s in rows]
        assert len(seen) == len(set(seen)), f"{path}: two values for one reading"
