"""One Run per cause, with what real engines showed of it, and its look-alikes: named with it, not without."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from tests.analysis_runs import MS, S, Service, gauge_rows, join, make_run, stream
from whywait.analyze.summary import summarize
from whywait.analyze.window import with_windows
from whywait.core.run import Run
from whywait.core.table import Table
from whywait.engines import ENGINES
from whywait.judge.diagnose import headline, judge
from whywait.judge.verdict import Verdict
from whywait.judge.vocabulary import CAUSES, FAMILIES


def of(run: Run, engine: str = "vllm") -> list[Verdict]:
    run = with_windows(run)
    found = judge(run, summarize(run), dict(ENGINES[engine].flags))
    assert all(v.cause in CAUSES for v in found)
    return found


def holds(run: Run, engine: str = "vllm") -> list[str]:
    return [v.cause for v in of(run, engine) if v.state == "holds"]


def the(run: Run, cause: str, state: str = "holds", engine: str = "vllm") -> Verdict:
    return next(v for v in of(run, engine) if (v.cause, v.state) == (cause, state))


def at(run: Run, values: dict[str, Any], source: str = "metrics/0", **labels: str) -> list[dict[str, Any]]:
    """Readings four times a second over a run: a number or a function of 0..1 is a gauge, ``("rate", x)`` a counter."""
    start, end = int(run.points["start_ns"].min()), int(run.points["end_ns"].max())
    times = list(range(start, end + 1, S // 4))
    rows = []
    for name, value in values.items():
        for t in times:
            part = (t - start) / (end - start)
            v = value(part) if callable(value) else value[1] * (t - start) / S if isinstance(value, tuple) else value
            rows += gauge_rows(name, [(t, float(v))], source, **labels)
    return rows


def read(run: Run, *parts: list[dict[str, Any]], **manifest: Any) -> Run:
    rows = [{"answered_ns": r["asked_ns"], **r} for part in parts for r in part]
    m = dataclasses.replace(run.manifest, **manifest)
    return dataclasses.replace(run, readings=Table.from_rows("readings", rows), manifest=m)


def pair(high: int = 4, slots: int = 4, **service: Any) -> Run:
    """One at a time, then ``high``: long enough for steady windows."""
    made = Service(slots=slots, **service)
    return join([made.closed(1, 16), made.closed(high, 16 * high)])


def threads(run: Run, source: str, **spent: tuple[float, float]) -> list[dict[str, Any]]:
    """(seconds on a core, seconds ready without one) per second, by the name of the thread's process."""
    rows = []
    for i, (name, (ran, waited)) in enumerate(spent.items()):
        labels = {"process": name.replace("_", "::"), "thread": name, "tid": str(i), "pid": str(i)}
        rows += at(run, {"thread_cpu_seconds_total": ("rate", ran), "thread_wait_seconds_total": ("rate", waited)},
                   source, **labels)  # fmt: skip
    total, wait = sum(r for r, _ in spent.values()), sum(w for _, w in spent.values())
    return rows + at(
        run, {"cpu_seconds_total": ("rate", total), "run_queue_wait_seconds_total": ("rate", wait)}, source
    )


def test_the_vocabulary_is_closed_and_every_family_known() -> None:
    assert {c.family for c in CAUSES.values()} == set(FAMILIES)
    assert all(c.meaning for c in CAUSES.values())


# -- the host ------------------------------------------------------------------------------------------------------


def test_a_neighbour_on_the_engines_cores() -> None:
    run = pair()
    busy = at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host")
    noisy = read(run, threads(run, "process/engine", python=(0.45, 0.53)), busy)
    v = the(noisy, "noisy neighbour")
    assert holds(noisy)[0] == "noisy neighbour"
    assert v.share == pytest.approx(0.53, abs=0.03)
    calm = read(run, threads(run, "process/engine", python=(0.95, 0.03)), busy)
    assert "noisy neighbour" not in holds(calm)


