"""A fit draws traffic like the log's: quantiles of lengths and gaps, their correlation, the prefix hit rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whywait.cli import main
from whywait.convert.fit import describe, errors, fit, hit_rate, to_toml
from whywait.convert.read import read
from whywait.convert.traces import Record, Trace, build, from_schedule, write_schedule
from whywait.core.fitted import MOST_KNOTS, Fitted, curve
from whywait.core.prefix import BLOCK_WORDS, PIECE_CHARS, chain, hits, prompt_texts
from whywait.core.timetable import read_schedule
from whywait.core.workload import Workload
from whywait.errors import UsageError
from whywait.load.recipe import open_schedule

TRACES = Path(__file__).resolve().parents[1] / ".." / "shared" / "traces"
SHARED = {
    "azure code": ["azure2023/AzureLLMInferenceTrace_code.csv"],
    "azure conversation": ["azure2023/AzureLLMInferenceTrace_conv.csv"],
    "mooncake conversation": ["mooncake/conversation_trace.jsonl"],
    "mooncake synthetic": ["mooncake/synthetic_trace.jsonl"],
    "servegen": [f"servegen/chunk-{n}-trace.csv" for n in (2, 4, 9, 10, 32)],
    "llmservingsim": ["llmservingsim/sharegpt-qwen3-32b-300-sps10.jsonl"],
}


def within(trace: Trace, rows: Any) -> None:
    """The promise: lengths and gaps within 5 %, hit rate within 3 points; and the whole takes as long."""
    worst = errors(trace, rows)
    assert {k: v for k, v in worst.items() if k in ("prompt_tokens", "output_tokens", "gap_s") and v > 0.05} == {}
    assert worst["span_s"] < 0.05
    if worst["hit_rate"] is not None:
        assert worst["hit_rate_drawn"] == pytest.approx(worst["hit_rate"], abs=0.03)


@pytest.mark.shared
@pytest.mark.skipif(not TRACES.is_dir(), reason="../shared is not here")
@pytest.mark.parametrize("what", SHARED)
def test_real_traces_are_drawn_and_replayed_as_they_were(what: str, tmp_path: Path) -> None:
    trace = read([TRACES / f for f in SHARED[what]])
    fitted = fit(trace)
    for seed in (1, 2):
        within(trace, fitted.sample(seed=seed))
    # By the files, as a user would: drawn from the TOML, replayed from the schedule.
    toml, replay = tmp_path / "w.toml", tmp_path / "w.schedule.jsonl"
    toml.write_text(to_toml(fitted, trace, replay.name))
    write_schedule(trace, replay)
    drawn = from_schedule(open_schedule(Workload.from_toml(toml), None, None))
    within(trace, drawn)
    replayed = from_schedule(read_schedule(replay))
    assert max(v for k, v in errors(trace, replayed).items() if "hit" not in k) < 1e-3
    assert hit_rate(replayed.chains) == hit_rate(trace.chains)
    if trace.chains is None:
        a, b = (np.corrcoef(np.argsort(np.argsort(t.prompt_tokens)), np.argsort(np.argsort(t.output_tokens)))[0, 1]
                for t in (trace, drawn))  # fmt: skip
        assert b == pytest.approx(a, abs=0.05)


@pytest.mark.shared
@pytest.mark.skipif(not TRACES.is_dir(), reason="../shared is not here")
def test_known_hit_rates() -> None:
    """As the traces' own description says: 0.37 and 0.64 with an unlimited cache."""
    for what, wanted in (("mooncake conversation", 0.37), ("mooncake synthetic", 0.64)):
        assert hit_rate(read([TRACES / f for f in SHARED[what]]).chains) == pytest.approx(wanted, abs=0.005)


