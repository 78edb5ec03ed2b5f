"""``doctor``: what this machine and a service can and cannot measure, and what would enable the rest.

It reads; it changes nothing. To a service go the GETs of its pages and two single streams of a few tokens, on any
machine, so that it needs no ``--load``. Part of the application layer, beside ``app.py``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from whywait import __version__
from whywait.core import secrets
from whywait.core.ability import Ability, counted
from whywait.engines.llama_cpp import slot_gauges
from whywait.errors import InternalError, ServiceError, WhywaitError
from whywait.load import abilities as of_load
from whywait.load import preflight
from whywait.load.floor import measure_floor
from whywait.load.preflight import Target
from whywait.net.endpoint import Endpoint, get, parse_url, read_key
from whywait.options import Options, Say, stderr
from whywait.probe import abilities, abilities_engine
from whywait.probe.pages import fetcher
from whywait.reading import read_elsewhere
from whywait.units import NS_PER_S

FLOOR_STREAMS = 16
LOOK_BACK_S = 600.0  # in a Prometheus
PATIENCE_S = 60.0  # with each of the streams


@dataclass
class Findings:
    """``sections``: title → its lines; ``error`` is why a service could not be looked at to the end."""

    url: str = ""
    sections: dict[str, list[Ability]] = field(default_factory=dict)
    error: WhywaitError | None = None

    def all(self) -> list[Ability]:
        return [a for lines in self.sections.values() for a in lines]

    @property
    def states(self) -> dict[str, str]:
        """By the name of a line: can, partly, cannot, unknown."""
        return {a.name: a.state for a in self.all()}

    def _repr_html_(self) -> str:
        from whywait.report import notebook
        from whywait.report.doctor import print_doctor

        return notebook.as_html(lambda out: print_doctor(self.sections, out))

    def as_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        error = None if self.error is None else {"message": self.error.message, "hint": self.error.hint}
        sections = [{"title": t, "abilities": [a.as_dict() for a in lines]} for t, lines in self.sections.items()]
        return {"whywait_version": __version__, "url": self.url or None, "counts": counted(self.all()),
                 "sections": sections, "error": error}  # fmt: skip


def examine(options: Options, say: Say = stderr, engine_port: int | None = None) -> Findings:
    """Look at this machine and, where ``options.url`` is given, at that service. ``engine_port``: of an engine here
    that is not to be asked anything.

    Raises:
        UsageError: a flag names what cannot be used.
    """
    key = read_key(options.api_key_file)
    secrets.hide(key)
    found = Findings(options.url)
    prepared = options.probes.prepare(options.reach)
    try:
        if options.url:
            say(f"looking at {options.url}: its pages, and two streams of {of_load.TOKENS} tokens")
        endpoint = None
        if options.url:
            endpoint = _reached(found, lambda: parse_url(options.url, options.dialect, key, PATIENCE_S, options.reach))
        found.sections["this machine"] = [*abilities.machine(dcgm=bool(options.probes.gpu_urls)), _floor(options)]
        if endpoint is not None:
            _service(found, endpoint, options, prepared.agents)
        elif engine_port is not None:
            found.sections["the engine here"] = [abilities_engine.processes(engine_port),
                                                 abilities_engine.traces(None, engine_port, "")]  # fmt: skip
    finally:
        prepared.close()
    found.sections = {title: [_clean(a) for a in lines] for title, lines in found.sections.items()}
    return found


def _clean(a: Ability) -> Ability:
    """A service may say our key back to us, as the name of a model or of itself."""
    return Ability(**{k: secrets.clean(v) for k, v in a.as_dict().items()})


def _reached(found: Findings, look: Callable[[], Endpoint]) -> Endpoint | None:
    try:
        return look()
    except ServiceError as exc:
        found.error = exc
        found.sections["the service"] = [Ability("endpoint", "cannot", exc.message, "everything", exc.hint)]
        return None


def _floor(options: Options) -> Ability:
    if not options.floor:
        return abilities.floor({})
    try:
        return abilities.floor(measure_floor(FLOOR_STREAMS, seconds=1.0))
    except (InternalError, OSError) as exc:
        return Ability("client-floor", "unknown", f"the stub service did not start: {exc}")


def _service(found: Findings, endpoint: Endpoint, o: Options, agents: list[dict[str, Any]]) -> None:
    lines: list[Ability] = []
    found.sections["the service"] = lines
    try:
        target = preflight.find(endpoint, o.model)
        target = dataclasses.replace(target, extra=o.body, tokenizer=o.tokenizer)
        target = read_elsewhere(target, o.metrics_urls, o.prometheus)
        listed = ", ".join(target.models[:3]) + (", …" if len(target.models) > 3 else "")
        lines.append(Ability("endpoint", "can", f"{target.endpoint.url} answers; models: {listed or 'not listed'}"))
        for said in preflight.aloud(target.endpoint):
            lines.append(Ability("way", "partly", f"{said['what']}: {said['why']}", "", said["next"]))
        lines.append(of_load.engine(target))
        workload = dataclasses.replace(o.workload, timeout_s=PATIENCE_S)
        first = of_load.stream(target, workload)
        lines += of_load.of_service(target, first)
        if not first.ok:
            preflight.first_request(target, workload, True)  # says whose fault it is, with what to try
            found.error = ServiceError(
                f"{target.endpoint.netloc}: the first stream failed, a second did not", "try again"
            )
    except ServiceError as exc:
        found.error = exc
        lines.append(Ability("endpoint", "cannot", exc.message, "everything", exc.hint))
        return
    found.sections["its metrics"] = _metrics(target, o)
    found.sections["its machine"] = _its_machine(target, o, agents)


def _metrics(target: Target, o: Options) -> list[Ability]:
    table, there, where = target.engine, frozenset[str](), ""
    if table is not None and o.prometheus is not None:
        now = time.time_ns()
        rows = o.prometheus.readings(table, (now - round(LOOK_BACK_S * NS_PER_S), now), 0)
        there, where = (
            abilities_engine.with_histograms({str(r["name"]) for r in rows}),
            f"{o.prometheus.url} (Prometheus, last 10 minutes)",
        )
    elif table is not None and target.metrics_urls:
        for url in target.metrics_urls:
            page = fetcher(url, target.endpoint.headers(), 5.0, target.endpoint.reach, target.endpoint.home)
            body = page.get()
            page.close()
            there |= abilities_engine.names_on((body or b"").decode("utf-8", "replace"), table)
        where = ", ".join(target.metrics_urls)
    gauges = _slots(target)
    slots = abilities_engine.slots(target.slots_url, table, gauges)
    lines = list(abilities_engine.of_metrics(table, where, there | gauges))
    return [*lines, slots] if slots is not None else lines


def _slots(target: Target) -> frozenset[str]:
    """Canonical names that the page of slots gives; kept text is none."""
    if not target.slots_url or target.engine is None or not target.engine.slots_path:
        return frozenset()
    try:
        _, _, body = get(target.endpoint, target.endpoint.root + target.engine.slots_path)
        return frozenset(slot_gauges(orjson.loads(body)))
    except (WhywaitError, orjson.JSONDecodeError, TypeError, AttributeError):
        return frozenset()


def _its_machine(target: Target, o: Options, agents: list[dict[str, Any]]) -> list[Ability]:
    e = target.endpoint
    here = e.loopback and not e.unix
    port = e.port if here else 0
    lines = [abilities_engine.processes(port)] if here and not target.simulated else []
    if not e.loopback or agents:
        lines.append(abilities_engine.elsewhere(e.host, agents))
    return [*lines, abilities_engine.traces(target.engine, port, o.probes.otlp_listen or "")]