def test_a_scheduler_that_waits_beside_a_spinning_worker_does_no_harm() -> None:
    run = pair()
    busy = at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host")
    spent = threads(run, "process/engine", VLLM_Worker=(0.9, 0.08), VLLM_EngineCor=(0.02, 0.97))
    assert "noisy neighbour" not in holds(read(run, spent, busy))


def test_threads_that_wait_for_each_other_have_no_neighbour() -> None:
    run = pair()
    spent = threads(run, "process/engine", a=(0.5, 0.5), b=(0.5, 0.5))
    alone = read(run, spent, at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host"))
    assert the(alone, "noisy neighbour", "undecided").next_step
    unseen = read(run, spent)
    assert the(unseen, "noisy neighbour", "undecided").next_step


def test_a_proxy_that_hardly_runs_is_not_a_starved_engine() -> None:
    run = pair()
    busy = at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host")
    assert "noisy neighbour" not in holds(read(run, threads(run, "process/engine", python=(0.005, 0.05)), busy))


def quota_rows(run: Run, throttled: float) -> list[dict[str, Any]]:
    return at(run, {"cgroup_quota_cores": 0.5, "cgroup_periods_total": ("rate", 10.0),
                    "cgroup_throttled_periods_total": ("rate", 10.0 * throttled),
                    "cgroup_throttled_seconds_total": ("rate", 0.4 * throttled)}, "process/engine")  # fmt: skip


def test_a_cpu_quota_used_up() -> None:
    run = pair()
    spent = threads(run, "process/engine", python=(0.49, 0.5))
    busy = at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host")
    assert holds(read(run, spent, busy, quota_rows(run, 0.9)))[0] == "cpu quota"
    assert "noisy neighbour" not in holds(read(run, spent, busy, quota_rows(run, 0.9)))
    calm = threads(run, "process/engine", python=(0.3, 0.02))
    assert "cpu quota" not in holds(read(run, calm, quota_rows(run, 0.02)))


def test_two_causes_at_once_are_both_named() -> None:
    run = pair(high=4, slots=2)
    spent = threads(run, "process/engine", python=(0.6, 0.4))
    busy = at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host")
    found = of(read(run, spent, busy, quota_rows(run, 0.9)))
    first = [v for v in found if v.state == "holds" and not v.beyond][:2]
    assert {v.cause for v in first} == {"slot limit", "cpu quota"}
    assert all(v.claim in headline(found) for v in first)


def test_a_frontend_busier_than_its_model() -> None:
    run = pair(prefill_ms=5.0, gap_ms=4.0)
    busy = at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host")
    own = threads(run, "process/engine", python=(0.4, 0.35), VLLM_Worker=(0.3, 0.05), VLLM_EngineCor=(0.1, 0.3))
    assert "host CPU" in holds(read(run, own, busy))
    idle = threads(run, "process/engine", python=(0.05, 0.02), VLLM_Worker=(0.9, 0.05))
    assert "host CPU" not in holds(read(run, idle, busy))
    spins = threads(run, "process/engine", python=(0.05, 0.02), VLLM_Worker=(0.9, 0.05), VLLM_EngineCor=(0.6, 0.38))
    assert "host CPU" not in holds(read(run, spins, busy))


def test_a_device_that_is_not_fed_is_the_hosts_doing() -> None:
    run = pair(prefill_ms=5.0, gap_ms=20.0)
    plain = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, engine={"slots": 4}))
    fed = read(plain, at(run, {"busy_share": 0.97}, "gpu", gpu="0"))
    assert "host CPU" not in holds(fed)
    starved = read(plain, at(run, {"busy_share": 0.6}, "gpu", gpu="0"))
    v = the(starved, "host CPU")
    assert v.of == "device time"
    assert v.share == pytest.approx(0.4, abs=0.03)
    assert "/start_profile" in v.next_step
    beside = read(plain, at(run, {"busy_share": 0.01}, "gpu", gpu="0"))  # the engine computes somewhere else
    assert "host CPU" not in holds(beside)
    two = dataclasses.replace(starved.manifest, engine={"slots": 4, "devices": 2})
    both = dataclasses.replace(starved, manifest=two)
    assert "host CPU" not in holds(both)  # one may wait for the other
    assert the(both, "host CPU", "undecided").next_step
    lacking = threads(run, "process/engine", python=(0.6, 0.4))
    assert "host CPU" not in holds(read(plain, at(run, {"busy_share": 0.6}, "gpu", gpu="0"), lacking))


