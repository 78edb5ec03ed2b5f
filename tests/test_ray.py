"""Load and grids over a real Ray cluster of two nodes on this machine. Marked ``ray``: two minutes, and the extra."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whywait.core.check import violations
from whywait.core.run import Run
from whywait.core.spool import assemble
from whywait.load.stub import StubProcess

pytest.importorskip("ray", reason="whywait[ray] is not installed")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]

#: A cluster in a process of its own, told on its stdin what is to become of it.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
c = Cluster()
small = {"num_cpus": 1, "object_store_memory": 80 << 20}
c.add_node(include_dashboard=False, **small)
second = c.add_node(**small)
print(c.address, flush=True)
for line in sys.stdin:
    if line.strip() == "kill":
        c.remove_node(second, allow_graceful=False)
    elif line.strip() == "add":
        second = c.add_node(**small)
    c.wait_for_nodes()
    print("done", flush=True)
c.shutdown()
"""
WHERE = str(Path(__file__).resolve().parents[1] / "src")
#: The command line, its simulations spread however small they are.
SPREAD = (
    "import sys, whywait.sim.grid as g, whywait.twin.draws as d; g.ALONE = d.ALONE = 0; "
    "from whywait.cli import main; sys.exit(main(sys.argv[1:]))"
)


class Nodes:
    """The cluster: ``address``, and words for it."""

    def __init__(self) -> None:
        env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": WHERE}
        self._p = subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, text=True, env=env, start_new_session=True)  # fmt: skip
        self.address = self._read()

    def say(self, word: str) -> None:
        assert self._p.stdin is not None
        self._p.stdin.write(f"{word}\n")
        self._p.stdin.flush()
        assert self._read() == "done"

    def _read(self) -> str:
        assert self._p.stdout is not None
        line = self._p.stdout.readline().strip()
        assert line, "the cluster did not start"
        return line

    def close(self) -> None:
        with self._p:
            assert self._p.stdin is not None
            self._p.stdin.close()
            try:
                self._p.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._p.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    spec = importlib.util.find_spec("opentelemetry")
    if spec is not None and importlib.util.find_spec("opentelemetry.metrics") is None:
        pytest.skip("Ray's head does not start beside opentelemetry-proto alone: pip install opentelemetry-sdk "
                    "opentelemetry-exporter-prometheus")  # fmt: skip
    found = Nodes()
    yield found
    found.close()


@pytest.fixture(scope="module")
def stub() -> Iterator[StubProcess]:
    with StubProcess("--ttft-ms", "10", "--gap-ms", "5", "--tokens", "8") as s:
        yield s


_begun: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """What a test that failed left running would hold the cluster's CPUs."""
    yield
    while _begun:
        with _begun.pop() as p:
            if p.poll() is None:
                p.kill()


def whywait(*args: str, spread: bool = False, cwd: Path | None = None) -> subprocess.Popen[str]:
    head = [sys.executable, "-c", SPREAD] if spread else [sys.executable, "-m", "whywait"]
    env = {**os.environ, "PYTHONPATH": WHERE}
    p = subprocess.Popen([*head, *args], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=cwd)
    _begun.append(p)
    return p


def done(p: subprocess.Popen[str], *rc: int) -> tuple[str, str]:
    out, err = p.communicate(timeout=240)
    assert p.returncode in (rc or (0,)), err[-3000:]
    assert "Traceback" not in err
    return out, err


def ids_of(out: Path, shard: int) -> set[int]:
    """The requests that a shard sent, from its spool while it is still there."""
    return set(assemble([out / f"spool-{shard}"], None).requests["id"].tolist())


def test_two_nodes_make_one_run(nodes, stub, tmp_path):
    out = tmp_path / "r"
    text, err = done(whywait("sweep", stub.url, "--ray", nodes.address, "--concurrency", "4,6", "--requests", "40",
                             "--output-tokens", "8", "--out", str(out), "--json"), 0, 6)  # fmt: skip
    assert "2 shards on 2 Ray workers" in err
    summary, run = json.loads(text), Run.load(out)
    assert [p["counts"]["ok"] for p in summary["points"]] == [40, 40]
    assert run.points["planned"].tolist() == [40, 40]
    assert run.points["target"].tolist() == [4, 6]
    assert violations(run) == []
    assert not run.manifest.partial
    # Both nodes are on one kernel, so the truth is known: no clock is ahead, and none may be said to surely be.
    clocks = run.manifest.clock
    assert sorted(c["shard"] for c in clocks) == [0, 1]
    assert len({c["where"] for c in clocks}) == 2
    for c in clocks:
        assert abs(c["clock_ahead_ns"] + c["offset_ns"]) <= c["offset_error_ns"] + 50_000  # of reading two clocks here
        assert c["offset_error_ns"] < 20_000_000
    client = run.manifest.client
    assert client["processes"] == 2
    assert {c["where"] for c in client["shards"]} == {c["where"] for c in clocks} == set(client["floors"])
    assert all(c["chunks"] > 0 for c in client["shards"])
    sent = run.requests["sent_ns"] - run.points["start_ns"][run.requests["point"].astype(int)]
    assert float(sent.min()) >= -20_000_000  # by the clock of the other, which is known that well


