"""The report in headless Chromium: it renders, complains of nothing, asks nobody for anything, can be zoomed and used
by keyboard, is legible in light and dark, and prints. Skipped where there is no Chromium."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.analysis_runs import Service
from tests.chromium import BINARY, Browser, Unanswered, browser
from tests.pages import HOSTILE, analysed, failed, hostile, million_page, mixed, sweep
from tests.test_passive import level, loaded, watched
from whywait.analyze.phases import PHASES, account
from whywait.core.run import Run
from whywait.report.html import render
from whywait.report.text import PHASE_NAMES

pytestmark = pytest.mark.skipif(BINARY is None, reason="no chromium on PATH to open the page with")
Open = Callable[..., Browser]

#: The lowest contrast (WCAG 2: relative luminance) of a text against what is behind it, and the text.
CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const parse = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => { const f = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((m, n) => n - m);
    return (x + 0.05) / (y + 0.05); };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c[3] === 255) return c; } return [255, 255, 255, 255]; };
  let worst = [99, ""];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n = walk.nextNode(); n; n = walk.nextNode()) {
    const e = n.parentElement;
    if (!n.data.trim() || ["SCRIPT", "STYLE", "title", "desc"].includes(e.tagName)) continue;
    const style = getComputedStyle(e), svg = e.namespaceURI.endsWith("svg");
    let back = behind(e);
    if (svg && e.classList.contains("ink")) {  // inside a bar: the fill of the bar before it
      const bar = e.previousElementSibling, fill = getComputedStyle(bar).fill;
      const plain = {"f-unknown": "--unknown", "f-kv": "--queue", "f-throttled": "--stall"};
      const key = Object.keys(plain).find((k) => bar.classList.contains(k));
      back = parse(key ? getComputedStyle(document.documentElement).getPropertyValue(plain[key]) : fill);
    }
    const found = ratio(parse(svg ? style.fill : style.color), back);
    if (found < worst[0]) worst = [found, n.data.slice(0, 60)];
  }
  return worst;
})()"""


