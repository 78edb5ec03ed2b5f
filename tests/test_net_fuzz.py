"""The fuzzer of the stream reader, kept working, and its properties under hypothesis. The long runs are in docs."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "fuzz_wire.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_wire", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fuzz = _load()


def test_the_known_streams() -> None:
    for data in fuzz.corpus():
        fuzz.check(data)


@settings(max_examples=300, deadline=None)
@given(st.integers(0x80, 0xFF), st.binary(max_size=16), st.binary(max_size=14))
def test_valid_streams_have_their_tokens_in_any_form_and_split(mode: int, recipe: bytes, cuts: bytes) -> None:
    fuzz.check(bytes([mode, len(cuts) // 2]) + cuts[: len(cuts) // 2 * 2] + recipe)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 0x7F), st.binary(max_size=14), st.binary(max_size=400))
def test_bytes_from_outside_are_read_alike_whole_and_in_pieces(mode: int, cuts: bytes, rest: bytes) -> None:
    fuzz.check(bytes([mode, len(cuts) // 2]) + cuts[: len(cuts) // 2 * 2] + rest)


def test_a_seed_gives_the_same_mutants() -> None:
    def some() -> list[bytes]:
        known = fuzz.corpus()
        rnd = random.Random(5)
        return [fuzz.mutate(rnd, known[i % len(known)], known) for i in range(300)]

    for data in some():
        fuzz.check(data)
    assert some() == some()


def test_it_sees_a_reader_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that depend on the split, an exception of ours, and a count that is off: each is caught."""
    from whywait.net.wire import Response, SseParser

    data = next(d for d in fuzz.corpus() if d[0] == 2)
    whole = SseParser.feed
    with monkeypatch.context() as m:
        m.setattr(SseParser, "feed", lambda self, piece: whole(self, piece) if len(piece) > 40 else [])
        with pytest.raises(fuzz.Wrong):
            fuzz.check(data)
    with monkeypatch.context() as m:
        m.setattr(Response, "on_body", lambda self, piece: {}["no such"])
        with pytest.raises(fuzz.Wrong, match="own"):
            fuzz.check(data)


def test_the_command() -> None:
    run = subprocess.run([sys.executable, str(FILE), "--inputs", "300"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "300 inputs, all right\n"), run.stderr
