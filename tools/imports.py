"""Which module imports which, and when: read from the syntax tree, so nothing is run and nothing lazy is missed.

Sources are a mapping of file path (``whywait/core/run.py``) to text, so that tests can feed made-up ones.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

When = Literal["module", "typing", "function"]


class Import(NamedTuple):
    """``when``: as the module is imported, only for the type checker, or when a function is called."""

    source: str
    target: str
    line: int
    when: When


def read_sources(root: Path) -> dict[str, str]:
    """Every Python file below ``root``, by its path relative to the folder that holds ``root``."""
    return {str(p.relative_to(root.parent)): p.read_text(encoding="utf-8") for p in sorted(root.rglob("*.py"))}


def module_name(path: str) -> str:
    """``whywait/core/run.py`` → ``whywait.core.run``; a package goes by its folder."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(sources: Mapping[str, str]) -> list[Import]:
    """Every import, the standard library's too. ``from a import b`` aims at ``a.b`` where that is a module of ours."""
    ours = {module_name(path) for path in sources}
    found = []
    for path, text in sources.items():
        name = module_name(path)
        package = name if path.endswith("/__init__.py") else name.rpartition(".")[0]
        for node, when in _nodes(ast.parse(text, path), "module"):
            for target in _targets(node, package, ours):
                found.append(Import(name, target, node.lineno, when))
    return found


def cycles(found: Iterable[Import]) -> list[list[str]]:
    """Groups of modules that import each other as they are imported (strongly connected components), sorted.

    A lazy import is no cycle: by the time it runs the modules exist. One for the type checker alone is none within a
    package, where a pair of files may well describe each other, but is one across packages: there it shows that two
    ideas lean on each other.
    """
    graph: dict[str, set[str]] = {}
    for i in found:
        near = i.source.rpartition(".")[0] == i.target.rpartition(".")[0]
        if i.when == "module" or (i.when == "typing" and not near):
            graph.setdefault(i.source, set()).add(i.target)
            graph.setdefault(i.target, set())
    return sorted(sorted(c) for c in _components(graph) if len(c) > 1)


def _nodes(node: ast.AST, when: When) -> Iterator[tuple[ast.stmt | ast.expr, When]]:
    """Imports and calls below ``node``, each with when it runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom, ast.Call)):
            yield child, when
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _nodes(child, "function")
        elif isinstance(child, ast.If) and _is_typing(child.test) and when == "module":
            for inner in child.body:
                yield from _nodes(ast.Module([inner], []), "typing")
            for inner in child.orelse:
                yield from _nodes(ast.Module([inner], []), when)
        else:
            yield from _nodes(child, when)


def _is_typing(test: ast.expr) -> bool:
    return (test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")) == "TYPE_CHECKING"


def _targets(node: ast.AST, package: str, ours: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*up, *([node.module] if node.module else [])])
        return sorted({f"{base}.{a.name}" if f"{base}.{a.name}" in ours else base for a in node.names})
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def _components(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Strongly connected components: nodes that reach each other. The graph is small: plain reachability will do."""
    reach = {n: _reachable(graph, n) for n in graph}
    out: list[set[str]] = []
    placed: set[str] = set()
    for n in graph:
        if n not in placed:
            group = {n} | {m for m in reach[n] if n in reach[m]}
            placed |= group
            out.append(group)
    return out


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        n = todo.pop()
        if n not in seen:
            seen.add(n)
            todo.extend(graph[n])
    return seen
