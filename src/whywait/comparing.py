"""``compare``: a run against another, or several against one; stored baselines. Part of the application layer.

What is given is a run folder, its ``summary.json``, or a baseline that ``--save-baseline`` made. Nothing is measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whywait import __version__, app
from whywait.analyze import baseline, digest
from whywait.analyze.against import Comparison
from whywait.analyze.bill import Ask
from whywait.analyze.digest import Digest
from whywait.analyze.disturbed import disturbances
from whywait.analyze.energy_model import the_machine
from whywait.analyze.remote import with_agents
from whywait.analyze.summary import summarize
from whywait.core import bounded
from whywait.core.run import Run, manifest_of
from whywait.core.secrets import clean
from whywait.errors import UsageError
from whywait.judge import alike, change_gates, compared
from whywait.judge.change_gates import ChangeGate
from whywait.judge.compared import Finding
from whywait.physics.prices import Offer, of_machine, shipped
from whywait.probe.spans import joined as with_spans

MOST_BYTES = 200_000_000  # of a JSON file that is read: more is none of ours
KIND = "whywait comparison"


@dataclass(frozen=True)
class Options:
    """``allow``: kinds of unlikeness (``judge.alike.KINDS``); ``at``: only these load points, as they are named;
    ``metrics``: what is claimed (empty: the usual); ``threshold``: of a change that counts; ``slo``: judge goodput by
    this one (None: the run's own); ``run_noise``: standard deviation from run to run as a share, where no repeats tell;
    ``offers``: a price book (None: the shipped one; the first offer for a run's machine is taken); ``devices``: how
    many serve, where a run does not tell."""

    allow: tuple[str, ...] = ()
    at: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    threshold: float = compared.THRESHOLD
    slo: dict[str, float] | None = None
    run_noise: float = 0.0
    gates: tuple[ChangeGate, ...] = ()
    offers: tuple[Offer, ...] | None = None
    devices: int | None = None


@dataclass(frozen=True)
class Compared:
    """What a comparison says: ``found`` are plain JSON values, those of :func:`compare`."""

    found: dict[str, Any]

    @property
    def headline(self) -> str:
        said: str = self.found["headline"]
        return said

    def _repr_html_(self) -> str:
        from whywait.report import notebook
        from whywait.report.compared import print_compared

        return notebook.as_html(lambda out: print_compared(self.found, out))


def compare(a: Any, bs: Sequence[Any], options: Options | None = None, repeats: Sequence[Any] = ()) -> dict[str, Any]:
    """Each of ``bs`` against ``a``: paths, ``app.Result``, ``Run`` or ``Digest``. ``repeats`` are more runs of A.

    Returns:
        ``kind, whywait_version, level, threshold, a, repeats, comparisons, gates, state, doubts, headline``; plain JSON
        values. A comparison has ``b, unlike, changed, only_a, only_b, points, gates, headline``; a point ``load, mode,
        target, label, paired, pairs, why_apart, figures, waits``; figures and waits as ``judge.compared.Finding``.

    Raises:
        UsageError: what is given is no run, or is not comparable (each difference named).
    """
    o = options or Options()
    names = _names([a, *bs])
    first = read(a, o, names[0])
    if repeats:
        more = [read(r, o, f"repeat {i + 1}") for i, r in enumerate(repeats)]
        for d in more:
            alike.check(alike.unlike(first, d), o.allow, d.name)
        first = digest.with_repeats(first, more)
    sides = [read(b, o, name) for b, name in zip(bs, names[1:], strict=True)]
    for d in sides:
        alike.check(alike.unlike(first, d), o.allow, d.name)
    judged = [_points(first, d, o) for d in sides]
    compared.adjust([f for points, _ in judged for _, figures, waits in points for f in (*figures, *waits)])
    # Conditions of all gates, at all load points, of all B's: that many intervals share the error.
    share = len(o.gates) * sum(len(points) for points, _ in judged)
    told = [_told(first, d, j, (o, share)) for d, j in zip(sides, judged, strict=True)]
    gates = [{"b": c["b"]["name"], **g} for c in told for g in c["gates"]]
    return {
        "kind": KIND, "whywait_version": __version__, "level": 0.95, "threshold": o.threshold, "a": _side(first),
        "runs_of_a": first.runs, "comparisons": told, "gates": gates,
        "state": change_gates.summed(gates) if gates else None, "doubts": _doubts(first, sides, o),
        "headline": ". ".join(c["headline"] for c in told),
    }  # fmt: skip


def read(source: Any, o: Options, name: str = "") -> Digest:
    """
    Raises:
        UsageError: no run, no summary and no baseline; or ``o.slo`` asks for what its source does not hold.
    """
    if isinstance(source, Digest):
        return _own_slo(dataclasses.replace(source, name=name or source.name), o)
    if isinstance(source, app.Result):
        return of_run(source.run, o, name or str(source.directory))
    if isinstance(source, Run):
        return of_run(source, o, name or "run")
    path = Path(source)
    if path.is_dir():
        _no_other(path)
        return of_run(with_spans(Run.load(path)).run, o, name or path.name)
    if path.name == "summary.json" and (path.parent / "requests.parquet").exists():
        return of_run(with_spans(Run.load(path.parent)).run, o, name or path.parent.name)
    return _own_slo(_of_file(path, name or path.name), o)


def of_run(run: Run, o: Options, name: str) -> Digest:
    """A Run priced by ``o.ask``, held to ``o.slo`` where that is given (to the exclusion of the classes' own)."""
    if o.slo is not None:
        workload = dict(run.manifest.workload)
        workload["classes"] = [{**c, "slo": {}} for c in workload.get("classes") or ()]
        run = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, slo=o.slo, workload=workload))
    run = with_agents(run)
    summary = summarize(run)
    machine = the_machine(run)
    book = shipped() if o.offers is None and machine else o.offers or ()
    ask = Ask(of_machine(book, machine.name if machine else None), o.devices)
    found = digest.digest(run, summary, name, ask)
    return dataclasses.replace(found, facts={**found.facts, "disturbed": list(disturbances(run, summary).values())})


def save_baseline(path: Path, runs: Sequence[Any], o: Options | None = None) -> Digest:
    """A baseline of one run, or of several of the same, so that what differs between runs is in it.

    Raises:
        UsageError: the runs are not alike, or it cannot be written.
    """
    o = o or Options()
    found = [read(r, o, name) for r, name in zip(runs, _names(runs), strict=True)]
    for d in found[1:]:
        alike.check(alike.unlike(found[0], d), o.allow, d.name)
    whole = digest.with_repeats(found[0], found[1:]) if len(found) > 1 else found[0]
    text = clean(json.dumps(baseline.as_json(whole), allow_nan=False, separators=(",", ":"), ensure_ascii=False))
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}", "give a file in a folder that exists") from None
    return whole


