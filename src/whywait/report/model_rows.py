"""Rows that come after the accounts: the engine's own steps; modelled are the use of the machine and a decode step in
parts; what thinking takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whywait.analyze.roofline import TERMS
from whywait.units import number, percent

Cell = Callable[[dict[str, Any]], str]


def model_rows() -> list[tuple[str, Cell]]:
    """(name, cell of a load point's summary) each; – where unknown."""

    def use(kind: str, phase: str) -> Cell:
        return lambda p: percent((p.get(kind) or {}).get(phase))

    def step(term: str) -> Cell:
        return lambda p: percent(p["decode_step"]["shares"][term]) if p.get("decode_step") else "–"

    def error(p: dict[str, Any]) -> str:
        found = (p.get("decode_step") or {}).get("error")
        return "–" if found is None else f"{found * 100:+.0f} %"

    def think(key: str) -> Cell:
        return lambda p: percent((p.get("thinking") or {}).get(key))

    def stepping(key: str) -> Cell:
        return lambda p: number((p.get("engine_steps") or {}).get(key))

    rows: list[tuple[str, Cell]] = [
        ("engine steps/s", stepping("steps_per_s")),
        ("requests in a batch, by the engine", stepping("batch")),
        ("tokens computed in a step", stepping("tokens_per_step")),
        ("MBU of decode, modelled", use("mbu", "decode")),
        ("MFU of decode, modelled", use("mfu", "decode")),
        ("MBU of prefill, modelled", use("mbu", "prefill")),
        ("MFU of prefill, modelled", use("mfu", "prefill")),
    ]
    rows += [
        ("memory active, by the device", use("mbu", "device")),
        ("matrix units active, by the device", use("mfu", "device")),
    ]
    rows += [(f"decode step: {name}, modelled", step(name)) for name in TERMS]
    rows.append(("decode step: model − measured", error))
    rows += [
        ("thinking, share of the time", think("time_share")),
        ("thinking, share of KV × time", think("kv_share")),
        ("thinking, share of device time", think("cost_share")),
    ]
    return [*rows, ("time in which some waited for KV space", lambda p: _nonzero(p["occupancy"].get("kv_blocked")))]


def _nonzero(share: float | None) -> str:
    return "–" if not share else percent(share)
