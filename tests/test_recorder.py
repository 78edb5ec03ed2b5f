"""The recorder: events keep their legal order, each planned request gets one outcome, a kill loses only the end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whywait.core import spool as spool_module
from whywait.core.check import violations
from whywait.core.columns import CLOCKS, KINDS, SCHEMA_VERSION, TABLES
from whywait.core.events import Accepted, Failed, Finished, Reading, Sent, Step, next_state
from whywait.core.parquet import write_pieces
from whywait.core.recorder import FLUSH_CHUNKS, Recorder, chunk_meta, discard_spool, recover
from whywait.core.run import Manifest, Run
from whywait.errors import UsageError

# A request's life, spelt with a letter per event, and every beginning of one. Written here once more, and by hand:
# the table in core/events.py is checked against it, not against itself.
LEGAL = re.compile(r"(S(A(C*[FX]?)|X)?|X)?")
NAMES = {"S": "Sent", "A": "Accepted", "C": "Chunk", "F": "Finished", "X": "Failed"}
ANSWER = KINDS.index("answer")
ROLE = KINDS.index("role")


def _event(letter: str, id_: int, t_ns: int, **facts: object):
    if letter == "S":
        return Sent(id_, t_ns)
    if letter == "A":
        return Accepted(id_, t_ns, 200)
    if letter == "F":
        return Finished(id_, t_ns, {"outcome": "ok", "fault": "none", **facts})
    return Failed(id_, t_ns, {"outcome": "reset", "fault": "service", **facts})


POINT = {"point": 0, "mode": "concurrency", "target": 1, "start_ns": 10}


def _recorder(folder: Path, requests: int = 1) -> Recorder:
    recorder = Recorder(folder, Manifest(seed=7))
    recorder.begin_point(POINT, [{"id": i} for i in range(requests)])
    return recorder


def _kill(recorder: Recorder) -> None:
    """What the kernel does to the files of a process it kills: what was written stays, what was not is lost."""
    recorder._log.close()
    recorder._bin.close()


def _outcomes(run: Run) -> dict[int, str | None]:
    return dict(zip(run.requests["id"].tolist(), run.requests.text("outcome"), strict=True))


# The order of events


def test_the_order_table_allows_every_legal_life_and_no_other():
    """Invariant 2, over every sequence of up to five events."""
    for n in range(6):
        for letters in itertools.product(NAMES, repeat=n):
            state, refused = "due", False
            for letter in letters:
                try:
                    state = next_state(state, NAMES[letter])
                except ValueError:
                    refused = True
                    break
            assert refused != bool(LEGAL.fullmatch("".join(letters))), letters


@pytest.mark.parametrize("letters", ["".join(x) for n in range(1, 4) for x in itertools.product("SAFX", repeat=n)])
def test_the_recorder_refuses_what_the_table_refuses_and_keeps_the_rest(letters, tmp_path):
    recorder = _recorder(tmp_path)
    kept = ""
    for i, letter in enumerate(letters):
        event = _event(letter, 0, 20 + i)
        if LEGAL.fullmatch(kept + letter):
            recorder.event(event)
            kept += letter
        else:
            with pytest.raises(ValueError, match=f"{NAMES[letter]} may not follow"):
                recorder.event(event)
    recorder.end_point(0, 90)
    run = recorder.finish(recorder.manifest)
    assert _outcomes(run)[0] == {"F": "ok", "X": "reset", "S": "censored", "A": "censored", "": "never_sent"}[kept[-1:]]
    assert violations(run) == []


def test_what_was_never_planned_is_refused(tmp_path):
    recorder = _recorder(tmp_path)
    with pytest.raises(ValueError, match="Sent may not follow"):
        recorder.event(Sent(5, 20))
    assert _outcomes(recorder.finish(recorder.manifest)) == {0: "never_sent"}


# What becomes of the requests


def test_events_fold_into_rows(tmp_path):
    recorder = _recorder(tmp_path)
    recorder.event(Sent(0, 20))
    recorder.event(Accepted(0, 30, 201))
    recorder.chunk(0, 35, -1, chunk_meta(ROLE, None, 0))
    recorder.chunk(0, 40, 38, chunk_meta(ANSWER, 2, 1))
    recorder.event(_event("F", 0, 50, first_ns=40, last_ns=40, content_chunks=1))
    recorder.event(Reading(11, 12, "host", "load", None, 0.5))
    recorder.event(Step(21, 4, None, 3, 1.0, "compute"))
    recorder.end_point(0, 60)
    sampled = {"asked_ns": 13, "answered_ns": 14, "source": "gpu", "name": "x"}
    run = recorder.finish(dataclasses.replace(recorder.manifest, seed=8), [sampled])
    (request,) = run.requests.rows()
    assert {k: v for k, v in request.items() if v is not None} == {
        "point": 0, "id": 0, "replica": 0, "attempt": 1, "sent_ns": 20, "accepted_ns": 30, "first_ns": 40,
        "last_ns": 40, "end_ns": 50, "content_chunks": 1, "outcome": "ok", "fault": "none", "status": 201,
    }  # fmt: skip
    assert run.chunks.rows() == [
        {"id": 0, "t_ns": 35, "t_low_ns": None, "kind": "role", "tokens": None, "clock": "kernel"},
        {"id": 0, "t_ns": 40, "t_low_ns": 38, "kind": "answer", "tokens": 2, "clock": "user"},
    ]
    assert [(r["source"], r["value"]) for r in run.readings.rows()] == [("host", 0.5), ("gpu", None)]
    assert [(r["took_ns"], r["prefill_tokens"], r["bound_by"]) for r in run.steps.rows()] == [(4, None, "compute")]
    assert run.manifest.seed == 8
    assert violations(run) == []


def test_planned_is_the_sum_of_outcomes_whatever_was_reached(tmp_path):
    """Invariant 1: ended, in flight, never sent; and those planned only as an upper bound, which are none."""
    recorder = _recorder(tmp_path, 6)
    for letters, i in (("SAF", 0), ("SX", 1), ("SA", 2)):
        for letter in letters:
            recorder.event(_event(letter, i, 20))
    recorder.event(Failed(3, 99, {"outcome": "never_sent", "fault": "none", "detail": "stopped"}))
    recorder.end_point(0, 60, unsent=[5])
    run = recorder.finish(recorder.manifest)
    assert _outcomes(run) == {0: "ok", 1: "reset", 2: "censored", 3: "never_sent", 4: "never_sent"}
    assert run.points["planned"].tolist() == [5]
    ends = {r["id"]: (r["end_ns"], r["detail"]) for r in run.requests.rows()}
    assert ends[2] == (60, "in flight when the run ended")
    assert ends[3] == (None, "stopped")  # what was never sent did not end either
    assert ends[4] == (None, None)
    with pytest.raises(ValueError, match="may not follow"):
        recorder.event(Sent(5, 70))


def test_what_was_planned_of_a_request_stays(tmp_path):
    recorder = Recorder(tmp_path, Manifest())
    plan = {"id": 4, "class": "chat", "asked_prompt_tokens": 9, "due_ns": 15}
    recorder.begin_point({"point": 3, "mode": "rate", "target": 2.5, "start_ns": 10, "label": "x"}, [plan])
    run = recorder.finish(recorder.manifest)
    (request,) = run.requests.rows()
    assert {k: request[k] for k in plan} == plan
    assert request["point"] == 3
    (point,) = run.points.rows()
    assert (point["mode"], point["target"], point["planned"], point["label"]) == ("rate", 2.5, 1, "x")


def test_peeking_changes_nothing(tmp_path):
    recorder = _recorder(tmp_path, 2)
    recorder.event(Sent(0, 20))
    recorder.chunk(0, 30, -1, chunk_meta(ANSWER, 1, 0))
    assert _outcomes(recorder.peek()) == {0: "censored", 1: "never_sent"}
    recorder.event(_event("A", 0, 25))
    recorder.event(_event("F", 0, 31, content_chunks=1, first_ns=30, last_ns=30))
    recorder.end_point(0, 40)
    run = recorder.finish(recorder.manifest)
    assert _outcomes(run) == {0: "ok", 1: "never_sent"}
    assert len(run.chunks) == 1
    assert violations(run) == []


def test_chunks_of_interleaved_streams_come_out_by_request_in_order(tmp_path):
    """More than one buffer full, so that both ways to the disk are taken."""
    n = FLUSH_CHUNKS * 2 + 5
    recorder = _recorder(tmp_path, 3)
    for i in range(n):
        recorder.chunk(i % 3, 100 + i, -1, chunk_meta(ANSWER, i % 5, i % 2))
    chunks = recorder.finish(recorder.manifest).chunks
    assert len(chunks) == n
    assert (np.diff(chunks["id"]) >= 0).all()
    for k in range(3):
        assert chunks["t_ns"][chunks["id"] == k].tolist() == list(range(100 + k, 100 + n, 3))
    at = np.argsort(chunks["t_ns"])
    assert chunks["tokens"][at].tolist() == [i % 5 for i in range(n)]
    assert chunks["clock"][at].tolist() == [i % 2 for i in range(n)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(range(len(KINDS))),
            st.none() | st.integers(0, 1 << 50),
            st.sampled_from(range(len(CLOCKS))),
            st.integers(0, 1 << 52),
            st.none() | st.integers(0, 1 << 52),
        ),
        max_size=8,
    )
)
@settings(max_examples=40)
def test_what_a_chunk_is_survives_its_packing(tmp_path_factory, chunks):
    """Unknown tokens stay unknown, and none is not unknown; the same for the earliest arrival."""
    recorder = _recorder(tmp_path_factory.mktemp("meta") / "run")
    for kind, tokens, clock, t, low in chunks:
        recorder.chunk(0, t, -1 if low is None else low, chunk_meta(kind, tokens, clock))
    rows = recorder.finish(recorder.manifest).chunks.rows()
    packed = [(KINDS.index(r["kind"]), r["tokens"], CLOCKS.index(r["clock"]), r["t_ns"], r["t_low_ns"]) for r in rows]
    assert packed == chunks


# Killed


def _history(recorder: Recorder) -> None:
    """Two points: streams that end well, fail, hang, are never sent; text of several scripts; every kind of line."""
    recorder.begin_point(POINT, [{"id": i} for i in range(4)])
    recorder.event(Sent(0, 20))
    recorder.event(Accepted(0, 30, 200))
    recorder.chunk(0, 40, -1, chunk_meta(ROLE, None, 0))
    recorder.chunk(0, 45, 41, chunk_meta(ANSWER, 1, 0))
    recorder.flush()
    recorder.event(Sent(1, 46))
    recorder.chunk(0, 50, -1, chunk_meta(ANSWER, None, 0))
    recorder.event(_event("F", 0, 55, first_ns=45, last_ns=50, content_chunks=2, finish_reason="längd"))
    recorder.event(Reading(47, 48, "host", "lo\nad", '{"é": "日"}', 0.5))
    recorder.event(Failed(1, 60, {"outcome": "reset", "fault": "network", "detail": "ended\nearly 🙂"}))
    recorder.event(Sent(2, 61))
    recorder.event(Accepted(2, 62, 200))
    recorder.chunk(2, 70, -1, chunk_meta(ANSWER, 1, 1))
    recorder.event(_event("X", 2, 71, outcome="timeout", content_chunks=1, first_ns=70, last_ns=70))
    recorder.end_point(0, 80, unsent=[3])
    second = {"point": 1, "mode": "rate", "target": 5.0, "start_ns": 100}
    recorder.begin_point(second, [{"id": 9, "due_ns": 105}, {"id": 8}])
    recorder.event(Step(101, 4, 3, 2, None, None))
    recorder.event(Sent(9, 110))
    recorder.event(Accepted(9, 120, 200))
    recorder.chunk(9, 130, -1, chunk_meta(ANSWER, 1, 0))
    recorder.flush()


def _writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[tuple[str, bytes]]]:
    """The history, recorded; and its writes to the two files of the spool, in their order."""
    writes: list[tuple[str, bytes]] = []
    recorder = Recorder(folder, Manifest(seed=7))

    class Tap:
        def __init__(self, name: str, file) -> None:
            self.name, self.file = name, file

        def write(self, data: bytes) -> int:
            writes.append((self.name, bytes(data)))
            return self.file.write(data)

    writes.append(("log.jsonl", (folder / "spool" / "log.jsonl").read_bytes()))
    monkeypatch.setattr(recorder._log, "_file", Tap("log.jsonl", recorder._log._file))
    monkeypatch.setattr(recorder._bin, "_file", Tap("chunks.bin", recorder._bin._file))
    _history(recorder)
    monkeypatch.undo()
    _kill(recorder)
    return folder, writes


def _expected(log: bytes, chunks: bytes) -> dict[int, str]:
    """Outcomes by the whole lines of a log: what ended has its outcome, what was sent or answered is censored."""
    out: dict[int, str] = {}
    for line in log.split(b"\n")[:-1]:
        what, value = json.loads(line)
        if what == "plan":
            out |= {r["id"]: "never_sent" for r in value}
        elif what == "sent":
            out[value[0]] = "censored"
        elif what == "ended":
            out[value["id"]] = value["outcome"]
        elif what == "end":
            out = {i: o for i, o in out.items() if i not in value["unplanned"]}
    seen = np.frombuffer(chunks[: len(chunks) // 32 * 32], dtype="<i8").reshape(-1, 4)[:, 0].tolist()
    return {i: "censored" if o == "never_sent" and i in seen else o for i, o in out.items()}


def _check(folder: Path) -> Run:
    spool = folder / "spool"
    log, chunks = ((spool / name).read_bytes() for name in ("log.jsonl", "chunks.bin"))
    run = recover(folder)
    assert run.manifest.partial
    assert run.manifest.seed == (7 if b"\n" in log else 0)
    assert _outcomes(run) == _expected(log, chunks)
    assert violations(run) == []
    return run


def _kills(writes: list[tuple[str, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """The two files after every single byte of what was written."""
    files = {"log.jsonl": b"", "chunks.bin": b""}
    for name, data in writes:
        for n in range(len(data)):
            torn = {**files, name: files[name] + data[:n]}
            yield torn["log.jsonl"], torn["chunks.bin"]
        files[name] += data
    yield files["log.jsonl"], files["chunks.bin"]


def test_a_run_killed_at_any_byte_it_writes_is_a_run(tmp_path, monkeypatch):
    folder, writes = _writes(tmp_path / "run", monkeypatch)
    assert {name for name, _ in writes} == {"log.jsonl", "chunks.bin"}
    for log, chunks in _kills(writes):
        (folder / "spool" / "log.jsonl").write_bytes(log)
        (folder / "spool" / "chunks.bin").write_bytes(chunks)
        run = _check(folder)
    assert _outcomes(run) == {0: "ok", 1: "reset", 2: "timeout", 9: "censored", 8: "never_sent"}
    assert len(run.chunks) == 5
    assert [r["detail"] for r in run.requests.rows() if r["id"] == 1] == ["ended\nearly 🙂"]


def test_a_log_cut_at_any_byte_is_read_up_to_there(tmp_path, monkeypatch):
    """Lost without the chunks, as when a file system loses its tail: requests that were answered had been sent."""
    folder, _ = _writes(tmp_path / "run", monkeypatch)
    log = (folder / "spool" / "log.jsonl").read_bytes()
    for n in range(len(log) + 1):
        (folder / "spool" / "log.jsonl").write_bytes(log[:n])
        _check(folder)


def test_chunks_cut_at_any_byte_are_read_up_to_there(tmp_path, monkeypatch):
    folder, _ = _writes(tmp_path / "run", monkeypatch)
    path = folder / "spool" / "chunks.bin"
    raw = path.read_bytes()
    whole = recover(folder).chunks
    times = np.frombuffer(raw, dtype="<i8").reshape(-1, 4)[:, 1]
    for n in range(len(raw) + 1):
        path.write_bytes(raw[:n])
        assert recover(folder).chunks == whole.where(np.isin(whole["t_ns"], times[: n // 32]))


LIVES = st.lists(st.tuples(st.sampled_from(["", "S", "SA", "SAF", "SX", "SAX", "X"]), st.integers(0, 3)), max_size=5)


@given(LIVES, st.data())
@settings(max_examples=60)
def test_any_history_killed_anywhere_is_a_run(tmp_path_factory, lives, data):
    folder = tmp_path_factory.mktemp("killed") / "run"
    recorder = _recorder(folder, len(lives))
    try:
        _play(recorder, lives, data)
    finally:
        _kill(recorder)
    log_path = folder / "spool" / "log.jsonl"
    log = log_path.read_bytes()
    log_path.write_bytes(log[: data.draw(st.integers(0, len(log)), label="cut")])
    _check(folder)


def _play(recorder: Recorder, lives: list[tuple[str, int]], data: st.DataObject) -> None:
    """The lives' events in an order of hypothesis' choice; chunks come between accepted and the end."""
    now = 11
    left = {i: [*life.replace("A", "A" + "C" * n)] for i, (life, n) in enumerate(lives)}
    seen: dict[int, list[int]] = {}
    while alive := [i for i, letters in left.items() if letters]:
        i = data.draw(st.sampled_from(alive))
        now += data.draw(st.integers(1, 3))
        letter = left[i].pop(0)
        if letter == "C":
            recorder.chunk(i, now, -1, chunk_meta(ANSWER, None, 0))
            seen.setdefault(i, []).append(now)
            continue
        facts: dict[str, object] = {}
        if letter in "FX":
            t = seen.get(i, [])
            facts = {"content_chunks": len(t), "first_ns": t[0] if t else None, "last_ns": t[-1] if t else None}
        recorder.event(_event(letter, i, now, **facts))
        if data.draw(st.booleans()):
            recorder.flush()
    recorder.flush()


# The folder


def test_a_cut_run_loads_as_any_other_and_says_that_it_was_cut(tmp_path):
    recorder = _recorder(tmp_path / "run")
    recorder.event(Sent(0, 20))
    recorder.flush()
    _kill(recorder)
    rows = [[30, 31, "gpu", "power", None, 55.5], [40, 41, "gpu", "power", '{"a": 1}', None]]
    text = "".join(json.dumps(r) + "\n" for r in rows) + '[50, 51, "gpu", "po'
    (tmp_path / "run" / "spool" / "readings-0.jsonl").write_text(text)
    run = Run.load(tmp_path / "run")
    assert run.manifest.partial
    assert "ended before it was finished" in run.manifest.partial_reason
    assert run.readings["asked_ns"].tolist() == [30, 40]
    assert [r["value"] for r in run.readings.rows()] == [55.5, None]


def test_a_kill_before_the_second_file_was_made(tmp_path):
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "log.jsonl").touch()
    run = Run.load(tmp_path)
    assert [len(run.table(name)) for name in ("points", "requests", "chunks")] == [0, 0, 0]
    assert run.manifest.partial


def test_the_spool_of_a_newer_version_is_not_guessed_at(tmp_path):
    _kill(Recorder(tmp_path, Manifest(schema_version=SCHEMA_VERSION + 1, whywait_version="9.9")))
    with pytest.raises(UsageError, match=r"written by whywait 9\.9"):
        Run.load(tmp_path)


def test_a_run_is_never_written_over_another(tmp_path):
    run = tmp_path / "run"
    recorder = _recorder(run)
    with pytest.raises(UsageError, match="already holds a run"):
        Recorder(run, Manifest())
    recorder.finish(recorder.manifest).save(run)
    discard_spool(run)
    assert not (run / "spool").exists()
    with pytest.raises(UsageError, match="already holds a run"):
        Recorder(run, Manifest())
    assert len(Run.load(run).requests) == 1
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        Recorder(tmp_path / "file", Manifest())
    with pytest.raises(UsageError, match="cannot write to"):
        Recorder(tmp_path / "file" / "deeper", Manifest())


def test_finishing_equals_recovering(tmp_path, monkeypatch):
    """They read the spool by the same code; a finished Run differs from a recovered one only in saying so."""
    recorder = Recorder(tmp_path / "run", Manifest(seed=7))
    _history(recorder)
    cut = recover(tmp_path / "run")
    whole = recorder.finish(recorder.manifest)
    manifest = dataclasses.replace(cut.manifest, partial=False, partial_reason="")
    assert dataclasses.replace(cut, manifest=manifest) == whole


# Long runs: pieces


@pytest.mark.parametrize(("piece", "bucket"), [(1, 1), (7, 5), (64, 1000), (1000, 3)])
def test_chunks_that_do_not_fit_in_one_piece(tmp_path, monkeypatch, piece, bucket):
    """Two spools, requests that overlap in time, one that spans the whole run, one without a chunk."""
    monkeypatch.setattr(spool_module, "PIECE", piece)
    monkeypatch.setattr(spool_module, "BUCKET", bucket)
    main = Recorder(tmp_path / "run", Manifest(seed=7))
    shards = [Recorder(tmp_path / "run", Manifest(), f"spool-{k}") for k in (0, 1)]
    rng = np.random.default_rng(3)
    recorded: dict[int, list[tuple[int, int]]] = {}
    for k, shard in enumerate(shards):
        ids = [i for i in range(40) if i % 2 == k]
        shard.begin_point({**POINT, "start_ns": 10 + k}, [{"id": i} for i in ids])
        for t in range(300):
            i = ids[0] if t % 5 == 0 else int(rng.choice(ids[t // 20 : t // 20 + 3]))
            if i != 38:
                shard.chunk(i, 1000 + t, -1, chunk_meta(ANSWER if t % 3 else ROLE, t, 0))
                recorded.setdefault(i, []).append((1000 + t, t))
        shard.end_point(0, 5000 + k)
        shard.close()
    run = main.finish(main.manifest)
    want = [(i, *pair) for i in sorted(recorded) for pair in recorded[i]]
    got = list(zip(run.chunks["id"].tolist(), run.chunks["t_ns"].tolist(), run.chunks["tokens"].tolist(), strict=True))
    assert got == want
    assert len(run.chunks) == len(want)
    assert run.points.rows()[0]["target"] == 2
    assert (run.points["start_ns"][0], run.points["end_ns"][0], run.points["planned"][0]) == (10, 5001, 40)
    first = {i: min((t for t, n in pairs if n % 3), default=None) for i, pairs in recorded.items()}
    rows = {r["id"]: r for r in run.requests.rows()}
    assert {i: rows[i]["first_ns"] for i in recorded} == first
    assert all(rows[i]["content_chunks"] == sum(n % 3 > 0 for _, n in pairs) for i, pairs in recorded.items())
    run.save(tmp_path / "run")
    discard_spool(tmp_path / "run")
    assert Run.load(tmp_path / "run") == run
    run.save(tmp_path / "copy")
    assert Run.load(tmp_path / "copy") == run


def test_what_is_on_disk_is_not_in_memory():
    """Three million chunks are 100 MB as columns: finishing took 65 MB more for them than for a tenth of a million, and
    240 MB more where they were brought in whole; recording took 2 MB more."""
    root = Path(__file__).parents[1]
    peaks = {}
    for millions in ("0.1", "3"):
        argv = [sys.executable, str(root / "benchmarks" / "memory.py"), millions]
        env = {**os.environ, "PYTHONPATH": str(root / "src")}
        said = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
        row = [x.strip() for x in said.stdout.splitlines()[-1].split("|")]
        peaks[millions] = (float(row[2]), float(row[3]))
    assert peaks["3"][0] - peaks["0.1"][0] < 40  # recording
    assert peaks["3"][1] - peaks["0.1"][1] < 150  # finishing


class _Full:
    """A disk with room for so many bytes."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(28, "No space left on device")
        n = min(self.room, len(data))
        self.room -= n
        return self.file.write(data[:n])

    def close(self) -> None:
        self.file.close()