def bursty(n: int = 3000, seed: int = 5) -> Trace:
    """Bursts and pauses, two kinds of request whose outputs differ, system prompts and growing chats."""
    rng = np.random.default_rng(seed)
    gaps = np.where(rng.random(n) < 0.1, rng.gamma(0.5, 20, n), 0.02)
    at = np.cumsum(gaps)
    records: list[Record] = []
    chats: list[list[int]] = []
    fresh = 10
    for i in range(n):
        long = rng.random() < 0.3
        grows = chats and rng.random() < 0.5
        base = chats[int(rng.integers(len(chats)))] if grows else [int(rng.integers(3))]
        new = int(rng.integers(8, 20)) if long else int(rng.integers(1, 4))
        blocks = base + list(range(fresh, fresh + new))
        fresh += new
        chats = [*chats[-30:], blocks]
        records.append(Record(float(at[i]), len(blocks) * 64, int(rng.integers(400, 500) if long else 20), blocks))
    return build(records, "test", [], 64)


def test_a_made_up_log_is_drawn_as_it_was() -> None:
    trace = bursty()
    rows = fit(trace).sample(seed=3)
    within(trace, rows)
    assert trace.chains is not None
    assert rows.chains is not None
    assert 0.3 < (hit_rate(trace.chains) or 0) < 0.9
    # The two kinds keep their own outputs: what lengths by themselves would mix.
    for t in (trace, rows):
        assert np.median(t.output_tokens[t.prompt_tokens > np.quantile(t.prompt_tokens, 0.97)]) > 200
    r = [np.corrcoef(t.prompt_tokens, t.output_tokens)[0, 1] for t in (trace, rows)]
    assert r[1] == pytest.approx(r[0], abs=0.08)
    again = fit(trace).sample(seed=3)
    assert again.chains == rows.chains
    assert (again.at_s == rows.at_s).all()
    assert fit(trace).sample(seed=4).at_s.tolist() != rows.at_s.tolist()


def test_bursts_stay_together() -> None:
    """Gaps alone would not do: a service sees whether short ones follow each other."""
    gaps = np.tile([0.01] * 50 + [10.0] * 10, 20)
    trace = build([Record(float(t), 10, 10) for t in np.cumsum(gaps)], "test", [])
    rows = fit(trace).sample(seed=1)

    def switches(at: Any) -> int:
        long = np.diff(at) > 1
        return int((long[1:] != long[:-1]).sum())

    assert switches(trace.at_s) == 39
    assert switches(rows.at_s) < 150  # shuffled they would be about 330
    within(trace, rows)


def test_the_rate_changes_when_it_did_in_the_log() -> None:
    """Pooled gaps have the right quantiles and would still spread the rush over the whole day."""
    rng = np.random.default_rng(2)
    gaps = np.concatenate([rng.exponential(1, 2000), rng.exponential(0.05, 2000)])
    trace = build([Record(float(t), 10, 10) for t in np.cumsum(gaps)], "test", [])
    at = fit(trace).sample(seed=1).at_s
    for i in (1000, 1800, 2200, 3000):  # the change itself is known to within a stretch of 300 requests
        assert at[i] / at[-1] == pytest.approx(trace.at_s[i] / trace.at_s[-1], abs=0.01)


def test_fewer_more_and_faster() -> None:
    trace = bursty(1000)
    fitted = fit(trace)
    whole = fitted.sample(seed=1)
    few = fitted.sample(100, seed=1)
    assert few.at_s.tolist() == whole.at_s[:100].tolist()  # the beginning of the same
    more = fitted.sample(2500, seed=1)
    assert len(more.at_s) == 2500
    assert (np.diff(more.at_s) >= 0).all()
    fast = fitted.sample(seed=1, rate=100.0)
    assert (len(fast.at_s) - 1) / fast.at_s[-1] == pytest.approx(100, rel=0.02)
    assert np.diff(fast.at_s) == pytest.approx(np.diff(whole.at_s) * fitted.rate / 100)
    assert fitted.requests == 1000


