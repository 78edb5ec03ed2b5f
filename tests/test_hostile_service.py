"""A service, a metrics page or a redirect that means harm: bounded memory and time, and the key stays where it is."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.hostile import ANSWERS, PAGE, Service, redirect, whole
from whywait.core.schedule import Workload
from whywait.errors import NotAnEndpoint, WhywaitError
from whywait.lab import ask
from whywait.load.preflight import Target, ask_once, find, first_request
from whywait.net import coding, dialect, wire
from whywait.net.coding import CodingError, Inflater
from whywait.net.endpoint import get, parse_url
from whywait.net.reach import Reach
from whywait.probe import pages
from whywait.probe.agent import AgentPage
from whywait.probe.pages import Fetcher, MetricsPage, fetcher
from whywait.probe.prometheus import PageReader, parse_line
from whywait.probe.promql import Prometheus

CHAT = "/v1/chat/completions"
SLOW = {"dripping headers", "dripping events", "dripping body", "silent"}
SECRET = "sk-hostile-secret"


def _ends(job: Callable[[], Any]) -> Any:
    """What ``job`` gives or raises; a job that never ends fails the test."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(job())
        except BaseException as exc:
            found.append(exc)

    t = threading.Thread(target=work, daemon=True)
    t.start()
    t.join(60)
    assert found, "it never ends"
    return found[0]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bounds, sooner reached."""
    monkeypatch.setattr(wire, "MAX_ANSWER", 8 << 20)
    monkeypatch.setattr(wire, "MAX_EVENTS", 20_000)
    monkeypatch.setattr(wire, "MAX_EVENT", 2 << 20)
    monkeypatch.setattr(wire, "MAX_BODY", 4 << 20)
    monkeypatch.setattr(coding, "MAX_PIECE", 2 << 20)
    monkeypatch.setattr(wire, "MAX_PIECE", 2 << 20)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_every_answer_ends_and_none_of_them_is_ok(name: str, stream: bool) -> None:
    with Service({CHAT: ANSWERS[name]}) as service:
        target = Target(parse_url(service.url), "m")
        facts = _ends(lambda: ask_once(target, target.body("hi", 8, {}), stream, 0.7 if name in SLOW else 30.0))
    assert facts["outcome"] == ("timeout" if name in SLOW else facts["outcome"])
    assert facts["outcome"] in ("protocol", "timeout", "http_error", "truncated")
    assert facts["detail"]
    assert "\n" not in facts["detail"]


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_every_page_ends(name: str) -> None:
    """Read before load, by the sampler beside it, and by the launcher."""
    slow = name in (*SLOW, "endless continues")
    with Service({"/metrics": ANSWERS[name]}) as service:
        source = Fetcher(service.url + "/metrics", {}, 0.5 if slow else 20.0)
        body = _ends(source.get)
        assert source.why or len(body) <= pages.MAX_BYTES
        assert not (slow and body)
        source.close()
        read = _ends(lambda: get(parse_url(service.url), "/metrics", 0.5 if slow else 20.0))
        assert isinstance(read, WhywaitError) or (len(read[2]) <= 8 << 20 and not slow)


def test_a_page_cut_short_by_our_patience_is_no_page() -> None:
    """It used to be taken for a whole one when its end was the connection's."""
    with Service({"/metrics": ANSWERS["dripping body"]}) as service:
        with pytest.raises(WhywaitError, match="did not answer"):
            get(parse_url(service.url), "/metrics", 0.4)
        assert ask.get(service.url, "/nowhere") is not None


def test_a_launcher_does_not_wait_for_a_page_that_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "_TIMEOUT_S", 0.4)
    with Service({"/health": ANSWERS["dripping headers"]}) as service:
        assert _ends(lambda: ask.get(service.url, "/health")) is None


