"""The same weights in more or fewer bits: what the files hold, and that each says what it is."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from whywait.errors import UsageError
from whywait.lab import models
from whywait.lab.arms import arm_of
from whywait.lab.settings import Settings
from whywait.lab.weights import WEIGHTS

gguf = pytest.importorskip("gguf")
requant = pytest.importorskip("whywait.lab.requant")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return models.cached_synthetic("tiny", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def normal():
    return np.random.default_rng(3).normal(0, 0.02, (512, 64)).astype(np.float32)


def header(path: Path) -> tuple[dict[str, tuple[int, list[int], int]], int]:
    """Name → (type's number, shape, offset), and where the data begins, read by hand: ``gguf`` knows no Q2_0."""
    raw, at = path.read_bytes(), 8
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def number(width: int) -> int:
        nonlocal at
        at += width
        return int.from_bytes(raw[at - width : at], "little")

    def text() -> str:
        nonlocal at
        n = number(8)
        at += n
        return raw[at - n : at].decode()

    def skip(kind: int) -> None:
        nonlocal at
        if kind == 8:
            text()
        elif kind == 9:
            inner, count = number(4), number(8)
            for _ in range(count):
                skip(inner)
        else:
            at += sizes[kind]

    tensors, fields = number(8), number(8)
    for _ in range(fields):
        text()
        skip(number(4))
    found = {}
    for _ in range(tensors):
        name = text()
        shape = [number(8) for _ in range(number(4))]
        found[name] = (number(4), shape, number(8))
    return found, -(-at // 32) * 32


def q2_0_values(packed: np.ndarray) -> np.ndarray:
    """As llama.cpp reads it: (code − 1) × scale, four codes a byte, the lowest bits first."""
    scale = np.ascontiguousarray(packed[:, :2]).view(np.float16).astype(np.float32)
    codes = (packed[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    return scale * (codes.reshape(len(packed), -1).astype(np.float32) - 1)


@pytest.mark.parametrize("name", ["f16", "q8_0", "q5_0", "q4_1", "q4_0", "q3"])
def test_a_file_holds_the_values_of_its_source_as_closely_as_its_bits_allow(source, tmp_path, name):
    made = gguf.GGUFReader(str(requant.requantised(source, tmp_path / "m.gguf", name)))
    before = {t.name: t for t in gguf.GGUFReader(str(source)).tensors}
    worst = {"f16": 0.001, "q8_0": 0.01, "q5_0": 0.08, "q4_1": 0.08, "q4_0": 0.1, "q3": 0.25}[name]
    assert [t.name for t in made.tensors] == list(before)
    for t in made.tensors:
        values = gguf.quants.dequantize(t.data, t.tensor_type)
        old = gguf.quants.dequantize(before[t.name].data, before[t.name].tensor_type)
        if t.name.startswith("blk.") and len(t.shape) == 2:
            assert 8 * t.n_bytes / t.n_elements == WEIGHTS[name].stored
            assert np.sqrt(np.mean((values - old) ** 2) / np.mean(old**2)) < worst
            assert len(np.unique(values.reshape(-1, 32)[5])) <= 2 ** WEIGHTS[name].bits
        else:
            assert t.tensor_type == before[t.name].tensor_type
            assert np.array_equal(values, old)
    assert WEIGHTS[name].says in made.fields["general.description"].contents()
    assert made.fields["tokenizer.ggml.tokens"].contents()[:1] == ["<|endoftext|>"]


def test_two_bits_are_two_bits_on_disk_too(source, tmp_path):
    made = requant.requantised(source, tmp_path / "m.gguf", "q2")
    old = {t.name: t for t in gguf.GGUFReader(str(source)).tensors}
    found, data = header(made)
    raw = np.frombuffer(made.read_bytes(), np.uint8)
    for name, (kind, shape, offset) in found.items():
        t = old[name]
        assert shape == [int(n) for n in t.shape]
        if not (name.startswith("blk.") and len(shape) == 2):
            assert kind == int(t.tensor_type)
            continue
        count = shape[0] * shape[1]
        assert kind == requant.Q2_0
        values = q2_0_values(raw[data + offset :][: count // 64 * 18].reshape(-1, 18)).reshape(shape[::-1])
        before = gguf.quants.dequantize(t.data, t.tensor_type)
        assert np.sqrt(np.mean((values - before) ** 2) / np.mean(before**2)) < 0.5
    assert made.stat().st_size < source.stat().st_size


def test_llama_cpp_reads_two_bits_as_they_were_written(normal):
    """Its own code, where the wheel shows it: the layout is not documented."""
    xllamacpp = pytest.importorskip("xllamacpp")
    libraries = list(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))
    read = getattr(ctypes.CDLL(str(libraries[0])), "dequantize_row_q2_0", None) if libraries else None
    if read is None:
        pytest.skip("this wheel does not show llama.cpp's functions")
    packed, out = np.ascontiguousarray(requant.q2_0(normal)), np.empty(normal.size, np.float32)
    read(packed.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(out.size))
    assert np.array_equal(out.reshape(normal.shape), q2_0_values(packed))


def test_the_scale_that_is_found_is_nearly_the_best_there_is(normal):
    scale, numbers = requant.fitted(normal, -1, 2)
    assert set(np.unique(numbers)) == {-1, 0, 1, 2}
    assert (scale < 0).any(), "a negative scale lays the longer side where the block needs it"
    # Four equally spaced levels leave 11.9 % of a normal's variance at best (Max, IRE Trans. 6 (1960), table II).
    assert np.mean((normal - scale * numbers) ** 2) < 0.13 * np.var(normal)


def test_a_block_of_nothing_stays_nothing():
    scale, numbers = requant.fitted(np.zeros((2, 32), np.float32), -4, 3)
    assert not (scale * numbers).any()
    assert not q2_0_values(requant.q2_0(np.zeros((1, 64), np.float32))).any()


def test_values_with_eight_levels_survive_three_bits_unchanged():
    numbers = np.random.default_rng(1).integers(-4, 4, (64, 32)).astype(np.float32)
    numbers[:, :2] = -4, 3
    packed = requant.q3_in_q4_0(numbers * 0.25)
    assert np.array_equal(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_0), numbers * 0.25)


def test_rows_that_do_not_fill_blocks_are_refused(source, tmp_path, monkeypatch):
    monkeypatch.setattr(requant, "_formats", lambda g: {"q2": requant._Format(42, 96, requant.q2_0)})
    with pytest.raises(UsageError, match="not of a multiple of 96"):
        requant.requantised(source, tmp_path / "m.gguf", "q2")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_ones_own_is_made_once_until_its_file_changes(source, tmp_path):
    mine, said = tmp_path / "mine.gguf", []
    mine.write_bytes(source.read_bytes())
    one = models.with_weights(mine, "q3", tmp_path / "cache", said.append)
    assert one == models.with_weights(mine, "q3", tmp_path / "cache", said.append)
    assert len(said) == 1
    assert "3-bit values in blocks of 4 bits" in said[0]
    assert "q3in" in models.served_name(one)
    with mine.open("ab") as end:
        end.write(bytes(32))
    assert models.with_weights(mine, "q3", tmp_path / "cache") != one


def test_the_default_model_without_a_network_can_be_had_in_few_bits_too(tmp_path, monkeypatch):
    def missing(target, say):
        raise models._Missing("no index")

    monkeypatch.setattr(models, "_obtain", missing)
    monkeypatch.setattr(models, "cached_synthetic", lambda size, cache: small(tmp_path))
    found = models.default_model(tmp_path, weights="q8_0")
    assert models.is_synthetic(found)
    assert found.name == "synthetic-small-1.Q8_0.gguf"
    assert {t.tensor_type.name for t in gguf.GGUFReader(str(found)).tensors if "ffn_up" in t.name} == {"Q8_0"}


def small(folder: Path) -> Path:
    from whywait.lab.synthetic import synthetic_model

    return synthetic_model(folder / "synthetic-small-1.gguf", "tiny")


def test_a_setting_that_is_no_such_weights_is_refused_before_anything_runs():
    assert arm_of("embedded:weights=q2,slots=1").settings == {"weights": "q2", "slots": 1}
    with pytest.raises(UsageError, match="no weights 'q7'"):
        arm_of("embedded:weights=q7")
    assert Settings().weights == ""


@pytest.mark.engine
@pytest.mark.parametrize("name", ["q2", "q3", "q8_0"])
def test_the_engine_serves_it(source, tmp_path, monkeypatch, name):
    pytest.importorskip("xllamacpp")
    from whywait.lab import ask, launch

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("WHYWAIT_CACHE", str(tmp_path / "cache"))
    settings = Settings(model=str(source), weights=name, slots=1, ctx_per_slot=256)
    with launch.launched(lambda: launch.start_embedded(settings)) as engine:
        assert ask.ready(engine.url)
        assert WEIGHTS[name].part.lower() in engine.model