def _of_file(path: Path, name: str) -> Digest:
    try:
        raw = bounded.read_json(path, MOST_BYTES, "give the folder of the run")
    except OSError as exc:
        hint = "a run's folder, its summary.json, or a baseline of --save-baseline"
        raise UsageError(f"cannot read {path}: {exc.strerror}", hint) from None
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{path} is not JSON: {exc}", "a run's folder, its summary.json, or a baseline") from None
    if isinstance(raw, dict) and raw.get("kind") == baseline.KIND:
        return dataclasses.replace(baseline.from_json(raw, str(path)), name=name)
    try:
        beside = path.parent / "manifest.json"
        known = path.name == "summary.json" and beside.exists()
        manifest = manifest_of(bounded.read_json(beside), str(beside)) if known else None
        return digest.of_summary(raw, name, manifest)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
        what = f"{type(exc).__name__}: {exc}"
        raise UsageError(f"{path} is neither a summary.json nor a baseline ({what[:200]})",
                         "a run's folder, its summary.json, or a baseline of --save-baseline") from None  # fmt: skip


def _no_other(path: Path) -> None:
    for file, verb in (("trial.json", "ab"), ("quality.json", "quality"), ("plan.json", "plan"), ("vary.json", "ab")):
        if (path / file).exists() and not (path / "manifest.json").exists():
            raise UsageError(f"{path} is of whywait {verb}, which has its own comparison", f"whywait show {path}")


def _own_slo(d: Digest, o: Options) -> Digest:
    if o.slo is not None and dict(d.facts.get("slo") or {}) != o.slo:
        raise UsageError(f"{d.name} holds no requests to judge by another SLO", "give the folder of the run")
    return d


def _names(sources: Sequence[Any]) -> list[str]:
    """Short and distinct: of a path its last part, with as much before it as tells it from the others."""
    out = [str(_folder(Path(s))) if isinstance(s, (str, Path))
           else getattr(s, "name", None) or str(getattr(s, "directory", "run")) for s in sources]  # fmt: skip
    short = [Path(x).name or x for x in out]
    named = [s if short.count(s) == 1 else x for s, x in zip(short, out, strict=True)]
    return [n if named.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(named)]


def _folder(path: Path) -> Path:
    return path.parent if path.name == "summary.json" and path.parent.name else path


_Judged = tuple[list[tuple[Comparison, list[Finding], list[Finding]]], tuple[list[str], list[str]]]


