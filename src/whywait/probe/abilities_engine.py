"""What of an engine can be read beside the load: its metrics page by name, its slots, its processes, its spans."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Sequence

from whywait.core.ability import Ability
from whywait.engines.table import EngineTable
from whywait.probe.host import read
from whywait.probe.listener import listening_pids
from whywait.probe.process import stat_of
from whywait.probe.prometheus import PageReader

#: name -> (canonical names, any of which of each tuple will do; what rests on them)
GROUPS: dict[str, tuple[tuple[tuple[str, ...], ...], str]] = {
    "metrics-queue": ((("running", "slots_busy"), ("waiting",)), "queue, slot limit, idle with work queued"),
    "metrics-kv": ((("kv_use", "kv_tokens_used"),), "KV space in use; waits for KV space"),
    "metrics-preemption": ((("preemptions_total", "retracted"),), "requests pushed out of work and computed again"),
    "metrics-cache": ((("prefix_hits_total", "cached_tokens_total", "prefix_hit_rate"),),
                      "prefix cache: reuse, thrash"),
    "metrics-tokens": ((("output_tokens_total",), ("prompt_tokens_total", "prompt_tokens_computed_total")),
                       "foreign traffic; token rates of watch"),
    "metrics-steps": ((("decode_steps_total",),), "steps per second, requests in a batch"),
    "metrics-ttft": ((("ttft_seconds",),), "TTFT by the engine itself: what lies between client and engine; watch"),
    "metrics-stages": ((("queue_seconds",), ("prefill_seconds", "prefill_seconds_total"),
                        ("decode_seconds", "decode_seconds_total")), "queue, prefill and decode per load point; watch"),
    "metrics-speculation": ((("draft_tokens_total", "acceptance_rate"),), "speculation: drafts proposed and accepted"),
}  # fmt: skip
STAGES = ("ttft_seconds", "queue_seconds", "prefill_seconds", "decode_seconds")
SPECULATION = ("draft_tokens_total", "acceptance_rate")
HISTOGRAM = ("_bucket", "_sum", "_count")
OTLP_PORT = 4318
TRACE_WORDS = (b"--otlp-traces-endpoint", b"--otlp_traces_endpoint", b"--enable-trace")


def names_on(text: str, table: EngineTable) -> frozenset[str]:
    """Canonical names that a metrics page has."""
    return with_histograms({row[0] for row in PageReader(table).read(text)})


def with_histograms(names: Collection[str]) -> frozenset[str]:
    """Those names, and those of histograms without their endings."""
    return frozenset(names) | {n.removesuffix(end) for n in names for end in HISTOGRAM if n.endswith(end)}


def of_metrics(table: EngineTable | None, where: str, there: Collection[str]) -> Iterator[Ability]:
    """The page as a whole, then what rests on its names. ``where`` is '' when there is no page of a known engine."""
    flag = table.flags.get("metrics", "") if table else ""
    enable = (
        f"start it with {flag}" if flag and not flag.startswith("(") else "--metrics-url URL, where it is elsewhere"
    )
    if table is None or not where:
        yield Ability(
            "metrics",
            "cannot",
            "no metrics page of a known engine answers",
            "queue, KV space, batch, engine TTFT: the causes inside the engine",
            f"{enable}; another engine: --engine-file; none at all: whywait probe",
        )
        return
    seen = f"{where}: {len(there)} figures of {table.title} under our names"
    yield Ability("metrics", "can", seen, "the causes inside the engine")
    for name, (needs, serves) in GROUPS.items():
        have = [next((n for n in any_of if n in there), "") for any_of in needs]
        lost = [any_of for any_of, got in zip(needs, have, strict=True) if not got]
        if not lost:
            yield Ability(name, "can", ", ".join(have), serves)
            continue
        seen = f"not on the page: {', '.join(' or '.join(x) for x in lost)}"
        enable = _publishes(lost, table)
        if not enable:
            seen += f"; {table.title} has no such figure"
        yield Ability(name, "partly" if any(have) else "cannot", seen, serves, enable)


def _publishes(lost: Sequence[tuple[str, ...]], table: EngineTable) -> str:
    """What would make the engine publish them, or what tells it instead; '' where nothing does."""
    names = {n for any_of in lost for n in any_of}
    if names & set(SPECULATION):
        return f"with speculation on: {table.flags['speculation']}" if "speculation" in table.flags else ""
    known = {m.name for ms in (*table.metrics.values(), *table.old_metrics.values()) for m in ms}
    if names & (known | set(table.histograms.values()) | set(table.sums) | set(table.info)):
        return f"another version of {table.title}, or traffic: some names appear with the first request"
    return "its spans tell it of each request: see traces" if names & set(STAGES) and "traces" in table.flags else ""


def slots(url: str | None, table: EngineTable | None, gauges: Collection[str]) -> Ability | None:
    """Of engines that have a page of slots; None of others."""
    if table is None or not table.slots_path:
        return None
    serves = "slots in work, and the KV space they hold"
    if url:
        return Ability("slots", "can", f"{len(gauges)} figures of its slots", serves)
    return Ability(
        "slots",
        "cannot",
        f"{table.slots_path} does not answer",
        serves,
        f"start it with {table.flags.get('metrics', '--slots')}",
    )


def processes(port: int, pids: Sequence[int] = (), root: str = "/") -> Ability:
    """Whether who listens on ``port`` here can be looked into."""
    name, serves = "engine-process", "the engine's CPU time, threads, memory and control group"
    found = tuple(pids) or listening_pids(port, root)
    if not found:
        return Ability(
            name,
            "cannot",
            f"no process that may be looked into listens on port {port}",
            serves,
            "it is another user's, or in a container: run as that user or root, or whywait agent beside it",
        )
    names = [s.comm for pid in found if (s := stat_of(f"{root.rstrip('/')}/proc", pid)) is not None]
    waits = bool(read(f"{root.rstrip('/')}/proc/{found[0]}/schedstat"))
    seen = f"process {', '.join(map(str, found))} ({', '.join(dict.fromkeys(names))}) listens on port {port}"
    return Ability(
        name, "can" if waits else "partly", seen + ("" if waits else "; its waits for a core are not told"), serves
    )


def traces(table: EngineTable | None, port: int, listen: str, root: str = "/") -> Ability:
    """Whether its spans can be had. That an engine sends any is seen only in its command line, where that is ours.
    ``port`` is 0 where it is not on this machine; ``listen`` is where we were told to listen, or ''."""
    name, serves = "traces", "each request's queue, prefill and decode, by the engine's own spans"
    flag = table.flags.get("traces", "") if table else ""
    if table is not None and not flag:
        return Ability(name, "cannot", f"{table.title} sends no spans that we know of", serves)
    at = listen or str(OTLP_PORT)
    enable = f"start it with {flag or 'its exporter of spans'}; then --otlp-listen {at} here (docs/probes.md)"
    note = "" if listen or _free(OTLP_PORT) else f"; port {OTLP_PORT} is taken here, another one will do"
    lines = [read(f"{root.rstrip('/')}/proc/{pid}/cmdline") for pid in (listening_pids(port, root) if port else ())]
    if any(word in line for line in lines if line for word in TRACE_WORDS):
        told = f"--otlp-listen, at the address it sends to ({OTLP_PORT} is usual)"
        return Ability(name, "can", f"the engine was started with traces{note}", serves, told)
    if any(lines) and table is not None:
        return Ability(name, "cannot", f"the engine was started without traces{note}", serves, enable)
    return Ability(name, "unknown", f"it cannot be asked whether it sends spans{note}", serves, enable)


def _free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def elsewhere(host: str, agents: Sequence[object]) -> Ability:
    """The machine of an engine that is not on this one."""
    serves = "CPU, devices, power and neighbours on the engine's machine: the device account"
    if agents:
        return Ability("engine-machine", "can", f"{len(agents)} agents answer", serves)
    return Ability(
        "engine-machine",
        "cannot",
        f"{host} is another machine",
        serves,
        "there: whywait agent --listen 0.0.0.0:9465 --token-file FILE --engine-port PORT; here: --agent "
        f"http://{host}:9465 --agent-token-file FILE",
    )
