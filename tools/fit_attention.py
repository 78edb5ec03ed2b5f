"""Fits attention, of heads and over latents, in decode and in prefill: see ``fit_ops``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from op_tables import Floats, Table, newest
from scipy.optimize import nnls
from whywait.physics import rooflines as r
from whywait.physics.machines import Accelerator

#: Level-2 caches (NVIDIA's architecture white papers): repeated reads of less than this do not come from memory, which a
#: service, whose weights pass between, never sees.
_CACHE = {"a100_sxm": 40e6, "h100_sxm": 50e6, "h200_sxm": 50e6, "b200_sxm": 126e6, "l40s": 96e6}
_SIZES = (64, 128, 256)
_LATENT, _ROPE, _NOPE, _VALUE = 512, 64, 128, 128  # DeepSeek-V3, whose latent attention the tables measure
Found = tuple[str, str, Table, Any, tuple[int, float, float]]


def attention(root: Path, name: str, spec: Accelerator) -> Iterator[Found]:
    yield from _heads(root, name, spec)
    yield from _latents(root, name, spec)


def _heads(root: Path, name: str, spec: Accelerator) -> Iterator[Found]:
    for table in newest(root, name, "attention", "generation_attention_perf"):
        for size in _SIZES:
            for kv in ("bfloat16", "fp8"):
                t = _rows(table, size, kv)
                heads, kv_heads, seqs = (t.number(c) for c in ("num_heads", "num_key_value_heads", "batch_size"))
                context = seqs * (t.number("step") + 1)
                kv_bytes = 2 * kv_heads * size * (1.0 if kv == "fp8" else 2.0)
                read = context * kv_bytes
                cached = (read > 1.5e6) & (read < _CACHE[name])
                keep = ~cached & (seqs <= 1024) & (t.number("step") <= 40000) & (t.number("step") >= 100)
                terms = r.decode_terms(seqs, context, (heads * size, kv_bytes, 4 * heads * size),  # type: ignore[arg-type]
                                       (spec.read_bytes_per_s, spec.flops["bf16"]))  # fmt: skip
                found = _fit(terms, t, keep, heads * 1e3 + kv_heads)
                if found:
                    yield "decode", f"{'bf16' if kv == 'bfloat16' else kv} {size}", t, *found
    for table in newest(root, name, "attention", "context_attention_perf"):
        for size in _SIZES:
            for kv in ("bfloat16", "fp8"):
                t = _rows(table, size, kv)
                if kv == "fp8" and np.any(t.text("attn_dtype") == "fp8"):
                    t = t.where(t.text("attn_dtype") == "fp8")
                heads, kv_heads, seqs, prompt = (
                    t.number(c) for c in ("num_heads", "num_key_value_heads", "batch_size", "isl")
                )
                tokens = seqs * prompt
                terms = r.prefill_terms((seqs, tokens, tokens * (prompt + 1) / 2),
                                        (heads * size, 2 * kv_heads * size * 1.0, 4 * heads * size),  # type: ignore[arg-type]
                                        spec.flops["bf16"])  # fmt: skip
                found = _fit(terms, t, (tokens <= 65536) & (prompt >= 64), heads * 1e3 + kv_heads)
                if found:
                    yield "prefill", f"{'bf16' if kv == 'bfloat16' else kv} {size}", t, *found


def _rows(table: Table, size: int, kv: str) -> Table:
    heads, kv_heads = table.number("num_heads"), table.number("num_key_value_heads")
    return table.where((table.number("window_size") == 0) & (table.number("head_dim") == size)
                       & (table.text("kv_cache_dtype") == kv) & (heads <= 64) & (heads >= 2) & (heads / kv_heads <= 16))  # fmt: skip


def _latents(root: Path, name: str, spec: Accelerator) -> Iterator[Found]:
    for table in newest(root, name, "mla", "generation_mla_perf"):
        for kv in ("bfloat16", "fp8"):
            t = table.where(table.text("kv_cache_dtype") == kv)
            heads, seqs = t.number("num_heads"), t.number("batch_size")
            context = seqs * (t.number("step") + 1)
            kv_bytes = (_LATENT + _ROPE) * (1.0 if kv == "fp8" else 2.0)
            read = context * kv_bytes
            keep = ((read < 1.5e6) | (read > _CACHE[name])) & (t.number("step") <= 70000) & (t.number("step") >= 100)
            terms = r.decode_terms(seqs, context, (heads * (_LATENT + _ROPE), kv_bytes, 2 * heads * (2 * _LATENT + _ROPE)),  # type: ignore[arg-type]
                                   (spec.read_bytes_per_s, spec.flops["bf16"]))  # fmt: skip
            found = _fit(terms, t, keep, heads * 1e5 + seqs)
            if found:
                yield "decode", f"{'bf16' if kv == 'bfloat16' else kv} latent", t, *found
    for table in newest(root, name, "mla", "context_mla_perf"):
        for kv in ("bfloat16", "fp8"):
            t = table.where(table.text("kv_cache_dtype") == kv)
            heads, seqs, prompt = t.number("num_heads"), t.number("batch_size"), t.number("isl")
            tokens = seqs * prompt
            terms = r.prefill_terms((seqs, tokens, tokens * (prompt + 1) / 2),
                                    (heads * (_NOPE + _ROPE), _LATENT + _ROPE, 2 * heads * (_NOPE + _ROPE + _VALUE)),  # type: ignore[arg-type]
                                    spec.flops["bf16"])  # fmt: skip
            found = _fit(terms, t, (tokens <= 65536) & (prompt >= 64), heads * 1e5 + seqs)
            if found:
                yield "prefill", f"{'bf16' if kv == 'bfloat16' else kv} latent", t, *found


def _fit(
    terms: Floats, t: Table, keep: NDArray[np.bool_], key: Floats
) -> tuple[list[float], tuple[int, float, float]] | None:
    from fit_ops import held

    if keep.sum() < 150:
        return None
    terms, seconds, apart = terms[keep], t.columns["latency"][keep], held(key[keep])
    if apart.sum() < 20 or (~apart).sum() < 50:
        return None
    off = np.abs(terms @ _solve(terms[~apart], seconds[~apart]) / seconds - 1)
    error = (int(keep.sum()), float(np.median(off[apart])), float(np.quantile(off[apart], 0.9)))
    return [float(f"{v:.4g}") for v in _solve(terms, seconds)], error


def _solve(terms: Floats, seconds: Floats) -> Floats:
    """Non-negative, least relative deviations (those below 3 % count alike)."""
    scale = terms.max(axis=0)
    weight = 1 / seconds
    value = np.zeros(terms.shape[1])
    for _ in range(8):
        value, _ = nnls(terms / scale * weight[:, None], seconds * weight)
        off = np.abs(terms / scale @ value - seconds) / seconds
        weight = 1 / seconds / np.sqrt(np.maximum(off, 0.03))
    return np.asarray(value / scale, dtype=float)
