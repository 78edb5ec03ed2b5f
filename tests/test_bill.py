"""The bill as a user gets it: what is good pays for what is not, absent is null, and every figure says its currency."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.analysis_runs import S, join, make_run, messy_runs
from tests.bill_runs import meters, service
from whywait.analyze.bill import PER, Ask, bill
from whywait.analyze.energy_model import PowerModel
from whywait.analyze.sharing import RULES
from whywait.analyze.summary import summarize
from whywait.cli import main
from whywait.core.run import DEFINITIONS, Run
from whywait.physics.prices import Offer

EUR = Offer("hour", "on demand", "EUR", "2026-11", "test", per_device_hour=3.6)
CHF = Offer("own", "owned", "CHF", "2026-11", "test", capex=8766.0, years=1, power_price=0.36, pue=1.5)
EXAM = Path(__file__).resolve().parents[1] / "exam"


def figures(found: dict[str, Any]) -> dict[str, float | None]:
    return {k: found[k]["value"] for k in PER}


def one(run: Run, *offers: Offer, **ask: Any) -> dict[str, Any]:
    found: dict[str, Any] = bill(run, Ask(offers, **ask))["points"][0]
    return found


def test_by_hand() -> None:
    """70 requests of 50 tokens in 70 s at 300 W and 3.6 EUR per device-hour."""
    p = one(service(readings=meters(300.0)), EUR, CHF)
    assert figures(p["energy"])["per_good_request"] == pytest.approx(300)
    assert figures(p["energy"])["per_million_effective_tokens"] == pytest.approx(6e6)
    assert figures(p["money"][0])["per_good_request"] == pytest.approx(3.6 / 3600)
    assert figures(p["money"][0])["per_million_effective_tokens"] == pytest.approx(3.6 / 3600 / 50 * 1e6)
    own = p["money"][1]
    assert own["items"]["capital"] == pytest.approx(70 / 3600)
    assert own["items"]["power"] == pytest.approx(300 * 70 / 3.6e6 * 0.36 * 1.5)
    assert own["total"] == pytest.approx(own["items"]["capital"] + own["items"]["power"])
    assert [(m["currency"], m["date"]) for m in p["money"]] == [("EUR", "2026-11"), ("CHF", "2026-11")]
    low, high = (p["energy"]["per_good_request"][k] for k in ("low", "high"))
    assert low <= 300 <= high


def test_what_was_drawn_outside_the_window_is_not_in_the_bill() -> None:
    point = {"steady_start_ns": 20 * S, "steady_end_ns": 70 * S}  # of 10 s to 80 s
    p = one(service(readings=meters(lambda t: 300.0 if 10 <= t <= 60 else 900.0), point=point), EUR)
    assert p["window"]["seconds"] == 50
    assert p["energy"]["joules"] == pytest.approx(300 * 50, rel=1e-2)
    assert figures(p["energy"])["per_good_request"] == pytest.approx(300, rel=1e-2)
    assert p["money"][0]["total"] == pytest.approx(0.05)


def test_what_failed_or_was_late_is_charged_to_the_good() -> None:
    def change(i: int, r: dict[str, Any]) -> dict[str, Any]:
        if i % 5 == 0:  # cut off: its tokens are not told
            return {**r, "outcome": "truncated", "fault": "service", "output_tokens": None, "last_ns": None}
        if i % 5 == 1:  # in time for nobody
            return {**r, "first_ns": r["sent_ns"] + 9 * S // 10}
        return r

    run = service(readings=meters(300.0), change=change, slo={"ttft_ms": 500.0})
    p = one(run, EUR)
    work = p["work"]
    assert (work["good_requests"], work["late_requests"], work["failed_requests"]) == pytest.approx((42, 14, 14))
    assert figures(p["energy"])["per_good_request"] == pytest.approx(300 * 70 / 42)
    assert figures(p["energy"])["per_million_effective_tokens"] == pytest.approx(300 * 70 / (42 * 50) * 1e6)
    assert figures(p["money"][0])["per_good_request"] == pytest.approx(0.001 * 70 / 42)
    spent = p["shares"][0]["spent_on"]
    assert sum(spent.values()) == pytest.approx(1)
    assert spent["late"] > 0.02
    raw = one(service(readings=meters(300.0), change=lambda i, r: r if i % 5 else change(1, r), slo={"ttft_ms": 500.0}))
    got = figures(raw["energy"])
    assert got["per_million_effective_tokens"] / got["per_million_output_tokens"] == pytest.approx(70 / 56)


def test_what_we_cut_ourselves_is_no_failure_of_the_service_and_charged_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 70 requests ten failed; the last 14 were cut off by the end of the run, and seven left by their client."""

    def change(i: int, r: dict[str, Any]) -> dict[str, Any]:
        what = "censored" if i >= 56 else "cancelled" if i >= 49 else "timeout" if i < 10 else "ok"
        return {**r, "outcome": what, "fault": "none"}

    run = service(readings=meters(300.0), change=change, partial=True)
    p = one(run, EUR)
    kinds = ("good", "late", "failed", "censored", "cancelled")
    assert [p["work"][f"{k}_requests"] for k in kinds] == pytest.approx([39, 0, 10, 14, 7])
    assert sum(p["work"][f"{k}_requests"] for k in kinds) == pytest.approx(p["work"]["requests"])
    spent = p["shares"][0]["spent_on"]
    assert list(spent) == list(kinds)
    assert sum(spent.values()) == pytest.approx(1)
    assert spent["censored"] == pytest.approx(2 * spent["cancelled"], rel=0.05)
    assert figures(p["energy"])["per_good_request"] == pytest.approx(300 * 70 / 39)  # still charged
    run.save(tmp_path / "r")
    assert main(["bill", str(tmp_path / "r"), "--html", str(tmp_path / "b.html")]) == 0
    page, said = (tmp_path / "b.html").read_text(), capsys.readouterr().out
    for text in (page, said):
        assert "56 % were good, 20 % cut off by the end of the run, 10 % cancelled by their client" in text
        assert "70 requests: 39 good, 0 late, 10 failed, 14 cut off by the end of the run" in text
        assert f"{spent['censored'] * 100:.0f} % on requests cut off by the end of the run" in text
    none = one(service(readings=meters(300.0), change=lambda i, r: {**change(i, r), "outcome": "censored"}))
    assert none["energy"]["per_good_request"]["why"].endswith("none ended well, 70 were cut off by the end of the run")


