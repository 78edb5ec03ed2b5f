"""Shards by way of relays, as over a cluster but without one: the same Run, clocks set right, the dead named."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis_runs import make_run
from whywait.app import Load
from whywait.core.check import violations
from whywait.core.recorder import spools_of
from whywait.core.resume import joined
from whywait.core.run import Run, before_point
from whywait.core.schedule import Lengths, RequestClass, Workload
from whywait.core.spool import assemble
from whywait.errors import MissingExtra, UsageError
from whywait.load import link, over_ray, relay, shards
from whywait.load.over_ray import Workers, lost_doubts, shard_doubts, way_doubts
from whywait.load.relay import Relay, RelayLink
from whywait.load.stub import StubProcess
from whywait.net import cluster
from whywait.net.cluster import Node, Offset, offset
from whywait.net.endpoint import parse_url
from whywait.session import Options, Session

AHEAD_NS = 3_600_000_000_000  # an hour: of another boot


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess("--ttft-ms", "10", "--gap-ms", "5", "--tokens", "8") as s:
        yield s


class Later:
    """A relay whose machine has a clock of its own: ``ahead_ns`` can be changed, as a bad clock changes."""

    def __init__(self, ahead_ns: int = 0) -> None:
        self.relay, self.ahead_ns, self.dead = Relay(), ahead_ns, ""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.dead:
                raise TimeoutError("no answer in time") if self.dead == "silence" else RuntimeError(self.dead)
            if name == "now":
                return time.monotonic_ns() + self.ahead_ns
            return getattr(self.relay, name)(*args)

        return SimpleNamespace(remote=lambda *args: (call, args))


class Cluster:
    """What is asked of the module ``ray``, in one process. Calls whose result nobody waits for are made at once."""

    def get(self, future: Any, timeout: float) -> Any:
        call, args = future
        return call(*args)

    def kill(self, actor: Any) -> None:
        pass


class Telling(Later):
    """``tell`` and ``kill`` are fire and forget: they happen when they are asked."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name not in ("tell", "kill"):
            return found
        return SimpleNamespace(remote=lambda *args: found.remote(*args)[0](*args))


class Place:
    """In place of ``over_ray.Workers``: two nodes of this process."""

    def __init__(self, *_: Any) -> None:
        self.nodes = [Node("a", "10.0.0.1", "10.0.0.1", 1), Node("b", "10.0.0.2", "10.0.0.2", 1)]
        self.ways_ms = [0.1, 0.1]
        self.actors = [Telling(), Telling()]
        made.append(self)

    def links(self) -> list[RelayLink]:
        return [RelayLink(Cluster(), *x) for x in zip(self.nodes, self.actors, strict=True)]

    def close(self) -> None:
        pass


made: list[Place] = []


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_ray, "Workers", Place)


def _options(stub: StubProcess, out: Path, tokens: int = 8) -> Options:
    lengths = RequestClass(prompt_tokens=Lengths("fixed", 16), output_tokens=Lengths("fixed", tokens))
    return Options(stub.url, workload=Workload((lengths,)), out=str(out), floor=False, processes=0, ray="auto")


@pytest.fixture
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker's monotonic clock is an hour ahead: a shard told a zero by that clock is told it by ours."""
    first, begin = Place.__init__, RelayLink.begin

    def ahead(self: Place, *args: Any) -> None:
        first(self, *args)
        self.actors[1].ahead_ns = AHEAD_NS

    def by_ours(self: RelayLink, job: Any) -> None:
        self._used_ns -= self._actor.ahead_ns
        begin(self, job)
        self._used_ns += self._actor.ahead_ns

    monkeypatch.setattr(Place, "__init__", ahead)
    monkeypatch.setattr(RelayLink, "begin", by_ours)


