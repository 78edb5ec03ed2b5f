"""``export``: a saved Run in the forms that other tools read, as files, on stdout, or sent to a collector."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import http.client
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from urllib.parse import unquote, urlsplit

import orjson

from whywait.core.atomic import replaced
from whywait.core.columns import TABLES
from whywait.core.run import Run, write_json
from whywait.errors import ServiceError, Unreachable, UsageError
from whywait.net.reach import Reach, bound, is_loopback, open_page, parse_header
from whywait.probe.spans import joined as with_spans
from whywait.report import export_llmd, export_spans, export_tables, export_vllm
from whywait.report.export import Chosen, choose, parted
from whywait.report.export_grafana import dashboard
from whywait.report.export_metrics import write_metrics
from whywait.report.trace import write_trace

TO = ("perfetto", "otlp", "openmetrics", "grafana", "llm-d", "vllm-bench", "csv", "parquet")
WHOLE = ("openmetrics", "grafana", "llm-d", "vllm-bench")  # figures of whole points
FOLDERS = ("csv", "parquet")
NAMES = {"perfetto": "trace.pftrace", "otlp": "spans.otlp.jsonl", "openmetrics": "metrics.openmetrics.txt",
         "grafana": "grafana.json", "llm-d": "llm-d-report.json", "vllm-bench": "vllm-bench.json"}  # fmt: skip
TRIES = 4  # of an export that a collector asks to send again
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Ask:
    """What to export; see the flags of the verb. ``out``: a file, a folder, ``-`` (stdout) or '' (into the run)."""

    to: str
    out: str = ""
    point: int | None = None
    ids: Sequence[int] | None = None
    limit: int | None = None
    tables: tuple[str, ...] = tuple(TABLES)
    chunks: bool = True
    step_ns: int | None = None
    at_end: bool = False
    start_unix_ns: int | None = None
    endpoint: str = ""
    remote: bool = False
    headers: tuple[str, ...] = ()


def export(directory: str | Path, ask: Ask) -> dict[str, Any]:
    """Export a saved Run. Returns ``files`` (or ``endpoint``), what is in them, and whether the run was PARTIAL.

    Raises:
        UsageError: no such run, point, request or table; what was asked does not go together; it cannot be written.
        MissingExtra: a library that the form needs is not installed. ServiceError: the collector did not take it.
    """
    chosen = _chosen(Path(directory), ask)
    try:
        return _exported(chosen, Path(directory), ask)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as exc:
        raise UsageError(
            f"cannot write {exc.filename}: {exc.strerror}", "give a place in a folder that exists"
        ) from None


def _exported(chosen: Chosen, directory: Path, ask: Ask) -> dict[str, Any]:
    m = chosen.run.manifest
    told = chosen.rows if ask.to in FOLDERS else chosen.due
    about = {"to": ask.to, "run": str(directory), "made_by": m.origin, "partial": m.partial,
             "partial_reason": m.partial_reason or None, "points": list(chosen.points), "requests": len(told),
             "dated": chosen.dated, "starts": chosen.labels.get("starts")}  # fmt: skip
    if ask.endpoint:
        return {**about, "endpoint": _where(ask), **_send(chosen, ask)}
    if ask.to in FOLDERS:
        return {**about, **_tables(chosen, ask, directory)}
    if ask.to in ("llm-d", "vllm-bench"):
        return {**about, **_by_point(chosen, ask, directory)}
    path = _path(ask, directory, NAMES["openmetrics"].replace("openmetrics.txt", "prom") if ask.at_end
                 else NAMES[ask.to])  # fmt: skip
    with _written(path) as out:
        counts = _one(chosen, ask, out)
    return {**about, "files": _files([path]), **counts}


def _chosen(directory: Path, ask: Ask) -> Chosen:
    _check(ask)
    if not (directory / "manifest.json").exists() and (directory / "trial.json").exists():
        raise UsageError(f"{directory} is a trial of several runs", "export one of the runs in it")
    run = with_spans(Run.load(directory)).run  # of a run that was cut off nobody has looked at the spans yet
    chosen = choose(run, ask.point, ask.ids, ask.limit)
    return dataclasses.replace(chosen, name=directory.resolve().name, start_unix_ns=ask.start_unix_ns)


def _check(ask: Ask) -> None:
    """
    Raises:
        UsageError: flags that do not go together.
    """
    if ask.to in WHOLE and (ask.ids is not None or ask.limit is not None):
        raise UsageError(f"{ask.to} holds figures of whole load points", "leave --requests and --limit out; --point N")
    if ask.endpoint and ask.to != "otlp":
        raise UsageError("--endpoint takes spans", "use --to otlp")
    if ask.endpoint and ask.out:
        raise UsageError("--endpoint and --out do not go together", "leave one of them out")
    if ask.to in FOLDERS and ask.out == "-" and (len(ask.tables) != 1 or ask.to != "csv"):
        raise UsageError("one stream holds one table", "--to csv --table requests --out -, or give a folder")


def _one(chosen: Chosen, ask: Ask, out: BinaryIO) -> dict[str, Any]:
    """The forms that are one stream."""
    if ask.to == "perfetto":
        return dict(write_trace(chosen, out, ask.chunks))
    if ask.to == "otlp":
        spans = 0
        for batch in export_spans.batches(chosen):
            out.write(orjson.dumps(batch) + b"\n")
            spans += _count(batch)
        return {"spans": spans}
    with _text(out) as text:
        if ask.to == "openmetrics":
            return {"samples": write_metrics(chosen, text, ask.step_ns, ask.at_end)}
        json.dump(dashboard(chosen), text, indent=2, allow_nan=False)
        text.write("\n")
    return {}


def _by_point(chosen: Chosen, ask: Ask, directory: Path) -> dict[str, Any]:
    """A file for each load point: these forms hold one."""
    several = len(chosen.points) > 1
    if several and ask.out == "-":
        raise UsageError(
            f"{ask.to} holds one load point, and the run has {len(chosen.points)}", "--point N, or a folder"
        )
    found = export_llmd.reports(chosen) if ask.to == "llm-d" else {}
    files = []
    for number in chosen.points:
        path = _path(ask, directory, NAMES[ask.to])
        if several and path is not None:
            path = path.with_name(f"{path.stem}-{number}{path.suffix}")
        with _written(path) as out, _text(out) as text:
            if ask.to == "llm-d":
                json.dump(found[number], text, indent=2, allow_nan=False)
                text.write("\n")
            else:
                export_vllm.write_point(chosen, number, text)
        files.append(path)
    return {"files": _files(files)}


def _tables(chosen: Chosen, ask: Ask, directory: Path) -> dict[str, Any]:
    """The tables, a data dictionary and the manifest; into a folder, or one table on stdout."""
    part = parted(chosen.run, chosen.points, chosen.rows)
    if ask.out == "-":
        with _written(None) as out, _text(out) as text:
            rows = export_tables.write_csv(part, ask.tables[0], text)
        return {"files": [], "rows": {ask.tables[0]: rows}}
    folder = Path(ask.out) if ask.out else directory / ask.to
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", f"--to {ask.to} writes a file for each table: give a folder")
    _writable(folder)
    folder.mkdir(exist_ok=True)
    files, rows_of = [], {}
    for name in ask.tables:
        path = folder / f"{name}.{ask.to}"
        if ask.to == "parquet":
            rows_of[name] = export_tables.write_parquet(part, name, path)
        else:
            with _written(path) as out, _text(out) as text:
                rows_of[name] = export_tables.write_csv(part, name, text)
        files.append(path)
    with _written(folder / "data_dictionary.csv") as out, _text(out) as text:
        export_tables.write_dictionary(text)
    write_json(folder / "manifest.json", dataclasses.asdict(chosen.run.manifest))
    return {"files": _files([*files, folder / "data_dictionary.csv", folder / "manifest.json"]), "rows": rows_of}


# --- files


def _path(ask: Ask, directory: Path, name: str) -> Path | None:
    """Where a file goes; None is stdout.

    Raises:
        UsageError: it cannot go there.
    """
    if ask.out == "-":
        return None
    path = Path(ask.out) if ask.out else directory / name
    path = path / name if path.is_dir() else path
    _writable(path)
    return path


def _writable(path: Path) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}", "give a place in a folder that exists")


@contextlib.contextmanager
def _written(path: Path | None) -> Iterator[BinaryIO]:
    """A file that is there whole or not at all; None is stdout. A device or a pipe (``/dev/null``, ``/dev/fd/63``) is
    written to as it is: nothing may take its place."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if path.is_relative_to("/dev") or path.is_relative_to("/proc") or (path.exists() and not path.is_file()):
        with path.open("wb") as out:
            yield out
        return
    if path.is_symlink() and (path.parent / "manifest.json").exists():  # in a run of somebody else it may lead anywhere
        raise UsageError(f"{path} is a link to another file", "remove it, or another place by --out")
    path = path.resolve()  # the file, not the link to it
    with replaced(path) as new, new.open("wb") as out:
        yield out


