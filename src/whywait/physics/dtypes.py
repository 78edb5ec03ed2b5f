"""Names of number types: bytes of a value, and which of a machine's rates multiplies them."""

from __future__ import annotations

from collections.abc import Mapping

from whywait.physics.models import BYTES

#: Bytes of a weight beyond those of ``models.BYTES``, scales of blocks counted: a scale of 4 bytes per 128 × 128 (fp8_block,
#: DeepSeek-V3, arXiv 2412.19437), of 1 byte per 16 values (nvfp4) or 32 (mxfp4, OCP MX 1.0), of 2 per 128 (int4) or 32
#: (int4_wo, Kimi-K2); k-quants by llama.cpp's block sizes, mixes (…_m) by the size of published files.
_MORE: Mapping[str, float] = {
    "fp8_block": 1.0 + 4 / 128**2, "nvfp4": 0.5 + 1 / 16, "fp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32,
    "int4": 0.5 + 2 / 128, "int4_wo": 0.5 + 2 / 32, "awq": 0.5 + 2 / 128, "gptq": 0.5 + 2 / 128, "w4a16": 0.5 + 2 / 128,
    "q2_k": 84 / 256, "q3_k_m": 0.48, "q4_k": 144 / 256, "q4_k_m": 0.6, "q5_k_m": 0.7, "q6_k": 210 / 256, "q8_k": 292 / 256,
    "iq4_xs": 0.53,
}  # fmt: skip
_FP8 = frozenset({"fp8", "fp8_block", "fp8_e4m3", "fp8_e5m2", "mxfp8"})
_FP4 = frozenset({"fp4", "nvfp4", "mxfp4"})


def bytes_of(dtype: str) -> float:
    """Bytes of one value of ``dtype``, scales of blocks counted; 2 where the name is not known."""
    name = dtype.lower()
    return float(_MORE.get(name, BYTES.get(name, 2.0)))


def known(dtype: str) -> bool:
    return dtype.lower() in _MORE or dtype.lower() in BYTES


def rate_name(dtype: str, flops: Mapping[str, float]) -> str:
    """The key of ``flops`` (``bf16``, ``fp8``, ``fp4``) that a product of ``dtype`` runs at: the next wider one where
    the machine lacks it."""
    name = dtype.lower()
    if name in _FP4 and "fp4" in flops:
        return "fp4"
    if name in _FP8 | _FP4 and "fp8" in flops:
        return "fp8"
    return "bf16"
