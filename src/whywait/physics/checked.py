"""What an entry of a machine or model must be before it is used: every figure a number that can be, every key known.

The keys are those of ``machines.toml`` and ``models.toml``. A refusal names the entry, the key and what it should be;
:func:`of_file` puts the file's name before it.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn

from whywait.errors import UsageError
from whywait.physics.arch import Arch
from whywait.physics.dtypes import known

_MOST = 1e15  # no figure of a data sheet or model is above; a product of several still fits a float
_MACHINE = {"read_tbs": True, "memory_gb": True, "link_gbs": False, "nic_gbs": False, "host_gbs": False, "tdp_w": False}
_RATES = ("bf16", "fp8", "fp4")
_TEXTS = ("source", "note", "fit", "link")
_LISTS = ("words", "unless", "also")
_MACHINE_KEYS = (*_MACHINE, "flops_tf", "node", "price_usd_h", "scatter", *_TEXTS, *_LISTS)
_MODEL_KEYS = (*(f.name for f in fields(Arch) if f.name != "name"), "also")
_NEEDED = tuple(f.name for f in fields(Arch) if f.default is MISSING and f.name != "name")
_WHOLE = tuple(f.name for f in fields(Arch) if f.type == "int")
_SWITCHES = tuple(f.name for f in fields(Arch) if f.type == "bool")
#: Of a model: the first is at most the second.
_PARTS = (("kv_heads", "heads"), ("chosen", "experts"), ("dense_layers", "layers"), ("window_layers", "layers"),
          ("linear_layers", "layers"))  # fmt: skip
#: The first, where it is above 0, needs the others above 0.
_TOGETHER = (("experts", ("chosen", "expert_inter")), ("window_layers", ("window",)), ("latent", ("value_size",)),
             ("linear_layers", ("linear_in", "linear_out")), ("index_top", ("index_size",)))  # fmt: skip


@contextlib.contextmanager
def of_file(path: str | Path) -> Iterator[None]:
    """A refusal inside says that it is of ``path``."""
    try:
        yield
    except UsageError as exc:
        if exc.message.startswith(str(path)):
            raise
        raise UsageError(f"{path}: {exc.message}", exc.hint) from None


def check_machine(name: str, entry: Mapping[str, Any]) -> None:
    """
    Raises:
        UsageError: a key is unknown or missing, or its value cannot be.
    """
    who = f"machine {name!r}"
    _known(who, entry, _MACHINE_KEYS)
    for key, needed in _MACHINE.items():
        if key in entry:
            _above(who, key, entry[key])
        elif needed:
            _refuse(who, key, "is missing")
    rates = entry.get("flops_tf")
    if not isinstance(rates, Mapping) or "bf16" not in rates:
        _refuse(who, "flops_tf", "is no table with bf16", "such as flops_tf = { bf16 = 989, fp8 = 1979 }")
    _known(f"{who}: flops_tf", rates, _RATES)
    for kind, rate in rates.items():
        _above(who, f"flops_tf.{kind}", rate)
    if "node" in entry:
        _whole(who, "node", entry["node"], 1)
    if "price_usd_h" in entry:
        _price(who, entry["price_usd_h"])
    if "scatter" in entry and not (_number(entry["scatter"]) and 0 <= entry["scatter"] <= 3):  # sd of log time
        _refuse(who, "scatter", f"= {entry['scatter']!r} is not a number from 0 to 3")
    _texts(who, entry)
    if entry.get("fit"):
        _fit(who, str(entry["fit"]))


def check_model(name: str, entry: Mapping[str, Any]) -> None:
    """
    Raises:
        UsageError: a key is unknown or missing, or its value cannot be.
    """
    who = f"model {name!r}"
    _known(who, entry, _MODEL_KEYS)
    for key in _NEEDED:
        if key not in entry:
            _refuse(who, key, "is missing", f"a model needs {', '.join(_NEEDED)}")
    for key in _WHOLE:
        if key in entry:
            _whole(who, key, entry[key], 1 if key in _NEEDED else 0)
    for key in _SWITCHES:
        if key in entry and not isinstance(entry[key], bool):
            _refuse(who, key, f"= {entry[key]!r} is neither true nor false")
    _texts(who, entry)
    for part, whole in _PARTS:
        if entry.get(part, 0) > entry.get(whole, 0):
            _refuse(who, part, f"= {entry[part]} is more than {whole} = {entry.get(whole, 0)}")
    both = entry.get("window_layers", 0) + entry.get("linear_layers", 0)
    if both > entry["layers"]:
        _refuse(who, "window_layers", f"and linear_layers are {both} of layers = {entry['layers']}")
    for key, others in _TOGETHER:
        for other in others:
            if entry.get(key) and not entry.get(other):
                _refuse(who, other, f"is missing, which {key} = {entry[key]} needs")
    for key in ("native", "native_experts"):
        said = entry.get(key)
        if said is not None and not (isinstance(said, str) and (known(said) or (key == "native_experts" and not said))):
            _refuse(who, key, f"= {said!r} is no type of numbers", "such as bf16, fp8, fp8_block, mxfp4, int4")


def _refuse(who: str, key: str, why: str, hint: str = "") -> NoReturn:
    table = "machines" if who.startswith("machine") else "models"
    raise UsageError(f"{who}: {key} {why}", hint or f"keys as in physics/{table}.toml")


def _known(who: str, entry: Mapping[str, Any], keys: Iterable[str]) -> None:
    names = list(keys)
    for key in entry:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1, 0.5)
            _refuse(who, repr(key), "is not known", f"nearest: {near[0]}" if near else f"one of {', '.join(names)}")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _above(who: str, key: str, value: Any) -> None:
    if not (_number(value) and 0 < value < _MOST and math.isfinite(value)):
        _refuse(who, key, f"= {value!r} is not a number above 0")


def _whole(who: str, key: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        _refuse(who, key, f"= {value!r} is not a whole number of at least {least}")


def _price(who: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) not in (1, 2):
        _refuse(who, "price_usd_h", f"= {value!r} is not low and high", "such as price_usd_h = [2.5, 6]")
    for each in value:
        _above(who, "price_usd_h", each)
    if value[0] > value[-1]:
        _refuse(who, "price_usd_h", f"= {value!r} has its low above its high", "the low one first")


def _texts(who: str, entry: Mapping[str, Any]) -> None:
    for key in _TEXTS:
        if key in entry and not isinstance(entry[key], str):
            _refuse(who, key, f"= {entry[key]!r} is no text")
    for key in _LISTS:
        said = entry.get(key, [])
        if not isinstance(said, list) or not all(isinstance(v, str) and v for v in said):
            _refuse(who, key, f"= {said!r} is no list of names")


def _fit(who: str, name: str) -> None:
    from whywait.physics.fitted import fitted  # it needs machines, which are built before they can be checked

    names = sorted({*fitted()["machines"], *fitted()["plain"]} - {"default"})
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, 0.5)
        _refuse(who, "fit", f"= {name!r} is none of the fitted machines",
                f"nearest: {near[0]}" if near else f"one of {', '.join(names)}; or leave it out")  # fmt: skip