# -- the path ------------------------------------------------------------------------------------------------------


def delayed(run: Run, ms: float, spread_ms: float = 0.0) -> Run:
    """Everything comes later by that; TCP sees nothing of it, since a proxy answers."""
    late = np.random.default_rng(1).uniform(ms, ms + spread_ms, len(run.requests)) * MS
    req, ids = run.requests, {int(i): int(t) for i, t in zip(run.requests["id"], late, strict=True)}
    moved = {k: req[k] + late for k in ("accepted_ns", "first_ns", "first_answer_ns", "last_ns", "end_ns")}
    shift = np.array([ids[int(i)] for i in run.chunks["id"]], dtype=np.int64)
    return dataclasses.replace(run, requests=req.replace(**moved, rtt_ns=np.full(len(req), 11_000.0)),
                               chunks=run.chunks.replace(t_ns=run.chunks["t_ns"] + shift))  # fmt: skip


def test_a_constant_delay_that_tcp_does_not_show_is_the_path() -> None:
    run = delayed(pair(), 300)
    v = the(run, "network latency", engine="llama.cpp")
    assert v.how == "inferred"
    assert "network latency" not in holds(pair())
    idle = at(run, {"waiting": 0.0, "running": 4.0})
    assert "slot limit" not in holds(read(run, idle), "llama.cpp")


def test_a_delay_that_varies_much_or_a_starved_host_is_not_called_the_path() -> None:
    assert "network latency" not in holds(delayed(pair(), 40, 900), "llama.cpp")
    run = delayed(pair(), 300)
    busy = at(run, {"engine_cores_busy_seconds_total": ("rate", 1.0)}, "host")
    starved = read(run, threads(run, "process/engine", python=(0.2, 0.7)), busy)
    assert "network latency" not in holds(starved, "llama.cpp")
    assert the(starved, "network latency", "undecided", "llama.cpp").next_step


def coalesced(run: Run, reads: int = 1) -> Run:
    """The chunks of each request arrive in so many reads."""
    t, ids = run.chunks["t_ns"].astype(np.float64), run.chunks["id"]
    low = np.full(len(t), np.nan)
    for i in np.unique(ids):
        rows = np.flatnonzero(ids == i)
        for part in np.array_split(rows, reads):
            low[part] = t[rows[0]] - 1
            t[part] = t[part[-1]]
    last = run.requests["last_ns"]
    first = last if reads == 1 else run.requests["first_ns"]
    decode = np.full(len(last), 300.0)
    req = run.requests.replace(first_ns=first, engine_decode_ms=decode)
    return dataclasses.replace(run, chunks=run.chunks.replace(t_ns=t.astype(np.int64), t_low_ns=low), requests=req)


LATE = {"coalesced_reads": 100, "coalesced_reads_while_late": 95, "read_lag_ms": {"p50": 12.0, "p99": 120.0}}
TIMELY = {"coalesced_reads": 100, "coalesced_reads_while_late": 10, "read_lag_ms": {"p50": 0.2, "p99": 5.0}}


def test_tokens_that_arrive_together_though_we_were_in_time_were_held_back() -> None:
    run = coalesced(pair())
    assert holds(read(run, client=TIMELY))[0] == "buffering proxy"
    assert "buffering proxy" not in holds(read(pair(), client=TIMELY))
    assert the(read(run, client=TIMELY), "buffering proxy").share == pytest.approx(0.85, abs=0.1)


