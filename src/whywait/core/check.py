"""The invariants a Run must keep, whoever made it (DESIGN 6: 1, 3, 8, 9 and chunks against requests)."""

from __future__ import annotations

import numpy as np

from whywait.core.columns import KINDS, MODES, OUTCOMES
from whywait.core.run import Run
from whywait.core.table import Array, Table

_STAMPS = ("due_ns", "sent_ns", "accepted_ns", "first_ns", "last_ns", "end_ns")


def violations(run: Run) -> list[str]:
    """What is wrong with ``run``, one line each, with the number of rows concerned and a few ids; empty when sound.

    Checked: every planned request has exactly one outcome (1); due ≤ sent ≤ accepted ≤ first ≤ last ≤ end over the
    stamps that are there, first answer between first and last (3); times to first token are positive, requests lie
    inside their point so that peak ≥ mean (8); KV blocks in use are between 0 and the total that
    ``manifest.engine["kv_blocks"]`` states (9, where steps exist); chunks agree with their requests.
    """
    return [*_planned(run), *_order(run.requests), *_inside(run), *_steps(run), *_chunks(run)]


def _planned(run: Run) -> list[str]:
    out = []
    ids = run.requests["id"]
    twice = len(ids) - len(np.unique(ids))
    if twice:
        out.append(f"1: {twice} request ids are used twice")
    outcome = run.requests["outcome"]
    out += _rows((outcome < 0) | (outcome >= len(OUTCOMES)), ids, "1: no outcome of the closed list")
    numbers, planned = run.points["point"], run.points["planned"]
    out += _rows(~np.isin(run.requests["point"], numbers), ids, "1: load point is not in the points table")
    for number, wanted in zip(numbers.tolist(), planned.tolist(), strict=True):
        have = int((run.requests["point"] == number).sum())
        if have != wanted:
            out.append(f"1: point {number} planned {wanted} requests, outcomes add up to {have}")
    return out


def _order(req: Table) -> list[str]:
    out = []
    latest, latest_name = req[_STAMPS[0]], np.zeros(len(req), dtype=np.int64)
    for i, name in enumerate(_STAMPS[1:], start=1):
        now = req[name]
        bad = now < latest
        for j in np.unique(latest_name[bad]):
            out += _rows(bad & (latest_name == j), req["id"], f"3: {name} before {_STAMPS[j]}")
        later = ~np.isnan(now) & ~bad
        latest, latest_name = np.where(later, now, latest), np.where(later, i, latest_name)
    answer = req["first_answer_ns"]
    out += _rows(answer < req["first_ns"], req["id"], "3: first_answer_ns before first_ns")
    out += _rows(answer > req["last_ns"], req["id"], "3: first_answer_ns after last_ns")
    return out


def _inside(run: Run) -> list[str]:
    req, pts = run.requests, run.points
    at = {int(p): i for i, p in enumerate(pts["point"])}
    row = np.array([at.get(int(p), -1) for p in req["point"]], dtype=np.int64)
    out = []
    if len(pts) and len(req):
        known = row >= 0
        start, end = pts["start_ns"][row], pts["end_ns"][row]
        out += _rows(known & (req["sent_ns"] < start), req["id"], "8: sent before its point began")
        out += _rows(known & (req["end_ns"] > end), req["id"], "8: ended after its point ended")
        closed = pts["mode"][row] == MODES.index("concurrency")
        origin = np.where(closed | np.isnan(req["due_ns"]), req["sent_ns"], req["due_ns"])
        out += _rows(req["first_ns"] <= origin, req["id"], "8: time to first token is not positive")
    number = pts["point"]
    out += _rows(pts["end_ns"] < pts["start_ns"], number, "8: point ends before it starts")
    out += _rows(pts["steady_end_ns"] < pts["steady_start_ns"], number, "8: steady window ends before it starts")
    outside = (pts["steady_start_ns"] < pts["start_ns"]) | (pts["steady_end_ns"] > pts["end_ns"])
    return out + _rows(outside, number, "8: steady window reaches outside its point")


def _steps(run: Run) -> list[str]:
    steps = run.steps
    if not len(steps):
        return []
    number = np.arange(len(steps))
    out = _rows(steps["took_ns"] < 0, number, "9: step of negative length")
    out += _rows(steps["kv_used"] < 0, number, "9: fewer than 0 KV blocks in use")
    total = run.manifest.engine.get("kv_blocks")
    if total is not None:
        out += _rows(steps["kv_used"] > float(total), number, f"9: more KV blocks in use than the {total} there are")
    return out


def _chunks(run: Run) -> list[str]:
    chunks, req = run.chunks, run.requests
    if not len(chunks):  # a simulated or imported Run need not keep them
        return []
    order = np.argsort(req["id"], kind="stable")
    at = np.searchsorted(req["id"][order], chunks["id"])
    row = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(len(chunks), dtype=np.int64)
    known = (req["id"][row] == chunks["id"]) if len(order) else np.zeros(len(chunks), dtype=bool)
    out = _rows(~known, chunks["id"], "chunks: no such request")
    chunks, row = chunks.where(known), row[known]
    t, ids = chunks["t_ns"], chunks["id"]
    content = chunks["kind"] != KINDS.index("role")
    out += _rows(chunks["t_low_ns"] > t, ids, "chunks: t_low_ns after t_ns")
    out += _rows(t < req["accepted_ns"][row], ids, "chunks: before the response was accepted")
    out += _rows(t > req["end_ns"][row], ids, "chunks: after the response ended")
    beyond = (t < req["first_ns"][row]) | (t > req["last_ns"][row])
    out += _rows(content & beyond, ids, "chunks: content outside first_ns … last_ns")
    counted = np.bincount(row[content], minlength=len(req))
    said = req["content_chunks"]
    out += _rows(~np.isnan(said) & (said != counted), req["id"], "chunks: content_chunks is not what was counted")
    return out


def _rows(bad: Array, ids: Array, what: str) -> list[str]:
    if not bad.any():
        return []
    some = ", ".join(str(v) for v in np.unique(ids[bad])[:5])
    return [f"{what}: {int(bad.sum())} ({some}{', …' if len(np.unique(ids[bad])) > 5 else ''})"]