@contextlib.contextmanager
def _text(out: BinaryIO) -> Iterator[TextIO]:
    """Text into a binary stream, which stays open."""
    text = io.TextIOWrapper(out, encoding="utf-8", errors="backslashreplace", newline="")
    try:
        yield text
    finally:
        text.flush()
        text.detach()


def _files(paths: Sequence[Path | None]) -> list[dict[str, Any]]:
    return [{"path": str(p), "bytes": p.stat().st_size} for p in paths if p is not None and p.is_file()]


# --- to a collector


def _where(ask: Ask) -> str:
    """The URL that spans are posted to (OTLP over HTTP).

    Raises:
        UsageError: not a URL, or not of this machine and not allowed.
    """
    try:
        parts = urlsplit(ask.endpoint if "://" in ask.endpoint else "http://" + ask.endpoint)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        host = ""
    if not host or parts.scheme not in ("http", "https"):
        raise UsageError("--endpoint is not a URL of a collector", "such as http://127.0.0.1:4318")
    if not is_loopback(host) and not ask.remote:
        raise UsageError(f"{host} is not this machine: spans tell who was asked, when and how much",
                         "add --remote to send them there")  # fmt: skip
    path = parts.path.rstrip("/")
    path = path if path.endswith("/v1/traces") else path + "/v1/traces"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"


