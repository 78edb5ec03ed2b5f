"""Techniques: pure functions from one Deployment to another, each with the wait it promises to cut and its price.

``apply("fp8-kv,spec-mtp:drafts=3", deployment)`` reads the text of ``--apply``: techniques separated by commas, each
``NAME``, ``NAME=VALUE`` or ``NAME:KEY=VALUE:KEY=VALUE``.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from whywait.errors import UsageError
from whywait.sim import changes
from whywait.sim.changes import Args
from whywait.sim.deployment import Deployment

VLLM = "https://docs.vllm.ai/en/stable/"


@dataclass(frozen=True)
class Technique:
    """``cuts`` is a cause by the judge's name, or a wait in words where no cause is meant. ``value`` is what stands
    after ``=`` in the text ('' : nothing may), ``keys`` what may stand after colons, each with its meaning."""

    name: str
    changes: str
    cuts: str
    price: str
    source: str
    make: Callable[[Deployment, Args], Deployment]
    value: str = ""
    needed: bool = False  # the value
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def syntax(self) -> str:
        value = f"={self.value}" if self.needed else f"[={self.value}]" if self.value else ""
        return self.name + value + "".join(f"[:{k}=N]" for k in self.keys)


def _table(rows: Iterable[Technique]) -> dict[str, Technique]:
    return {t.name: t for t in rows}


_GIB = {"gib": "its size per replica", "gbps": "GB/s of the way back", "ms": "latency of a transfer"}
_DRAFTS = {
    "drafts": "tokens proposed per step",
    "accept": "chance that the first is accepted; later ones in proportion",
}

TECHNIQUES: dict[str, Technique] = _table((
    Technique("fp8-weights", "weights and products in FP8", "weight-read-bound decode",
              "small loss of quality; needs FP8 units", f"{VLLM}features/quantization/fp8/",
              changes.weights("fp8", "fp8")),
    Technique("int8-weights", "weights in INT8, products in 16 bits", "weight-read-bound decode",
              "small loss of quality; unpacking costs large batches",
              f"{VLLM}features/quantization/int8/",
              changes.weights("int8", "bf16")),
    Technique("int4-weights", "weights in 4 bits, products in 16 (W4A16: AWQ, GPTQ)", "weight-read-bound decode",
              "loss of quality; unpacking costs large batches and prefill", "arXiv 2306.00978",
              changes.weights("int4", "bf16")),
    Technique("fp4-weights", "weights and products in FP4 (NVFP4, MXFP4)", "weight-read-bound decode",
              "loss of quality; needs FP4 units", "arXiv 2310.10537", changes.weights("fp4", "fp4")),
    Technique("bf16-weights", "weights and products in 16 bits", "(none: it undoes a narrower type)",
              "twice the bytes of FP8", "", changes.weights("bf16", "bf16")),
    Technique("fp8-kv", "KV cache in FP8", "KV-read-bound decode",
              "small loss of quality at long contexts; few short sequences pay more to convert than they save",
              f"{VLLM}features/quantization/quantized_kvcache/",
              changes.kv("fp8")),
    Technique("int8-kv", "KV cache in INT8", "KV-read-bound decode", "small loss of quality; slower attention kernels",
              "arXiv 2401.18079", changes.kv("int8")),
    Technique("bf16-kv", "KV cache in 16 bits", "(none: it undoes a narrower type)", "twice the bytes of FP8", "",
              changes.kv("bf16")),
    Technique("prefix-cache", "equal beginnings of prompts are computed once", "prefix cache off",
              "a little host time per block; less room for the rest when nothing repeats", "arXiv 2312.07104",
              changes.prefix_cache, "on|off"),
    Technique("chunked-prefill", "prompts are computed in pieces beside decode", "neighbour's prefill",
              "prompts themselves take longer", "arXiv 2403.02310", changes.chunked, "on|off"),
    Technique("token-budget", "tokens computed in one step", "neighbour's prefill",
              "smaller: more steps per prompt; larger: longer steps for those who decode", "arXiv 2403.02310",
              changes.token_budget, "N", True),
    Technique("max-seqs", "sequences worked on at once", "slot limit",
              "more: slower tokens for each, more KV in use; fewer: more wait", f"{VLLM}configuration/optimization/",
              changes.max_seqs, "N", True),
    Technique("memory-share", "part of the device memory for weights and KV", "kv space",
              "less room for everything else on the device", f"{VLLM}configuration/conserving_memory/",
              changes.memory_share, "F", True),
    Technique("continuous-batching", "requests join and leave a running batch", "slot limit", "none worth naming",
              "Yu et al., Orca, OSDI 2022", changes.batching, "on|off"),
    Technique("spec-ngram", "drafts are looked up in the prompt", "weight-read-bound decode",
              "helps only where answers repeat the prompt; rejected tokens cost compute at large batches",
              f"{VLLM}features/speculative_decoding/", changes.speculate("ngram"), keys=_DRAFTS),
    Technique("spec-draft", "drafts by a small model or head (EAGLE-3)", "weight-read-bound decode",
              "rejected tokens cost compute at large batches; memory for the draft", "arXiv 2503.01840",
              changes.speculate("draft"), keys=_DRAFTS | {"share": "time of a draft token over a decode step"}),
    Technique("spec-mtp", "drafts by the model's own extra layers", "weight-read-bound decode",
              "rejected tokens cost compute at large batches; the model must have such layers", "arXiv 2404.19737",
              changes.speculate("mtp"), keys=_DRAFTS),
    Technique("kv-offload", "evicted KV goes to host memory, disk or another machine and comes back",
              "prefix-cache thrash", "the link carries it; a hit waits for its transfer", "arXiv 2510.09665",
              changes.kv_offload, "host|disk|remote", keys=_GIB),
    Technique("priority", "one class of requests goes before the others", "long requests",
              "the others wait longer, or are pushed out", f"{VLLM}serving/openai_compatible_server/",
              changes.priority, "CLASS"),
    Technique("pd", "P engines for prefill, D for decode, KV handed over between them", "neighbour's prefill",
              "KV crosses a link; either kind may idle while the other queues", "arXiv 2401.09670", changes.pd, "P:D",
              True, {"gbps": "GB/s a prefill engine sends", "overlap": "part hidden behind prefill, 0..1"}),
    Technique("tp", "each layer spread over N devices", "weight-read-bound decode",
              "collectives in every layer; the devices serve one replica fewer", "arXiv 1909.08053", changes.tp,
              "N", True),
    Technique("pp", "layers spread over N devices, one after another", "kv space",
              "no faster for a single stream; bubbles", "arXiv 1811.06965", changes.pp, "N", True),
    Technique("dp", "attention of N groups of requests apart, experts shared", "KV-read-bound decode",
              "weights of attention are kept N times; all wait for the slowest", "arXiv 2412.19437", changes.dp,
              "N", True),
    Technique("ep", "experts spread over N devices", "weight-read-bound decode",
              "tokens cross the link twice a layer; the fullest device sets the time", "arXiv 2006.16668", changes.ep,
              "N", True),
    Technique("replicas", "N copies of the service", "rate beyond capacity", "N times the devices", "",
              changes.replicas, "N", True),
    Technique("routing", "which replica a request goes to", "prefix-cache thrash",
              "prefix: uneven load; least load: shared beginnings are spread", "arXiv 2312.07104", changes.routing,
              "round-robin|least-load|prefix", True),
    Technique("faster-memory", "device memory X times as fast", "KV-read-bound decode", "hardware that is not there",
              "", changes.faster_memory, "X", True),
    Technique("faster-compute", "matrix units X times as fast", "compute-bound prefill", "hardware that is not there",
              "", changes.faster_compute, "X", True),
    Technique("faster-link", "links between devices X times as fast", "interconnect", "hardware that is not there", "",
              changes.faster_link, "X", True),
    Technique("faster-host", "host X times as fast: scheduler, launches, frontend", "host CPU",
              "another host, or more frontend processes", "", changes.faster_host, "X", True),
    Technique("power-cap", "W watts per device at most", "throttling", "lower clocks: slower compute and prefill",
              "arXiv 2308.15306", changes.power_cap, "W", True),
    Technique("machine", "another accelerator", "(whatever the old one was short of)",
              "never run on it: the error is that of the fits", "", changes.machine, "NAME", True),
    Technique("engine", "another engine's scheduler and defaults", "(whatever its scheduler makes wait)",
              "kernels differ too, which is not modelled beyond host time", "", changes.engine,
              "vllm|sglang|trtllm|llama.cpp|static", True),
))  # fmt: skip


#: Those that say how devices are used: what ``--layout`` takes.
LAYOUT = ("tp", "pp", "dp", "ep", "replicas", "routing", "pd")


def parse(text: str) -> list[tuple[Technique, Args]]:
    """The techniques of ``--apply``, in order.

    Raises:
        UsageError: one is unknown (the nearest are named), or its value or a key is not what it takes.
    """
    return [_one(part.strip()) for part in text.split(",") if part.strip()]


def apply(text: str, deployment: Deployment) -> Deployment:
    """``deployment`` with the techniques of ``text`` applied one after another.

    Raises:
        UsageError: as of :func:`parse`, or a technique does not go with this deployment.
    """
    for technique, args in parse(text):
        deployment = technique.make(deployment, args)
        deployment = dataclasses.replace(deployment, applied=(*deployment.applied, args.text))
    return deployment


def technique_named(name: str) -> Technique:
    """
    Raises:
        UsageError: there is none; the nearest are named.
    """
    found = TECHNIQUES.get(name)
    if found is None:
        hint = f"nearest: {nearest(name, TECHNIQUES)}; 'whywait catalog techniques' lists them"
        raise UsageError(f"there is no technique {name!r}", hint)
    return found


def nearest(word: str, known: Iterable[str]) -> str:
    """The names most like ``word``, for a hint; all of them where none is and they are few."""
    names = list(known)
    found = difflib.get_close_matches(word.lower(), [n.lower() for n in names], 3, 0.4)
    close = [n for n in names if n.lower() in found] or [n for n in names if word.lower() in n.lower()][:3]
    return ", ".join(close or (names if len(names) < 12 else names[:8]))


def _one(text: str) -> tuple[Technique, Args]:
    head, *rest = text.split(":")
    while rest and "=" not in rest[0]:  # pd=2:6 and machine names: the colon belongs to the value
        head += ":" + rest.pop(0)
    name, equals, value = (x.strip() for x in head.partition("="))
    technique = technique_named(name)
    if (technique.needed and not value) or (value and not technique.value) or (equals and not value):
        raise UsageError(f"{text!r} is not how {name} is written", f"write {technique.syntax}")
    keys: dict[str, str] = {}
    for part in rest:
        key, _, said = (x.strip() for x in part.partition("="))
        if key not in technique.keys or not said:
            raise UsageError(f"{name} has no {key!r}", f"write {technique.syntax}")
        keys[key] = said
    return technique, Args(text, name, value, keys)
