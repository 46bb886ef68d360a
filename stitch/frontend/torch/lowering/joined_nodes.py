"""Several nodes of a graph of aot_autograd that are one operator: products of transposed matrices,
and sums of the gradients of all parts of a tensor.

Comes in: an fx graph whose tensors have known shapes. Goes out: the same graph with fewer nodes,
and the lowering of what then stands in it.
"""

from __future__ import annotations

from typing import Any

import torch

from stitch.frontend.torch.aten_call import Call, Row
from stitch.graph import SymbolicTensor

aten = torch.ops.aten

# Products of transposed matrices -------------------------------------------------------------


def fused_product(*_: Any) -> Any:
    """Stands in a graph for alpha A B + beta C, where A and B may be transposed."""
    raise AssertionError("a fused product is lowered, not called")


def _product(
    call: Call,
    a: SymbolicTensor,
    b: SymbolicTensor,
    added: SymbolicTensor | None,
    turned: tuple[bool, bool],
    alpha: float,
    beta: float,
) -> SymbolicTensor:
    attributes: dict[str, Any] = {}
    attributes.update({f"trans{name}": 1 for name, t in zip("AB", turned, strict=True) if t})
    attributes.update({n: float(v) for n, v in (("alpha", alpha), ("beta", beta)) if v != 1})
    operands = [call.cast(t) for t in (a, b, *(() if added is None else (added,)))]
    return call.builder.apply("Gemm", operands, 1, attributes)[0]


def _untransposed(node: Any) -> Any:
    """The matrix of which a node is the transposed one, or None."""
    if node.op != "call_function" or not node.args:
        return None
    swaps: dict[Any, Any] = {
        aten.t.default: lambda args: True,
        aten.permute.default: lambda args: [d % 2 for d in args[1]] == [1, 0],
        aten.transpose.int: lambda args: {d % 2 for d in args[1:]} == {0, 1},
    }
    check = swaps.get(node.target)
    source = node.args[0]
    if check is None or len(source.meta["val"].shape) != 2 or not check(node.args):
        return None
    return source


def fuse_transposed_products(graph: Any) -> None:
    """mm and addmm read a transposed matrix as it lies, instead of after a copy."""
    for node in graph.nodes:
        if node.target not in (aten.mm.default, aten.addmm.default):
            continue
        if not node.meta["val"].dtype.is_floating_point:
            continue
        added, (a, b) = (None, node.args) if len(node.args) == 2 else (node.args[0], node.args[1:])
        sources = [_untransposed(side) for side in (a, b)]
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        if all(source is None for source in sources) or beta == 0:
            continue
        kept = [side if s is None else s for side, s in zip((a, b), sources, strict=True)]
        turned = tuple(s is not None for s in sources)
        node.target, node.kwargs = fused_product, {}
        node.args = (*kept, added, turned, alpha, beta)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and _untransposed(node) is not None:
            graph.erase_node(node)


# Gradients of parts --------------------------------------------------------------------------


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


LOWERINGS: dict[Any, Row] = {fused_product: _product}
