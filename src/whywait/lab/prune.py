"""A draft model made on the spot: the served model without some of its layers, a copy of its GGUF file.

It shares the vocabulary, so its tokens can be checked; it needs no training, and so it agrees only as far as the layers
left out did little. Which ones those are is a property of the model. For SmolLM2-135M it was measured: each layer left
out alone, then greedily on, by the share of tokens of the model's own answers (temperature 0) that the rest still
predicts; the order is in ``DROPPED_FIRST``. Of 18 layers evenly spaced ones agree with it in 0.5 % of the tokens and
the measured choice in 45 %: of a model that nobody measured, expect little of a draft made this way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from whywait.errors import MissingExtra, UsageError
from whywait.lab import places
from whywait.lab.requant import copy_fields

Say = Callable[[str], None]
#: (general.basename, layers) → layers in the order in which they are missed least.
DROPPED_FIRST: Final[dict[tuple[str, int], tuple[int, ...]]] = {
    ("smollm2", 30): (3, 5, 4, 7, 26, 25, 22, 9, 6, 14, 13, 12, 23, 10, 21, 27, 17, 15, 19, 24, 20, 16, 18),
}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
_USUAL_SHARE: Final = 0.8


def usual_layers(layers: int) -> int:
    """How many a pruned draft keeps of so many: what gave most tokens for its time of SmolLM2-135M's 10, 14, 18, 24."""
    return max(1, round(_USUAL_SHARE * layers))


def kept_layers(layers: int, keep: int, dropped_first: Sequence[int] = ()) -> tuple[int, ...]:
    """Which ``keep`` of ``layers`` stay, in their order; the first and the last always do, where two can.

    By ``dropped_first`` as far as it goes; what then is still too many, and where it is empty, evenly spaced.

    Raises:
        UsageError: more than there are, or none.
    """
    if not 1 <= keep <= layers:
        raise UsageError(f"a draft of {keep} layers cannot be made of {layers}", f"between 1 and {layers}")
    gone = [n for n in dropped_first if 0 < n < layers - 1][: layers - keep]
    left = [n for n in range(layers) if n not in gone]
    if len(left) == keep:
        return tuple(left)
    if keep == 1:
        return (0,)
    return tuple(left[round(i * (len(left) - 1) / (keep - 1))] for i in range(keep))


def prune(source: Path, target: Path, keep: int = 0) -> tuple[int, ...]:
    """Write ``source`` with ``keep`` of its layers (0: the usual share) to ``target``; returns which. About 2 s for
    135 M weights. A tied output matrix of 8 bits becomes one of 4: with so few layers it is most of what is read.

    Raises:
        UsageError: the file has no layers by llama.cpp's names, or fewer than asked for.
    """
    try:
        import gguf
    except ImportError:
        raise MissingExtra("making a draft model", "engine") from None
    reader = gguf.GGUFReader(str(source))
    arch = str(reader.fields["general.architecture"].contents())
    count = reader.fields.get(f"{arch}.block_count")
    if count is None:
        raise UsageError(f"{source} does not say how many layers it has", "give the draft as a .gguf file")
    layers = int(count.contents())
    base = reader.fields.get("general.basename")
    order = DROPPED_FIRST.get((str(base.contents()).lower() if base else "", layers), ())
    kept = kept_layers(layers, keep or usual_layers(layers), order)
    with places.moved_into(target) as part:
        writer = gguf.GGUFWriter(str(part), arch)
        copy_fields(gguf, reader, writer, {f"{arch}.block_count": len(kept)})
        for tensor in reader.tensors:
            name = _renamed(tensor.name, kept)
            if name is not None:
                data, kind = _lighter(gguf, tensor)
                writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return kept


def _pruned(source: Path, target: Path, keep: int) -> tuple[int, ...]:
    try:
        return prune(source, target, keep)
    except (UsageError, OSError):
        raise
    except Exception as err:  # a damaged file: what the reader of it says of that is of many kinds
        raise UsageError(
            f"no draft can be made of {source.name} ({type(err).__name__}: {err})",
            "is the file whole? or give draft=FILE.gguf",
        ) from None


def cached_draft(source: Path, keep: int = 0, cache_dir: Path | None = None, say: Say | None = None) -> Path:
    """The pruned draft of that model, made on first use. Its name holds the size of the file that it was made of and
    the second in which that was written, so that another model of the same name gets a draft of its own."""
    stat, folder = source.stat(), (cache_dir or places.cache_dir()) / "models"
    mark = f"{stat.st_size:x}-{int(stat.st_mtime):x}"
    name = f"draft-{source.name.removesuffix('.gguf')}-{keep or 'usual'}-{mark}-{VERSION}.gguf"
    with places.locked(folder):
        if not (path := folder / name).is_file():
            kept = _pruned(source, path, keep)
            if say is not None:
                say(f"made a draft of {len(kept)} layers of {source.name}")
    return path


VERSION: Final = 1  # of what is made: another one makes cached drafts anew


def _renamed(name: str, kept: Sequence[int]) -> str | None:
    """A tensor's name in the draft; None where its layer is left out."""
    if (found := _LAYER.fullmatch(name)) is None:
        return name
    layer = int(found[1])
    return f"blk.{kept.index(layer)}.{found[2]}" if layer in kept else None


def _lighter(gguf: Any, tensor: Any) -> tuple[Any, Any]:
    q8, q4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0
    if tensor.tensor_type != q8 or tensor.name != "token_embd.weight":
        return tensor.data, tensor.tensor_type
    return gguf.quants.quantize(gguf.quants.dequantize(tensor.data, q8), q4), q4
