"""What the embedded engine can be told. Plain data: it crosses to the engine's process as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from whywait.errors import UsageError
from whywait.lab.weights import WEIGHTS

#: llama.cpp rounds a slot's context up to this; asking for a multiple gets what was asked.
CTX_STEP: Final = 256


@dataclass(frozen=True)
class Settings:
    """Every default is the plainest engine: one that does nothing a request did not ask for."""

    model: str = ""  # a GGUF file; empty: models.default_model()
    weights: str = ""  # bits of the layers' weights, made from that file (``WEIGHTS``); empty: as the file has them
    name: str = ""  # served name; empty: from the file
    port: int = 0  # 0: any free one
    slots: int = 4  # requests decoded together; more wait in the engine's queue
    ctx_per_slot: int = 2048  # tokens; the engine's total is slots times this
    threads: int = 0  # 0: 1 on up to two CPUs, else half of them
    cpus: tuple[int, ...] = ()  # pin to these; empty: not pinned
    cont_batching: bool = True
    kv_unified: bool = False  # one KV pool for all slots; when it is full every stream gets an in-band error
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    batch: int = 2048  # tokens a step may take (logical)
    ubatch: int = 512  # tokens a step may take (physical)
    cache_prompt: bool = True  # keep a slot's KV for the next prompt that begins alike
    #: llama.cpp's default of 8 GiB would copy idle slots' KV aside, work that shows in no request's timings.
    cache_ram_mib: int = 0
    #: Off: weights are read into memory of the engine's own. On, what llama.cpp rearranges for the CPU (Q4_0) counts
    #: twice, as it is in the file and as it is used, and what another engine maps too counts half.
    mmap: bool = True
    warmup: bool = False
    slot_save_path: str = ""  # a folder: enables POST /slots/N?action=save|restore
    #: 0: many. With llama.cpp's own few, /metrics and new requests wait behind the open streams, unseen by its queue
    #: gauge. Measured, 64 streams on 4 slots: /metrics answered after 8 s and said that 29 wait, not 60.
    http_threads: int = 0
    #: Any other field of ``CommonParams``, dotted for nested ones: ``{"speculative.draft.n_max": 8}``.
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, value, low, high in (
            ("slots", self.slots, 1, 256),
            ("ctx_per_slot", self.ctx_per_slot, 64, 1 << 20),
            ("threads", self.threads, 0, 512),
            ("port", self.port, 0, 65535),
            ("batch", self.batch, 32, 1 << 20),
            ("ubatch", self.ubatch, 32, 1 << 20),
        ):
            if not low <= value <= high:
                raise UsageError(f"{what} of {value} is out of range", f"between {low} and {high}")
        if self.weights and self.weights not in WEIGHTS:
            raise UsageError(f"no weights '{self.weights}'", f"one of {', '.join(WEIGHTS)}")
        for kind in (self.cache_type_k, self.cache_type_v):
            if kind not in CACHE_TYPES:
                raise UsageError(f"no KV cache type '{kind}'", f"one of {', '.join(CACHE_TYPES)}")

    @property
    def total_ctx(self) -> int:
        return self.slots * -(-self.ctx_per_slot // CTX_STEP) * CTX_STEP

    @property
    def http_thread_count(self) -> int:
        return self.http_threads or max(256, 2 * self.slots)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in values.items() if key in known}
        return cls(**{**values, "cpus": tuple(values.get("cpus", ()))})


#: The KV types llama.cpp's server takes.
CACHE_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def check_model_file(path: Path) -> None:
    """A GGUF file, or a clear word why not: the engine's own message names neither cause nor cure."""
    try:
        with path.open("rb") as handle:
            magic = handle.read(4)
    except OSError as err:
        why = err.strerror or str(err)
        raise UsageError(f"cannot read the model {path}: {why}", "give the path of a .gguf file") from None
    if magic != b"GGUF":
        raise UsageError(f"{path} is not a GGUF file", "give the path of a .gguf file")
