"""Workload and Schedule: lengths, classes and arrivals are what was asked for; the same seed gives the same bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whywait.core.schedule import (
    ARRIVALS,
    NOTHING,
    PLAIN,
    Lengths,
    RequestClass,
    Schedule,
    Stage,
    Workload,
    parse_stages,
)
from whywait.errors import UsageError
from whywait.load.recipe import closed_schedule, open_schedule

S = 1_000_000_000

SIZES = st.integers(1, 200_000)
LENGTHS = st.one_of(
    st.builds(lambda a, cap: Lengths("fixed", a, 0, cap), SIZES, SIZES),
    st.builds(lambda a, more, cap: Lengths("uniform", a, a + more, cap), SIZES, st.integers(0, 3_000_000), SIZES),
    st.builds(lambda a, b, cap: Lengths("lognormal", a, b / 8, cap), SIZES, st.integers(0, 24), SIZES),
    st.builds(lambda q, cap: Lengths.quantiles(sorted(q), cap), st.lists(SIZES, min_size=2, max_size=9), SIZES),
)
FEW = st.none() | st.builds(lambda a, more: Lengths("uniform", a, a + more), st.integers(1, 3), st.integers(0, 3))
CLASSES = st.builds(
    RequestClass, st.sampled_from(["a", "b"]), st.integers(1, 9), LENGTHS, LENGTHS,
    thinking_tokens=st.none() | LENGTHS, shared=st.sampled_from([0, 0.3]), groups=st.integers(1, 3),
    turns=FEW.map(lambda f: f or Lengths("fixed", 1)), turn_tokens=st.none() | LENGTHS, think_ms=FEW,
    tool_calls=FEW, tool_ms=FEW,
)  # fmt: skip
WORKLOADS = st.builds(
    Workload,
    st.lists(CLASSES, min_size=1, max_size=4).map(tuple),
    arrivals=st.sampled_from(ARRIVALS),
    seed=st.integers(0, 2**32),
    cv=st.sampled_from([0.3, 1, 4]),
    burst=st.integers(1, 9),
)


# Lengths


@pytest.mark.parametrize(
    ("text", "kind", "a", "b", "cap"),
    [
        (128, "fixed", 128, 0, 1 << 20),
        (12.0, "fixed", 12, 0, 1 << 20),
        ("128", "fixed", 128, 0, 1 << 20),
        ("fixed(7)", "fixed", 7, 0, 1 << 20),
        (" uniform( 64, 512 ) ", "uniform", 64, 512, 1 << 20),
        ("lognormal(256,0.6)", "lognormal", 256, 0.6, 1 << 20),
        ("lognormal(256,0.6,max=2048)", "lognormal", 256, 0.6, 2048),
        ("uniform(1,9,max=3000000)", "uniform", 1, 9, 3_000_000),
        ("fixed(9,max=5)", "fixed", 9, 0, 5),
    ],
)
def test_lengths_are_read(text, kind, a, b, cap):
    assert Lengths.parse(text) == Lengths(kind, a, b, cap)


@pytest.mark.parametrize(
    "text",
    ["", "many", "0", "-1", "0.5", "nan", "inf", ".", "1.2.3", "1,2", "fixed(1,2)", "uniform(9,3)", "uniform(64)",
     "uniform()", "normal(3,1)", "quantiles(1)", "quantiles()", "quantiles(2,1)", "quantiles(0,5)", "quantiles(1,,2)",
     [5], [1, "x"], "uniform(64,512", "64,512)", "128)", "(128)", "lognormal(5,1,max=0)", True, None],
)  # fmt: skip
def test_what_is_no_length_is_named(text):
    with pytest.raises(UsageError) as caught:
        Lengths.parse(text)
    assert repr(text) in caught.value.message
    assert "uniform(64,512)" in caught.value.hint


@given(LENGTHS)
def test_lengths_survive_being_written_down(lengths):
    assert Lengths.parse(str(lengths)) == lengths


@given(LENGTHS, st.integers(0, 200), st.integers(0, 99))
def test_samples_are_whole_positive_and_within_the_cap(lengths, n, seed):
    drawn = lengths.sample(n, np.random.default_rng(seed))
    assert drawn.shape == (n,)
    assert drawn.dtype == np.int64
    assert ((drawn >= 1) & (drawn <= lengths.cap)).all()
    if lengths.kind == "uniform":
        assert (drawn >= min(lengths.a, lengths.cap)).all()
        assert (drawn <= lengths.b).all()
    if lengths.kind == "fixed":
        assert (drawn == min(lengths.a, lengths.cap)).all()


def test_samples_have_the_distribution_they_are_named_for():
    rng = np.random.default_rng(5)
    uniform = Lengths.parse("uniform(3,6)").sample(4000, rng)
    assert [int((uniform == v).sum()) for v in range(3, 7)] == pytest.approx([1000] * 4, abs=110)  # both ends included
    logs = np.log(Lengths.parse("lognormal(5000,0.5)").sample(4000, rng))
    assert np.median(logs) == pytest.approx(np.log(5000), abs=0.03)
    assert logs.std() == pytest.approx(0.5, abs=0.02)
    capped = Lengths.parse("lognormal(5000,0.5,max=6000)").sample(4000, rng)
    assert capped.max() == 6000


# Workload


FILE = """
arrivals = "constant"
cache = "warm"
seed = 9
timeout_s = 20
temperature = 0.5
ignore_eos = false
prompt_tokens = "uniform(10,20)"
slo = { ttft_ms = 500 }

