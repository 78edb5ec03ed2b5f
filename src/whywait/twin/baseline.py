"""A measured Run as the simulator's input: which deployment it was, and the very requests it was asked.

Part of the application layer: it reads what the session left in the manifest and rebuilds the recipe's schedule. What
cannot be known from the run is asked for (``--baseline``), what is taken from an engine's defaults is named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whywait.analyze.counters import delta, gauge
from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.judge.facts_requests import reuse
from whywait.physics.arch import Arch, arch_of
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import Accelerator, find, machine
from whywait.physics.models import BYTES, Shape
from whywait.sim.deployment import Deployment, Engine, Speculation
from whywait.sim.engines import engine_of
from whywait.sim.techniques import TECHNIQUES, apply, nearest, parse
from whywait.twin.spread import SPREADS, Fact, check_fits, serving, spread_of

#: What an x86 core of a server does where nothing was measured: bytes/s from memory and flops/s in 32 bits. Guesses:
#: the priors around them are wide.
CORE_BYTES_PER_S, CORE_FLOPS_PER_S = 12e9, 80e9
CPU_TOKEN_BUDGET = 2048  # --max-num-batched-tokens of vLLM's API server where no large accelerator is found
BUDGET = "tokens per step"
#: What a technique in ``--baseline`` says, so that it is no longer assumed.
GIVEN_BY = {BUDGET: "token-budget", "sequences at once": "max-seqs", "devices": "tp", "prefix cache": "prefix-cache"}
OFFERED = 0.1  # of the prompt tokens that a cache could have found: with less, none found says nothing
SAME_SIZE = 0.15  # a catalogue model of the run's name whose weights differ by more is another model
_OWN = ("model", "machine", "engine", "kv-tokens", "block")
_HEAD_SIZES = (128, 64, 96, 80, 32, 48, 16)
_VOCAB = 32000  # of a model of which only totals are known and whose tables are tied


@dataclass(frozen=True)
class Baseline:
    """``cpu``: the engine computes on this machine's processor, whose rates are measured or guessed."""

    deployment: Deployment
    facts: tuple[Fact, ...]
    cpu: bool


def baseline_of(run: Run, given: str = "") -> Baseline:
    """The deployment that ``run`` measured; ``given`` is the text of ``--baseline``: ``model=…,machine=…,engine=…,
    kv-tokens=…,block=…`` and techniques as in ``--apply`` (``tp=4,max-seqs=128,fp8-kv``).

    Raises:
        UsageError: engine, model or machine cannot be told, or what is given makes no sense; the hint names the key.
    """
    keys, techniques = _given(given)
    facts: list[Fact] = []
    engine = _engine(run, keys, facts)
    device, names, cpu = _machine(run, keys, facts)
    arch, precision = _model(run, keys, facts, engine.policy)
    said = {t.name for t, _ in parse(techniques)}
    spread = spread_of(run, names, cpu or bool(said & set(SPREADS)))
    facts += spread.facts
    engine = _limits(run, engine, cpu, spread.engines, facts)
    if "block" in keys:
        engine = dataclasses.replace(engine, block=_whole(keys, "block"))
    engine = _kv(run, engine, keys, spread.engines, facts)
    d = Deployment(device, arch, precision, spread.layout, spread.replicas, engine, spread.routing,
                   speculation=_speculation(run, facts), split=spread.split)  # fmt: skip
    if techniques:
        kept = d.engine.kv_blocks  # the run's own count, whatever layout is said to have given it
        d = apply(techniques, d)
        d = dataclasses.replace(d, applied=(), engine=dataclasses.replace(d.engine, kv_blocks=kept))
        facts = [f for f in facts if GIVEN_BY.get(f.what) not in said]
        facts.append(Fact("also", techniques, "given"))
    if not cpu:
        check_fits(d)
    return Baseline(d, tuple(facts), cpu)


