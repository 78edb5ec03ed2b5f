"""The same weights with more or fewer bits, made on the spot: what lower precision buys, on a real engine.

Only the matrices of the layers change; embedding (the output too, where it has none of its own) and norms stay as they
are in the source. Formats are llama.cpp's, by block along a row. Its K-quants need rows of a multiple of 256, which
those of a small model (576) are not; of 3 bits it has no other, so that ``q3`` is 3-bit values in blocks of 4 bits:
right for what is lost, no smaller and no faster than ``q4_0``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from whywait.errors import UsageError
from whywait.lab.places import moved_into
from whywait.lab.weights import WEIGHTS

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

Q2_0: Final = 42  # ggml's number of the type; ``gguf`` does not name it yet
#: Scales tried for a block, as shares of the one that just reaches its largest value: cutting off a few large values
#: is worth it, the more so the fewer the levels. Each is then refitted by least squares.
_TRIED: Final = (1.0, 0.85, 0.7, 0.55)
_PIECE: Final = 1 << 16  # values


@dataclass(frozen=True)
class _Format:
    """``kind`` is the tensor type's number, ``ftype`` what the file says of itself ('' nothing), ``block`` values."""

    kind: int
    block: int
    pack: Callable[[Floats], Bytes]
    ftype: str = ""


def requantised(source: Path, target: Path, weights: str) -> Path:
    """Copy a GGUF with the matrices of its layers in ``weights`` (a name of ``WEIGHTS``); 5 to 30 s for 135 M weights.

    Raises:
        UsageError: a matrix is of a type that cannot be read, or its rows do not fill whole blocks.
        Exception: what ``gguf`` raises on a file that it cannot read.
    """
    import gguf

    form = _formats(gguf)[weights]
    reader = gguf.GGUFReader(str(source))
    with moved_into(target) as part:
        writer = gguf.GGUFWriter(str(part), str(reader.fields["general.architecture"].contents()))
        _copy_fields(gguf, reader, writer, (form.ftype, WEIGHTS[weights].says))
        for tensor in reader.tensors:
            as_it_is = int(tensor.tensor_type) == form.kind and weights not in _FITTED
            if as_it_is or not _is_layer_matrix(tensor):
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
                continue
            values = _values(gguf, tensor)
            if values.shape[-1] % form.block:
                raise UsageError(
                    f"{tensor.name} has rows of {values.shape[-1]}, not of a multiple of {form.block}",
                    f"this model cannot have weights={weights}",
                )
            packed = _packed(values.reshape(-1, form.block), form).reshape(values.shape[0], -1)
            # As signed bytes with the shape beside them the writer takes any type's number, known to it or not.
            writer.add_tensor(tensor.name, packed.view(np.int8), raw_shape=values.shape, raw_dtype=form.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return target


def _packed(blocks: Floats, form: _Format) -> Bytes:
    """Piece by piece: what fits the processor's cache is done twice as fast."""
    step = max(1, _PIECE // form.block)
    return np.concatenate([form.pack(blocks[at : at + step]) for at in range(0, len(blocks), step)])


def fitted(blocks: Floats, low: int, high: int) -> tuple[Floats, np.ndarray[Any, np.dtype[np.int8]]]:
    """The scale of each block and its whole numbers from ``low`` to ``high``, of little squared error.

    ``blocks``: (blocks, values). Returns scales (blocks, 1), as half precision holds them, and numbers (blocks,
    values): scale × number is the value. A scale may be negative: the levels reach further on one side, and that is
    laid where the block's largest value is, or not, whichever fits better.
    """
    edge = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    best_error = np.full((len(blocks), 1), np.inf, np.float32)
    best_scale = np.zeros_like(best_error)
    best = np.zeros(blocks.shape, np.int8)
    for reach in {low, high} - {0}:
        for share in _TRIED:
            scale = edge * np.float32(share / reach)
            numbers = _rounded(blocks, scale, low, high)
            squares = (numbers * numbers).sum(axis=1, keepdims=True)
            scale = np.divide((blocks * numbers).sum(axis=1, keepdims=True), squares, out=scale, where=squares > 0)
            scale = scale.astype(np.float16).astype(np.float32)
            numbers = _rounded(blocks, scale, low, high)
            error = np.square(blocks - scale * numbers).sum(axis=1, keepdims=True)
            better = error < best_error
            best_error, best_scale = np.where(better, error, best_error), np.where(better, scale, best_scale)
            best = np.where(better, numbers.astype(np.int8), best)
    return best_scale, best


def _rounded(blocks: Floats, scale: Floats, low: int, high: int) -> Floats:
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    numbers: Floats = np.clip(np.rint(blocks * inverse), low, high)
    return numbers


def q2_0(blocks: Floats) -> Bytes:
    """(blocks, 64) → (blocks, 18): a half-precision scale, then −1, 0, 1 or 2 times it, two bits each."""
    scale, numbers = fitted(blocks, -1, 2)
    codes = (numbers + 1).astype(np.uint8).reshape(-1, 16, 4)
    packed = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
    return np.concatenate([scale.astype(np.float16).view(np.uint8), packed], axis=1)


def q3_in_q4_0(blocks: Floats) -> Bytes:
    """(blocks, 32) → (blocks, 18) of Q4_0 of whose sixteen levels eight are used, −4 to 3 times the scale."""
    scale, numbers = fitted(blocks, -4, 3)
    codes = (numbers + 8).astype(np.uint8)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), codes[:, :16] | codes[:, 16:] << 4], axis=1)


_FITTED: Final = ("q2", "q3")


def _formats(gguf: Any) -> Mapping[str, _Format]:
    types, files = gguf.GGMLQuantizationType, gguf.LlamaFileType

    def own(name: str) -> _Format:
        kind = types[name.upper()]
        block = gguf.GGML_QUANT_SIZES[kind][0]
        return _Format(int(kind), block, lambda x: gguf.quants.quantize(x, kind), f"MOSTLY_{name.upper()}")

    plain = {name: own(name) for name in ("q8_0", "q5_0", "q4_1", "q4_0")}
    half = _Format(int(types.F16), 1, lambda x: x.astype(np.float16).view(np.uint8), "MOSTLY_F16")
    two = _Format(Q2_0, 64, q2_0)
    three = _Format(int(types.Q4_0), 32, q3_in_q4_0, files.MOSTLY_Q4_0.name)
    return {"f16": half, **plain, "q3": three, "q2": two}


def _is_layer_matrix(tensor: Any) -> bool:
    return tensor.name.startswith("blk.") and len(tensor.shape) == 2


def _values(gguf: Any, tensor: Any) -> Floats:
    try:
        values: Floats = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        name = tensor.tensor_type.name
        raise UsageError(f"{tensor.name} is in {name}, which cannot be read here", "use another file") from None
    return np.ascontiguousarray(values, np.float32)


def _copy_fields(gguf: Any, reader: Any, writer: Any, said: tuple[str, str]) -> None:
    """All the file says of itself, but for the type of its weights: ``said`` is that and a line for people."""
    ftype, text = said
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.description", "general.file_type"):
            continue  # the first two the writer adds itself
        nested = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], nested)
    writer.add_description(f"layers requantised by whywait: {text}")
    if ftype:
        writer.add_file_type(gguf.LlamaFileType[ftype])
