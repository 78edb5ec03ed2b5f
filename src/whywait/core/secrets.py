"""What must never be written down: keys and passwords this process was given. Known here, cut out wherever text leaves.

Keeping them out of what we compose is not enough: a service may echo a request's headers in an error body, a header of
the answer, a metric's label.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from whywait import errors

MASK = "[secret]"
LEAST = 4  # shorter ones would blank out ordinary words
# Header names whose values are taken for secrets, by what they contain.
_TELLING = ("auth", "key", "token", "secret", "cookie", "password", "credential")

# Parts of the name of a flag or an environment variable whose value is one (VLLM_API_KEY, --hf-token), and of one whose
# value is not (--ssl-key-file, --eos-token-id).
_SECRET: Final = {"key", "keys", "apikey", "token", "auth", "authorization", "secret", "password", "passwd", "pass",
                  "pwd", "credential", "credentials", "cookie"}  # fmt: skip
_NOT: Final = {"file", "path", "dir", "id", "ids", "mode", "parser", "length", "len"}
_PUBLIC: Final = {"none", "null", "auto", "true", "false", "empty"}  # given for a key where none is needed
_NAMED: Final = re.compile(r"(-{0,2}[A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_HEADER: Final = re.compile(r"([A-Za-z][\w-]*):\s*(\S.*)", re.DOTALL)
LONG = 20  # characters of a value in a URL's query that is taken for a secret whatever its name

_forms: list[tuple[str, bytes]] = []


def hide(*secrets: str | None) -> None:
    """From now on these are cut out, as they are and as JSON or a URL writes them."""
    for secret in secrets:
        if not secret or len(secret) < LEAST:
            continue
        once = [json.dumps(secret, ensure_ascii=ascii)[1:-1] for ascii in (True, False)]
        twice = [json.dumps(x, ensure_ascii=False)[1:-1] for x in once]  # labels of a reading: JSON in a line of JSON
        for form in (secret, *once, *twice, quote(secret, "")):
            if (form, form.encode()) not in _forms:
                _forms.append((form, form.encode()))
    errors.clean = clean
    _forms.sort(key=lambda f: -len(f[0]))  # a secret inside a longer one must not leave the rest of that one


def hide_url(url: str | None) -> None:
    """The user name and password of a URL (a proxy's)."""
    if not url:
        return
    try:
        parts = urlsplit(url if "://" in url else "//" + url)
        if parts.password:
            user, password = unquote(parts.username or ""), unquote(parts.password)
            hide(password, parts.password, user, base64.b64encode(f"{user}:{password}".encode()).decode())
    except ValueError:
        pass


def hide_query(url: str) -> None:
    """Values in a URL's query that are secrets by their name (``api_key``), or long enough to be one."""
    try:
        query = urlsplit(url).query
    except ValueError:
        return
    for name, value in parse_qsl(query):
        if len(value) >= LONG or _secret_name(name):
            hide(value, quote(value))
    for part in query.split("&"):  # as it is written there
        name, _, value = part.partition("=")
        if len(value) >= LONG or _secret_name(unquote(name)):
            hide(value)


def hide_command(text: str) -> None:
    """What a command line holds of secrets: values of flags and variables that are ones by their name (``--api-key K``,
    ``HF_TOKEN=…``), headers, and URLs with a password; also inside ``sh -c '…'``."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    after = False  # a flag that takes secrets; of some engines several
    for word in words:
        named, header = _NAMED.fullmatch(word), _HEADER.fullmatch(word)
        if "://" in word:
            for url in re.findall(r"[a-z]+://\S+", word):
                hide_url(url)
                hide_query(url)
        if word.startswith("-"):
            after = not named and _secret_name(word)
        elif after:
            _hide_value(word)
        if header:
            hide_header(header[1], header[2])
        if len(words) > 1 and re.search(r"\s", word):  # of a shell
            hide_command(word)
        elif named and _secret_name(named[1]):
            _hide_value(named[2])


def _secret_name(name: str) -> bool:
    parts = set(re.split(r"[-_.]", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))
    return bool(parts & _SECRET) and not parts & _NOT


def _hide_value(value: str) -> None:
    if value.lower() not in _PUBLIC:
        hide(value)


def hide_header(name: str, value: str) -> None:
    """The value of a header when its name tells that it is a secret; of ``Bearer x`` the x too."""
    if any(word in name.lower() for word in _TELLING):
        hide(value.strip(), *(part for part in value.split() if len(part) >= 8))


def clean(text: str) -> str:
    for form, _ in _forms:
        if form in text:
            text = text.replace(form, MASK)
    return text


def clean_bytes(data: bytes) -> bytes:
    for _, form in _forms:
        if form in data:
            data = data.replace(form, MASK.encode())
    return data


def cleaned(value: Any) -> Any:
    """The same for a plain value of dicts, lists and texts."""
    if not _forms:
        return value
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {cleaned(k): cleaned(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(v) for v in value]
    return value


def known() -> tuple[str, ...]:
    """For a process of ours that must hide the same."""
    return tuple(form for form, _ in _forms)


def forget() -> None:
    """For tests: nothing is secret any more."""
    _forms.clear()
