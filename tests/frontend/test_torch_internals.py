"""Private names of PyTorch stand in one module, and the installed PyTorch has all of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import stitch
from stitch.frontend.torch import torch_internals


def private_names(source: str) -> Iterator[str]:
    """Private names of torch that a module imports or reads; operators (`torch.ops`) are none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and (name := _dotted(node)):
            names = [name]
        else:
            continue
        for name in names:
            first, *parts = name.split(".")
            private = [p for p in parts if p.startswith("_") and not p.endswith("__")]
            if first == "torch" and parts[:1] != ["ops"] and private:
                yield name


def _dotted(node: ast.expr) -> str:
    """Return `a.b.c` of `a.b(x)[0].c`, or an empty text where it does not begin with a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        node = node.func if isinstance(node, ast.Call) else node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def test_no_other_module_uses_private_names_of_torch() -> None:
    root = Path(stitch.__file__).parent
    # The runtime is below the front ends, and inductor has no public entry for a graph.
    homes = Path(torch_internals.__file__), root / "runtime/executors/inductor_functions.py"
    used = {
        f"{file.relative_to(root)}: {name}"
        for file in root.rglob("*.py") if file not in homes
        if "torch" in (text := file.read_text(encoding="utf-8"))
        for name in private_names(text)
    }  # fmt: skip
    assert not used


def test_this_torch_has_every_name() -> None:
    names = dir(torch_internals)
    assert len(names) > 30
    for name in names:
        assert getattr(torch_internals, name) is not None, name
