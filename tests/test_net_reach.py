"""The ways to a service: TLS, proxies, Unix sockets, IPv6, headers, redirects. Loopback only."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.relay import Relay
from whywait.core.schedule import Workload
from whywait.errors import NotAnEndpoint, Unreachable, UsageError
from whywait.load.preflight import Target, aloud, ask_once, find, first_request
from whywait.load.stub import StubProcess, StubThread
from whywait.load.stub_plan import Options, Plan
from whywait.net.endpoint import Endpoint, get, parse_url
from whywait.net.outcome import facts_of
from whywait.net.reach import Reach, parse_header, proxy_for
from whywait.net.wire import Response
from whywait.probe.pages import Fetcher

QUICK = Plan(ttft_ms=1, gap_ms=1, tokens=4)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_PROXY".upper(), raising=False)


@pytest.fixture(scope="module")
def stub() -> Iterator[Any]:
    with StubThread(Options(plan=QUICK)) as s:
        yield s


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a certificate by it that serves a server and a client."""
    openssl = shutil.which("openssl")
    if not openssl:
        pytest.skip("no openssl command to make certificates with")
    d = tmp_path_factory.mktemp("pki")
    ext = d / "ext"
    ext.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")

    def run(*words: str) -> None:
        subprocess.run([openssl, *words], cwd=d, check=True, capture_output=True)

    ca = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    run("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2",
        "-subj", "/CN=our own authority", *ca)  # fmt: skip
    run("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "csr", "-subj", "/CN=localhost")
    run("x509", "-req", "-in", "csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", "cert.pem",
        "-days", "2", "-extfile", "ext")  # fmt: skip
    return d


def server_tls(pki: Path, client: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "cert.pem", pki / "key.pem")
    if client:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(pki / "ca.pem")
    return context


def ask(url: str, stream: bool = True, **reach: Any) -> dict[str, Any]:
    """One request by the measuring client."""
    target = Target(parse_url(url, reach=Reach(**reach)), "stub")
    body = target.body("hello", 4, target.options(Workload(), stream))
    return ask_once(target, body, stream, 20.0)


def reachable(url: str, metrics: str, **reach: Any) -> None:
    """By the measuring client, by the pages before load, and by the sampler's fetcher."""
    facts = ask(url, **reach)
    assert (facts["outcome"], facts["output_tokens"]) == ("ok", 4), facts
    found = find(parse_url(url, reach=Reach(**reach)), None)
    assert (found.model, found.metrics_urls) == ("stub", (metrics,))
    fetcher = Fetcher(metrics, {}, 5.0, Reach.from_json(Reach(**reach).as_json()))
    page = fetcher.get()
    fetcher.close()
    assert page is not None
    assert b"llamacpp:" in page


def test_own_authority(pki: Path, stub: Any) -> None:
    with Relay(stub.stub.server.port, server_tls(pki)) as relay:
        url = f"https://127.0.0.1:{relay.port}"
        reachable(url, f"{url}/metrics", ca=str(pki / "ca.pem"))
        assert ask(url)["detail"] == "TLS: CERTIFICATE_VERIFY_FAILED"
        with pytest.raises(Unreachable, match="TLS"):
            find(parse_url(url), None)


def test_the_handshake_is_a_part_of_connecting(pki: Path, stub: Any) -> None:
    with Relay(stub.stub.server.port, server_tls(pki)) as relay:
        facts = ask(f"https://127.0.0.1:{relay.port}", ca=str(pki / "ca.pem"))
    assert 0 < facts["tls_ns"] <= facts["connect_ns"]
    plain = ask(stub.url)
    assert plain["tls_ns"] is None
    assert plain["connect_ns"] > 0


def test_insecure_is_possible_and_said(pki: Path, stub: Any) -> None:
    with Relay(stub.stub.server.port, server_tls(pki)) as relay:
        url = f"https://127.0.0.1:{relay.port}"
        reachable(url, f"{url}/metrics", insecure=True)
        said = aloud(parse_url(url, reach=Reach(insecure=True)))
        assert ["certificate is not checked" in d["what"] for d in said] == [True]
        assert aloud(parse_url(url)) == []


def test_client_certificate(pki: Path, stub: Any) -> None:
    with Relay(stub.stub.server.port, server_tls(pki, client=True)) as relay:
        url, ca = f"https://127.0.0.1:{relay.port}", str(pki / "ca.pem")
        reachable(url, f"{url}/metrics", ca=ca, cert=str(pki / "cert.pem"), key=str(pki / "key.pem"))
        assert ask(url, ca=ca)["outcome"] in ("protocol", "reset")


@pytest.mark.parametrize(
    ("reach", "said"),
    [
        ({"ca": "/nowhere.pem"}, "--ca /nowhere.pem: No such file"),
        ({"cert": "/nowhere.pem"}, "--cert /nowhere.pem: No such file"),
        ({"key": "/nowhere.pem"}, "--key needs --cert"),
    ],
)
def test_files_that_are_not_there(reach: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Reach(**reach).tls()


def test_an_encrypted_key_is_refused_and_not_asked_for(pki: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    subprocess.run(["openssl", "rsa", "-aes128", "-in", pki / "key.pem", "-out", locked, "-passout", "pass:secret"],
                   check=True, capture_output=True)  # fmt: skip
    with pytest.raises(UsageError, match="--cert"):
        Reach(cert=str(pki / "cert.pem"), key=str(locked)).tls()


def test_http_proxy_gets_the_whole_url_and_its_password(stub: Any) -> None:
    with Relay(stub.stub.server.port, proxy=True) as relay:
        proxy = f"http://me:s3cr3t@127.0.0.1:{relay.port}"
        endpoint = parse_url(stub.url, reach=Reach(proxy=proxy))
        assert ask(stub.url, proxy=proxy)["outcome"] == "ok"
        assert get(endpoint, "/v1/models")[0] == 200
        assert endpoint.loopback  # both ends are here
        assert relay.heads[0].splitlines()[0] == f"POST {stub.url}/v1/chat/completions HTTP/1.1"
        assert relay.heads[1].splitlines()[0] == f"GET {stub.url}/v1/models HTTP/1.1"
        assert ["Proxy-Authorization: Basic bWU6czNjcjN0" in head for head in relay.heads] == [True, True]
        assert "s3cr3t" not in repr(endpoint)
        assert "bWU6" not in repr(endpoint)
        assert ["proxy" in d["what"] for d in aloud(endpoint)] == [True]


def test_https_goes_through_a_tunnel(pki: Path, stub: Any) -> None:
    with Relay(stub.stub.server.port, server_tls(pki)) as service, Relay(service.port, proxy=True) as relay:
        url, ca = f"https://localhost:{service.port}", str(pki / "ca.pem")
        proxy = f"http://me:s3cr3t@127.0.0.1:{relay.port}"
        reachable(url, f"{url}/metrics", ca=ca, proxy=proxy)
        assert {head.splitlines()[0] for head in relay.heads} >= {f"CONNECT localhost:{service.port} HTTP/1.1"}
        # The service's headers are the service's: the proxy sees none of them.
        assert ask(url, ca=ca, proxy=proxy, headers=(("X-Own", "1"),))["outcome"] == "ok"
        assert not [head for head in relay.heads if "X-Own" in head]


def test_a_proxy_that_says_no(pki: Path) -> None:
    with Relay(9, proxy=True, no=407) as relay:
        facts = ask("https://localhost:9", proxy=f"http://127.0.0.1:{relay.port}")
    assert (facts["outcome"], facts["fault"], facts["detail"]) == ("refused", "network", "the proxy answers 407")


def test_environment_names_the_proxy_but_not_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:3128")
    monkeypatch.setenv("no_proxy", "inside.example,10.0.0.1")

    def name(host: str, scheme: str = "http", given: str | None = None) -> str | None:
        found = proxy_for(Reach(proxy=given), scheme, host, 80)
        return found and found.name

    assert name("service.example") == "127.0.0.1:3128"
    assert name("service.example", "https") is None
    assert name("x.inside.example") is None
    assert name("10.0.0.1") is None
    assert name("localhost") is None
    assert name("::1") is None
    assert name("service.example", given="none") is None
    assert name("inside.example", given="http://127.0.0.2:1") == "127.0.0.2:1"
    # Behind a proxy the name is the proxy's to resolve; such a service is never taken for this machine.
    there = parse_url("http://no.such.host.example")
    assert there.address[1][1] == 3128
    assert not there.loopback


@pytest.mark.parametrize("proxy", ["socks5://me:s3cr3t@x:1", "https://me:s3cr3t@x", "http://me:s3cr3t@x:port"])
def test_proxies_that_cannot_be_used_are_named_without_their_password(proxy: str) -> None:
    with pytest.raises(UsageError) as failed:
        parse_url("http://x.example", reach=Reach(proxy=proxy))
    assert "s3cr3t" not in str(failed.value)


def test_unix_socket(stub: Any, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Relay(stub.stub.server.port, unix=path):
        reachable(f"unix://{path}", f"unix://{path}:/metrics")
        endpoint = parse_url(f"unix://{path}:/v1")
        assert (endpoint.url, endpoint.loopback, endpoint.netloc) == (f"unix://{path}:/v1", True, "localhost")
        assert ["own clock" in d["what"] for d in aloud(endpoint)] == [True]
        assert ask(f"unix://{path}")["rtt_ns"] is None
    assert ask(f"unix://{path}")["outcome"] == "refused"
    assert ask(f"unix://{tmp_path}/none")["outcome"] in ("refused", "reset")
    for wrong in ("unix://relative", "unix:///" + "x" * 200):
        with pytest.raises(UsageError, match="Unix"):
            parse_url(wrong)


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with StubThread(Options(plan=QUICK, host="::1")) as s:
        assert s.url.startswith("http://[::1]:")
        reachable(s.url, f"{s.url}/metrics")
        assert parse_url(s.url).loopback


def test_headers_are_sent_and_win_over_ours(stub: Any) -> None:
    with Relay(stub.stub.server.port, proxy=True) as relay:
        headers = (parse_header("X-Tenant: a b"), parse_header("authorization: Basic s3cr3t"))
        reach = Reach(proxy=f"http://127.0.0.1:{relay.port}", headers=headers)
        endpoint = parse_url(stub.url, api_key="other", reach=reach)
        get(endpoint, "/v1/models")
        assert ask(stub.url, proxy=reach.proxy, headers=headers)["outcome"] == "ok"
        for head in relay.heads:
            lines = [line.lower() for line in head.splitlines()]
            assert "x-tenant: a b" in lines
            assert [line for line in lines if line.startswith("authorization")] == ["authorization: basic s3cr3t"]
        assert "s3cr3t" not in repr(endpoint)


@pytest.mark.parametrize(
    "text", ["nothing", ": s3cr3t", "Host: s3cr3t", "content-length: 5", "X: s3cr3t\r\nY: 1", "X Y: 1"]
)
def test_headers_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError) as failed:
        parse_header(text)
    assert "s3cr3t" not in str(failed.value)


def test_body_fields_are_merged_and_win(stub: Any) -> None:
    target = Target(parse_url(stub.url), "stub", extra={"top_k": 5, "temperature": 0.5})
    options = target.options(Workload(), True)
    assert (options["top_k"], options["temperature"]) == (5, 0.5)


@contextlib.contextmanager
def redirecting(seen: list[str] | None = None, **to: str) -> Iterator[str]:
    """A server that sends each path on; the others are what a service with one model says. ``seen``: keys it got."""
    seen = [] if seen is None else seen

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            where = to.get(self.path.strip("/").replace("/", "_"))
            body = b'{"object":"list","data":[{"id":"stub"}]}' if self.path.endswith("/models") else b""
            self.send_response(307 if where else 200 if body else 404)
            if where:
                self.send_header("Location", where)
                body = b""
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(307)
            self.send_header("Location", "http://me:pw@elsewhere.example:81/v2/chat?key=s3cr3t#part")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def base_of(url: str) -> Endpoint:
    return find(parse_url(url, api_key="s3cr3t"), None).endpoint


def test_a_redirect_on_the_same_server_is_followed() -> None:
    with redirecting(v1_models="/api/v2/models") as url:
        assert base_of(url).path == "/api/v2/chat/completions"


def test_a_redirect_to_another_server_is_named_and_gets_no_key() -> None:
    got: list[str] = []
    with redirecting(got) as other, redirecting(v1_models=f"{other}/api/models") as url:
        with pytest.raises(NotAnEndpoint) as facts:
            base_of(url)
        assert f"redirects to {other}/api" in str(facts.value)
    assert got == []


def test_redirects_in_a_circle_end() -> None:
    with redirecting(v1_models="/a/models", a_models="/v1/models") as url, pytest.raises(NotAnEndpoint, match="end"):
        base_of(url)


def test_a_redirect_under_load_is_an_error_of_the_url() -> None:
    with redirecting() as url:
        facts = ask(url)
    assert (facts["outcome"], facts["fault"], facts["status"]) == ("http_error", "user", 307)
    assert facts["detail"] == "307 redirects to http://elsewhere.example:81/v2/chat"  # neither query nor password


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("/v2/chat/completions?x=1", "redirects to /v2/chat/completions"),
        ("//other:8/v1", "redirects to http://other:8/v1"),
        ("https://[::1]:9/v1", "redirects to https://[::1]:9/v1"),
        ("http://[broken/v1", ""),
        ("/what you asked was", ""),
        ("", ""),
        ("?only=query", ""),
        ("/" + "a" * 5000, "redirects to /" + "a" * 199),
    ],
)
def test_where_a_redirect_leads_is_told_by_host_and_path(location: str, said: str) -> None:
    response = Response(stream=True)
    response.feed(f"HTTP/1.1 308 Moved\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode())
    assert facts_of(response, 0)["detail"] == f"308 {said}".strip()


def test_a_redirect_met_only_under_load_is_in_the_error_table(tmp_path: Path) -> None:
    from tests.test_stream_cases import closed, measure

    with redirecting() as url:
        _, summary = measure(url, tmp_path / "r", closed(3, 1))
    (row,) = summary["points"][0]["errors"]
    assert (row["status"], row["n"], row["fault"]) == (307, 3, "user")
    assert row["detail"] == "307 redirects to http://elsewhere.example:81/v2/chat"


def test_tls_goodbye_ends_a_body_though_the_connection_stays(pki: Path) -> None:
    """close_notify is the end of a close-delimited answer, even where TCP is left open."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    said = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    listener, release = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve() -> None:
        raw, _ = listener.accept()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = server_tls(pki).wrap_bio(incoming, outgoing, server_side=True)
        for step in (tls.do_handshake, lambda: tls.read(65536), lambda: tls.write(head + said), tls.unwrap):
            while True:
                try:
                    step()
                except ssl.SSLWantReadError:
                    raw.sendall(outgoing.read())
                    if step == tls.unwrap:  # it would wait for the client's own goodbye
                        break
                    incoming.write(raw.recv(65536))
                    continue
                raw.sendall(outgoing.read())
                break
        release.wait(20)
        raw.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        facts = ask(f"https://127.0.0.1:{listener.getsockname()[1]}", ca=str(pki / "ca.pem"))
        assert (facts["outcome"], facts["content_chunks"]) == ("truncated", 1)  # not a timeout
        assert not release.is_set()
    finally:
        release.set()
        thread.join()
        listener.close()


def test_the_command_kept_in_a_run_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    from whywait.cli import parser
    from whywait.verbs.measure import _command

    argv = ["run", "http://x", "--header", "X-Key: s3cr3t", "--header=Y: t0ken", "--proxy", "http://me:passw@p:1"]
    monkeypatch.setattr("sys.argv", ["whywait", *argv])
    kept = " ".join(_command(parser().parse_args(argv)))
    assert not [secret for secret in ("s3cr3t", "t0ken", "passw", "me:") if secret in kept]
    assert "--header" in kept


def test_a_whole_run_through_the_command_line(tmp_path: Path) -> None:
    from whywait.cli import main

    with StubProcess("--ttft-ms", "1", "--gap-ms", "1", "--tokens", "4") as s:
        port = int(s.url.rpartition(":")[2])
        with Relay(port, unix=tmp_path / "s"):
            out = tmp_path / "run"
            code = main(["run", f"unix://{tmp_path}/s", "--requests", "4", "--no-floor", "--out", str(out),
                         "--header", "X-Key: s3cr3t-value", "--body", '{"top_k": 5}', "--dialect", "chat"])  # fmt: skip
    assert code == 0
    for f in out.rglob("*"):
        assert f.is_dir() or b"s3cr3t" not in f.read_bytes()


def test_a_redirect_of_the_first_request_is_named() -> None:
    named = "307 to /v1/chat/completions: a redirect to http://elsewhere.example:81/v2/chat$"
    with redirecting() as url, pytest.raises(NotAnEndpoint, match=named):
        first_request(find(parse_url(url), None), Workload(), True)


def test_session_tickets_do_not_cost_a_connection(pki: Path, stub: Any, tmp_path: Path) -> None:
    """A TLS 1.3 server says something after the handshake, unasked; that is no reason to hang up."""
    from tests.test_stream_cases import closed, measure

    with Relay(stub.stub.server.port, server_tls(pki)) as relay:
        url, reach = f"https://127.0.0.1:{relay.port}", Reach(ca=str(pki / "ca.pem"))
        run, _ = measure(url, tmp_path / "r", closed(9, 3), reach=reach)
        assert relay.accepted == 3
    assert run.requests["connect_ns"].tolist() == [0] * 9
