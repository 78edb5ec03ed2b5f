"""The client against the stub: outcomes, order, keep-alive, loops, spool. No timed assertions."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whywait.core.check import violations
from whywait.core.recorder import Recorder, discard_spool
from whywait.core.run import Manifest, Run, concat
from whywait.core.schedule import Schedule, Workload
from whywait.load.driver import Driver, Point
from whywait.load.recipe import closed_schedule, open_schedule
from whywait.load.stub import StubProcess
from whywait.net.client import Client
from whywait.net.clock import Clock
from whywait.net.dialect import chat_body
from whywait.net.endpoint import parse_url


@pytest.fixture(scope="module")
def stub() -> Any:
    with StubProcess() as s:
        yield s


def drive(url: str, out: Path, points: list[Point], stub: dict[str, Any] | None = None, **more: Any) -> Run:
    clock = Clock()
    manifest = Manifest(zero_unix_ns=clock.zero_unix_ns)
    recorder = Recorder(out, manifest)
    client = Client(parse_url(url, api_key=more.pop("key", None)), recorder, clock)
    stream = more.get("stream", True)
    stop = more.pop("stop", lambda _p: "")

    def body(row: int, schedule: Schedule) -> bytes:
        options: dict[str, Any] = {"stream": stream, "stub": {"ttft_ms": 5, "gap_ms": 2, "tokens": 6, **(stub or {})}}
        if stream:
            options["stream_options"] = {"include_usage": True}
        return chat_body("stub", f"hello {row}", int(schedule.output_tokens[row]), options)

    try:
        driver = Driver(client, recorder, clock, body, stop=stop, **more)
        for p in points:
            driver.run(p)
        run = recorder.finish(manifest)
    finally:
        client.close()
    run.save(out)
    assert Run.load(out) == run  # invariant 6, on every run of this file
    assert violations(run) == []
    return run


def closed(n: int = 12, concurrency: int = 4, number: int = 0) -> Point:
    return Point(number, "concurrency", concurrency, closed_schedule(Workload(), n, first_id=number * 1000))


def outcomes(run: Run) -> Counter[str | None]:
    return Counter(run.requests.text("outcome"))


def test_closed_loop_keeps_the_asked_number_in_flight(stub: Any, tmp_path: Path) -> None:
    run = drive(stub.url, tmp_path / "r", [closed(24, 6)])
    r = run.requests
    assert outcomes(run) == {"ok": 24}
    assert r["output_tokens"].tolist() == [6] * 24
    assert r["content_chunks"].tolist() == [6] * 24
    edges = np.concatenate([r["sent_ns"], r["end_ns"]])
    step = np.concatenate([np.ones(24), -np.ones(24)])
    in_flight = np.cumsum(step[np.lexsort((step, edges))])
    assert in_flight.max() == 6
    assert (r["connect_ns"] == 0).sum() >= 18  # connections were kept alive and used again
    assert (r["rtt_ns"] > 0).all()


def test_kernel_stamps_are_between_the_servers_send_and_our_read(stub: Any, tmp_path: Path) -> None:
    run = drive(stub.url, tmp_path / "r", [closed(8, 8)])
    assert set(run.chunks.text("clock")) == {"kernel"}
    assert (run.requests["first_ns"] >= run.requests["accepted_ns"]).all()


def test_open_loop_sends_by_its_timetable_whatever_the_service_does(stub: Any, tmp_path: Path) -> None:
    schedule = open_schedule(Workload(arrivals="constant"), rate=200.0, n=40)
    run = drive(stub.url, tmp_path / "r", [Point(0, "rate", 200.0, schedule)], {"ttft_ms": 400})
    r = run.requests
    assert outcomes(run) == {"ok": 40}
    assert (r["sent_ns"] >= r["due_ns"]).all()
    assert np.diff(r["due_ns"]).tolist() == [5e6] * 39  # constant is really constant
    # All were sent before the first came back: the timetable did not wait for completions.
    assert r["due_ns"].max() - r["due_ns"].min() < 400e6


@pytest.mark.parametrize(
    ("fault", "outcome", "whose"),
    [
        ({"fault": "error_event"}, "inband_error", "service"),
        ({"fault": "truncate"}, "truncated", "service"),
        ({"fault": "no_done"}, "ok", "none"),
        ({"fault": "reset"}, "reset", "service"),
        ({"fault": "http_500"}, "http_error", "service"),
        ({"fault": "http_429"}, "shed", "service"),
        ({"fault": "http_401"}, "http_error", "user"),
        ({"fault": "html"}, "protocol", "service"),
        ({"fault": "wrong_model"}, "http_error", "user"),
        ({"fault": "close_delimited"}, "ok", "none"),
        ({"fault": "split"}, "ok", "none"),
    ],
)
def test_each_ending_has_its_own_outcome(
    stub: Any, tmp_path: Path, fault: dict[str, Any], outcome: str, whose: str
) -> None:
    run = drive(stub.url, tmp_path / "r", [closed(3, 3)], fault)
    assert outcomes(run) == {outcome: 3}
    assert set(run.requests.text("fault")) == {whose}


def test_timeout_is_charged_and_recorded(stub: Any, tmp_path: Path) -> None:
    run = drive(stub.url, tmp_path / "r", [closed(2, 2)], {"fault": "hang"}, timeout_s=0.2)
    assert outcomes(run) == {"timeout": 2}
    assert (run.requests["end_ns"] > run.requests["sent_ns"]).all()


def test_several_events_in_one_read_become_intervals(stub: Any, tmp_path: Path) -> None:
    run = drive(stub.url, tmp_path / "r", [closed(2, 1)], {"fault": "coalesce:3", "tokens": 6})
    c = run.chunks.where(run.chunks["kind"] != 0)
    low = c["t_low_ns"]
    assert len(c) == 12
    # Two of each three; the last of a read is exact. Of a request read late, all but the last.
    assert 8 <= np.isfinite(low).sum() <= 10
    assert (low[np.isfinite(low)] <= c["t_ns"][np.isfinite(low)]).all()


def test_not_streaming(stub: Any, tmp_path: Path) -> None:
    run = drive(stub.url, tmp_path / "r", [closed(3, 3)], stream=False)
    assert outcomes(run) == {"ok": 3}
    assert run.requests["output_tokens"].tolist() == [6, 6, 6]
    assert np.isnan(run.requests["first_ns"]).all()


def test_missing_usage_stays_unknown(stub: Any, tmp_path: Path) -> None:
    run = drive(stub.url, tmp_path / "r", [closed(2, 2)], {"fault": "no_usage"})
    assert np.isnan(run.requests["output_tokens"]).all()


def test_refused(tmp_path: Path) -> None:
    run = drive("http://127.0.0.1:9", tmp_path / "r", [closed(3, 1)])
    assert outcomes(run) == {"refused": 3}


def test_key_is_sent_and_never_stored(tmp_path: Path) -> None:
    with StubProcess("--api-key", "s3cr3t-k3y") as s:
        assert outcomes(drive(s.url, tmp_path / "a", [closed(2, 1)], key="s3cr3t-k3y")) == {"ok": 2}
        assert outcomes(drive(s.url, tmp_path / "b", [closed(2, 1)])) == {"http_error": 2}
    for f in tmp_path.rglob("*"):
        assert f.is_dir() or b"s3cr3t" not in f.read_bytes()


def test_stopped_run_keeps_everything_counted(stub: Any, tmp_path: Path) -> None:
    points = [closed(50, 2)]
    run = drive(stub.url, tmp_path / "r", points, stop=lambda p: "enough" if p.ended >= 5 else "")
    seen = outcomes(run)
    assert sum(seen.values()) == 50 == run.points["planned"][0]  # invariant 1
    assert seen["ok"] >= 5
    assert seen["censored"] in (0, 1, 2)  # a place may just have become free
    assert seen["never_sent"] > 0


def test_by_time_a_closed_loop_has_no_never_sent(stub: Any, tmp_path: Path) -> None:
    point = closed(100_000, 2)
    point.duration_s = 0.2
    run = drive(stub.url, tmp_path / "r", [point])
    assert outcomes(run) == {"ok": len(run.requests)}
    assert run.points["planned"][0] == len(run.requests)


def test_a_killed_run_is_still_a_run(stub: Any, tmp_path: Path) -> None:
    """The spool alone gives the same rows; a torn tail is dropped; what was in flight is censored."""
    out = tmp_path / "r"
    run = drive(stub.url, out, [closed(6, 2), closed(6, 3, 1)])
    killed = tmp_path / "killed"
    shutil.copytree(out / "spool", killed / "spool")
    back = Run.load(killed)
    assert back.manifest.partial
    assert back.requests == run.requests
    assert back.chunks == run.chunks
    log = killed / "spool" / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-4]) + lines[-4][:9])
    chunks = killed / "spool" / "chunks.bin"
    chunks.write_bytes(chunks.read_bytes() + b"torn")
    torn = Run.load(killed)
    assert len(torn.requests) == 12
    assert outcomes(torn)["censored"] >= 1
    assert violations(torn) == []
    discard_spool(out)
    assert Run.load(out) == run


def test_points_and_shards_together_are_the_whole(stub: Any, tmp_path: Path) -> None:
    whole = closed_schedule(Workload(), 10)
    parts = [whole.shard(k, 3) for k in range(3)]
    assert sorted(np.concatenate([p.id for p in parts]).tolist()) == whole.id.tolist()
    run = drive(stub.url, tmp_path / "r", [closed(6, 2)])
    shards = []
    for k in range(2):
        keep = run.requests["id"] % 2 == k
        ids = run.requests["id"][keep]
        points = run.points.replace(planned=np.array([keep.sum()]))
        chunks = run.chunks.where(np.isin(run.chunks["id"], ids))
        shards.append(Run(run.manifest, points, run.requests.where(keep), chunks, run.steps, run.readings))
    again = concat(shards)
    assert again.requests == run.requests
    assert again.chunks == run.chunks
    assert again.points["planned"].tolist() == [6]


def test_idle_connection_closed_by_the_server_is_retried_once_and_marked(tmp_path: Path) -> None:
    import socket
    import threading

    answer = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 83\r\n\r\n"
        b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )
    answer = answer.replace(b"83", str(len(answer.split(b"\r\n\r\n", 1)[1])).encode())
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for turn in range(2):
            conn, _ = listener.accept()
            with conn:
                conn.recv(65536)
                conn.sendall(answer)
                if turn == 0:  # takes the next request on the kept connection and hangs up without a word
                    conn.recv(65536)

    thread = threading.Thread(target=serve)
    thread.start()
    run = drive(f"http://127.0.0.1:{listener.getsockname()[1]}", tmp_path / "r", [closed(2, 1)])
    thread.join()
    listener.close()
    assert outcomes(run) == {"ok": 2}
    assert run.requests["attempt"].tolist() == [1, 2]
