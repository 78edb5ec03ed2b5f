"""Known vulnerabilities of the packages in uv.lock, by pip-audit. Exit 1: there are some. Exit 3 (--strict): not all
could be looked up.

    pip install pip-audit && python tools/audit.py

Where the index has no advisories pip-audit passes every package over and says that nothing is known: here that is
told as what it is, an audit that was not done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCK = Path(__file__).resolve().parents[1] / "uv.lock"
SERVICES = ("pypi", "osv")
TIMEOUT_S = 300
#: Advisories that do not touch us: identifier, why, and until when that is to be looked at again.
ACCEPTED: dict[str, str] = {}

Package = tuple[str, str]


class Audit(NamedTuple):
    """``found``: a line for each advisory. ``unseen``: packages that could not be looked up."""

    found: list[str]
    seen: set[Package]
    unseen: set[Package]


def packages(lock: Path = LOCK) -> list[Package]:
    """Name and version of everything the lock takes from an index; several versions of one stand there for several
    Pythons."""
    entries = tomllib.loads(lock.read_text(encoding="utf-8"))["package"]
    return sorted({(p["name"], p["version"]) for p in entries if "registry" in p.get("source", {})})


def batches(wanted: Iterable[Package]) -> list[list[Package]]:
    """So that no batch has a name twice."""
    out: list[dict[str, str]] = []
    for name, version in wanted:
        free = next((b for b in out if name not in b), None)
        if free is None:
            out.append(free := {})
        free[name] = version
    return [list(b.items()) for b in out]


def judged(reports: Iterable[Mapping[str, Any]], wanted: Iterable[Package]) -> Audit:
    found, seen = [], set()
    for report in reports:
        for entry in report.get("dependencies", ()):
            if "skip_reason" in entry:
                continue
            seen.add((entry["name"].lower(), entry["version"]))
            for v in entry.get("vulns", ()):
                if not {v["id"], *v.get("aliases", ())} & ACCEPTED.keys():
                    fixed = ", ".join(v.get("fix_versions", ())) or "no version yet"
                    found.append(f"{entry['name']} {entry['version']}: {v['id']}, mended in {fixed}")
    return Audit(found, seen, set(wanted) - seen)


def asked(batch: Sequence[Package], service: str) -> dict[str, Any]:
    """pip-audit's report on ``batch``; empty where it could not ask."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requirements.txt"
        path.write_text("".join(f"{name}=={version}\n" for name, version in batch), encoding="utf-8")
        argv = [sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", "--progress-spinner", "off", "-f",
                "json", "-s", service, "-r", str(path)]  # fmt: skip
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
            report = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError):
            return {}
    return report if isinstance(report, dict) else {}


def audited(wanted: Sequence[Package]) -> Audit:
    """By the first service that knows any of them."""
    audit = judged([], wanted)
    for service in SERVICES:
        audit = judged([asked(batch, service) for batch in batches(wanted)], wanted)
        if audit.seen:
            break
    return audit


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strict", action="store_true", help="exit 3 when not every package could be looked up")
    strict = parser.parse_args(argv).strict
    wanted = packages()
    audit = audited(wanted)
    for line in audit.found:
        print(f"VULNERABLE  {line}")
    if not audit.seen:
        print(f"AUDIT NOT DONE: no advisories could be read for any of {len(wanted)} packages (no pip-audit, or an")
        print("index without advisories); nothing is known of them, good or bad")
    else:
        more = f"; NOT LOOKED AT: {len(audit.unseen)}" if audit.unseen else ""
        print(f"audit: {len(audit.seen)} of {len(wanted)} packages looked up, {len(audit.found)} advisories{more}")
    return 1 if audit.found else 3 if strict and audit.unseen else 0


if __name__ == "__main__":
    raise SystemExit(main())
