"""Energy of a window: exact where the meters allow it, null where not, and every way to be wrong found by a check."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.analysis_runs import S
from tests.bill_runs import meters, service
from whywait.analyze.bill import Ask, bill
from whywait.analyze.energy import Energy, between, energy_of
from whywait.analyze.energy_checks import checks_of, worst
from whywait.analyze.energy_model import PowerModel, parse_model
from whywait.analyze.window import window_of
from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.physics.prices import Offer
from whywait.probe.host import Energy as Rapl

WINDOW = (10 * S, 80 * S)


def states(run: Run, e: Energy) -> dict[str, str]:
    return {c.what: c.state for c in checks_of(run, 0, e, window_of(run.point(0)))}


def wave(t: float) -> float:
    return 400 + 150 * math.sin(t / 3)


def true_wave(a: float, b: float) -> float:
    return 400 * (b - a) - 450 * (math.cos(b / 3) - math.cos(a / 3))


def test_the_counter_over_the_exact_window() -> None:
    run = service(readings=meters(wave))
    e = energy_of(run, WINDOW)
    assert e.joules == pytest.approx(true_wave(0, 70), rel=1e-4)
    assert e.low <= e.joules <= e.high
    assert e.how == "counter"
    assert e.parts[0].integral == pytest.approx(e.joules, rel=1e-3)  # invariant 11
    found = states(run, e)
    assert found["counter and integrated power agree"] == "holds"
    assert found["the window's edges"] == "holds"
    assert found["the devices are the service's"] == "holds"


@pytest.mark.parametrize("start", [0.0, 0.05, 0.5, 33.333])
def test_edges_between_samples_are_interpolated_and_their_error_stated(start: float) -> None:
    run = service(readings=meters(wave, seconds=(-3.0, 76.0, 1.0)))
    window = (round((10 + start) * S), round((10 + start + 35) * S))
    e = energy_of(run, window)
    truth = true_wave(start, start + 35)
    assert e.low <= truth <= e.high
    assert e.joules == pytest.approx(truth, rel=0.005)


def test_two_devices_are_summed_and_one_missing_fails() -> None:
    both = meters(300.0, "0") + meters(500.0, "1")
    run = service(readings=both, devices=2)
    e = energy_of(run, WINDOW)
    assert e.joules == pytest.approx(800 * 70, rel=1e-6)
    assert states(run, e)["the devices are the service's"] == "holds"
    half = service(readings=meters(300.0, "0"), devices=2)
    assert states(half, energy_of(half, WINDOW))["the devices are the service's"] == "fails"


def test_of_a_larger_machine_the_busy_devices_count() -> None:
    rows = meters(600.0, "0", busy=0.9) + meters(90.0, "1", busy=0.0) + meters(610.0, "2", busy=0.95)
    run = service(readings=rows, devices=2)
    e = energy_of(run, WINDOW)
    assert e.joules == pytest.approx(1210 * 70, rel=1e-6)
    assert e.unused == ("gpu 1",)
    assert states(run, e)["the devices are the service's"] == "holds"
    alike = service(readings=meters(600.0, "0", busy=0.9) + meters(600.0, "1", busy=0.88), devices=1)
    assert states(alike, energy_of(alike, WINDOW))["the devices are the service's"] == "undecided"


def test_more_devices_than_serve_without_a_way_to_tell_fails() -> None:
    run = service(readings=meters(600.0, "0") + meters(90.0, "1"), devices=1)
    assert states(run, energy_of(run, WINDOW))["the devices are the service's"] == "fails"
    assert energy_of(run, WINDOW, devices=2).joules == pytest.approx(690 * 70, rel=1e-6)


def test_where_nobody_says_how_many_serve_the_busy_ones_are_taken_and_it_is_not_sure() -> None:
    rows = meters(600.0, "0", busy=0.9) + meters(90.0, "1", busy=0.0) + meters(500.0, "2", busy=0.5)
    run = service(readings=rows, devices=None, machine={"gpus": [{"name": "H100"}] * 3})
    e = energy_of(run, WINDOW)
    assert (e.devices, e.devices_how) == (2, "inferred")
    assert e.joules == pytest.approx(1100 * 70, rel=1e-6)
    assert states(run, e)["the devices are the service's"] == "undecided"
    dark = service(readings=meters(600.0, "0") + meters(90.0, "1"), devices=None)
    assert energy_of(dark, WINDOW).devices is None


def test_a_counter_that_renews_itself_seldom_has_wider_edges() -> None:
    rows = meters(300.0, seconds=(-3.0, 76.0, 0.1))
    held = 0.0
    for r in rows:
        if r["name"] == "energy_joules_total":
            second = r["asked_ns"] / S
            held = r["value"] if abs(second - round(second)) < 0.01 else held
            r["value"] = held or r["value"]
    run = service(readings=rows)
    e = energy_of(run, (round(10.45 * S), round(70.95 * S)))
    assert e.low <= 300 * 60.5 <= e.high
    assert e.high - e.low > 300  # a second's worth at least


def test_a_counter_that_stands_still_is_none() -> None:
    rows = [{**r, "value": 5e6} if r["name"] == "energy_joules_total" else r for r in meters(300.0)]
    e = energy_of(service(readings=rows), WINDOW)
    assert e.how == "power"
    assert e.joules == pytest.approx(300 * 70, rel=1e-6)
    lone = energy_of(service(readings=[r for r in rows if r["name"] != "power_watts"]), WINDOW)
    assert lone.joules is None
    assert "did not move" in lone.parts[0].why


def test_devices_that_did_nothing_are_not_the_ones() -> None:
    run = service(readings=meters(70.0, busy=0.001))
    assert states(run, energy_of(run, WINDOW))["the devices are the service's"] == "fails"


def test_a_device_read_by_two_sources_counts_once() -> None:
    rows = meters(300.0, source="gpu", base=5e6) + meters(300.0, source="gpu/0", base=5e6 + 40)
    assert energy_of(service(readings=rows), WINDOW).joules == pytest.approx(300 * 70, rel=1e-3)
    apart = meters(300.0, source="gpu/0", base=5e6) + meters(300.0, source="gpu/1", base=7e6)
    two = energy_of(service(readings=apart, devices=2), WINDOW)
    assert two.joules == pytest.approx(600 * 70, rel=1e-6)


def test_a_counter_that_started_anew_falls_back_to_power_and_is_not_sure() -> None:
    rows = meters(300.0)
    for r in rows:
        if r["name"] == "energy_joules_total" and r["asked_ns"] > 40 * S:
            r["value"] -= 1e6
    run = service(readings=rows)
    e = energy_of(run, WINDOW)
    assert e.how == "power"
    assert e.joules == pytest.approx(300 * 70, rel=1e-6)
    assert states(run, e)["no counter fell"] == "undecided"
    alone = service(readings=[r for r in rows if r["name"] != "power_watts"])
    lost = energy_of(alone, WINDOW)
    assert lost.joules is None
    assert "reset or wrap" in lost.parts[0].why
    assert states(alone, lost)["a meter was read"] == "undecided"


def test_a_wrapped_rapl_counter_is_bridged_by_its_range_and_never_guessed_without(tmp_path: Any) -> None:
    zone = tmp_path / "sys/class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)

    def write(uj: int) -> None:
        (zone / "energy_uj").write_text(str(uj))

    (zone / "name").write_text("package-0")
    (zone / "max_energy_range_uj").write_text("10000000")
    write(9_000_000)
    with_range = Rapl(str(tmp_path))
    (zone / "max_energy_range_uj").unlink()
    without = Rapl(str(tmp_path))
    for uj, told, untold in ((9_500_000, 9.5, 9.5), (400_000, 10.4, None), (9_900_000, 19.9, None)):
        write(uj)
        assert [v for _, _, v in with_range.sample()] == [pytest.approx(told)]
        assert [v for _, _, v in without.sample()] == ([] if untold is None else [pytest.approx(untold)])


def test_power_alone_is_integrated_and_undecided() -> None:
    run = service(readings=meters(wave, only=("power_watts",)))
    e = energy_of(run, WINDOW)
    assert e.how == "power"
    assert e.joules == pytest.approx(true_wave(0, 70), rel=1e-3)
    assert states(run, e)["a meter was read"] == "undecided"


@pytest.mark.parametrize("value", [-5.0, math.inf, -math.inf])
def test_what_no_meter_can_have_read_is_left_out(value: float) -> None:
    rows = meters(400.0, only=("power_watts",))
    true = energy_of(service(readings=rows), WINDOW).joules
    rows[300]["value"] = value
    found = bill(service(readings=rows), Ask())["points"][0]["energy"]
    assert found["joules"] == pytest.approx(true)


def test_counter_and_power_that_disagree_fail() -> None:
    rows = meters(300.0, only=("energy_joules_total",)) + meters(400.0, only=("power_watts",))
    run = service(readings=rows)
    assert states(run, energy_of(run, WINDOW))["counter and integrated power agree"] == "fails"


def test_a_trailing_mean_of_power_is_allowed_for() -> None:
    def lagging(t: float) -> float:  # mean of the last second
        return 100.0 if t < 0 else min(100 + 500 * t, 600)

    counter = meters(lambda t: 600.0 if t > 0 else 100.0, only=("energy_joules_total",))
    run = service(readings=counter + meters(lagging, only=("power_watts",)))
    assert states(run, energy_of(run, WINDOW))["counter and integrated power agree"] == "holds"


def test_a_short_window_is_undecided() -> None:
    run = service(n=20, readings=meters(300.0))
    found = states(run, energy_of(run, (10 * S, 30 * S)))
    assert found["the window is steady and long"] == "undecided"
    assert found["counter and integrated power agree"] == "undecided"


def test_a_gap_in_the_readings_and_slow_answers_are_undecided() -> None:
    rows = [r for r in meters(300.0) if not 30 * S < r["asked_ns"] < 45 * S]
    run = service(readings=rows)
    e = energy_of(run, WINDOW)
    assert e.joules == pytest.approx(300 * 70, rel=1e-6)
    assert states(run, e)["sampling"] == "undecided"
    slow = service(readings=meters(300.0, late_s=4.0))
    assert states(slow, energy_of(slow, WINDOW))["sampling"] == "undecided"


def test_a_meter_that_fell_silent_early_says_nothing() -> None:
    run = service(readings=meters(300.0, seconds=(-3.0, 40.0, 0.1)))
    e = energy_of(run, WINDOW)
    assert e.joules is None
    assert "of the window only" in e.parts[0].why
    nearly = energy_of(service(readings=meters(300.0, seconds=(-3.0, 66.0, 0.1))), WINDOW)
    assert nearly.joules == pytest.approx(300 * 70, rel=1e-3)  # by the mean power of what was read


def test_no_meter_is_null_and_a_stated_model_is_labelled() -> None:
    run = service()
    e = energy_of(run, WINDOW)
    assert e.joules is None
    assert worst(checks_of(run, 0, e, window_of(run.point(0)))) == "undecided"
    model = energy_of(run, WINDOW, model=PowerModel(50, 450, 200))
    assert model.how == "modelled"
    assert {p.how for p in model.parts} == {"modelled"}
    assert model.low <= model.joules <= model.high
    assert 50 * 70 + 200 * 70 < model.joules <= (450 + 200) * 70


def test_the_host_is_added_where_rapl_is_read() -> None:
    host = _host(120.0)
    run = service(readings=meters(300.0) + host)
    e = energy_of(run, WINDOW)
    assert e.joules == pytest.approx(420 * 70, rel=1e-6)
    assert e.of("devices") == pytest.approx(300 * 70, rel=1e-6)
    assert states(run, e)["the host"] == "holds"
    local = service(readings=meters(300.0) + host, machine={"engine_is_local": True, "gpus": [{"name": "H100"}]})
    assert states(local, energy_of(local, WINDOW))["the host"] == "undecided"  # the client's work is in it
    cpu = service(readings=host, devices=None, machine={"engine_is_local": True, "gpus": []})
    assert energy_of(cpu, WINDOW).joules == pytest.approx(120 * 70, rel=1e-6)
    elsewhere = service(readings=host, devices=None, machine={"engine_is_local": False, "gpus": []})
    assert energy_of(elsewhere, WINDOW).joules is None


def test_idle_power_is_read_where_nothing_was_in_flight() -> None:
    rows = meters(lambda t: 110.0 if t < 0 or t > 71 else 500.0, seconds=(-3.0, 90.0, 0.1))
    e = energy_of(service(readings=rows), WINDOW)
    assert e.idle.watts == pytest.approx(110)
    assert e.idle.how == "measured"
    named = service(readings=meters(300.0, seconds=(0.1, 70.5, 0.1)), machine={"gpus": [{"name": "NVIDIA H100 80GB"}]})
    assert energy_of(named, WINDOW).idle.how == "modelled"
    assert energy_of(service(readings=meters(300.0, seconds=(0.1, 70.5, 0.1))), WINDOW).idle.watts is None


def _host(watts: Any, **more: Any) -> list[dict[str, Any]]:
    """Readings of a RAPL package that draws ``watts``."""
    return [{"asked_ns": r["asked_ns"], "source": "host", "name": "package_energy_joules_total",
             "labels": '{"zone": "0"}', "value": r["value"]}
            for r in meters(watts, only=("energy_joules_total",), **more)]  # fmt: skip


@pytest.mark.parametrize("seconds", [(-3.0, 90.0, 0.1), (0.1, 70.5, 0.1)])
def test_hours_without_use_draw_the_host_too(seconds: tuple[float, float, float]) -> None:
    """Half of the hours: as long again as the window, with nothing to do, by every meter that is in the energy."""
    own = Offer("own", "owned", "EUR", "2026", "test", capex=8766.0, years=1, power_price=3.6, utilisation=0.5)

    def items(run: Run, model: PowerModel | None = None) -> dict[str, Any]:
        found: dict[str, Any] = bill(run, Ask((own,), model=model))["points"][0]["money"][0]
        return {"idle": found["items"]["power of idle hours"], "why": found["why"]}

    stated = PowerModel(30, 90, 20)
    each = 3.6 / 3.6e6 * 70  # money per W
    assert items(service(), stated) == {"idle": pytest.approx((30 + 20) * each), "why": None}
    assert items(service(), PowerModel(30, 90))["idle"] == pytest.approx(30 * each)  # nor is the host in the rest

    read = lambda idle, busy: lambda t: idle if t < 0 or t > 71 else busy  # noqa: E731
    both = service(readings=meters(read(110.0, 500.0), seconds=seconds) + _host(read(80.0, 150.0), seconds=seconds))
    cpu = service(readings=_host(read(80.0, 150.0), seconds=seconds), devices=None,
                  machine={"engine_is_local": True, "gpus": []})  # fmt: skip
    if seconds[0] < 0:
        assert items(both)["idle"] == pytest.approx((110 + 80) * each, rel=1e-2)
        assert items(cpu)["idle"] == pytest.approx(80 * each, rel=1e-2)
    else:  # never read at rest: not known, and never left out
        for run in (both, cpu):
            assert items(run)["idle"] is None
            assert "--power-model host_w" in items(run)["why"]
    assert items(both, PowerModel(100, 500, 60))["idle"] == pytest.approx((100 + 60) * each)
    seldom = service(readings=meters(300.0) + _host(read(80.0, 150.0), seconds=(-200.0, 560.0, 150.0)))
    assert energy_of(seldom, WINDOW).idle_host_w == pytest.approx(80)  # not from before the work to after it


def test_others_work_on_the_engine_fails() -> None:
    counted = [{"asked_ns": t * S, "name": "output_tokens_total", "value": v}
               for t, v in ((9, 0.0), (10, 0.0), (80, 9000.0), (82, 9000.0))]  # fmt: skip
    run = service(readings=meters(300.0) + counted)
    assert states(run, energy_of(run, WINDOW))["the work was ours"] == "fails"


def test_pieces_add_up() -> None:
    run = service(readings=meters(wave))
    e = energy_of(run, WINDOW)
    pieces = between(run, e, [10 * S, 20 * S, 45 * S, 80 * S])
    assert sum(pieces) == pytest.approx(e.joules, rel=1e-12)
    assert pieces[0] == pytest.approx(true_wave(0, 10), rel=1e-3)


@pytest.mark.parametrize("text", ["idle_w", "idle_w=70", "idle_w=700,busy_w=70", "watts=3", "busy_w=x,idle_w=1"])
def test_a_power_model_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError):
        parse_model(text)
