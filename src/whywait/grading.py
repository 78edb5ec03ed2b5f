"""Grading in bounded time. A user's own pattern or schema may take for ever on some answer, and no signal is heard in
the meantime: such graders work in a process of their own, which is ended when an answer takes it too long.

Part of the application layer; ``python -m whywait.grading`` is that process: a line of JSON in, a line out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import whywait
from whywait.analyze.grade import safely, unanswered
from whywait.core.tasks import UNGRADABLE, Answered, Case, Grade, Grader

LIMIT_S: Final = 3.0  # for one answer
START_S: Final = 60.0  # for the process to begin
MOST_SLOW: Final = 10  # answers; no further one of such a kind is graded
SLOW: Final = f"{UNGRADABLE}: its grader takes too long"


class Grading:
    """Grades answers, each once: what it has said of one is said again."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._known: dict[int, tuple[Answered, Grade]] = {}
        self._slow = 0
        self._child: subprocess.Popen[bytes] | None = None

    def both(self, case: Case, a: Answered, b: Answered) -> tuple[Grade, Grade]:
        """The grades of both arms' answers. A case that cannot be graded on one arm tells nothing: it is wrong on
        both."""
        found = self.grade(case, a)
        other = found if _ungradable(found) else self.grade(case, b)
        return (other, other) if _ungradable(other) else (found, other)

    def grade(self, case: Case, answered: Answered) -> Grade:
        """See ``analyze.grade``."""
        kept = self._known.get(id(answered))
        if kept is not None:
            return kept[1]
        found = unanswered(answered)
        if found is None and not apart(case.grader):
            found = safely(case.grader, answered.text, answered.cut)
        if found is None:
            found = self._apart(case, answered)
        self._known[id(answered)] = (answered, found)
        return found

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _apart(self, case: Case, answered: Answered) -> Grade:
        if self._slow >= MOST_SLOW:
            return Grade(False, "", SLOW)
        if self._child is None and not self._begin():
            return Grade(False, "", f"{UNGRADABLE}: its process did not start")
        line = json.dumps([dataclasses.asdict(case.grader), answered.text, answered.cut]).encode()
        try:
            told = self._ask(line, self._limit_s)
        except BaseException:
            self.close()  # Ctrl-C: its next answer would be of this question
            raise
        if told is None:
            self.close()
            self._slow += 1
            return Grade(False, "", SLOW)
        return Grade(*json.loads(told))

    def _begin(self) -> bool:
        here = str(Path(whywait.__file__).parents[1])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "whywait.grading", str(self._limit_s)], env=env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        if self._ask(b"", START_S) is None:
            self.close()
        return self._child is not None

    def _ask(self, line: bytes, within_s: float) -> bytes | None:
        """What it answers; None when it does not in time, or has died."""
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(line + b"\n")
            self._child.stdin.flush()
        told, until = b"", time.monotonic() + within_s
        while not told.endswith(b"\n"):
            ready, _, _ = select.select([self._child.stdout], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._child.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                return None
            told += part
        return told


def _ungradable(found: Grade) -> bool:
    return found.why.startswith(UNGRADABLE)


def apart(grader: Grader) -> bool:
    """Whether the grader's time is not ours to bound: it has a pattern or a schema of a user's."""
    return grader.kind in ("regex", "json_schema") or (grader.kind == "checks" and "full" in grader.checks)


def main() -> None:
    """Answer until the input ends. What takes longer than its caller waits ends itself, should the caller be dead."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_s = float(sys.argv[1])
    for line in sys.stdin.buffer:
        answer: Any = []
        if line.strip():
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            own = resource.getrusage(resource.RUSAGE_SELF)
            soft = int(own.ru_utime + own.ru_stime + limit_s) + 2
            with contextlib.suppress(ValueError):
                resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
            fields, text, cut = json.loads(line)
            answer = list(safely(Grader(**{**fields, "answers": tuple(fields["answers"])}), text, cut))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