[[class]]
name = "chat"
share = 3
output_tokens = 30

[[class]]
prompt_tokens = 4000
slo = { tpot_ms = 50.5 }
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "work.toml"
    path.write_text(text)
    return path


def test_a_workload_file_is_read(tmp_path):
    chat = RequestClass("chat", 3, Lengths("uniform", 10, 20), Lengths("fixed", 30), {"ttft_ms": 500})
    second = RequestClass("class1", 1.0, Lengths("fixed", 4000), Lengths("fixed", 64), {"tpot_ms": 50.5})
    assert Workload.from_toml(_file(tmp_path, FILE)) == Workload((chat, second), "constant", "warm", 0.5, 20, False, 9)


def test_an_empty_file_is_the_default_workload(tmp_path):
    assert Workload.from_toml(_file(tmp_path, "")) == Workload()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sed = 1", "sed"),
        ("[[class]]\nprompt = 5", "prompt"),
        ("[[class]]\n[[class]]\ntokens = 5", "class 1"),
        ("slo = { ttft = 5 }", "ttft"),
        ("slo = 5", "slo"),
        ("slo = { ttft_ms = 'fast' }", "ttft_ms"),
        ("slo = { ttft_ms = 0 }", "ttft_ms"),
        ("prompt_tokens = 'long'", "prompt_tokens"),
        ("[[class]]\noutput_tokens = 0", "output_tokens"),
        ("cache = 'hot'", "cache"),
        ("cache = 1", "cache"),
        ("arrivals = 'pareto'", "arrivals"),
        ("cv = 0", "cv"),
        ("burst = 0", "burst"),
        ("burst = 2.5", "burst"),
        ("max_in_flight = 0", "max_in_flight"),
        ("ramp_s = -1", "ramp_s"),
        ("speed = 'fast'", "speed"),
        ("language = 'tlh'", "tlh"),
        ("language = 5", "language"),
        ("language = []", "language"),
        ("shared = 1", "shared"),
        ("groups = 0", "groups"),
        ("turns = 0", "turns"),
        ("think_ms = 'long'", "think_ms"),
        ("[[stage]]\nrate = 5", "duration"),
        ("[[stage]]\nduration = '5s'", "rate"),
        ("[[stage]]\nrate = 0\nduration = '5s'", "rate"),
        ("[[stage]]\nrate = 1\nto = -1\nduration = '5s'", "rate"),
        ("[[stage]]\nrate = 1\nduration = 0", "duration"),
        ("stage = 5", "[[stage]]"),
        ("trace = 'a'\n[[stage]]\nrate = 1\nduration = 5", "exclude"),
        ("fitted = 5", "fitted"),
        ("prompt_tokens = 'quantiles(5,3)'", "prompt_tokens"),
        ("prompt_tokens = [5]", "prompt_tokens"),
        ("prompt_tokens = 'file(none.txt)'", "none.txt"),
        ("seed = 'abc'", "seed"),
        ("seed = 1.5", "seed"),
        ("seed = -1", "seed"),
        ("seed = true", "seed"),
        ("temperature = 'hot'", "temperature"),
        ("temperature = -0.1", "temperature"),
        ("temperature = nan", "temperature"),
        ("timeout_s = '5s'", "timeout_s"),
        ("timeout_s = 0", "timeout_s"),
        ("timeout_s = inf", "timeout_s"),
        ("ignore_eos = 1", "ignore_eos"),
        ("[[class]]\nname = 5", "name"),
        ("[[class]]\nshare = '1'", "share"),
        ("[[class]]\nshare = nan", "share"),
        ("[[class]]\nshare = 0", "share"),
        ("[[class]]\nshare = -1\n[[class]]\nshare = 2", "share"),
        ("class = []", "class"),
        ("class = 5", "class"),
        ("class = 'chat'", "class"),
        ("[class]\nname = 'chat'", "[[class]]"),
        ("class = [5]", "class"),
    ],
)
def test_what_is_wrong_in_a_workload_file_is_named(tmp_path, text, said):
    with pytest.raises(UsageError) as caught:
        Workload.from_toml(_file(tmp_path, text))
    assert said in f"{caught.value.message} {caught.value.hint}"


