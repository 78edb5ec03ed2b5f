"""How a candidate of a plan is measured: what to serve on which devices, the load, and what the plan wants of the run
afterwards. Part of the application layer."""

from __future__ import annotations

from typing import Any

from whywait.engines import by_name
from whywait.errors import WhywaitError
from whywait.planning_space import Shape
from whywait.sim.catalog import machine_named
from whywait.sim.result import TABLE

SPAN = "5m"  # of each load: with the start, three of them are about the half hour that an experiment is taken to cost
SHARES = (0.7, 1.0, 1.3)  # of the rate that one replica would have


def serving(s: Shape) -> str:
    """What to start, in words: model, engine, devices, the flags that spread it, the techniques."""
    d, engine = s.deployment, s.engine
    table = by_name(TABLE.get(d.engine.policy))
    parts = (("tensor_parallel", d.layout.tp), ("pipeline_parallel", d.layout.pp), ("data_parallel", d.layout.dp))
    spellings = table.spread if table is not None else {}
    flags = [f"{spellings[name][0]} {n}" for name, n in parts if n > 1 and spellings.get(name)]
    how = f" ({' '.join(flags)})" if flags else ""
    more = [s.layout] if d.split is not None or d.layout.ep > 1 else []
    more += [s.apply.replace(",", ", ")] if s.apply else []
    count = "1 device" if s.devices == 1 else f"{s.devices} devices"
    return f"serve {d.model.name} by {engine} on {count} of {s.machine}{how}" + (f", {', '.join(more)}" if more else "")


def sweep(rate: float, ask: Any) -> str:
    """What to type on the machine: ``rate``, which one replica would have, and less and more of it."""
    classes = ask.workload.classes
    lengths = f"--prompt-tokens '{classes[0].prompt_tokens}' --output-tokens '{classes[0].output_tokens}'"
    load = f"--workload {ask.workload_file}" if ask.workload_file else lengths
    slo = ",".join(f"{k.removesuffix('_ms')}={v:g}ms" for k, v in ask.slo.items())
    rates = ",".join(f"{rate * x:.3g}" for x in SHARES)
    limits = f" --slo {slo}" if slo else ""
    return f"whywait sweep URL --load --rate {rates} --duration {SPAN} {load}{limits} --out RUN"


def afterwards(s: Shape, ask: Any) -> str:
    """The plan made again with that run, and what the run may not tell of its service."""
    words = [s.layout, s.apply] if s.layout or s.apply else []
    told = ",".join([f"machine={_word(s.machine, ask)}", f"engine={s.engine}", *filter(None, words)])
    return f"whywait plan … --run RUN --baseline '{told}'"


def _word(name: str, ask: Any) -> str:
    """The machine as the user named it."""
    given = [*ask.space.machines, *(x[0] for x in ask.space.single)]
    for word in given:
        try:
            if machine_named(word).name == name:
                return str(word)
        except WhywaitError:
            continue
    return name