def started(args: tuple[str, ...], out: Path) -> subprocess.Popen[str]:
    """A run whose four long answers have come for two seconds, and what both shards had recorded by then."""
    p = whywait(*args, "--concurrency", "4", "--requests", "20", "--output-tokens", "4000", "--no-floor", "--out",
                str(out))  # fmt: skip
    end = time.monotonic() + 90
    while p.poll() is None and time.monotonic() < end:
        if all((out / f"spool-{k}" / "chunks.bin").exists() for k in (0, 1)) and all(
            (out / f"spool-{k}" / "chunks.bin").stat().st_size > 32 * 200 for k in (0, 1)
        ):
            return p
        time.sleep(0.1)
    p.kill()
    raise AssertionError(p.communicate())


def shards_there() -> dict[int, int]:
    """The processes of shards that relays started, by number: others may drive load on this machine too."""
    out = {}
    for at in Path("/proc").glob("[0-9]*"):
        try:
            if b"whywait.load.shards" in (at / "cmdline").read_bytes():
                logs = [Path(x) for f in (at / "fd").iterdir() if (x := os.readlink(f)).endswith("log.jsonl")]
                out.update({int(x.parent.name.removeprefix("spool-")): int(at.name) for x in logs
                            if x.parents[1].name.startswith("whywait-shard-")})  # fmt: skip
        except OSError:
            continue
    return out


def partial(out: Path, lost: str, killed_unix_ns: int) -> Run:
    """What a run must be that lost shard 1 at that moment."""
    run = Run.load(out)
    assert run.manifest.partial
    assert lost in run.manifest.partial_reason
    outcomes = run.requests.text("outcome")
    assert (outcomes.count("censored"), outcomes.count("never_sent")) == (4, 16)
    assert run.points["planned"].tolist() == [20]
    assert violations(run) == []
    at = killed_unix_ns - run.manifest.zero_unix_ns
    last = [run.chunks["t_ns"][run.chunks["id"] % 2 == k].max() for k in (0, 1)]
    assert last[1] > at - 1_500_000_000  # its unsent second, and what a busy machine takes to look at the clock
    assert last[0] > at - 100_000_000  # the other's are all there
    assert any("shard 1" in d["what"] and "was lost" in d["what"] for d in run.manifest.doubts)
    return run


@pytest.mark.parametrize("what", ["shard", "relay"])
def test_a_killed_worker_loses_its_last_second_and_is_named(nodes, stub, tmp_path, what):
    out = tmp_path / "r"
    p = started(("run", stub.url, "--ray", nodes.address), out)
    shards = shards_there()
    assert sorted(shards) == [0, 1]
    pid = shards[1] if what == "shard" else _parent(shards[1])
    at = time.time_ns()
    os.kill(pid, signal.SIGKILL)
    _, err = done(p, 4)
    assert "shard 1 on " in err
    partial(out, f"(process {shards[1]}) was killed by SIGKILL" if what == "shard" else "is lost", at)
    _gone([*shards.values()])


def test_a_shard_that_stands_still_is_given_up_and_named(nodes, stub, tmp_path):
    """Its relay goes on, and ends it."""
    out = tmp_path / "r"
    p = started(("run", stub.url, "--ray", nodes.address), out)
    shards = shards_there()
    at = time.time_ns()
    os.kill(shards[1], signal.SIGSTOP)
    done(p, 4)
    run = Run.load(out)
    assert re.fullmatch(r"shard 1 on \S+ said nothing for 30 s", run.manifest.partial_reason)
    assert len(run.requests) == 20 == int(run.points["planned"].sum())
    assert violations(run) == []
    mine = run.chunks["t_ns"][run.chunks["id"] % 2 == 1]
    assert float(mine.max()) > at - run.manifest.zero_unix_ns - 1_500_000_000
    _gone([*shards.values()])


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _gone(pids: list[int]) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end and any(Path(f"/proc/{p}").exists() for p in pids):
        time.sleep(0.1)
    assert not any(Path(f"/proc/{p}").exists() for p in pids)


def test_ctrl_c_ends_all_and_keeps_what_there_is(nodes, stub, tmp_path):
    out = tmp_path / "r"
    p = started(("run", stub.url, "--ray", nodes.address), out)
    shards = shards_there()
    p.send_signal(signal.SIGINT)
    done(p, 130)
    run = Run.load(out)
    assert run.manifest.partial_reason == "interrupted"
    assert run.requests.text("outcome").count("censored") == 4
    assert violations(run) == []
    _gone([*shards.values()])
    assert not list(Path(tempfile.gettempdir()).glob("whywait-shard-*"))  # nor what those killed before it left