def test_nothing_good_has_no_cost_and_the_total_is_stated() -> None:
    p = one(service(readings=meters(300.0), slo={"ttft_ms": 1.0}), EUR)
    for found in (p["energy"], p["money"][0]):
        assert found["per_good_request"]["value"] is None
        assert "none was within its SLO" in found["per_good_request"]["why"]
        assert found["per_million_effective_tokens"]["value"] is None
        assert found["per_million_output_tokens"]["value"] is not None
    assert p["energy"]["joules"] == pytest.approx(300 * 70)
    assert p["money"][0]["total"] == pytest.approx(0.07)
    assert all(r["why"] and r["j_per_good_request"] is None for r in p["shares"][0]["by_prompt"])
    dead = service(readings=meters(300.0), change=lambda i, r: {**r, "outcome": "timeout", "fault": "service"})
    assert "none ended well" in one(dead)["energy"]["per_good_request"]["why"]


def test_that_nothing_was_good_is_said_before_that_no_energy_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first would keep the cost unknown whatever was metered; shares are of device time, not of what is unknown."""
    runs = [service(n=20, slo={"ttft_ms": 1.0}), service(n=20, slo={"ttft_ms": 1.0})]
    for run, where in ((runs[0], ""), (join(runs), " (at concurrency 1, the first of 2 loads)")):
        folder = tmp_path / str(len(run.points))
        run.save(folder)
        assert main(["bill", str(folder)]) == 0
        said = [line.strip() for line in capsys.readouterr().out.splitlines()]
        why = "of 20 requests 20 ended well and none was within its SLO"
        assert said[0] == f"What 1,000 good requests cost is not known: {why}{where}"
        assert "by device time 100 % on late requests" in said
        assert "– no figure per million output tokens: no energy is known" in said  # tokens were made
    unmetered = one(service(n=20))["energy"]
    assert unmetered["per_good_request"]["why"] == "no energy is known"


def test_the_summary_has_the_figures_of_the_bill() -> None:
    def change(i: int, r: dict[str, Any]) -> dict[str, Any]:
        return {**r, "outcome": "timeout", "fault": "service"} if i % 7 == 0 else {**r, "output_tokens": 30 + i % 5}

    run = service(readings=meters(300.0), change=change, slo={"ttft_ms": 500.0})
    said, e = summarize(run)["points"][0], one(run)["energy"]
    assert said["energy_j_per_good_request"] == e["per_good_request"]["value"] == pytest.approx(300 * 70 / 60)
    assert said["energy_j_per_million_effective_tokens"] == e["per_million_effective_tokens"]["value"]
    assert (said["power_w"], said["energy_how"], said["energy_state"]) == (e["watts"], e["how"], e["state"])
    assert summarize(run)["definitions"] == bill(run)["definitions"] == DEFINITIONS


def test_thinking_counts_as_effective_and_not_as_answer() -> None:
    run = service(readings=meters(300.0), change=lambda i, r: {**r, "reasoning_tokens": 40})
    got = figures(one(run)["energy"])
    assert got["per_million_answer_tokens"] == pytest.approx(5 * got["per_million_effective_tokens"])


def test_no_token_counts_is_null_with_the_reason() -> None:
    p = one(service(readings=meters(300.0), change=lambda i, r: {**r, "output_tokens": None}), EUR)
    assert figures(p["energy"])["per_good_request"] == pytest.approx(300)
    assert p["energy"]["per_million_effective_tokens"]["value"] is None
    assert "token counts" in p["energy"]["per_million_effective_tokens"]["why"]
    by = {s["rule"]: s for s in p["shares"]}
    assert by["output tokens"]["why"]
    assert by["device time"]["why"] is None


def test_no_meter_leaves_rent_and_takes_power() -> None:
    p = one(service(), EUR, CHF)
    assert figures(p["energy"]) == dict.fromkeys(PER)
    assert figures(p["money"][0])["per_good_request"] == pytest.approx(0.001)
    own = p["money"][1]
    assert own["total"] is None
    assert own["items"]["capital"] is not None
    assert own["why"] == "power is not known"
    assert one(service(), CHF, model=PowerModel(50, 450))["money"][0]["total"] is not None


def test_how_many_devices_serve_is_not_guessed() -> None:
    p = one(service(readings=meters(300.0), devices=None), EUR)
    assert p["money"][0]["total"] is None
    assert "--devices" in p["money"][0]["why"]
    assert one(service(readings=meters(300.0), devices=None), EUR, devices=2)["money"][0]["total"] == pytest.approx(
        0.14
    )


def test_groups_sum_exactly_by_every_rule() -> None:
    def change(i: int, r: dict[str, Any]) -> dict[str, Any]:
        long = i % 3 == 0
        return {**r, "class": "rag" if long else "chat", "prompt_tokens": 3000 if long else 100 + i,
                "output_tokens": 20 if long else 60, "first_ns": r["sent_ns"] + (S // 2 if long else S // 10),
                "engine_prefill_ms": 500.0 if long else 100.0}  # fmt: skip

    p = one(service(readings=meters(333.3), change=change), EUR, CHF)
    total = round(p["energy"]["joules"] * 1e9)
    assert {s["rule"] for s in p["shares"]} == set(RULES)
    for share in p["shares"]:
        for rows in (share["by_class"], share["by_prompt"]):
            assert len(rows) > 1
            assert sum(r["nanojoules"] for r in rows) == total
            for m in p["money"]:
                assert sum(r["money"][m["name"]]["billionths"] for r in rows) == round(m["total"] * 1e9)
    by = {s["rule"]: {r["name"]: r["j_per_good_request"] for r in s["by_class"]} for s in p["shares"]}
    assert by["device time"]["rag"] == pytest.approx(by["device time"]["chat"], rel=1e-3)  # each held it for 1 s
    assert by["output tokens"]["chat"] == pytest.approx(3 * by["output tokens"]["rag"], rel=1e-3)
    assert by["all tokens"]["rag"] > 10 * by["all tokens"]["chat"]


@settings(max_examples=25)
@given(run=messy_runs())
def test_any_run_has_a_bill(run: Run) -> None:
    found = bill(run, Ask((EUR, CHF), model=PowerModel(50, 450, 100)))
    json.dumps(found, allow_nan=False)
    for p in found["points"]:
        for entry in (p["energy"], *p["money"]):
            for k in PER:
                assert (entry[k]["value"] is None) == bool(entry[k]["why"])
        if p["energy"]["joules"] is not None:
            for share in p["shares"]:
                rows = share["by_class"]
                assert not rows or sum(r["nanojoules"] for r in rows) == round(p["energy"]["joules"] * 1e9)


def test_a_run_without_requests_has_a_total_alone() -> None:
    point = {"start_ns": 10 * S, "end_ns": 80 * S, "planned": 0}
    p = one(make_run([], readings=meters(300.0), points=[point], engine={"devices": 1}), EUR)
    assert p["energy"]["joules"] == pytest.approx(300 * 70)
    assert p["energy"]["per_good_request"]["why"] == "no request of ours is in this point"


@pytest.mark.parametrize("mode", ["concurrency", "rate"])
def test_a_failure_whose_end_was_not_told_is_counted_where_it_was_sent(mode: str) -> None:
    def change(i: int, r: dict[str, Any]) -> dict[str, Any]:
        lost = {"outcome": "shed", "fault": "service", "first_ns": None, "first_answer_ns": None, "last_ns": None}
        return {**r, **lost, "end_ns": None, "output_tokens": None} if i in (0, 5, 60) else r

    point = {"mode": mode, "steady_start_ns": 12 * S, "steady_end_ns": 40 * S}  # the first and the last are outside
    work = one(service(change=change, point=point))["work"]
    assert (work["failed_requests"], work["good_requests"]) == (1, 27)
    whole = one(service(change=change, point={"mode": mode}))["work"]
    assert (whole["failed_requests"], whole["good_requests"], whole["requests"]) == (3, 67, 70)


def test_the_failures_of_an_imported_file_are_in_its_bill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(__file__).parent / "data" / "import" / "vllm-0.32-failures.json"
    assert main(["import", str(data), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["bill", str(tmp_path / "run")]) == 0
    assert "12 requests: 10 good, 0 late, 2 failed" in capsys.readouterr().out


def watched(*, joules: bool = True, **counters: list[tuple[float, float]]) -> Run:
    """A service that was only watched from 10 s to 80 s, with its counters as (second, value)."""
    rows = [{"asked_ns": round(t * S), "source": "metrics/0", "name": name, "value": v}
            for name, at in counters.items() for t, v in at]  # fmt: skip
    point = {"start_ns": 10 * S, "end_ns": 80 * S, "steady_start_ns": 10 * S, "steady_end_ns": 80 * S, "planned": 0}
    return make_run([], readings=[*(meters(300.0) if joules else []), *rows], points=[point], engine={"devices": 1},
                    made_by="measured")  # fmt: skip


def test_a_service_only_watched_is_billed_by_its_own_counters() -> None:
    ended = [(t, 10.0 + t) for t in range(9, 83)]
    made = [(t, 50.0 * t) for t in range(9, 83)]
    p = one(watched(requests_total=ended, output_tokens_total=made), EUR)
    assert p["counted"]["how"] == "by the engine's counters, goodput unknown"
    assert p["counted"]["requests"]["value"] == pytest.approx(70)
    e, m = p["energy"]["by_counters"], p["money"][0]["by_counters"]
    assert e["per_request"]["value"] == pytest.approx(300)
    assert e["per_request"]["low"] <= 300 <= e["per_request"]["high"]
    assert e["per_million_output_tokens"]["value"] == pytest.approx(6e6)
    assert m["per_request"]["value"] == pytest.approx(0.001)
    assert m["per_million_output_tokens"]["value"] == pytest.approx(20)
    assert p["energy"]["per_good_request"]["value"] is None  # goodput stays unknown
    assert "the work was ours" not in {c["what"] for c in p["energy"]["checks"]}
    assert one(service(readings=meters(300.0)))["counted"] is None


def test_a_counter_that_is_absent_or_cut_short_gives_no_figure_of_a_watched_service() -> None:
    p = one(watched(output_tokens_total=[(t, 50.0 * t) for t in range(9, 40)]), EUR)
    e = p["energy"]["by_counters"]
    assert e["per_request"] == {"value": None, "low": None, "high": None,
                                "why": "the engine publishes no counter of requests that ended"}  # fmt: skip
    assert e["per_million_output_tokens"]["value"] is None
    assert {k: v for k, v in p["work"].items() if k.endswith("requests")} == dict.fromkeys(
        ("requests", *(f"{k}_requests" for k in ("good", "late", "failed", "censored", "cancelled")))
    )  # nothing was sent: how many were good is not 0
    assert "of the window" in e["per_million_output_tokens"]["why"]
    nearly = one(watched(requests_total=[(t, 10.0 + t) for t in range(9, 77)]))["energy"]["by_counters"]
    assert nearly["per_request"]["value"] == pytest.approx(300)  # by the rate of the part that was read
    anew = one(watched(requests_total=[(t, float(t % 40)) for t in range(9, 83)]))["energy"]["by_counters"]
    assert "started anew" in anew["per_request"]["why"]
    still = one(watched(requests_total=[(t, 5.0) for t in range(9, 83)]))["energy"]["by_counters"]
    assert still["per_request"]["why"] == "no requests in the window"
    dark = one(watched(joules=False, requests_total=[(t, float(t)) for t in range(9, 83)]))["energy"]["by_counters"]
    assert dark["per_request"]["why"] == "no energy is known"


def test_the_bill_of_a_watched_service_as_a_user_sees_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [(t, 50.0 * t) for t in range(9, 83)]
    path = str(watched(output_tokens_total=made).save(tmp_path / "run"))
    assert main(["bill", path, "--price-per-hour", "3.6", "--currency", "EUR"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("1,000,000 output tokens cost 6,000 kJ and 20.0 EUR (given, on demand)")
    assert "by the engine's counters, goodput unknown" in text
    assert "no figure per request: the engine publishes no counter of requests that ended" in text
    assert "good: ended well" not in text


def test_points_are_billed_apart() -> None:
    run = join([service(n=40, readings=meters(100.0, seconds=(-3, 43, 0.1))),
                service(n=40, readings=meters(200.0, seconds=(-3, 43, 0.1)))])  # fmt: skip
    first, second = bill(run)["points"]
    assert figures(first["energy"])["per_good_request"] == pytest.approx(100, rel=0.01)
    assert figures(second["energy"])["per_good_request"] == pytest.approx(200, rel=0.01)


def saved(tmp_path: Path, **more: Any) -> str:
    run = service(readings=meters(300.0), machine={"gpus": [{"name": "NVIDIA H200"}]}, **more)
    return str(run.save(tmp_path / "run"))


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path)
    assert main(["bill", path]) == 0
    text = capsys.readouterr().out
    assert "AWS p5en.48xlarge (on demand, 2026): 5.20 USD per device-hour" in text
    assert "is the energy to be believed? undecided" in text
    own = "capex=30000,years=4,power_price=0.2"
    assert main(["bill", path, "--price-per-hour", "2.5", "--owned", own, "--currency", "eur", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    money = found["points"][0]["money"]
    assert [(m["name"], m["currency"]) for m in money] == [("given", "EUR"), ("owned", "EUR")]
    assert money[0]["per_million_effective_tokens"]["value"] == pytest.approx(2.5 / 3600 / 50 * 1e6)
    assert len(money[0]["date"]) == 10
    assert main(["bill", path, "--strict"]) == 3
    capsys.readouterr()


def test_the_share_of_every_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = saved(tmp_path, change=lambda i, r: {**r, "output_tokens": 7 + i % 13}), tmp_path / "each.csv"
    assert main(["bill", path, "--requests", str(out), "--share-by", "output tokens", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["points"][0]
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 70
    assert sum(int(r["nanojoules"]) for r in rows) == round(found["energy"]["joules"] * 1e9)
    assert len(found["money"]) > 1
    for m in found["money"]:  # the offers that ship for the machine, as in the bill
        shares = [int(r[f"billionths {m['currency']}: {m['name']}"]) for r in rows]
        assert sum(shares) == round(m["total"] * 1e9)
        assert shares[12] == pytest.approx(shares[0] * 19 / 7, abs=2)
    tokens = {r["nanojoules"]: float(r["output_tokens"]) for r in rows}
    assert max(tokens, key=int) == next(k for k, v in tokens.items() if v == max(tokens.values()))
    assert main(["bill", path, "--requests", str(tmp_path / "no" / "each.csv")]) == 2


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--price-per-hour", "2.5"], "currency"),
        (["--currency", "EUR"], "converts nothing"),
        (["--price-per-hour", "2.5", "--currency", "E"], "ISO 4217"),
        (["--price-per-hour", "2.5", "--currency", "euro"], "--currency: 'euro'"),
        (["--price", "none.toml"], "docs/bill.md"),
        (["--share-by", "luck"], "luck"),
        (["--power-model", "x=1"], "KEY=WATTS"),
        (["--price", "none.toml"], "cannot be read"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], word: str) -> None:
    assert main(["bill", saved(tmp_path), *flags]) == 2
    assert word in capsys.readouterr().err


def test_a_book_without_an_offer_for_the_machine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = tmp_path / "p.toml"
    text = (
        '[[offers]]\nname="a"\nterms="reserved"\ncurrency="CHF"\nper_device_hour=2\ndate="2026"\nsource="offer 4711"\n'
    )
    book.write_text(text + 'machines=["MI300X"]\n')
    path = saved(tmp_path)
    assert main(["bill", path, "--price", str(book)]) == 2
    assert "no offer for H200 SXM" in capsys.readouterr().err
    book.write_text(text)
    assert main(["bill", path, "--price", str(book)]) == 0
    assert "2.00 CHF per device-hour of use; source: offer 4711" in capsys.readouterr().out


def test_a_recorded_run_of_a_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """No meter there: null with the reason; by a stated model, labelled; shed requests are charged to the good."""
    path = str(EXAM / "llama-shed-1")
    assert main(["bill", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(p["energy"]["joules"] is None and p["money"] == [] for p in found["points"])
    model = ["--power-model", "idle_w=20,busy_w=65", "--owned", "capex=2000,years=4,power_price=0.25"]
    assert main(["bill", path, *model, "--currency", "EUR", "--json"]) == 0
    p = json.loads(capsys.readouterr().out)["points"][1]
    assert p["energy"]["how"] == "modelled"
    assert p["work"]["failed_requests"] > p["work"]["good_requests"] > 0
    assert p["energy"]["per_good_request"]["value"] == pytest.approx(p["energy"]["joules"] / p["work"]["good_requests"])


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """In a process of its own and as plain Python: compiling the kernel would take most of a minute."""
    where = str(tmp_path_factory.mktemp("bill") / "sim")
    args = ["--machine", "h100", "--model", "llama-3.1-70b", "--layout", "tp=4", "--precision", "fp8", "--draws", "1"]
    load = ["--concurrency", "8", "--requests", "40", "--output-tokens", "lognormal(100,0.5)", "--slo", "ttft=300ms"]
    words = [sys.executable, "-m", "whywait", "simulate", *args, *load, "--jobs", "1", "--out", where]
    subprocess.run(words, check=True, env={**os.environ, "WHYWAIT_SIM": "python"}, capture_output=True)
    return where


def test_a_simulated_service_is_labelled(simulated: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bill", simulated, "--json"]) == 0
    p = json.loads(capsys.readouterr().out)["points"][0]
    assert p["energy"]["how"] == "modelled"
    assert (p["energy"]["devices"], p["energy"]["read"]) == (4, 4)
    assert 4 * 119 < p["energy"]["watts"] < 4 * 700
    assert p["energy"]["state"] == "undecided"
    assert {m["terms"] for m in p["money"]} == {"owned", "reserved"}
    assert main(["bill", simulated]) == 0
    assert capsys.readouterr().out.startswith("SIMULATED")
