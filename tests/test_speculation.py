"""Speculative decoding: the draft made on the spot, what a user writes for it, what is read of it, where it turns."""

from __future__ import annotations

import itertools
import json
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.analysis_runs import S, gauge_rows, make_run, stream
from whywait.analyze.compare import effects, figures
from whywait.analyze.speculation import NOTHING, speculation
from whywait.analyze.summary import summarize
from whywait.errors import UsageError
from whywait.judge.trial import judged
from whywait.judge.turns import At, axis, sentence, turns
from whywait.lab.arms import arm_of, embedded_text
from whywait.lab.embedded import common_params
from whywait.lab.models import cached_synthetic
from whywait.lab.prune import cached_draft, kept_layers, prune
from whywait.lab.settings import Settings
from whywait.lab.speculation import NGRAMS, parameters
from whywait.report.trial import draft_cost, effect_rows, told, turn_rows, turn_title
from whywait.report.trial_html import render

gguf = pytest.importorskip("gguf")

# --- the pruned draft


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cached_synthetic("tiny", tmp_path_factory.mktemp("cache"))


def test_a_draft_is_the_model_without_some_layers(tiny: Path, tmp_path: Path) -> None:
    assert prune(tiny, tmp_path / "draft.gguf", 1) == (0,)
    whole, draft = (gguf.GGUFReader(str(p)) for p in (tiny, tmp_path / "draft.gguf"))
    assert draft.fields["llama.block_count"].contents() == 1
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "llama.embedding_length", "tokenizer.chat_template"):
        assert draft.fields[key].contents() == whole.fields[key].contents(), key
    old, new = ({t.name: t for t in r.tensors} for r in (whole, draft))
    assert set(new) == {n for n in old if not n.startswith("blk.1.")}
    for name, t in new.items():
        assert t.shape.tolist() == old[name].shape.tolist(), name
        assert np.array_equal(t.data, old[name].data), name


