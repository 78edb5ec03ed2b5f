"""What a deployment may be: techniques, what fits, refusals with the nearest choice, the catalogue, the verbs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from whywait import simulating
from whywait.cli import main
from whywait.core.schedule import Schedule, Workload
from whywait.errors import UsageError
from whywait.judge.vocabulary import CAUSES
from whywait.load.recipe import Load, schedule_of
from whywait.sim import catalog, techniques
from whywait.sim.capacity import capacity
from whywait.sim.chains import chains
from whywait.sim.deployment import Deployment
from whywait.sim.loads import Options, prepare


@pytest.fixture(scope="module")
def small() -> Deployment:
    return simulating.deployment_of("h100", "llama-3.1-8b")


EXAMPLE = {"token-budget": "=2048", "max-seqs": "=64", "memory-share": "=0.5", "pd": "=2:6", "tp": "=2", "pp": "=2",
           "dp": "=2",
           "ep": "=2", "replicas": "=3", "routing": "=prefix", "faster-memory": "=2", "faster-compute": "=2",
           "faster-link": "=2", "faster-host": "=2", "power-cap": "=400", "machine": "=b200", "engine": "=sglang",
           "priority": "=chat", "prefix-cache": "=off", "chunked-prefill": "=off",
           "continuous-batching": "=off"}  # fmt: skip
UNDO = {"bf16-weights", "bf16-kv"}  # of a 16-bit deployment they change nothing


@pytest.mark.parametrize("name", techniques.TECHNIQUES)
def test_a_technique_changes_a_deployment_and_says_what_it_is(name):
    base = simulating.deployment_of("b200", "deepseek-v3", layout="tp=8") if name in ("spec-mtp", "ep") else None
    d = base or simulating.deployment_of("b200" if name == "fp4-weights" else "h200", "llama-3.1-8b")
    before = dataclasses.replace(d)
    text = name + EXAMPLE.get(name, "")
    after = techniques.apply(text, d)
    assert d == before
    assert after.applied == (text,)
    bare = dataclasses.replace(after, applied=())
    assert (bare == d) == (name in UNDO)
    t = techniques.TECHNIQUES[name]
    assert t.changes
    assert t.price
    assert t.cuts
    assert t.cuts in CAUSES or t.cuts.startswith("(")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fp8-kw", "fp8-kv"),
        ("max-seqs", "max-seqs=N"),
        ("max-seqs=no", "whole number"),
        ("fp8-kv=3", "fp8-kv"),
        ("pd=2", "pd=2:6"),
        ("spec-draft:drafts=99", "from 1 to"),
        ("spec-draft:speed=2", "spec-draft[:drafts=N]"),
        ("spec-draft:accept=2", "at most 1"),
        ("spec-mtp", "spec-draft"),
        ("routing=random", "least-load"),
        ("kv-offload=tape", "disk"),
        ("machine=h20x", "h200"),
        ("memory-share=2", "at most 1"),
        ("faster-memory=0", "above 0"),
    ],
)
def test_what_a_technique_does_not_take_is_refused_with_what_it_does(text, said, small):
    with pytest.raises(UsageError) as refused:
        techniques.apply(text, small)
    assert said in refused.value.message + refused.value.hint


def test_techniques_apply_in_order_and_keep_their_keys(small):
    d = techniques.apply("spec-draft:drafts=4:accept=0.5, fp8-kv ,pd=2:6:gbps=100", small)
    assert d.speculation is not None
    assert d.split is not None
    assert d.speculation.drafts == 4
    assert d.speculation.acceptance[0] == 0.5
    assert len(d.speculation.acceptance) == 4
    assert d.precision.kv == "fp8"
    assert (d.split.prefill, d.split.decode, d.split.bytes_per_s) == (2, 6, 100e9)
    assert d.devices == 8


@pytest.mark.parametrize(
    ("machine", "model", "how", "hint"),
    [
        ("h200", "llama-3.1-70b", {}, "tp=2"),
        ("h200", "llama-3.1-70b", {}, "fp8-weights"),
        ("h200", "llama-3.1-8b", {"layout": "tp=3"}, "2 or 4"),
        ("h200", "llama-3.1-8b", {"layout": "pp=5"}, "4 or 8"),
        ("h200", "llama-3.1-8b", {"layout": "ep=2"}, "leave ep out"),
        ("h200", "mixtral-8x7b", {"layout": "tp=8,ep=3"}, "2 or 4"),
        ("a100", "llama-3.1-8b", {"precision": "fp8"}, "int8-weights"),
        ("h200", "llama-3.1-8b", {"count": 3, "layout": "tp=2"}, "--count 2"),
        ("h200", "llama-3.1-8b", {"layout": "fp8-kv"}, "--apply"),
        ("h200", "llama-3.1-8b", {"precision": "fp7"}, "such as bf16"),
        ("h200", "lama-3.1-8b", {}, "Llama-3.1-8B"),
        ("h20x", "llama-3.1-8b", {}, "h200"),
    ],
)
def test_the_impossible_is_refused_with_the_nearest_choice(machine, model, how, hint):
    with pytest.raises(UsageError) as refused:
        capacity(simulating.deployment_of(machine, model, **how))
    assert hint in refused.value.hint
    assert refused.value.exit_code == 2


def test_a_hint_is_feasible():
    for choice in ("tp=2", "fp8-weights"):
        assert capacity(techniques.apply(choice, simulating.deployment_of("h200", "llama-3.1-70b"))).blocks > 0


def test_devices_that_are_counted_are_used():
    d = simulating.deployment_of("h200", "llama-3.1-70b", count=8)
    assert (d.layout.tp, d.replicas, d.devices) == (2, 4, 8)
    assert simulating.deployment_of("h200", "llama-3.1-70b", count=8, layout="tp=4").replicas == 2


def test_capacity_by_hand(small):
    """Llama 3.1 8B in 16 bits: 2 × 8 KV heads × 128 × 32 layers × 2 bytes = 131,072 bytes per token."""
    c = capacity(small, 1000)
    assert c.kv_bytes_per_token == 131072
    assert c.weight_bytes == pytest.approx(16.06e9, rel=0.01)
    assert c.tokens == pytest.approx((c.memory_bytes * 0.9 - c.weight_bytes - c.working_bytes) / 131072, abs=16)
    assert c.concurrency == pytest.approx(c.tokens / 1000)
    halved = capacity(techniques.apply("fp8-kv", small))
    assert halved.tokens == pytest.approx(2 * c.tokens, rel=0.001)


def test_fp8_of_a_model_with_experts_has_scales_by_block():
    for model, weights, experts in (("minimax-m2.5", "fp8_block", None), ("qwen3-235b-a22b", "fp8", "fp8_block"),
                                    ("llama-3.1-8b", "fp8", None)):  # fmt: skip
        found = simulating.deployment_of("h200", model, precision="fp8", layout="tp=4").precision
        assert (found.weights, found.experts, found.compute) == (weights, experts, "fp8")
        plain = simulating.deployment_of("h200", model, layout="tp=4")
        assert techniques.apply("fp8-weights", plain).precision == found


def test_a_count_of_blocks_from_a_log_goes_on_as_a_factor(small):
    told = dataclasses.replace(small, engine=dataclasses.replace(small.engine, kv_blocks=1000))
    assert capacity(told).blocks == 1000
    assert capacity(techniques.apply("fp8-kv", told)).blocks == 2000
    computed = capacity(small).blocks
    wider = capacity(techniques.apply("tp=2", told)).blocks
    assert wider == pytest.approx(1000 * capacity(techniques.apply("tp=2", small)).blocks / computed, rel=0.01)


def by_hand(blocks: list[list[int]], prompt: list[int], piece: int = 32) -> Schedule:
    n = len(blocks)
    col = np.arange(n, dtype=np.int64)
    return Schedule(col, 0 * col, np.array(prompt, np.int64), col * 0 + 8, col * 0, blocks=tuple(map(tuple, blocks)),
                    block_tokens=piece)  # fmt: skip


def rows(s: Schedule, block: int, warm: bool = False) -> list[list[int]]:
    at, ids = chains(s, block, warm)
    return [ids[at[i] : at[i + 1]].tolist() for i in range(len(s))]


def test_equal_pieces_are_equal_blocks_and_what_nobody_shares_has_no_name():
    got = rows(by_hand([[1, 2, 3], [1, 2, 9], [7], [1]], [96, 90, 32, 20]), 16)
    assert got[0] == got[1]
    assert len(got[0]) == 4
    assert got[2] == []  # nobody else has it
    assert got[3] == got[0][:1]  # 20 tokens hold one whole block
    assert rows(by_hand([[1, 2], [3, 2]], [64, 64]), 16) == [[], []]  # equal text after another beginning is not equal


def test_blocks_that_do_not_divide_pieces():
    got = rows(by_hand([[1, 2], [1, 2]], [64, 64]), 48)
    assert got[0] == got[1]
    assert len(got[0]) == 1
    assert [len(r) for r in rows(by_hand([[1, 2], [1, 5]], [64, 64]), 48)] == [0, 0]  # it ends in what differs


def test_turns_of_a_session_share_what_was_said():
    w = Workload.from_dict({"prompt_tokens": "100", "turns": "3", "turn_tokens": "40", "output_tokens": "20"})
    s = schedule_of(Load("concurrency", 2, 6), w, 0, 0)[0]
    got = rows(s, 10)
    assert s.prompt_tokens[:3].tolist() == [100, 160, 220]
    assert got[1][:12] == got[0]
    assert len(got[0]) == 12
    assert got[2] == got[1]
    assert len(got[2]) == 18
    assert not set(got[0]) & set(got[3])


def test_groups_share_their_system_prompt_and_a_warm_load_finds_it():
    fields = {"prompt_tokens": "64", "shared": 0.5, "groups": 2, "cache": "warm"}
    s = schedule_of(Load("rate", 10, 12), Workload.from_dict(fields), 0, 0)[0]
    got = rows(s, 16)
    for i, r in enumerate(got):
        assert len(r) == 2
        assert (r == got[0]) == (s.prefix_group[i] == s.prefix_group[0])
    d = simulating.deployment_of("h100", "llama-3.1-8b")
    warm = prepare(d, s, "rate", 10.0, 0, options=Options(warm=True))
    assert warm.warmed == len(set(s.prefix_group.tolist()))
    assert len(warm.load.prompt) == len(s) + warm.warmed
    assert prepare(d, s, "rate", 10.0, 0, options=Options()).warmed == 0


def test_priority_is_by_class_or_by_slo():
    fields = {"class": [{"name": "batch"}, {"name": "chat", "slo": {"ttft_ms": 200.0}}]}
    s = schedule_of(Load("rate", 10, 10), Workload.from_dict(fields), 0, 0)[0]
    d = simulating.deployment_of("h100", "llama-3.1-8b")
    o = Options(slo_of_classes={"chat": {"ttft_ms": 200.0}})
    for text in ("priority", "priority=chat"):
        got = prepare(techniques.apply(text, d), s, "rate", 10.0, 0, options=o).load.priority
        assert (got == np.where(s.klass == 1, 0, 1)).all()
    assert (
        prepare(techniques.apply("priority=batch", d), s, "rate", 10.0, 0, options=o).load.priority == s.klass
    ).all()


MINE = """
[machines.h300]
base = "h200"
read_tbs = 9.6
[models.mine]
base = "llama-3.1-8b"
layers = 40
"""


def test_a_catalogue_of_ones_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    try:
        catalog.use(str(file))
        d = simulating.deployment_of("h300", "mine")
        assert d.machine.read_bytes_per_s == 9.6e12
        assert d.machine.flops["fp8"] > 1e15
        assert d.model.layers == 40
        assert "mine.toml" in d.machine.source
        assert "mine.toml" in d.model.source
        assert techniques.apply("machine=h300", d).machine == d.machine
        for text, said in (
            ("[machine.x]\n", "machine"),
            ("[machines.x]\nread_tbs = 1\n", "x"),
            ("[models.y]\nbase='zzz'", "zzz"),
        ):
            file.write_text(text)
            with pytest.raises(UsageError, match=said):
                catalog.use(str(file))
    finally:
        catalog.use(None)
    with pytest.raises(UsageError):
        catalog.machine_named("h300")


def test_the_verb_prints_each_figure_with_its_interval_and_what_it_rests_on(tmp_path, capsys):
    args = ["simulate", "--machine", "h200", "--model", "llama-3.1-8b", "--concurrency", "1,4", "--requests", "12",
            "--draws", "3", "--slo", "ttft=500ms", "--apply", "fp8-kv"]  # fmt: skip
    assert main([*args, "--out", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    for part in ("1 × H200 SXM", "TTFT p99", "TPOT p50", "goodput", "$ per million", "80 %", "prior only", "machine:",
                 "model:", "known error of vllm", "fp8-kv: KV cache in FP8", "what it waits on"):  # fmt: skip
        assert part in said, part
    assert main(["show", str(tmp_path / "a"), "--html", str(tmp_path / "a.html")]) == 0
    assert "SIMULATED" in capsys.readouterr().out
    assert "SIMULATED" in (tmp_path / "a.html").read_text()
    assert main([*args, "--out", str(tmp_path / "b"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["applied"] == ["fp8-kv"]
    assert len(told["points"]) == 2
    f = told["points"][1]["figures"]["output_tokens_per_s"]
    assert f["low"] <= f["value"] <= f["high"]
    assert told["summary"]["made_by"] == "simulated"
    assert main([*args, "--out", str(tmp_path / "c"), "--fail-if", "ttft_ms.p95>0.001"]) == 1


def test_the_verb_does_not_write_into_a_folder_that_holds_something(tmp_path, capsys):
    Path(tmp_path / "x").write_text("mine")
    assert main(["simulate", "--machine", "h200", "--model", "llama-3.1-8b", "--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["simulate", "--machine", "h200"]) == 2


def test_the_catalogue_is_listed_and_told_in_full(capsys):
    assert main(["catalog"]) == 0
    said = capsys.readouterr().out
    for name in ("H200 SXM", "Llama-3.1-70B", "spec-mtp", "sglang"):
        assert name in said
    assert main(["catalog", "machines", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machines"]["source"]
    assert main(["catalog", "techniques", "spec-mpt"]) == 2
    assert "spec-mtp" in capsys.readouterr().err
    for what, name in (("models", "deepseek-v3"), ("engines", "trtllm"), ("techniques", "kv-offload")):
        assert main(["catalog", what, name]) == 0
        assert name.split("-")[0] in capsys.readouterr().out.lower()
    assert main(["catalog", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"machines", "models", "techniques", "engines", "waits"}
