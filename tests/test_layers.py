"""The layering law: imports point down only, halves do not know each other, and nothing imports in a circle."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from imports import Import, cycles, imports, read_sources

SRC = Path(__file__).resolve().parents[1] / "src"

GROUND = {"whywait", "units", "errors", "encodings"}  # the package itself holds only the version
CORE = {*GROUND, "core"}
FLOOR = {*CORE, "physics", "engines", "net"}
PRODUCERS = {"load", "probe", "lab", "sim", "convert"}
ANALYSIS = {*CORE, "physics", "analyze"}

# What each part may import besides itself. A part that is not here may not exist.
MAY: dict[str, set[str]] = {
    "whywait": {"api", "aio", "errors"},  # by name, when first used
    "errors": set(),
    "units": set(),
    "encodings": set(),
    "core": GROUND,
    "physics": CORE,
    "engines": CORE,
    "net": {*CORE, "engines"},  # what engines report in an answer is in their tables
    **dict.fromkeys(PRODUCERS, FLOOR),
    "analyze": {*CORE, "physics"},
    "judge": ANALYSIS,
    "report": {*ANALYSIS, "judge"},
    # The application. The session drives the producers and leaves what they made to app, which knows both halves.
    "watching": {*FLOOR, *PRODUCERS},
    "counting": {*FLOOR, *PRODUCERS},
    "options": {*FLOOR, *PRODUCERS},
    "placing": {*FLOOR, *PRODUCERS, "options"},
    "session": {*FLOOR, *PRODUCERS, "counting", "options", "placing", "reading", "watching"},
    "app": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "report", "session"},
    "reading": {*FLOOR, *PRODUCERS},
    "doctoring": {*FLOOR, *PRODUCERS, "report", "options", "reading"},
    "observing": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "session", "app", "counting", "reading", "watching"},
    "finding": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "session", "app"},
    "probing": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "session", "app"},
    "importing": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "app"},
    "simulating": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "report", "session", "options", "app"},
    "twin": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge"},
    "whatif": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "report", "twin"},
    "planning_loads": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge"},
    "planning_space": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "simulating", "twin"},
    "planning_ask": {*CORE, "physics", "planning_space"},
    "planning_told": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "twin", "planning_space"},
    "planning_search": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "planning_loads", "planning_space"},
    "planning_trial": {*FLOOR, *PRODUCERS, "planning_space"},
    "planning_more": {
        *FLOOR,
        *PRODUCERS,
        *ANALYSIS,
        "judge",
        "planning_loads",
        "planning_search",
        "planning_space",
        "planning_trial",
    },
    "planning_quality": {*CORE, "physics", "sim", "qualifying"},
    "planning_facts": {
        *FLOOR,
        *PRODUCERS,
        *ANALYSIS,
        "judge",
        "twin",
        "app",
        "planning_loads",
        "planning_quality",
        "planning_space",
    },
    "planning": {
        *FLOOR,
        *PRODUCERS,
        *ANALYSIS,
        "judge",
        "simulating",
        "twin",
        "planning_facts",
        "planning_loads",
        "planning_more",
        "planning_search",
        "planning_space",
        "planning_told",
        "planning_ask",
        "planning_quality",
    },
    "deciding": {*CORE, "physics", "sim", "analyze", "report", "planning"},
    "comparing": {*CORE, *ANALYSIS, "probe", "judge", "report", "app"},
    "listing": {*CORE, *ANALYSIS, "judge", "report", "app"},
    "testing": {*CORE, "judge", "comparing"},
    "pytest_plugin": {"errors", "testing", "whywait"},
    "exporting": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "report"},
    "starting": {*FLOOR, *PRODUCERS, "options", "app"},
    "trying": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "report", "session", "app", "starting"},
    "grading": {*CORE, "analyze"},
    "tasking": {*FLOOR, *PRODUCERS, *ANALYSIS, "judge", "session", "grading"},
    "qualifying": {
        *FLOOR,
        *PRODUCERS,
        *ANALYSIS,
        "judge",
        "report",
        "session",
        "options",
        "starting",
        "tasking",
        "grading",
    },
    "varying": {*FLOOR, *PRODUCERS, "judge", "session", "app", "trying"},
    "exam": {*FLOOR, *PRODUCERS, "session", "app"},
    "exam_blind": set(CORE),
    "exam_score": {*CORE, "lab", "judge", "app", "exam", "exam_blind"},
    "exam_sim": {*FLOOR, *PRODUCERS, "app", "exam_score"},
    "verbs": {
        *FLOOR,
        *PRODUCERS,
        *ANALYSIS,
        "judge",
        "report",
        "session",
        "app",
        "finding",
        "probing",
        "simulating",
        "twin",
        "whatif",
        "deciding",
        "planning",
        "planning_space",
        "trying",
        "qualifying",
        "varying",
        "comparing",
        "listing",
        "observing",
        "importing",
        "reading",
        "doctoring",
        "exporting",
        "exam",
        "exam_blind",
        "exam_score",
        "exam_sim",
    },
    "flags": {"whywait"},
    "flags_lab": {"whywait", "flags"},
    "flags_out": {"whywait", "flags"},
    "flags_sim": {"whywait", "flags"},
    "cli": {"whywait", "errors", "encodings", "verbs", "flags", "flags_lab", "flags_out", "flags_sim"},
    "__main__": {"cli"},
    # The Python API: what the verbs do by their flags, before they print it.
    "keywords": {"whywait", "core"},
    "calling": {*CORE, "keywords", "cli", "options", "app"},
    "api": {
        *CORE,
        "keywords",
        "calling",
        "verbs",
        "options",
        "app",
        "trying",
        "simulating",
        "whatif",
        "comparing",
        "deciding",
        "importing",
        "qualifying",
        "doctoring",
        "listing",
    },
    "aio": {"whywait", "api", "session"},
}
FLAGS = {"whywait.flags", "whywait.flags_lab", "whywait.flags_out", "whywait.flags_sim"}
CLI_AT_IMPORT = {"whywait", "whywait.errors", "whywait.encodings", *FLAGS}


def part(module: str) -> str:
    """``whywait.core.run`` → ``core``."""
    return module.split(".")[1] if "." in module else module


def broken_laws(sources: Mapping[str, str]) -> list[str]:
    """Every import that breaks the law, and every circle."""
    found = imports(sources)
    out = [problem for i in found if (problem := _problem(i))]
    return out + [f"circle: {' <-> '.join(group)}" for group in cycles(found)]


def _problem(i: Import) -> str:
    me, it = part(i.source), part(i.target)
    at = f"{i.source}:{i.line}"
    if me not in MAY:
        return f"{at}: {me!r} has no place in the layers"
    ours = i.target == "whywait" or i.target.startswith("whywait.")
    if ours and it != me and it not in MAY[me]:
        return f"{at}: {me} may not import {i.target} ({i.when})"
    if me == "cli" and i.when != "function":
        standard = i.target.split(".")[0] in sys.stdlib_module_names
        if not standard and i.target not in CLI_AT_IMPORT:
            return f"{at}: cli may not import {i.target} before it is asked for"
    return ""


def test_the_tree_keeps_the_law():
    assert broken_laws(read_sources(SRC / "whywait")) == []


def test_the_checker_sees_the_tree():
    """An empty list of violations means something only if the imports were found at all."""
    sources = read_sources(SRC / "whywait")
    edges = {(i.source, i.target, i.when) for i in imports(sources)}
    assert {part(module) for module, _, _ in edges} >= {
        "core",
        "net",
        "load",
        "analyze",
        "judge",
        "app",
        "verbs",
        "cli",
    }
    assert ("whywait.session", "whywait.load.driver", "module") in edges
    assert ("whywait.core.run", "whywait.core.recorder", "function") in edges
    assert ("whywait.net.conn", "whywait.net.client", "typing") in edges
    assert ("whywait.app", "whywait.analyze.summary", "module") in edges


def _with(path: str, text: str) -> dict[str, str]:
    """A little lawful tree, and one file of our making."""
    whole = {
        f"whywait/{p}/__init__.py": "" for p in ("core", "net", "load", "probe", "analyze", "judge", "verbs", "physics")
    }
    lone = {f"whywait/{p}.py": "" for p in ("units", "errors", "session", "app", "cli", "load/driver", "core/run")}
    return {"whywait/__init__.py": "", **whole, **lone, path: text}


LAWFUL = {
    "whywait/core/run.py": "from whywait import __version__\nimport numpy\n",
    "whywait/load/driver.py": "from whywait.core import run\nfrom whywait.net import x\nfrom . import other\n",
    "whywait/judge/a.py": "from whywait.analyze import b\nfrom whywait.physics import cost\n",
    "whywait/app.py": "from whywait.load import driver\nfrom whywait.analyze import b\nimport whywait.session\n",
    "whywait/cli.py": "import argparse\nfrom whywait import __version__\nfrom whywait.errors import E\n"
    "def main():\n    import whywait.verbs.measure\n",
}

FORBIDDEN = {
    "up": ("whywait/core/a.py", "from whywait.net.client import Client\n"),
    "analysis knows a producer": ("whywait/analyze/a.py", "from whywait.load import driver\n"),
    "a producer knows the analysis": ("whywait/probe/a.py", "import whywait.analyze.window\n"),
    "a producer knows another": ("whywait/probe/a.py", "from whywait.load.driver import Point\n"),
    "below knows above": ("whywait/judge/a.py", "import whywait.app\n"),
    "the session knows the analysis": ("whywait/session.py", "from whywait.analyze import window\n"),
    "lazily": ("whywait/analyze/a.py", "def f():\n    from whywait.load import driver\n"),
    "in a method": ("whywait/analyze/a.py", "class A:\n    async def f(self):\n        import whywait.load as s\n"),
    "for the type checker": (
        "whywait/judge/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from whywait.load.driver import Point\n",
    ),
    "in a try": ("whywait/net/a.py", "try:\n    import whywait.probe\nexcept ImportError:\n    pass\n"),
    "the package's attribute": ("whywait/core/a.py", "from whywait import load\n"),
    "relative": ("whywait/core/a.py", "from ..load import driver\n"),
    "by name": ("whywait/core/a.py", "import importlib\nimportlib.import_module('whywait.load.driver')\n"),
    "the command line, too early": ("whywait/cli.py", "import whywait.verbs.measure\n"),
    "the command line, heavy": ("whywait/cli.py", "import numpy\n"),
    "the command line, around the verbs": ("whywait/cli.py", "def f():\n    import whywait.load.driver\n"),
    "a part nobody has placed": ("whywait/misc/a.py", "import os\n"),
}  # fmt: skip


@pytest.mark.parametrize("path", LAWFUL)
def test_the_checker_lets_lawful_imports_pass(path):
    assert broken_laws(_with(path, LAWFUL[path])) == []


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_checker_catches(what):
    path, text = FORBIDDEN[what]
    found = broken_laws(_with(path, text))
    assert len(found) == 1, found
    assert path.removesuffix(".py").replace("/", ".") in found[0]


TYPING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("files", "circles"),
    [
        ({"a": "import p.b", "b": "import p.a"}, [["p.a", "p.b"]]),
        ({"a": "from p import b", "b": "from p import c", "c": "from . import a"}, [["p.a", "p.b", "p.c"]]),
        (
            {"a": "import p.b", "b": "import p.a", "c": "import p.d", "d": "import p.c"},
            [["p.a", "p.b"], ["p.c", "p.d"]],
        ),
        ({"a": "import p.b", "b": "import p.c", "c": "", "d": "import p.a, p.b, p.c"}, []),
        ({"a": "import p.b", "b": "def f():\n    import p.a"}, []),
        ({"a": "import p.b", "b": f"{TYPING}import p.a"}, []),
        ({"x/a": "import p.y.b", "y/b": f"{TYPING}import p.x.a"}, [["p.x.a", "p.y.b"]]),
        ({"a": "class A:\n    import p.b", "b": "if True:\n    import p.a"}, [["p.a", "p.b"]]),
    ],
    ids=["two", "three", "apart", "none", "lazy", "typing within", "typing across", "nested statements"],
)  # fmt: skip
def test_circles(files, circles):
    assert cycles(imports({f"p/{name}.py": text for name, text in files.items()})) == circles


def test_the_else_of_type_checking_is_run():
    (found,) = [i for i in imports({"p/a.py": f"{TYPING}pass\nelse:\n    import p.b"}) if i.target == "p.b"]
    assert found.when == "module"


def test_the_dispatch_table_names_verbs_that_exist():
    """It is the one place where an import is spelt as text; the syntax tree does not see it."""
    from whywait.cli import VERBS

    for where, _ in VERBS.values():
        module, function = where.split(":")
        assert module.startswith("whywait.verbs.")
        spec = importlib.util.find_spec(module)
        assert spec is not None, module
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


def test_the_command_line_loads_nothing_heavy():
    """What the tree says, seen in a process of its own: ``--help`` waits for nobody's import."""
    code = "import sys, whywait.cli; whywait.cli.parser().format_help(); print('\\n'.join(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(SRC)!r}); {code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = set(run.stdout.split())
    assert {m for m in loaded if m.split(".")[0] == "whywait"} == {"whywait", "whywait.cli", *CLI_AT_IMPORT}
    outside = {m.split(".")[0] for m in loaded} - set(sys.stdlib_module_names) - {"whywait", "__main__"}
    assert not outside
