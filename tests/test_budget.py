"""The budget on size: kept by the tree, and able to catch what breaks it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import budget

ROOT = Path(__file__).resolve().parents[1]


def _function(lines: int = 2, parameters: str = "", before: str = "") -> str:
    return f"{before}def f({parameters}):\n" + "    x = 1\n" * (lines - 1)


def _over(sources: dict[str, str]) -> list[tuple[str, int]]:
    return [(s.kind, s.value) for s in budget.measure(sources) if s.over]


def _top(kind: str, text: str) -> int:
    return max(s.value for s in budget.measure({"p/a.py": text}) if s.kind == kind)


def test_the_tree_is_within_the_budget():
    run = subprocess.run([sys.executable, "tools/budget.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    for kind in budget.LIMITS:
        assert f"\n  {kind} " in run.stdout  # the largest of each kind is printed, within its limit or not


@pytest.mark.parametrize(
    ("at_limit", "past", "said"),
    [
        ("x = 1\n" * 400, "x = 1\n" * 401, ("file", 401)),
        (_function(60), _function(61), ("function", 61)),
        (_function(59, before="@d\n"), _function(60, before="@d\n"), ("function", 61)),
        (_function(parameters="a, b, c, d, e, g"), _function(parameters="a, b, c, d, e, g, h"), ("parameters", 7)),
        (_function(parameters="a, /, *c, **e"), _function(parameters="a, /, b, *c, d, e, g, **h"), ("parameters", 7)),
        (
            "class A: pass\nclass B(A): pass\nclass C(B): pass\n",
            "class A: pass\nclass B(A): pass\nclass C(B): pass\nclass D(dict, C[int]): pass\n",
            ("class depth", 3),
        ),
    ],
    ids=["file", "function", "decorated function", "parameters", "all kinds of parameters", "class depth"],
)  # fmt: skip
def test_what_is_past_a_limit_is_caught_and_what_is_at_it_is_not(at_limit, past, said):
    assert _over({"p/a.py": at_limit}) == []
    assert _over({"p/a.py": past}) == [said]


def test_self_and_cls_do_not_count_but_the_first_of_a_static_method_does():
    assert _top("parameters", "class A:\n    def f(self, a): pass\n") == 1
    assert _top("parameters", "class A:\n    @classmethod\n    def f(cls, a): pass\n") == 1
    assert _top("parameters", "class A:\n    @staticmethod\n    def f(a, b): pass\n") == 2
    assert _top("parameters", "class A:\n    def f(self):\n        def g(a, b): pass\n") == 2
    assert _top("parameters", "async def f(a, b, c): pass\n") == 3


def test_class_depth_follows_imports_and_aliases():
    files = {
        "p/a.py": "class A(Exception): pass\n",
        "p/b.py": "from p.a import A as Root\nclass B(Root): pass\n",
        "p/c.py": "import p.b\nimport p.b as b\nclass C(p.b.B): pass\nclass D(b.B): pass\nclass E(D): pass\n",
        "q/a.py": "class A: pass\nclass E(A): pass\n",
    }
    depths = {s.where.replace(".py:", " "): s.value for s in budget.measure(files) if s.kind == "class depth"}
    assert depths == {
        "p/a 1 A": 0, "p/b 2 B": 1, "p/c 3 C": 2, "p/c 4 D": 2, "p/c 5 E": 3, "q/a 1 A": 0, "q/a 2 E": 1,
    }  # fmt: skip


def test_a_class_that_names_itself_as_its_base_does_not_hang():
    assert _top("class depth", "class A: pass\nclass A(A): pass\n") == 0


def test_circles_are_caught_and_named():
    sizes = budget.measure({"p/a.py": "import p.b\n", "p/b.py": "import p.a\n"})
    (circle,) = [s for s in sizes if s.over]
    assert (circle.kind, circle.value, circle.where) == ("cycles", 1, "p.a ↔ p.b")


def test_the_report_shows_the_largest_and_everything_past_its_limit():
    sizes = budget.measure({"p/a.py": _function(5), "p/b.py": _function(70, "a, b"), "p/c.py": _function(80)})
    lines = budget.report(sizes).splitlines()
    assert "  file          80 of 400 lines  p/c.py" in lines
    assert "  function      80 of 60 lines  p/c.py:1 f" in lines
    assert "  parameters     2 of 6  p/b.py:1 f" in lines
    assert "  cycles         0 of 0" in lines
    assert [line for line in lines if "over" in line] == [
        "  over: function 70 > 60  p/b.py:1 f",
        "  over: function 80 > 60  p/c.py:1 f",
    ]


def test_the_exit_code_tells(tmp_path, capsys):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.py").write_text(_function(60))
    assert budget.main([str(tmp_path / "p")]) == 0
    (tmp_path / "p" / "a.py").write_text(_function(61))
    assert budget.main([str(tmp_path / "p")]) == 1
    assert "over: function 61 > 60  p/a.py:1 f" in capsys.readouterr().out


def test_an_empty_folder_is_no_pass(tmp_path, capsys):
    """A wrong path must not look like a tree that is within every limit."""
    assert budget.main([str(tmp_path)]) == 2
    assert "no Python files" in capsys.readouterr().err
