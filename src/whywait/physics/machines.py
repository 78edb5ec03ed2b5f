"""What accelerators can do at most, as data with a source per figure (``machines.toml``), and which of them a device's
name says it is.

Dense rates (no structured sparsity), one device. The figures are those of the makers' data sheets as public collections
give them, read in 2026. Where two differ the lower is taken and ``note`` says so.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from whywait.errors import UsageError
from whywait.physics.checked import check_machine, of_file
from whywait.physics.cost import Machine
from whywait.physics.tables import load, parse

TB, TF, GB = 1e12, 1e12, 1e9
_REPORTED = (
    0.99 * 2**30
)  # bytes a device reports of a nominal "GB": GiB, less what firmware keeps (79.2 of 80 on an H100)
READ_IN = "2026"


@dataclass(frozen=True)
class Accelerator:
    """``words`` are all in a device's name (lower case), ``unless`` none. ``flops`` by the type of the numbers
    multiplied; ``link_bytes_per_s`` is one way of the link to the other devices of a ``node`` (NVLink, xGMI; else
    PCIe), ``nic_bytes_per_s`` to other nodes, ``host_bytes_per_s`` to host memory. ``price_usd_h``: low and high;
    None: not known. ``link``: what that link is (NVLink, xGMI, PCIe, …; empty: not said).
    ``fit``: whose kernels stand for its own (a name in ``fitted.json``), ``scatter`` by how much less sure that is (sd
    of log time)."""

    name: str
    words: tuple[str, ...]
    read_bytes_per_s: float
    flops: Mapping[str, float]
    link_bytes_per_s: float
    source: str
    unless: tuple[str, ...] = ()
    note: str = ""
    memory_bytes: float = 0.0  # 0: not known
    node: int = 8
    nic_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    tdp_w: float | None = None
    price_usd_h: tuple[float, float] | None = None
    fit: str = ""
    scatter: float = 0.3
    also: tuple[str, ...] = ()
    link: str = ""

    def __hash__(self) -> int:  # ``flops`` is a mapping; equal ones have the same name
        return hash(self.name)


def accelerator_of(name: str, entry: Mapping[str, Any]) -> Accelerator:
    """From an entry with the keys of ``machines.toml``.

    Raises:
        UsageError: a figure is missing or cannot be, or a key is unknown.
    """
    check_machine(name, entry)
    return _accelerator(name, entry)


def _accelerator(name: str, entry: Mapping[str, Any]) -> Accelerator:
    def scaled(key: str, unit: float) -> float | None:
        return float(entry[key]) * unit if key in entry else None

    price = entry.get("price_usd_h")
    return Accelerator(
        name, tuple(entry.get("words", ())), float(entry["read_tbs"]) * TB,
        {k: float(v) * TF for k, v in entry["flops_tf"].items()}, float(entry.get("link_gbs", 0)) * GB,
        str(entry.get("source", "given by the user")), tuple(entry.get("unless", ())), str(entry.get("note", "")),
        float(entry["memory_gb"]) * _REPORTED, int(entry.get("node", 8)), scaled("nic_gbs", GB),
        scaled("host_gbs", GB), scaled("tdp_w", 1.0), (float(price[0]), float(price[-1])) if price else None,
        str(entry.get("fit", "")), float(entry.get("scatter", 0.3)), tuple(entry.get("also", ())),
        str(entry.get("link", "")),
    )  # fmt: skip


@cache
def _shipped() -> Mapping[str, Any]:
    return parse(files("whywait.physics").joinpath("machines.toml").read_text("utf-8"), "machines.toml")


SOURCES: Mapping[str, str] = _shipped()["meta"]["sources"]
#: All machines; ``ACCELERATORS`` are those that a device's own name can mean or a data sheet describes.
MACHINES: tuple[Accelerator, ...] = tuple(_accelerator(n, e) for n, e in _shipped().items() if n != "meta")
ACCELERATORS: tuple[Accelerator, ...] = tuple(a for a in MACHINES if a.words)


def find(name: str) -> Accelerator | None:
    """The accelerator that a device calls itself (``NVIDIA H100 80GB HBM3``, ``AMD Instinct MI300X``); None if the
    table has none of that name: no guess."""
    words = name.lower().replace("-", " ").replace("_", " ").replace("gaudi3", "gaudi 3").split()

    def has(word: str) -> bool:
        # What follows may name a form of it (mi300xhf), never another number: an H1000 is no H100.
        return any(w == word or (len(word) > 3 and w.startswith(word) and not w[len(word)].isdigit()) for w in words)

    for a in ACCELERATORS:
        if all(has(w) for w in a.words) and not any(has(w) or w in words for w in a.unless):
            return a
    return None


def machine(name: str) -> Accelerator:
    """By the name a user types (``h100``, ``mi300x``, ``b200``), a device's own name, or a ``.toml`` file with one
    entry like those of ``machines.toml``.

    Raises:
        UsageError: none of these; names the nearest.
    """
    if name.endswith(".toml") and Path(name).is_file():
        table = load(Path(name))
        with of_file(name):
            entries = [accelerator_of(n, e) for n, e in table.items() if n != "meta" and isinstance(e, Mapping)]
        if len(entries) != 1:
            raise UsageError(f"{name} describes {len(entries)} machines", "one entry per file")
        return entries[0]
    low = name.strip().lower()
    names = {known.lower(): a for a in MACHINES for known in (*a.also, a.name)}
    found = names.get(low) or names.get(low.replace(" ", "-"))
    if found is None and "," in low:
        raise UsageError(f"{name!r} is more than one machine", "give one; simulate each of the others on its own")
    found = found or find(name)
    if found is None:
        near = difflib.get_close_matches(low, list(names), n=3, cutoff=0.3)
        hint = ", ".join(dict.fromkeys(names[n].also[0] for n in near))
        raise UsageError(
            f"machine {name!r} is not in the catalogue", f"nearest: {hint or 'none'}; or give a .toml entry"
        )
    return found


@cache
def measured_on(fit: str) -> Accelerator | None:
    """The machine whose own kernels ``fit`` names: the one for which it does not stand in."""
    return next((a for a in MACHINES if a.fit == fit and a.scatter == 0), None)


def sources_in_full(a: Accelerator) -> str:
    """Where its figures are from, with the addresses that the short names of ``machines.toml`` stand for."""
    parts = [part.strip() for part in a.source.split(",")]
    priced = ["price"] if a.price_usd_h else []
    return "; ".join(f"{p}: {SOURCES[p]}" if p in SOURCES else p for p in (*parts, *priced))


def raw(name: str) -> Mapping[str, Any]:
    """The entry in ``machines.toml`` of the machine of that name."""
    found: Mapping[str, Any] = _shipped()[machine(name).name]
    return found


def machine_of(names: Iterable[str], dtype: str = "bf16") -> Machine | None:
    """The devices together, at their data sheets' rates for weights of ``dtype``; None unless all are known and
    alike."""
    found = [find(n) for n in names]
    if not found or any(a is None or a != found[0] for a in found):
        return None
    a = found[0]
    assert a is not None
    kind = dtype if dtype in a.flops else "bf16"
    source = f"data sheet of {len(found)} × {a.name} ({kind} dense; {a.source}, read {READ_IN})"
    return Machine(a.read_bytes_per_s * len(found), a.flops[kind] * len(found), source, True)
