"""Writes docs/run-format.md from the column registry: ``python tools/run_format.py`` (``--check`` only compares)."""

from __future__ import annotations

import sys
from pathlib import Path

from whywait.core.columns import SCHEMA_VERSION, TABLES

PAGE = Path(__file__).parents[1] / "docs" / "run-format.md"
HEAD = f"""\
# The run folder (schema {SCHEMA_VERSION})

Made by `python tools/run_format.py` from `src/whywait/core/columns.py`; do not edit.

| file | what |
|---|---|
| `manifest.json` | where the run comes from: versions, command, seed, engine, machine, workload, client, doubts; \
written last: its presence marks the run as whole |
| `summary.json` | the figures, with stable keys (`docs/metrics.md` defines them) |
| `*.parquet` | the tables below, zstd; readable by pyarrow, pandas, polars, DuckDB; no `steps` when there are none |
| `checksums.json` | CRC-32 of each table, looked at when the run is read; remove it if you change a table on purpose |
| `report.html` | after `diagnose` |
| `spool/`, `spool-0/` … | while a run goes on, or when it was cut off; one per process (`docs/nothing-lost.md`) |

Times (`*_ns`) are nanoseconds after `zero_unix_ns` of the manifest. Null means unknown, never 0.
"""


def page() -> str:
    out = [HEAD]
    for name, columns in TABLES.items():
        out.append(f"## {name}\n\n| column | type | unit | null | meaning |\n|---|---|---|---|---|")
        for c in columns:
            kind = {"i64": "int64", "f64": "float64", "str": "string", "enum": "string"}[c.type]
            values = f": {', '.join(f'`{v}`' for v in c.values)}" if c.values else ""
            null = "yes" if c.nullable else "no"
            out.append(f"| `{c.name}` | {kind} | {c.unit or '–'} | {null} | {c.meaning}{values} |")
        out.append("")
    return "\n".join(out)


def main() -> int:
    if "--check" in sys.argv:
        return 0 if PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
