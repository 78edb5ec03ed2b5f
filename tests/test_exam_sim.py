"""The simulated part of the exam: its cases make sense, and today's rules find what was built in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whywait import exam_sim
from whywait.cli import main
from whywait.errors import UsageError
from whywait.exam_score import confident_wrongs, mark
from whywait.judge.vocabulary import CAUSES

QUICK = ("slots", "kv", "cache-off", "seldom", "few", "prefill")


@pytest.fixture(scope="module")
def round_two():
    """One round on an engine and a machine that are not those of the first."""
    return {c.case.fault: c for c in exam_sim.cases(2)[-14:]}


def test_each_round_has_every_bottleneck_once_on_a_service_of_its_own(round_two):
    assert len(round_two) == 14
    assert {c.deployment.machine.name for c in round_two.values()} == {"A100 80GB SXM"}
    for c in round_two.values():
        assert set(c.case.accepted) | set(c.case.symptoms) <= set(CAUSES)
        assert not set(c.case.accepted) & set(c.case.symptoms)


def test_the_same_seed_makes_the_same_cases_and_another_makes_others():
    first, again, other = (exam_sim.cases(1, seed, "sim-slots-*")[0] for seed in (5, 5, 6))
    assert first == again
    assert first.case.workload != other.case.workload


@pytest.mark.parametrize("kind", QUICK)
def test_what_was_built_in_is_claimed_first(kind, round_two):
    c = round_two[kind]
    marked = mark(c.case, exam_sim.simulated(c).verdicts)
    assert marked.mark == "right", (marked.claimed, marked.undecided)


def test_a_queue_while_there_is_a_place_for_each_request_is_no_want_of_places():
    """Eight long prompts for a step that holds a quarter of one: they wait for the budget, the places are free."""
    few = next(c for c in exam_sim.cases(1) if c.case.fault == "few")
    deployment = exam_sim.service(0, max_seqs=8, token_budget=512)
    case = replace(few.case, workload=exam_sim.chat(4000, 4), points=exam_sim._closed(8, 10.0))
    found = exam_sim.simulated(replace(few, case=case, deployment=deployment))
    assert found.summary["points"][1]["phases"]["queue"]["share"] > 0.2
    v = next(v for v in found.verdicts if v.cause == "slot limit" and v.point == 1)
    assert v.state == "fails"
    assert "8 places" in v.evidence[0]


def test_a_wide_engine_does_not_have_the_limit_of_a_narrow_one(round_two):
    """The same service without what was built in: its cause is not claimed."""
    slots = round_two["slots"]
    wide = exam_sim.SimCase(slots.case, exam_sim.service(1))
    assert "slot limit" not in mark(wide.case, exam_sim.simulated(wide).verdicts).claimed


def test_the_page_tells_per_bottleneck_what_was_right_and_names_the_rest(round_two):
    right = mark(round_two["slots"].case, exam_sim.simulated(round_two["slots"]).verdicts)
    missed = mark(round_two["kv"].case, [])
    page = exam_sim.markdown([right, missed])
    assert "| slots (slot limit) | 1 | 1 (100%) | 0 | 0 | 0 |" in page
    assert "| all | 2 | 1 (50%) | 0 | 1 | 0 |" in page
    assert f"- {missed.case.name}: undecided; claimed nothing; true kv space" in page
    assert not confident_wrongs([right, missed])


def test_no_rounds_and_unknown_names_are_refused():
    with pytest.raises(UsageError, match="0 rounds"):
        exam_sim.cases(0)
    with pytest.raises(UsageError, match="no simulated case"):
        exam_sim.cases(1, names="nothing-*")


def test_the_verb_lists_and_scores(capsys):
    assert main(["exam", "simulate", "--rounds", "1", "--cases", "sim-slots-0", "--list"]) == 0
    assert "slot limit" in capsys.readouterr().out
    assert main(["exam", "simulate", "--rounds", "1", "--cases", "sim-slots-0"]) == 0
    assert "right first 1 (100%)" in capsys.readouterr().out
