"""The fits that ship: their errors as written and, where the measured tables are at hand, as found again; power."""

import sys
from pathlib import Path

import numpy as np
import pytest

from whywait.errors import UsageError
from whywait.physics import rooflines
from whywait.physics.arch import arch_of
from whywait.physics.efficiency import Efficiency
from whywait.physics.fitted import FAMILIES, fitted, host_of
from whywait.physics.hats import evaluate
from whywait.physics.kernels import COMPUTE, HOST, WEIGHTS
from whywait.physics.layout import Layout, Precision
from whywait.physics.machines import MACHINES, machine
from whywait.physics.power import capped, idle_w, joules, rated_w, shares, watts
from whywait.physics.step import StepWork, step_parts, work

SHARED = Path(__file__).resolve().parents[2] / "shared" / "measured"
FITTED = Path(rooflines.__file__).with_name("fitted.json")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))


def errors(machine_name, op):
    return [e for e in fitted()["errors"] if e[0] == machine_name and e[1] == op]


@pytest.mark.parametrize("name", ["a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s"])
def test_the_errors_written_on_held_out_shapes_are_within_bounds(name):
    """Medians over the tables of a operation kind; 8 % was aimed at, what is worse is in docs/cost-model.md (the
    A100's old attention kernels of TensorRT-LLM 1.0 above all)."""
    decoding = 0.22 if name == "a100_sxm" else 0.06
    aimed = {"product": 0.065, "experts": 0.105, "decode": decoding, "prefill": 0.09, "all-reduce": 0.09}
    for op, most in aimed.items():
        medians = [e[6] for e in errors(name, op)]
        assert medians
        assert np.median(medians) <= most
        assert all(e[5] >= 20 and e[6] <= e[7] for e in errors(name, op))


def test_the_file_is_small_and_names_what_it_is_from():
    found = fitted()
    assert FITTED.stat().st_size < 128 * 1024
    assert "aiconfigurator" in found["source"]
    assert all(found[k] for k in ("fitted", "power_source", "service_source", "plain_source"))
    assert {m.fit for m in MACHINES} <= set(found["machines"]) | set(found["plain"])
    assert all(set(host_of(f)) >= {"step_s", "seq_s", "prefill_step_s", "frontend_s", "reply_s"} for f in FAMILIES)


def shared(*parts):
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip("the measured tables are not beside the repository")
    return path


@pytest.mark.shared
def test_the_shipped_products_are_as_near_to_the_table_as_written():
    root = shared("op_tables")
    from op_tables import newest

    h100 = machine("h100")
    (table,) = (t for t in newest(root, "h100_sxm", "gemm", "gemm_perf") if t.family == "vllm")
    m, n, k = table.number("m"), table.number("n"), table.number("k")
    rows = table.where((table.text("gemm_dtype") == "fp8") & (m <= 16384) & (n >= 512) & (k >= 512) & (n * k < 8e8))
    shape = (rows.number("m"), rows.number("n"), rows.number("k"))
    plain = rooflines.product(shape, "fp8", h100.read_bytes_per_s, h100.flops).total()
    values = np.asarray(fitted()["machines"]["h100_sxm"]["product"]["fp8"]["vllm"]) / 100
    said = plain * np.exp(evaluate(values, shape, rooflines.PRODUCT_KNOTS))
    off = np.abs(said / rows.columns["latency"] - 1)
    assert np.median(off) < 0.06
    assert np.median(np.abs(plain / rows.columns["latency"] - 1)) > 2 * np.median(off)  # what the fit is worth


@pytest.mark.shared
def test_closed_loops_are_predicted_as_written():
    path = shared("e2e_silicon.csv")
    from fit_service import between_tokens, read
    from whywait.physics.step import step_cost

    rows = [r for r in read(path) if r.system == "h100_sxm" and r.family == "vllm" and "Llama-3.1-70B" in r.model]
    costs = {r[1:6]: step_cost(arch_of(r.model), machine(r.system), r.precision, r.layout, Efficiency()) for r in rows}
    off = [abs(between_tokens(costs[r[1:6]], r) / r.seconds - 1) for r in rows]
    assert len(rows) > 30
    assert np.median(off) < 0.06
    assert fitted()["service_error"][1] < 0.12  # over all configurations, each held out


def parts(prompt=0.0, seqs=64.0, gpu="h100"):
    found = step_parts(arch_of("Llama-3.1-70B"), machine(gpu), Precision("fp8", "fp8", "fp8"), Layout(4), Efficiency())
    row = (seqs + prompt, seqs, seqs * 1000, 0, float(prompt > 0), prompt**2 / 2, 0)
    return work(found, StepWork(*(np.array([v]) for v in row)))


def test_power_is_between_idle_and_the_rating():
    for name in ("h100", "b200", "a100", "mi300x", "l40s"):
        gpu = machine(name)
        drawn = watts(gpu, np.concatenate([parts(), parts(8192), parts(0, 1)], axis=1))
        assert np.all(drawn > idle_w(gpu))
        assert np.all(drawn <= rated_w(gpu))
    assert watts(machine("b200"), parts(16384))[0] > watts(machine("b200"), parts(0, 1))[0]
    with pytest.raises(UsageError, match="TPU"):
        watts(machine("tpu-v5e"), parts())


def test_joules_are_watts_times_seconds_on_every_device_and_idle_for_the_rest():
    gpu, p = machine("h100"), parts()
    spent = joules(gpu, p, 4)
    assert spent[0] == pytest.approx(4 * watts(gpu, p)[0] * p.sum())
    with_rest = joules(gpu, p, 4, wall_s=float(p.sum()) + 2)
    assert with_rest[-1] == pytest.approx(4 * 2 * idle_w(gpu))


def test_a_cap_slows_computing_and_not_reading():
    gpu = machine("h100")
    busy = np.zeros((5, 1))
    busy[COMPUTE] = 1.0
    half = capped(gpu, busy, rated_w(gpu) / 2)
    assert half[COMPUTE, 0] == pytest.approx(1.3, abs=0.01)  # Splitwise: prompts take 1.3 times as long
    reading = np.zeros((5, 1))
    reading[WEIGHTS], reading[HOST] = 1.0, 0.1
    assert np.array_equal(capped(gpu, reading, rated_w(gpu) / 2), reading)
    assert np.array_equal(capped(gpu, busy, rated_w(gpu)), busy)
    with pytest.raises(UsageError, match="idle"):
        capped(gpu, busy, 10.0)


def test_power_fits_say_their_error():
    found = {e["machine"]: e for e in fitted()["power_errors"]}
    assert found["h100_sxm"]["median"] < 0.08
    assert found["b200_sxm"]["median"] < 0.13
    assert all(0 <= v <= 1.2 for k, v in shares(machine("h100")).items() if k != "exponent")


@pytest.mark.shared
def test_power_of_services_held_out_is_as_written():
    folder = shared("mlenergy.csv").parent
    from fit_power import _leaderboard, held_out

    off = held_out(_leaderboard(folder, "H100"))
    assert np.median(off) < 0.08
