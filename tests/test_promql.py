"""Readings from a Prometheus: an imitation of its API holds what is known, and the same comes out under our names."""

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.metrics_pages import FakePrometheus, serving, vllm_page
from whywait.analyze.counters import delta, gauge, histogram, quantile
from whywait.cli import main
from whywait.core import secrets
from whywait.core.run import Run
from whywait.core.table import Table
from whywait.engines import ENGINES
from whywait.errors import NotAnEndpoint, Unauthorized, Unreachable, UsageError
from whywait.load.stub import StubProcess
from whywait.probe.promql import Prometheus, native_names, parse_match

S = 1_000_000_000
T0 = 1_700_000_000.0


def scraped(at: float = T0, replicas: int = 2, n: int = 41, every: float = 15.0) -> dict[str, list[tuple[float, str]]]:
    """Replica i ends 2 (i + 1) requests per scrape; running 3, waiting i."""
    return {f"10.0.0.{i}:8000": [(at + k * every, vllm_page(3, i, 2 * (i + 1) * k)) for k in range(n)]
            for i in range(replicas)}  # fmt: skip


def table_of(rows: list[dict[str, Any]]) -> Table:
    return Table.from_rows("readings", rows)


@pytest.mark.parametrize("refuse_raw", [False, True])
def test_canonical_readings_per_replica(refuse_raw: bool) -> None:
    fake = FakePrometheus(scraped(), refuse_raw=refuse_raw)
    span = (round(T0) * S, round(T0 + 600) * S)
    with serving(fake) as url:
        source = Prometheus(url, 'job="svc"')
        assert source.table(T0, T0 + 600) is ENGINES["vllm"]
        got = table_of(source.readings(ENGINES["vllm"], span, span[0]))
    assert set(got["source"].tolist()) == {"promql/0", "promql/1"}
    window = (0, 600 * S)
    done = delta(got, "requests_total", window)
    assert done is not None
    assert (done.value, done.low, done.high) == pytest.approx((240, 240, 240))
    assert delta(got, "requests_total", window, "promql/1").value == pytest.approx(160)  # type: ignore[union-attr]
    assert gauge(got, "running", window).mean == 6  # type: ignore[union-attr]
    found = quantile(histogram(got, "queue_seconds", window), 0.5)
    assert found is not None
    assert (found.low, found.high, found.n) == (0.25, 0.5, 240)
    assert (got["value"][got["name"] == "answered"] == 1).all()
    assert any(path == "/api/v1/query_range" for path, _ in fake.asked) == refuse_raw
    if not refuse_raw:  # at the times of the scrapes, whole milliseconds
        assert sorted(set(got["asked_ns"].tolist())) == [k * 15 * S for k in range(41)]


def test_a_long_span_is_asked_at_a_grid() -> None:
    fake = FakePrometheus(scraped(every=600.0))
    span = (round(T0) * S, round(T0 + 24_000) * S)
    with serving(fake) as url:
        rows = Prometheus(url).readings(ENGINES["vllm"], span, span[0])
    assert {path for path, _ in fake.asked} == {"/api/v1/query_range"}
    assert delta(table_of(rows), "requests_total", (0, 24_000 * S)).value == pytest.approx(240)  # type: ignore[union-attr]


def test_a_target_that_was_down_did_not_answer() -> None:
    pages = scraped(replicas=1)
    pages["10.0.0.0:8000"][20] = (T0 + 300, "")
    with serving(FakePrometheus(pages)) as url:
        got = table_of(Prometheus(url).readings(ENGINES["vllm"], (round(T0) * S, round(T0 + 600) * S), round(T0) * S))
    up = got.where(got["name"] == "answered")
    assert up["asked_ns"][up["value"] == 0].tolist() == [300 * S]
    assert not ((got["name"] == "running") & (got["asked_ns"] == 300 * S)).any()


