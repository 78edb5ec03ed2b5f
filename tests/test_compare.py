"""``whywait compare``: what changed is found, what did not is not, and what cannot be compared is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis_runs import Service, make_run, messy_runs
from tests.comparable_runs import noisy, simulated
from whywait import app
from whywait.analyze import baseline, digest
from whywait.analyze.against import Comparison, widened
from whywait.analyze.digest import Digest
from whywait.analyze.pairing import pairing
from whywait.analyze.student import quantile, two_sided
from whywait.cli import main
from whywait.comparing import Options, compare, read, save_baseline
from whywait.core.run import Run
from whywait.errors import UsageError
from whywait.judge import compared
from whywait.judge.change_gates import parse
from whywait.physics.prices import offer_of
from whywait.report.compared import STATES
from whywait.report.compared_html import render

ROOT = Path(__file__).parents[1]
EXAM = ROOT / "exam"


@lru_cache(maxsize=16)
def exam(name: str) -> Digest:
    return read(EXAM / name, Options(), name)


@lru_cache(maxsize=64)
def made(case: str, seed: int, slower: float = 0.0, drift: float = 0.0) -> Digest:
    return read(noisy(case, seed, slower, drift), Options(), f"seed {seed}")


@lru_cache(maxsize=4)
def drawn(seed: int) -> Run:
    return simulated("closed, 8 in flight, 200 requests", seed)


STEADY, WANDERS = "8 in flight, steady", "8 in flight, speed wanders 5 %"


def call(*argv: str) -> int:
    try:
        return main(list(argv))
    except SystemExit as exc:
        return int(exc.code or 0)


def figures(result: dict[str, Any], load: int = -1, b: int = 0) -> dict[str, dict[str, Any]]:
    return {f["name"]: f for f in result["comparisons"][b]["points"][load]["figures"]}


def waits(result: dict[str, Any], load: int = -1) -> dict[str, dict[str, Any]]:
    return {f["name"]: f for f in result["comparisons"][0]["points"][load]["waits"]}


def found(result: dict[str, Any]) -> list[str]:
    return [n for n, f in figures(result).items() if f["claimed"] and f["state"] in ("better", "worse")]


@pytest.mark.parametrize(
    ("df", "t"), [(1, 12.706205), (2, 4.302653), (5, 2.570582), (11, 2.200985), (30, 2.042272), (1e9, 1.959964)]
)
def test_students_t_is_that_of_the_tables(df, t):
    assert quantile(0.95, df) == pytest.approx(t, abs=1e-5)
    assert two_sided(t, df) == pytest.approx(0.05, abs=1e-6)
    assert two_sided(-t, df) == two_sided(t, df)


def test_a_real_change_is_found_paired_with_its_wait_and_what_was_changed():
    """One place instead of four on the embedded engine: requests queue for the slot."""
    r = compare(exam("llama-base"), [exam("llama-slots-1-of-4")])
    (c,) = r["comparisons"]
    point = c["points"][-1]
    assert point["load"] == "concurrency 4"
    assert point["paired"]
    assert point["pairs"] == 28
    f = figures(r)
    assert f["output_tokens_per_s"]["state"] == "worse"
    assert f["output_tokens_per_s"]["value"] == pytest.approx(0.559, abs=0.01)
    assert f["ttft_ms.p50"]["state"] == "worse"
    assert f["tpot_ms.p50"]["state"] == "better"
    moved = waits(r)["causes.queue.slot limit"]
    assert (moved["state"], moved["a"]) == ("worse", 0)
    assert moved["b"] == pytest.approx(2164, rel=0.01)
    assert {"what": "engine.slots", "a": "4", "b": "1"} in c["changed"]
    assert c["unlike"] == []


def test_a_queue_that_only_the_engines_histograms_tell_has_an_interval():
    f = waits(compare(exam("vllm-base"), [exam("vllm-slots-1-of-8")]))
    assert f["phases.queue"]["state"] == "worse"
    assert f["phases.queue"]["how"] == "pieces of the window"
    assert f["phases.queue"]["low"] > 1500
    # What no request knows is not called unexplained: the point as a whole knows it.
    assert f.get("phases.unknown", {"state": "same"})["state"] in ("same", "open")


def test_a_run_against_itself_is_no_change():
    r = compare(exam("llama-rate-4"), [exam("llama-rate-4")])
    for f in figures(r).values():
        assert f["value"] in (None, 0.0, 1.0), f
        assert f["state"] in ("same", "open")
    assert found(r) == []
    assert waits(r) == {} or all(w["value"] == 0 for w in waits(r).values())


def test_p95_of_few_requests_has_no_interval_and_says_so():
    f = figures(compare(exam("llama-base"), [exam("llama-slots-1-of-4")]))["ttft_ms.p95"]
    assert f["low"] is None
    assert f["state"] == "open"
    assert "too few" in f["why"]
    assert f["a"] is not None  # the sample value is still told


@pytest.mark.parametrize(("slower", "finds"), [(0.2, "worse"), (-0.2, "better")])
def test_a_known_difference_is_found_with_its_size(slower, finds):
    r = compare(made(WANDERS, 1), [made(WANDERS, 2, slower)])
    f = figures(r)["tpot_ms.p50"]
    assert f["state"] == finds
    assert f["low"] < 1 + slower < f["high"]
    assert f["counts"] == "yes"


def test_chance_and_size_are_told_apart():
    """Two per cent, surely: a change, and none that counts; with a smaller threshold it does."""
    a, b = made(STEADY, 1), made(STEADY, 1, 0.02)
    f = figures(compare(a, [b]))["tpot_ms.p50"]
    assert f["surely"]
    assert (f["counts"], f["state"]) == ("no", "small")
    f = figures(compare(a, [b], Options(threshold=0.005)))["tpot_ms.p50"]
    assert (f["surely"], f["counts"], f["state"]) == (True, "yes", "worse")


def test_a_simulated_change_is_found():
    r = compare(drawn(1), [simulated("closed, 8 in flight, 200 requests", 2, "max-seqs=4")])
    assert figures(r)["output_tokens_per_s"]["state"] == "worse"
    assert not r["comparisons"][0]["points"][0]["paired"]
    assert any("is simulated" in d["what"] for d in r["doubts"])


def test_runs_of_the_same_over_seeds_find_next_to_nothing():
    """The table of docs/compare.md has more of them; under 5 % of six comparisons, one may be chance (two or more
    in a thirtieth of such tries at most)."""
    false = [bool(found(compare(made(WANDERS, s), [made(WANDERS, s + 100)]))) for s in range(6)]
    assert sum(false) <= 1


def test_neighbours_that_resemble_each_other_widen():
    rng = np.random.default_rng(1)
    white = [widened(rng.standard_normal(12)) for _ in range(400)]
    walk = [widened(np.cumsum(rng.standard_normal(12))) for _ in range(400)]
    assert min(white) == 1.0
    assert np.median(white) < 1.6
    assert np.median(walk) > 4
    assert widened(np.zeros(12)) == 1.0


def test_repeats_of_a_bring_in_what_differs_between_runs():
    """Whole runs that differ by 8 %: without repeats that seems a change, with them it is what runs differ by."""
    runs = [made(STEADY, s, drift=0.08) for s in range(1, 6)]
    alone = figures(compare(runs[0], [runs[4]]))["tpot_ms.p50"]
    known = figures(compare(runs[0], [runs[4]], repeats=runs[1:4]))["tpot_ms.p50"]
    assert alone["high"] - alone["low"] < (known["high"] - known["low"]) / 4
    assert "4 runs of A" in known["how"]
    (g,) = compare(runs[0], [runs[4]], Options(gates=tuple(parse(["tpot_ms.p50>+15%"]))), repeats=runs[1:4])["gates"]
    assert "more of them would decide" in g["why"]  # not more requests: they are not what differs
    logs = np.log([read(r, Options()).points[0].figures["tpot_ms.p50"] for r in runs[:4]])
    half = quantile(0.95, 3) * logs.std(ddof=1) * math.sqrt(1 + 1 / 4)  # of a new run against the mean of four
    assert math.log(known["high"] / known["low"]) / 2 == pytest.approx(half)
    assert math.log(known["value"] * known["a"] / known["b"]) == pytest.approx(0)
    assert known["state"] == "open"
    assert any("run to run" in d["what"] for d in compare(runs[0], [runs[4]])["doubts"])
    assert not any("run to run" in d["what"] for d in compare(runs[0], [runs[4]], repeats=runs[1:4])["doubts"])
    assumed = figures(compare(runs[0], [runs[4]], Options(run_noise=0.08)))["tpot_ms.p50"]
    assert assumed["state"] == "open"


def test_several_bs_share_the_error():
    a, b = made(WANDERS, 1), made(WANDERS, 2, 0.1)
    one = figures(compare(a, [b]))["tpot_ms.p50"]
    many = compare(a, [b, *(made(WANDERS, s) for s in range(3, 7))])
    assert len(many["comparisons"]) == 5
    assert one["p"] == figures(many, b=0)["tpot_ms.p50"]["p"]
    assert one["p_adjusted"] < figures(many, b=0)["tpot_ms.p50"]["p_adjusted"]


def test_holm_is_holm():
    a, b = made(WANDERS, 1), made(WANDERS, 2, 0.1)
    c = Comparison(*(read(x, Options()).points[0] for x in (a, b)))
    fs = compared.findings(c, (), 0.05, False)
    compared.adjust(fs)
    mine = sorted((f for f in fs if f.claimed and f.change.p is not None), key=lambda f: f.change.p)
    m, least = len(mine), 0.0
    assert m >= 6
    for i, f in enumerate(mine):
        least = max(least, min(1.0, (m - i) * f.change.p))
        assert f.p_adjusted == least


def test_paired_intervals_are_narrower_where_lengths_differ():
    """Token counts from 8 to 64 make end-to-end times differ; request by request they do not."""
    a, b = made(STEADY, 1), made(STEADY, 2)
    d = [read(x, Options()).points[0] for x in (a, b)]
    paired, apart = (Comparison(*d, why).change("e2e_ms.mean") for why in ("", "apart"))
    assert paired.se < apart.se / 3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"asked_output_tokens": np.full(40, 99.0)}, "not the same"),
        ({"asked_output_tokens": np.full(40, np.nan), "asked_prompt_tokens": np.full(40, np.nan),
          "prompt_tokens": np.full(40, np.nan)}, ""),
    ],
)  # fmt: skip
def test_other_requests_do_not_pair(change, why):
    a = Service().closed(4, 40)
    b = dataclasses.replace(a, requests=a.requests.replace(**change))
    i, _, said = pairing(*(read(x, Options()).points[0] for x in (a, b)))
    assert not len(i)
    assert why in said


def with_manifest(run: Run, **changes: Any) -> Run:
    return dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, **changes))


WORKLOAD = {"classes": [{"name": "default", "prompt_tokens": "64", "slo": {}}], "seed": 1, "cache": "cold"}
OTHER = {"classes": [{"name": "default", "prompt_tokens": "512", "slo": {}}], "seed": 1, "cache": "warm"}
UNLIKE = [
    ("definitions", {"definitions": "1"}, ["definitions: 2 → 1"]),
    ("model", {"engine": {"model": "other"}}, ["model: numbers → other"]),
    ("workload", {"workload": OTHER}, ["workload.classes.0.prompt_tokens: 64 → 512", "workload.cache: cold → warm"]),
    ("slo", {"slo": {"ttft_ms": 500.0}}, ["slo.ttft_ms: – → 500.0"]),
]


@pytest.mark.parametrize(("kind", "changes", "named"), UNLIKE, ids=[k for k, *_ in UNLIKE])
def test_what_is_unlike_is_refused_by_name_and_allowed_by_name(kind, changes, named):
    a = with_manifest(Service().closed(4, 40), engine={"model": "numbers"}, workload=WORKLOAD)
    b = with_manifest(a, **changes)
    with pytest.raises(UsageError) as caught:
        compare(a, [b])
    for text in named:
        assert text in caught.value.message
    assert f"--allow {kind}" in caught.value.hint
    with pytest.raises(UsageError):  # leave for another kind is none for this
        compare(a, [b], Options(allow=("load",)))
    r = compare(a, [b], Options(allow=(kind,)))
    assert [u["kind"] for u in r["comparisons"][0]["unlike"]] == [kind] * len(named)
    assert any("unlike" in d["what"] for d in r["doubts"])


def test_commands_are_told_by_the_words_that_differ():
    words = ["run", "http://127.0.0.1:1", "--launch", "vllm serve tiny --port 1", "--concurrency", "8", "--out", "a"]
    a = with_manifest(Service().closed(4, 40), command=words)
    b = with_manifest(
        a, command=[*words[:3], "vllm serve tiny --port 1 --max-num-seqs 4", *words[4:7], "b", "--strict"]
    )
    (c,) = compare(a, [b])["comparisons"]
    assert c["changed"] == [{
        "what": "command", "a": "'vllm serve tiny --port 1'",
        "b": "'vllm serve tiny --port 1 --max-num-seqs 4' … --strict",
    }]  # fmt: skip
    (c,) = compare(a, [with_manifest(a, command=[*words[:7], "elsewhere"])])["comparisons"]
    assert c["changed"] == []


def test_a_seed_is_no_other_workload_and_does_not_pair():
    a = with_manifest(Service().closed(4, 40), workload=WORKLOAD)
    b = with_manifest(a, workload={**WORKLOAD, "seed": 2})
    (c,) = compare(a, [b])["comparisons"]
    assert c["unlike"] == []
    assert not c["points"][0]["paired"]


def test_load_points_that_are_in_one_only_are_named_or_refused():
    a = exam("llama-rate-4")
    (c,) = compare(a, [exam("llama-rate-8")])["comparisons"]
    assert [p["load"] for p in c["points"]] == ["concurrency 1"]
    assert (c["only_a"], c["only_b"]) == (["4 requests/s"], ["8 requests/s"])
    one, other = Service().closed(4, 40), Service().closed(8, 40)
    with pytest.raises(UsageError, match="no load point is in both: concurrency 4 → concurrency 8") as caught:
        compare(one, [other])
    assert "--allow load" in caught.value.hint
    assert compare(one, [other], Options(allow=("load",)))["comparisons"][0]["points"]
    with pytest.raises(UsageError, match="--at"):
        compare(a, [a], Options(at=("concurrency 3",)))
    (c,) = compare(a, [a], Options(at=("4 requests/s",)))["comparisons"]
    assert [p["load"] for p in c["points"]] == ["4 requests/s"]


def test_another_slo_judges_both(tmp_path):
    a = EXAM / "llama-base"
    r = compare(a, [EXAM / "llama-slots-1-of-4"], Options(slo={"ttft_ms": 1000.0}))
    f = figures(r)
    assert f["goodput_share"]["a"] == 1.0
    assert f["goodput_share"]["b"] < 0.3
    assert f["goodput_requests_per_s"]["state"] in ("worse", "open")
    save_baseline(tmp_path / "a.json", [a])
    with pytest.raises(UsageError, match="holds no requests to judge by another SLO"):
        compare(tmp_path / "a.json", [a], Options(slo={"ttft_ms": 1000.0}))


def test_a_baseline_says_what_its_run_says(tmp_path):
    a, b = exam("llama-base"), exam("llama-slots-1-of-4")
    path = tmp_path / "base.json"
    save_baseline(path, [a])
    assert path.stat().st_size < 60_000
    by_run, by_file = (compare(x, [b]) for x in (a, path))
    assert by_file["comparisons"][0]["points"][-1]["paired"]
    for name, f in figures(by_run).items():
        other = figures(by_file)[name]
        assert f["state"] == other["state"], name
        for key in (k for k in ("a", "value", "low", "high") if f[k] is not None):
            assert other[key] == pytest.approx(f[key], rel=0.01, abs=1e-6), (name, key)
    assert {k: v["state"] for k, v in waits(by_run).items()} == {k: v["state"] for k, v in waits(by_file).items()}


def test_a_baseline_of_several_runs_knows_what_runs_differ_by(tmp_path):
    runs = [made(STEADY, s, drift=0.08) for s in range(1, 6)]
    save_baseline(tmp_path / "b.json", runs[:4])
    f = figures(compare(tmp_path / "b.json", [runs[4]]))["tpot_ms.p50"]
    g = figures(compare(runs[0], [runs[4]], repeats=runs[1:4]))["tpot_ms.p50"]
    assert f["how"] == g["how"]
    assert f["high"] == pytest.approx(g["high"], rel=0.01)
    assert compare(tmp_path / "b.json", [runs[4]])["a"]["runs"] == 4


def test_a_large_baseline_stays_small_and_still_pairs(tmp_path):
    a, b = (noisy(STEADY, s, requests=3000) for s in (1, 2))
    save_baseline(tmp_path / "b.json", [a])
    assert (tmp_path / "b.json").stat().st_size < 300_000
    point = compare(tmp_path / "b.json", [b])["comparisons"][0]["points"][0]
    assert point["paired"]
    assert point["pairs"] == baseline.KEPT_ROWS
    point = compare(tmp_path / "b.json", [noisy(STEADY, 2, requests=2000)])["comparisons"][0]["points"][0]
    assert point["paired"]  # of a run that got less far, all that the baseline kept of that part
    assert 600 < point["pairs"] < 720


def test_an_slo_of_classes_gives_way_to_one_that_is_asked_for():
    run = Service().closed(4, 40)
    names = np.array(["default"] * 40, dtype=object)
    workload = {"classes": [{"name": "default", "slo": {"ttft_ms": 1.0}}]}
    run = with_manifest(dataclasses.replace(run, requests=run.requests.replace(**{"class": names})), workload=workload)
    assert figures(compare(run, [run]))["goodput_share"]["a"] == 0.0
    assert figures(compare(run, [run], Options(slo={"ttft_ms": 1e5})))["goodput_share"]["a"] == 1.0


def test_a_summary_alone_is_compared_by_its_own_intervals(tmp_path):
    for name in ("llama-base", "llama-slots-1-of-4"):
        (tmp_path / name).mkdir()
        text = json.dumps(app.show(EXAM / name).summary)
        (tmp_path / name / "summary.json").write_text(text)
    r = compare(*([p] if i else p for i, p in enumerate(sorted(tmp_path.glob("*/summary.json")))))
    assert not r["comparisons"][0]["points"][-1]["paired"]
    f = figures(r)["ttft_ms.p50"]
    assert (f["state"], f["how"]) == ("worse", "the intervals of the summaries")
    assert any("may not be alike" in d["what"] for d in r["doubts"])


def test_what_failed_counts():
    a = Service().closed(4, 60)
    outcome = a.requests["outcome"].copy()
    outcome[::3] = 3
    b = dataclasses.replace(a, requests=a.requests.replace(outcome=outcome))
    f = figures(compare(a, [b]))["failed_share"]
    assert f["state"] == "worse"
    assert f["value"] == pytest.approx(1 / 3)
    assert 0 < f["low"] < 1 / 3 < f["high"]


def test_no_failure_on_either_side_is_not_known_better_than_it_can_be():
    f = figures(compare(Service().closed(4, 40), [Service(seed=2).closed(4, 40)]))["failed_share"]
    assert f["value"] == 0
    assert f["high"] > 0.02


def test_partial_and_invalid_runs_are_said():
    a = with_manifest(Service().closed(4, 40), partial=True, partial_reason="the service died")
    r = compare(a, [a])
    assert sum("PARTIAL" in d["what"] for d in r["doubts"]) == 2
    r = compare(exam("llama-client-16"), [exam("llama-client-16")])
    assert sum("invalid" in d["what"] for d in r["doubts"]) == 2


HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e=cmd|' /C calc'!A0[red]"


def test_hostile_names_stay_text(tmp_path, capsys):
    a = with_manifest(Service().closed(4, 40), engine={"model": HOSTILE, "name": HOSTILE, "slots": 4})
    b = with_manifest(a, engine={"model": HOSTILE, "name": HOSTILE, "slots": 2, HOSTILE: HOSTILE})
    for name, run in (("a", a), ("b", b)):
        run.save(tmp_path / name)
    page = tmp_path / "c.html"
    assert call("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(page)) == 0
    out = capsys.readouterr()
    assert "\x1b" not in out.out + out.err
    assert "\u202e" not in out.out
    assert "[red]" in out.out
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r"(?:src|href)=.https?:", text)
    assert call("compare", "--save-baseline", str(tmp_path / "h.json"), str(tmp_path / "a")) == 0
    assert call("compare", str(tmp_path / "h.json"), str(tmp_path / "b")) == 0


@pytest.fixture(scope="module")
def kept() -> str:
    return json.dumps(baseline.as_json(read(noisy(STEADY, 1, requests=40), Options(), "kept")))


def _places(x: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = x.items() if isinstance(x, dict) else enumerate(x[:3]) if isinstance(x, list) else ()
    return [at, *(p for k, v in pairs for p in _places(v, (*at, k)))]


JUNK = st.sampled_from([None, -1, 1e308, "x", [], {}, True, [[]], {"a": None}, "NaN", 10**400, ""])


@given(data=st.data(), value=JUNK)
@settings(max_examples=80, deadline=None)
def test_a_damaged_baseline_is_named_or_read_never_a_crash(kept, data, value):
    raw = json.loads(kept)
    place = data.draw(st.sampled_from(_places(raw)[1:]))
    inner = raw
    for k in place[:-1]:
        inner = inner[k]
    if data.draw(st.booleans()):
        inner[place[-1]] = value
    elif isinstance(inner, dict):
        del inner[place[-1]]
    else:
        inner.pop()
    try:
        d = baseline.from_json(raw, "file.json")
    except UsageError as exc:
        assert "file.json" in exc.message  # noqa: PT017 - most mutations are refused, some are none
        return
    try:
        json.dumps(compare(d, [d], Options(allow=("load",))), allow_nan=False)
    except UsageError:
        return


def test_the_page_stands_alone_and_has_every_figure():
    r = compare(exam("llama-base"), [exam("llama-slots-1-of-4"), exam("llama-base")])
    page = render(r)
    assert "<script" not in page
    for name in ("output tokens/s", "TTFT p50", "queue: slot limit", "engine.slots"):
        assert name in page
    assert page.count("<figure") == 4


def test_energy_and_cost_where_they_are_known(tmp_path):
    runs = [drawn(s) for s in (1, 2)]
    r = compare(runs[0], [runs[1]])
    f = figures(r)
    assert f["energy_j_per_good_request"]["a"] > 0
    assert f["cost_per_good_request"]["a"] > 0
    assert f["cost_per_good_request"]["low"] is not None
    notes = r["comparisons"][0]["points"][0]["notes"]
    assert "USD" in notes["cost_per_good_request"]
    assert figures(compare(exam("llama-base"), [exam("llama-base")])).get("cost_per_good_request") is None
    offer = {"name": "mine", "terms": "on demand", "date": "2026", "source": "here"}
    books = [offer_of({**offer, "currency": c, "per_device_hour": x}, "test") for c, x in (("USD", 20), ("EUR", 2))]
    dear, euros = (read(runs[0], Options(offers=(book,))) for book in books)
    r = compare(runs[0], [dear])
    assert figures(r)["cost_per_good_request"]["state"] == "worse"
    assert "→ USD, mine" in r["comparisons"][0]["points"][0]["notes"]["cost_per_good_request"]
    f = figures(compare(dear, [euros], Options(metrics=("cost_per_good_request",))))["cost_per_good_request"]
    assert (f["value"], f["state"]) == (None, "open")
    assert "different currencies" in f["why"]


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["compare", "nowhere", "nowhere-else"], "nowhere"),
        (["compare", str(EXAM / "llama-base")], "compared with what"),
        (["compare", str(EXAM), str(EXAM)], "holds no whywait run"),
        (["compare", str(ROOT / "README.md"), str(EXAM / "llama-base")], "is not JSON"),
        (["compare", str(EXAM / "llama-base" / "case.json"), str(EXAM / "llama-base")], "neither a summary.json nor"),
        (["compare", str(EXAM / "llama-base"), str(EXAM / "vllm-base")], "model:"),
        (["compare", "a", "b", "--allow", "everything"], "--allow"),
        (["compare", "a", "b", "--threshold", "much"], "--threshold"),
        (["compare", "a", "b", "--threshold", "120%"], "--threshold"),
        (["compare", "a", "b", "--run-noise", "-3%"], "--run-noise"),
        (["compare", "a", "b", "--fail-if", "speed<5"], "no comparison has 'speed'"),
        (["compare", "a", "b", "--devices", "0"], "--devices"),
        (["compare", "a", "b", "--price-per-hour", "2"], "currency"),
        (["compare", str(EXAM / "llama-base"), str(EXAM / "llama-base"), "--metric", "speed"], "no figure 'speed'"),
        (["compare", "--save-baseline", "/nowhere/b.json", str(EXAM / "llama-base")], "cannot write"),
        (["compare", "--save-baseline", "b.json", "a", "--json"], "compares nothing"),
        (["compare", "a", "b", "--html", "/nowhere/c.html"], "cannot write a report"),
    ],
)  # fmt: skip
def test_mistakes_are_one_clear_line(argv, word, capsys):
    assert call(*argv) == 2
    err = capsys.readouterr().err
    assert word in err
    assert "Traceback" not in err
    assert sum(line.startswith("whywait") for line in err.splitlines()) == 1


def test_json_is_json_and_the_terminal_tells_it(capsys):
    a, b = str(EXAM / "llama-base"), str(EXAM / "llama-slots-1-of-4")
    assert call("compare", a, b, "--json") == 0
    r = json.loads(capsys.readouterr().out)
    assert r["kind"] == "whywait comparison"
    assert call("compare", a, b) == 0
    out = capsys.readouterr().out
    assert r["headline"].split(" (in")[0][:60] in out
    assert "changed: engine.slots: 4 → 1" in out
    assert "queue: slot limit" in out


def test_an_empty_run_is_refused():
    with pytest.raises(UsageError, match="no load point"):
        compare(make_run([], points=[]), [Service().closed(4, 40)])


def test_digests_of_one_run_are_the_same():
    a, b = (json.dumps(baseline.as_json(read(EXAM / "llama-rate-4", Options()))) for _ in range(2))
    assert a == b
    assert digest.PIECES >= 8


@given(messy_runs(), messy_runs())
@settings(max_examples=8, deadline=None)
def test_whatever_a_run_holds_is_compared_or_refused(a, b):
    for x, y in ((a, b), (a, a)):
        try:
            r = compare(x, [y], Options(allow=("load", "workload", "model", "slo")))
        except UsageError:
            continue
        json.dumps(r, allow_nan=False)
        render(r)
        for f in (*figures(r).values(), *waits(r).values()):
            if f["low"] is not None and f["high"] is not None:
                assert f["low"] <= f["value"] <= f["high"]
            assert f["state"] in STATES
        if x is y:
            assert found(r) == []


def test_imported_runs_are_compared():
    """No workload, nothing asked for is known."""
    runs = []
    for seed, slower in ((1, 0.0), (2, 0.3)):
        run = noisy(STEADY, seed, slower)
        nan = np.full(len(run.requests), np.nan)
        requests = run.requests.replace(asked_prompt_tokens=nan, asked_output_tokens=nan, engine_prefill_ms=nan)
        run = with_manifest(dataclasses.replace(run, requests=requests), made_by="imported", workload={}, engine={})
        runs.append(run)
    r = compare(runs[0], [runs[1]])
    assert figures(r)["tpot_ms.p50"]["state"] == "worse"
    assert r["comparisons"][0]["untold"] == ["the model", "the workload"]
    assert any("may not be alike" in d["what"] for d in r["doubts"])


def test_alike_blocks_count_for_fewer():
    """A service that slows down all the time: its blocks follow a trend, and say little of another run."""
    a, b = (Service(noise=0.1, seed=s).closed(4, 120) for s in (1, 2))
    trend = 1 + np.arange(120) / 120
    slowing = [dataclasses.replace(r, requests=r.requests.replace(
        first_ns=r.requests["sent_ns"] + (r.requests["first_ns"] - r.requests["sent_ns"]) * t))
        for r, t in ((a, trend), (b, trend[::-1]))]  # fmt: skip
    steady, drifts = (Comparison(*(read(x, Options()).points[0] for x in runs)).change("ttft_ms.mean")
                      for runs in ((a, b), slowing))  # fmt: skip
    assert 2 <= drifts.df < 4
    assert 4 < steady.df <= 11
    assert drifts.se > 5 * steady.se
