"""How a service is reached: TLS, proxies, Unix sockets, extra headers; and blocking connections by the same rules.

The measuring client, the pages read before load and the sampler beside it all come through here, so a service behind a
proxy or a private CA is behind it for all of them. Secrets (header values, a proxy's password) are never in a repr.
"""

from __future__ import annotations

import base64
import functools
import http.client
import io
import ipaddress
import json
import os
import re
import socket
import ssl
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from whywait.core.secrets import hide_header, hide_url
from whywait.errors import UsageError

#: Headers that the client writes itself; another value would break the request or the measurement.
OWN_HEADERS = ("host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding")
LEAST_TOKEN = 8  # characters of one that lets other machines in
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)


@dataclass(frozen=True)
class Reach:
    """``ca``, ``cert`` and ``key`` are PEM files. ``proxy``: a URL, ``none``, or None for what the environment says.

    ``lenient_eof`` is how it is read: a stream that ends without finish_reason or [DONE] is taken for finished.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    insecure: bool = False
    proxy: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    lenient_eof: bool = False

    def as_json(self) -> str:
        """For a child's environment: it holds the secrets."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Reach:
        values = json.loads(text or "{}")
        values["headers"] = tuple((name, value) for name, value in values.get("headers", ()))
        return cls(**values)

    def tls(self) -> ssl.SSLContext:
        """A client's TLS context.

        Raises:
            UsageError: a file is missing or not what it should be.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as exc:
            raise UsageError(f"--ca {self.ca}: {_why(exc)}", "give a PEM file of certificates") from None
        if self.cert:
            try:
                # An encrypted key would be asked for on the terminal, in the middle of a run.
                context.load_cert_chain(self.cert, self.key, password=lambda: b"")
            except (OSError, ssl.SSLError) as exc:
                hint = "give PEM files; the key not encrypted, and belonging to the certificate"
                raise UsageError(f"--cert {self.cert}: {_why(exc)}", hint) from None
        elif self.key:
            raise UsageError("--key needs --cert", "the certificate that the key belongs to")
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _why(exc: Exception) -> str:
    return str(getattr(exc, "strerror", None) or getattr(exc, "reason", None) or exc)


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy. ``auth`` is the value of Proxy-Authorization."""

    host: str
    port: int
    auth: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def headers(self) -> dict[str, str]:
        return {"Proxy-Authorization": self.auth} if self.auth else {}


def parse_proxy(url: str) -> Proxy:
    """``http://[user:password@]host[:port]`` → Proxy.

    Raises:
        UsageError: not such a URL. The message holds no part of it but the scheme: it may hold a password.
    """
    hint = "use --proxy http://host:port"
    try:
        parts = urlsplit(url if "://" in url else "http://" + url)
        port = parts.port or 80
    except ValueError:
        raise UsageError("the proxy is not a URL", hint) from None
    if parts.scheme != "http" or not parts.hostname:
        raise UsageError(f"the proxy is not an http:// URL but {parts.scheme[:10]}://", hint)
    auth = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        auth = "Basic " + base64.b64encode(pair.encode()).decode()
    return Proxy(parts.hostname, port, auth)


def proxy_for(reach: Reach, scheme: str, host: str, port: int) -> Proxy | None:
    """The proxy on the way to a service: ``--proxy``, else the environment's unless NO_PROXY or loopback."""
    if scheme == "unix" or reach.proxy == "none":
        return None
    if reach.proxy:
        hide_url(reach.proxy)
        return parse_proxy(reach.proxy)
    # The environment's proxy stands elsewhere as a rule: this machine is not reached through it.
    if is_loopback(host) or urllib.request.proxy_bypass(f"{host}:{port}") or urllib.request.proxy_bypass(host):
        return None
    known = urllib.request.getproxies()
    url = known.get(scheme) or known.get("all")
    hide_url(url)
    return parse_proxy(url) if url else None


def is_loopback(host: str) -> bool:
    """Whether a host name is this machine's own, whoever resolves it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.split("%", maxsplit=1)[0]).is_loopback
    except ValueError:
        return False


def address(text: str, flag: str, token: bool) -> tuple[str, int]:
    """``[HOST:]PORT`` → (host, port); the host is 127.0.0.1 unless given.

    Raises:
        UsageError: it is none, or others than this machine could reach it and there is no token.
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise UsageError(f"{flag}: {text!r} is not [HOST:]PORT", f"such as {flag} 4318")
    if not token and host != "localhost" and not is_loopback(host):
        raise UsageError(f"{flag} {text}: other machines could reach it: needs a token", "give one, or 127.0.0.1")
    return host, int(port)


