"""What accelerators can do at most, as data with a source per figure, and which of them a device's name says it is.

Dense rates (no structured sparsity), one device. The figures are those of the makers' data sheets as two public
collections give them, both read in 2026: ``stas`` is github.com/stas00/ml-engineering (compute/accelerator), ``aic`` is
github.com/ai-dynamo/aiconfigurator (systems). Where the two differ the lower is taken and ``note`` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from whywait.physics.cost import Machine

TB, TF, GB = 1e12, 1e12, 1e9
READ_IN = "2026"
SOURCES: Mapping[str, str] = {
    "stas": "https://github.com/stas00/ml-engineering/tree/master/compute/accelerator",
    "aic": "https://github.com/ai-dynamo/aiconfigurator/tree/main/src/aiconfigurator/systems",
}


@dataclass(frozen=True)
class Accelerator:
    """``words`` are all in a device's name (lower case), ``unless`` none. ``flops`` by the type of the numbers
    multiplied; ``link_bytes_per_s`` is one way of the link to other devices (NVLink, xGMI; else PCIe)."""

    name: str
    words: tuple[str, ...]
    read_bytes_per_s: float
    flops: Mapping[str, float]
    link_bytes_per_s: float
    source: str
    unless: tuple[str, ...] = ()
    note: str = ""


def _flops(bf16: float, fp8: float | None = None, fp4: float | None = None) -> dict[str, float]:
    found = {"bf16": bf16, "fp8": fp8, "fp4": fp4}
    return {k: v * TF for k, v in found.items() if v is not None}


ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator("A100 80GB SXM", ("a100", "80gb"), 2.039 * TB, _flops(312), 300 * GB, "aic, stas",
                ("pcie",)),
    Accelerator("A100 80GB PCIe", ("a100", "pcie"), 1.935 * TB, _flops(312), 32 * GB, "aic"),
    Accelerator("H100 PCIe", ("h100", "pcie"), 2.0 * TB, _flops(756, 1513), 64 * GB, "aic"),
    Accelerator("H100 SXM", ("h100",), 3.35 * TB, _flops(989, 1979), 450 * GB, "aic, stas",
                ("pcie", "nvl", "gh200")),
    Accelerator("H200 SXM", ("h200",), 4.8 * TB, _flops(989, 1979), 450 * GB, "aic, stas",
                ("nvl", "gh200")),
    Accelerator("GB300", ("gb300",), 8.0 * TB, _flops(2500, 5000, 15000), 900 * GB, "aic, stas"),
    Accelerator("GB200", ("gb200",), 8.0 * TB, _flops(2500, 5000, 10000), 900 * GB, "aic, stas"),
    Accelerator("B300", ("b300",), 7.75 * TB, _flops(2250, 4500, 13500), 900 * GB, "aic, stas", (),
                "8.0 TB/s by stas"),
    Accelerator("B200", ("b200",), 7.7 * TB, _flops(2250, 4500, 9000), 900 * GB, "aic, stas", (),
                "8.0 TB/s by stas"),
    Accelerator("L40S", ("l40s",), 0.864 * TB, _flops(362, 733), 32 * GB, "aic, stas"),
    Accelerator("L4", ("l4",), 0.300 * TB, _flops(121, 242), 32 * GB, "aic"),
    Accelerator("RTX PRO 6000 Blackwell Server", ("rtx", "pro", "6000", "blackwell"), 1.792 * TB,
                _flops(468, 936, 1871), 64 * GB, "aic"),
    Accelerator("MI300X", ("mi300x",), 5.3 * TB, _flops(1307, 2615), 448 * GB, "stas"),
    Accelerator("MI325X", ("mi325x",), 6.0 * TB, _flops(1307, 2615), 448 * GB, "stas"),
    Accelerator("MI355X", ("mi355x",), 8.0 * TB, _flops(2516, 5033, 10066), 536 * GB, "stas"),
    Accelerator("Gaudi 3", ("gaudi", "3"), 3.7 * TB, _flops(1677, 1677), 600 * GB, "stas", (),
                "an older white paper gives 1835 TF of BF16"),
)  # fmt: skip


def find(name: str) -> Accelerator | None:
    """The accelerator that a device calls itself (``NVIDIA H100 80GB HBM3``, ``AMD Instinct MI300X``); None if the
    table has none of that name: no guess."""
    words = name.lower().replace("-", " ").replace("_", " ").replace("gaudi3", "gaudi 3").split()

    def has(word: str) -> bool:
        return any(w == word or (len(word) > 3 and w.startswith(word)) for w in words)

    for a in ACCELERATORS:
        if all(has(w) for w in a.words) and not any(has(w) or w in words for w in a.unless):
            return a
    return None


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