def test_memory_stays_bounded_whatever_the_size_of_what_comes() -> None:
    """With the real bounds, in a process of its own: what it grows by, all of them one after another."""
    names = ["big event", "big error body", "gzip events", "endless trailer", "endless choices"]
    code = """
import sys
from tests.hostile import ANSWERS, Service
from whywait.load.preflight import Target, ask_once
from whywait.net.endpoint import parse_url
def peak():  # ru_maxrss would have that of the process that started this one
    line = next(x for x in open("/proc/self/status") if x.startswith("VmHWM"))
    return int(line.split()[1]) // 1024
for name in sys.argv[1:]:
    service = Service({"/v1/chat/completions": ANSWERS[name]})
    with service:
        target = Target(parse_url(service.url), "m")
        ask_once(target, target.body("hi", 8, {}), True, 2.0)
    print(name, peak(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    peaks = [int(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(peaks) == len(names)
    assert peaks[-1] < 700, done.stdout  # both ends are in it: the service makes its bombs there


def test_what_would_take_all_memory_once_parsed_is_not_parsed() -> None:
    answer = dialect.ANSWERS["chat"](None)
    answer.event(b"", b'{"choices":[' + b"[]," * (4 << 20) + b"0]}")
    assert answer.bad_events == 1
    assert not answer.events


def test_many_small_bodies_are_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from whywait.net import client

    monkeypatch.setattr(client, "LARGE", 1 << 18)
    monkeypatch.setattr(client, "MAX_HELD", 1 << 20)
    with Service({CHAT: ANSWERS["endless body"]}) as service:
        target = Target(parse_url(service.url), "m")
        facts = ask_once(target, target.body("hi", 8, {}), False, 30.0)
    assert (facts["outcome"], facts["detail"]) == (
        "protocol",
        "unfinished events and bodies of more than 1048576 bytes",
    )


def test_the_bound_on_unfolding_is_of_a_read_and_not_of_a_chunk() -> None:
    import gzip

    z, data = Inflater("gzip"), gzip.compress(b"\0" * (20 << 20))
    with pytest.raises(CodingError, match="unfolds"):
        _feed(z, data)


def _feed(z: Inflater, data: bytes) -> None:
    for i in range(0, len(data), 512):
        z.feed(data[i : i + 512])


@pytest.mark.parametrize("line", [
    "a" * 200_000, "vllm:x" + " " * 200_000 + "x", 'vllm:x{a="' + '"' * 200_000, "vllm:x{" + 'a="b",' * 50_000,
    "vllm:x 1" + " 1" * 100_000, 'vllm:x{a="' + "\\" * 200_001,
])  # fmt: skip
def test_a_line_of_a_metrics_page_is_read_in_one_go(line: str) -> None:
    """The grammar must not take the square of its length."""
    _ends(lambda: parse_line(line))


def test_long_names_of_series_are_not_remembered() -> None:
    from whywait.engines import by_name

    table = by_name("llama.cpp")
    assert table is not None
    reader = PageReader(table)
    for i in range(3):
        assert reader.read(f'llamacpp:requests_processing{{a="{i}{"x" * 10_000}"}} 1\n')
    assert sum(map(len, reader._lines._memo)) < 10_000


# --- where the key goes


def test_no_redirect_takes_the_key_along() -> None:
    headers = Reach(headers=(("X-Own", SECRET),))
    with Service({}) as other:
        away = redirect(f"{other.url}/v1/models")
        pages_ = {p: redirect(other.url + p) for p in ("/metrics", CHAT, "/api/v1/query", "/readings")}
        with Service({"/v1/models": away, **pages_}) as service:
            endpoint = parse_url(service.url, api_key=SECRET, reach=headers)
            with pytest.raises(NotAnEndpoint, match="redirects to"):
                find(endpoint, None)
            with pytest.raises(NotAnEndpoint, match="a redirect to"):
                first_request(Target(endpoint, "m"), Workload(), True)
            own = {"Authorization": f"Bearer {SECRET}"}
            page = MetricsPage("metrics/0", fetcher(f"{service.url}/metrics", own, 5.0, headers, endpoint.home))
            assert page.sample() is None
            assert page.why == "HTTP 307"
            page.close()
            with pytest.raises(WhywaitError):
                Prometheus(service.url, token=SECRET).ask("query", {"query": "up"})
            agent = AgentPage("agent/0", Fetcher(f"{service.url}/readings", own, 5.0, headers))
            assert agent.sample() is None
            agent.close()
            assert sum(SECRET.encode() in head for head in service.asked) >= 4  # it was told to the one it is for
        assert other.asked == []


@pytest.mark.parametrize(("service", "page", "told"), [
    ("http://127.0.0.1:1", "http://127.0.0.1:2/metrics", True),
    ("https://127.0.0.1:1", "https://127.0.0.1:2/metrics", True),
    ("https://127.0.0.1:1", "http://127.0.0.1:2/metrics", False),
    ("http://127.0.0.1:1", "http://127.0.0.2:1/metrics", False),
])  # fmt: skip
def test_the_key_goes_to_the_services_host_and_never_in_the_clear_where_it_has_tls(
    service: str, page: str, told: bool
) -> None:
    own = {"Authorization": f"Bearer {SECRET}"}
    found = fetcher(page, own, 1.0, Reach(headers=(("X-Own", SECRET),)), parse_url(service).home)
    connection = found._new()
    connection.close()
    assert (SECRET in str(found._headers)) is told


def test_a_page_larger_than_any_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_BYTES", 1 << 16)
    with Service({"/metrics": whole(b"# x\n" * 20_000, kind="text/plain")}) as service:
        source = Fetcher(service.url + "/metrics", {}, 5.0)
        assert source.get() is None
        assert source.why == "page too large"
        source.close()
    with Service({"/metrics": PAGE}) as service:
        source = Fetcher(service.url + "/metrics", {}, 5.0)
        assert source.get() is not None
        source.close()