def test_what_cannot_be_is_one_line(nodes, stub, tmp_path):
    many = ("run", stub.url, "--ray", nodes.address, "--processes", "9", "--no-floor", "--out", str(tmp_path / "r"))
    _, err = done(whywait(*many), 2)
    assert "9 shards, and the cluster has 2 CPUs" in err


SIM = ("simulate", "--machine", "h100", "--model", "llama-3.1-8b", "--concurrency", "1,4", "--requests", "30",
       "--draws", "12", "--json")  # fmt: skip
PLAN = ("plan", "--model", "llama-3.1-8b", "--machines", "h100", "--rate", "60", "--prompt-tokens", "uniform(50,150)",
        "--output-tokens", "uniform(20,60)", "--slo", "ttft=500ms,tpot=20ms", "--draws", "2", "--layouts", "tp=1",
        "--counts", "1,2", "--json")  # fmt: skip


def figures(text: str) -> Any:
    """The document, less what names this run of it."""
    found = json.loads(text)
    for name in ("run", "took_s", "made", "summary", "directory"):
        found.pop(name, None)
    if "inputs" in found:
        found["inputs"].pop("jobs", None)
    return found


@pytest.mark.parametrize("verb", [SIM, PLAN], ids=["simulate", "plan"])
def test_a_grid_over_the_cluster_is_the_local_one_bit_for_bit(nodes, tmp_path, verb):
    here, _ = done(whywait(*verb, "--jobs", "1", "--out", str(tmp_path / "a")))
    there, _ = done(whywait(*verb, "--ray", nodes.address, "--out", str(tmp_path / "b"), spread=True, cwd=tmp_path))
    assert figures(there) == figures(here)
    assert not list(tmp_path.glob("whywait-runs/cells-*"))  # all done: nothing to go on with


def test_a_what_if_over_the_cluster_is_the_local_one_bit_for_bit(nodes, tmp_path):
    run = tmp_path / "run"
    done(whywait("simulate", "--machine", "h100", "--model", "llama-3.1-8b", "--concurrency", "1,4,16", "--requests",
                 "60", "--draws", "1", "--out", str(run)))  # fmt: skip
    ask = ("what-if", str(run), "--apply", "fp8-weights", "--seeds", "8", "--json")
    here, _ = done(whywait(*ask, "--jobs", "1"))
    there, _ = done(whywait(*ask, "--ray", nodes.address, spread=True, cwd=tmp_path))
    assert figures(there) == figures(here)


def test_a_grid_that_was_cut_goes_on_over_a_node_less(nodes, tmp_path):
    """Last, since it kills a node: stopped, then a node killed while it goes on; the figures are the same."""
    verb = ("simulate", "--machine", "h100", "--model", "llama-3.1-8b", "--concurrency", "64", "--requests", "800",
            "--draws", "40", "--output-tokens", "lognormal(200,0.5)", "--json")  # fmt: skip
    cells = tmp_path / "cells.jsonl"
    p = whywait(*verb, "--ray", nodes.address, "--cells", str(cells), "--out", str(tmp_path / "a"), spread=True)
    _until_lines(p, cells, 4)
    p.send_signal(signal.SIGINT)
    _, err = done(p, 130)
    assert f"kept in {cells}" in err
    kept = len(cells.read_text().splitlines()) - 1
    assert 3 <= kept < 40
    p = whywait(*verb, "--ray", nodes.address, "--cells", str(cells), "--out", str(tmp_path / "b"), spread=True)
    _until_lines(p, cells, kept + 3)
    nodes.say("kill")
    there, _ = done(p)
    assert len(set(cells.read_text().splitlines())) - 1 == 40  # none was simulated twice
    here, _ = done(whywait(*verb, "--jobs", "1", "--out", str(tmp_path / "c")))
    assert figures(there) == figures(here)


def _until_lines(p: subprocess.Popen[str], file: Path, n: int) -> None:
    end = time.monotonic() + 120
    while p.poll() is None and time.monotonic() < end:
        if file.exists() and len(file.read_text().splitlines()) >= n:
            return
        time.sleep(0.05)
    p.kill()
    raise AssertionError(p.communicate())


def test_a_killed_node_is_named_and_the_run_is_partial(nodes, stub, tmp_path):
    """A node anew, and killed with all that runs on it."""
    nodes.say("add")
    out = tmp_path / "r"
    p = started(("run", stub.url, "--ray", nodes.address), out)
    shards = shards_there()
    at = time.time_ns()
    nodes.say("kill")
    _, err = done(p, 4)
    assert "is lost" in err
    run = Run.load(out)
    assert run.manifest.partial
    outcomes = run.requests.text("outcome")
    assert (outcomes.count("censored"), outcomes.count("never_sent")) == (4, 16)
    assert violations(run) == []
    last = run.chunks["t_ns"].max() + run.manifest.zero_unix_ns
    assert float(np.asarray(last)) > at - 1_500_000_000
    _gone([*shards.values()])
