"""If: the branch that is taken, or both and a choice between them.

Comes in: an If. Goes out: what its branch makes. A condition that is computed from data is refused,
unless both sides make tensors of the same types and neither can fail: then both are computed, and
`Where` chooses. Must not know: files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stitch.frontend.onnx.control.bodies import Bodies, ControlCall, known_number, run_once
from stitch.frontend.onnx.values.scope import Bound, Failed, TensorList
from stitch.graph import SymbolicTensor

#: Operators that stop where an index is out of range, and checks: not for a side that is not taken.
_MAY_STOP = frozenset(
    {"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Scatter",
     "ReverseSequence", "TensorScatter", "MaxUnpool", "RoiAlign", "Expect"}
)  # fmt: skip


def lower_branch(bodies: Bodies, call: ControlCall) -> Sequence[Bound]:
    condition = call.operand(0)
    made = _both(bodies, call, condition) if isinstance(condition, SymbolicTensor) else None
    if made is not None:
        return made
    name = "then_branch" if known_number(bodies, call, condition) else "else_branch"
    return run_once(bodies, call.body(name), (), call)


def _both(bodies: Bodies, call: ControlCall, condition: SymbolicTensor) -> list[Bound] | None:
    """Both sides, and a choice.

    None where the condition is known, where the sides differ in kind, or where one may fail.
    """
    if condition.size != 1 or bodies.builder.known_data(condition) is not None:
        return None
    before = len(bodies.builder.operations)
    sides = [run_once(bodies, call.body(f"{name}_branch"), (), call) for name in ("then", "else")]
    if any(isinstance(value, Failed) for side in sides for value in side):
        return None
    made = {one.op for one in bodies.builder.operations[before:]}
    if not _MAY_STOP.isdisjoint(made) or not _alike(*sides):
        return None
    asked = bodies.builder.op("Reshape", condition, np.zeros(0, np.int64))
    return [_chosen(bodies, asked, yes, no) for yes, no in zip(*sides, strict=True)]


def _alike(yes: Sequence[Bound], no: Sequence[Bound]) -> bool:
    """Whether values are of the same kinds, and types that `Where` chooses among."""
    if len(yes) != len(no):
        return False
    for a, b in zip(yes, no, strict=True):
        if isinstance(a, TensorList) and isinstance(b, TensorList):
            if not _alike(a.items, b.items):
                return False
        elif not (isinstance(a, SymbolicTensor) and isinstance(b, SymbolicTensor)
                  and a.type == b.type and not a.data_type.is_narrow):  # fmt: skip
            return False
    return True


def _chosen(bodies: Bodies, asked: SymbolicTensor, yes: Bound, no: Bound) -> Bound:
    if isinstance(yes, TensorList) and isinstance(no, TensorList):
        pairs = zip(yes.items, no.items, strict=True)
        return TensorList(tuple(bodies.builder.op("Where", asked, a, b) for a, b in pairs))
    assert isinstance(yes, SymbolicTensor) and isinstance(no, SymbolicTensor)
    return bodies.builder.op("Where", asked, yes, no)
