"""If, Loop, Scan and SequenceMap: the branch that is taken, loops as scans or unrolled.

Comes in: a node with bodies. Goes out: what the last of its bodies made, or a scan of a body where
there are many rounds and all are alike (`kept_loops`). A trip count or condition that is computed
from data is refused, but for an If whose sides make tensors of the same types and cannot fail: then
both are computed, and `Where` chooses. Must not know: files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stitch.frontend.onnx.control_calls import (
    Bodies,
    ControlCall,
    check_body,
    known_number,
    run_once,
)
from stitch.frontend.onnx.loop_nodes import lower_loop, lower_scan
from stitch.frontend.onnx.values import FAILED, Bound, Failed, TensorList, kind_of
from stitch.graph import SymbolicTensor

#: Operators that stop where an index is out of range, and checks, and loops,
#: which may do so inside: not for a side that is not taken.
_MAY_STOP = frozenset(
    {"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Scatter",
     "ReverseSequence", "TensorScatter", "MaxUnpool", "RoiAlign", "Expect",
     "Scan"}
)  # fmt: skip


def lower_control(bodies: Bodies, call: ControlCall) -> Sequence[Bound]:
    """What a node makes; raises `Unsupported` where data decides."""
    return _HANDLERS[call.op](bodies, call)


def _if(bodies: Bodies, call: ControlCall) -> Sequence[Bound]:
    condition = call.operand(0)
    chosen = _both(bodies, call, condition) if isinstance(condition, SymbolicTensor) else None
    if chosen is not None:
        return chosen
    name = "then_branch" if known_number(bodies, call, condition) else "else_branch"
    return run_once(bodies, call.body(name), (), call)


def _both(bodies: Bodies, call: ControlCall, condition: SymbolicTensor) -> list[Bound] | None:
    """Both sides, and a choice.

    None where the condition is known, where the sides differ in kind, or where one may fail.
    """
    if condition.size != 1 or bodies.builder.known_data(condition) is not None:
        return None
    before = [(writing, len(writing.operations)) for writing in bodies.inside]
    sides = [run_once(bodies, call.body(f"{name}_branch"), (), call) for name in ("then", "else")]
    if any(isinstance(value, Failed) for side in sides for value in side):
        return None
    operators = {one.op for writing, many in before for one in writing.operations[many:]}
    if not _MAY_STOP.isdisjoint(operators) or not _same_kinds(*sides):
        return None
    asked = bodies.builder.op("Reshape", condition, np.zeros(0, np.int64))
    return [_choice(bodies, asked, yes, no) for yes, no in zip(*sides, strict=True)]


def _same_kinds(yes: Sequence[Bound], no: Sequence[Bound]) -> bool:
    """Whether values are of the same kinds, and types that `Where` chooses among."""
    if len(yes) != len(no):
        return False
    for a, b in zip(yes, no, strict=True):
        if isinstance(a, TensorList) and isinstance(b, TensorList):
            if not _same_kinds(a.items, b.items):
                return False
        elif not (isinstance(a, SymbolicTensor) and isinstance(b, SymbolicTensor)
                  and a.type == b.type and not a.data_type.is_narrow):  # fmt: skip
            return False
    return True


def _choice(bodies: Bodies, asked: SymbolicTensor, yes: Bound, no: Bound) -> Bound:
    if isinstance(yes, TensorList) and isinstance(no, TensorList):
        pairs = zip(yes.items, no.items, strict=True)
        return TensorList(tuple(bodies.builder.op("Where", asked, a, b) for a, b in pairs))
    assert isinstance(yes, SymbolicTensor) and isinstance(no, SymbolicTensor)
    return bodies.builder.op("Where", asked, yes, no)


def _sequence_map(bodies: Bodies, call: ControlCall) -> Sequence[Bound]:
    body, first = call.body("body"), call.operand(0)
    if not isinstance(first, TensorList):
        raise call.malformed("operand 0 of SequenceMap is a sequence", got=kind_of(first))
    check_body(call, body, len(call.operands), 0)
    lists = [value for value in call.operands if isinstance(value, TensorList)]
    if any(len(one.items) != len(first.items) for one in lists):
        raise call.malformed("the sequences of SequenceMap differ in length")
    collected: list[list[SymbolicTensor]] = [[] for _ in body.output]
    shared = bodies.body_scope(body, call)
    for index in range(len(first.items)):
        operands = [v.items[index] if isinstance(v, TensorList) else v for v in call.operands]
        results = bodies.body(body, shared, operands, call)
        for values, value in zip(collected, results, strict=True):
            if isinstance(value, Failed):
                return [FAILED] * call.outputs
            if not isinstance(value, SymbolicTensor):
                raise call.malformed("the body of SequenceMap makes tensors")
            values.append(value)
    return [TensorList(tuple(values)) for values in collected]


_HANDLERS: dict[str, Callable[[Bodies, ControlCall], Sequence[Bound]]] = {
    "If": _if,
    "Loop": lower_loop,
    "Scan": lower_scan,
    "SequenceMap": _sequence_map,
}
CONTROL_OPERATORS = frozenset(_HANDLERS)
