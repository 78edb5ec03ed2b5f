"""A million chunks make a page below 6 MB that says what it leaves out; every figure is still of all of them."""

from __future__ import annotations

import json
import re

from tests.pages import MB, checked, million_judged, million_page
from whywait.report.timelines import MOST_IN_ALL, MOST_STAMPS


def test_a_million_chunks_make_a_page_below_six_megabytes_that_says_what_is_drawn():
    run, summary = million_judged()
    assert len(run.chunks) > MB
    text = million_page()
    found = checked(text)  # below 6 MB among others
    said = found.text
    assert f"at most {MOST_IN_ALL // 24} requests of a point" in said
    assert "100 of 260 requests drawn" in said
    # The curves are of all requests and all gaps, not of those drawn.
    tips = " ".join(found.words["title"])
    assert all(f": {p['ttft_ms']['n']} requests" in tips for p in summary["points"])
    assert max(p["ttft_ms"]["n"] for p in summary["points"]) > MOST_IN_ALL // 24
    block = re.search(r'id="timelines-data">(.*?)</script>', text, re.S)
    assert block is not None
    data = json.loads(block[1])
    rows = [r for p in data["points"] for r in p["requests"]]
    assert len(rows) == MOST_IN_ALL
    assert sum(len(r[10]) for r in rows) <= MOST_STAMPS
    assert all(r[8] == 162 for r in rows)  # how many chunks there were is told beside those kept
    first = rows[0]
    mine = run.chunks["t_ns"][run.chunks["id"] == first[0]]
    since = run.requests["sent_ns"][run.requests["id"] == first[0]][0]
    assert abs(first[10][0] - first[2] - (mine[0] - since) / 1000) <= 2  # µs
