"""What to read beside the load, as asked on the command line, made ready for the sampler."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import socket
from dataclasses import dataclass, field
from typing import Any

import orjson

from whywait.core.secrets import hide
from whywait.errors import MissingExtra, UsageError
from whywait.net.endpoint import read_key
from whywait.net.reach import LEAST_TOKEN, Reach, address, page_url
from whywait.probe.agent import FACTS
from whywait.probe.dcgm import DcgmReader
from whywait.probe.otlp import PATH as TRACES
from whywait.probe.pages import Fetcher
from whywait.probe.spans import new_prefix
from whywait.probe.web import url_of

SUCH = {"--gpu-metrics-url": "http://host:9400/metrics", "--agent": "http://host:9465"}
MOST_FACTS = 32  # of a machine
FIRST_S = 5.0  # patience with the first answer
OTLP_TOKEN, AGENT_TOKEN = "WHYWAIT_SAMPLER_OTLP_TOKEN", "WHYWAIT_SAMPLER_AGENT_TOKEN"  # names of variables


@dataclass(frozen=True)
class Probes:
    """Flags: ``--otlp-listen``, ``--otlp-grpc-listen``, ``--otlp-token-file``, ``--gpu-metrics-url``, ``--agent``,
    ``--agent-token-file``."""

    otlp_listen: str | None = None
    otlp_grpc: str | None = None
    otlp_token_file: str | None = None
    gpu_urls: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    agent_token_file: str | None = None

    @property
    def traces(self) -> bool:
        return bool(self.otlp_listen or self.otlp_grpc)

    def prepare(self, reach: Reach | None = None) -> Prepared:
        """Open what listens and ask once what answers, so that a port in use or a wrong URL is said before anything is
        measured. Of ``reach`` the authorities and the proxy are used, not the headers.

        Raises:
            UsageError: an address or a URL cannot be used, or a port that others can reach has no token.
        """
        if self.otlp_token_file and not self.traces:
            raise UsageError("--otlp-token-file needs --otlp-listen or --otlp-grpc-listen", "--otlp-listen 4318")
        if self.agent_token_file and not self.agents:
            raise UsageError("--agent-token-file needs --agent", f"--agent {SUCH['--agent']}")
        out = Prepared()
        plain = dataclasses.replace(reach or Reach(), headers=())
        out.settings.update(gpu_urls=self.gpu_urls, agents=self.agents)
        for url in self.gpu_urls:
            if not DcgmReader().read(_page("--gpu-metrics-url", url, {}, plain)):
                raise UsageError(f"--gpu-metrics-url {url} has no DCGM figures", "give the exporter's /metrics")
        token = None
        if self.agent_token_file:
            token = out.env[AGENT_TOKEN] = read_token(self.agent_token_file)
            out.settings["agent_token_env"] = AGENT_TOKEN
        for url in self.agents:
            own = {"Authorization": f"Bearer {token}"} if token else {}
            out.agents.append(_facts(url, _page("--agent", url.rstrip("/") + FACTS, own, plain)))
        if self.traces:
            self._listen(out)
        return out

    def _listen(self, out: Prepared) -> None:
        if self.otlp_token_file:
            out.env[OTLP_TOKEN] = read_token(self.otlp_token_file)
            out.settings["otlp_token_env"] = OTLP_TOKEN
        token = bool(self.otlp_token_file)
        if self.otlp_listen:
            out.listening = listen_on(*address(self.otlp_listen, "--otlp-listen", token))
            out.settings["otlp_fd"] = out.listening.fileno()
        if self.otlp_grpc:
            host, port = address(self.otlp_grpc, "--otlp-grpc-listen", token)
            if importlib.util.find_spec("grpc") is None:
                raise MissingExtra("--otlp-grpc-listen", "otlp-grpc")
            if not port:
                raise UsageError("--otlp-grpc-listen: which port it would be is not known", "give one, such as 4317")
            listen_on(host, port).close()
            out.settings["otlp_grpc"] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        out.settings["trace_prefix"] = new_prefix()


@dataclass
class Prepared:
    """``settings`` are fields of the sampler's configuration, ``env`` holds the secrets it may read."""

    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    listening: socket.socket | None = None
    agents: list[dict[str, Any]] = field(default_factory=list)  # what each agent says of its machine

    @property
    def prefix(self) -> str:
        return str(self.settings.get("trace_prefix", ""))

    @property
    def where(self) -> str:
        """The address spans are to be sent to, for people."""
        if self.listening is not None:
            return url_of(self.listening) + TRACES
        return str(self.settings.get("otlp_grpc", ""))

    def close(self) -> None:
        if self.listening is not None:
            self.listening.close()
            self.listening = None


def _page(flag: str, url: str, headers: dict[str, str], reach: Reach) -> str:
    fetcher = Fetcher(page_url(url, flag, f"such as {flag} {SUCH[flag]}"), headers, FIRST_S, reach)
    body = fetcher.get()
    fetcher.close()
    if body is None:
        hint = "--agent-token-file, with the agent's token" if "401" in fetcher.why else "is it running there?"
        raise UsageError(f"{flag} {url} does not answer ({fetcher.why})", hint)
    return body.decode("utf-8", "replace")


def _facts(url: str, body: str) -> dict[str, Any]:
    try:
        machine = orjson.loads(body)["machine"]
    except (ValueError, KeyError, TypeError):
        machine = None
    if not isinstance(machine, dict) or not all(_plain(k) and _plain(v) for k, v in machine.items()):
        raise UsageError(f"--agent {url} is no 'whywait agent'", "start one there: whywait agent --listen HOST:PORT")
    return dict(list(machine.items())[:MOST_FACTS])


def _plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, (bool, int, float))
        or (isinstance(value, str) and len(value) <= 200 and value.isprintable())
    )


def read_token(path: str) -> str:
    """The token in a file; from now on it is cut out of all we write, for whatever answers may say it back to us.

    Raises:
        UsageError: there is none, or it is easily guessed.
    """
    token = read_key(path) or ""
    if len(token) < LEAST_TOKEN:
        raise UsageError(f"the token in {path} has fewer than {LEAST_TOKEN} characters", "openssl rand -hex 16")
    hide(token)
    return token


def listen_on(host: str, port: int) -> socket.socket:
    """A TCP socket that listens.

    Raises:
        UsageError: the address cannot be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(found[0], socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(found[4])
            sock.listen(128)
        except OSError:
            with contextlib.suppress(OSError):
                sock.close()
            raise
    except (OSError, UnicodeError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise UsageError(f"cannot listen on {host}:{port}: {why}", "choose another port or host") from None
    return sock
