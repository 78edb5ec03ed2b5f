"""Load shapes: what comes out has the rates, the burstiness, the sessions and the shared parts that were asked for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_schedule import WORKLOADS
from whywait.core.fitted import Bucket, Fitted, curve
from whywait.core.fitted import Stage as Stretch
from whywait.core.schedule import ARRIVALS, Lengths, RequestClass, Schedule, Stage, Workload
from whywait.core.timetable import read_schedule, write_schedule
from whywait.errors import UsageError
from whywait.load import arrivals
from whywait.load.recipe import Load, closed_schedule, mean_rate, open_schedule, schedule_of

S = 1_000_000_000
MS = 1_000_000


def L(text):
    return Lengths.parse(text)


# Arrivals


def _gaps(workload, rate=20.0, n=20_000):
    return np.diff(open_schedule(workload, rate, n).due_ns) / S


@pytest.mark.parametrize("cv", [0.25, 1, 3])
def test_gamma_gaps_have_the_asked_mean_and_burstiness(cv):
    gaps = _gaps(Workload(arrivals="gamma", cv=cv))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03 * max(1, cv))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.04


def test_bursts_come_at_once_and_at_equal_distances():
    due = open_schedule(Workload(arrivals="burst", burst=5), 10, 23).due_ns
    assert due.tolist() == [i // 5 * 5 * S // 10 for i in range(23)]


@given(st.integers(0, 2**32), st.sampled_from(ARRIVALS), st.integers(2, 300))
def test_one_stage_of_constant_rate_is_that_rate(seed, shape, n):
    workload = Workload(arrivals=shape, seed=seed)
    plain = open_schedule(workload, 4, n).due_ns
    staged = open_schedule(dataclasses.replace(workload, stages=(Stage(4, 1000),)), None, n).due_ns
    assert np.abs(plain[plain < 1000 * S] - staged).max() <= 1


RATES = st.floats(0, 50)
STAGES = st.lists(
    st.builds(Stage, st.floats(0.1, 50), st.floats(0.5, 20), st.none() | RATES), min_size=1, max_size=5
).map(tuple)


@given(STAGES)
def test_constant_stages_bring_exactly_what_their_rates_add_up_to(stages):
    """At every moment so many have come as the area under the rate, rounded up: constant is constant on a ramp too."""
    due = open_schedule(Workload(arrivals="constant", stages=stages), None, None).due_ns / S
    total = sum(s.requests for s in stages)
    assert len(due) == 1 or len(due) - 1 < total <= len(due) + 1e-9
    began = 0.0
    area = np.zeros(len(due))
    for s in stages:
        t = np.clip(due - began, 0, s.duration_s)
        area += s.rate * t + (s.end - s.rate) / s.duration_s * t * t / 2
        began += s.duration_s
    assert area == pytest.approx(np.arange(len(due)), abs=1e-4)
    assert (np.diff(due) >= 0).all()
    assert due[-1] <= began


def test_a_poisson_ramp_keeps_its_rate_and_its_character():
    stages = (Stage(10, 200, 110), Stage(110, 100), Stage(5, 100))
    due = open_schedule(Workload(stages=stages), None, None).due_ns / S
    for low, high, wanted in ((0, 100, 3500), (100, 200, 8500), (200, 300, 11000), (300, 400, 500)):
        assert ((due >= low) & (due < high)).sum() == pytest.approx(wanted, abs=4 * wanted**0.5)
    gaps = np.diff(due[(due > 201) & (due < 299)])
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.05)


def test_a_rate_scales_stages_to_that_mean():
    stages = (Stage(1, 10), Stage(3, 10))
    workload = Workload(arrivals="constant", stages=stages)
    assert mean_rate(workload) == 2
    assert len(open_schedule(workload, 8, None)) == 160
    assert arrivals.mean_rate(arrivals.scaled(stages, 8)) == 8
    assert mean_rate(Workload()) is None


def test_bursty_stages_do_not_run_dry():
    """However bursty: the draw goes on until the last stage is full."""
    for seed in range(30):
        workload = Workload(arrivals="gamma", cv=3, seed=seed, stages=(Stage(20, 100),))
        due = open_schedule(workload, None, None).due_ns
        assert due.max() > 60 * S


# Sessions


AGENT = RequestClass(
    "agent", 1, L("uniform(80,120)"), L("uniform(40,60)"), turns=L("uniform(2,4)"), turn_tokens=L("30"),
    think_ms=L("lognormal(2000,0.4)"), tool_calls=L("uniform(1,2)"), tool_output_tokens=L("9"),
    tool_result_tokens=L("77"), tool_ms=L("5"), thinking_tokens=L("1000"), shared=0.5, groups=3,
)  # fmt: skip


def test_an_agents_prompts_grow_by_answer_and_result():
    s = closed_schedule(Workload((AGENT,)), 400, first_id=50)
    for row in np.flatnonzero(s.turn > 0):
        before = row - 1
        assert s.after_id[row] == s.id[before]
        answered = s.output_tokens[before] - s.thinking_tokens[before]  # thinking is not sent back
        brought = s.prompt_tokens[row] - s.prompt_tokens[before] - answered
        assert brought == (77 if s.tool[row] else 30)
        assert (answered == 9) == bool(s.tool[row])  # a tool's result follows a short call, and only that
        assert s.think_ns[row] == 5 * MS if s.tool[row] else s.think_ns[row] > 100 * MS
        assert s.session_id[row] == s.session_id[before]
        assert s.prefix_group[row] == s.prefix_group[before]
    first = s.turn == 0
    assert (s.after_id[first] == -1).all()
    assert (s.think_ns[first] == 0).all()
    assert (s.thinking_tokens == 1000).all()
    assert (s.output_tokens > 1000).all()
    user = (s.tool == 0) & (s.session_id < s.session_id.max())  # the last session may be cut
    turns = np.bincount(s.session_id[user] - 50)
    assert set(turns[turns > 0]) == {2, 3, 4}
    assert (s.prefix_tokens[first] == np.rint(s.prompt_tokens[first] / 2)).all()
    assert set(s.prefix_group.tolist()) == {0, 1, 2}


@given(WORKLOADS, st.integers(1, 80), st.integers(0, 1000))
def test_sessions_are_sound(workload, n, first_id):
    s = open_schedule(workload, 5, n, first_id)
    assert len(s) == n
    assert s.id.tolist() == list(range(first_id, first_id + n))
    roots = s.after_id < 0
    assert (s.due_ns[roots] >= 0).all()
    assert (s.due_ns[~roots] == -1).all()
    assert (np.diff(s.due_ns[roots]) >= 0).all()
    assert (s.turn[roots] == 0).all()
    assert (s.after_id[~roots] == s.id[~roots] - 1).all()
    assert (s.turn[~roots] == s.turn[np.flatnonzero(~roots) - 1] + 1).all()
    known = s.session_id >= 0
    assert (s.id[known] - s.turn[known] == s.session_id[known]).all()
    assert (s.prompt_tokens >= 1).all()
    assert (s.prefix_tokens <= s.prompt_tokens).all()
    assert (s.thinking_tokens < s.output_tokens).all()


def test_sessions_keep_the_asked_rate_of_requests_and_share():
    chat = RequestClass("chat", 3, turns=L("uniform(3,5)"))
    s = open_schedule(Workload((chat, RequestClass("one", 1)), arrivals="constant"), 10, 4000)
    assert s.due_ns.max() / S == pytest.approx(400, rel=0.01)
    assert (s.klass == 0).sum() == 3000
    assert (s.due_ns[s.klass == 0] >= 0).sum() == pytest.approx(750, rel=0.03)


def test_cold_points_have_shared_beginnings_of_their_own():
    """Or the second point of a sweep would find the first one's in the cache."""
    shared = RequestClass(shared=0.5, groups=2)
    a, b = (set(closed_schedule(Workload((shared, shared)), 50, salt=k).prefix_group.tolist()) for k in (0, 1))
    assert len(a) == len(b) == 4
    assert not a & b
    natural = Workload((shared,), cache="natural")
    assert {*closed_schedule(natural, 50, salt=1).prefix_group.tolist()} == {0, 1}


