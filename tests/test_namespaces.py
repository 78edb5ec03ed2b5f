"""Over a veth pair between two network namespaces: not loopback, so the kernel's own path of packets is taken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import whywait
from whywait.core.check import violations
from whywait.core.run import Run

SERVER, CLIENT = "192.0.2.1", "192.0.2.2"  # set aside for documentation: nobody's (RFC 5737)
KEY = "namespace-key"


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def spaces() -> Iterator[tuple[str, str]]:
    """(client, server): two namespaces of our own, joined by a cable."""
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs Linux, root and iproute2")
    a, b = (f"ww{os.getpid()}{x}" for x in "ab")
    made = []
    try:
        try:
            for name in (a, b):
                _ip("netns", "add", name)
                made.append(name)
            _ip("-n", a, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b)
            for name, address in ((a, CLIENT), (b, SERVER)):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as exc:
            pytest.skip(f"may not make network namespaces here: {str(exc.stderr).strip()}")
        yield a, b
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture(scope="module")
def stub(spaces: tuple[str, str]) -> Iterator[str]:
    command = [*_inside(spaces[1]), "-m", "whywait.load.stub", "--die-with-stdin", "--host", SERVER, "--api-key", KEY,
               "--ttft-ms", "20", "--gap-ms", "10"]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_env())
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["url"]
    process.communicate()


def _inside(space: str) -> list[str]:
    return ["ip", "netns", "exec", space, sys.executable]


def _env() -> dict[str, str]:
    rest = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return {**rest, "PYTHONPATH": str(Path(whywait.__file__).parents[1]), "WHYWAIT_API_KEY": KEY}


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_run_over_a_cable(spaces: tuple[str, str], stub: str, tmp_path: Path, processes: str) -> None:
    out = tmp_path / "r"
    argv = [*_inside(spaces[0]), "-m", "whywait", "run", stub, "--load", "--no-floor", "--concurrency", "8",
            "--requests", "40", "--prompt-tokens", "16", "--output-tokens", "20", "--processes", processes, "--out",
            str(out)]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, env=_env(), timeout=120, check=False)
    assert done.returncode in (0, 6), done.stderr  # 6: a busy box sent late
    assert f"load on {SERVER}" in done.stderr  # announced: it is not this machine, as far as the client can tell
    run = Run.load(out)
    assert run.requests.text("outcome") == ["ok"] * 40
    assert violations(run) == []
    assert not run.manifest.endpoint["loopback"]
    assert set(run.chunks.text("clock")) == {"kernel"}
    assert run.manifest.client["user_clock_reads"] == 0
    assert KEY.encode() not in b"".join(f.read_bytes() for f in out.iterdir())
    rtt = run.requests["rtt_ns"]
    assert (rtt > 0).all()


ERROR = """
import json, sys
from whywait.load.floor import _drive, _Probe, _report
from whywait.net.client import Client
from whywait.net.clock import Clock
from whywait.net.endpoint import parse_url
probe, clock = _Probe(), Clock()
client = Client(parse_url(sys.argv[1], api_key=sys.argv[2]), probe, clock)
cpu, wall = _drive(client, clock, probe, (16, 50, 20.0))
client.close()
print(json.dumps(_report(probe, client, clock, cpu, wall)))
"""


def test_stamps_over_a_cable_are_the_kernels(
    spaces: tuple[str, str], stub: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the stub's own send stamps: both ends have one clock, since they are on one machine."""
    argv = [*_inside(spaces[0]), "-c", ERROR, stub, KEY]
    done = subprocess.run(argv, capture_output=True, text=True, env=_env(), timeout=60, check=True)
    said = json.loads(done.stdout)
    with capsys.disabled():
        error = said["stamp_error_ms"]
        print(f"\nveth pair, 16 streams: stamps {error['p50'] * 1000:.0f} µs (p50), {error['p99'] * 1000:.0f} µs (p99)")
    assert said["failed"] == 0
    assert said["user_clock_reads"] == 0
    assert said["chunks"] == 16 * 50
