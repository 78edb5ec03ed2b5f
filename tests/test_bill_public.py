"""The bill's arithmetic gives the figures that a public record published of its own measurements."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from validate_bill import BOUND, Row, off, read, run_of, table, tied

SHARED = Path(__file__).resolve().parents[2] / "shared" / "measured" / "mlenergy.csv"
ROW = Row("chat", "H100", 2, 7.9, 300.4, 1000.0, 900.0, 0.9, 0.9 * 300.4, 7.0)


def test_a_row_becomes_a_steady_service() -> None:
    run = run_of(ROW)
    assert run.manifest.made_by == "imported"
    assert run.points["target"][0] == 8
    assert run.requests["output_tokens"].mean() == pytest.approx(ROW.tokens, rel=1e-3)
    assert len(set(run.requests["output_tokens"].tolist())) > 2  # uneven, so that windows cut requests
    found = off(ROW)
    assert abs(found.token) < 1e-4
    assert abs(found.request) < 2e-3
    wrong = off(ROW._replace(watts=945.0))  # 5 % more power than the published figures are of
    assert wrong.token == pytest.approx(0.05, rel=1e-3)
    assert "0 of 1" in table([wrong])[-1]


def test_rows_that_say_too_little_are_counted(tmp_path: Path) -> None:
    head = ("task,gpu_model,num_gpus,avg_batch_size,avg_output_len,output_throughput_tokens_per_sec,avg_power_watts,"
            "energy_per_token_joules,energy_per_request_joules,median_itl_ms\n")  # fmt: skip
    path = tmp_path / "m.csv"
    path.write_text(head + "c,H100,1,8,100,1000,500,0.5,50,8\nc,H100,1,8,100,,500,0.5,50,8\nc,H100,1,8,100,0,1,1,1,1\n")
    rows, out = read(path)
    assert len(rows) == 1
    assert out == {"a figure is missing": 1, "a figure is not above 0": 1}


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_file(), reason="the record (../shared) is not here")
def test_the_public_record() -> None:
    """Every sixth row, and the smallest and largest batch of each kind; ``tools/validate_bill.py`` takes them all."""
    rows, out = read(SHARED)
    assert (len(rows), sum(out.values())) == (353, 0)
    assert tied(rows)[:2] == (353, 353)  # which is why this tests arithmetic and no meter
    kinds: dict[tuple[str, int], list[Row]] = {}
    for r in rows:
        kinds.setdefault((r.gpu, r.devices), []).append(r)
    ends = [f((r for r in mine if r.batch < 600), key=lambda r: r.batch) for mine in kinds.values() for f in (min, max)]
    for r in {*rows[::6], *ends}:
        found = off(r)
        assert abs(found.token) <= BOUND, r
        assert abs(found.request) <= BOUND, r