# Points


def test_a_point_is_bounded_as_asked():
    def count(load, workload=None):
        schedule, seconds = schedule_of(load, workload or Workload(), 0, 0)
        return len(schedule), seconds

    assert count(Load("concurrency", 4)) == (40, None)
    assert count(Load("concurrency", 4, requests=7)) == (7, None)
    assert count(Load("concurrency", 4, duration_s=5)) == (4000, 5)
    assert count(Load("rate", 4)) == (120, 30)
    assert count(Load("rate", 4, requests=9)) == (9, None)
    assert count(Load("rate", 4, duration_s=5)) == (20, 5)
    staged = Workload(arrivals="constant", stages=(Stage(2, 10), Stage(4, 10)))
    assert count(Load("rate", 3), staged) == (60, None)
    assert count(Load("rate", 3, duration_s=10), staged) == (20, 10)
    assert count(Load("rate", 3, requests=5), staged) == (5, None)
    assert count(Load("rate", 6), staged) == (120, None)


# Files


TRACE = """
{"timestamp_ms": 2000, "prompt_tokens": 50, "output_tokens": 9, "session_id": "a", "class": "chat"}
{"timestamp_ms": 500, "prompt_tokens": 20, "output_tokens": 5, "session_id": "a", "class": "chat", "think_s": 9}
{"timestamp_ms": 1500, "prompt_tokens": 70, "output_tokens": 3, "hash_ids": [7, 9], "thinking_tokens": 2}
{"timestamp_ms": 4500, "prompt_tokens": 90, "output_tokens": 4, "session_id": "a", "think_s": 1.5}
"""