def _send(chosen: Chosen, ask: Ask) -> dict[str, Any]:
    """Post every batch; a batch that a collector is too busy for is sent again a few times.

    Raises:
        ServiceError: it refused, or could not be reached; how many spans it had taken by then is said.
    """
    url, headers = _where(ask), _headers(ask)
    sent = rejected = 0
    for batch in export_spans.batches(chosen):
        count = _count(batch)
        try:
            answer = _post(url, gzip.compress(orjson.dumps(batch), 6), headers)
        except ServiceError as exc:
            raise type(exc)(f"{exc.message}; {sent} spans had been taken before", exc.hint) from None
        partial = answer.get("partialSuccess") or {}
        lost = min(int(partial.get("rejectedSpans") or 0), count) if isinstance(partial, dict) else 0
        rejected, sent = rejected + lost, sent + count - lost
    return {"spans": sent, "rejected_spans": rejected}


def _headers(ask: Ask) -> dict[str, str]:
    """Of ``--header`` and of the SDKs' environment variable, ``OTEL_EXPORTER_OTLP_HEADERS=key=value,…``."""
    said = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
    pairs = [f"{k}: {unquote(v.strip())}" for k, eq, v in (p.partition("=") for p in said.split(",")) if eq]
    return dict(parse_header(text) for text in (*pairs, *ask.headers))


def _post(url: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    sent = {**headers, "Content-Type": "application/json", "Content-Encoding": "gzip"}
    for attempt in range(TRIES):
        conn, target, extra = open_page(url, Reach(), TIMEOUT_S)
        try:
            bound(conn, TIMEOUT_S)
            conn.request("POST", target, body=body, headers={**extra, **sent})
            with conn.getresponse() as answer:
                status, data, again = answer.status, answer.read(1 << 20), answer.getheader("Retry-After")
        except (OSError, http.client.HTTPException) as exc:
            where = urlsplit(url).netloc
            why = getattr(exc, "strerror", None) or exc or type(exc).__name__
            raise Unreachable(f"no collector at {where}: {why}", "is one listening there?") from None
        finally:
            conn.close()
        if status < 300:
            return _answer(data)
        if status not in (429, 502, 503, 504) or attempt == TRIES - 1:
            raise ServiceError(f"the collector answers {status}", "see its log; --header for what it wants to be told")
        time.sleep(min(float(again) if again and again.isdigit() else 0.5 * 2**attempt, 10.0))
    raise AssertionError  # pragma: no cover - the loop ends by itself


def _answer(data: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _count(batch: dict[str, Any]) -> int:
    return sum(len(s["spans"]) for r in batch["resourceSpans"] for s in r["scopeSpans"])
