"""A user's own engine table: the documented example is read, what is not understood is refused by name."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whywait import engines
from whywait.engines import COUNTERS, GAUGES, HISTOGRAMS, LIMITS, by_name, detect, request_fields, use_file, user
from whywait.errors import UsageError
from whywait.lab.capacity import Capacity, kv_capacity
from whywait.net import outcome
from whywait.net.dialect import Answer
from whywait.net.wire import Response
from whywait.probe.prometheus import canonical, parse

DOCS = Path(__file__).parents[1] / "docs" / "engines.md"
LEAST = 'name = "x"\nmetric_prefixes = ["x_"]\n'


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(engines.FILE_ENV, "")  # so that what use_file sets is taken back
    yield
    engines._with.cache_clear()


@pytest.fixture
def example(tmp_path: Path) -> Path:
    found = re.search(r"<!-- test: engine file -->\n```toml\n(.*?)```", DOCS.read_text(), re.S)
    assert found is not None
    file = tmp_path / "tgi.toml"
    file.write_text(found[1])
    return file


def test_the_documented_example_is_an_engine(example: Path) -> None:
    assert detect(metrics_text="tgi_queue_size 3") is None
    table = use_file(str(example))
    assert detect(metrics_text="tgi_queue_size 3") is table is by_name("tgi")
    assert by_name("vllm") is not None
    page = """tgi_queue_size 3
tgi_request_generated_tokens_sum 120
tgi_batch_inference_count{method="prefill"} 4
tgi_batch_inference_count{method="decode"} 90
tgi_request_queue_duration_bucket{le="0.1"} 2
other 1"""
    got = {(s.name, s.labels.get("le")): s.value for s in canonical(parse(page).samples, table)}
    assert got == {("waiting", None): 3, ("output_tokens_total", None): 120, ("decode_steps_total", None): 90,
                   ("queue_seconds_bucket", "0.1"): 2}  # fmt: skip
    assert kv_capacity("INFO Setting max batch total tokens to 4096") == Capacity(4096)
    assert not table.driven


def test_the_vocabulary_of_the_docs_is_whole() -> None:
    told = set(re.findall(r"`(\w+)`", DOCS.read_text().split("The vocabulary:")[1].split("## ")[0]))
    assert told == {*GAUGES, *COUNTERS, *HISTOGRAMS, *LIMITS}


def test_fields_of_an_answer_are_read_by_the_tables(example: Path) -> None:
    answer = Answer("chat")
    answer.timings = {"queue_ms": 12, "prompt_ms": 3.5, "prompt_n": 7, "predicted_n": -1, "cache_n": True}
    assert outcome._reported(answer, {})["engine_queue_ms"] is None
    use_file(str(example))
    got = outcome._reported(answer, {})
    assert (got["engine_queue_ms"], got["engine_prefill_ms"], got["engine_prefill_tokens"]) == (12, 3.5, 7)
    assert got["output_tokens"] is got["cached_tokens"] is None
    assert "timings.queue_ms" in request_fields()


def test_figures_in_headers_are_read_by_the_tables(example: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        LEAST
        + """[request_fields]