def test_which_engine() -> None:
    pages = scraped(replicas=1)
    pages["other:1"] = [(T0 + 1, "sglang:num_running_reqs 1\n")]
    fake = FakePrometheus(pages)
    with serving(fake) as url:
        with pytest.raises(UsageError, match=r"sglang, vllm") as caught:
            Prometheus(url).table(T0, T0 + 600)
        assert "--prometheus-match" in (caught.value.hint or "")
        assert Prometheus(url, 'instance="other:1"').table(T0, T0 + 600).name == "sglang"
        with pytest.raises(UsageError, match="no metrics of an engine"):
            Prometheus(url, 'instance="nobody"').table(T0, T0 + 600)
        with pytest.raises(UsageError, match="no metrics of an engine"):
            Prometheus(url).table(T0 - 600, T0 - 300)


def test_its_words_and_its_silence() -> None:
    with serving(FakePrometheus({}, token="geheim-1")) as url:
        with pytest.raises(Unauthorized):
            Prometheus(url).table(T0, T0 + 1)
        with pytest.raises(UsageError, match="no metrics"):
            Prometheus(url, token="geheim-1").table(T0, T0 + 1)
    with pytest.raises(Unreachable):
        Prometheus(url).table(T0, T0 + 1)
    with serving(lambda *_: (200, "text/html", b"<html>")) as url, pytest.raises(NotAnEndpoint):
        Prometheus(url).table(T0, T0 + 1)
    refusal = b'{"status":"error","error":"bad \\u0007 query"}'
    with serving(lambda *_: (400, "application/json", refusal)) as url, pytest.raises(UsageError, match="bad   query"):
        Prometheus(url).readings(ENGINES["vllm"], (0, S), 0)
    assert "geheim" not in repr(Prometheus("http://x", token="geheim-1"))


@pytest.mark.parametrize(
    "data",
    ["null", "[]", "5", '{"resultType":"vector","result":[]}', '{"resultType":"matrix"}',
     '{"resultType":"matrix","result":[5]}', '{"resultType":"matrix","result":[{"values":[[1,"2"]]}]}',
     '{"resultType":"matrix","result":[{"metric":{},"values":[[1]]}]}',
     '{"resultType":"matrix","result":[{"metric":{},"values":[["x","2"]]}]}',
     '{"resultType":"matrix","result":[{"metric":[],"values":[[1,null]]}]}'],
)  # fmt: skip
def test_answers_of_wrong_types_are_no_prometheus(data: str) -> None:
    answer = b'{"status":"success","data":%s}' % data.encode()
    with serving(lambda *_: (200, "application/json", answer)) as url, pytest.raises(NotAnEndpoint):
        Prometheus(url).readings(ENGINES["vllm"], (0, S), 0)
    if data != "[]":
        with serving(lambda *_: (200, "application/json", answer)) as url, pytest.raises(NotAnEndpoint):
            Prometheus(url).table(0, 1)


def test_native_histograms_are_passed_over() -> None:
    series = '{"metric":{"__name__":"x","job":"j"},"histograms":[[1,{"count":"1"}]]}'
    answer = b'{"status":"success","data":{"resultType":"matrix","result":[%s]}}' % series.encode()
    with serving(lambda *_: (200, "application/json", answer)) as url:
        assert Prometheus(url).readings(ENGINES["vllm"], (0, S), 0) == []


def test_a_trickling_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whywait.probe.promql.TIMEOUT_S", 2.0)
    # Longer than a busy machine keeps the other thread from its next byte: what ends it is the whole, not one read.
    stop = threading.Event()

    def trickle(listening: socket.socket) -> None:
        with listening.accept()[0] as sock, contextlib.suppress(OSError):
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not stop.wait(0.1):
                sock.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=trickle, args=(listening,))
        thread.start()
        try:
            with pytest.raises(Unreachable, match="no whole answer"):
                Prometheus(f"http://127.0.0.1:{listening.getsockname()[1]}").table(0, 1)
        finally:
            stop.set()
            thread.join()


def test_a_token_that_a_label_repeats_is_not_kept() -> None:
    secrets.hide("geheim-9")
    pages = {"geheim-9:8000": [(T0 + k, vllm_page(1, 0, k)) for k in range(5)]}
    with serving(FakePrometheus(pages)) as url:
        rows = Prometheus(url).readings(ENGINES["vllm"], (round(T0) * S, round(T0 + 9) * S), 0)
    assert rows
    assert "geheim" not in str(rows)


