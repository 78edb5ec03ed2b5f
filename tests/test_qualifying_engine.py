"""``whywait quality`` on the embedded engine: a KV cache of fewer bits moves distributions, a second run does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="needs the 'engine' extra: pip install 'whywait[engine]'")

from whywait.cli import main
from whywait.lab import state
from whywait.lab.models import cached_synthetic

pytestmark = pytest.mark.engine


def test_fewer_bits_in_the_cache_show_and_the_same_does_not(tmp_path: Path) -> None:
    before = {e.pid for e in state.running()}
    arm = f"embedded:model={cached_synthetic('tiny')},ctx_per_slot=512"
    common = ["--positions", "50", "--context", "96", "--only", "agreement"]
    kl = {}
    for name, b in (("same", ["--aa"]), ("q4_0", [f"{arm},cache_type_k=q4_0"])):
        out = tmp_path / name
        assert main(["quality", arm, *b, *common, "--out", str(out)]) == 0
        found = json.loads((out / "quality.json").read_text())
        assert found["agreement"]["figures"]["positions"] == 50
        assert found["arms"]["A"]["engine"] == "llama.cpp"
        kl[name] = found["agreement"]["figures"]["kl_mean"]
    assert kl["q4_0"] > 100 * max(kl["same"], 1e-9)
    assert {e.pid for e in state.running()} <= before
