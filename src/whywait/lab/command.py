"""Reads an engine's command line as one would type it: what to run, where it listens, how many it runs at once."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final
from urllib.parse import urlsplit

from whywait.core.secrets import hide_command
from whywait.errors import UsageError

#: Ports the engines listen on when not told; 8000 (vLLM, transformers, …) for all others.
DEFAULT_PORTS: Final[Mapping[str, int]] = {
    "llama-server": 8080,
    "sglang": 30000,
    "sglang.launch_server": 30000,
    "ollama": 11434,
    "text-generation-launcher": 3000,
    "lmdeploy": 23333,
    "mlx_lm.server": 8080,
}
_SEQS_FLAGS: Final = ("--max-num-seqs", "--max-running-requests", "--max_batch_size", "--parallel", "-np")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_EVERYWHERE: Final = ("0.0.0.0", "::", "[::]", "*", "")  # noqa: S104  what a server binds to, not us


@dataclass(frozen=True)
class Plan:
    argv: tuple[str, ...]
    url: str
    program: str  # what to call it in a message
    env: dict[str, str] = field(default_factory=dict)
    max_num_seqs: int | None = None


def plan(cmdline: str, url: str | None = None) -> Plan:
    hide_command(cmdline)
    try:
        words = shlex.split(cmdline)
    except ValueError as err:
        raise UsageError(f"cannot read the command to launch: {err}", "check its quotes") from None
    env: dict[str, str] = {}
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        env[match.group(1)] = match.group(2)
        words.pop(0)
    if not words:
        raise UsageError("no command to launch", "for example --launch 'vllm serve MODEL'")
    if shutil.which(words[0], path=env.get("PATH")) is None:
        raise UsageError(
            f"no program '{words[0]}' to launch", "give its full path; shell syntax needs a shell: sh -c '…'"
        )
    seqs = next((n for flag in _SEQS_FLAGS if (n := _number(words, flag)) is not None), None)
    return Plan(tuple(words), _base(url) if url else _address(words), _program(words), env, seqs)


def _base(url: str) -> str:
    """The URL without the ``/v1`` people paste."""
    if "://" not in url:
        url = "http://" + url
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"'{url}' is not a URL", "for example http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _address(words: Sequence[str]) -> str:
    host = flag_value(words, "--host") or flag_value(words, "--hostname") or ""
    host = "127.0.0.1" if host in _EVERYWHERE else host
    port = _number(words, "--port")
    if port is None:
        port = next((DEFAULT_PORTS[name] for w in words if (name := PurePath(w).name) in DEFAULT_PORTS), 8000)
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


def _program(words: Sequence[str]) -> str:
    """``/usr/bin/vllm serve M --port 1`` -> ``vllm serve``; ``python3 -m sglang.launch_server …`` -> those three."""
    name = PurePath(words[0]).name
    if "-m" in words[1:4] and (at := words.index("-m")) + 1 < len(words):
        return f"{name} -m {words[at + 1]}"
    if len(words) > 1 and re.fullmatch(r"[a-z][a-z_-]*", words[1]):
        return f"{name} {words[1]}"
    return name


def flag_value(words: Sequence[str], flag: str) -> str | None:
    """The last ``--flag VALUE`` or ``--flag=VALUE``; engines take dashes and underscores alike."""
    spellings = {flag, flag.replace("_", "-"), "--" + flag[2:].replace("-", "_") if flag.startswith("--") else flag}
    found = None
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in spellings:
            found = value if equals else words[at + 1] if at + 1 < len(words) else found
    return found


def _number(words: Sequence[str], flag: str) -> int | None:
    value = flag_value(words, flag)
    return int(value) if value is not None and value.isascii() and value.isdigit() else None
