"""A llama-shaped GGUF of random numbers, made on the spot: steps that cost what a real model's do, words without sense.

Three things are arranged, so that a client sees well-formed streams of the asked length:

* the tokenizer is byte-level BPE with a few hundred common English words as whole tokens, so that prompts written in
  plain words count about one token a word;
* only whole words are ever sampled: no half UTF-8 characters (a server holds those back and the chunks would clump), no
  end of text. The first number of every hidden vector is kept at a constant, and the output row of each unwanted token
  has a large negative weight there;
* numbers are drawn from a fixed seed: the same size is the same file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from whywait.errors import MissingExtra, UsageError
from whywait.lab.places import moved_into

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_BLOCK: Final = 32  # numbers per quantisation block, in Q4_0 and Q8_0 alike
_SEED: Final = 20260101

_WORDS: Final = """
the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but some
what there we can out other were all your when up use word how said an each she which do their time if will way
about many then them would write like so these her long make thing see him two has look more day could go come did
my sound no most number who over know water than call first people may down side been now find any new work part
take get place made live where after back little only round man year came show every good me give our under name
very through just form much great think say help low line before turn cause same mean differ move right boy old too
does tell sentence set three want air well also play small end put home read hand port large spell add even land
here must big high such follow act why ask men change went light kind off need house picture try us again animal
point mother world near build self earth father head stand own page should country found answer school grow study
still learn plant cover food sun four thought let keep eye never last door between city tree cross since hard start
might story saw far sea draw left late run while press close night real life few stop open seem together next white
children begin got walk example ease paper often always music those both mark book letter until mile river car feet
care second group carry took rain eat room friend began idea fish mountain north once base hear horse cut sure watch
color face wood main enough plain girl usual young ready above ever red list though feel talk bird soon body
""".split()  # noqa: SIM905  a list of 300 quoted words reads worse

_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocab: int
    context: int = 8192

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads


#: ``small`` has exactly the shape of SmolLM2-135M, so its steps cost the same; ``tiny`` is for tests; ``draft`` knows
#: the words of ``small`` but has other weights, so as its draft model it is (nearly) always wrong.
SHAPES: Final = {
    "tiny": Shape(layers=2, width=128, feed_forward=256, heads=4, kv_heads=2, vocab=1024),
    "small": Shape(layers=30, width=576, feed_forward=1536, heads=9, kv_heads=3, vocab=49152),
    "draft": Shape(layers=2, width=576, feed_forward=1536, heads=9, kv_heads=3, vocab=49152),
}


def synthetic_model(path: Path, size: str = "small") -> Path:
    """Write the model of that size to ``path`` and return it; well under a second either way."""
    if size not in SHAPES:
        raise UsageError(f"no synthetic model of size '{size}'", f"one of {', '.join(sorted(SHAPES))}")
    try:
        import gguf
    except ImportError:
        raise MissingExtra("making a model", "engine") from None
    with moved_into(path) as part:
        writer = gguf.GGUFWriter(str(part), "llama")
        _describe(writer, SHAPES[size], size)
        good = _add_tokenizer(writer, SHAPES[size])
        _add_weights(writer, SHAPES[size], good)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


def _describe(writer: Any, shape: Shape, size: str) -> None:
    writer.add_name(f"whywait synthetic {size} (random weights)")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(2)  # mostly Q4_0
    writer.add_quantization_version(2)


def _byte_letters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (the GPT-2 table)."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def _add_tokenizer(writer: Any, shape: Shape) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Add the tokenizer; returns which tokens may be sampled."""
    normal, control, unused = 1, 3, 5
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_byte_letters()]
    kinds = [control] * 3 + [normal] * 256
    known, merges = set(tokens), []
    words = []
    for word in _WORDS:
        # Every merge grows one word from its leading space, so no two words can disturb each other's merges.
        for end in range(1, len(word) + 1):
            grown = "Ġ" + word[:end]
            if grown not in known:
                if len(tokens) == shape.vocab:
                    break
                known.add(grown)
                tokens.append(grown)
                merges.append(f"{grown[:-1]} {grown[-1]}")
        words.append("Ġ" + word)
    kinds += [normal] * (len(tokens) - len(kinds))
    whole = set(words)
    good = np.array([t in whole for t in tokens] + [False] * (shape.vocab - len(tokens)))
    kinds += [unused] * (shape.vocab - len(tokens))
    tokens += [f"<unused{n}>" for n in range(len(tokens), shape.vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(_TEMPLATE)
    return good


class _Numbers:
    """Random four-bit and eight-bit numbers, cut from one pool: drawing 100 MB afresh would take most of a second."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(_SEED)
        pool = np.frombuffer(self._rng.bytes(4_000_037), np.uint8).copy()
        # Four bits hold -8 … 7. Without the -8 the mean is 0; with it every layer would push the same way until the
        # residual stream is one constant.
        pool[(pool & 0x0F) == 0] |= 0x08
        pool[(pool & 0xF0) == 0] |= 0x80
        self._pool = pool

    def _take(self, count: int) -> Bytes:
        return np.resize(self._pool[int(self._rng.integers(1_000_000)) :], count)

    def q4(self, rows: int, columns: int) -> Bytes:
        """Q4_0 blocks, shape (rows, blocks, 18): a half-precision scale, then 32 numbers of four bits."""
        per_row = columns // _BLOCK
        blocks = np.empty((rows, per_row, 18), np.uint8)
        # Such numbers spread by 4.3 of their scale; this makes a product with a unit-sized vector half as large as it.
        blocks[..., :2] = _half(0.5 / (4.3 * columns**0.5))
        blocks[..., 2:] = self._take(rows * per_row * 16).reshape(rows, per_row, 16)
        return blocks

    def q8(self, rows: int, columns: int) -> Bytes:
        """Q8_0 blocks, shape (rows, blocks, 34): a half-precision scale, then 32 numbers of eight bits."""
        per_row = columns // _BLOCK
        blocks = np.empty((rows, per_row, 34), np.uint8)
        blocks[..., :2] = _half(0.001)
        blocks[..., 2:] = self._take(rows * per_row * 32).reshape(rows, per_row, 32)
        return blocks


def _half(value: float) -> Bytes:
    return np.array([value], np.float16).view(np.uint8)


def _add_weights(writer: Any, shape: Shape, good: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    import gguf

    q4, q8 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
    numbers, ones = _Numbers(), np.ones(shape.width, np.float32)

    def matrix(name: str, rows: int, columns: int, *, writes_stream: bool = False) -> None:
        blocks = numbers.q4(rows, columns)
        if writes_stream:
            blocks[0, :, :2] = 0  # scale 0: no layer may touch the constant first number of the residual stream
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=q4)

    embedding = numbers.q4(shape.vocab, shape.width)
    embedding[:, 0, :2] = _half(0.25)
    embedding[:, 0, 2] = (embedding[:, 0, 2] & 0xF0) | 12  # the constant: (12 - 8) * 0.25 = 1
    writer.add_tensor("token_embd.weight", embedding.reshape(shape.vocab, -1), raw_dtype=q4)
    for n in range(shape.layers):
        writer.add_tensor(f"blk.{n}.attn_norm.weight", ones)
        matrix(f"blk.{n}.attn_q.weight", shape.width, shape.width)
        matrix(f"blk.{n}.attn_k.weight", shape.kv_width, shape.width)
        matrix(f"blk.{n}.attn_v.weight", shape.kv_width, shape.width)
        matrix(f"blk.{n}.attn_output.weight", shape.width, shape.width, writes_stream=True)
        writer.add_tensor(f"blk.{n}.ffn_norm.weight", ones)
        matrix(f"blk.{n}.ffn_gate.weight", shape.feed_forward, shape.width)
        matrix(f"blk.{n}.ffn_up.weight", shape.feed_forward, shape.width)
        matrix(f"blk.{n}.ffn_down.weight", shape.width, shape.feed_forward, writes_stream=True)
    writer.add_tensor("output_norm.weight", ones)
    output = numbers.q8(shape.vocab, shape.width)
    output[:, 0, 2:] = 0
    output[~good, 0, :2] = _half(1.0)
    output[~good, 0, 2] = 256 - 127  # -127 against the constant
    writer.add_tensor("output.weight", output.reshape(shape.vocab, -1), raw_dtype=q8)