def _given(text: str) -> tuple[dict[str, str], str]:
    keys: dict[str, str] = {}
    rest = []
    for part in (p.strip() for p in text.split(",") if p.strip()):
        name, equals, value = part.partition("=")
        if name.strip() in _OWN:
            if not equals or not value.strip():
                raise UsageError(f"--baseline: {name} needs a value", f"{name}=…")
            keys[name.strip()] = value.strip()
        elif name.strip().partition(":")[0] in TECHNIQUES:
            rest.append(part)
        else:
            near = nearest(name.strip(), (*_OWN, *TECHNIQUES))
            raise UsageError(f"--baseline has no {name.strip()!r}",
                             f"its keys: {', '.join(_OWN)}; and techniques in use. Nearest: {near}")  # fmt: skip
    return keys, ",".join(rest)


def _whole(keys: Mapping[str, str], name: str) -> int:
    if not (keys[name].isascii() and keys[name].isdigit() and len(keys[name]) < 10) or int(keys[name]) < 1:
        raise UsageError(f"--baseline: {name}={keys[name]} is not a whole number of at least 1")
    return int(keys[name])


def _engine(run: Run, keys: Mapping[str, str], facts: list[Fact]) -> Engine:
    name = keys.get("engine") or run.manifest.engine.get("name")
    if not name:
        raise UsageError("the run does not say which engine it measured",
                         "--baseline engine=vllm (or sglang, trtllm, llama.cpp)")  # fmt: skip
    facts.append(Fact("engine", str(name), "given" if "engine" in keys else "run"))
    return engine_of(str(name))


def _machine(run: Run, keys: Mapping[str, str], facts: list[Fact]) -> tuple[Accelerator, list[str], bool]:
    """The device, the names of those that may have worked, and whether it is this machine's processor."""
    names = serving(run)
    if "machine" in keys:
        facts.append(Fact("machine", keys["machine"], "given"))
        return _named(keys["machine"]), names, False
    if names:
        found = find(names[0])
        if found is None or any(find(n) != found for n in names):
            what = f"the run's device {names[0]!r} is not in the catalogue of machines"
            if found is not None:
                what = f"the run names devices of several kinds: {', '.join(dict.fromkeys(names))}"
            raise UsageError(what, "--baseline machine=NAME; 'whywait catalog machines' lists them")
        facts.append(Fact("machine", f"{len(names)} × {found.name}", "run"))
        return found, names, False
    if run.manifest.machine.get("engine_is_local") and run.manifest.made_by == "measured":
        return _this_machine(run, facts), [], True
    raise UsageError("the run does not say what the engine ran on", "--baseline machine=NAME, for example machine=h100")


def _named(name: str) -> Accelerator:
    try:
        return machine(name)
    except UsageError as exc:
        raise UsageError(f"--baseline: {exc.message}", exc.hint) from None


def _this_machine(run: Run, facts: list[Fact]) -> Accelerator:
    """The processor as a machine of one device: rates measured beside the engine, else guessed by cores."""
    m = run.manifest
    host = m.machine.get("client") or {}
    cores = len(m.engine.get("cpus") or ()) or int(host.get("cores") or 1)
    cores = min(cores, int(m.engine.get("threads") or cores))
    rates = m.machine.get("engine_rates")
    if rates:
        read, flops, how, why = rates["read_bytes_per_s"], rates["f32_flops_per_s"], "run", str(rates.get("how", ""))
    else:
        read, flops, how = CORE_BYTES_PER_S * cores, CORE_FLOPS_PER_S * cores, "assumed"
        why = "its rates were not measured; the calibration has to find them"
    name = f"this machine ({cores} core{'s' if cores > 1 else ''})"
    facts.append(Fact("machine", f"{name}, {read / 1e9:.0f} GB/s, {flops / 1e9:.0f} GFLOP/s", how, why))
    return dataclasses.replace(
        machine("cpu"), name=name, words=(), also=(), read_bytes_per_s=float(read), source="this run", price_usd_h=None,
        fit="core",
        flops={"bf16": float(flops)},
        memory_bytes=float(host.get("memory_bytes") or 64e9), tdp_w=None, note="",
    )  # fmt: skip


