"""Holds the bill's arithmetic against a public record of measured services and prints the table of ``docs/bill.md``.
``python tools/validate_bill.py [--data ../shared/measured] [--json FILE]``; a minute.

The record is the ml.energy leaderboard (``mlenergy.csv``, read here, not kept): of each service the devices, their mean
power together, the sequences in work, the mean output length and the output tokens per second, and, published beside
them, joules per output token and per request. From the former a Run is made as another tool's file would give it: a
closed loop in its steady state, requests of uneven length, each device with a power gauge and an energy
counter, read twice a second, of a power that swings. The
bill of that Run must give the latter.

What this shows and what not: in the record joules per token *are* power / throughput, and joules per request *are* that
× the mean output length, in every row to the last digit. So it tests the bill's arithmetic (windows, edges, partial
requests, devices, units), not a meter, and nothing failed or was late in it: effective and raw figures are the same.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whywait.analyze.bill import Ask, bill
from whywait.core.columns import MODES
from whywait.core.run import Manifest, Run
from whywait.core.table import Table
from whywait.physics.prices import Offer
from whywait.units import NS_PER_S

ROOT = Path(__file__).resolve().parents[1]
BOUND = 0.02
UNEVEN = (0.4, 0.8, 1.2, 1.6)  # lengths of successive requests of a stream, of the mean
LEAST_S, HZ = 60.0, 2.0
WAVES, SWING = 7, 0.3  # power goes up and down so often in the window, by this share of its mean
START_NS = 5 * NS_PER_S
OFFER = Offer("a dollar an hour", "on demand", "USD", "2026", "made up, to test the arithmetic", per_device_hour=1.0)


class Row(NamedTuple):
    """A measured service: watts of all its devices, tokens per second, and what is published per token and request."""

    task: str
    gpu: str
    devices: int
    batch: float
    tokens: float
    tokens_per_s: float
    watts: float
    j_per_token: float
    j_per_request: float
    itl_ms: float


class Off(NamedTuple):
    """The bill's figures over those published, less 1."""

    token: float
    request: float
    money: float
    row: Row


def read(path: Path) -> tuple[list[Row], Counter[str]]:
    """The rows, and why others were left out."""
    rows, out = [], Counter[str]()
    with path.open(encoding="utf-8") as file:
        for r in csv.DictReader(file):
            try:
                row = Row(r["task"], r["gpu_model"], int(r["num_gpus"]), float(r["avg_batch_size"]),
                          float(r["avg_output_len"]), float(r["output_throughput_tokens_per_sec"]),
                          float(r["avg_power_watts"]), float(r["energy_per_token_joules"]),
                          float(r["energy_per_request_joules"]), float(r["median_itl_ms"]))  # fmt: skip
            except ValueError:
                out["a figure is missing"] += 1
                continue
            if not all(math.isfinite(x) and x > 0 for x in row[2:]):
                out["a figure is not above 0"] += 1
                continue
            rows.append(row)
    return rows, out


def run_of(r: Row) -> Run:
    """The row as a Run: as many streams as sequences were in work, each with one request after the other."""
    streams = max(1, round(r.batch))
    cycle = np.array([max(1, round(r.tokens * u)) for u in UNEVEN[:-1]])
    cycle = np.append(cycle, max(1, round(len(UNEVEN) * r.tokens) - int(cycle.sum())))
    per_s = r.tokens_per_s / streams  # of a stream
    period = float(cycle.sum()) / per_s
    turns = max(1, math.ceil(LEAST_S / period))
    rng = np.random.default_rng(1)
    n = len(cycle) * (turns + 2)
    lengths = np.tile(cycle, turns + 2)
    ends = np.cumsum(lengths) / per_s
    begin = (np.concatenate(([0.0], ends[:-1])) - period)[None, :] - rng.uniform(0, period, streams)[:, None]
    sent = np.rint(begin.ravel() * NS_PER_S) + START_NS
    took = np.tile(lengths / per_s * NS_PER_S, streams)
    end = sent + np.rint(took)
    window = (START_NS, START_NS + round(turns * period * NS_PER_S))
    size = n * streams
    requests = Table("requests", {
        "point": np.zeros(size, dtype=np.int64), "id": np.arange(size), "replica": np.zeros(size, dtype=np.int64),
        "attempt": np.ones(size, dtype=np.int64), "sent_ns": sent, "first_ns": sent, "first_answer_ns": sent,
        "last_ns": end, "end_ns": end, "output_tokens": np.tile(lengths, streams).astype(float),
        "outcome": np.zeros(size, dtype=np.int8), "fault": np.zeros(size, dtype=np.int8),
    })  # fmt: skip
    point = {"point": 0, "mode": MODES[0], "target": streams, "planned": size, "start_ns": int(sent.min()),
             "end_ns": int(end.max()), "steady_start_ns": window[0], "steady_end_ns": window[1]}  # fmt: skip
    made = Manifest(made_by="imported", engine={"devices": r.devices}, machine={"gpus": [{"name": r.gpu}] * r.devices})
    return Run(made, Table.from_rows("points", [point]), requests, Table.empty("chunks"), Table.empty("steps"),
               _readings(r, window))  # fmt: skip


