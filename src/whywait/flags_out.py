"""The flags of the verbs that hand a run on, each verb's in a function of its name; no logic."""

from __future__ import annotations

import argparse

from whywait.flags import positive, whole

# --- export

FORMS = ("perfetto", "otlp", "openmetrics", "grafana", "llm-d", "vllm-bench", "csv", "parquet")
TABLES = ("points", "requests", "chunks", "steps", "readings")


def export(p: argparse.ArgumentParser) -> None:
    p.add_argument("run_dir", metavar="RUN", help="folder of a saved run: measured, simulated or imported")
    p.add_argument("--to", required=True, choices=FORMS, help="the form")
    p.add_argument(
        "--out", default="", metavar="PATH", help="file or folder; - is stdout (default: in the run's folder)"
    )
    p.add_argument("--point", type=whole, metavar="N", help="only this load point (default: all)")
    p.add_argument("--requests", metavar="IDS", help="only these: '3,7-12' (perfetto, otlp, csv, parquet)")
    p.add_argument("--limit", type=positive, metavar="N", help="only the first N requests (the same forms)")
    p.add_argument("--no-chunks", dest="chunks", action="store_false", help="perfetto: without the chunks")
    p.add_argument("--table", action="append", choices=TABLES, help="csv, parquet: only this table; repeatable")
    p.add_argument("--step", metavar="TIME", help="openmetrics: between samples (default: 1s, at most 240 a point)")
    p.add_argument(
        "--at-end", action="store_true", help="openmetrics: last values, no times, for textfile or Pushgateway"
    )
    p.add_argument("--start", metavar="TIME", help="time of day of a run that has none: now, or 2026-11-30T12:00:00Z")
    g = p.add_argument_group("otlp, sent to a collector instead of a file")
    g.add_argument("--endpoint", default="", metavar="URL", help="OTLP over HTTP, such as http://127.0.0.1:4318")
    g.add_argument("--remote", action="store_true", help="allow an endpoint that is not on this machine")
    g.add_argument("--header", action="append", default=[], metavar="'K: V'", help="sent with each export; repeatable")
    p.add_argument("--json", action="store_true", help="what was written, as JSON on stdout")
