"""Candidates of a plan: machines × engines × layouts × techniques × how many, from flags or a TOML file.

Part of the application layer. A *shape* is the least unit that can be bought more of: one engine over the devices of
its layout, or a split pair; a candidate is so many of a shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whywait import simulating
from whywait.errors import UsageError
from whywait.physics.arch import Arch
from whywait.physics.dtypes import bytes_of
from whywait.physics.layout import Precision
from whywait.physics.tables import load
from whywait.sim import techniques
from whywait.sim.capacity import capacity, check_layout
from whywait.sim.catalog import machine_named
from whywait.sim.deployment import Deployment
from whywait.sim.engines import engine_of
from whywait.twin.told import Told

#: Tried where nobody says which: as published, narrower KV, narrower weights, both.
USUAL = ("", "fp8-kv", "fp8-weights", "fp8-weights,fp8-kv", "fp4-weights,fp8-kv")
SPLITS = ("1:1", "1:2", "2:1")
#: Engines that run on one maker's devices only, and the links that tell other makers' (AMD, Gaudi, TPU).
ONLY = {"trtllm": "NVIDIA"}
OTHERS = ("xGMI", "RoCE", "ICI")
_LISTS = ("machines", "engines", "layouts", "apply", "counts")
_KEYS = (*_LISTS, "model", "candidate", "precision")
_ONE = ("machine", "engine", "layout", "apply", "count")


@dataclass(frozen=True)
class Space:
    """What to try; an empty list means: the usual. ``single``: candidates named one by one, (machine, engine, layout,
    techniques, devices or None)."""

    model: str
    machines: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("vllm",)
    layouts: tuple[str, ...] = ()
    apply: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    precision: str | None = None
    single: tuple[tuple[str, str, str, str, int | None], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "single": [list(s) for s in self.single]}


@dataclass(frozen=True)
class Shape:
    """``deployment`` has one replica; ``counts`` are the numbers of replicas to try (empty: any). ``told``: what a run
    told of it, whose median the deployment then has."""

    name: str
    machine: str
    engine: str
    layout: str
    apply: str
    deployment: Deployment
    counts: tuple[int, ...] = ()
    told: Told | None = None

    @property
    def devices(self) -> int:
        return self.deployment.devices

    def times(self, n: int) -> Deployment:
        return dataclasses.replace(self.deployment, replicas=n)

    @property
    def group(self) -> str:
        """What shares its draws: a machine under an engine."""
        return f"{self.deployment.machine.name}, {self.engine}"


def space_of(raw: Mapping[str, Any], where: str = "candidates") -> Space:
    """From the tables of a file: ``model, machines, engines, layouts, apply, counts, precision`` and
    ``[[candidate]]`` with ``machine, engine, layout, apply, count``.

    Raises:
        UsageError: an unknown key, or a value of another kind.
    """
    _known(raw, _KEYS, where)
    if not isinstance(raw.get("candidate", []), list):
        raise UsageError(f"{where}: candidate is not a list of tables", "begin each with [[candidate]]")
    single = []
    for i, one in enumerate(raw.get("candidate", ())):
        at = f"{where}: candidate {i + 1}"
        if not isinstance(one, Mapping):
            raise UsageError(f"{at} is not a table", "begin each with [[candidate]]")
        _known(one, _ONE, at)
        if not one.get("machine"):
            raise UsageError(f"{at}: machine is missing", 'such as machine = "h100"')
        count = one.get("count")
        single.append((_text(one["machine"]), _text(one.get("engine", "vllm")), _text(one.get("layout", "")),
                       _text(one.get("apply", "")), None if count is None else _count(count, at)))  # fmt: skip
    lists = {k: _list(raw[k], f"{where}: {k}") for k in _LISTS if k in raw}
    made: dict[str, Any] = {k: tuple(map(_text, v)) for k, v in lists.items() if k != "counts"}
    made["counts"] = tuple(_count(c, f"{where}: counts") for c in lists.get("counts", ()))
    precision = raw.get("precision")
    return Space(_text(raw.get("model", "")), precision=None if precision is None else _text(precision),
                 single=tuple(single), **made)  # fmt: skip


def space_from(raw: Mapping[str, Any]) -> Space:
    """From what :meth:`Space.as_dict` gives, where lists may be empty.

    Raises:
        UsageError: see :func:`space_of`.
        KeyError, TypeError, ValueError: it is something else.
    """
    raw = {k: list(v) if isinstance(v, tuple) else v for k, v in raw.items()}  # of one that was never written
    single = [dict(zip(_ONE, one, strict=True)) for one in raw["single"]]
    tables = [{k: v for k, v in one.items() if v is not None} for one in single]
    rest = {k: v for k, v in raw.items() if k != "single" and v != [] and (k, v) != ("precision", None)}
    empty: dict[str, Any] = {k: () for k in _LISTS if raw[k] == []}
    return dataclasses.replace(space_of({**rest, "candidate": tables}, "inputs.space"), **empty)


def read_space(path: str) -> Space:
    """
    Raises:
        UsageError: not readable, or see :func:`space_of`.
    """
    return space_of(load(Path(path), "docs/plan.md"), path)


def shapes_of(space: Space) -> tuple[list[Shape], list[dict[str, str]]]:
    """All shapes, and those that cannot be, each with the reason.

    Raises:
        UsageError: a machine, an engine or a technique is unknown, or there is nothing to try.
    """
    asked = list(_asked(space))
    if not asked:
        raise UsageError("which machines?", "--machines h100,h200,mi300x, or a file with --candidates")
    found: dict[str, Shape] = {}
    refused: dict[str, dict[str, str]] = {}
    for machine, engine, layout, apply, count in asked:
        machine_named(machine), engine_of(engine)
        techniques.parse(apply), techniques.parse(layout)
        name = _named(machine, engine, layout, apply)
        try:
            shape = _shape(space, name, (machine, engine, layout, apply))
            counts = _replicas(shape, space.counts if count is None else (count,))
            before = found.get(name)
            counts = tuple(sorted({*counts, *(before.counts if before else ())}))
            found[name] = dataclasses.replace(shape, counts=counts)
        except UsageError as exc:
            hint = f" ({exc.hint})" if exc.hint else ""
            refused[name] = {"name": name, "why": exc.message + hint}
    return list(found.values()), list(refused.values())


def _asked(space: Space) -> Iterable[tuple[str, str, str, str, int | None]]:
    yield from space.single
    for machine in space.machines:
        for engine in space.engines:
            for layout in space.layouts or _layouts(space, machine, engine):
                for apply in space.apply or _usual(space, machine):
                    yield machine, engine, layout, apply, None


def _usual(space: Space, machine: str) -> list[str]:
    """Of the usual techniques those that change something here."""
    has = machine_named(machine).flops
    d = simulating.deployment_of(machine, space.model, precision=space.precision)
    stored = bytes_of(d.precision.weights)
    able = {"fp8-weights": "fp8" in has and stored > 1.1, "fp4-weights": "fp4" in has and stored > 0.7}
    return [a for a in USUAL if all(able.get(t, True) for t in a.split(","))]


def _layouts(space: Space, machine: str, engine: str) -> list[str]:
    """Every tp within a node, with experts spread too where there are any; and splits of the two least that hold the
    model."""
    device, out, fit = machine_named(machine), [], []
    tps = [tp for tp in (1, 2, 4, 8, 16) if tp <= max(device.node, 1)]
    for tp in tps:
        d = simulating.deployment_of(machine, space.model, engine, precision=space.precision, layout=f"tp={tp}")
        out.append(f"tp={tp}")
        if d.model.experts and tp > 1:
            out.append(f"tp={tp},ep={tp}")
        try:
            check_layout(d, d.layout)
            capacity(d, 4096.0)
            fit.append(tp)
        except UsageError:
            continue
    if engine != "static":
        out += [f"tp={tp},pd={split}" for tp in fit[:2] for split in SPLITS]
    if not fit and len(tps) > 1:
        out += [f"tp={tps[-1]},pp={pp}" for pp in (2, 4)]
    return out


def _shape(space: Space, name: str, of: tuple[str, str, str, str]) -> Shape:
    machine, engine, layout, apply = of
    for technique, _ in techniques.parse(f"{layout},{apply}"):
        if technique.name in ("replicas", "machine", "engine"):
            raise UsageError(f"a candidate's {technique.name} is not said by --apply or --layouts",
                             "counts, machines and engines have lists of their own")  # fmt: skip
    d = simulating.deployment_of(machine, space.model, engine, precision=space.precision, layout=layout)
    if d.engine.policy in ONLY and d.machine.link in OTHERS:
        raise UsageError(f"{engine} runs on {ONLY[d.engine.policy]} devices only")
    d = techniques.apply(apply, d)
    check_layout(d, d.layout)
    capacity(d)
    return Shape(name, d.machine.name, engine, layout, apply, d)


def _replicas(shape: Shape, counts: Sequence[int]) -> tuple[int, ...]:
    if not counts:
        return ()
    able = tuple(c // shape.devices for c in counts if c % shape.devices == 0)
    if not able:
        many = ", ".join(str(c) for c in counts)
        raise UsageError(f"{many} devices cannot be dealt out to engines of {shape.devices}", "other counts")
    return able


def _named(machine: str, engine: str, layout: str, apply: str) -> str:
    parts = [machine_named(machine).name, layout or "tp=1", apply, "" if engine == "vllm" else engine]
    return " ".join(p for p in parts if p)


def _known(raw: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    extra = sorted(set(raw) - set(keys))
    if extra:
        raise UsageError(f"{where}: unknown key {extra[0]!r}", f"known keys: {', '.join(keys)}")


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where} is not a list", 'such as ["tp=4", "tp=8"]')
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{value!r} is not a text", 'such as "tp=4"')
    return value.strip()


def _count(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 100_000:
        raise UsageError(f"{where}: {value!r} is not a number of devices")
    return value


def low_precision(d: Deployment) -> tuple[str, ...]:
    """What of ``d`` is stored narrower than the model was published: techniques by name, for which a test of the
    answers is asked."""
    return narrower(d.precision, d.model)


def narrower(p: Precision, a: Arch) -> tuple[str, ...]:
    """:func:`low_precision` of numbers in ``p`` of the model ``a``."""
    out = []
    if bytes_of(p.weights) < 0.95 * bytes_of(a.native):
        out.append(f"{_plain(p.weights)}-weights")
    experts = p.experts or p.weights
    if a.experts and bytes_of(experts) < 0.95 * bytes_of(a.native_experts or a.native) and not out:
        out.append(f"{_plain(experts)}-experts")
    if bytes_of(p.kv) < 2.0:
        out.append(f"{_plain(p.kv)}-kv")
    return tuple(out)


def _plain(dtype: str) -> str:
    return {"nvfp4": "fp4", "mxfp4": "fp4", "fp8_block": "fp8", "int4_wo": "int4"}.get(dtype, dtype)
