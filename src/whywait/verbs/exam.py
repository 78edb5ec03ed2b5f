"""``whywait exam record | keep | score | simulate``: known bottlenecks on real and simulated engines, and how the
verdict does on them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from whywait import exam_blind, exam_score
from whywait.errors import EXIT_OK, EXIT_SERVICE, GateFailed, UsageError
from whywait.lab.exam import ENGINES, Case, cases


def exam(args: argparse.Namespace) -> int:
    folder = Path(args.runs)
    if args.action == "simulate":
        return _simulate(args)
    chosen = cases([args.engine] if args.engine else ENGINES, args.cases)
    if args.action == "record":
        return _record(args, chosen, Path(args.out or folder))
    if args.action == "keep":
        return _keep(args, chosen, folder)
    if args.list:
        return _told(args, exam_score.listed(chosen, folder), exam_score.listing(chosen, folder))
    names = {c.name for c in chosen}
    if args.blind == "each":
        return _each_blind(args, folder, names)
    marked = exam_score.score(folder, exam_blind.parse(args.blind or ""), names)
    if args.page:
        _write_page(Path(args.page), exam_score.markdown(marked))
    return _said(args, marked, "whywait show RUNS/CASE")


def _simulate(args: argparse.Namespace) -> int:
    from whywait import exam_sim

    found = exam_sim.cases(args.rounds, args.seed, args.cases)
    if args.list:
        rows = [{"name": c.case.name, "accepted": list(c.case.accepted)} for c in found]
        return _told(args, rows, "\n".join(exam_sim.listing(found)))
    marked = exam_sim.score(found, args.jobs)
    if args.page:
        _write_page(Path(args.page), exam_sim.markdown(marked), (exam_sim.BEGIN, exam_sim.END))
    return _said(args, marked, "whywait exam simulate --cases CASE --json")


def _told(args: argparse.Namespace, found: Any, words: str) -> int:
    if args.json:
        json.dump(found, sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        print(words)
    return EXIT_OK


def _said(args: argparse.Namespace, marked: list[exam_score.Marked], look: str) -> int:
    if args.json:
        json.dump(exam_score.as_dict(marked), sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        print(exam_score.text(marked))
    wrong = [m.case.name for m in exam_score.confident_wrongs(marked)]
    if wrong:
        raise GateFailed(f"{len(wrong)} confident and wrong: {', '.join(wrong)}", look)
    return EXIT_OK


def _each_blind(args: argparse.Namespace, folder: Path, names: set[str]) -> int:
    rows = exam_score.blind_rows(folder, names)
    table, wrong = exam_score.blind_table(rows), [w for r in rows for w in r["wrong"]]
    if args.page:
        _write_page(Path(args.page), table, (exam_score.BLIND_BEGIN, exam_score.BLIND_END))
    _told(args, rows, table.rstrip("\n"))
    if wrong:
        raise GateFailed(f"{len(wrong)} confident and wrong: {'; '.join(wrong)}", "whywait exam score --blind …")
    return EXIT_OK


def _write_page(page: Path, part: str, marks: tuple[str, str] = (exam_score.BEGIN, exam_score.END)) -> None:
    try:
        page.write_text(exam_score.into_page(page.read_text(encoding="utf-8"), part, *marks), "utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise UsageError(f"--page {page}: {why}", "give a page that is there and has the two markers") from None


def _record(args: argparse.Namespace, chosen: list[Case], folder: Path) -> int:
    from whywait.exam import record
    from whywait.session import stderr

    failed = record(chosen, folder, args.vllm)
    if failed:
        stderr(f"whywait: not recorded: {', '.join(failed)}")
    if args.json:
        _told(args, {"folder": str(folder), "recorded": [c.name for c in chosen if c.name not in failed],
                     "failed": failed}, "")  # fmt: skip
    return EXIT_SERVICE if failed else EXIT_OK


def _keep(args: argparse.Namespace, chosen: list[Case], folder: Path) -> int:
    from whywait.exam import keep

    if not args.out:
        raise UsageError("keep needs a folder to write to", "--out exam")
    if Path(args.out).resolve() == folder.resolve():
        raise UsageError("the kept runs would take the place of the recorded ones", "another --out")
    n = keep(chosen, folder, Path(args.out))
    return _told(args, {"folder": args.out, "kept": n}, f"{n} cases kept in {args.out}")