FOCUSED = """(() => { const e = document.activeElement, r = e.getBoundingClientRect();
  return [e.tagName, r.top + scrollY, getComputedStyle(e).outlineStyle]; })()"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        with browser(tmp_path_factory.mktemp("profile")) as found:
            yield found
    except Unanswered as exc:
        pytest.skip(f"chromium did not answer: {exc}")


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path) -> Open:
    def open_(of: Run | str, summary: dict[str, Any] | None = None, fragment: str = "", **media: str) -> Browser:
        report = tmp_path / "report.html"
        text = of if isinstance(of, str) else render(of, summary or analysed(of))
        report.write_text(text, encoding="utf-8")
        chromium.size(1280)
        chromium.events.clear()
        chromium.open(report, fragment, **media)
        return chromium

    return open_


def quiet(page: Browser) -> None:
    """It complained of nothing and loaded nothing but itself."""
    assert page.complaints == []
    assert {re.sub(r"#.*", "", u).rsplit("/", 1)[-1] for u in page.requested} <= {"report.html", "blank", "about:blank"}
    assert all(u.startswith(("file:", "about:", "data:,")) for u in page.requested)


def partial() -> Run:
    run = Service().closed(4, 20)
    return dataclasses.replace(
        run, manifest=dataclasses.replace(run.manifest, partial=True, partial_reason="interrupted")
    )


def simulated() -> Run:
    run = sweep()
    return dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, made_by="simulated"))


@pytest.mark.parametrize(
    "run",
    [
        sweep(slo={"ttft_ms": 200.0}),
        Service().closed(4, 12),  # a single point, no metrics
        watched(*loaded(), level("kv_use", 0.4), level("power_watts", 300.0, "gpu/0")),
        partial(),
        simulated(),
        failed(),
        mixed(),
    ],
    ids=["sweep", "single, no metrics", "watched", "partial", "simulated", "failed", "classes"],
)
def test_every_kind_of_run_renders_without_complaint_and_without_asking_anybody(opened: Open, run: Run):
    page = opened(run)
    quiet(page)
    assert page.value("document.querySelector('h1').getBoundingClientRect().height") > 10
    assert page.value("[...document.querySelectorAll('svg[role=img]')].every(e => e.getBoundingClientRect().width > 99)"
                      " || document.querySelectorAll('details:not([open])').length > 0")  # fmt: skip
    for width in (1280, 360):
        page.size(width)
        assert page.value("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_light_and_dark(opened: Open, scheme: str):
    page = opened(sweep(slo={"ttft_ms": 200.0}), prefers_color_scheme=scheme)
    dark = page.value("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    assert dark == (scheme == "dark")
    page.value("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    worst, text = page.value(CONTRAST)
    assert worst >= 4.5, text


def test_the_first_screen_holds_verdict_waits_device_curve_and_cost(opened: Open):
    page = opened(sweep(slo={"ttft_ms": 200.0}))
    page.size(1600, 1000)
    inside = "document.getElementById('{}').closest('figure').getBoundingClientRect().bottom"
    for key in ("phases-h", "occupancy-h", "curve-ttft-h", "cost-h"):
        assert page.value(inside.format(key)) <= 1000, key
    assert page.value("document.querySelector('h1').getBoundingClientRect().top") < 100


def test_a_request_is_zoomed_by_its_address_and_shows_its_phases_chunks_and_neighbours(opened: Open):
    run = mixed()
    acc = account(run)
    stalled = int(np.argmax(acc.phases[:, PHASES.index("stall")]))
    page = opened(run, fragment=f"#request-0-{stalled}")
    quiet(page)
    said = page.text("document.querySelector('.chosen').textContent")
    assert f"Request {stalled} (ok, class short, 64 prompt tokens, 21 output tokens, 21 chunks)" in said
    assert re.search(
        rf"longest is 220 ms, 120 ms after its beginning, 200 ms of it in the prefill of #{stalled + 1}", said
    )
    table = page.value(
        "[...document.querySelectorAll('.chosen tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    told = {name: float(time.split()[0].replace(",", "")) for name, time, _ in table}
    for i, key in enumerate(PHASES):
        true = acc.phases[stalled, i] / 1e6
        assert told.get(PHASE_NAMES[key], 0.0) == pytest.approx(true, rel=0.02, abs=0.7), key
    assert page.value("document.querySelectorAll('.chosen .plot line').length") == 21  # a stroke per chunk
    # Its lane fills the width now; neighbours are buttons that go on to them.
    lane = f"document.querySelector('#timeline-0 g[data-r=\"{stalled}\"]').getBoundingClientRect()"
    plot = "document.querySelector('#timeline-0 svg[role=img]').getBoundingClientRect()"
    assert page.value(f"{lane}.width / {plot}.width") > 0.85
    page.value("document.querySelector('.beside button').click()")
    assert page.text("location.hash") == f"#request-0-{stalled + 1}"
    assert page.text("document.querySelector('#timeline-0 select').value") == str(stalled + 1)


def test_timelines_zoom_by_keyboard_by_dragging_and_back(opened: Open):
    page = opened(sweep())
    box = "document.querySelector('details[open] .timeline')"
    ticks = f"[...{box}.querySelectorAll('.x-axis text')].map(e => parseFloat(e.textContent)).filter(x => !isNaN(x))"
    whole, lines = page.value(ticks), page.value(f"{box}.querySelector('svg svg[viewBox]').getAttribute('viewBox')")
    page.value(f"{box}.querySelector('.plot').focus()")
    for _ in range(3):
        page.key("+", "+")
    near = page.value(ticks)
    assert max(near) - min(near) < (max(whole) - min(whole)) / 4
    # The panels (queue, running, KV space) zoom along with the lanes.
    assert page.value(f"{box}.querySelector('svg svg[viewBox]').getAttribute('viewBox')") != lines
    page.key("ArrowRight")
    assert page.value(ticks)[0] > near[0]
    page.key("0", "0")
    again = page.value(ticks)
    assert min(again) <= min(whole) + 1
    assert max(again) >= max(whole) - 1
    r = page.value(f"(() => {{ {box}.scrollIntoView(); const r = {box}.querySelector('svg[role=img]')"
                   ".getBoundingClientRect(); return [r.left, r.top, r.width]; })()")  # fmt: skip
    places = ((r[0] + 0.25 * r[2], r[1] + 20), (r[0] + 0.5 * r[2], r[1] + 20))
    for kind, (x, y) in zip(
        ("mousePressed", "mouseMoved", "mouseReleased"), (places[0], places[1], places[1]), strict=True
    ):
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
    dragged = page.value(ticks)
    assert max(dragged) - min(dragged) < 0.35 * (max(whole) - min(whole))
    quiet(page)


def test_hostile_strings_stay_text_also_when_the_script_shows_them(opened: Open):
    run, summary = hostile(sweep())
    page = opened(run, summary, fragment="#request-1-41")
    quiet(page)
    assert not [e for e in page.events if e["method"] == "Page.javascriptDialogOpening"]
    assert page.text("document.querySelector('h1').textContent") == " ".join(HOSTILE)
    before = page.value("[...document.querySelectorAll('script,iframe,img,object,embed,form')].map(e => e.tagName)")
    assert before == ["SCRIPT", "SCRIPT"]
    said = page.text("document.querySelector('#timeline-1 .chosen').textContent")
    assert f"class {run.requests['class'][41][:30]}" in said
    assert page.value(
        "[...document.querySelectorAll('*')].every(e => [...e.attributes].every(a => !a.name.startsWith('on')))"
    )
    for i in range(40, 46):
        page.value(f"(() => {{ const s = document.querySelector('#timeline-1 select'); s.value = '{i}';"
                   "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    assert before == page.value(
        "[...document.querySelectorAll('script,iframe,img,object,embed,form')].map(e => e.tagName)"
    )
    quiet(page)


def test_the_keyboard_reaches_everything_in_order_and_every_picture_has_a_name(opened: Open):
    page = opened(sweep(slo={"ttft_ms": 200.0}))
    page.key("Tab")
    assert page.text("document.activeElement.className") == "skip"
    page.key("Enter", "\r")
    assert page.text("location.hash") == "#main"
    seen = []
    page.value("document.activeElement.blur(); window.scrollTo(0, 0)")
    for _ in range(60):
        page.key("Tab")
        seen.append(page.value(FOCUSED))
    tops = [top for name, top, _ in seen if name in {"SUMMARY", "A"}]
    up = sum(b < a - 400 for a, b in itertools.pairwise(tops))
    assert up <= 1  # the order is that of the page: never far up again, but once around
    assert all(outline != "none" for name, _, outline in seen if name != "BODY")  # what has the focus is seen
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {"image", "button", "link", "region", "navigation", "table", "combobox", "toolbar", "group"}
    for node in tree:
        role = node.get("role", {}).get("value")
        if role in named - {"group"} and not node.get("ignored"):
            assert node.get("name", {}).get("value"), node
    roles = [node.get("role", {}).get("value") for node in tree]
    assert {"banner", "navigation", "main", "contentinfo"} <= set(roles)


def test_it_prints_with_its_tables(opened: Open):
    page = opened(sweep(slo={"ttft_ms": 200.0}))
    assert page.pdf().startswith(b"%PDF-")
    page.call("Emulation.setEmulatedMedia", media="print")
    shown = (
        "[...document.querySelectorAll('details.data:not(.noprint) table')].map(t => t.getBoundingClientRect().height)"
    )
    heights = [h for h in page.value(shown) if h]
    assert len(heights) >= 12
    page.size(760)  # an A4 page less its margins, px
    wide = page.value("[...document.querySelectorAll('figure, section')].map(e => e.scrollWidth - e.clientWidth)")
    assert max(wide) <= 2  # nothing is cut off at the right
    page.call("Emulation.setEmulatedMedia", media="")


def test_without_script_nothing_is_missing_but_the_zoom(opened: Open, chromium: Browser):
    pictures = "document.querySelectorAll('svg[role=img]').length"
    page = opened(sweep())
    with_script = page.value(pictures)
    assert page.value("document.querySelectorAll('.tools').length") == 5
    chromium.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page = opened(sweep())
        assert page.value(pictures) == with_script
        assert page.value("document.querySelectorAll('.tools, button').length") == 0
        quiet(page)
    finally:
        chromium.call("Emulation.setScriptExecutionDisabled", value=False)


def test_a_million_chunks_open_and_zoom(opened: Open):
    page = opened(million_page())
    quiet(page)
    wanted = page.text("document.querySelector('#timeline-23 select').options[1].value")  # the slowest
    page.value(f"location.hash = '#request-23-{wanted}'")
    page.value("new Promise(done => setTimeout(done, 0))")
    assert f"Request {wanted} (ok" in page.text("document.querySelector('#timeline-23 .chosen').textContent")
    assert "of its 162 chunks are drawn" in page.text("document.querySelector('#timeline-23 .chosen').textContent")