def _readings(r: Row, window: tuple[int, int]) -> Table:
    seconds = (window[1] - window[0]) / NS_PER_S
    at = np.linspace(-1.3, seconds + 1.3, min(400, int(seconds * HZ)))
    t = np.rint(at * NS_PER_S).astype(np.int64) + window[0]
    each, turn = r.watts / r.devices, 2 * math.pi * WAVES / seconds
    watts = each * (1 + SWING * np.sin(turn * at))
    joules = each * (at + SWING / turn * (1 - np.cos(turn * at)))
    cols: dict[str, list[Any]] = {k: [] for k in ("asked_ns", "answered_ns", "source", "name", "labels", "value")}
    for gpu in range(r.devices):
        # A counter has counted since the driver was loaded, and not in all devices as much.
        for name, values in (("energy_joules_total", 1e6 * (gpu + 1) + joules), ("power_watts", watts)):
            for key, value in (("source", "gpu"), ("name", name), ("labels", json.dumps({"gpu": str(gpu)}))):
                cols[key].append(np.full(len(at), value, dtype=object))
            cols["asked_ns"].append(t)
            cols["answered_ns"].append(t + 1_000_000)
            cols["value"].append(values)
    return Table("readings", {k: np.concatenate(v) for k, v in cols.items()})


def off(r: Row) -> Off:
    """The bill of a row against what was published of it; money against devices × an hour's price / tokens."""
    point = bill(run_of(r), Ask((OFFER,)))["points"][0]
    energy, money = point["energy"], point["money"][0]
    usd = r.devices / 3600 / r.tokens_per_s * 1e6
    return Off(energy["per_million_effective_tokens"]["value"] / 1e6 / r.j_per_token - 1,
               energy["per_good_request"]["value"] / r.j_per_request - 1,
               money["per_million_effective_tokens"]["value"] / usd - 1, r)  # fmt: skip


def table(found: Sequence[Off]) -> list[str]:
    """A line per machine and number of devices, and one of all."""
    groups = sorted({(o.row.gpu, o.row.devices) for o in found})
    lines = ["| machine | rows | J per token, worst | J per request, worst | $ per token, worst | within 2 % |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, mine in [*((f"{d} × {g}", [o for o in found if (o.row.gpu, o.row.devices) == (g, d)]) for g, d in groups),
                       ("all", list(found))]:  # fmt: skip
        worst = [max(abs(x) for x in each) for each in zip(*((o.token, o.request, o.money) for o in mine), strict=True)]
        good = sum(max(abs(o.token), abs(o.request)) <= BOUND for o in mine)
        lines.append(
            f"| {name} | {len(mine)} | {' | '.join(f'{x * 100:.3f} %' for x in worst)} | {good} of {len(mine)} |"
        )
    return lines


def tied(rows: Iterable[Row]) -> tuple[int, int, float]:
    """In how many rows the published figures are power / throughput and that × length to 1e-9; and the median of
    tokens per second × ITL / sequences, which in a steady state would be near 1."""
    rows = list(rows)
    token = sum(math.isclose(r.watts / r.tokens_per_s, r.j_per_token, rel_tol=1e-9) for r in rows)
    request = sum(math.isclose(r.j_per_token * r.tokens, r.j_per_request, rel_tol=1e-9) for r in rows)
    little = float(np.median([r.tokens_per_s * r.itl_ms / 1e3 / r.batch for r in rows]))
    return token, request, little


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "measured", help="the record")
    parser.add_argument("--json", type=Path, help="keep every error there")
    args = parser.parse_args(argv)
    path = args.data / "mlenergy.csv"
    if not path.is_file():
        print(f"{path} is not there", file=sys.stderr)
        return 2
    rows, out = read(path)
    found = [off(r) for r in rows]
    print("\n".join(table(found)))
    print(f"\nrows: {len(rows)} used, {sum(out.values())} left out {dict(out) or ''}".rstrip())
    token, request, little = tied(rows)
    print(f"published J per token = power / throughput in {token} rows, J per request = that × length in {request}")
    print(f"tokens/s × median ITL / sequences: {little:.2f} in the median")
    if args.json:
        args.json.write_text(json.dumps([{**o.row._asdict(), "token": o.token, "request": o.request} for o in found]))
    return int(any(max(abs(o.token), abs(o.request)) > BOUND for o in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
