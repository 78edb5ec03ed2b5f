"""One side of a paired trial, as a user writes it: a command line, the embedded engine with settings, or a URL.

``vllm serve MODEL --port {port}`` · ``embedded`` · ``embedded:slots=8,cache_prompt=off`` · ``http://127.0.0.1:8000``.
``{port}`` becomes a free port; settings are the fields of ``lab.settings.Settings``, or any other parameter of
llama.cpp by its dotted name.
"""

from __future__ import annotations

import dataclasses
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from whywait.errors import UsageError
from whywait.lab.command import flag_value, plan
from whywait.lab.settings import Settings

EMBEDDED = "embedded"
PORT = "{port}"
ALIASES: Final[Mapping[str, str]] = {"parallel": "slots", "ctx": "ctx_per_slot", "np": "slots"}
_KINDS: Final = {f.name: type(f.default) for f in dataclasses.fields(Settings) if f.name not in ("cpus", "extra")}
#: What says in which numbers an engine keeps weights and KV: settings of the embedded one with their defaults, and
#: flags of vLLM, SGLang and llama-server.
_NUMBER_SETTINGS: Final = {f: getattr(Settings(), f) for f in ("weights", "cache_type_k", "cache_type_v")}
_NUMBER_FLAGS: Final = ("--quantization", "-q", "--dtype", "--kv-cache-dtype", "--cache-type-k", "--cache-type-v",
                        "-ctk", "-ctv")  # fmt: skip
_TRUTH: Final[Mapping[str, bool]] = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


@dataclass(frozen=True)
class Arm:
    """``kind`` is command, embedded or url; ``text`` is what the user wrote."""

    text: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def restarts(self) -> bool:
        """Whether each of its rounds gets a process of its own."""
        return self.kind != "url"


def arm_of(text: str) -> Arm:
    """
    Raises:
        UsageError: it is none of the three, or has a setting that does not exist.
    """
    text = text.strip()
    if text.startswith(("http://", "https://", "unix:")):
        return Arm(text, "url")
    name, colon, rest = text.partition(":")
    if name.strip() == EMBEDDED:
        return Arm(text, EMBEDDED, settings_of(rest) if colon else {})
    if not text:
        raise UsageError("an arm of a trial is empty", "a command line, 'embedded:slots=8', or a URL")
    plan(text.replace(PORT, "1"))  # what is wrong with it is said before anything is measured
    return Arm(text, "command")


def settings_of(text: str) -> dict[str, Any]:
    """``slots=8,cache_prompt=off,extra.name=3`` → fields of Settings, checked.

    Raises:
        UsageError: no such field, or a value of another kind.
    """
    out: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        name, equals, value = (x.strip() for x in part.partition("="))
        name = ALIASES.get(name, name)
        if not equals or (name not in _KINDS and "." not in name):
            known = ", ".join(sorted(_KINDS))
            raise UsageError(f"'{part.strip()}' is not a setting of the embedded engine", f"NAME=VALUE of {known}")
        if name in _KINDS:
            out[name] = _read(name, value, _KINDS[name])
        else:
            extra[name] = _guess(value)
    if extra:
        out["extra"] = extra
    Settings.from_dict(out)  # out of range is said now
    return out


def embedded_text(settings: Mapping[str, Any]) -> str:
    """The other way: how a user writes these settings."""
    flat = {**{k: v for k, v in settings.items() if k != "extra"}, **settings.get("extra", {})}
    words = (f"{k}={('off', 'on')[v] if isinstance(v, bool) else v}" for k, v in flat.items())
    return f"{EMBEDDED}:{','.join(words)}" if flat else EMBEDDED


def command_of(arm: Arm) -> str:
    """Its command line, with a free port where it asks for one."""
    return arm.text.replace(PORT, str(free_port())) if PORT in arm.text else arm.text


def with_flags(command: str, flags: str) -> str:
    """A command line with more flags at its end."""
    return f"{command} {flags}".strip()


def program_of(command: str) -> str:
    """``vllm``, ``sglang`` … of a command line; '' for what is none of those that recipes are written for."""
    words = {w.rpartition("/")[2].partition(".")[0] for w in shlex.split(command)}
    return next((p for p in ("vllm", "sglang", "llama-server") if p in words), "")


def answers_may_differ(a: Arm, b: Arm) -> bool:
    """Whether the arms keep weights or KV in other numbers, as far as they say: then they may answer otherwise."""
    return _numbers(a) != _numbers(b)


def roomy(arm: Arm) -> Arm:
    """The same arm with a context that tasks of some length fit in, where it is ours to choose."""
    if arm.kind != EMBEDDED:
        return arm
    room = max(Settings().ctx_per_slot, arm.settings.get("ctx_per_slot", 0))
    settings = {**arm.settings, "ctx_per_slot": room}
    return Arm(embedded_text(settings), EMBEDDED, settings)


def _numbers(arm: Arm) -> list[object]:
    if arm.kind == "command":
        words = shlex.split(arm.text)
        return [flag_value(words, flag) for flag in _NUMBER_FLAGS]
    return [arm.settings.get(name, default) for name, default in _NUMBER_SETTINGS.items()]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


def _read(name: str, value: str, kind: type) -> Any:
    try:
        return _TRUTH[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        what = {bool: "on or off", int: "a whole number"}.get(kind, "a text")
        raise UsageError(f"{name}={value}: it is {what}", f"such as {name}={'on' if kind is bool else 8}") from None


def _guess(value: str) -> Any:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return _TRUTH.get(value.lower(), value)
