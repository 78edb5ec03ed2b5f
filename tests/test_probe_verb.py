"""``whywait probe`` on the stub: the way from flags to figures, and what is sent and said on it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whywait import probing
from whywait.cli import main
from whywait.core.check import violations
from whywait.core.run import Run
from whywait.core.schedule import Schedule
from whywait.load.prompts import Prompter
from whywait.load.stub import StubProcess
from whywait.load.turns import Turns, shares
from whywait.probing import Plan, Row

STUB = ("--ttft-ms", "5", "--gap-ms", "2", "--prefill-ms-per-token", "0.2", "--gap-ms-per-token", "0.01",
        "--prefix-cache", "8")  # fmt: skip


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("probe") / "run"
    patch = pytest.MonkeyPatch()
    patch.setattr(probing, "MAX_ROUNDS", 4)
    with StubProcess(*STUB) as stub:
        flags = ("--no-floor", "--budget", "150s", "--longest", "260", "--out", str(out))
        assert main(["probe", stub.url, *flags]) == 0
    patch.undo()
    return out


def test_the_run_is_whole_and_never_more_than_two_at_once(probed: Path) -> None:
    run = Run.load(probed)
    assert violations(run) == []
    assert not run.manifest.partial
    req = run.requests
    edges = [(t, 1) for t in req["sent_ns"].tolist()] + [(t, -1) for t in req["end_ns"].tolist()]
    flying = np.cumsum([d for _, d in sorted(edges)])
    assert flying.max() == 2
    by_class = dict(zip(*np.unique(req["class"].astype(str), return_counts=True), strict=True))
    assert by_class["prompt"] == 4 * 6
    assert by_class["first"] == by_class["again"] == by_class["later"] == 8
    assert by_class["pair"] == 16
    assert by_class["long"] == 4
    labels = set(run.points["label"].tolist())
    assert {"pilot", "round 1: singles", "round 4: two at once"} <= labels
    most, tokens = probing.ceiling(260)
    assert len(req) <= most
    assert req["prompt_tokens"].sum() + req["output_tokens"].sum() <= 1.2 * tokens


def test_the_ceiling_is_of_what_is_sent_however_short_it_was_asked() -> None:
    assert probing.ceiling(1) == probing.ceiling(probing.LEAST)


def test_the_figures_are_those_of_the_stub(probed: Path) -> None:
    """Loose bounds: the box may be busy. The statistics are tested on services of numbers."""
    found = json.loads((probed / "probe.json").read_text())
    assert found["prefill"]["per_token_us"]["value"] == pytest.approx(200, rel=0.25)
    assert found["decode"]["per_context_token_us"]["value"] == pytest.approx(10, rel=0.5)
    assert found["cache"]["state"] == "holds"
    assert found["cache"]["reported_cached_tokens"] > 0
    assert found["second_stream"]["kind"] != "serialised"
    assert found["network"]["connect_ms"]["n"] == probing.HANDSHAKES
    assert found["failed"] == 0
    assert found["how"] == "inferred from outside"


def test_show_prints_the_probe_again(probed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(probed)]) == 0
    said = capsys.readouterr().out
    assert "prefill, per token" in said
    assert "a prefix cache is on" in said
    assert "second stream" in said
    assert main(["show", str(probed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["probe"] == json.loads((probed / "probe.json").read_text())


def test_one_slot_is_seen_and_the_ceiling_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "MAX_ROUNDS", 3)
    flags = ("--no-floor", "--budget", "150s", "--longest", "100", "--json", "--out", str(tmp_path / "run"))
    with StubProcess("--ttft-ms", "5", "--gap-ms", "2", "--slots", "1", "--prefill-ms-per-token", "0.5") as stub:
        assert main(["probe", stub.url, *flags]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[0].startswith("probing http://127.0.0.1")
    assert "at most" in err.splitlines()[0]
    found = json.loads(out)["probe"]
    assert found["second_stream"]["kind"] == "serialised"
    assert found["long_neighbour"]["kind"] == "queued"
    assert found["cache"]["state"] in ("fails", "undecided")


def test_a_probe_that_is_cut_short_is_kept_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pilot request succeeds: a saved Run, figures undecided, exit 4."""
    monkeypatch.setattr(probing, "_timed", lambda *_: None)
    with StubProcess("--ttft-ms", "1", "--gap-ms", "1") as s:
        assert main(["probe", s.url, "--no-floor", "--budget", "5s", "--out", str(tmp_path / "run")]) == 4
    out, err = capsys.readouterr()
    assert "no pilot request succeeded" in err
    assert "PARTIAL" in out
    found = json.loads((tmp_path / "run" / "probe.json").read_text())
    assert found["prefill"]["state"] == found["cache"]["state"] == "undecided"


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "http://127.0.0.1:9", "--no-stream"]) == 2
    assert main(["probe", "http://127.0.0.1:9", "--budget", "soon"]) == 2
    assert main(["probe", "http://127.0.0.1:9", "--no-floor"]) == 4
    assert "refuses connections" in capsys.readouterr().err


def test_a_round_holds_every_experiment_in_its_own_order() -> None:
    plan = Plan(probing._ladder(1000), 16, 32, 10**8)
    one, two = (plan.singles(n, random.Random(n)) for n in range(2))
    assert [r.name for r in one] != [r.name for r in two]
    for rows in (one, two):
        assert sorted(r.prompt for r in rows if r.name == "prompt") == sorted(plan.lengths)
        for i, r in enumerate(rows):
            if r.name == "again":
                assert rows[i - 1] == r._replace(name="first")
    assert not {r.block for r in one if r.block >= 0} & {r.block for r in two if r.block >= 0}


def test_only_rows_with_blocks_share() -> None:
    """A schedule may mix prompts that repeat with prompts of their own; those stay salted and cold."""
    rows = [Row("first", 64, 1, 3), Row("prompt", 64, 1), Row("again", 64, 1, 3), Row("prompt", 64, 1)]

    class At:
        next_id = 10

    schedule: Schedule = probing._schedule(At(), rows)  # type: ignore[arg-type]
    assert [shares(schedule, i) for i in range(4)] == [True, False, True, False]
    turns = Turns(Prompter(1, "cold", "salt"), schedule, {"": ("en",)})
    texts = [turns.messages(i)[0].content for i in range(4)]
    assert texts[0] == texts[2]
    assert len(set(texts)) == 3
    assert texts[1][:8] != texts[3][:8]
