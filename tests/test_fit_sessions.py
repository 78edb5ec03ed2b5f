"""A fit of a log with sessions and classes draws turns that wait for each other, and classes with their own lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whywait.cli import main
from whywait.convert.fit import errors, fit, hit_rate, to_toml
from whywait.convert.read import read
from whywait.convert.sessions import units
from whywait.convert.traces import Record, Trace, build, from_schedule, write_schedule
from whywait.core.fitted import Fitted
from whywait.core.timetable import read_schedule
from whywait.core.workload import Workload
from whywait.errors import UsageError
from whywait.load.prompts import Prompter
from whywait.load.recipe import Load, closed_schedule, open_schedule, schedule_of
from whywait.load.turns import Turns, languages_of

PROMISED = ("prompt_tokens", "output_tokens", "gap_s", "turns", "think_s")


def log(sessions: int = 600, blocks: bool = True, ends: bool = True, history: bool = True) -> Trace:
    """Chats of one to ten turns with growing histories behind a shared system prompt, and single calls of an API."""
    rng = np.random.default_rng(4)
    records: list[Record] = []
    at, fresh = 0.0, 10
    for s in range(sessions):
        at += float(rng.gamma(0.5, 4.0))
        if rng.random() < 0.4:
            named = list(range(fresh, fresh + 8)) if blocks else []
            fresh += 8
            records.append(Record(at, 512, int(rng.integers(1, 4)) * 10, named, klass="api", took_s=0.2))
            continue
        t, said, mine = at, 128, [0, 1]
        for _ in range(int(rng.geometric(0.35))):
            new, out = int(rng.integers(30, 300)), int(rng.integers(50, 400))
            prompt = said + new
            if blocks:
                more = max(0, prompt // 64 - len(mine))
                mine = mine + list(range(fresh, fresh + more))
                fresh += more
            took = 0.02 * out
            shown = prompt if history else new
            records.append(Record(t, shown, out, list(mine) if blocks else [], f"s{s}", klass="chat",
                                  took_s=took if ends else None))  # fmt: skip
            said = prompt + out
            t += took + float(rng.lognormal(1.5, 0.8))
    return build(records, "test", [], 64 if blocks else None)


def within(trace: Trace, rows: Any) -> dict[str, Any]:
    worst = errors(trace, rows)
    assert {k: v for k, v in worst.items() if k in PROMISED and v > 0.05} == {}
    assert worst["class_share"] < 0.02
    assert worst["span_s"] < 0.05
    if worst["hit_rate"] is not None:
        assert worst["hit_rate_drawn"] == pytest.approx(worst["hit_rate"], abs=0.03)
    return worst


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("seed", [1, 2])
def test_turns_pauses_lengths_and_classes_are_the_logs(blocks: bool, seed: int) -> None:
    trace = log(blocks=blocks)
    assert "think_s" in within(trace, fit(trace).sample(seed=seed))


def test_by_the_files_as_a_user_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = log()
    toml, replay = tmp_path / "w.toml", tmp_path / "w.schedule.jsonl"
    toml.write_text(to_toml(fit(trace), trace, replay.name))
    write_schedule(trace, replay)
    workload = Workload.from_toml(toml)
    schedule = open_schedule(workload, None, None)
    worst = within(trace, from_schedule(schedule))
    assert worst["think_s"] < 0.05
    assert set(schedule.class_names) == {"api", "chat"}
    # The turns wait: each is due only after the one before, and has no time of its own.
    later = schedule.turn > 0
    assert later.sum() > 100
    assert (schedule.after_rows()[later] == np.flatnonzero(later) - 1).all()
    assert (schedule.due_ns[later] == -1).all()
    assert (schedule.due_ns[~later] >= 0).all()
    assert Fitted.from_dict(workload.as_dict()["fitted"]) == workload.fitted
    # The replay file keeps the pauses too.
    replayed = from_schedule(read_schedule(replay))
    assert max(v for k, v in errors(trace, replayed).items() if k in PROMISED) < 1e-3
    assert hit_rate(replayed.chains) == hit_rate(trace.chains)
    assert main(["workload", "fit", str(replay), "--out", str(tmp_path / "again.toml")]) == 0
    said = capsys.readouterr().out
    assert "turns within" in said
    assert "think time within" in said


def test_histories_grow_by_what_was_said() -> None:
    trace = log(blocks=False)
    rows = fit(trace).sample(seed=1)
    later = np.flatnonzero(rows.turn > 0)
    assert (rows.prompt_tokens[later] > rows.prompt_tokens[later - 1] + rows.output_tokens[later - 1]).all()
    grown = [
        t.prompt_tokens[i] - t.prompt_tokens[u.before[i]] - t.output_tokens[u.before[i]]
        for t, u in ((trace, units(trace)), (rows, units(rows)))
        for i in [np.flatnonzero(u.before >= 0)]
    ]
    a, b = (np.quantile(g, (0.1, 0.5, 0.9)) for g in grown)
    assert b == pytest.approx(a, rel=0.1, abs=20)


def test_classes_keep_their_own_lengths() -> None:
    rows = fit(log()).sample(seed=1)
    api = rows.klass == rows.class_names.index("api")
    assert set(np.unique(rows.output_tokens[api])) <= set(range(10, 31))
    assert (rows.prompt_tokens[api] == 512).all()
    assert (rows.session[api] == -1).all()
    assert rows.output_tokens[~api].min() >= 45


def test_a_log_without_ends_keeps_the_time_between_starts() -> None:
    trace = log(ends=False, blocks=False)
    schedule = open_schedule(Workload(fitted=fit(trace)), None, None)
    later = np.flatnonzero(schedule.turn > 0)
    assert (schedule.think_ns == 0).all()
    between = (schedule.due_ns[later] - schedule.due_ns[later - 1]) / 1e9
    u = units(trace)
    mine = np.flatnonzero(u.before >= 0)
    wanted = trace.at_s[mine] - trace.at_s[u.before[mine]]
    q = (0.1, 0.5, 0.9)
    assert np.quantile(between, q) == pytest.approx(np.quantile(wanted, q), rel=0.05)


def test_burstgpt_sessions_count_only_what_is_new(tmp_path: Path) -> None:
    """There prompts are no histories: lengths stay the log's, and a turn is sent as a beginning."""
    trace = log(blocks=False, ends=False, history=False)
    lines = ["Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"]
    for i in range(len(trace)):
        name = trace.session[i] if trace.session[i] >= 0 else ""
        p, o = trace.prompt_tokens[i], trace.output_tokens[i]
        what = "Conversation log" if trace.session[i] >= 0 else "API log"
        lines.append(f"{trace.at_s[i]:.3f},{name},{0.02 * o:.3f},GPT-4,{p},{o},{p + o},{what}")
    path = tmp_path / "b.csv"
    path.write_text("\n".join(lines) + "\n")
    got = read([path])
    assert np.isfinite(got.think_s).sum() == (units(got).before >= 0).sum()
    within(got, fit(got).sample(seed=1))
    schedule = open_schedule(Workload(fitted=fit(got)), None, 200)
    turns = Turns(Prompter(), schedule, languages_of(Workload()))
    for row in np.flatnonzero(schedule.turn > 0)[:20].tolist():
        words = sum(len(m.content.split()) for m in turns.messages(row))
        assert words == pytest.approx(schedule.prompt_tokens[row] / 1.3, abs=25)


