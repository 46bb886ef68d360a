"""Findings: where a package breaks a rule of the house, one line each."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from house.modules import Module, imports_of, is_private, root

Modules = dict[str, Module]
#: Lines from which on a file is worth a second look.
FILE_LINES = 800


def deep_imports(modules: Modules) -> list[str]:
    """Imports past a folder's face: of `A.C.D`, where A is the deepest folder that holds both."""
    found = []
    for module in modules.values():
        for line, name in imports_of(module, modules):
            shared = 0
            for mine, theirs in zip(module.folder.split("."), name.split("."), strict=False):
                if mine != theirs:
                    break
                shared += 1
            if name.count(".") > shared:
                found.append(f"{module.name}:{line} imports {name}")
    return found


def circles(modules: Modules) -> list[tuple[str, ...]]:
    """Files that import each other when they run, however long the way round."""
    graph = {
        name: {o for _, o in imports_of(module, modules, for_types=False) if o != name}
        for name, module in modules.items()
    }
    reach = {name: _reached(graph, name) for name in graph}
    groups = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}
    return sorted(groups)


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph[waiting.pop()]:
            if name not in reached:
                reached.add(name)
                waiting.append(name)
    return reached


def private_reaches(modules: Modules) -> list[str]:
    """Uses of a private name that another file defines; what a class inherits is its own."""
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for name in module.private_names:
            owners[name].add(module.name)
    return [
        f"{module.name}:{line} reaches for {name}"
        for module in modules.values()
        for line, name in _private_uses(module)
        if name in owners and module.name not in owners[name]
    ]


def _private_uses(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name) if is_private(name) and root(node) not in module.foreign:
                yield node.lineno, name
            case ast.ImportFrom(names=aliases):
                yield from ((node.lineno, a.name) for a in aliases if is_private(a.name))


def long_files(modules: Modules) -> list[str]:
    """Files that are long for a reader: they may be one thing all the same."""
    counts = {name: len(module.text.splitlines()) for name, module in modules.items()}
    return [f"{name} has {count} lines" for name, count in counts.items() if count > FILE_LINES]


def folder_sizes(modules: Modules) -> dict[str, int]:
    """Python files in each folder, fullest first."""
    sizes = Counter(module.folder for module in modules.values())
    return dict(sizes.most_common())


def reference_counts(modules: Modules) -> list[str]:
    """Uses of `sys.getrefcount`: who holds a thing is counted by handles."""
    word = "getrefcount"
    return [
        f"{module.name}:{node.lineno} uses {word}"
        for module in modules.values()
        for node in module.nodes
        if (isinstance(node, ast.Attribute) and node.attr == word)
        or (isinstance(node, ast.Name) and node.id == word)
    ]


def lines(modules: Modules) -> int:
    """Lines of all files."""
    return sum(len(module.text.splitlines()) for module in modules.values())
