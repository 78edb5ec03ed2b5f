"""Where requests go: URL, headers, TLS, dialect; and small blocking GETs for everything that is not under load."""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from whywait import __version__
from whywait.errors import NotAnEndpoint, ServiceError, Unauthorized, Unreachable, UsageError

USER_AGENT = f"whywait/{__version__}"


@dataclass(frozen=True)
class Endpoint:
    """One OpenAI-compatible base URL, resolved. ``api_key`` never appears in repr, logs or a Run."""

    scheme: str
    host: str
    port: int
    base: str
    address: tuple[int, tuple[Any, ...]]
    dialect: str = "chat"
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 300.0

    @property
    def path(self) -> str:
        return f"{self.base}/{'chat/completions' if self.dialect == 'chat' else 'completions'}"

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = {"http": 80, "https": 443}[self.scheme]
        return host if self.port == default else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.base}"

    @property
    def root(self) -> str:
        """Path prefix of the server's own pages (/metrics, /slots): the base without its /v1."""
        return self.base.removesuffix("/v1")

    @property
    def loopback(self) -> bool:
        return ipaddress.ip_address(str(self.address[1][0]).split("%")[0]).is_loopback

    def headers(self) -> dict[str, str]:
        out = {"User-Agent": USER_AGENT, "Accept": "text/event-stream, application/json"}
        if self.api_key:
            out["Authorization"] = f"Bearer {self.api_key}"
        return out

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.scheme == "https" else None


def parse_url(url: str, dialect: str = "chat", api_key: str | None = None, timeout_s: float = 300.0) -> Endpoint:
    """``http(s)://host[:port][/base]`` → Endpoint; the base defaults to ``/v1``; a full …/chat/completions is cut back.

    Raises:
        UsageError: not such a URL.
        Unreachable: the host name does not resolve.
    """
    if "://" not in url:
        url = "http://" + url
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise UsageError(f"{url!r} is not a URL: {exc}", "use http://host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is not an http:// or https:// URL", "use http://host:port")
    if parts.username or parts.password:
        raise UsageError("a URL must not carry a password", "give the key by --api-key-file or WHYWAIT_API_KEY")
    base = parts.path.rstrip("/")
    for tail, named in (("/chat/completions", "chat"), ("/completions", "completions")):
        if base.endswith(tail):
            base, dialect = base.removesuffix(tail), named
            break
    base = base or "/v1"
    port = port or {"http": 80, "https": 443}[parts.scheme]
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise Unreachable(f"the host name {parts.hostname!r} does not resolve", "check the URL") from None
    family, _, _, _, address = _best(found)
    return Endpoint(parts.scheme, parts.hostname, port, base, (family, address), dialect, api_key, timeout_s)


def _best(found: Sequence[tuple[Any, Any, int, str, tuple[Any, ...]]]) -> tuple[Any, Any, int, str, tuple[Any, ...]]:
    """The first address that takes a connection; the first of all when none does (the error comes later, in full)."""
    for info in found if len(found) > 1 else ():
        with socket.socket(info[0], socket.SOCK_STREAM) as s:
            s.settimeout(2)
            try:
                s.connect(info[4])
            except OSError:
                continue
            return info
    return found[0]


def read_key(key_file: str | None) -> str | None:
    """The API key: from a file, else from WHYWAIT_API_KEY or OPENAI_API_KEY; never from the command line.

    Raises:
        UsageError: the file cannot be read or is empty, or the key cannot be an HTTP header.
    """
    if key_file:
        try:
            key: str | None = Path(key_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise UsageError(f"cannot read the key file {key_file}: {exc}") from None
        if not key:
            raise UsageError(f"the key file {key_file} is empty")
    else:
        key = os.environ.get("WHYWAIT_API_KEY") or os.environ.get("OPENAI_API_KEY") or None
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError("the API key holds characters that cannot be sent in a header")
    return key


def get(endpoint: Endpoint, path: str, timeout_s: float = 5.0) -> tuple[int, dict[str, str], bytes]:
    """Blocking GET of a server page: (status, lower-case headers, body up to 8 MB).

    Raises:
        Unreachable: no connection. NotAnEndpoint: what answers does not speak HTTP.
    """
    return _call(endpoint, "GET", path, None, timeout_s)


def post(endpoint: Endpoint, path: str, body: bytes, timeout_s: float) -> tuple[int, dict[str, str], bytes]:
    """Blocking POST of JSON; as :func:`get`."""
    return _call(endpoint, "POST", path, body, timeout_s)


def _call(
    endpoint: Endpoint, method: str, path: str, body: bytes | None, timeout_s: float
) -> tuple[int, dict[str, str], bytes]:
    host = str(endpoint.address[1][0])
    tls = endpoint.tls()
    conn: http.client.HTTPConnection
    if tls is None:
        conn = http.client.HTTPConnection(host, endpoint.port, timeout=timeout_s)
    else:
        conn = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=timeout_s, context=tls)
    headers = {**endpoint.headers(), "Host": endpoint.netloc, "Accept": "*/*"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        conn.request(method, path, body=body, headers=headers)
        answer = conn.getresponse()
        data = answer.read(8 << 20)
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, data
    except ssl.SSLError as exc:
        hint = "is it http:// rather than https://?" if "WRONG_VERSION" in str(exc) else "check the certificate"
        raise Unreachable(f"TLS to {endpoint.netloc} failed: {exc.reason or exc}", hint) from None
    except ConnectionRefusedError:
        raise Unreachable(f"{endpoint.netloc} refuses connections", "is the service running on that port?") from None
    except TimeoutError:
        raise Unreachable(f"{endpoint.netloc} did not answer {path} in {timeout_s:g} s", "is it overloaded?") from None
    except http.client.HTTPException as exc:
        hint = "is it https:// rather than http://?"
        raise NotAnEndpoint(f"{endpoint.netloc} does not speak HTTP ({type(exc).__name__})", hint) from None
    except OSError as exc:
        raise Unreachable(f"{endpoint.netloc}: {exc.strerror or exc}", "check the URL and the network") from None
    finally:
        conn.close()


def raise_for(status: int, what: str, message: str = "") -> None:
    """Turn an HTTP error status into the error that says whose fault it is; returns quietly below 400."""
    tail = f": {message}" if message else ""
    if status in (401, 403):
        raise Unauthorized(f"{what} answers {status}{tail}", "set WHYWAIT_API_KEY or give --api-key-file")
    if status >= 400:
        raise ServiceError(f"{what} answers {status}{tail}", "see the service's log")
