"""One side of a paired trial, as a user writes it: a command line, embedded engines with settings, or a URL.

``vllm serve MODEL --port {port}`` · ``embedded`` · ``embedded:slots=8,cache_prompt=off`` · ``http://127.0.0.1:8000`` ·
``split:prefill=1,decode=1,slots=4,delay_ms=0`` · ``replicas:2,slots=4``. ``{port}`` becomes a free port; settings are
the fields of ``lab.settings.Settings`` (``cpus=all``, ``cpus=0-3+8``), or any other parameter of llama.cpp by its
dotted name (``speculative.draft.n_max=8``; one without a dot as ``llama.numa=1``); of a split and of replicas also
those of ``lab.disagg.Fleet``.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from whywait.core import secrets
from whywait.errors import UsageError
from whywait.lab.command import flag_value, plan
from whywait.lab.cpus import allowed_cpus, parse_cpu_list
from whywait.lab.disagg import OWN, REPLICAS, Fleet
from whywait.lab.settings import Settings

EMBEDDED = "embedded"
PORT = "{port}"
TOP = "llama."  # before a parameter of llama.cpp without a dot: a misspelt setting of ours must not pass for one
ALIASES: Final[Mapping[str, str]] = {"parallel": "slots", "ctx": "ctx_per_slot", "np": "slots"}
_KINDS: Final = {f.name: type(f.default) for f in dataclasses.fields(Settings) if f.name != "extra"}
#: What says in which numbers an engine keeps weights and KV: settings of the embedded one with their defaults, and
#: flags of vLLM, SGLang and llama-server.
_NUMBER_SETTINGS: Final = {f: getattr(Settings(), f) for f in ("weights", "cache_type_k", "cache_type_v")}
_NUMBER_FLAGS: Final = ("--quantization", "-q", "--dtype", "--kv-cache-dtype", "--cache-type-k", "--cache-type-v",
                        "-ctk", "-ctv")  # fmt: skip
_TRUTH: Final[Mapping[str, bool]] = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
_SAID: Final[Mapping[type, tuple[str, str]]] = {
    bool: ("on or off", "on"),
    int: ("a whole number", "8"),
    float: ("a number", "0.5"),
    tuple: ("'all' or CPUs", "0-3+8"),
}


@dataclass(frozen=True)
class Arm:
    """``kind`` is command, embedded, split, replicas or url; ``text`` is what the user wrote."""

    text: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def restarts(self) -> bool:
        """Whether each of its rounds gets a process of its own."""
        return self.kind != "url"


def arm_of(text: str) -> Arm:
    """Secrets in it (a key in a command line, in a URL) are hidden from here on; see ``core.secrets``.

    Raises:
        UsageError: it is none of these, or has a setting that does not exist.
    """
    text = text.strip()
    secrets.hide_command(text)  # what is said of it, and kept, is said without
    if text.startswith(("http://", "https://", "unix:")):
        return _url(text)
    name, colon, rest = text.partition(":")
    if name.strip() == EMBEDDED:
        return Arm(text, EMBEDDED, settings_of(rest) if colon else {})
    if name.strip() in OWN:
        return Arm(text, name.strip(), fleet_of(name.strip(), rest))
    if not text:
        raise UsageError("an arm of a trial is empty", "a command line, 'embedded:slots=8', or a URL")
    plan(text.replace(PORT, "1"))  # what is wrong with it is said before anything is measured
    return Arm(text, "command")


def _url(text: str) -> Arm:
    """What is wrong with it is said before anything is measured, be it the second arm's.

    Raises:
        UsageError: it carries a password, or is no URL.
    """
    secrets.hide_url(text)
    secrets.hide_query(text)
    try:
        parts = urlsplit(text)
        user, port = parts.username, parts.port  # of a port that is no number it complains
        usable = parts.scheme == "unix" or bool(parts.hostname and port != 0)
    except ValueError:
        user, usable = None, False
    if user is not None:
        raise UsageError("a URL must not carry a password", "give the key by --api-key-file or WHYWAIT_API_KEY")
    if not usable or not text.isprintable():
        raise UsageError(f"{text!r} is not a URL", "use http://host:port")
    return Arm(text, "url")


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
            extra[name.removeprefix(TOP)] = _guess(value)
    if extra:
        out["extra"] = extra
    Settings.from_dict(out)  # out of range is said now
    return out


def fleet_of(kind: str, text: str) -> dict[str, Any]:
    """``prefill=1,decode=1,slots=4,…`` or ``2,slots=4,…`` → fields of Fleet and of its engines' Settings, checked.

    Raises:
        UsageError: no such field, or a value of another kind.
    """
    own, rest = OWN[kind], []
    out: dict[str, Any] = {"replicas": 2} if kind == REPLICAS else {}
    for i, part in enumerate(text.split(",")):
        name, equals, value = (x.strip() for x in part.partition("="))
        if kind == REPLICAS and not i and re.fullmatch("[0-9]+", name) and not equals:
            out["replicas"] = int(name)
        elif name in own and equals:
            out[name] = _read(name, value, own[name])
        elif not name or "." in name or ALIASES.get(name, name) in _KINDS:
            rest.append(part)
        else:
            raise UsageError(f"'{part.strip()}' is not a setting of {kind}", f"NAME=VALUE of {', '.join(own)}, or one "
                             "of the embedded engine")  # fmt: skip
    out |= settings_of(",".join(rest))
    if kind == REPLICAS and not out["replicas"]:
        raise UsageError("replicas:0 serve nobody", "replicas:2")
    Fleet.from_dict(out)
    return out


def varied(text: str, name: str, value: str) -> str:
    """The arm with one setting at another value: ``{name}`` in a command line, else a setting of embedded engines.

    Raises:
        UsageError: it has no such setting.
    """
    place = "{" + name + "}"
    if place in text and name != "port":
        return text.replace(place, value)
    kind, _, rest = text.partition(":")
    if kind.strip() not in (EMBEDDED, *OWN):
        raise UsageError(f"the arm {text!r} has nothing to vary by the name {name!r}", f"write {place} where it goes")
    kept = [p for p in rest.split(",") if p.strip() and ALIASES.get(x := p.partition("=")[0].strip(), x) != name]
    made = f"{kind}:{','.join([*kept, f'{name}={value}'])}"
    arm_of(made)
    return made


def embedded_text(settings: Mapping[str, Any]) -> str:
    """The other way: how a user writes these settings."""
    extra = {k if "." in k else TOP + k: v for k, v in settings.get("extra", {}).items()}
    flat = {**{k: v for k, v in settings.items() if k != "extra"}, **extra}
    words = (f"{k}={_word(v)}" for k, v in flat.items())
    return f"{EMBEDDED}:{','.join(words)}" if flat else EMBEDDED


def _word(value: Any) -> Any:
    if isinstance(value, tuple):  # CPUs; a comma would end the setting
        return "+".join(map(str, value))
    return ("off", "on")[value] if isinstance(value, bool) else value


def command_of(arm: Arm) -> str:
    """Its command line, with a free port where it asks for one."""
    return arm.text.replace(PORT, str(free_port())) if PORT in arm.text else arm.text


def with_flags(command: str, flags: str) -> str:
    """A command line with more flags at its end."""
    return f"{command} {flags}".strip()


def program_of(command: str) -> str:
    """``vllm``, ``sglang`` … of a command line; '' for what is none of those that recipes are written for."""
    secrets.hide_command(command)
    try:
        words = {w.rpartition("/")[2].partition(".")[0] for w in shlex.split(command)}
    except ValueError as exc:
        raise UsageError(f"cannot read the command: {exc}", "check its quotes") from None
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
        if kind is tuple:
            return allowed_cpus() if value == "all" else tuple(parse_cpu_list(value.replace("+", ",")))
        return _TRUTH[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        what, example = _SAID.get(kind, ("a text", "f16"))
        raise UsageError(f"{name}={value}: it is {what}", f"such as {name}={example}") from None


def _guess(value: str) -> Any:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return _TRUTH.get(value.lower(), value)
