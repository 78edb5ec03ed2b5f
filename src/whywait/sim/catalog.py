"""Machines and models by name: those that ship with the package, and a user's own from a TOML file, which go first.

The file holds ``[machines.NAME]`` and ``[models.NAME]`` with the keys of ``physics/machines.toml`` and ``models.toml``;
``base = "h200"`` takes all that is not said from an entry that ships.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whywait.errors import UsageError
from whywait.physics import catalog, machines
from whywait.physics.arch import Arch, arch_of
from whywait.physics.checked import of_file
from whywait.physics.machines import Accelerator
from whywait.physics.tables import load

_machines: dict[str, Accelerator] = {}
_models: dict[str, Arch] = {}


def use(path: str | None) -> None:
    """Take a user's entries from here on, in place of any taken before (None: none).

    Raises:
        UsageError: not readable, or an entry is not what it should be; the message names it.
    """
    _machines.clear()
    _models.clear()
    if not path:
        return
    raw = load(Path(path))
    unknown = set(raw) - {"machines", "models"}
    if unknown:
        raise UsageError(f"{path}: unknown table {sorted(unknown)[0]!r}", "use [machines.NAME] and [models.NAME]")
    with of_file(path):
        for name, entry in _tables(raw, "machines", path):
            _machines[name.lower()] = machines.accelerator_of(name, _based(entry, machines.raw, path))
        for name, entry in _tables(raw, "models", path):
            _models[name.lower()] = catalog.arch_from(name, _based(entry, catalog.raw, path), {})


def machine_named(name: str) -> Accelerator:
    """
    Raises:
        UsageError: no such machine; the nearest are named.
    """
    return _machines.get(name.strip().lower()) or machines.machine(name)


def model_named(name: str) -> Arch:
    """
    Raises:
        UsageError: no such model; the nearest are named.
    """
    return _models.get(name.strip().lower()) or arch_of(name)


def all_machines() -> list[Accelerator]:
    """The user's own first."""
    own = list(_machines.values())
    return [*own, *(m for m in machines.MACHINES if m.name not in {o.name for o in own})]


def all_models() -> list[Arch]:
    own = list(_models.values())
    return [*own, *(m for m in catalog.models().values() if m.name not in {o.name for o in own})]


def _tables(raw: Mapping[str, Any], key: str, path: str) -> list[tuple[str, Mapping[str, Any]]]:
    found = raw.get(key, {})
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        raise UsageError(f"{path}: {key} is not a table of tables", f"begin each entry with [{key}.NAME]")
    return list(found.items())


def _based(entry: Mapping[str, Any], shipped: Any, path: str) -> dict[str, Any]:
    """``entry`` on top of the one it is based on; names and sources of that one are not its own."""
    own = {"source": f"given by the user in {path}", **entry}
    base = own.pop("base", None)
    if base is None:
        return own
    under = {k: v for k, v in shipped(str(base)).items() if k not in ("words", "unless", "also", "source", "note")}
    return {**under, **own}