def test_tokens_that_arrive_together_while_we_were_late_are_our_own_doing() -> None:
    run = coalesced(pair(), 6)
    mine = threads(run, "process/client", python=(0.02, 0.9))
    assert holds(read(run, mine, client=LATE))[0] == "the client itself"
    assert "buffering proxy" not in holds(read(run, mine, client=LATE))
    assert "the client itself" not in holds(
        read(pair(), threads(run, "process/client", python=(0.02, 0.01)), client=TIMELY)
    )


def test_a_client_late_by_less_than_a_gap_did_not_bring_tokens_together() -> None:
    run = coalesced(pair())
    mine = threads(run, "process/client", python=(0.02, 0.9))
    slight = {"coalesced_reads": 100, "coalesced_reads_while_late": 80, "read_lag_ms": {"p50": 0.2, "p99": 1.4}}
    assert holds(read(run, mine, client=slight))[0] == "buffering proxy"


# -- queues --------------------------------------------------------------------------------------------------------


def test_a_queue_that_grows_is_the_rate_and_one_that_stays_is_the_limit() -> None:
    made = Service(slots=2, prefill_ms=20.0, gap_ms=10.0)  # 170 ms each, 11.8 requests/s at most
    fast = made.open([40 * MS] * 240, rate=25)
    assert holds(fast)[0] == "rate beyond capacity"
    slow = made.open([250 * MS] * 60, rate=4)
    assert "rate beyond capacity" not in holds(slow)
    flat = pair(8, 2)
    assert holds(flat)[0] == "slot limit"
    assert "rate beyond capacity" not in holds(flat)


def waiting_run(kv: float, running: float, preempted: float = 0.0) -> Run:
    run = pair(8, 2)
    run = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, engine={}))
    middle = (int(run.points["start_ns"][1]) - int(run.points["start_ns"][0])) / (
        int(run.points["end_ns"].max()) - int(run.points["start_ns"][0])
    )
    rows = at(run, {"running": lambda x: running if x >= middle else 1,
                    "waiting": lambda x: 6.0 if x >= middle else 0, "kv_use": lambda x: kv if x >= middle else 0.1,
                    "preemptions_total": ("rate", preempted)})  # fmt: skip
    return read(run, rows)


def test_full_kv_space_is_not_a_slot_limit() -> None:
    full = waiting_run(0.97, 3.0, 2.0)
    assert holds(full)[0] == "kv space"
    assert "slot limit" not in holds(full)
    assert "--gpu-memory-utilization" in the(full, "kv space").lever
    assert "kv space" not in holds(waiting_run(0.2, 2.0))


def test_few_long_answers_that_hold_the_places() -> None:
    rows, chunks, free, at_ns = [], [], [S, S], 0
    waiting = [S] * 8
    for i in range(96):
        tokens = 120 if i % 4 == 0 else 4
        sent = waiting.pop(waiting.index(min(waiting)))
        place = free.index(min(free))
        first = max(sent, free[place]) + 20 * MS
        times = [first + k * 10 * MS for k in range(tokens)]
        free[place] = at_ns = times[-1]
        waiting.append(at_ns + MS)
        rows.append({"id": i, "sent_ns": sent, "accepted_ns": first, "first_ns": first, "last_ns": at_ns,
                     "end_ns": at_ns, "output_tokens": tokens, "content_chunks": tokens, "engine_prefill_ms": 20.0,
                     "prompt_tokens": 20, "connect_ns": 0, "rtt_ns": 20_000})  # fmt: skip
        chunks += stream(i, times)
    run = make_run(rows, chunks, points=[{"target": 8}], engine={"slots": 2})
    assert holds(run)[:2] == ["long requests", "slot limit"]
    assert "long requests" not in holds(pair(8, 2))