def test_a_curve_keeps_jumps_and_tails_with_few_knots() -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([np.zeros(900), np.full(95, 3.0), [500, 900, 1000, 2000, 5000]])
    at, amount = curve(rng.permutation(values), 1e-3)
    drawn = np.interp((np.arange(1000) + 0.5) / 1000, at, amount)
    assert drawn == pytest.approx(np.sort(values))
    assert len(at) <= 10
    heavy = rng.pareto(1.1, 50_000)
    at, amount = curve(heavy, 1e-3)
    assert len(at) <= MOST_KNOTS
    drawn = np.interp((np.arange(50_000) + 0.5) / 50_000, at, amount)
    assert drawn.mean() == pytest.approx(heavy.mean(), rel=0.05)
    assert amount[-1] == pytest.approx(heavy.max(), rel=1e-5)


def test_a_fit_survives_its_file(tmp_path: Path) -> None:
    trace = bursty(600)
    fitted = fit(trace)
    path = tmp_path / "w.toml"
    path.write_text(to_toml(fitted, trace, "w.schedule.jsonl"))
    workload = Workload.from_toml(path)
    assert workload.cache == "natural"
    assert workload.fitted == Fitted.from_dict(fitted.as_dict())
    assert workload.fitted is not None
    a, b = workload.fitted.sample(seed=7), fitted.sample(seed=7)
    assert a.at_s == pytest.approx(b.at_s, rel=1e-9)
    assert a.chains == b.chains


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("stage"), "needs at least one [[fitted.stage]]"),
        (lambda d: d.update(bucket=[]), "needs at least one [[fitted.bucket]]"),
        (lambda d: d["stage"][0].pop("lag1"), "fitted stage 0: lag1 must be a number, not None"),
        (lambda d: d["stage"][0].update(requests=0), "requests must be at least 1"),
        (lambda d: d["stage"][0].update(gaps=[[0, 1], [2, 1]]), "stage 0: gaps must be two lists"),
        (lambda d: d["bucket"][0].update(prompt=[[0, 1], [2]]), "bucket 0: prompt must be two lists"),
        (lambda d: d["bucket"][0].update(prompt=[[0, 2], [1, 2]]), "prompt must be two lists"),
        (lambda d: d["bucket"][0].update(output="many"), "output must be two lists"),
        (lambda d: d["bucket"][0].update(output=[[0, 1], [True, 2]]), "output must be two lists"),
        (lambda d: [b.update(share=0) for b in d["bucket"]], "no bucket has a share above 0"),
        (lambda d: d.update(block_tokens=0), "block_tokens must be at least 1"),
        (lambda d: d.pop("ago"), "ago must be two lists"),
    ],
)
def test_a_broken_fit_is_told_by_name(change: Any, said: str) -> None:
    raw = fit(bursty(300)).as_dict()
    change(raw)
    with pytest.raises(UsageError) as caught:
        Fitted.from_dict(raw)
    assert said in caught.value.message


def test_small_logs() -> None:
    two = build([Record(0, 10, 5), Record(2, 20, 6)], "test", [])
    rows = fit(two).sample()
    assert rows.at_s.tolist() == [0, 2]
    assert sorted(rows.prompt_tokens.tolist()) == [10, 20]
    assert rows.chains is None
    with pytest.raises(UsageError, match="at least two"):
        fit(build([Record(0, 10, 5)], "test", []))
    at_once = build([Record(1, 10, 5)] * 3, "test", [])
    assert fit(at_once).sample().at_s.tolist() == [0, 0, 0]
    assert describe(at_once)["rate_per_s"] is None


def test_a_log_without_any_reuse_gives_none() -> None:
    trace = build([Record(i, 128, 5, [2 * i, 2 * i + 1]) for i in range(200)], "test", [], 64)
    rows = fit(trace).sample()
    assert hit_rate(rows.chains) == hit_rate(trace.chains) == 0