def _points(a: Digest, b: Digest, o: Options) -> _Judged:
    pairs, only_a, only_b = alike.loads(a, b, "load" in o.allow)
    if o.at:
        pairs = [(i, j) for i, j in pairs if b.points[j].load in o.at]
        if not pairs:
            known = ", ".join(p.load for p in b.points)
            raise UsageError(f"--at: {', '.join(o.at)} is not in both", f"{b.name} has: {known}")
    why = _why_apart(a, b)
    slo = bool(b.facts.get("slo") or b.facts.get("slo_of_classes"))
    out = []
    for i, j in pairs:
        c = Comparison(a.points[i], b.points[j], why, o.run_noise)
        try:
            out.append((c, compared.findings(c, o.metrics, o.threshold, slo), compared.waits(c, o.threshold)))
        except KeyError as exc:
            hint = "such as output_tokens_per_s, ttft_ms.p95 or phases.queue; docs/compare.md has all"
            raise UsageError(f"--metric: there is no figure {exc.args[0]!r}", hint) from None
    return out, (only_a, only_b)


def _why_apart(a: Digest, b: Digest) -> str:
    """Why they did not send the same schedule, '' where the facts say that they did; the requests themselves have the
    last word (``pairing``). Lengths that happen to be the same are no evidence where nobody tells what was asked."""
    if a.facts.get("workload") is None or b.facts.get("workload") is None:
        return "the workload is not told by both"
    unlike = [u for u in alike.unlike(a, b) if u.kind == "workload"]
    same = not unlike and a.facts.get("seed") == b.facts.get("seed")
    return "" if same else "not the same workload and seed"


def _told(a: Digest, b: Digest, judged: _Judged, how: tuple[Options, int]) -> dict[str, Any]:
    points, (only_a, only_b) = judged
    o, share = how
    return {
        "b": _side(b),
        "unlike": [u._asdict() for u in alike.unlike(a, b)],
        "changed": [{k: v for k, v in u._asdict().items() if k != "kind"} for u in alike.changed(a, b)],
        "untold": alike.untold(a, b),
        "only_a": only_a, "only_b": only_b,
        "points": [_point(c, figures, waits) for c, figures, waits in points],
        "gates": change_gates.judge(o.gates, [(c, f) for c, f, _ in points], share),
        "headline": compared.headline([(c.b.load, f) for c, f, _ in points], b.name, a.runs > 1),
    }  # fmt: skip


def _point(c: Comparison, figures: Sequence[Finding], waits: Sequence[Finding]) -> dict[str, Any]:
    p = c.b
    before = c.a.notes
    notes = {n: v if before.get(n, v) == v else f"{before[n]} → {v}" for n, v in p.notes.items() if p.figures.get(n)}
    return {
        "load": p.load, "mode": p.mode, "target": p.target, "label": p.label, "paired": c.paired, "pairs": len(c.i),
        "why_apart": c.why_apart, "requests": {"a": sum(c.a.counts.values()), "b": sum(p.counts.values())},
        "figures": [f.as_dict() for f in figures], "waits": [f.as_dict() for f in waits], "notes": notes,
    }  # fmt: skip


def _side(d: Digest) -> dict[str, Any]:
    keys = ("made_by", "date", "model", "whywait_version", "partial", "invalid", "slo")
    engine = d.facts.get("engine") or {}
    return {"name": d.name, "source": d.source, "runs": d.runs, **{k: d.facts.get(k) for k in keys},
            "engine": engine.get("name")}  # fmt: skip


def _doubts(a: Digest, bs: Sequence[Digest], o: Options) -> list[dict[str, str]]:
    out = []
    if a.runs < 2 and not o.run_noise:
        out.append({"what": "what differs from run to run of the same is not in the intervals",
                    "why": "there is one run of A; the intervals are of its requests",
                    "next": "--repeat RUN (more runs of A), a baseline of several runs, or --run-noise"})  # fmt: skip
    for d in (a, *bs):
        who = "A" if d is a else d.name
        if d.facts.get("partial"):
            out.append({"what": f"{who} is PARTIAL", "why": str(d.facts["partial"]), "next": "measure it again"})
        if d.facts.get("invalid"):
            out.append({"what": f"{who} is an invalid measurement", "why": "; ".join(d.facts["invalid"]), "next": ""})
        if d.facts.get("disturbed"):
            out.append({"what": f"{who} was disturbed", "why": "; ".join(d.facts["disturbed"]),
                        "next": "measure it again on a quiet machine"})  # fmt: skip
        if d.facts.get("made_by") == "simulated":
            out.append({"what": f"{who} is simulated", "why": "the model's own error is not in the intervals",
                        "next": "whywait what-if says how far it is off"})  # fmt: skip
    for d in bs:
        if several := alike.several(a, d):
            out.append({"what": f"several load points of one name in A or {d.name}",
                        "why": f"{', '.join(several)}: compared in their order, the first with the first",
                        "next": "keep them in runs of their own"})  # fmt: skip
        if told := alike.untold(a, d):
            out.append({"what": f"A and {d.name} may not be alike", "why": f"not told by both: {', '.join(told)}",
                        "next": "give the folders of the runs"})  # fmt: skip
        out += [{"what": f"{d.name} is compared though it is unlike A", "why": u.said, "next": ""}
                for u in alike.unlike(a, d)]  # fmt: skip
    return out
