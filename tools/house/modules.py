"""Modules: the files of a package, what each imports, and which private names it has.

Imports count wherever they stand: at the top, inside functions, and for type checking only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Module:
    """One file: its dotted name, and whether it is the face of a folder."""

    name: str
    file: Path
    is_face: bool

    @property
    def folder(self) -> str:
        """The package that the file lies in; a face lies in its own."""
        return self.name if self.is_face else self.name.rpartition(".")[0]

    @cached_property
    def text(self) -> str:
        return self.file.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @cached_property
    def bound(self) -> dict[str, str]:
        """The names that the file binds at its top, with the module each is imported from."""
        names: dict[str, str] = {}
        for node in self._outer():
            match node:
                case ast.ImportFrom(module=str(source)):
                    names |= {alias.asname or alias.name: source for alias in node.names}
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    names[name] = self.name
                case ast.Assign(targets=targets):
                    names |= {t.id: self.name for t in targets if isinstance(t, ast.Name)}
        return names

    @cached_property
    def foreign(self) -> frozenset[str]:
        """Names at the top that stand for what another package has."""
        names: set[str] = set()
        package = self.name.partition(".")[0]
        for node in self.nodes:
            match node:
                case ast.Import(names=aliases):
                    tops = {a.asname or a.name: a.name.partition(".")[0] for a in aliases}
                    names |= {n.partition(".")[0] for n, top in tops.items() if top != package}
                case ast.ImportFrom(module=str(source)) if source.partition(".")[0] != package:
                    names |= {a.asname or a.name for a in node.names}
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if root(value) in names:
                    names.add(name)
        return frozenset(names)

    def _outer(self) -> Iterator[ast.stmt]:
        """Statements at the top, and those that only type checkers see."""
        for node in self.tree.body:
            yield from node.body if isinstance(node, ast.If) else (node,)

    @cached_property
    def for_types(self) -> frozenset[ast.AST]:
        """What stands under `if TYPE_CHECKING`."""
        return frozenset(
            inner
            for node in self.nodes
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for statement in node.body
            for inner in ast.walk(statement)
        )

    @cached_property
    def private_names(self) -> frozenset[str]:
        """Names with one leading underscore that the file defines: its own, and its classes'."""
        return frozenset(name for node in self.nodes for name in _defined(node) if is_private(name))


def _defined(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
            yield name
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Assign(targets=[ast.Name(id="__slots__")]):
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


#: What Python itself hands out under such a name: the public face of named tuples.
_PUBLIC = frozenset({"_", "_asdict", "_fields", "_make", "_replace"})


def is_private(name: str) -> bool:
    """Whether a name has one leading underscore and is meant to be nobody else's."""
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


def root(node: ast.expr) -> str:
    """The name that a chain of attributes begins with; empty for anything else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def read_modules(package: Path) -> dict[str, Module]:
    """All modules of a package, by name."""
    modules = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        face = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if face else parts)
        modules[name] = Module(name, file, face)
    return modules


def imports_of(
    module: Module, modules: dict[str, Module], *, for_types: bool = True
) -> list[tuple[int, str]]:
    """Line and name of each module of the package that a file imports, once a line.

    `for_types`: also those that only type checkers see.
    """
    without = frozenset() if for_types else module.for_types
    return list(dict.fromkeys(_imports(module, modules, without)))


def _imports(
    module: Module, modules: dict[str, Module], without: frozenset[ast.AST]
) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        if node in without:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            for alias in node.names if source in modules else ():
                inner = f"{source}.{alias.name}"
                # A face may hand on a name that one of its files has as well: the name is meant.
                handed_on = modules[source].bound.get(alias.name)
                yield node.lineno, source if inner not in modules or handed_on else inner


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.folder.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])