@pytest.mark.usefixtures("_ahead")
def test_shards_by_relays_together_are_the_whole(stub, tmp_path):
    """Invariant 7, and all begin at one moment; what is kept is what each sent home, and nothing stays behind."""
    with Session(_options(stub, tmp_path / "r"), lambda _line: None) as s:
        assert s.point(Load("concurrency", 6, 40))
        assert s.point(Load("rate", 60.0, 40))
        folders = [a.relay._directory for a in made[-1].actors]
        assert all(f.is_dir() for f in folders)
        run = s.finish()
        alone = [assemble([spool], None) for spool in spools_of(tmp_path / "r")]
    assert [len(a.requests) for a in alone] == [0, 40, 40]
    assert run.requests.text("outcome") == ["ok"] * 80
    assert run.points["planned"].tolist() == [40, 40]
    assert len(run.chunks) == sum(len(a.chunks) for a in alone) == int(run.requests["content_chunks"].sum()) + 80
    assert alone[1].points["start_ns"].tolist() == alone[2].points["start_ns"].tolist()
    assert violations(run) == []
    assert [c["where"] for c in run.manifest.clock] == ["10.0.0.1", "10.0.0.2"]
    assert [c["where"] for c in run.manifest.client["shards"]] == ["10.0.0.1", "10.0.0.2"]
    assert run.manifest.client["processes"] == 2
    ahead = [c["clock_ahead_ns"] for c in run.manifest.clock]
    assert abs(ahead[0]) < 1_000_000
    assert abs(ahead[1] - AHEAD_NS) < 1_000_000
    assert all(0 < c["offset_error_ns"] < 1_000_000 for c in run.manifest.clock)
    assert float((run.requests["sent_ns"] - run.points["start_ns"][0]).min()) >= 0
    assert not any(f.exists() for f in folders)


def test_a_clock_that_goes_astray_is_set_again_and_told(stub, tmp_path):
    with Session(_options(stub, tmp_path / "r"), lambda _line: None) as s:
        assert s.point(Load("concurrency", 2, 4))
        made[-1].actors[1].ahead_ns = 5_000_000
        told: list[Any] = []
        tell = s.crew._shards[1].link.tell
        s.crew._shards[1].link.tell = lambda data: (told.append(data), tell(data))
        assert s.point(Load("concurrency", 2, 4))
        run = s.finish()
    assert any(b"zero" in data for data in told)
    moved = {c["shard"]: c["set_again_ns"] for c in run.manifest.clock}
    assert moved[0] == 0
    assert abs(moved[1] - 5_000_000) < 1_000_000
    (said,) = [d for d in run.manifest.doubts if "astray" in d["what"]]
    assert "shard 1 on 10.0.0.2 went astray by +5.0 ms" in said["what"]


@given(st.integers(-(10**15), 10**15), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1))
@settings(max_examples=100, deadline=None)
def test_the_true_offset_is_never_outside(truth, ways):
    """However long the way there and back took."""
    now = [0]
    left = iter([x for way in ways for x in way])

    def ping() -> int:
        now[0] += next(left)
        there = now[0] + truth
        now[0] += next(left)
        return there

    found = offset(ping, len(ways), lambda: now[0])
    assert found.low <= truth <= found.high
    assert found.high - found.low <= min(a + b for a, b in ways)


def test_looks_that_cannot_both_be_true_say_that_a_clock_went_astray():
    assert Offset(0, 10).narrowed(Offset(5, 20)) == Offset(5, 10)
    assert Offset(0, 10).narrowed(Offset(11, 20)) is None


# Dying


@pytest.mark.parametrize("how", ["the shard", "its machine", "the network"])
def test_what_is_killed_loses_a_second_is_named_and_the_run_is_partial(stub, tmp_path, how, monkeypatch):
    monkeypatch.setattr(relay, "SILENT_S", 3.0)
    killed: list[float] = []
    seen: list[Run] = []

    def kill(p: Any) -> None:
        if p.in_flight == 4 and p.elapsed_s > 1.5 and not killed:
            seen.append(Run.load(tmp_path / "r"))  # what is on disk here while it goes on is a Run
            killed.append(s.clock.now() / 1e9)
            actor = made[-1].actors[1]
            if how != "the shard":  # its relay answers no more
                actor.dead = "The actor died because its node has died." if how == "its machine" else "silence"
            os.kill(actor.relay._link.pid, signal.SIGKILL)

    with Session(_options(stub, tmp_path / "r", 2000), lambda _line: None, kill) as s:
        assert not s.point(Load("concurrency", 4, 20))
        run = s.finish()
    assert (seen[0].manifest.partial, seen[0].requests.text("outcome").count("censored")) == (True, 4)
    assert len(seen[0].chunks) > 100
    assert run.manifest.partial
    reason = run.manifest.partial_reason
    assert "shard 1 on 10.0.0.2" in reason
    said = {"the shard": "killed by SIGKILL", "its machine": "node has died", "the network": "not answered for 3 s"}
    assert said[how] in reason
    outcomes = run.requests.text("outcome")
    assert (outcomes.count("censored"), outcomes.count("never_sent")) == (4, 16)
    (lost,) = [d for d in run.manifest.doubts if "was lost" in d["what"]]
    assert "shard 1 on 10.0.0.2" in lost["what"]
    mine = run.chunks["t_ns"][run.chunks["id"] % 2 == 1]
    assert float(mine.max()) / 1e9 > killed[0] - 1.0  # all but its last second
    left = made[-1].actors[1].relay
    if how != "the shard":  # what nobody could tidy up is tidied up by the next one there
        left._link.close(True)
        left._lock.close()
        one = Relay()
        one.start(0)
        one.close(True)
        one._link._out.close()
    assert not left._directory.exists()
    assert violations(run) == []