def _trace(folder, text=TRACE, name="day.jsonl"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_trace_is_replayed_by_its_own_times(tmp_path):
    s = read_schedule(_trace(tmp_path), first_id=10)
    assert s.due_ns.tolist() == [0, S, 1.5 * S, 4 * S]
    assert s.prompt_tokens.tolist() == [20, 70, 50, 90]
    assert s.session_id.tolist() == [10, -1, 10, 10]
    assert s.turn.tolist() == [0, 0, 1, 2]
    assert s.after_id.tolist() == [-1, -1, 10, 12]
    assert s.think_ns.tolist() == [9 * S, 0, 0, 1.5 * S]
    assert s.blocks == ((), (0, 1), (), ())
    assert s.block_tokens == 512
    assert [s.class_names[k] for k in s.klass] == ["chat", "default", "chat", "default"]
    assert s.thinking_tokens.tolist() == [0, 2, 0, 0]


def test_a_trace_can_be_replayed_faster_shorter_and_in_a_closed_loop(tmp_path):
    workload = Workload(trace=str(_trace(tmp_path)), speed=2)
    assert open_schedule(workload, None, None).due_ns.tolist() == [0, 0.5 * S, 0.75 * S, 2 * S]
    assert open_schedule(workload, None, None).think_ns[3] == 0.75 * S
    assert len(open_schedule(workload, None, 2)) == 2
    assert mean_rate(workload) == 1.5  # three gaps in two seconds
    assert open_schedule(workload, 3, None).due_ns.tolist() == [0, 0.25 * S, 0.375 * S, 1 * S]
    assert closed_schedule(workload, 3).due_ns.tolist() == [-1] * 3


def test_mooncake_is_understood(tmp_path):
    s = read_schedule(
        _trace(tmp_path, '{"timestamp": 30, "input_length": 600, "output_length": 5, "hash_ids": [4, 6]}')
    )
    assert (s.prompt_tokens.tolist(), s.output_tokens.tolist(), s.blocks) == ([600], [5], ((0, 1),))


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_what_is_written_is_read_again(tmp_path, name):
    s = read_schedule(_trace(tmp_path), first_id=10)
    again = read_schedule(write_schedule(tmp_path / name, s), first_id=10)
    assert again.to_bytes() == s.to_bytes()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no requests"),
        ("not json", "line 1 is not JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ('{"prompt_tokens": 1, "output_tokens": 1}', "at_s is missing"),
        ('{"at_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "row 1: prompt_tokens is 0"),
        ('{"at_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "at_s is -1"),
        ('{"at_s": true, "prompt_tokens": 1, "output_tokens": 1}', "at_s is True"),
        ('{"at_s": 1, "prompt_tokens": 1, "output_tokens": "9"}', "output_tokens is '9'"),
        ('{"at_s": 1, "prompt_tokens": 1, "output_tokens": 9, "hash_ids": 5}', "hash_ids"),
    ],
)
def test_what_is_wrong_in_a_trace_is_named(tmp_path, text, said):
    with pytest.raises(UsageError, match=said):
        read_schedule(_trace(tmp_path, text))


def test_traces_that_cannot_be_read_are_the_users_to_fix(tmp_path):
    with pytest.raises(UsageError, match="cannot read the trace"):
        read_schedule(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="not a readable Parquet"):
        read_schedule(_trace(tmp_path, "no", "t.parquet"))


def test_what_was_fitted_is_drawn_with_its_blocks():
    lengths, one, half = (curve(np.array(v, float), 1e-3) for v in (range(100, 200), [1.0] * 9, [0.5] * 9))
    bucket = Bucket(1.0, lengths, lengths, half)
    fitted = Fitted((Stretch(99, 99.0, 1.0, 0.0, one),), (bucket,), 16.0, one)
    workload = Workload((RequestClass("log"),), fitted=fitted, speed=2)
    s = open_schedule(workload, None, 50)
    assert np.diff(s.due_ns).mean() == pytest.approx(S / 2, rel=0.05)
    assert s.block_tokens == 16
    assert [len(b) for b in s.blocks] == np.ceil(s.prompt_tokens / 16).astype(int).tolist()
    assert len(set(s.blocks[5]) & set(s.blocks[4])) > 0
    assert s.class_names == ("log",)
    assert mean_rate(workload) == pytest.approx(2)
    assert s.to_bytes() == open_schedule(workload, None, 50).to_bytes()


def test_equal_seeds_give_equal_traces(tmp_path):
    workload = Workload(trace=str(_trace(tmp_path)))
    assert open_schedule(workload, None, None).to_bytes() == open_schedule(workload, None, None).to_bytes()
    assert isinstance(open_schedule(workload, None, None), Schedule)