def test_layers_are_numbered_anew_and_in_order(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whywait.lab.prune.kept_layers", lambda *_: (1,))
    prune(tiny, tmp_path / "draft.gguf", 1)
    old = {t.name: t for t in gguf.GGUFReader(str(tiny)).tensors}
    new = {t.name: t for t in gguf.GGUFReader(str(tmp_path / "draft.gguf")).tensors}
    assert np.array_equal(new["blk.0.ffn_up.weight"].data, old["blk.1.ffn_up.weight"].data)
    assert not np.array_equal(new["blk.0.ffn_up.weight"].data, old["blk.0.ffn_up.weight"].data)


def test_which_layers_stay() -> None:
    assert kept_layers(10, 10) == tuple(range(10))
    assert kept_layers(10, 4) == (0, 3, 6, 9)
    assert kept_layers(10, 7, (3, 0, 9, 5, 4, 1)) == (
        0,
        1,
        2,
        6,
        7,
        8,
        9,
    )  # the first and the last stay, whatever is said
    assert kept_layers(10, 3, (3, 5)) == (0, 6, 9)  # of what is left, evenly
    for layers, keep in itertools.product(range(1, 12), range(1, 12)):
        if keep > layers:
            with pytest.raises(UsageError):
                kept_layers(layers, keep)
            continue
        got = kept_layers(layers, keep, (3, 5, 4, 2))
        assert len(set(got)) == keep
        assert list(got) == sorted(got)
        assert got[0] == 0


def test_a_draft_is_made_once_and_for_one_model(tiny: Path, tmp_path: Path) -> None:
    said: list[str] = []
    one = cached_draft(tiny, 1, tmp_path, said.append)
    stamp = one.stat().st_mtime_ns
    assert cached_draft(tiny, 1, tmp_path, said.append) == one
    assert one.stat().st_mtime_ns == stamp
    assert len(said) == 1
    assert cached_draft(tiny, 2, tmp_path) != one
    other = tmp_path / tiny.name
    other.write_bytes(tiny.read_bytes() + b" ")  # another model of that name
    assert cached_draft(other, 1, tmp_path) != one


# --- what a user writes


def test_a_draft_as_a_user_writes_it() -> None:
    arm = arm_of("embedded:slots=8,draft=pruned,drafts=3,draft_layers=12")
    assert arm.settings == {"slots": 8, "draft": "pruned", "drafts": 3, "draft_layers": 12}
    assert embedded_text(arm.settings) == arm.text
    assert arm_of("embedded:draft=~/small.gguf").settings == {"draft": "~/small.gguf"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("draft=nonsense", "no draft is called 'nonsense'"),
        ("drafts=4", "a draft that is not there"),
        ("draft=self,draft_layers=4", "a draft that is not there"),
        ("draft=self,drafts=65", "out of range"),
    ],
)
def test_mistakes(text: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        arm_of(f"embedded:{text}")


class Params:
    """As ``CommonParams``: attributes that exist, nested; what is not there cannot be set by its dotted name."""

    def __init__(self) -> None:
        names = ("model", "cpuparams", "cpuparams_batch")
        for name in names:
            setattr(self, name, SimpleNamespace())
        draft = SimpleNamespace(mparams=SimpleNamespace(path=""), n_max=0, cpuparams=SimpleNamespace(n_threads=-1),
                                cpuparams_batch=SimpleNamespace(n_threads=-1))  # fmt: skip
        ngrams = {n: SimpleNamespace(size_n=12, size_m=48) for n in ("ngram_simple", "ngram_map_k", "ngram_map_k4v")}
        mod = SimpleNamespace(n_match=24, n_max=64, n_min=48)
        self.speculative = SimpleNamespace(types=[0], draft=draft, ngram_mod=mod, **ngrams)


ENGINE = SimpleNamespace(CommonParams=Params, ggml_type=SimpleNamespace(GGML_TYPE_F16=1))


def test_settings_become_parameters_of_the_engine() -> None:
    none = common_params(ENGINE, Settings(model="m.gguf", threads=1)).speculative
    assert none.types == [0]
    got = common_params(ENGINE, Settings(model="m.gguf", threads=2, draft="d.gguf", drafts=5)).speculative
    assert (got.types, got.draft.mparams.path, got.draft.n_max) == ([1], "d.gguf", 5)
    assert (got.draft.cpuparams.n_threads, got.draft.cpuparams_batch.n_threads) == (2, 2)
    extra = {"speculative.draft.n_max": 7}  # what is said by its dotted name goes last
    assert common_params(ENGINE, Settings(draft="d.gguf", extra=extra)).speculative.draft.n_max == 7


@pytest.mark.parametrize("word", NGRAMS)
def test_every_kind_of_ngram_is_one_the_engine_has(word: str) -> None:
    got = common_params(ENGINE, Settings(draft=word, drafts=6)).speculative
    assert got.types == [NGRAMS[word]]
    assert 6 in (got.draft.n_max, got.ngram_mod.n_max)
    engine = pytest.importorskip("xllamacpp")
    kinds = engine.common_speculative_type
    name = "NGRAM_SIMPLE" if word == "ngram" else word.upper()
    assert int(getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{name}")) == NGRAMS[word]
    common_params(engine, Settings(model="m.gguf", threads=1, draft=word))  # every name exists there


def test_no_draft_no_parameters() -> None:
    assert parameters("", 0, 1) == {}


# --- what is read of it


def _run(drafts: list[tuple[int | None, int | None]], readings: list[Any] | None = None, tokens: int = 21) -> Any:
    rows, chunks = [], []
    for i, (drafted, accepted) in enumerate(drafts):
        first, last = S * (1 + i), S * (1 + i) + 200_000_000
        stamps = {"due_ns": first - 1000, "sent_ns": first - 1000, "accepted_ns": first, "first_ns": first,
                  "last_ns": last, "end_ns": last}  # fmt: skip
        told = {"draft_tokens": drafted, "accepted_tokens": accepted, "prompt_tokens": 10, "output_tokens": tokens}
        rows.append({"id": i, "content_chunks": 2, "first_chunk_tokens": 1, **stamps, **told})
        chunks += stream(i, [first, last], tokens=[1, tokens - 1])
    return make_run(rows, chunks, readings)


ALL = (0, 100 * S)


def test_figures_of_answers() -> None:
    run = _run([(20, 10), (None, None)])  # the second had no proposal: llama.cpp then says nothing
    got = speculation(run, 0, np.ones(2, bool), ALL)
    assert got.acceptance == 0.5
    assert got.per_request == 10
    assert got.tokens_per_step == pytest.approx(40 / (40 - 10))  # 20 tokens after the first of each, 30 steps
    one = speculation(run, 0, np.array([True, False]), ALL)
    assert one.tokens_per_step == 2.0


def test_of_an_engine_that_says_nothing_nothing_is_known() -> None:
    run = _run([(None, None)] * 2)
    assert speculation(run, 0, np.ones(2, bool), ALL) == NOTHING
    point = summarize(run)["points"][0]
    found = figures(run, point)
    assert [found[k] for k in ("acceptance", "tokens_per_step", "draft_tokens_per_request", "step_ms")] == [None] * 4


def _counters(drafted: float, accepted: float, made: float) -> list[Any]:
    named = {"draft_tokens_total": drafted, "accepted_tokens_total": accepted, "output_tokens_total": made}
    return [r for name, v in named.items() for r in gauge_rows(name, [(0, 0.0), (100 * S, v)])]


def test_figures_of_counters() -> None:
    run = _run([(None, None)] * 2, _counters(30, 15, 42))
    got = speculation(run, 0, np.ones(2, bool), ALL)
    assert got.acceptance == 0.5
    assert got.per_request == 15
    assert got.tokens_per_step == pytest.approx(40 / 25)
    none = speculation(_run([(None, None)] * 2, _counters(0, 0, 42)), 0, np.ones(2, bool), ALL)
    assert (none.acceptance, none.tokens_per_step, none.per_request) == (None, 1.0, 0.0)  # it counts: there was none


def test_a_step_is_the_time_of_its_tokens() -> None:
    run = _run([(20, 10), (20, 10)])
    found = figures(run, summarize(run)["points"][0])
    assert found["tokens_per_step"] == 2.0
    assert found["tpot_ms.mean"] == pytest.approx(10.0)  # 200 ms for 20 tokens
    assert found["step_ms"] == pytest.approx(20.0)


def test_what_only_one_arm_knows_is_shown_and_compared_with_nothing() -> None:
    pairs = [({"acceptance": None}, {"acceptance": v}) for v in (0.4, 0.6)]
    e = effects(pairs)["acceptance"]
    assert (e.a, e.b, e.n, e.ratio.value) == (None, 0.5, 0, None)
    assert effects([({"acceptance": None}, {"acceptance": None})])["acceptance"].b is None
    result = _trial([(1, "", [1.4, 1.4])])
    for r in result["rounds"]:
        r["figures"][""]["acceptance"] = 0.5 if r["arm"] == "B" else None
    result |= judged(result["plan"], result["rounds"])
    shown = {row[0]: row for row in effect_rows(told(result, ""))}
    assert shown["drafts accepted"][1:] == ["–", "50 %", "–", "–", "–"]
    assert "drafts accepted" in render(result)


# --- where it turns


def _at(ways: str) -> list[At]:
    words = {"+": "gain", "-": "loss", "?": "open"}
    return [At(2.0**i, words[c]) for i, c in enumerate(ways)]


@pytest.mark.parametrize(
    ("ways", "where", "said"),
    [
        ("++--", [(2, 4)], "gain at 1, turns between 2 and 4"),
        ("+??-", [(1, 8)], "gain at 1, turns between 1 and 8"),
        ("-+", [(1, 2)], "loss at 1, turns between 1 and 2"),
        ("+-+", [(1, 2), (2, 4)], "gain at 1, turns between 1 and 2; turns between 2 and 4"),
        ("++??", [], "gain at 1, 2, no turn seen; open at 4, 8"),
        ("?--", [], "loss at 2, 4, no turn seen; open at 1"),
        ("----", [], "loss at 1, 2, 4, 8, no turn seen"),
        ("????", [], "no point is sure, so whether it turns is undecided"),
    ],
)
def test_turns(ways: str, where: list[tuple[float, float]], said: str) -> None:
    assert turns(_at(ways)) == where
    assert sentence(_at(ways)) == said


def _load(target: float, label: str = "", mode: str = "concurrency", **more: Any) -> dict[str, Any]:
    return {"mode": mode, "target": target, "label": label, **more}


def test_the_axis_is_of_one_kind() -> None:
    assert axis([_load(1)]) == axis([_load(1), _load(1, "again")]) == axis([]) == []
    assert axis([_load(1), _load(2, "rate", "rate")]) == []
    found = axis([_load(4), _load(1, "one"), _load(2, "other text", workload={"seed": 1}), _load(1, "again")])
    assert [(x["target"], x["label"]) for x in found] == [(1, "one"), (4, "")]


def _trial(gains: list[tuple[float, str, list[float]]]) -> dict[str, Any]:
    """A trial whose A makes 100 tokens/s at every load, and whose B so many times that in each pair."""
    loads = [{**_load(t, label), "requests": 4, "duration_s": None} for t, label, _ in gains]
    rounds = []
    for pair in range(len(gains[0][2])):
        for arm in "AB":
            made = {label: {"output_tokens_per_s": 100.0 * (x[pair] if arm == "B" else 1.0)} for _, label, x in gains}
            rounds.append({"number": len(rounds), "arm": arm, "pair": pair, "run": "r", "whole": True, "disturbed": {},
                           "calibration_ms": [10.0], "doubts": [], "engine": {}, "invalid": [],
                           "figures": made})  # fmt: skip
    asked = [{"metric": "output_tokens_per_s", "up": True, "load": "", "price": False}]
    plan = {"loads": loads, "asked": asked, "promise": "", "margin": 0.05, "same": False, "exclude": [], "a": "a",
            "b": "b", "slo": {}, "workload": {}}  # fmt: skip
    head = {"plan": plan, "order": list("AB"), "partial": False, "partial_reason": "", "whywait_version": "0"}
    return {**head, **judged(plan, rounds), "rounds": rounds}


def test_a_trial_says_where_its_effect_turns() -> None:
    sure_gain, open_, sure_loss = [1.4, 1.41, 1.39, 1.4], [0.7, 1.5, 0.8, 1.2], [0.7, 0.71, 0.69, 0.7]
    result = _trial([(1, "", sure_gain), (2, "two", open_), (4, "four", sure_loss)])
    (found,) = result["turns"]
    assert found["turns"] == [[1.0, 4.0]]
    assert [p["way"] for p in found["points"]] == ["gain", "open", "loss"]
    assert found["points"][0]["value"] == pytest.approx(1.4, rel=0.01)
    assert turn_title(found) == "effect against concurrency: output tokens/s: gain at 1, turns between 1 and 4"
    assert [r[0] for r in turn_rows(found)] == ["1", "2", "4"]
    page = render(result)
    assert "turns between 1 and 4" in page
    assert json.loads(json.dumps(result["turns"])) == result["turns"]


def test_the_price_of_a_step_is_said_of_single_streams_and_as_derived() -> None:
    result = _trial([(1, "", [1.0, 1.0]), (2, "two", [1.0, 1.0])])
    assert draft_cost(result) == []  # nobody said how long a step takes
    pairs = [({"step_ms": 20.0, "draft_tokens_per_request": 0.0}, {"step_ms": v, "draft_tokens_per_request": 30.0})
             for v in (44.0, 46.0)]  # fmt: skip
    plain = {n: {"a": e.a, "b": e.b, "n": e.n, "difference": list(e.difference[:3])} for n, e in effects(pairs).items()}
    result["effects"] = {"": plain, "two": plain}
    (line,) = draft_cost(result)
    assert "+25.0 ms" in line
    assert "derived" in line
    plain["draft_tokens_per_request"]["a"] = 30.0  # A speculates too: then the difference is of something else
    assert draft_cost(result) == []


def test_of_a_figure_that_is_better_low_a_fall_is_a_gain() -> None:
    pairs = [({"tpot_ms.mean": 20.0}, {"tpot_ms.mean": v}) for v in (10.0, 10.1, 9.9, 10.0)]
    from whywait.judge.turns import way

    assert way(effects(pairs)["tpot_ms.mean"]) == "gain"
    assert way(None) == "open"


def test_a_trial_of_one_load_has_no_axis() -> None:
    assert _trial([(1, "", [1.4, 1.4])])["turns"] == []


# --- the real engine


@pytest.mark.engine
def test_the_engine_says_what_of_a_draft_was_accepted(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    from whywait.lab.launch import launched, start_embedded

    monkeypatch.setenv("WHYWAIT_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    body = {"messages": [{"role": "user", "content": "the sea and the land"}], "max_tokens": 24, "temperature": 0,
            "ignore_eos": True}  # fmt: skip
    for draft, layers in (("self", 0), ("pruned", 1)):
        settings = Settings(model=str(tiny), slots=1, ctx_per_slot=256, threads=1, draft=draft, drafts=3,
                            draft_layers=layers)  # fmt: skip
        with launched(lambda settings=settings: start_embedded(settings)) as engine:
            ask = urllib.request.Request(f"{engine.url}/v1/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})  # fmt: skip
            with urllib.request.urlopen(ask, timeout=60) as answer:
                told = json.load(answer)["timings"]
        assert told["draft_n"] > 0
        assert told["draft_n_accepted"] <= told["draft_n"]
        if draft == "self":  # the same arithmetic on another width of step: nearly always the same token
            assert told["draft_n_accepted"] >= 0.8 * told["draft_n"]