def test_a_shard_elsewhere_that_stands_still_is_given_up_and_named(stub, tmp_path, monkeypatch):
    """Its relay answers as ever; what it had recorded is here."""
    monkeypatch.setattr(shards, "SILENT_S", 2.0)
    stopped: list[int] = []

    def stop(p: Any) -> None:
        if p.in_flight == 4 and p.elapsed_s > 1.0 and not stopped:
            stopped.append(made[-1].actors[1].relay._link.pid)
            os.kill(stopped[0], signal.SIGSTOP)

    with Session(_options(stub, tmp_path / "r", 2000), lambda _line: None, stop) as s:
        assert not s.point(Load("concurrency", 4, 20))
        run = s.finish()
    assert run.manifest.partial_reason == "shard 1 on 10.0.0.2 said nothing for 2 s"
    outcomes = run.requests.text("outcome")
    assert (outcomes.count("censored"), outcomes.count("never_sent")) == (4, 16)
    assert (run.chunks["id"] % 2 == 1).sum() > 50
    assert any("shard 1 on 10.0.0.2 was lost" in d["what"] for d in run.manifest.doubts)
    assert violations(run) == []
    assert not Path(f"/proc/{stopped[0]}").exists()


@pytest.mark.parametrize(
    "garbage", [b"\x00\xffnonsense\n", b'["progress", 3]\n', b'["ended", ["", 1, {"no": 1}]]\n', b"0"]
)
def test_a_shard_elsewhere_that_talks_nonsense_is_given_up_and_named(stub, tmp_path, monkeypatch, garbage):
    monkeypatch.setattr(shards, "MOST_WORD", 1 << 20)
    said: list[bytes] = []

    def watch(p: Any) -> None:
        if p.in_flight == 4 and not said:
            said.append(garbage if len(garbage) > 1 else garbage * (2 << 20))
            relay_there = made[-1].actors[1].relay
            hear = relay_there.hear

            def garbled(wait_s: float) -> tuple[bytes, bytes, bytes, bool]:
                chunks, log, words, ended = hear(wait_s)
                return chunks, log, (said.pop() if len(said) == 2 else words), ended

            said.append(said[0])
            relay_there.hear = garbled

    with Session(_options(stub, tmp_path / "r", 2000), lambda _line: None, watch) as s:
        assert not s.point(Load("concurrency", 4, 20))
        run = s.finish()
    what = "makes no sense" if len(garbage) > 1 else "has no end"
    assert run.manifest.partial_reason == f"shard 1 on 10.0.0.2 said what {what}"
    assert len(run.requests) == 20 == int(run.points["planned"].sum())
    assert violations(run) == []


def test_a_shard_that_takes_nothing_more_does_not_hold_up_who_tells_it(monkeypatch):
    """Its pipe is full and it stands still; it is told so much that no pipe holds it."""
    monkeypatch.setattr(link, "TELL_S", 0.3)
    one = link.Link()
    os.kill(one.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"took nothing for 0\.3 s"):
        one.tell(bytes(4 << 20))
    one.kill()
    assert "was killed by SIGKILL" in one.fate()
    one.tell(b"the dead take it")
    one.close(kill=True)


