"""What is told while a load runs: on a terminal, in a pipe, in CI, without colour; and the first doubts."""

from __future__ import annotations

import dataclasses
import io
import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whywait.core.events import Failed, Finished, Sent
from whywait.load.progress import Progress, SoFar, Watched, quantile, together
from whywait.load.stub import StubProcess
from whywait.report import live
from whywait.report.live import Counter, Live, can_move, fitting
from whywait.report.live_doubts import first_doubts

MS = 1_000_000
ROOT = Path(__file__).resolve().parents[1]


class Screen(io.StringIO):
    """A terminal, or not."""

    def __init__(self, tty: bool) -> None:
        super().__init__()
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


def point(**more: Any) -> Any:
    nothing_due = SimpleNamespace(due_ns=np.zeros(0, np.int64))
    base = {"number": 0, "mode": "concurrency", "target": 4.0, "label": None, "duration_s": 30.0, "closed": True,
            "elastic": True, "max_in_flight": None, "schedule": nothing_due}  # fmt: skip
    return SimpleNamespace(**{**base, **more})


def progress(elapsed_s: float, ended: int = 0, chunks: int = 0, so_far: SoFar | None = None, **more: Any) -> Any:
    base = {"point": point(), "sent": ended + 4, "ended": ended, "in_flight": 4, "chunks": chunks,
            "elapsed_s": elapsed_s, "so_far": so_far or SoFar(), "planned": 100}  # fmt: skip
    p = SimpleNamespace(**{**base, **more})
    p.ttft_ns, p.tpot_ns = lambda q: quantile(p.so_far.ttft, q), lambda q: quantile(p.so_far.tpot, q)
    return p


@pytest.fixture(autouse=True)
def _a_person_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def idle(*flights: Any) -> Any:
    """A client that has nothing to say against itself."""
    return SimpleNamespace(flights=lambda: list(flights), last_failure="", reads=0, coalesced_reads=0, user_stamps=0,
                           send_lag=SimpleNamespace(quantile=lambda _q: None))  # fmt: skip


def buckets(*ns: int) -> dict[int, int]:
    sink = Watched(SimpleNamespace(event=lambda _e: None, chunk=None), closed=True)  # type: ignore[arg-type]
    for i, value in enumerate(ns):
        sink.event(Sent(i, 0))
        sink.event(Finished(i, value, {"first_ns": value, "last_ns": value, "output_tokens": 1, "content_chunks": 1}))
    return sink.so_far(idle()).ttft


def test_latencies_so_far_are_those_of_the_definitions() -> None:
    """TTFT from the send (closed) or the due time (open); TPOT over the tokens after the first chunk's."""
    facts = {"due_ns": 10 * MS, "first_ns": 110 * MS, "last_ns": 410 * MS, "output_tokens": 31, "content_chunks": 31}
    client = SimpleNamespace(flights=list, last_failure="shed: 429", reads=9, coalesced_reads=1, user_stamps=0,
                             send_lag=SimpleNamespace(quantile=lambda _q: 7.0))  # fmt: skip
    for closed, ttft_ms in ((True, 90), (False, 100)):
        sink = Watched(SimpleNamespace(event=lambda _e: None, chunk=None), closed)  # type: ignore[arg-type]
        sink.event(Sent(1, 20 * MS))
        sink.event(Finished(1, 420 * MS, facts))
        sink.event(Sent(2, 20 * MS))
        sink.event(Failed(2, 30 * MS, {"outcome": "shed"}))
        s = sink.so_far(client)  # type: ignore[arg-type]
        assert quantile(s.ttft, 0.5) == pytest.approx(ttft_ms * MS, rel=0.07)
        assert quantile(s.tpot, 0.5) == pytest.approx(10 * MS, rel=0.07)
        assert (s.tokens, s.chunks, s.failed, sink.failed) == (31, 31, 1, {2})


def test_first_tokens_of_those_in_flight_count() -> None:
    """A minute-long answer has a TTFT long before it ends."""
    flight = SimpleNamespace(first=50 * MS, sent=20 * MS, call=SimpleNamespace(due_ns=0))
    waiting = SimpleNamespace(first=-1, sent=20 * MS, call=SimpleNamespace(due_ns=0))
    s = Watched(SimpleNamespace(event=None, chunk=None), closed=True).so_far(idle(flight, waiting))  # type: ignore[arg-type]
    assert sum(s.ttft.values()) == 1
    assert quantile(s.ttft, 0.5) == pytest.approx(30 * MS, rel=0.07)


def test_unknown_tokens_give_no_tpot() -> None:
    sink = Watched(SimpleNamespace(event=lambda _e: None, chunk=None), closed=True)  # type: ignore[arg-type]
    sink.event(Sent(1, 0))
    sink.event(Finished(1, 9 * MS, {"first_ns": MS, "last_ns": 9 * MS, "output_tokens": 20, "content_chunks": 5}))
    assert not sink._tpot.n


