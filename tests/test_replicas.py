"""Two replicas behind a router: their pages together account for what was sent through it; one of them does not."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.metrics_pages import engine, serving, vllm_page
from tests.relay import Relay
from whywait.analyze.trust import doubts, foreign
from whywait.app import options_of
from whywait.cli import main
from whywait.core.run import Run
from whywait.load.preflight import find
from whywait.load.stub import StubProcess
from whywait.net.endpoint import parse_url

LESS = "the service's counters saw less than we sent"


class Router(Relay):
    """Each new connection goes to the next replica."""

    def __init__(self, ports: list[int]) -> None:
        self._turn = itertools.cycle(ports)
        super().__init__(0)

    @property
    def _to(self) -> int:
        return next(self._turn)

    @_to.setter
    def _to(self, _port: int) -> None:
        pass


def run(url: str, pages: list[str], out: Path) -> Run:
    given = [flag for page in pages for flag in ("--metrics-url", page)]
    flags = ["--concurrency", "4", "--requests", "40", "--prompt-tokens", "20", "--output-tokens", "10", "--no-floor"]
    assert main(["run", url, *given, *flags, "--out", str(out)]) == 0
    return Run.load(out)


def test_pages_of_all_replicas_account_for_the_load(tmp_path: Path) -> None:
    stub = ("--ttft-ms", "10", "--gap-ms", "5", "--timings")
    with StubProcess(*stub) as a, StubProcess(*stub) as b:
        pages = [f"{a.url}/metrics", f"{b.url}/metrics"]
        ports = [int(s.url.rpartition(":")[2]) for s in (a, b)]
        with Router(ports) as router:
            url = f"http://127.0.0.1:{router.port}"
            both = run(url, pages, tmp_path / "both")
            one = run(url, pages[:1], tmp_path / "one")
    sources = {s for s in both.readings["source"].tolist() if s.startswith("metrics/")}
    assert sources == {"metrics/0", "metrics/1"}
    found = {f.name: f for f in foreign(both)}["output_tokens_total"]
    assert found.sent_low == 400
    assert found.excess == 0
    assert LESS not in {d["what"] for d in doubts(both)}
    assert LESS in {d["what"] for d in doubts(one)}
    assert tuple(options_of(tmp_path / "both").metrics_urls) == tuple(pages)  # a resumed run reads them too


def test_pages_of_two_engines_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with engine(lambda t: vllm_page(1, 0, t)) as a, engine(lambda t: "sglang:num_running_reqs 1\n") as b:
        pages = ["--metrics-url", f"{a}/metrics", "--metrics-url", f"{b}/metrics"]
        assert main(["watch", a, *pages, "--once"]) == 2
    assert "sglang" in capsys.readouterr().err


def test_an_engine_that_publishes_elsewhere() -> None:
    """trtllm-serve: its /metrics is JSON, the page is /prometheus/metrics."""

    def ask(path: str, *_: object) -> tuple[int, str, bytes]:
        pages = {
            "/v1/models": ("application/json", b'{"data":[{"id":"m","owned_by":"tensorrt_llm"}]}'),
            "/metrics": ("application/json", b"[]"),
            "/prometheus/metrics": ("text/plain", b"trtllm_request_success_total 4\n"),
        }
        return (200, *pages[path]) if path in pages else (404, "text/plain", b"")

    with serving(ask) as url:
        target = find(parse_url(url), None)
    assert target.engine is not None
    assert target.engine.name == "tensorrt-llm"
    assert target.metrics_urls == (f"{url}/prometheus/metrics",)
