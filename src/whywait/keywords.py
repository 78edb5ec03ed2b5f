"""The keywords of the Python API, in types: the flags of the command line by their names, ``--prompt-tokens`` as
``prompt_tokens``. A test holds them against the flags, so neither has what the other lacks.

Times are seconds, or text such as ``"500ms"``; lists stand for repeated or comma-separated flags; ``slo`` and other
``NAME=VALUE`` lists may be mappings (an SLO's numbers are milliseconds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from whywait.core.schedule import Workload

File = str | PathLike[str]
Time = str | float
Words = str | Sequence[str]
Numbers = float | Sequence[float]
Named = str | Mapping[str, Any]
Length = str | int


class Reached(TypedDict, total=False):
    """How a service is reached."""

    api_key_file: File
    header: Words
    body: Named
    ca: File
    cert: File
    key: File
    insecure: bool
    proxy: str
    lenient_eof: bool


class Asked(TypedDict, total=False):
    """How it is asked, and whether it may be loaded."""

    load: bool
    model: str
    dialect: str
    timeout: Time
    engine_file: File


class Read(TypedDict, total=False):
    """What is read beside the load."""

    metrics_url: Words
    prometheus: str
    prometheus_match: str
    prometheus_token_env: str
    prometheus_token_file: File
    otlp_listen: str
    otlp_grpc_listen: str
    otlp_token_file: File
    gpu_metrics_url: Words
    agent: Words
    agent_token_file: File


class Streamed(TypedDict, total=False):
    """Whether answers are streamed."""

    stream: bool


class Load(TypedDict, total=False):
    """The requests: lengths, arrivals, limits."""

    prompt_tokens: Length
    output_tokens: Length
    workload: File | Workload
    slo: Named
    cache: str
    seed: int


class Text(TypedDict, total=False):
    """What only a live service needs of them."""

    tokenizer: File
    temperature: float
    language: Words


class Points(TypedDict, total=False):
    """A load point."""

    requests: int
    duration: Time
    arrivals: str
    cv: float
    burst: int
    stages: str
    trace: File
    speed: float
    max_in_flight: int
    ramp: Time


class Kept(TypedDict, total=False):
    """Where a run goes, and whether the client's own floor is measured first."""

    out: File
    floor: bool


class Run(Reached, Asked, Streamed, Read, Load, Text, Points, Kept, total=False):
    """Of :func:`whywait.run`."""

    launch: str
    concurrency: int
    rate: float
    processes: int
    ray: str


class Sweep(Reached, Asked, Streamed, Read, Load, Text, Points, Kept, total=False):
    """Of :func:`whywait.sweep`."""

    launch: str
    concurrency: Numbers
    rate: Numbers
    processes: int
    ray: str


class Diagnose(Reached, Asked, Streamed, Read, Load, Text, Kept, total=False):
    """Of :func:`whywait.diagnose`."""

    launch: str
    budget: Time
    slots: int
    last: Time


class Find(Reached, Asked, Streamed, Read, Load, Text, Kept, total=False):
    """Of :func:`whywait.find`."""

    launch: str
    budget: Time
    share: float
    max_rate: float


class Probe(Reached, Asked, Streamed, Read, Kept, total=False):
    """Of :func:`whywait.probe_service`."""

    launch: str
    budget: Time
    longest: int
    seed: int


class Resume(Reached, Kept, total=False):
    """Of :func:`whywait.resume`."""

    url: str
    ray: str
    load: bool
    anyway: bool


class Watch(Reached, Read, total=False):
    """Of :func:`whywait.watch`."""

    model: str
    engine_file: File
    window: Time
    hz: float
    slo: Named
    out: File


class Doctor(Reached, Asked, Streamed, Read, total=False):
    """Of :func:`whywait.doctor`."""

    engine_port: int
    floor: bool


class History(TypedDict, total=False):
    """Of :func:`whywait.history`."""

    figure: str
    at: str
    model: str
    engine: str
    last: int


class Catalog(TypedDict, total=False):
    """Of :func:`whywait.catalog`."""

    catalog: File