def _model(run: Run, keys: Mapping[str, str], facts: list[Fact], policy: str) -> tuple[Arch, Precision]:
    shape = Shape.from_dict(run.manifest.engine.get("model_shape"))
    arch = _arch(run, keys, facts, shape)
    weights = _weight_type(shape, arch)
    kv = str(run.manifest.engine.get("kv_dtype") or run.manifest.engine.get("cache_dtype") or "")
    if kv in ("", "auto"):
        kv = "f16" if policy == "llama.cpp" else "f32" if weights == "f32" else "bf16"
    why = "as the model is published" if shape is None else _guessed(shape, weights)
    facts.append(Fact("weights, KV", f"{weights}, {kv}", "assumed" if why else "run", why))
    return arch, Precision(weights, kv, "fp8" if weights == "fp8" else "bf16")


def _arch(run: Run, keys: Mapping[str, str], facts: list[Fact], shape: Shape | None) -> Arch:
    """The model given; else of the catalogue, by its name and size; else one with the totals that the run noted."""
    if "model" in keys:
        facts.append(Fact("model", keys["model"], "given"))
        return arch_of(keys["model"])
    name = str(run.manifest.engine.get("model") or "model")
    with contextlib.suppress(UsageError):
        arch = arch_of(name)
        if shape is None or _alike(arch, shape):
            facts.append(Fact("model", arch.name, "run"))
            return arch
    if shape is None:
        raise UsageError(f"the run's model {name!r} is not in the catalogue, and the run does not describe it",
                         "--baseline model=NAME, a folder with config.json, or a GGUF file")  # fmt: skip
    facts.append(Fact("model", f"{name} ({shape.params / 1e6:,.0f} M weights, {shape.layers} layers)", "run",
                      f"by its totals ({shape.how}); the split into matrices is a likely one"))  # fmt: skip
    return arch_from_shape(name, shape)


def _alike(arch: Arch, shape: Shape) -> bool:
    from whywait.physics.memory import weights_bytes

    params = weights_bytes(arch, Precision("bf16", "bf16", "bf16"), Layout()) / 2
    return abs(params / shape.params - 1) < SAME_SIZE and arch.layers == shape.layers


_WEIGHTS = {"f32": 4.0, "bf16": 2.0, "fp8": 1.0, **{k: BYTES[k] for k in ("q8_0", "q5_0", "q4_0")}}
SAME_TYPE = 0.02  # a model of one type may hold small tensors of another


def _weight_type(shape: Shape | None, arch: Arch) -> str:
    if shape is None:
        return str(arch.native)
    return min(_WEIGHTS, key=lambda k: abs(math.log(_WEIGHTS[k] / shape.bytes_per_param)))


def _guessed(shape: Shape, weights: str) -> str:
    """Why the type of the weights is a guess; '' where the run's bytes are just that type's."""
    if abs(shape.bytes_per_param / _WEIGHTS[weights] - 1) <= SAME_TYPE:
        return ""
    return f"the run says {shape.bytes_per_param * 8:.1f} bits a weight, taken as {weights}"


def bits_told(run: Run) -> float | None:
    """Bits a weight by the run's own bytes, where the type of the weights that stands for them is a guess."""
    shape = Shape.from_dict(run.manifest.engine.get("model_shape"))
    if shape is None:
        return None
    nearest = min(_WEIGHTS, key=lambda k: abs(math.log(_WEIGHTS[k] / shape.bytes_per_param)))
    return shape.bytes_per_param * 8 if _guessed(shape, nearest) else None


