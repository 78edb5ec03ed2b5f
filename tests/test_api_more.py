"""The Python API of the verbs that look (watch, probe, doctor, history, catalog) and of ``resume``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import whywait
from tests.metrics_pages import engine, vllm_page
from whywait import probing
from whywait.errors import UsageError, WhywaitError
from whywait.load.stub import Options, Plan, StubThread


@pytest.fixture(scope="module")
def stub():
    with StubThread(Options(plan=Plan(ttft_ms=2.0, gap_ms=1.0, tokens=8))) as started:
        yield started


def queueing(t: float) -> str:
    """4 requests in work, 12 wait, 5 end per second."""
    return vllm_page(4, 12, int(5 * t))


def test_a_service_is_watched_window_by_window_and_kept(tmp_path, capfd):
    seen = []
    with engine(queueing) as url:
        kept = whywait.watch(url, window=1, length="2s", hz=10, out=tmp_path / "w", each=seen.append)
        last = whywait.watch(url, window=1, hz=10)
    assert len(seen) == 2
    assert all(w.summary["points"][0]["phases"]["queue"]["share"] == pytest.approx(0.75) for w in seen)
    assert kept.directory == tmp_path / "w"
    assert len(kept.run.points) == 2
    assert str(tmp_path) in kept._repr_html_()
    assert len(last.run.points) == 1, "without a length it is one window"
    assert "run kept" not in last._repr_html_()
    assert [p["phases"] for p in whywait.show(kept.directory).summary["points"]] == [
        p["phases"] for p in kept.summary["points"]
    ]
    assert capfd.readouterr() == ("", "")


def test_a_cancelled_watch_ends_and_is_kept(tmp_path):
    async def cut(url):
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(whywait.aio.watch(url, window=1, length="1h", hz=10, out=tmp_path / "w",
                                                     each=lambda _w: loop.call_soon_threadsafe(begun.set)))  # fmt: skip
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with engine(queueing) as url:
        asyncio.run(asyncio.wait_for(cut(url), 60))
    assert len(whywait.show(tmp_path / "w").run.points) >= 1


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(UsageError, match="which service"):
        whywait.watch()
    with pytest.raises(UsageError, match="at least 3 looks"):
        whywait.watch("http://127.0.0.1:9", window=1)
    with pytest.raises(UsageError, match="no keyword 'once'"):
        whywait.watch("http://127.0.0.1:9", once=True)


def test_a_probe_shows_itself_as_one(stub, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(probing, "MAX_ROUNDS", 1)
    result = whywait.probe_service(stub.url, budget="30s", longest=96, floor=False, out=tmp_path / "p")
    assert result.summary["probe"] == json.loads((tmp_path / "p" / "probe.json").read_text())
    page = result._repr_html_()
    assert "decode step, fixed" in page
    assert str(tmp_path / "p") in page
    assert capfd.readouterr() == ("", "")


def test_what_can_be_measured(stub, capfd):
    found = whywait.doctor(stub.url, floor=False)
    assert found.error is None
    assert found.states["endpoint"] == "can"
    assert {a.name for a in found.sections["this machine"]} <= set(found.states)
    assert stub.url in found._repr_html_()
    lost = whywait.doctor("http://127.0.0.1:9", floor=False)
    assert isinstance(lost.error, WhywaitError)
    assert lost.states["endpoint"] == "cannot"
    assert lost.sections["this machine"], "what there is here is told all the same"
    with pytest.raises(UsageError, match="looks at streams"):
        whywait.doctor(stub.url, stream=False)
    assert capfd.readouterr() == ("", "")


def test_the_runs_of_a_folder_and_one_resumed(stub, tmp_path, capfd):
    for name, n in (("a", 2), ("b", 3)):
        whywait.run(stub.url, requests=n, floor=False, out=tmp_path / name)
    listed = whywait.history(tmp_path, figure="ttft_ms.p95", last=1)
    assert listed.found == whywait.history(str(tmp_path), figure="ttft_ms.p95", last=1).found
    (run,) = listed.found["runs"]
    assert run["name"] == "b"
    assert run["value"] == pytest.approx(whywait.show(tmp_path / "b").summary["points"][0]["ttft_ms"]["p95"])
    assert "TTFT" in listed._repr_html_()
    assert listed.html().startswith("<!doctype html>")
    with pytest.raises(UsageError, match="no figure 'speed'"):
        whywait.history(tmp_path, figure="speed")
    with pytest.raises(UsageError, match="is whole: nothing is missing"):
        whywait.resume(tmp_path / "a", floor=False, out=tmp_path / "c")
    assert capfd.readouterr() == ("", "")


def test_a_sweep_is_resumed(stub, tmp_path):
    first = whywait.sweep(stub.url, concurrency=[1, 2], requests=4, floor=False, out=tmp_path / "a")
    manifest = Path(first.directory / "manifest.json")
    told = json.loads(manifest.read_text())
    told["journey"]["loads"].append({**told["journey"]["loads"][-1], "target": 3.0})
    manifest.write_text(json.dumps(told))
    result = whywait.resume(first, floor=False, out=tmp_path / "b")
    assert [p["counts"]["ok"] for p in result.summary["points"]] == [4, 4, 4]
    assert result.directory == tmp_path / "b"


def test_the_catalogue():
    assert whywait.catalog("h200")["machines"]["name"].lower().startswith("h200")
    assert {e["name"] for e in whywait.catalog("engines")["engines"]} >= {"vllm", "sglang"}
    assert set(whywait.catalog()) == {"machines", "models", "techniques", "engines", "waits"}
    with pytest.raises(UsageError, match="neither a kind nor an entry"):
        whywait.catalog("no-such-thing")