def test_names_asked_for_are_all_that_readings_are_made_of() -> None:
    names = native_names(ENGINES["vllm"])
    assert "vllm:num_requests_running" in names
    assert "vllm:e2e_request_latency_seconds_bucket" in names
    assert "vllm:cache_config_info" in names
    assert "vllm:gpu_cache_usage_perc" in names
    others = native_names(ENGINES["llama.cpp"])
    assert "llamacpp:requests_processing" in others
    assert not set(others) & set(names)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (None, ""),
        ("", ""),
        ('job="a"', 'job="a"'),
        (' {job=~"a|b", ns!="x"} ', 'job=~"a|b", ns!="x"'),
        ('a="1",', 'a="1"'),
    ],
)
def test_selectors(text: str | None, want: str) -> None:
    assert parse_match(text) == want


@pytest.mark.parametrize("text", ["job=a", 'job="a"} or up{', 'job="a" b="c"', "job", '"a"'])
def test_what_is_no_selector(text: str) -> None:
    with pytest.raises(UsageError):
        parse_match(text)


def test_the_past_is_judged_without_load(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("PROM_TOKEN", "geheim-2")
    now = time.time()
    with serving(FakePrometheus(scraped(now - 600), token="geheim-2")) as url:
        out = tmp_path / "run"
        flags = ["--prometheus", url, "--prometheus-token-env", "PROM_TOKEN", "--last", "10m", "--out", str(out)]
        assert main(["diagnose", *flags]) == 0
    said = capsys.readouterr().out
    assert "0.4 requests/s" in said
    run = Run.load(out)
    assert run.manifest.made_by == "measured"
    assert len(run.requests) == 0
    assert len(run.points) == 10
    assert run.points["target"][1:].tolist() == pytest.approx([0.4] * 9)
    assert (out / "report.html").exists()
    for file in out.iterdir():
        assert b"geheim" not in file.read_bytes()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--last", "1h"], "--last reads the past from --prometheus"),
        (["http://127.0.0.1:9", "--prometheus", "http://127.0.0.1:9", "--last", "1h"], "leave the URL out"),
        (["--prometheus", "127.0.0.1:9", "--last", "1h"], "is not a URL"),
        (["--prometheus", "http://h:port", "--last", "1h"], "is not a URL"),
        (["--prometheus", "http://[::1", "--last", "1h"], "is not a URL"),
        (["--prometheus", "http://", "--last", "1h"], "is not a URL"),
        (["--prometheus", "http://me:geheim@h:9", "--last", "1h"], "must not carry a password"),
        (["--prometheus-match", 'a="b"', "--last", "1h"], "need --prometheus"),
        (["--prometheus", "http://127.0.0.1:9", "--prometheus-token-env", "NO_SUCH", "--last", "1h"], "holds no token"),
        (["--prometheus", "http://127.0.0.1:9", "--prometheus-match", "x", "--last", "1h"], "is not a selector"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", *flags]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "geheim" not in err


def test_a_run_reads_the_engine_from_a_prometheus(tmp_path: Path) -> None:
    """And not from the service's own page besides; a point shorter than four scrapes is a doubt."""
    now = time.time()
    pages = {"a:8000": [(now + k, vllm_page(2, 0, k + 30)) for k in range(-30, 90)]}
    out = tmp_path / "run"
    with serving(FakePrometheus(pages)) as url, StubProcess("--ttft-ms", "10", "--gap-ms", "20", "--timings") as stub:
        flags = ["--requests", "12", "--output-tokens", "10", "--no-floor", "--prometheus", url, "--out", str(out)]
        assert main(["run", stub.url, *flags]) == 0
    run = Run.load(out)
    sources = set(run.readings["source"].tolist())
    assert "promql/0" in sources
    assert not any(s.startswith("metrics/") for s in sources)
    assert run.manifest.engine["name"] == "vllm"
    assert "a point or window holds only a few readings" in {d["what"] for d in run.manifest.doubts}