def parse_header(text: str) -> tuple[str, str]:
    """``'Name: value'`` → (name, value).

    Raises:
        UsageError: not a header, or one of our own. The message never holds the value.
    """
    name, colon, value = text.partition(":")
    name, value = name.strip(), value.strip()
    if not colon or not _TOKEN.fullmatch(name):
        raise UsageError("--header is not of the form 'Name: value'")
    if name.lower() in OWN_HEADERS:
        raise UsageError(f"--header {name}: whywait writes that header itself")
    if not value.isprintable() or any(ord(c) > 255 for c in value):
        raise UsageError(f"--header {name}: its value holds characters that cannot be sent in a header")
    hide_header(name, value)
    return name, value


def split_unix(url: str) -> tuple[str, str]:
    """``unix:///path/to/socket[:/base]`` → (socket, base).

    Raises:
        UsageError: not such a URL.
    """
    path, _, base = url.removeprefix("unix://").partition(":")
    if not path.startswith("/") or len(os.fsencode(path)) > 107:  # sun_path
        raise UsageError(f"{url!r} is not a Unix socket's URL", "use unix:///path/to/socket, at most 107 bytes")
    return path, base


def page_url(url: str, flag: str, such_as: str) -> str:
    """``url`` where it is one of a page that can be asked for.

    Raises:
        UsageError: it is none, or holds a password: that would not be sent, and would end up in the Run.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"{flag} {clean_url(url)!r} is not a URL", such_as)
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{flag}: a URL must not carry a password", f"{such_as}; a token goes into a file")
    return url


def clean_url(url: str) -> str:
    """``url`` as it may be shown: without what stands before an @."""
    head, at, rest = url.rpartition("@")
    return f"{head.partition('://')[0]}://…@{rest}" if at else url


def bound(connection: http.client.HTTPConnection, seconds: float) -> None:
    """The next answer over ``connection``, its head included, must be there whole within ``seconds``, else
    TimeoutError: a socket's own timeout is for each read, and a byte now and then must not keep us for ever."""
    end = time.monotonic() + seconds
    connection.response_class = functools.partial(_Response, end)  # type: ignore[assignment]
    connection.timeout = seconds
    sock: socket.socket | None = connection.sock
    if sock is not None:
        sock.settimeout(seconds)


class _Response(http.client.HTTPResponse):
    def __init__(self, end: float, sock: socket.socket, debuglevel: int = 0, method: str | None = None) -> None:
        super().__init__(sock, debuglevel, method)
        self.fp = io.BufferedReader(_Until(end, sock, self.fp.detach()))


class _Until(io.RawIOBase):
    """What a socket's file reads, until a time (monotonic)."""

    def __init__(self, end: float, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._end, self._sock, self._raw = end, sock, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class Opened(NamedTuple):
    """A blocking connection (not connected yet), and what to ask over it."""

    connection: http.client.HTTPConnection
    target: str
    headers: dict[str, str]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def open_page(url: str, reach: Reach, timeout_s: float) -> Opened:
    """For a page's URL (``http``, ``https``, ``unix``); the headers are those of ``reach`` and of the proxy.

    Raises:
        UsageError: what the URL or ``reach`` name cannot be used.
    """
    headers = dict(reach.headers)
    if url.startswith("unix:"):
        path, target = split_unix(url)
        return Opened(_UnixConnection(path, timeout_s), target or "/", headers)
    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    proxy = proxy_for(reach, parts.scheme, host, port)
    at, to = (proxy.host, proxy.port) if proxy else (host, port)
    connection: http.client.HTTPConnection
    if secure:
        connection = http.client.HTTPSConnection(at, to, timeout=timeout_s, context=reach.tls())
        if proxy:
            connection.set_tunnel(host, port, proxy.headers())
    else:
        connection = http.client.HTTPConnection(at, to, timeout=timeout_s)
        if proxy:
            target, headers = url, {**headers, **proxy.headers()}
    return Opened(connection, target, headers)
