"""What each technique does to a Deployment. Pure; a change that this deployment cannot have is refused with what
can."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from whywait.errors import UsageError
from whywait.physics.arch import Arch
from whywait.physics.dtypes import bytes_of
from whywait.physics.efficiency import Efficiency
from whywait.physics.layout import Precision
from whywait.physics.ops import expert_type
from whywait.sim.capacity import blocks_of
from whywait.sim.catalog import machine_named
from whywait.sim.deployment import ROUTING, Deployment, Layout, Speculation, Split, Tier
from whywait.sim.engines import engine_of
from whywait.sim.loads import REACHED, cap_factor

GIB, GB = 2.0**30, 1e9
#: Chance that a draft token is accepted, given that all before it were: means over the published acceptance lengths of
#: SemiAnalysis InferenceX (SPEED-Bench, coding, temperature 1, nine models; github.com/SemiAnalysisAI/InferenceX,
#: 843c625), of which AL(k) − AL(k−1) is the product of the first k. MTP: 4 series; EAGLE-3 heads: 6 series. Beyond the
#: fifth position the series are noise and the fifth is kept. For n-grams nobody publishes such a table: half of the
#: drafts of a text that quotes its prompt is an assumption, to be replaced by one's own (accept=).
ACCEPTANCE: Mapping[str, tuple[float, ...]] = {
    "mtp": (0.88, 0.78, 0.69, 0.64, 0.64, 0.64, 0.64, 0.64),
    "draft": (0.81, 0.75, 0.72, 0.72, 0.70, 0.70, 0.70, 0.70),
    "ngram": (0.5, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7),
}
DRAFTS = {"mtp": 2, "draft": 3, "ngram": 4}
#: Time of a draft token as a share of a decode step: a head or an extra layer is one layer of many and the language
#: head; a lookup costs host time only.
DRAFT_SHARE = {"mtp": 0.06, "draft": 0.06, "ngram": 0.0}
#: Tiers below the device by default: bytes per replica, bytes/s back, seconds of latency. Disk: one NVMe drive. Host
#: and remote memory: the rates of a machine whose PCIe and NIC are not known; else those at ``REACHED`` of their data
#: sheet.
TIERS: Mapping[str, tuple[float, float, float]] = {
    "host": (256 * GIB, 20 * GB, 0.0005),
    "disk": (4096 * GIB, 6 * GB, 0.001),
    "remote": (4096 * GIB, 20 * GB, 0.002),
}


@dataclass(frozen=True)
class Args:
    """A technique as it was written: its text, name, the value after ``=`` and the keys after colons."""

    text: str
    name: str
    value: str = ""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def whole(self, least: int = 1) -> int:
        return _whole(self.value, self.text, least)

    def factor(self) -> float:
        return _number(self.value, self.text)

    def count(self, key: str, default: int) -> int:
        return _whole(self.keys[key], self.text) if key in self.keys else default

    def get(self, key: str, default: float) -> float:
        return _number(self.keys[key], self.text) if key in self.keys else default

    def on(self) -> bool:
        if self.value not in ("", "on", "off"):
            raise UsageError(f"{self.text!r}: {self.value!r} is neither on nor off")
        return self.value != "off"


Change = Callable[[Deployment, Args], Deployment]


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e15:
        raise UsageError(f"{where!r}: {text!r} is not a number above 0")
    return value


def _digits(text: str) -> bool:
    """A whole number as it is usually written, that fits the simulator's: other scripts' digits are digits, too."""
    return text.isascii() and text.isdigit() and len(text) < 10


def _whole(text: str, where: str, least: int = 1) -> int:
    if not _digits(text) or int(text) < least:
        raise UsageError(f"{where!r}: {text!r} is not a whole number of at least {least}")
    return int(text)


def _engine(d: Deployment, **fields: object) -> Deployment:
    return replace(d, engine=replace(d.engine, **fields))  # type: ignore[arg-type]


def recounted(d: Deployment) -> Deployment:
    """A count of blocks that the engine's log gave holds for the deployment it was logged of. Before that changes, it
    is turned into what it says of the computed count: a factor that goes on to hold."""
    told = d.engine.kv_blocks
    if told is None:
        return d
    free = _engine(d, kv_blocks=None)
    computed = blocks_of(free)
    by = told / computed if computed else 1.0
    return replace(free, hardware=replace(d.hardware, kv_space=d.hardware.kv_space * by))


def as_published(arch: Arch, p: Precision) -> Precision:
    """FP8 of a model with experts means scales per block of its weights: so such checkpoints are published."""
    if p.weights != "fp8" or not arch.experts or p.experts is not None:
        return p
    return replace(p, weights="fp8_block") if arch.native == "fp8_block" else replace(p, experts="fp8_block")


def weights(dtype: str, compute: str) -> Change:
    def change(d: Deployment, args: Args) -> Deployment:
        """What narrower weights leave free is room for KV, but for llama.cpp, whose context is allotted by a flag."""
        _no_wider(d, dtype, args)
        if d.engine.policy != "llama.cpp":
            d = recounted(d)
        return replace(d, precision=as_published(d.model, Precision(dtype, d.precision.kv, compute)))

    return change


def _no_wider(d: Deployment, dtype: str, args: Args) -> None:
    """A narrow type saves nothing of weights that are narrower yet (experts published in mxfp4); 16 bits are asked for
    to be wide."""
    p = d.precision
    held = (("weights", p.weights), ("experts", expert_type(p) if d.model.experts else p.weights))
    for what, now in held:
        if dtype != "bf16" and bytes_of(now) < 0.9 * bytes_of(dtype):
            raise UsageError(
                f"{args.text} would widen the {what} of {d.model.name}, which are in {now}",
                f"leave it out; or --precision {dtype} to compare with all of it in {dtype}",
            )


def kv(dtype: str) -> Change:
    def change(d: Deployment, _args: Args) -> Deployment:
        """A count of blocks from a log is of the type it was logged with: the same bytes hold more of a narrower
        one."""
        blocks = d.engine.kv_blocks
        if blocks is not None and d.engine.policy != "llama.cpp":
            blocks = int(blocks * bytes_of(d.precision.kv) / bytes_of(dtype))
        return _engine(replace(d, precision=replace(d.precision, kv=dtype)), kv_blocks=blocks)

    return change


def prefix_cache(d: Deployment, args: Args) -> Deployment:
    return _engine(d, prefix_cache=args.on())


def chunked(d: Deployment, args: Args) -> Deployment:
    return _engine(d, chunked=args.on())


def token_budget(d: Deployment, args: Args) -> Deployment:
    return _engine(d, token_budget=args.whole())


def max_seqs(d: Deployment, args: Args) -> Deployment:
    return _engine(d, max_seqs=args.whole())


def memory_share(d: Deployment, args: Args) -> Deployment:
    share = args.factor()
    if share > 1:
        raise UsageError(f"{args.text!r}: a share is at most 1", "such as memory-share=0.95")
    return _engine(recounted(d), memory_share=share)


def batching(d: Deployment, args: Args) -> Deployment:
    """Off: a batch is filled and run to the end of its longest answer."""
    if args.on():
        return _engine(d, policy="vllm") if d.engine.policy == "static" else d
    return _engine(d, policy="static")


def speculate(kind: str) -> Change:
    def change(d: Deployment, args: Args) -> Deployment:
        """``accept`` moves all positions so that the first has that chance."""
        if kind == "mtp" and not d.model.mtp_layers:
            raise UsageError(
                f"{d.model.name} has no layers that predict further tokens", "use spec-draft or spec-ngram"
            )
        chances = ACCEPTANCE[kind]
        drafts = args.count("drafts", DRAFTS[kind])
        if not 1 <= drafts <= len(chances):
            raise UsageError(f"{args.text!r}: drafts must be from 1 to {len(chances)}")
        scale = args.get("accept", chances[0]) / chances[0]
        if scale * chances[0] > 1:
            raise UsageError(f"{args.text!r}: accept is a chance, at most 1")
        accepted = tuple(min(1.0, c * scale) for c in chances[:drafts])
        return replace(d, speculation=Speculation(kind, drafts, accepted, args.get("share", DRAFT_SHARE[kind])))

    return change


def kv_offload(d: Deployment, args: Args) -> Deployment:
    name = args.value or "host"
    if name not in TIERS:
        raise UsageError(f"{args.text!r}: there is no tier {name!r}", f"one of {', '.join(TIERS)}")
    size, rate, latency = TIERS[name]
    wire = {"host": d.machine.host_bytes_per_s, "remote": d.machine.nic_bytes_per_s}.get(name)
    rate = REACHED * wire if wire else rate
    tier = Tier(name, args.get("gib", size / GIB) * GIB, args.get("gbps", rate / GB) * GB,
                args.get("ms", latency * 1e3) / 1e3)  # fmt: skip
    order = list(TIERS)
    tiers = sorted((*(t for t in d.tiers if t.name != name), tier), key=lambda t: order.index(t.name))
    return _engine(replace(d, tiers=tuple(tiers)), prefix_cache=True)


def priority(d: Deployment, args: Args) -> Deployment:
    return _engine(replace(d, priority_class=args.value), priority=True)


def pd(d: Deployment, args: Args) -> Deployment:
    first, _, second = args.value.partition(":")
    if not (_digits(first) and _digits(second) and int(first) and int(second)):
        raise UsageError(f"{args.text!r} is not P:D", "two whole numbers, such as pd=2:6")
    try:
        overlap = float(args.keys.get("overlap", "0"))
    except ValueError:
        overlap = math.nan
    if not 0 <= overlap <= 1:
        raise UsageError(f"{args.text!r}: overlap is a share from 0 to 1", "such as pd=2:6:overlap=0.5")
    rate = args.get("gbps", 1) * GB if "gbps" in args.keys else 0.0
    split = Split(int(first), int(second), bytes_per_s=rate, overlap=overlap)
    return replace(d, split=split, replicas=1)


def tp(d: Deployment, args: Args) -> Deployment:
    return _layout(d, tp=args.whole())


def pp(d: Deployment, args: Args) -> Deployment:
    return _layout(d, pp=args.whole())


def dp(d: Deployment, args: Args) -> Deployment:
    return _layout(d, dp=args.whole())


def ep(d: Deployment, args: Args) -> Deployment:
    return _layout(d, ep=args.whole())


def _layout(d: Deployment, **fields: int) -> Deployment:
    found: Layout = replace(d.layout, **fields)
    return replace(recounted(d), layout=found)


def replicas(d: Deployment, args: Args) -> Deployment:
    return replace(d, replicas=args.whole())


def routing(d: Deployment, args: Args) -> Deployment:
    way = args.value.replace("-", " ")
    if way not in ROUTING:
        raise UsageError(f"{args.text!r}: there is no routing {args.value!r}",
                         f"one of {', '.join(r.replace(' ', '-') for r in ROUTING)}")  # fmt: skip
    return replace(d, routing=way)


def faster_memory(d: Deployment, args: Args) -> Deployment:
    return _faster(d, args.factor(), "weights", "kv")


def faster_compute(d: Deployment, args: Args) -> Deployment:
    return _faster(d, args.factor(), "compute", "pairs")


def faster_link(d: Deployment, args: Args) -> Deployment:
    """Collectives, and the hand-over of a split pair."""
    by = args.factor()
    return _faster(d, by, "link")


def faster_host(d: Deployment, args: Args) -> Deployment:
    by, e = args.factor(), d.engine
    d = _faster(d, by, "step", "sequence", "token", "prefill_step")
    return _engine(d, frontend_s=e.frontend_s / by, frontend_token_s=e.frontend_token_s / by, reply_s=e.reply_s / by)


def _faster(d: Deployment, by: float, *what: str) -> Deployment:
    changed: Efficiency = replace(d.hardware, **{k: getattr(d.hardware, k) / by for k in what})
    return replace(d, hardware=changed)


def power_cap(d: Deployment, args: Args) -> Deployment:
    cap_factor(d.machine, args.factor())  # refuses what cannot be
    return replace(d, power_cap_w=args.factor())


def machine(d: Deployment, args: Args) -> Deployment:
    """What a calibration found of the old machine is taken to hold for the new one: how well the engine uses either."""
    return replace(recounted(d), machine=machine_named(args.value))


def engine(d: Deployment, args: Args) -> Deployment:
    """The scheduler and its ways; limits that somebody chose are kept, defaults become the new engine's."""
    usual = engine_of(d.engine.policy, d.machine)
    limits = ("max_seqs", "token_budget", "memory_share", "max_context", "prefix_cache", "priority")
    chosen = {k: getattr(d.engine, k) for k in limits if getattr(d.engine, k) != getattr(usual, k)}
    return replace(recounted(d), engine=replace(engine_of(args.value, d.machine), **chosen))
