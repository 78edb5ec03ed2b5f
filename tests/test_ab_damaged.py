"""``trial.json`` and a model file that are damaged: said by name, never a fault of our own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_vary import made_up
from whywait import trying
from whywait.cli import main
from whywait.errors import UsageError
from whywait.lab import prune, synthetic


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("damaged") / "t"
    with pytest.MonkeyPatch.context() as m:
        m.setattr(trying, "_round", made_up)
        argv = ["ab", "--a", "replicas:2", "--b", "split:delay_ms=4", "--metric", "tpot_ms.p50", "--rounds", "4"]
        assert main([*argv, "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads((out / trying.NOTE).read_text())
    return found


def damaged(kept: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    out = copy.deepcopy(kept)
    *way, last = [int(k) if k.isdigit() else k for k in path.split("/")]
    at: Any = out
    for k in way:
        at = at[k]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return out


@pytest.mark.parametrize(
    "wrong",
    [
        ("rounds/0/figures/", None, "rounds.0.figures.(main)"),
        ("rounds/0/figures//tpot_ms.p50", "fast", "tpot_ms.p50"),
        ("rounds/1/disturbed", None, "rounds.1.disturbed"),
        ("rounds/1/disturbed", ..., "rounds.1 has no disturbed"),
        ("rounds/2/arm", "C", "rounds.2.arm"),
        ("rounds/0/calibration_ms", [1, "x"], "calibration_ms"),
        ("rounds", {}, "rounds"),
        ("plan/b", ..., "plan has no b"),
        ("plan/loads", [], "plan.loads"),
        ("plan/loads/0", {}, "plan.loads.0"),
        ("plan/asked", [{"metric": "tpot_ms.p50"}], "holds no whywait trial"),
        ("plan/margin", True, "plan.margin"),
        ("plan", None, "plan"),
        ("order", ["X"], "order"),
        ("quality", {"claims": None}, "quality"),
    ],
)
def test_what_is_wrong_is_named(
    trial: dict[str, Any], wrong: tuple[str, Any, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, value, word = wrong
    (tmp_path / trying.NOTE).write_text(json.dumps(damaged(trial, path, value)))
    assert main(["show", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "holds no whywait trial" in err
    assert word in err


@pytest.mark.parametrize("text", ["", "null", "[]", "3", '"x"', "[" * 100_000, "{}"])
def test_what_is_no_trial(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / trying.NOTE).write_text(text)
    assert main(["show", str(tmp_path)]) == 2
    assert "holds no whywait trial" in capsys.readouterr().err


def ways(value: Any, at: str = "") -> list[str]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    out = []
    for k, v in items:
        here = f"{at}/{k}" if at else str(k)
        out += [here, *ways(v, here)]
    return out


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_shown_or_said(trial: dict[str, Any], tmp_path: Path, data: st.DataObject) -> None:
    parts = {k: trial[k] for k in ("plan", "rounds", "order", "quality", "partial_reason", "aa", "salt")}
    path = data.draw(st.sampled_from([w for w in ways(parts) if "//" not in w and not w.endswith("/")]))
    value = data.draw(st.sampled_from([..., None, 3, "x", [], {}, [None], -1, True, 1e308]))
    (tmp_path / trying.NOTE).write_text(json.dumps(damaged(trial, path, value)))
    assert main(["show", str(tmp_path), "--html", str(tmp_path / "p.html")]) in (0, 2)


def test_a_broken_model_makes_no_draft(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    whole = synthetic.synthetic_model(tmp_path / "whole.gguf", "tiny")
    half = tmp_path / "half.gguf"
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(UsageError, match=r"no draft can be made of half\.gguf"):
        prune.cached_draft(half, cache_dir=tmp_path)
    assert not list((tmp_path / "models").glob("draft*"))