def test_prefix_chains() -> None:
    words = [f"w{i}" for i in range(3 * BLOCK_WORDS + 5)]
    key = b"k" * 32
    whole = chain(key, [" ".join(words)])
    assert (len(whole.hashes), whole.words) == (3, len(words))
    assert chain(key, [" ".join(words[:100]), "\n" + " ".join(words[100:])]).hashes == whole.hashes
    assert chain(key, ["  ".join(words[: 2 * BLOCK_WORDS])]).hashes == whole.hashes[:2]
    assert not set(chain(key, [" ".join(words[1:])]).hashes) & set(whole.hashes)
    assert not set(chain(b"l" * 32, [" ".join(words)]).hashes) & set(whole.hashes)
    # The same words in the second block, after another first one, are another prefix.
    changed = chain(key, [" ".join(["x", *words[1:]])])
    assert not set(changed.hashes) & set(whole.hashes)
    long = [f"{'y' * 97}{i}" for i in range(4 * BLOCK_WORDS)]
    assert len(" ".join(long)) > PIECE_CHARS  # words that go on in the next piece are not cut in two
    assert chain(key, [" ".join(long)]).hashes == chain(key, long).hashes


def test_what_a_prompt_is_made_of() -> None:
    def texts(**body: Any) -> str:
        return " ".join(prompt_texts(body))

    assert texts(prompt="a b") == "a b"
    assert texts(prompt=["a", "b"]) == "a b"
    assert texts(prompt=[1, 2]) == "1 2"
    assert texts(instructions="be good", input="hi") == "be good hi"
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "u"}}]
    said = texts(messages=[{"role": "system", "content": "s"}, {"role": "user", "content": parts}], tools=[{"x": 1}])
    assert said.startswith("[{'x': 1}] system s user see {")
    assert "'url': 'u'" in said
    assert texts(messages=None, prompt=None) == ""
    assert (
        texts(messages=[{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]) == "assistant [{'id': 1}]"
    )


def test_hits() -> None:
    hit, ago = hits([["a", "b"], ["a", "c"], [], ["a", "b", "d"], ["c"]])
    assert hit.tolist() == [0, 1, 0, 2, 1]
    assert ago.tolist() == [0, 1, 0, 3, 3]


def test_show_in_the_terminal_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [Record(i * 0.5, 64 * (2 + i % 3), 5 + i, [0, i], f"s{i // 4}", i % 4, "chat" if i % 2 else "api")
               for i in range(40)]  # fmt: skip
    path = tmp_path / "w.schedule.jsonl"
    write_schedule(build(records, "test", [], 64), path)
    assert main(["workload", "show", str(path)]) == 0
    out = capsys.readouterr().out
    for said in ("40 requests (schedule) in 19.5 s, 2 per second", "rate over time", "prompt tokens", "█",
                 "shared prefixes", "10 of 4 turns", "api 20, chat 20"):  # fmt: skip
        assert said in out
    assert main(["workload", "show", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["prefix"]["hit_rate"] == pytest.approx(39 / 80)
    assert facts["prefix"]["largest_groups"] == [40]
    assert facts["sessions"]["turns"]["p50"] == 4
    assert sum(facts["rate_over_time"]["requests"]) == sum(facts["prompt_histogram"]["requests"]) == 40
    assert facts["classes"] == {"api": 20, "chat": 20}


def test_show_of_a_workload_file_is_what_it_would_send(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.toml"
    path.write_text('prompt_tokens = 100\noutput_tokens = "uniform(5,9)"\n')
    assert main(["workload", "show", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["requests"], facts["prompt_tokens"]["max"], facts["output_tokens"]["max"]) == (1000, 100, 9)
    assert facts["prefix"] is None
    assert main(["workload", "show", str(path), str(path)]) == 2


def test_fit_says_how_far_off_it_is_and_never_replaces_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.schedule.jsonl"
    trace = bursty(400)
    write_schedule(trace, log)
    assert main(["workload", "fit", str(log), "--out", str(tmp_path / "log.toml")]) == 2
    assert "replace the log" in capsys.readouterr().err
    assert main(["workload", "fit", str(log), "--out", str(tmp_path / "w.toml"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["errors"]["prompt_tokens"] < 0.05
    assert said["errors"]["hit_rate"] == pytest.approx(hit_rate(trace.chains), abs=1e-4)
    assert main(["workload", "fit", str(log), "--out", str(tmp_path / "w.toml")]) == 0
    assert "prefix hit rate" in capsys.readouterr().out
    assert Workload.from_toml(tmp_path / "w.toml").fitted is not None
