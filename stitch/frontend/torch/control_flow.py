"""`torch.cond` and `while_loop` as choices and loops of a computation graph.

Comes in: a `Call`, the graphs that are operands, how they are written. Goes out: what the operator
gives. Importing this module needs the package torch (an optional extra). Must not know: fx nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call
from stitch.graph import SymbolicTensor, choose, repeat_while
from stitch.program import ValueType


@dataclass(frozen=True, slots=True)
class InnerGraph:
    """A graph that is an attribute of another one's module, by the way to it."""

    target: str
    module: Any


#: Writes an inner graph on operands; gives the arguments of its output node.
WriteInner = Callable[[InnerGraph, Sequence[Any]], Sequence[Any]]
#: From a call, how inner graphs are written, and the operands, to one value per result.
Control = Callable[..., Sequence[SymbolicTensor]]


def _cond(
    call: Call, write: WriteInner, predicate: Any, then: InnerGraph, otherwise: InnerGraph,
    operands: Sequence[Any] = (),
) -> Sequence[SymbolicTensor]:  # fmt: skip
    if not isinstance(predicate, SymbolicTensor):
        raise CompileError("the condition of a branch is no tensor", got=repr(predicate))

    def side(graph: InnerGraph) -> Callable[..., Sequence[SymbolicTensor]]:
        def written(tensors: Sequence[SymbolicTensor]) -> Sequence[SymbolicTensor]:
            return _tensors(write(graph, _in_place(operands, tensors)))

        return written

    sides = side(then), side(otherwise)
    return choose(call.builder, predicate, sides, _symbolic(operands), _kinds(call))


def _while_loop(
    call: Call, write: WriteInner, asked: InnerGraph, following: InnerGraph,
    carried: Sequence[Any], additional: Sequence[Any] = (),
) -> Sequence[SymbolicTensor]:  # fmt: skip
    _kinds(call)
    states, many = _tensors(carried), len(carried)

    def written(graph: InnerGraph, tensors: Sequence[SymbolicTensor]) -> list[SymbolicTensor]:
        read = _in_place(additional, tensors[many:])
        return _tensors(write(graph, [*tensors[:many], *read]))

    return repeat_while(
        call.builder, lambda tensors: written(asked, tensors)[0],
        lambda tensors: written(following, tensors), states, _symbolic(additional),
    )  # fmt: skip


def _symbolic(operands: Sequence[Any]) -> list[SymbolicTensor]:
    """Those of the operands that are tensors; sizes and the like are known."""
    return [operand for operand in operands if isinstance(operand, SymbolicTensor)]


def _in_place(operands: Sequence[Any], tensors: Sequence[SymbolicTensor]) -> list[Any]:
    """The operands with these for those that are tensors."""
    given = iter(tensors)
    return [next(given) if isinstance(o, SymbolicTensor) else o for o in operands]


def _kinds(call: Call) -> list[ValueType]:
    kinds = [kind for kind in call.results if kind is not None]
    if len(kinds) < len(call.results):
        raise CompileError("a branch or loop gives what is no tensor")
    return kinds


def _tensors(values: Sequence[Any]) -> list[SymbolicTensor]:
    for value in values:
        if not isinstance(value, SymbolicTensor):
            raise CompileError(
                "branches and loops take and give tensors of real numbers",
                got=type(value).__name__,
            )
    return list(values)


CONTROL: Mapping[Any, Control] = {
    torch.ops.higher_order.cond: _cond, torch.ops.higher_order.while_loop: _while_loop,
}  # fmt: skip