"headers.X-Queue-Time" = "engine_queue_ms"
"headers.server-timing.prefill" = "engine_prefill_ms"
"headers.x-cached" = "cached_tokens"
"headers.x-decode" = "engine_decode_ms"
"""
    )
    use_file(str(file))
    headers = {"x-queue-time": "12", "server-timing": 'cache;desc="a,b";dur=1, prefill;dur=3.5', "x-cached": "7",
               "x-decode": "12 ms"}  # fmt: skip
    got = outcome._reported(Answer("chat"), headers)
    assert (got["engine_queue_ms"], got["engine_prefill_ms"], got["cached_tokens"]) == (12, 3.5, 7)
    assert got["engine_decode_ms"] is None  # no number: unknown, not 12
    assert outcome._reported(Answer("chat"), {"server-timing": "prefill"})["engine_prefill_ms"] is None
    whole = Response(False)
    body = b'{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}]}'
    head = b"HTTP/1.1 200 OK\r\nX-Queue-Time: 12.5\r\nContent-Type: application/json\r\n"
    whole.feed(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert (facts := outcome.facts_of(whole, 0))["outcome"] == "ok"
    assert facts["engine_queue_ms"] == 12.5


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("name = 1", "name must be a text", ""),
        ('name = "x"', "metric_prefixes must be given", "metric_prefixes"),
        (LEAST + "colour = 1", "no such key: colour", "metric_prefixes"),
        (LEAST + '[metrics]\nx_a = "runing"', "no such gauge or counter: runing", "running"),
        (LEAST + '[metrics]\nx_a = {name = "running", scale = 0}', "scale must be", ""),
        (LEAST + '[metrics]\nx_a = {name = "running", unit = "s"}', "no such key: unit", "where"),
        (LEAST + '[metrics]\ny_a = "running"', "y_a has none of the metric_prefixes", "x_"),
        (LEAST + '[histograms]\nx_a = "ttft"', "no such histogram: ttft", "ttft_seconds"),
        (LEAST + '[flags]\nseats = "-n"', "no such limit in [flags]: seats", "slots"),
        (LEAST + '[log_patterns]\nkv_tokens = "a"', "must have one group", ""),
        (LEAST + "[log_patterns]\nkv_tokens = '('", "not a regular expression", ""),
        (LEAST + '[request_fields]\n"meta.a" = "engine_queue_ms"', "no such beginning of a path", "timings"),
        (LEAST + '[request_fields]\n"timings.a" = "first_ns"', "no such column", "engine_queue_ms"),
        (LEAST + "[bodies]\nfoo = {}", "no such key in [bodies]: foo", "no_cache"),
        (LEAST + "[metrics", "is not TOML", ""),
        (LEAST + 'metrics = "a"', "[metrics] must be a table", ""),
        (LEAST + 'owned_by = "a"', "owned_by must be a list", ""),
        (LEAST + 'metrics_path = "m"', "must begin with /", ""),
        (LEAST + "ignore_eos = 1", "ignore_eos must be", ""),
        (LEAST + '[metrics]\n\'x_a"} or up{\' = "running"', "cannot be the name of a metric", "digits"),
        ('name = "x"\nmetric_prefixes = ["x y"]', "cannot be the name of a metric", "digits"),
        (LEAST + '[metrics]\nx_a = {name = "running", scale = inf}', "scale must be a number above 0", ""),
        (LEAST + "flags = " + "[" * 9_000, "is not TOML", ""),
    ],
)
def test_what_is_not_understood_is_refused(text: str, said: str, hint: str, tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        user.load(file)
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        use_file(str(tmp_path / "none.toml"))


def pages() -> list[tuple[str, str, dict[str, Any]]]:
    sglang = """# HELP sglang:num_running_reqs The number of running requests.
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 12.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:token_usage{model_name="m"} 0.28
sglang:cache_hit_rate{model_name="m"} 0.007
sglang:prompt_tokens_total{model_name="m"} 8.128902e+06
sglang:generation_tokens_total{model_name="m"} 7.557572e+06
sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 4.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 2.3e+06
sglang:time_per_output_token_seconds_count{model_name="m"} 7.4e+06"""
    trt = """trtllm_request_success_total{finished_reason="length",model_name="m"} 5
trtllm_time_to_first_token_seconds_count{model_name="m"} 5
trtllm_request_queue_time_seconds_sum{model_name="m"} 0.25"""
    triton = """nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 7
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.4875
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 100"""
    return [
        ("sglang", sglang, {"running": 12, "waiting": 3, "kv_use": 0.28, "prefix_hit_rate": 0.007,
                            "prompt_tokens_total": 8128902, "output_tokens_total": 7557572, "ttft_seconds_bucket": 4,
                            "ttft_seconds_sum": 2.3e6, "itl_seconds_count": 7.4e6}),
        ("tensorrt-llm", trt, {"requests_total": 5, "ttft_seconds_count": 5, "queue_seconds_sum": 0.25}),
        ("tensorrt-llm", triton, {"waiting": 1, "running": 7, "slots_total": 512, "kv_use": 0.4875}),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "page", "want"), pages())
def test_documented_pages_under_our_names(name: str, page: str, want: dict[str, float]) -> None:
    table = detect(metrics_text=page)
    assert table is not None
    assert table.name == name
    assert not table.driven
    assert {s.name: s.value for s in canonical(parse(page).samples, table)} == want