def test_refused_requests() -> None:
    run = pair()
    outcome = run.requests["outcome"].copy()
    outcome[20::2] = 4
    shed = dataclasses.replace(run, requests=run.requests.replace(outcome=outcome))
    assert holds(shed)[0] == "load shedding"
    assert "load shedding" not in holds(run)
    outcome[:] = 4
    assert holds(dataclasses.replace(run, requests=run.requests.replace(outcome=outcome))) == ["load shedding"]


# -- caches and drafts ---------------------------------------------------------------------------------------------


def shared(hit: float, share: float = 0.9, groups: int = 1, looked: float | None = None) -> Run:
    run = pair(prefill_ms=300.0)
    n = len(run.requests)
    cached = np.full(n, np.rint(100 * hit))
    work = {"classes": [{"name": "default", "share": 1.0, "shared": share, "groups": groups, "turns": "1"}],
            "cache": "cold"}  # fmt: skip
    run = dataclasses.replace(run, requests=run.requests.replace(cached_tokens=cached))
    rows = (
        []
        if looked is None
        else at(run, {"prefix_queries_total": ("rate", looked), "prefix_hits_total": ("rate", hit * looked)})
    )
    return read(run, rows, workload=work)


def test_equal_beginnings_computed_again() -> None:
    assert holds(shared(0.0))[0] == "prefix cache off"
    assert "--enable-prefix-caching" in the(shared(0.0), "prefix cache off").lever
    assert holds(shared(0.03, groups=6))[0] == "prefix-cache thrash"
    assert holds(shared(0.0, groups=6, looked=100.0))[0] == "prefix-cache thrash"
    assert holds(shared(0.0, looked=0.0))[0] == "prefix cache off"
    assert not {"prefix cache off", "prefix-cache thrash"} & set(holds(shared(0.85)))


def test_a_low_hit_rate_is_normal_where_nothing_equal_was_sent() -> None:
    causes = {"prefix cache off", "prefix-cache thrash"}
    assert not causes & set(holds(shared(0.0, share=0.0)))
    assert not causes & set(holds(shared(0.0, groups=500)))  # each beginning came once
    assert not causes & set(holds(pair(prefill_ms=300.0)))  # the workload does not say


def test_drafts_that_never_agree() -> None:
    run = pair(prefill_ms=5.0)
    poor = {
        "draft_tokens_total": ("rate", 100.0),
        "accepted_tokens_total": ("rate", 1.0),
        "draft_rounds_total": ("rate", 25.0),
    }
    v = the(read(run, at(run, poor)), "poor speculation")
    assert holds(read(run, at(run, poor)))[0] == "poor speculation"
    assert "--speculative-config" in v.lever
    good = {**poor, "accepted_tokens_total": ("rate", 80.0)}
    assert "poor speculation" not in holds(read(run, at(run, good)))


# -- about which load ----------------------------------------------------------------------------------------------


def test_a_diagnosis_speaks_of_what_fits_and_says_what_lies_beyond() -> None:
    made = Service(slots=4)
    run = join([made.closed(c, 16 * c) for c in (1, 4, 16)])
    climbing = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, journey={"climbs": True}))
    v = the(climbing, "slot limit")
    assert v.beyond
    assert holds(climbing)[0] != "slot limit"
    asked = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, command=["sweep", "URL"]))
    assert holds(asked)[0] == "slot limit"


def test_with_an_slo_the_verdict_is_about_the_load_that_breaks_it() -> None:
    made = Service(slots=4)
    run = join([made.closed(c, 16 * c) for c in (1, 4, 8, 16)])
    strict = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, slo={"ttft_ms": 100.0}))
    assert the(strict, "slot limit").where == "concurrency 8"


def test_every_verdict_is_plain_json() -> None:
    for v in of(pair(8, 2)):
        assert json.loads(json.dumps(v.as_dict()))["cause"] == v.cause