def test_a_part_is_a_true_beginning_and_time_cuts_whole_sessions() -> None:
    workload = Workload(fitted=fit(log()))
    assert workload.fitted is not None
    whole, few = workload.fitted.sample(seed=1), workload.fitted.sample(50, seed=1)
    assert few.at_s.tolist() == whole.at_s[:50].tolist()
    assert len(workload.fitted.sample(3 * len(whole.at_s), seed=1).at_s) == 3 * len(whole.at_s)
    assert closed_schedule(workload, 40, first_id=7).session_id.max() < 47
    schedule, _ = schedule_of(Load("trace", 1.0, None, 60.0), workload, 0, 0)
    after = schedule.after_rows()
    assert ((after >= 0) == (schedule.turn > 0)).all()
    assert 0 < len(schedule) < len(whole.at_s)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["class"][0].pop("name"), "class 0: name must be a text"),
        (lambda d: d["class"][1].update(anew=2), "class 1: anew must be from 0 to 1"),
        (lambda d: d["class"][1].update(think_s=[[0]]), "class 1: think_s must be two lists"),
        (lambda d: d["class"][1].pop("bucket"), "class 1: needs at least one [[fitted class 1.bucket]]"),
        (lambda d: [c.update(share=0) for c in d["class"]], "no class has a share above 0"),
        (lambda d: d.pop("requests"), "requests must be a number"),
    ],
)
def test_a_broken_fit_is_told_by_name(change: Any, said: str) -> None:
    raw = json.loads(json.dumps(fit(log(100)).as_dict()))
    change(raw)
    with pytest.raises(UsageError) as caught:
        Fitted.from_dict(raw)
    assert said in caught.value.message
