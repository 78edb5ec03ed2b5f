"""Speculative decoding of the embedded engine: what a user writes for it, and which of llama.cpp's parameters that is.

A draft is a small model that proposes tokens which the large one then checks in a single step, or no model at all: text
that came before is looked up by its last tokens. Either way the text comes out as without it; only the time differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from whywait.errors import UsageError

#: A draft model: one made of the served model by leaving out layers (``lab/prune.py``), or that model itself.
PRUNED, SELF, MODEL = "pruned", "self", "model"
#: Kinds without a model, with llama.cpp's own number of each (``common_speculative_type``).
NGRAMS: Final[Mapping[str, int]] = {
    "ngram": 6, "ngram_simple": 6, "ngram_map_k": 7, "ngram_map_k4v": 8, "ngram_mod": 9, "ngram_cache": 10,
}  # fmt: skip
DRAFT_MODEL: Final = 1
WORDS: Final = (PRUNED, SELF, *NGRAMS)
#: Tokens proposed per step where none are asked for.
USUAL: Final[Mapping[str, int]] = {MODEL: 4, "ngram": 8}
#: Last tokens by which earlier text is found. llama.cpp's 12 hardly ever find any in an answer of a hundred tokens.
LOOKED_UP: Final = 3


def check_draft(draft: str, drafts: int, layers: int) -> None:
    """
    Raises:
        UsageError: neither a word nor a GGUF file, or figures of a draft that is not there.
    """
    if draft and draft not in WORDS and not draft.endswith(".gguf"):
        raise UsageError(f"no draft is called '{draft}'", f"one of {', '.join(WORDS)}, or a .gguf file")
    if (drafts and not draft) or (layers and draft != PRUNED):
        what = "draft_layers" if layers else "drafts"
        raise UsageError(f"{what} speaks of a draft that is not there", f"draft={PRUNED},{what}={layers or drafts}")


def usual_drafts(draft: str) -> int:
    return USUAL["ngram" if draft in NGRAMS else MODEL]


def parameters(draft: str, drafts: int, threads: int) -> dict[str, Any]:
    """Fields of ``CommonParams.speculative`` by dotted name; ``draft`` is a file, a word of ``NGRAMS``, or empty.

    A draft of fixed length: llama.cpp would stop drafting where the draft model is unsure (``p_min``), but its default
    is not to, and a fixed length is what other engines do.
    """
    if not draft:
        return {}
    n = drafts or usual_drafts(draft)
    if draft not in NGRAMS:
        # Threads are said because the library, unlike llama-server's command line, does not take those of the model.
        return {
            "types": [DRAFT_MODEL], "draft.mparams.path": draft, "draft.n_max": n,
            "draft.cpuparams.n_threads": threads, "draft.cpuparams_batch.n_threads": threads,
        }  # fmt: skip
    out: dict[str, Any] = {"types": [NGRAMS[draft]], "draft.n_max": n}
    kind = "ngram_simple" if draft == "ngram" else draft
    if kind == "ngram_mod":
        return {**out, "ngram_mod.n_match": LOOKED_UP, "ngram_mod.n_max": n, "ngram_mod.n_min": 1}
    if kind == "ngram_cache":
        return out
    return {**out, f"{kind}.size_n": LOOKED_UP, f"{kind}.size_m": n}
