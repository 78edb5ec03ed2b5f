"""``history``: the runs of a folder, one after another, by what they keep. Part of the application layer.

Read from ``summary.json`` and ``manifest.json`` where both are there, which is quick; else the run is analysed. Folders
that are cut off, damaged or of a newer version are listed with why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whywait import __version__, app
from whywait.analyze import digest
from whywait.analyze.against import figure_of
from whywait.analyze.digest import day_of
from whywait.core.run import Manifest, manifest_of
from whywait.errors import UsageError, WhywaitError
from whywait.judge.change_gates import ALIASES

KIND = "whywait history"
MOST = 100_000  # folders looked at
MOST_BYTES = 100_000_000
DEPTH = 3
OTHERS = {"trial.json": "trial", "vary.json": "trials", "quality.json": "quality", "plan.json": "plan"}


@dataclass(frozen=True)
class Choice:
    """``figure`` is plotted ``at`` a load point ('' the knee, else the most load); ``model``, ``engine`` and ``last``
    narrow the list."""

    figure: str = "output_tokens_per_s"
    at: str = ""
    model: str = ""
    engine: str = ""
    last: int | None = None


@dataclass(frozen=True)
class Listed:
    """The runs of a folder: ``found`` are plain JSON values, those of :func:`history`."""

    found: dict[str, Any]

    def _repr_html_(self) -> str:
        from whywait.report import notebook
        from whywait.report.history import print_history

        return notebook.as_html(lambda out: print_history(self.found, out))

    def html(self) -> str:
        """The list as one page that stands alone."""
        from whywait.report import history_html

        return history_html.render(self.found)


def history(directory: Path, choice: Choice | None = None) -> dict[str, Any]:
    """Every run below ``directory`` (three levels), oldest first.

    Returns:
        ``kind, whywait_version, directory, figure, title, unit, better, runs, broken``. A run has ``name, path, state``
        (whole, PARTIAL, INVALID), ``why, date, made_by, engine, model, machine, verdict, points`` (``load`` and
        ``figures``), ``at`` and ``value`` of the plotted figure; ``broken`` are ``name, path, why``.

    Raises:
        UsageError: no such folder, or no such figure.
    """
    choice = choice or Choice()
    name = ALIASES.get(choice.figure, choice.figure)
    try:
        metric = figure_of(name)
    except KeyError:
        hint = "such as output_tokens_per_s, goodput, ttft_ms.p95 or phases.queue"
        raise UsageError(f"--figure: there is no figure {choice.figure!r}", hint) from None
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a folder", "give the folder that holds the runs, such as whywait-runs")
    runs, broken = [], []
    for path in _folders(directory):
        try:
            runs.append(_of(path, directory))
        except (WhywaitError, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError,
                RecursionError) as exc:  # fmt: skip
            text = exc.message if isinstance(exc, WhywaitError) else f"damaged: {type(exc).__name__}: {exc}"
            broken.append({"name": _name(path, directory), "path": str(path), "why": text[:300]})
    runs = [r for r in runs if choice.model in ("", r["model"]) and choice.engine in ("", r["engine"])]
    runs.sort(key=lambda r: (r["date"] or _kept(Path(r["path"])), r["name"]))
    runs = runs[-choice.last :] if choice.last else runs
    for r in runs:
        r["at"], r["value"] = _chosen(r, name, choice.at)
    return {
        "kind": KIND, "whywait_version": __version__, "directory": str(directory), "figure": name,
        "title": metric.title, "unit": metric.unit, "better": metric.better, "runs": runs, "broken": broken,
    }  # fmt: skip


def _kept(path: Path) -> str:
    """When a run without a date of its own (a simulated one) was written, to stand where it belongs."""
    return day_of(int(path.stat().st_mtime * 1e9)) or ""


def _folders(top: Path) -> Iterator[Path]:
    """Those that hold a run, or what is left of one, in the order of their names; links are not followed."""
    for seen, (root, folders, files) in enumerate(os.walk(top, onerror=None, followlinks=False)):
        folders.sort()
        if seen > MOST:
            return
        here = Path(root)
        own = {"manifest.json", "summary.json", *OTHERS} & set(files)
        if own == {"summary.json"} and folders and not any(f.endswith(".parquet") for f in files):
            own = set()  # a summary that somebody kept among runs
        spooled = any(f == "spool" or f.startswith("spool-") for f in folders)
        if own or spooled:
            folders.clear()  # what is in a run, or the rounds of a trial, are not runs of their own
            yield here
        if len(here.relative_to(top).parts) >= DEPTH:
            folders.clear()
        folders[:] = [f for f in folders if not f.startswith(".")]


def _of(path: Path, top: Path) -> dict[str, Any]:
    other = next((kind for file, kind in OTHERS.items() if (path / file).exists()), None)
    if other and not (path / "manifest.json").exists():
        return _other(path, top, other)
    if not (path / "manifest.json").exists():
        found = app.show(path)
        return _told(path, top, found.run.manifest, found.summary)
    m = manifest_of(_json(path / "manifest.json"), str(path))
    kept = path / "summary.json"
    return _told(path, top, m, _json(kept) if kept.exists() else app.show(path).summary)


def _told(path: Path, top: Path, m: Manifest, summary: Mapping[str, Any]) -> dict[str, Any]:
    invalid = summary.get("invalid") or []
    state = "PARTIAL" if m.partial else "INVALID" if invalid else "whole"
    knee = summary.get("knee")
    points = [{"load": p.load, "knee": i == knee, "target": p.target, "labelled": bool(p.label),
               "figures": {k: v for k, v in p.figures.items() if v is not None}}
              for i, p in enumerate(digest.of_summary(summary, "").points)]  # fmt: skip
    return {
        **_blank(path, top), "state": state, "why": m.partial_reason if m.partial else "; ".join(map(str, invalid)),
        "date": day_of(m.zero_unix_ns), "made_by": m.made_by, "engine": _text(m.engine.get("name")),
        "model": _text(m.engine.get("model")), "machine": _machine(m.machine), "definitions": _text(m.definitions),
        "points": points,
        "verdict": str(summary.get("headline") or "") or _verdict(summary),
    }  # fmt: skip


def _other(path: Path, top: Path, kind: str) -> dict[str, Any]:
    """A trial, a plan …: listed by what it says, without figures; its rounds are not listed."""
    file = next(f for f, k in OTHERS.items() if k == kind and (path / f).exists())
    raw = _json(path / file)
    date = day_of(int((path / file).stat().st_mtime * 1e9))
    partial = bool(raw.get("partial"))
    return {**_blank(path, top), "state": "PARTIAL" if partial else "whole", "date": date, "made_by": kind,
            "why": str(raw.get("partial_reason") or "") if partial else "",
            "verdict": str(raw.get("headline") or "")}  # fmt: skip


def _blank(path: Path, top: Path) -> dict[str, Any]:
    empty = dict.fromkeys(("date", "made_by", "engine", "model", "machine", "definitions"))
    return {"name": _name(path, top), "path": str(path), "state": "", "why": "", **empty, "verdict": "", "points": []}


def _name(path: Path, top: Path) -> str:
    return str(path.relative_to(top)) if path != top else path.name


def _json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path.name} is too large")
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is not an object")
    return found


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _machine(machine: Mapping[str, Any]) -> str | None:
    gpus = machine.get("gpus") or []
    names = [str(g.get("name") or "GPU") for g in gpus if isinstance(g, Mapping)]
    if names:
        return f"{len(names)} × {names[0]}" if len(names) > 1 else names[0]
    client = machine.get("client")
    found = machine.get("name") or (client.get("cpu") if isinstance(client, Mapping) else None)
    return None if found is None else str(found)


def _verdict(summary: Mapping[str, Any]) -> str:
    for v in summary.get("verdicts") or ():
        return f"{v.get('claim', '')} ({v.get('state', '')})"
    return ""


def _chosen(run: Mapping[str, Any], figure: str, at: str) -> tuple[str | None, float | None]:
    points = [p for p in run["points"] if not at or p["load"] == at]
    plain = [p for p in points if not p["labelled"]] or points
    best = next((p for p in plain if p["knee"]), None) or max(plain, key=lambda p: p["target"] or 0, default=None)
    return (None, None) if best is None else (best["load"], best["figures"].get(figure))