def test_files_that_cannot_be_read_are_the_users_to_fix(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read workload .*work\.toml: No such file"):
        Workload.from_toml(tmp_path / "work.toml")
    with pytest.raises(UsageError, match="not valid TOML"):
        Workload.from_toml(_file(tmp_path, "seed = = 1"))
    (tmp_path / "work.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(UsageError, match="not valid TOML"):
        Workload.from_toml(tmp_path / "work.toml")


def test_a_workload_goes_into_a_manifest(tmp_path):
    workload = Workload.from_toml(_file(tmp_path, FILE))
    facts = json.loads(json.dumps(workload.as_dict()))
    assert facts["seed"] == 9
    assert {
        "name": "chat", "share": 3, "prompt_tokens": "uniform(10,20)", "output_tokens": "30", "slo": {"ttft_ms": 500},
        "thinking_tokens": None, "language": ["en"],
    }.items() <= facts["classes"][0].items()  # fmt: skip
    assert Workload.from_dict(facts) == workload  # and can be read back: a run is resumed from its manifest


EVERYTHING = """
arrivals = "gamma"
cv = 3
max_in_flight = 9
ramp_s = 2.5

[[stage]]
rate = 5
duration = "30s"

[[stage]]
rate = 5
to = 20
duration = 60

[[class]]
name = "agent"
language = "en, code"
prompt_tokens = [10, 20, 90]
thinking_tokens = 300
turns = "uniform(2,6)"
turn_tokens = 30
think_ms = "lognormal(4000,0.5)"
tool_calls = "uniform(1,3)"
tool_output_tokens = 20
tool_result_tokens = "file(results.txt)"
tool_ms = 300
shared = 0.5
groups = 3
"""


def test_every_key_of_a_file_is_read_and_survives_a_manifest(tmp_path):
    (tmp_path / "results.txt").write_text("30, 40\n50 1000")
    workload = Workload.from_toml(_file(tmp_path, EVERYTHING))
    assert workload.stages == (Stage(5, 30), Stage(5, 60, 20))
    assert (workload.arrivals, workload.cv, workload.max_in_flight, workload.ramp_s) == ("gamma", 3, 9, 2.5)
    (agent,) = workload.classes
    assert agent.language == ("en", "code")
    assert agent.prompt_tokens == Lengths.quantiles([10, 20, 90])
    assert agent.tool_result_tokens == Lengths.quantiles([30, 40, 50, 1000])
    assert (str(agent.turns), str(agent.think_ms), agent.shared, agent.groups) == (
        "uniform(2,6)", "lognormal(4000,0.5)", 0.5, 3,
    )  # fmt: skip
    assert agent.requests_per_session == 4 * (1 + 2)
    assert Workload.from_dict(json.loads(json.dumps(workload.as_dict()))) == workload


def test_a_trace_is_found_beside_the_file_that_names_it(tmp_path):
    workload = Workload.from_toml(_file(tmp_path, "trace = 'day.jsonl'\nspeed = 2"))
    assert (workload.trace, workload.speed) == (str(tmp_path / "day.jsonl"), 2)


def test_stages_are_read_from_a_flag():
    assert parse_stages("5:30s,5-20:1m") == (Stage(5, 30), Stage(5, 60, 20))
    for bad in ("", "5", "5:", ":5s", "a:5s", "0:5s", "5-:5s"):
        with pytest.raises(UsageError, match="stage"):
            parse_stages(bad)


# Schedule


def _parts(schedule: Schedule) -> tuple[object, ...]:
    columns = (getattr(schedule, c).tolist() for c in (*PLAIN, *NOTHING))
    return (*columns, schedule.class_names, schedule.blocks, schedule.block_tokens)


@given(WORKLOADS, st.integers(0, 60), st.integers(0, 9))
def test_the_same_seed_gives_the_same_bytes(workload, n, salt):
    """Invariant 5."""
    again = dataclasses.replace(workload)
    assert closed_schedule(workload, n, 5, salt).to_bytes() == closed_schedule(again, n, 5, salt).to_bytes()
    assert open_schedule(workload, 3, n, 5, salt).to_bytes() == open_schedule(again, 3, n, 5, salt).to_bytes()


@given(WORKLOADS, st.integers(0, 20), st.integers(0, 20))
def test_bytes_are_equal_only_when_the_schedules_are(workload, n, m):
    a, b = open_schedule(workload, 3, n), open_schedule(workload, 3, m)
    assert (a.to_bytes() == b.to_bytes()) == (_parts(a) == _parts(b))


@pytest.mark.parametrize("column", [f.name for f in dataclasses.fields(Schedule)])
def test_bytes_cover_every_column(column):
    schedule = dataclasses.replace(open_schedule(Workload(), 3, 4), blocks=((1,), (1, 2), (), (5,)), block_tokens=16)
    changed = {"class_names": ("other",), "blocks": ((1, 1), (2,), (), (5,)), "block_tokens": 17}
    other = dataclasses.replace(schedule, **{column: changed.get(column) or getattr(schedule, column) + 1})
    assert other.to_bytes() != schedule.to_bytes()


def test_columns_that_differ_in_length_are_refused():
    schedule = open_schedule(Workload(), 3, 4)
    with pytest.raises(ValueError, match="differ in length"):
        dataclasses.replace(schedule, turn=np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="differ in length"):
        dataclasses.replace(schedule, blocks=((1,),))


def test_another_seed_or_salt_gives_other_lengths_and_arrivals():
    base = Workload((RequestClass(prompt_tokens=Lengths.parse("uniform(1,1000)")),), seed=1)
    schedules = [
        open_schedule(base, 3, 20),
        open_schedule(base, 3, 20, salt=1),
        open_schedule(dataclasses.replace(base, seed=2), 3, 20),
    ]
    for column in ("prompt_tokens", "due_ns"):
        assert len({getattr(s, column).tobytes() for s in schedules}) == 3


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(sum), st.integers(0, 300), st.integers(0, 99))
def test_classes_get_their_share_to_within_one_request(shares, n, seed):
    classes = tuple(RequestClass(str(i), share) for i, share in enumerate(shares))
    schedule = closed_schedule(Workload(classes, seed=seed), n)
    counted = np.bincount(schedule.klass, minlength=len(shares))
    assert counted.sum() == n
    for count, share in zip(counted.tolist(), shares, strict=True):
        assert abs(count - n * share / sum(shares)) <= 1
        assert share or not count


def test_classes_come_mixed_and_with_their_own_lengths():
    classes = (RequestClass("a", 1, Lengths("fixed", 10)), RequestClass("b", 1, Lengths("uniform", 100, 200)))
    schedule = closed_schedule(Workload(classes), 100)
    assert schedule.klass[:50].sum() not in (0, 50)  # not one class after the other
    assert (schedule.prompt_tokens[schedule.klass == 0] == 10).all()
    assert (schedule.prompt_tokens[schedule.klass == 1] >= 100).all()
    assert schedule.class_names == ("a", "b")


@given(st.integers(0, 50), st.integers(0, 10**9), WORKLOADS)
def test_a_closed_schedule_has_no_due_times_and_consecutive_ids(n, first_id, workload):
    schedule = closed_schedule(workload, n, first_id)
    assert len(schedule) == n
    assert schedule.id.tolist() == list(range(first_id, first_id + n))
    assert (schedule.due_ns == -1).all()


@given(st.floats(0.01, 10_000), st.integers(0, 100))
def test_constant_arrivals_are_constant(rate, n):
    """To the nanosecond: a timer named Constant must not draw gaps."""
    due = open_schedule(Workload(arrivals="constant"), rate, n).due_ns
    assert due.tolist() == [round(i / rate * S) for i in range(n)]


def test_constant_arrivals_do_not_drift():
    due = open_schedule(Workload(arrivals="constant"), 0.7, 300_000).due_ns
    assert due[7::7].tolist() == [10 * S * i for i in range(1, len(due[7::7]) + 1)]


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_poisson_arrivals_have_the_mean_and_the_spread_of_poisson(rate):
    n = 20_000
    due = open_schedule(Workload(arrivals="poisson", seed=3), rate, n).due_ns
    gaps = np.diff(due, prepend=0) / S
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.03)  # its own error is 1/sqrt(n) = 0.7 %
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.05)
    assert (gaps > 1 / rate).mean() == pytest.approx(np.exp(-1), abs=0.02)  # the tail of an exponential
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03  # and no memory


