"""Several nodes of a graph of aot_autograd that are one operator: sums of the gradients of all
parts of a tensor.

Comes in: an fx graph whose tensors have known shapes. Goes out: the same graph with fewer nodes.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def join_selected(graph: Any) -> None:
    """A sum of the gradients of x[0], x[1], ... of all parts of x is those gradients stacked."""
    for node in reversed(list(graph.nodes)):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        leaves = _selected(node)
        if leaves is None:
            continue
        (sizes, dim), *others = {(tuple(n.args[1]), n.args[2] % len(n.args[1])) for n in leaves}
        parts = {n.args[3] % sizes[dim]: n.args[0] for n in leaves}
        if others or len(leaves) != len(parts) or len(parts) != sizes[dim]:
            continue
        node.target, node.args = aten.stack.default, ([parts[i] for i in sorted(parts)], dim)
    for node in reversed(list(graph.nodes)):
        if node.target in (aten.add.Tensor, aten.select_backward.default) and not node.users:
            graph.erase_node(node)


def _selected(node: Any) -> list[Any] | None:
    """The gradients of parts that a node alone reads, and of which it is the sum; else None."""
    if node.target is aten.select_backward.default:
        return [node]
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    gradients: list[Any] = []
    for operand in node.args:
        alone = isinstance(operand, torch.fx.Node) and len(operand.users) == 1
        leaves = _selected(operand) if alone else None
        if leaves is None:
            return None
        gradients += leaves
    return gradients
