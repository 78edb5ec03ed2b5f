"""Workload and Schedule: lengths, classes and arrivals are what was asked for; the same seed gives the same bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whywait.core.schedule import Lengths, RequestClass, Schedule, Workload
from whywait.errors import UsageError
from whywait.load.recipe import closed_schedule, open_schedule

S = 1_000_000_000

SIZES = st.integers(1, 200_000)
LENGTHS = st.one_of(
    st.builds(lambda a, cap: Lengths("fixed", a, 0, cap), SIZES, SIZES),
    st.builds(lambda a, more, cap: Lengths("uniform", a, a + more, cap), SIZES, st.integers(0, 3_000_000), SIZES),
    st.builds(lambda a, b, cap: Lengths("lognormal", a, b / 8, cap), SIZES, st.integers(0, 24), SIZES),
)
CLASSES = st.builds(RequestClass, st.sampled_from(["a", "b"]), st.integers(1, 9), LENGTHS, LENGTHS)
WORKLOADS = st.builds(
    lambda classes, arrivals, seed: Workload(tuple(classes), arrivals=arrivals, seed=seed),
    st.lists(CLASSES, min_size=1, max_size=4),
    st.sampled_from(["poisson", "constant"]),
    st.integers(0, 2**32),
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
    ],
)
def test_lengths_are_read(text, kind, a, b, cap):
    assert Lengths.parse(text) == Lengths(kind, a, b, cap)


@pytest.mark.parametrize(
    "text",
    ["", "many", "0", "-1", "0.5", "nan", "inf", ".", "1.2.3", "1,2", "fixed(1,2)", "uniform(9,3)", "uniform(64)",
     "uniform()", "normal(3,1)", "uniform(64,512", "64,512)", "128)", "(128)", "lognormal(5,1,max=0)", True, None],
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
        ("arrivals = 'gamma'", "arrivals"),
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
    facts = json.loads(json.dumps(Workload.from_toml(_file(tmp_path, FILE)).as_dict()))
    assert facts["seed"] == 9
    assert facts["classes"][0] == {
        "name": "chat", "share": 3, "prompt_tokens": "uniform(10,20)", "output_tokens": "30", "slo": {"ttft_ms": 500},
    }  # fmt: skip


# Schedule


def _parts(schedule: Schedule) -> tuple[object, ...]:
    return (*(getattr(schedule, f.name).tolist() for f in dataclasses.fields(schedule)[:-1]), schedule.class_names)


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


@pytest.mark.parametrize("column", ["id", "klass", "prompt_tokens", "output_tokens", "due_ns", "class_names"])
def test_bytes_cover_every_column(column):
    schedule = open_schedule(Workload(), 3, 4)
    was = getattr(schedule, column)
    other = dataclasses.replace(schedule, **{column: ("other",) if column == "class_names" else was + 1})
    assert other.to_bytes() != schedule.to_bytes()


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
    """Invariant 7."""
    whole = open_schedule(workload, 5, n)
    parts = [whole.shard(k, shards) for k in range(shards)]
    assert sum(len(p) for p in parts) == n
    assert max(len(p) for p in parts) - min(len(p) for p in parts) <= 1
    rows = [row for p in parts for row in zip(*_parts(p)[:-1], strict=True)]
    assert sorted(rows) == list(zip(*_parts(whole)[:-1], strict=True))
    assert {p.class_names for p in parts} == {whole.class_names}