def test_poisson_gaps_do_not_depend_on_the_rate_but_scale_with_it():
    """So that points of one sweep see the same bursts."""
    slow, fast = (open_schedule(Workload(), rate, 50).due_ns for rate in (1, 10))
    assert np.abs(slow - fast * 10).max() <= 10


@given(WORKLOADS, st.integers(0, 40), st.integers(1, 9))
def test_the_shards_together_are_the_whole(workload, n, shards):
    """Invariant 7; and a session stays in one shard, so that none waits for what another process does."""
    whole = open_schedule(workload, 5, n)
    parts = [whole.shard(k, shards) for k in range(shards)]
    sessions = [{*p.session_id[p.session_id >= 0].tolist()} for p in parts]
    assert sum(map(len, sessions)) == len(set.union(*sessions))
    per_shard = [len(s) + int((p.session_id < 0).sum()) for s, p in zip(sessions, parts, strict=True)]
    assert max(per_shard) - min(per_shard) <= 1
    rows = [row for p in parts for row in zip(*_parts(p)[: len(PLAIN) + len(NOTHING)], strict=True)]
    assert sorted(rows) == list(zip(*_parts(whole)[: len(PLAIN) + len(NOTHING)], strict=True))
    assert {p.class_names for p in parts} == {whole.class_names}
    for p in parts:
        assert ((p.after_rows() >= 0) == (p.after_id >= 0)).all()
        assert (np.diff(p.due_ns[p.after_id < 0]) >= 0).all()


def test_blocks_go_with_their_rows():
    whole = dataclasses.replace(closed_schedule(Workload(), 3), blocks=((1,), (2, 3), (4,)), block_tokens=16)
    assert whole.shard(1, 2).blocks == ((2, 3),)


def test_the_documented_workload_is_one(tmp_path):
    """The page shows every key there is, so what it says cannot go stale unseen."""
    page = (Path(__file__).parents[1] / "docs" / "workloads.md").read_text(encoding="utf-8")
    shown = page.split("```toml\n")[1].split("```")[0]
    workload = Workload.from_toml(_file(tmp_path, shown))
    assert [c.name for c in workload.classes] == ["chat", "agent", "thinker"]
    assert workload.classes[2].slo == {"ttfa_ms": 60000}
    assert len(open_schedule(workload, None, None)) == pytest.approx(900, rel=0.15)
    keys = {f.name for f in (*dataclasses.fields(Workload), *dataclasses.fields(RequestClass))}
    for key in keys - {"classes", "stages"}:
        assert key in page