def arch_from_shape(name: str, shape: Shape) -> Arch:
    """A model with the totals of ``shape``: heads of a usual size, a square attention output, and the feed-forward
    width that makes the weights add up. What a step reads and computes is that of the totals."""
    layers = max(shape.layers, 1)
    wide = max(round(shape.attention / layers), 1)  # heads × head size
    each = max(round(shape.kv_values / layers), 2)  # 2 × KV heads × head size
    size = next((s for s in _HEAD_SIZES if wide % s == 0 and each % (2 * s) == 0), math.gcd(wide, each // 2) or 1)
    hidden = wide
    dense = shape.params - shape.expert
    vocab = round(shape.embedding / hidden) if shape.embedding else min(_VOCAB, max(round(0.3 * dense / hidden), 256))
    tables = vocab * hidden * (2 if shape.embedding else 1)
    attention = layers * hidden * (2 * wide + each)
    inter = max(round((dense - tables - attention) / (3 * layers * hidden)), 1)
    experts: dict[str, Any] = {}
    if shape.expert:
        chosen = max(1, round(8 * shape.expert_share))
        count = max(2, round(chosen / shape.expert_share))
        experts = {"experts": count, "chosen": chosen,
                   "expert_inter": max(1, round(shape.expert / (layers * count * 3 * hidden)))}  # fmt: skip
    return Arch(name, hidden, layers, wide // size, each // 2 // size, size, vocab, inter, tied=not shape.embedding,
                source=shape.how, **experts)  # fmt: skip


def _limits(run: Run, engine: Engine, cpu: bool, engines: int, facts: list[Fact]) -> Engine:
    """``engines``: how many share what the run counts."""
    said = run.manifest.engine
    slots = gauge(run.readings, "slots_total", _span(run), combine="sum")
    slots_n = said.get("slots") or (round(slots.mean) if slots is not None else None)
    if slots_n:
        slots_n = max(int(slots_n) // engines, 1)
        engine = dataclasses.replace(engine, max_seqs=slots_n)
        facts.append(Fact("sequences at once", str(slots_n), "run"))
    else:
        why = "the engine's default; --baseline max-seqs=N if it was started with another"
        facts.append(Fact("sequences at once", str(engine.max_seqs), "assumed", why))
    if cpu and engine.policy == "vllm":
        engine = dataclasses.replace(engine, token_budget=CPU_TOKEN_BUDGET)
    why = "the engine's default; --baseline token-budget=N if it was started with another"
    facts.append(Fact(BUDGET, str(engine.token_budget), "assumed", why))
    if said.get("ctx_per_slot"):
        engine = dataclasses.replace(engine, max_context=int(said["ctx_per_slot"]))
    if engine.prefix_cache and _cache_off(run):
        engine = dataclasses.replace(engine, prefix_cache=False)
        facts.append(Fact("prefix cache", "off", "run"))
    return engine


def _cache_off(run: Run) -> bool:
    """The engine says so, or computed equal beginnings again every time although they were offered."""
    found = reuse(run, run, _span(run))
    offered = found.offered is not None and found.offered > OFFERED
    return found.looked is False or (offered and found.hit is not None and not found.any_hit)


def _kv(run: Run, engine: Engine, keys: Mapping[str, str], engines: int, facts: list[Fact]) -> Engine:
    told = gauge(run.readings, "kv_tokens_total", _span(run), combine="sum")
    tokens = run.manifest.engine.get("kv_tokens") or (round(told.mean) if told is not None else None)
    how = "run"
    if tokens:
        tokens = int(tokens) // engines
    if "kv-tokens" in keys:
        tokens, how = _whole(keys, "kv-tokens"), "given"
    if not tokens:
        why = "computed from the memory left beside the weights"
        facts.append(Fact("KV space", "not told", "assumed", why))
        return engine
    facts.append(Fact("KV space", f"{int(tokens):,} tokens", how))
    return dataclasses.replace(engine, kv_blocks=max(int(tokens) // engine.block, 1))


def _speculation(run: Run, facts: list[Fact]) -> Speculation | None:
    """By the engine's counters over the whole run: drafts per round, and the chance (alike at each position) that gives
    the accepted ones."""
    rounds, drafted, accepted = (
        delta(run.readings, f"{n}_total", _span(run)) for n in ("draft_rounds", "draft_tokens", "accepted_tokens")
    )
    if rounds is None or drafted is None or accepted is None or rounds.value <= 0 or drafted.value <= 0:
        return None
    k = max(1, round(drafted.value / rounds.value))
    want = min(accepted.value / rounds.value, float(k))
    low, high = 0.0, 1.0
    for _ in range(40):
        p = (low + high) / 2
        low, high = (p, high) if sum(p ** (i + 1) for i in range(k)) < want else (low, p)
    facts.append(Fact("speculation", f"{k} drafts a step, {want:.2f} accepted", "run"))
    return Speculation("draft", k, (round((low + high) / 2, 4),) * k, 0.1)


def _span(run: Run) -> tuple[int, int]:
    if not len(run.points):
        return 0, 0
    return int(run.points["start_ns"].min()), int(run.points["end_ns"].max())


def as_rows(facts: tuple[Fact, ...]) -> list[dict[str, Any]]:
    """Plain JSON values."""
    return [dataclasses.asdict(f) for f in facts]
