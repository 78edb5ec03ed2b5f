"""A Llama for vLLM without weights: configuration and a tokenizer, written on the spot; ``--load-format dummy`` does
the rest. Its text means nothing; its steps cost what such a model's do.

The vocabulary is the printable ASCII characters, so no half UTF-8 character is ever sampled, which a server would hold
back and then send in a clump.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

CONTEXT: Final = 8192
#: ``tiny``: a step takes some 10 ms on one core. ``nano``: next to nothing, so what remains is the host's own work.
SIZES: Final[dict[str, dict[str, int]]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8,
             "num_key_value_heads": 4},
    "nano": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2},
}  # fmt: skip
_SPECIAL: Final = ("<s>", "</s>", "<unk>")
_TEMPLATE: Final = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write_model(folder: Path, size: str = "tiny") -> Path:
    """The model of that size in ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]  # the last two: byte-level BPE's space and line feed
    vocab = {token: i for i, token in enumerate((*letters, *_SPECIAL))}
    files: dict[str, Any] = {
        "config.json": _config(size, vocab),
        "generation_config.json": {"bos_token_id": vocab["<s>"], "eos_token_id": vocab["</s>"]},
        "tokenizer.json": _tokenizer(vocab),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
            "unk_token": "<unk>", "model_max_length": CONTEXT, "chat_template": _TEMPLATE,
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    return folder


def _config(size: str, vocab: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES[size], "vocab_size": len(vocab),
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "bos_token_id": vocab["<s>"], "eos_token_id": vocab["</s>"], "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }  # fmt: skip


def _tokenizer(vocab: dict[str, int]) -> dict[str, Any]:
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": vocab[t], "content": t, **plain} for t in _SPECIAL],
        "normalizer": None, "pre_tokenizer": bytes_, "post_processor": None, "decoder": bytes_,
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": []},
    }  # fmt: skip
