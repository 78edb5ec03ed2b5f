"""What is simulated: a machine, a model, a layout, an engine with its limits, and the techniques in use. Frozen: a
what-if is ``replace()``."""

from __future__ import annotations

from dataclasses import dataclass, field

from whywait.physics.arch import Arch
from whywait.physics.efficiency import Efficiency
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import Accelerator

__all__ = ["POLICIES", "ROUTING", "Deployment", "Engine", "Layout", "Precision", "Speculation", "Split", "Tier"]

POLICIES = ("vllm", "sglang", "trtllm", "llama.cpp", "static")
ROUTING = ("round robin", "least load", "prefix")


@dataclass(frozen=True)
class Engine:
    """A scheduler and its limits, in the engine's own nouns. Seconds are of the host."""

    policy: str = "vllm"
    max_seqs: int = 256  # --max-num-seqs, --max-running-requests, --max_batch_size, --parallel
    token_budget: int = 8192  # --max-num-batched-tokens, --chunked-prefill-size, --max_num_tokens, --batch-size
    chunked: bool = True
    max_context: int = 0  # tokens of prompt and answer together; 0: no limit
    block: int = 16  # tokens of a KV block
    prefix_cache: bool = True
    memory_share: float = 0.9  # of the device's memory, for weights, KV and working space
    kv_blocks: int | None = None  # from the engine's log; None: computed
    #: KV kept for a request's answer at admission: none (vLLM), full (TensorRT-LLM, llama.cpp), share (SGLang's rule)
    reserve: str = "none"
    priority: bool = False
    ahead: bool = False  # schedules a step while the one before runs: what comes meanwhile waits for the one after
    wait_steps: int = 0  # TensorRT-LLM's batch_wait_timeout_iters: steps that new prompts are put off for while …
    wait_share: float = (
        0.0  # … all of them together fill less than this share of token_budget (batch_wait_max_tokens_ratio)
    )
    receive_every: int = 1  # SGLang's --scheduler-recv-interval: decode steps between two looks for new requests
    frontend_s: float = 0.002  # HTTP, templating, tokenising, per request
    frontend_token_s: float = 0.0  # the same per prompt token
    reply_s: float = 0.001  # a token's way from the step's end to the client


@dataclass(frozen=True)
class Speculation:
    """``drafts`` tokens proposed per step, accepted by position with ``acceptance`` (each given that all before it
    were)."""

    kind: str  # draft, ngram, mtp
    drafts: int
    acceptance: tuple[float, ...]
    draft_share: float = 0.0  # time of one draft token as a share of a plain decode step


@dataclass(frozen=True)
class Tier:
    """A level of KV cache below the device: evicted blocks move there and come back over a link."""

    name: str  # host, disk, remote
    bytes: float
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Split:
    """Prefill and decode on engines of their own. KV goes over ``bytes_per_s`` per prefill engine (0: its devices'
    NICs); ``overlap`` of it is hidden behind prefill (layer by layer); at most ``in_flight`` hand-overs are reserved
    at one decode engine."""

    prefill: int
    decode: int
    prefill_layout: Layout | None = None
    bytes_per_s: float = 0.0
    latency_s: float = 0.001
    overlap: float = 0.0
    in_flight: int = 0  # 0: no cap


@dataclass(frozen=True)
class Deployment:
    machine: Accelerator
    model: Arch
    precision: Precision = field(default_factory=Precision)
    layout: Layout = field(default_factory=Layout)
    replicas: int = 1
    engine: Engine = field(default_factory=Engine)
    routing: str = "round robin"
    speculation: Speculation | None = None
    tiers: tuple[Tier, ...] = ()
    split: Split | None = None
    #: How this service compares with the fits: a calibration sets it.
    efficiency: Efficiency = field(default_factory=Efficiency)
    #: On top of it: what a technique makes faster or slower.
    hardware: Efficiency = field(default_factory=Efficiency)
    power_cap_w: float | None = None  # per device
    priority_class: str = (
        ""  # with ``engine.priority``: goes before the others; '': classes in the order of their TTFT SLO
    )
    applied: tuple[str, ...] = field(default=())  # techniques applied, by name, in order

    @property
    def devices(self) -> int:
        """Of all replicas; with a split, of all prefill and decode engines."""
        if self.split is None:
            return self.replicas * self.layout.devices
        first = self.split.prefill_layout or self.layout
        return self.replicas * (self.split.prefill * first.devices + self.split.decode * self.layout.devices)