def test_several_processes_add_up() -> None:
    one = dataclasses.asdict(SoFar({3: 2}, {5: 1}, 10.0, 5, 1, "reset", 100, 10, 0, 4.0))
    other = dataclasses.asdict(SoFar({3: 1, 4: 1}, {}, 2.0, 1, 0, "", 50, 0, 0, 9.0))
    both = together([one, {**other, "ttft": {"3": 1, "4": 1}}])  # keys are text after JSON
    assert both == SoFar({3: 3, 4: 1}, {5: 1}, 12.0, 6, 1, "reset", 150, 10, 0, 9.0)
    assert together([{}]) == SoFar()


def test_one_line_moves_and_holds_what_matters() -> None:
    screen = Screen(True)
    shown = Live(screen, [30.0, 60.0])
    shown._moving = True
    s = SoFar(buckets(90 * MS, 100 * MS, 110 * MS), {}, 300.0, 100)
    at = point()
    shown(progress(9.0, 20, 1000, s, point=at))
    shown(progress(10.0, 23, 1100, s, point=at))
    last = screen.getvalue().split("\r")[-1].rstrip()
    assert "concurrency 4 [1/2]" in last
    assert "10/30 s" in last
    assert "23 done" in last
    assert "4 in flight" in last
    whole = "  ".join(text for _, text in shown.parts(progress(10.0, 23, 1100, s, point=at)))
    assert "3.00 req/s" in whole
    assert "300 tok/s" in whole  # 100 chunks of 3 tokens each
    assert "TTFT 96 ms (p95 110 ms)" in whole  # in buckets 12 % wide
    assert "about 20 s left, 80 s of all" in whole
    assert "\n" not in screen.getvalue()
    assert "\x1b" not in screen.getvalue()
    shown.done()
    assert screen.getvalue().endswith("\r")


def test_chunks_are_not_called_tokens() -> None:
    shown, at = Live(Screen(False)), point()
    shown(progress(1.0, 0, 0, point=at))
    p = progress(2.0, 1, 50, point=at)
    shown(p)
    said = " ".join(text for _, text in shown.parts(p))
    assert "50.0 chunks/s" in said
    assert "tok/s" not in said


def test_time_left_without_a_duration_comes_from_the_rate_of_ends() -> None:
    at = point(duration_s=None, elastic=False)
    shown = Live(Screen(False))
    said = " ".join(text for _, text in shown.parts(progress(10.0, 2, 0, point=at)))
    assert "left" not in said  # two ends say nothing
    said = " ".join(text for _, text in shown.parts(progress(10.0, 20, 0, point=at)))
    assert "20/100 done" in said
    assert "about 40 s left" in said


def test_a_budget_is_told_as_a_whole() -> None:
    said = " ".join(text for _, text in Live(Screen(False), budget_s=180.0).parts(progress(10.0, 20)))
    assert "left of all" in said
    assert "2 min 59 s" in said or "3 min 00 s" in said


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_narrow_screen_loses_whole_parts(width: int) -> None:
    parts = [(0, "concurrency 4"), (1, "10/30 s"), (5, "3 req/s"), (4, "TTFT 100 ms"), (3, "20 s left")]
    line = fitting(parts, width)
    assert len(line) <= width
    assert line.startswith("concurrency 4")
    assert all(piece in [text for _, text in parts] for piece in line.split("  "))


@pytest.mark.parametrize(("tty", "term", "ci", "moves"), [
    (True, "xterm", "", True), (False, "xterm", "", False), (True, "dumb", "", False), (True, "xterm", "true", False),
    (True, "xterm", "false", True),
])  # fmt: skip
def test_where_the_cursor_moves(monkeypatch: pytest.MonkeyPatch, tty: bool, term: str, ci: str, moves: bool) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("CI", ci)
    assert can_move(Screen(tty)) is moves


def test_elsewhere_a_line_every_few_seconds() -> None:
    pipe, at = Screen(False), point()
    shown = Live(pipe)
    for i in range(1, 41):  # twenty seconds
        shown(progress(i / 2, i, 10 * i, point=at))
    lines = pipe.getvalue().splitlines()
    assert len(lines) == 4
    assert all(line.startswith("concurrency 4") for line in lines)
    assert "\r" not in pipe.getvalue()
    shown(progress(0.5, 0, point=point()))  # another point: at once
    assert len(pipe.getvalue().splitlines()) == 5


def test_a_doubt_is_said_once_and_takes_the_line_away() -> None:
    screen, at = Screen(True), point()
    shown = Live(screen)
    late = SoFar(send_lag_ns=20.0 * MS)
    shown(progress(0.5, 29, 90, point=at))
    for t in (1.0, 1.5, 2.0):
        shown(progress(t, 30, 100, late, point=at))
    said = screen.getvalue()
    assert said.count("doubt so far: the client sends late: 20.0 ms") == 1
    assert "\rdoubt" in said


def test_what_others_say_takes_the_line_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(True)
    monkeypatch.setattr(sys, "stderr", screen)
    shown = live.watcher()
    shown(progress(1.0, 1))
    print("whywait: something", file=sys.stderr)
    assert screen.getvalue().endswith("\rwhywait: something\n")
    live.done()
    assert sys.stderr is screen