class Deployed(TypedDict, total=False):
    """A simulated service."""

    machine: str
    model: str
    engine: str
    precision: str
    kernels: str
    count: int
    layout: Named
    apply: Words
    max_seqs: int
    token_budget: int
    memory_share: float
    kv_blocks: int
    catalog: File


class Simulate(Deployed, Load, Points, total=False):
    """Of :func:`whywait.simulate`."""

    concurrency: Numbers
    rate: Numbers
    timeout: Time
    draws: int
    jobs: int
    ray: str
    cells: File
    out: File


class WhatIf(TypedDict, total=False):
    """Of :func:`whywait.what_if`."""

    apply: Words
    machine: str
    model: str
    layout: Named
    load: Named
    baseline: Named
    slo: Named
    bound: Named
    seeds: int
    jobs: int
    ray: str
    cells: File
    catalog: File


class Trial(Reached, Asked, Streamed, Read, Load, Text, Kept, total=False):
    """Of :func:`whywait.try_technique`; with more, of :func:`whywait.ab`."""

    rounds: str
    margin: str | float
    exclude: Words
    aa: bool
    warm_up: int


class Try(Trial, total=False):
    """Of :func:`whywait.try_technique`."""

    engine: str


class Ab(Trial, Points, total=False):
    """Of :func:`whywait.ab`."""

    metric: Words
    promise: str
    concurrency: int
    rate: float
    processes: int
    ray: str


class Quality(Reached, Asked, total=False):
    """Of :func:`whywait.quality`."""

    aa: bool
    only: str
    text: File | Sequence[File]
    positions: int
    context: int
    top: int
    tasks: Words
    suite: Words
    suite_path: File
    cases: int
    at_once: int
    keep_text: bool
    margin: float
    margin_ppl: float
    margin_top1: float
    seed: int
    out: File


class Plan(Load, total=False):
    """Of :func:`whywait.plan`."""

    model: str
    machines: Words
    candidates: File
    engines: Words
    layouts: str
    apply: str
    counts: Numbers
    precision: str
    run: File | Sequence[File]
    baseline: Named
    calibrate: bool
    catalog: File
    rate: float
    share: float
    growth: float
    quality: Words
    price: File
    price_per_hour: Named
    owned: Named
    currency: str
    price_date: str
    terms: str
    budget: str
    draws: int
    jobs: int
    ray: str
    cells: File
    again: File
    out: File


class Bill(TypedDict, total=False):
    """Of :func:`whywait.bill`."""

    price: File
    price_per_hour: float
    owned: Named
    currency: str
    price_date: str
    devices: int
    power_model: Named
    slo: Named
    share_by: str
    requests: File


class Compare(TypedDict, total=False):
    """Of :func:`whywait.compare`."""

    repeat: File | Sequence[File]
    allow: Words
    at: Words
    metric: Words
    fail_if: Words
    threshold: str | float
    run_noise: str | float
    slo: Named
    price: File
    price_per_hour: float
    currency: str
    devices: int


class Import(TypedDict, total=False):
    """Of :func:`whywait.import_results`."""

    format: str
    engine: str
    model: str
    machine: str
    devices: int
    slots: int
    slo: Named
    chunks: int


class Export(TypedDict, total=False):
    """Of :func:`whywait.export`."""

    point: int
    requests: str | Sequence[int]
    limit: int
    chunks: bool
    table: Words
    step: Time
    at_end: bool
    start: str
    endpoint: str
    remote: bool
    header: Words


#: By verb; no other keyword is taken.
OF: dict[str, Any] = {
    "run": Run, "sweep": Sweep, "diagnose": Diagnose, "find": Find, "simulate": Simulate, "what-if": WhatIf, "ab": Ab,
    "try": Try, "quality": Quality, "plan": Plan, "bill": Bill, "compare": Compare, "import": Import, "export": Export,
    "probe": Probe, "resume": Resume, "watch": Watch, "doctor": Doctor, "history": History, "catalog": Catalog,
}  # fmt: skip
