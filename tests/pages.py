"""Pages of the report, parsed: what holds for every one of them, and Runs to make them of."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np

from tests.analysis_runs import MS, S, Service, gauge_rows, join, make_run
from whywait.analyze.summary import summarize
from whywait.core.columns import KINDS
from whywait.core.run import Run
from whywait.core.table import Table
from whywait.judge.diagnose import headline, judge
from whywait.report.html import render

MB = 1_000_000
VOID = {"meta", "link", "br", "hr", "img", "input"}
TAGS = {
    "html", "head", "meta", "link", "title", "style", "body", "header", "main", "footer", "nav", "section", "article",
    "figure", "figcaption", "div", "span", "p", "h1", "h2", "h3", "ul", "li", "dl", "dt", "dd", "a", "b", "small",
    "code", "strong", "abbr", "details", "summary", "table", "caption", "thead", "tbody", "tr", "th", "td", "svg",
    "defs", "pattern", "g", "rect", "line", "path", "circle", "text", "desc", "pre", "script",
}  # fmt: skip
HOSTILE = (
    "<script>alert(1)</script>",
    "</svg><img src=x onerror=alert(1)>",
    "]]><!-- ",
    '"\' onmouseover=\'alert(1)" x="',
    "</style></title><iframe src='https://evil.example'>",
    "&lt;b&gt; &amp; ${x} {{x}}",
)


class Page(HTMLParser):
    """A parsed page: its elements with attributes, and its text; complains of elements that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: dict[str, list[str]] = {}
        self.inside: list[tuple[str, ...]] = []  # of each element, those that hold it
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({k for k, _ in attrs}) == len(attrs), f"an attribute twice in <{tag}>"
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        self.inside.append(tuple(self._open))
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.get_starttag_text() is not None and self._open and self._open[-1] == tag:
            self._open.pop()
        else:
            raise AssertionError(f"</{tag}> closes {self._open[-3:]}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        self.inside.append(tuple(self._open))

    def handle_data(self, data: str) -> None:
        self.words.setdefault(self._open[-1] if self._open else "", []).append(data)

    def all(self, tag: str, **attrs: str) -> list[dict[str, str]]:
        return [a for t, a in self.elements if t == tag and all(a.get(k.rstrip("_")) == v for k, v in attrs.items())]

    @property
    def text(self) -> str:
        return "\n".join(w for t, words in self.words.items() if t not in {"style", "script"} for w in words)


def analysed(run: Run, **more: Any) -> dict[str, Any]:
    summary = summarize(run)
    verdicts = judge(run, summary)
    return {**summary, "verdicts": [v.as_dict() for v in verdicts], "headline": headline(verdicts), **more}


def page(run: Run, **more: Any) -> Page:
    return checked(render(run, analysed(run, **more)))


def checked(text: str) -> Page:
    """What holds for every page: it nests, knows its elements, loads nothing, runs nothing but our own script, has its
    landmarks, and names what it draws."""
    found = Page(text)
    assert {t for t, _ in found.elements} <= TAGS
    ids = [a["id"] for _, a in found.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attrs in found.elements:
        assert not [k for k in attrs if k.startswith("on") or k in {"src", "srcset", "action", "formaction"}]
        assert re.fullmatch(r"#[\w-]+|data:,", attrs.get("href", "#x"))
        assert attrs.get("href", "#") in {"#", "data:,", *(f"#{i}" for i in ids)}
        assert "://" not in " ".join(v for k, v in attrs.items() if k not in {"title", "aria-label"})
        assert set(attrs.get("aria-labelledby", "").split()) <= set(ids)
        assert not re.search(r"\b(nan|inf)\b", " ".join(attrs.values()))
    css = "".join(found.words["style"])
    assert "@import" not in css
    assert set(re.findall(r"url\(([^)]*)\)", css)) <= {"#hatch", "#hatch-kv", "#hatch-hot"}
    _scripts(found)
    _landmarks(found)
    _figures(found)
    assert all(a.get("aria-label") and a.get("tabindex") == "0" for a in found.all("div", role="region"))
    assert len(text.encode()) < 6 * MB
    return found


def _scripts(found: Page) -> None:
    """The policy lets one script run, by its hash; the other block is data."""
    [policy] = [a["content"] for a in found.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert "http" not in policy.replace("http-equiv", "")
    kinds = [a for t, a in found.elements if t == "script"]
    if not kinds:
        assert "script-src" not in policy
        return
    assert kinds == [{"type": "application/json", "id": "timelines-data"}, {}]
    code = found.words["script"][-1]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|XMLHttp|import\(", code)


def _landmarks(found: Page) -> None:
    for name in ("header", "main", "nav", "footer", "h1"):
        assert len(found.all(name)) == 1, name
    assert all(a.get("aria-labelledby") for a in found.all("section"))
    [first, *_] = found.all("a")
    assert first["class"] == "skip"  # the first stop of the keyboard
    levels = [int(t[1]) for t, _ in found.elements if re.fullmatch(r"h\d", t)]
    assert all(b - a <= 1 for a, b in zip([0, *levels[:-1]], levels, strict=True))


def _figures(found: Page) -> None:
    """Every chart has its reading, its title and description, and its table below it."""
    for picture in found.all("svg", role="img"):
        assert len(picture["aria-labelledby"].split()) == 2
    for name, text in (("figcaption", "figure"), ("caption", "table")):
        assert len(found.all(name)) == len(found.all(text))
    drawn: list[int] = []  # tables after each picture, before the next
    for tag, attrs in found.elements:
        if tag == "svg" and attrs.get("role") == "img":
            drawn.append(0)
        elif tag == "table" and drawn:
            drawn[-1] += 1
    assert all(drawn), drawn
    readings = len(found.all("p", class_="reading"))
    assert readings == len(found.all("figure")) + len(found.all("details", class_="card lanes"))


def sweep(levels: tuple[int, ...] = (1, 4, 8, 16), **more: Any) -> Run:
    """A service with 4 slots under rising concurrency, its gauges read; the last level again as a labelled point."""
    runs = []
    for c in [*levels, levels[-1]]:
        run = Service(slots=4, noise=0.2, seed=c).closed(c, 40)
        span = range(int(run.points["start_ns"][0]), int(run.points["end_ns"][0]), 100 * MS)
        rows = [r for name, v in (("running", min(c, 4)), ("waiting", max(c - 4, 0)), ("kv_use", c / 20))
                for r in gauge_rows(name, [(t, float(v)) for t in span])]  # fmt: skip
        rows = [{"answered_ns": r["asked_ns"] + MS, **r} for r in rows]
        runs.append(dataclasses.replace(run, readings=Table.from_rows("readings", rows)))
    whole = join(runs)
    label = np.array([None] * len(levels) + ["long prompts mixed in"], dtype=object)
    manifest = dataclasses.replace(whole.manifest, **more)
    return dataclasses.replace(whole, points=whole.points.replace(label=label), manifest=manifest)


def failed() -> Run:
    """Nothing ended well: thirty requests that the service refused, and one that was never sent."""
    rows: list[dict[str, Any]] = [
        {
            "outcome": "http_error",
            "fault": "service",
            "due_ns": S + i * MS,
            "sent_ns": S + i * MS,
            "end_ns": S + 90 * MS,
        }
        for i in range(30)
    ]
    return make_run([*rows, {"outcome": "never_sent", "fault": "client", "due_ns": S}], points=[{"mode": "rate"}])


def mixed() -> Run:
    """Short requests whose decode a long prompt holds up: every eighth has a prefill of 200 ms, in which all stand."""
    rows, chunks = [], []
    t = S
    for i in range(40):
        long = i % 8 == 4
        first = t + (200 if long else 20) * MS
        gaps = [20] * 20
        if i % 8 == 3:
            gaps[5] = 220
        times = [first + int(v) * MS for v in np.cumsum([0, *gaps])]
        rows.append({"sent_ns": t, "first_ns": first, "last_ns": times[-1], "end_ns": times[-1], "rtt_ns": 0,
                     "connect_ns": 0, "engine_prefill_ms": 200.0 if long else 20.0, "engine_queue_ms": 0.0,
                     "class": "long" if long else "short", "output_tokens": 21, "content_chunks": 21,
                     "prompt_tokens": 4000 if long else 64})  # fmt: skip
        chunks += [{"id": i, "t_ns": v} for v in times]
        t += 120 * MS if i % 8 == 3 else 450 * MS
    return make_run(rows, chunks)


def hostile(run: Run) -> tuple[Run, dict[str, Any]]:
    """``run`` with every string that a service or a file gives replaced by a hostile one, and such a summary."""
    bad = np.array([HOSTILE[i % len(HOSTILE)] for i in range(len(run.requests))], dtype=object)
    requests = run.requests.replace(**{"class": bad, "detail": bad, "trace_id": bad, "finish_reason": bad})
    label = np.array([None, *HOSTILE[:4]], dtype=object)
    doubts = [{"what": h, "why": h, "next": h} for h in HOSTILE]
    facts = dict(zip(HOSTILE, HOSTILE, strict=True))
    manifest = dataclasses.replace(
        run.manifest, command=list(HOSTILE), engine={"model": HOSTILE[0], "name": HOSTILE[1], **facts}, workload=facts,
        machine={"client": {"cpu": HOSTILE[2]}}, doubts=doubts, endpoint={"url": HOSTILE[4]}, partial=True,
        partial_reason=HOSTILE[1], client={"list": [*HOSTILE, facts]}, whywait_version=HOSTILE[3],
    )  # fmt: skip
    run = Run(manifest, run.points.replace(label=label), requests, run.chunks, run.steps, run.readings)
    verdict = {"cause": "x", "claim": HOSTILE[0], "state": "holds", "share": 0.5, "of": HOSTILE[1], "where": HOSTILE[2],
               "how": HOSTILE[3], "evidence": list(HOSTILE), "against": list(HOSTILE), "lever": HOSTILE[4],
               "next_step": HOSTILE[5], "point": 0}  # fmt: skip
    verdicts = [verdict, {**verdict, "state": "undecided"}, {**verdict, "state": "fails"}]
    return run, {**summarize(run), "verdicts": verdicts, "headline": " ".join(HOSTILE)}


def million(points: int = 24, requests: int = 260, tokens: int = 162) -> Run:
    """A million chunks: as many points as are drawn, in each more requests than that, gauges ten times a second."""
    rng = np.random.default_rng(1)
    n, all_ = points * requests, points * requests * tokens
    point = np.repeat(np.arange(points), requests)
    start = np.arange(points) * 100 * S
    sent = start[point] + np.tile(np.sort(rng.integers(0, 40 * S, requests)), points)
    gap = rng.integers(10 * MS, 30 * MS, (n, tokens))
    gap[:, 0] = rng.integers(50 * MS, 900 * MS, n)
    gap[rng.random((n, tokens)) < 0.01] += 200 * MS
    t = sent[:, None] + np.cumsum(gap, axis=1)
    cols = {"point": point, "id": np.arange(n), "due_ns": sent, "sent_ns": sent, "accepted_ns": t[:, 0],
            "first_ns": t[:, 0], "first_answer_ns": t[:, 0], "last_ns": t[:, -1], "end_ns": t[:, -1] + 10_000,
            "connect_ns": np.zeros(n), "rtt_ns": np.full(n, 100_000), "prompt_tokens": np.full(n, 100),
            "output_tokens": np.full(n, tokens), "content_chunks": np.full(n, tokens), "attempt": np.ones(n),
            "replica": np.zeros(n), "outcome": np.zeros(n), "fault": np.zeros(n), "engine_prefill_ms": np.full(n, 40.0),
            "class": np.array(["a class of requests"] * n, dtype=object)}  # fmt: skip
    chunk = {"id": np.repeat(np.arange(n), tokens), "t_ns": t.ravel(), "kind": np.full(all_, KINDS.index("answer")),
             "tokens": np.ones(all_), "clock": np.zeros(all_)}  # fmt: skip
    at = np.concatenate([np.arange(s, s + 45 * S, S // 10) for s in start.tolist()])
    names = ("running", "waiting", "kv_use")
    read = {"asked_ns": np.tile(at, 3), "answered_ns": np.tile(at + MS, 3), "value": rng.random(3 * len(at)),
            "source": np.array(["metrics/0"] * 3 * len(at), dtype=object),
            "name": np.repeat(np.array(names, dtype=object), len(at))}  # fmt: skip
    rows = [{"mode": "rate", "target": i + 1.0, "planned": requests, "start_ns": int(s),
             "end_ns": int(t[point == i].max())} for i, s in enumerate(start)]  # fmt: skip
    run = make_run([], points=rows, slo={"ttft_ms": 500.0, "tpot_ms": 25.0})
    return dataclasses.replace(run, requests=Table("requests", cols), chunks=Table("chunks", chunk),
                               readings=Table("readings", read))  # fmt: skip


@functools.cache
def million_judged() -> tuple[Run, dict[str, Any]]:
    """:func:`million` with its summary, made once."""
    run = million()
    return run, analysed(run)


@functools.cache
def million_page() -> str:
    """The page of :func:`million_judged`, made once."""
    return render(*million_judged())