def keys(p: Any, history: list[tuple[float, int]] | None = None) -> set[str]:
    return {key for key, _ in first_doubts(p, history or [(p.elapsed_s, p.in_flight)])}


def test_first_doubts() -> None:
    assert keys(progress(5.0, 30, 100, SoFar(buckets(MS), reads=1000))) == set()
    assert keys(progress(5.0, 30, 100, SoFar(failed=1, last_failure="shed: 429"))) == {"failed-some"}
    assert keys(progress(5.0, 30, 100, SoFar(failed=9))) == {"failed-many"}
    assert keys(progress(5.0, 30, 100, SoFar(reads=1000, coalesced_reads=300))) == {"coalesced"}
    assert keys(progress(5.0, 30, 100, SoFar(reads=1000, user_reads=1000))) == {"user clock"}
    assert keys(progress(12.0, 0, 0)) == {"silent"}
    assert keys(progress(8.0, 0, 0)) == set()


def test_an_open_loop_that_falls_behind_and_one_that_grows() -> None:
    due = SimpleNamespace(due_ns=np.arange(100, dtype=np.int64) * 100 * MS)  # ten a second
    at = point(mode="rate", closed=False, schedule=due)
    assert "behind" in keys(progress(8.0, 20, 9, sent=30, point=at))
    assert "behind" not in keys(progress(8.0, 20, 9, sent=76, point=at))
    assert "behind" not in keys(progress(8.0, 20, 9, sent=30, point=point(mode="rate", closed=False, schedule=due,
                                                                          max_in_flight=4)))  # fmt: skip
    grown = [(float(t), 3 * t) for t in range(1, 21)]
    assert "grows" in keys(progress(20.0, 20, 9, sent=200, in_flight=60, point=at), grown)
    steady = [(float(t), 30) for t in range(1, 21)]
    assert "grows" not in keys(progress(20.0, 20, 9, sent=200, in_flight=30, point=at), steady)


def test_a_service_cannot_move_the_cursor() -> None:
    pipe = Screen(False)
    Live(pipe)(progress(5.0, 30, 100, SoFar(failed=1, last_failure="reset: \x1b[2J\rgone")))
    assert "\x1b" not in pipe.getvalue()
    assert "\r" not in pipe.getvalue()


def test_counter() -> None:
    screen = Screen(True)
    told = Counter(screen)
    told("draws", 1, 3)
    told("draws", 3, 3)
    assert screen.getvalue().startswith("\rdraws: 1 of 3")
    assert screen.getvalue().endswith("\r")
    pipe = Screen(False)
    quick = Counter(pipe)
    quick("draws", 1, 3)
    quick("draws", 3, 3)
    assert not pipe.getvalue()


RUN = ["--concurrency", "2", "--duration", "1.3s", "--no-floor", "--prompt-tokens", "16", "--output-tokens", "8"]


def _command(url: str, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "whywait", "run", url, *RUN, "--out", str(out), *more]


def _env(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120", **more}


def _on_a_terminal(command: list[str], env: dict[str, str]) -> bytes:
    """All that comes out when stdin, stdout and stderr are a terminal."""
    leader, follower = pty.openpty()
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=env) as process:
        os.close(follower)
        out = b""
        while process.poll() is None or select.select([leader], [], [], 0)[0]:
            if select.select([leader], [], [], 0.1)[0]:
                try:
                    data = os.read(leader, 65536)
                except OSError:
                    break
                if not data:
                    break
                out += data
        os.close(leader)
    return out


def test_in_a_pipe_and_on_terminals(tmp_path: Path) -> None:
    """A real run: stderr moves only on a terminal that can, stdout is plain text, and NO_COLOR is kept."""
    with StubProcess("--ttft-ms", "10", "--gap-ms", "5") as stub:
        env = _env(CI="", TERM="xterm")
        piped = subprocess.run(_command(stub.url, tmp_path / "a"), env=env, capture_output=True, check=False)
        assert piped.returncode in (0, 6), piped.stderr  # 6: a busy machine made the client late
        moved = _on_a_terminal(_command(stub.url, tmp_path / "b"), _env(CI="", TERM="xterm", NO_COLOR="1"))
    show = [sys.executable, "-m", "whywait", "show", str(tmp_path / "b")]
    dumb = _on_a_terminal(show, _env(CI="", TERM="dumb"))
    for stream in (piped.stdout, piped.stderr):
        assert b"\r" not in stream
        assert b"\x1b" not in stream
    assert b"concurrency 2" in piped.stderr
    assert b"\rconcurrency 2" in moved
    assert b"\x1b" not in dumb
    assert b"\r" not in dumb.replace(b"\r\n", b"\n")
    assert b"requests ok / planned" in dumb
    assert b"requests ok / planned" in moved
    assert not [c for c in moved.split(b"\x1b[")[1:] if c.split(b"m")[0] not in (b"0", b"1", b"2", b"3")]  # no colours


def test_progress_counts_what_is_planned() -> None:
    at = point(schedule=[1, 2, 3])
    assert Progress(at).planned == 3