def test_a_relay_that_dies_takes_its_shard_along(stub, tmp_path):
    """Its process ends with the pipe, and leaves nothing behind."""
    one = Relay()
    folder = Path(one.start(0))
    pid = one._link.pid
    job = relay.dataclasses.replace(_job(stub, folder), passing=True)
    one.tell(0, relay.pickle.dumps(job))
    while not one.hear(0.2)[2]:
        pass
    one._link._in.close()
    end = time.monotonic() + 20
    while one._link._process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert one._link._process.poll() == 0, pid
    assert not folder.exists()
    one._lock.close()
    one._link._out.close()


def _job(stub: StubProcess, folder: Path) -> Any:
    from whywait.load.link import Job
    from whywait.load.preflight import Target

    return Job(0, folder, time.monotonic_ns(), Target(parse_url(stub.url), "stub"))


def test_what_is_told_comes_in_order_whatever_the_network_does():
    one, got = Relay(), []
    one._link = SimpleNamespace(tell=got.append)
    for n in (1, 0, 3, 2):
        one.tell(n, b"%d" % n)
    assert b"".join(got) == b"0123"


def test_one_call_at_most_waits_for_a_shard_that_takes_nothing():
    """The relay has few, and one of them listens."""
    one, got, go = Relay(), [], threading.Event()

    def slow(data: bytes) -> None:
        assert go.wait(10)
        got.append(data)

    one._link = SimpleNamespace(tell=slow)
    first = threading.Thread(target=one.tell, args=(0, b"0"))
    first.start()
    while 0 in one._told:
        time.sleep(0.001)
    for n in (2, 1, 3):
        one.tell(n, b"%d" % n)  # comes back at once
    assert got == []
    go.set()
    first.join(10)
    assert b"".join(got) == b"0123"


def test_what_is_told_goes_in_pieces_that_ray_does_not_store():
    """Larger arguments (a key is among them) go by an object store, which may write them to a disk."""
    said: list[tuple[int, bytes]] = []
    actor = SimpleNamespace(
        now=SimpleNamespace(remote=lambda: (time.monotonic_ns, ())),
        tell=SimpleNamespace(remote=lambda n, data: said.append((n, data))),
    )
    link = RelayLink(Cluster(), NODES[0], actor)
    data = os.urandom(300_000)
    link.tell(data)
    link.tell(b"more")
    assert [n for n, _ in said] == list(range(len(said)))
    assert b"".join(piece for _, piece in said) == data + b"more"
    assert max(len(piece) for _, piece in said) < 100_000
    os.close(link.out)
    os.close(link._in_pipe)


def test_a_log_never_tells_of_chunks_that_have_not_come(tmp_path, monkeypatch):
    """While a writer appends chunks before it logs them, whatever was taken so far is whole."""
    monkeypatch.setattr(relay, "FETCH", 1000)
    one = Relay()
    one._files = [relay._Growing(tmp_path / "chunks.bin"), relay._Growing(tmp_path / "log.jsonl")]
    read, write = os.pipe()
    one._link = SimpleNamespace(out=read)

    def append() -> None:
        with (tmp_path / "chunks.bin").open("ab", 0) as chunks, (tmp_path / "log.jsonl").open("ab", 0) as log:
            for i in range(300):
                chunks.write(b"c" * 96)
                log.write(b"l" * 40)
                if i % 50 == 49:
                    os.write(write, b"%d\n" % (i + 1))
        os.close(write)

    thread = threading.Thread(target=append)
    thread.start()
    chunks = log = 0
    last, ended = 0, False
    while not ended:
        more, lines, words, ended = one.hear(0.1)
        chunks += len(more)
        log += len(lines)
        assert log // 40 <= chunks // 96
        last = int(words.split()[-1]) if words else last
        assert log // 40 >= last
    thread.join()
    os.close(read)
    assert (chunks, log, last) == (300 * 96, 300 * 40, 300)


# Before anything is sent


NODES = [Node("a", "n1", "n1", 2), Node("b", "n2", "n2", 1)]


def test_places_are_dealt_to_nodes_in_turn_and_none_is_overfull():
    assert [n.name for n in over_ray._spread(NODES, 2)] == ["n1", "n2"]
    assert [n.name for n in over_ray._spread(NODES, 3)] == ["n1", "n2", "n1"]