@pytest.mark.parametrize("room", [0, 1, 31, 33, 100, 500, 100_000])
def test_what_a_full_disk_did_not_take_is_offered_again(tmp_path, room):
    """No byte is lost or written twice when space comes back, and none of it raises."""
    recorder = Recorder(tmp_path / "run", Manifest(seed=7))
    disks = [_Full(a._file, room) for a in (recorder._log, recorder._bin)]
    recorder._log._file, recorder._bin._file = disks
    _history(recorder)
    assert bool(recorder.complaint) == (room < 100_000)
    if recorder.complaint:
        assert "No space left" in recorder.complaint
        cut = recover(tmp_path / "run")
        assert violations(cut) == []
    for disk in disks:
        disk.room = 1 << 40
    recorder.flush()
    assert recorder.complaint == ""
    whole = recorder.finish(recorder.manifest)
    other = Recorder(tmp_path / "other", Manifest(seed=7))
    _history(other)
    assert whole == other.finish(other.manifest)


def test_a_disk_that_stays_full_is_an_error_that_says_where_the_rest_is(tmp_path):
    recorder = Recorder(tmp_path / "run", Manifest(seed=7))
    recorder._log._file = _Full(recorder._log._file, 10)
    _history(recorder)
    with pytest.raises(UsageError, match="the disk did not take the whole run") as caught:
        recorder.finish(recorder.manifest)
    assert "whywait show" in caught.value.hint
    assert recover(tmp_path / "run").manifest.partial


def test_a_table_that_is_not_written_leaves_no_half_of_it(tmp_path):
    def pieces():
        yield {"id": np.zeros(3, np.int64)}, 3
        raise RuntimeError("half way")

    with pytest.raises(KeyError):  # a column is missing: said as it is, not as the writer words it
        write_pieces(tmp_path / "x.parquet", TABLES["chunks"], pieces())
    assert list(tmp_path.iterdir()) == []
