"""The audit of dependencies tells what is known from what was not looked up."""

from __future__ import annotations

from typing import Any

import pytest

import audit

KNOWN = {"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2"]}]}
CLEAN = {"name": "b", "version": "1", "vulns": []}
SKIPPED = {"name": "c", "skip_reason": "not found"}
WANTED = [("a", "1"), ("b", "1"), ("c", "1")]


def _run(monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, Any]], *flags: str) -> int:
    monkeypatch.setattr(audit, "packages", lambda: WANTED)
    monkeypatch.setattr(audit, "asked", lambda _batch, _service: {"dependencies": entries})
    return audit.main(flags)


@pytest.mark.parametrize(("entries", "flags", "code", "said"), [
    ([KNOWN, CLEAN], (), 1, "VULNERABLE  a 1: PYSEC-1, mended in 2"),
    ([CLEAN, SKIPPED], (), 0, "1 of 3 packages looked up, 0 advisories; NOT LOOKED AT: 2"),
    ([CLEAN, SKIPPED], ("--strict",), 3, "NOT LOOKED AT"),
    ([SKIPPED], (), 0, "AUDIT NOT DONE"),
    ([SKIPPED], ("--strict",), 3, "AUDIT NOT DONE"),
])  # fmt: skip
def test_what_is_said(  # noqa: PLR0917
    entries: list[dict[str, Any]], flags: tuple[str, ...], code: int, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert _run(monkeypatch, entries, *flags) == code
    assert said in capsys.readouterr().out


def test_an_advisory_may_be_accepted_by_any_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(audit.ACCEPTED, "CVE-1", "of a part that is not used")
    assert _run(monkeypatch, [KNOWN]) == 0


def test_the_lock_is_read_and_no_batch_has_a_name_twice() -> None:
    found = audit.packages()
    assert "orjson" in {name for name, _ in found}
    assert "whywait" not in {name for name, _ in found}
    parts = audit.batches(found)
    assert sorted(p for part in parts for p in part) == found
    assert all(len({name for name, _ in part}) == len(part) for part in parts)


def test_without_pip_audit_it_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit.sys, "executable", "/bin/false")
    assert audit.asked([("a", "1")], "pypi") == {}