def test_loopback_of_another_machine_is_refused(stub):
    mine = cluster.here()
    over_ray._same_loopback(parse_url(stub.url), NODES, [mine, mine])
    with pytest.raises(UsageError, match="is this machine, and to n2 it is that one"):
        over_ray._same_loopback(parse_url(stub.url), NODES, [mine, {**mine, "boot": "another"}])


def test_a_relay_says_whether_the_service_can_be_reached(stub):
    family, address = parse_url(stub.url).address
    assert 0 < Relay().reach(family, address, 2.0) < 1000
    assert "refused" in str(Relay().reach(family, ("127.0.0.1", 1), 2.0))


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:1", "ray://127.0.0.1:1", "ray://127.0.0.1:x"])
def test_an_address_where_no_cluster_answers(address):
    pytest.importorskip("ray", reason="whywait[ray] is not installed")
    with pytest.raises(UsageError, match=r"no Ray cluster at|is not an address") as found:
        cluster.ray_of(address)
    assert "ray start" in found.value.hint


def test_without_ray_one_line_says_what_brings_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match="needs the extra 'ray'"):
        cluster.ray_of("auto")


# Doubts of single shards


def test_doubts_name_the_shard():
    clock = [{"shard": 0, "where": "n1", "offset_ns": 0, "offset_error_ns": 2_500_000, "set_again_ns": 0},
             {"shard": 1, "where": "n2", "offset_ns": 0, "offset_error_ns": 200_000,
              "set_again_ns": -4_000_000}]  # fmt: skip
    ok = {"reads": 10, "user_clock_reads": 0}
    shards = [{"shard": 0, "where": "n1", "send_lag_ms": {"p99": 0.5}, **ok},
              {"shard": 1, "where": "n2", "send_lag_ms": {"p99": 60.0}, "reads": 10, "user_clock_reads": 10},
              {"shard": 2, "where": "n3", "send_lag_ms": {"p99": 0.4}, **ok}]  # fmt: skip
    said = [d["what"] for d in shard_doubts(clock, shards)]
    assert said == [
        "times of shard 0 on n1 lie within ±2.5 ms of the others'",
        "the clock of shard 1 on n2 went astray by -4.0 ms",
        "shard 1 on n2 sent late",
        "shard 1 on n2 had no kernel stamps",
    ]
    assert shard_doubts([{**clock[1], "set_again_ns": 0}], shards[::2]) == []
    assert "up to 12.5 s" in lost_doubts({"shard 1 on n2": 12_500_000_000})[0]["why"]
    far = way_doubts([*NODES, Node("c", "n3", "n3", 1)], [0.2, 0.3, 9.0])
    assert [d["what"] for d in far] == ["n3 is farther from the service than the others"]
    assert way_doubts(NODES, [0.2, 0.3]) == []


def test_the_floor_is_that_of_the_worst_worker_or_unknown():
    good, bad = ({"stamp_error_ms": {"p50": x, "p99": x}} for x in (0.1, 3.0))
    assert over_ray.worst({"n1": good, "n2": bad}) == bad
    assert over_ray.worst({"n1": good, "n2": "no room"}) == {}
    assert "n2" in over_ray.floor_doubts({"n1": good, "n2": "no room"})[0]["what"]


def test_workers_is_what_the_session_asks():
    """The stand-in above has what the real one has."""
    assert {n for n in vars(Place) if not n.startswith("_")} <= {n for n in vars(Workers) if not n.startswith("_")}


def test_a_shard_that_was_lost_is_no_doubt_of_the_point_measured_anew():
    lost = over_ray.lost_doubts({"shard 0 on a": 5_000_000_000})
    other = {"what": "the client stood still", "why": "", "next": ""}
    cut, anew = make_run([{"sent_ns": 0}], doubts=[*lost, other]), make_run([{"sent_ns": 0}])
    assert [d["what"] for d in joined(before_point(cut, 0), anew, "run").manifest.doubts] == [other["what"]]


def test_what_ray_says_comes_to_a_few_words():
    gone = type("ActorUnavailableError", (Exception,), {})
    assert relay._why(gone("The actor 0a is unavailable: RpcError")) == "its node is gone, or cut off from here"
    said = "The task is not schedulable: the node does not exist any more. lease_id=0400ff, task_id=1"
    assert cluster.first_line(ValueError(f"head\n{said}")) == said.partition(" lease_id")[0]
