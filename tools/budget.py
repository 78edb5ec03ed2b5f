"""The budget on size: prints the largest of each kind and exits 1 past a limit. ``python tools/budget.py [FOLDER]``.

Past a limit, split the idea, not the file.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from imports import cycles, imports, module_name, read_sources

FILE_LINES, FUNCTION_LINES, PARAMETERS, CLASS_DEPTH, CYCLES = "file", "function", "parameters", "class depth", "cycles"
LIMITS = {FILE_LINES: 400, FUNCTION_LINES: 60, PARAMETERS: 6, CLASS_DEPTH: 2, CYCLES: 0}
UNITS = {FILE_LINES: "lines", FUNCTION_LINES: "lines"}

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Size(NamedTuple):
    kind: str
    value: int
    where: str

    @property
    def over(self) -> bool:
        return self.value > LIMITS[self.kind]


def measure(sources: Mapping[str, str]) -> list[Size]:
    """The size of everything that has a limit."""
    sizes = [Size(FILE_LINES, len(text.splitlines()), path) for path, text in sources.items()]
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    for path, tree in trees.items():
        for node, method in _functions(tree, False):
            where = f"{path}:{node.lineno} {node.name}"
            # From the decorators to the last line, docstring included: what a reader has to hold in mind.
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            sizes.append(Size(FUNCTION_LINES, (node.end_lineno or node.lineno) - first + 1, where))
            sizes.append(Size(PARAMETERS, _parameters(node, method), where))
    sizes += [Size(CLASS_DEPTH, depth, where) for where, depth in _class_depths(trees)]
    groups = cycles(imports(sources))
    return [*sizes, Size(CYCLES, len(groups), "; ".join(" ↔ ".join(g) for g in groups))]


def report(sizes: Sequence[Size]) -> str:
    """A line for the largest of each kind, then one for everything past its limit."""
    lines = []
    for kind, limit in LIMITS.items():
        mine = [s for s in sizes if s.kind == kind]
        if mine:
            top = max(mine, key=lambda s: s.value)
            unit = f" {UNITS[kind]}" if kind in UNITS else ""
            lines.append(f"  {kind:<12}{top.value:>4} of {limit}{unit}  {top.where}".rstrip())
    lines += [f"  over: {s.kind} {s.value} > {LIMITS[s.kind]}  {s.where}" for s in sizes if s.over]
    return "\n".join(lines)


def _functions(node: ast.AST, in_class: bool) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield child, in_class
        yield from _functions(child, isinstance(child, ast.ClassDef))


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> int:
    """How many a caller may have to think of; ``self`` and ``cls`` come by themselves."""
    a = node.args
    n = len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs) + bool(a.vararg) + bool(a.kwarg)
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    return n - (method and not static)


def _class_depths(trees: Mapping[str, ast.Module]) -> list[tuple[str, int]]:
    """How many classes of ours stand above each, along the longest line; 0 where none of its bases is ours."""
    bases: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    for path, tree in trees.items():
        module = module_name(path)
        names = _names(tree, module)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                key = f"{module}.{node.name}"
                places[key] = f"{path}:{node.lineno} {node.name}"
                bases[key] = [_resolve(b, names) for b in node.bases]
    return [(places[key], _depth(key, bases)) for key in bases]


def _depth(key: str, bases: Mapping[str, Sequence[str]], below: frozenset[str] = frozenset()) -> int:
    ours = [b for b in bases[key] if b in bases and b not in below | {key}]
    return max((1 + _depth(b, bases, below | {key}) for b in ours), default=0)


def _names(tree: ast.Module, module: str) -> dict[str, str]:
    """What each name of the file stands for, as far as classes go."""
    names = {n.name: f"{module}.{n.name}" for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
    return names


def _resolve(base: ast.expr, names: Mapping[str, str]) -> str:
    if isinstance(base, ast.Subscript):  # Base[int]
        base = base.value
    head, _, rest = ast.unparse(base).partition(".")
    return names.get(head, head) + (f".{rest}" if rest else "")


def main(argv: Sequence[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parents[1] / "src" / "whywait"
    sources = read_sources(root)
    if not sources:
        print(f"budget: no Python files below {root}", file=sys.stderr)
        return 2
    sizes = measure(sources)
    print(f"budget of {root.name}: {len(sources)} files, {sum(s.kind == FUNCTION_LINES for s in sizes)} functions")
    print(report(sizes))
    return int(any(s.over for s in sizes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
