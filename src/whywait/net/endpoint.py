"""Where requests go: URL, headers, TLS, dialect; and small blocking GETs for everything that is not under load."""

from __future__ import annotations

import glob
import http.client
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from whywait import __version__
from whywait.core import bounded
from whywait.errors import NotAnEndpoint, ServiceError, Unauthorized, Unreachable, UsageError
from whywait.net.dialect import PATHS
from whywait.net.reach import Proxy, Reach, bound, is_loopback, open_page, proxy_for, split_unix

USER_AGENT = f"whywait/{__version__}"
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Endpoint:
    """One OpenAI-compatible base URL, resolved. ``api_key`` never appears in repr, logs or a Run.

    ``address`` is where the client connects: the service's own, its Unix socket's, or the proxy's.
    """

    scheme: str
    host: str
    port: int
    base: str
    address: tuple[int, tuple[Any, ...] | str]
    dialect: str = "chat"
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 300.0
    reach: Reach = field(default_factory=Reach)
    proxy: Proxy | None = None
    trace_prefix: str = ""  # of the W3C trace ids that requests carry, 16 hexadecimal digits; '' sends none

    @property
    def path(self) -> str:
        return f"{self.base}/{PATHS[self.dialect]}"

    @property
    def target(self) -> str:
        """What the request line names: the path, or to a proxy the whole URL."""
        return f"http://{self.netloc}{self.path}" if self.proxy and self.scheme == "http" else self.path

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS.get(self.scheme, self.port) else f"{host}:{self.port}"

    @property
    def place(self) -> str:
        """What is connected to, for messages: a Unix socket by its path, else host and port."""
        return str(self.address[1]) if self.unix else self.netloc

    @property
    def url(self) -> str:
        return self.page(self.base)

    def page(self, path: str) -> str:
        """The URL of a page of this server."""
        return f"unix://{self.address[1]}:{path}" if self.unix else f"{self.scheme}://{self.netloc}{path}"

    @property
    def root(self) -> str:
        """Path prefix of the server's own pages (/metrics, /slots): the base without its /v1."""
        return self.base.removesuffix("/v1")

    @property
    def home(self) -> str:
        """Whose pages may be told the key: this host's, and of a service behind TLS only those behind TLS."""
        return self.page("") if self.scheme == "https" else self.host

    @property
    def unix(self) -> bool:
        return self.scheme == "unix"

    @property
    def loopback(self) -> bool:
        if self.unix:
            return True
        here = is_loopback(str(self.address[1][0]))
        return here and (self.proxy is None or is_loopback(self.host))

    def headers(self) -> dict[str, str]:
        """Of the measured request; what the user gave wins."""
        out = {"User-Agent": USER_AGENT, "Accept": "text/event-stream, application/json"}
        if self.api_key:
            out["Authorization"] = f"Bearer {self.api_key}"
        given = dict(self.reach.headers)
        named = {name.lower() for name in given}
        out = {name: value for name, value in out.items() if name.lower() not in named} | given
        if self.proxy and self.scheme == "http":
            out |= self.proxy.headers()
        return out

    def tunnel(self) -> bytes:
        """What opens the way through a proxy to a TLS service; empty when there is none to open."""
        if self.proxy is None or self.scheme != "https":
            return b""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"CONNECT {host}:{self.port} HTTP/1.1", f"Host: {host}:{self.port}", f"User-Agent: {USER_AGENT}"]
        lines += [f"{name}: {value}" for name, value in self.proxy.headers().items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def tls(self) -> ssl.SSLContext | None:
        return self.reach.tls() if self.scheme == "https" else None


def parse_url(
    url: str, dialect: str = "chat", api_key: str | None = None, timeout_s: float = 300.0, reach: Reach | None = None
) -> Endpoint:
    """``http(s)://host[:port][/base]`` or ``unix:///socket[:/base]`` → Endpoint.

    The base defaults to ``/v1``; a full …/chat/completions is cut back.

    Raises:
        UsageError: not such a URL, or ``reach`` names what cannot be used.
        Unreachable: the host name does not resolve.
    """
    reach = reach or Reach()
    if url.startswith("unix:"):
        socket_path, path = split_unix(url)
        base, dialect = _base(path, dialect)
        address: tuple[int, tuple[Any, ...] | str] = (socket.AF_UNIX, socket_path)
        return Endpoint("unix", "localhost", 0, base, address, dialect, api_key, timeout_s, reach)
    if "://" not in url:
        no_folder(url)
        url = "http://" + url
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise UsageError(f"{url!r} is not a URL: {exc}", "use http://host:port") from None
    if parts.username or parts.password:
        raise UsageError("a URL must not carry a password", "give the key by --api-key-file or WHYWAIT_API_KEY")
    if parts.scheme not in PORTS or not parts.hostname:
        raise UsageError(f"{url!r} is not an http:// or https:// URL", "use http://host:port")
    base, dialect = _base(parts.path, dialect)
    port = port or PORTS[parts.scheme]
    proxy = proxy_for(reach, parts.scheme, parts.hostname, port)
    address = _resolve(proxy.host, proxy.port) if proxy else _resolve(parts.hostname, port)
    return Endpoint(
        parts.scheme, parts.hostname, port, base, address, dialect, api_key, timeout_s, reach, proxy
    )  # fmt: skip


def no_folder(url: str) -> None:
    """
    Raises:
        UsageError: it is the folder of a saved run, a folder of runs, or a path (``./…``), which no service has.
    """
    if "://" in url or url.startswith("unix:"):
        return
    if os.path.isfile(os.path.join(url, "manifest.json")):
        raise UsageError(f"{url} is the folder of a saved run, not a service", f"whywait show {url}")
    a_path = url.startswith((".", "/", "~"))
    if os.path.isdir(url) and (a_path or glob.glob(os.path.join(glob.escape(url), "*", "manifest.json"))):
        raise UsageError(f"{url} is a folder, not a service", f"whywait history {url} lists the runs in it")
    if a_path:
        raise UsageError(f"{url} is a path, not a service", "use http://host:port; a saved run: whywait show FOLDER")


def _base(path: str, dialect: str) -> tuple[str, str]:
    base = path.rstrip("/")
    for named, tail in PATHS.items():  # chat/completions comes before completions
        if base.endswith("/" + tail):
            return base.removesuffix("/" + tail) or "/v1", named
    return base or "/v1", dialect


def _resolve(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise Unreachable(f"the host name {host!r} does not resolve", "check the URL") from None
    family, _, _, _, address = _best(found)
    return family, address


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
            key: str | None = bounded.read_text(Path(key_file), 1 << 16, "a text file that holds the key").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise UsageError(
                f"cannot read the key file {key_file}: {_why(exc)}", "a text file that holds the key"
            ) from None
        if not key:
            raise UsageError(f"the key file {key_file} is empty", "a text file that holds the key")
    else:
        key = os.environ.get("WHYWAIT_API_KEY") or os.environ.get("OPENAI_API_KEY") or None
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(
            "the API key holds characters that cannot be sent in a header", "look for a stray line or space"
        )
    return key


def _why(exc: OSError | UnicodeDecodeError) -> str:
    return (exc.strerror or str(exc)) if isinstance(exc, OSError) else "it is not text"


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
    conn, target, extra = open_page(endpoint.page(path), endpoint.reach, timeout_s)
    headers = {**endpoint.headers(), **extra, "Host": endpoint.netloc}
    headers = {name: value for name, value in headers.items() if name != "Accept"} | {"Accept": "*/*"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        bound(conn, timeout_s)
        conn.request(method, target, body=body, headers=headers)
        with conn.getresponse() as answer:
            data = answer.read(8 << 20)
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, data
    except ssl.SSLError as exc:
        hint = "is it http:// rather than https://?" if "WRONG_VERSION" in str(exc) else "check the certificate"
        raise Unreachable(f"TLS to {endpoint.netloc} failed: {exc.reason or exc}", hint) from None
    except ConnectionRefusedError:
        raise Unreachable(f"{endpoint.place} refuses connections", "is the service running on that port?") from None
    except TimeoutError:
        raise Unreachable(f"{endpoint.place} did not answer {path} in {timeout_s:g} s", "is it overloaded?") from None
    except http.client.HTTPException as exc:
        hint = "is it https:// rather than http://?"
        raise NotAnEndpoint(f"{endpoint.netloc} does not speak HTTP ({type(exc).__name__})", hint) from None
    except OSError as exc:
        raise Unreachable(f"{endpoint.place}: {exc.strerror or exc}", "check the URL and the network") from None
    finally:
        conn.close()


def raise_for(status: int, what: str, message: str = "") -> None:
    """Turn an HTTP error status into the error that says whose fault it is; returns quietly below 400."""
    tail = f": {message}" if message else ""
    if status in (401, 403):
        raise Unauthorized(f"{what} answers {status}{tail}", "set WHYWAIT_API_KEY or give --api-key-file")
    if status >= 400:
        raise ServiceError(f"{what} answers {status}{tail}", "see the service's log")
