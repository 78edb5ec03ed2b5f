"""Models by name, sourced (``models.toml``), and what a user adds in a TOML file of their own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from whywait.errors import UsageError
from whywait.physics.arch import Arch
from whywait.physics.checked import check_model, of_file
from whywait.physics.tables import load, parse

_FIELDS = {f.name for f in fields(Arch)} - {"name", "source"}
_SUFFIX = re.compile(
    r"[-_](hf|it|base|instruct|chat|thinking|bf16|fp16|fp8|fp8-dynamic|block|dynamic|kv|nvfp4|mxfp4|fp4|awq|gptq|int4|w4a16|w8a8|w8a16|2507|preview)$"
)
#: What such an ending says of the weights.
_WEIGHTS = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp8-dynamic": "fp8", "nvfp4": "nvfp4", "fp4": "fp4",
            "mxfp4": "mxfp4", "awq": "int4", "gptq": "int4", "int4": "int4", "w4a16": "int4", "w8a16": "int8",
            "w8a8": "int8"}  # fmt: skip


def find_arch(name: str) -> Arch:
    """See ``arch.arch_of``."""
    from whywait.physics.configs import arch_of_file

    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        table = load(path)
        with of_file(path):
            found = list(_entries(table).values())
        if len(found) != 1:
            raise UsageError(f"{name} describes {len(found)} models", "name one with --model after giving the file")
        return found[0]
    if path.suffix == ".gguf" or (path.is_dir() and (path / "config.json").is_file()):
        return arch_of_file(path)
    known = by_alias()
    for key in _keys(name):
        if key in known:
            return known[key]
    near = difflib.get_close_matches(_keys(name)[-1], list(known), n=3, cutoff=0.3)
    names = list(dict.fromkeys(known[n].name for n in near))
    raise UsageError(
        f"model {name!r} is not in the catalogue",
        f"nearest: {', '.join(names) or 'none'}; or give a folder with config.json, a .gguf file or a .toml entry",
    )


@cache
def models() -> Mapping[str, Arch]:
    """The catalogue by name."""
    return _entries(_shipped())


@cache
def _shipped() -> Mapping[str, Any]:
    return parse(files("whywait.physics").joinpath("models.toml").read_text("utf-8"), "models.toml")


@cache
def by_alias() -> Mapping[str, Arch]:
    """The catalogue by every name it answers to, in lower case without organisation and suffix."""
    raw = _shipped()
    found: dict[str, Arch] = {}
    for name, arch in models().items():
        for also in (name, *raw[name].get("also", ())):
            for key in _keys(also):
                found.setdefault(key, arch)
    return found


def weights_said(name: str) -> str:
    """The type of weights that the endings of a model's name tell (``…-FP8-dynamic``: fp8); '' where none does."""
    low, said = name.strip().lower(), ""
    while found := _SUFFIX.search(low):
        said = said or _WEIGHTS.get(found[1], "")
        low = low[: found.start()]
    return said


def _keys(name: str) -> list[str]:
    """The name as it stands, without organisation, then without suffixes one by one: the most exact first."""
    low = name.strip().lower()
    keys = [low, low.rsplit("/", 1)[-1]]
    while (short := _SUFFIX.sub("", keys[-1])) != keys[-1]:
        keys.append(short)
    return keys


def _entries(raw: Mapping[str, Any]) -> dict[str, Arch]:
    meta = raw.get("meta", {})
    return {name: arch_from(name, entry, meta) for name, entry in raw.items() if name != "meta" and "hidden" in entry}


def raw(name: str) -> Mapping[str, Any]:
    """The entry in ``models.toml`` of the model of that name."""
    found = parse(files("whywait.physics").joinpath("models.toml").read_text("utf-8"), "models.toml")
    return dict(found[find_arch(name).name])


def arch_from(name: str, entry: Mapping[str, Any], meta: Mapping[str, Any]) -> Arch:
    """From an entry with the keys of ``models.toml``.

    Raises:
        UsageError: a figure is missing or cannot be, or a key is unknown.
    """
    source = str(entry.get("source", "given by the user"))
    where = str(meta.get(source, source)).replace("{name}", name)
    date = f", read {meta['read']}" if "read" in meta else ""
    check_model(name, entry)
    return Arch(name=name, source=where + date, **{k: v for k, v in entry.items() if k in _FIELDS})
