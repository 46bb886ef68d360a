"""If, Loop, Scan and SequenceMap: the branch that is taken, loops as scans or unrolled.

Where data decide, an If is a choice of `stitch.graph`: only the side that is taken is computed.
Both sides then make tensors of the same types. Else the inputs that decide a condition become
constants of the program, and where no input may, the node is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from stitch.errors import CompileError
from stitch.frontend.onnx.control_calls import (
    Bodies,
    ControlCall,
    OuterValues,
    check_body,
    known_number,
    run_once,
    tensors_in,
)
from stitch.frontend.onnx.loop_nodes import lower_loop, lower_scan
from stitch.frontend.onnx.node_refusals import Unsupported
from stitch.frontend.onnx.values import FAILED, Bound, Failed, Scope, TensorList, kind_of
from stitch.graph import SymbolicTensor, choose


def lower_control(bodies: Bodies, call: ControlCall) -> Sequence[Bound]:
    """What a node makes; raises `Unsupported` where data decides."""
    return _HANDLERS[call.op](bodies, call)


def _if(bodies: Bodies, call: ControlCall) -> Sequence[Bound]:
    condition = call.operand(0)
    if isinstance(condition, SymbolicTensor) and bodies.builder.known_data(condition) is None:
        try:
            return _choice(bodies, call, condition)
        except (CompileError, Unsupported):
            bodies.loops.given_up += 1
    name = "then_branch" if known_number(bodies, call, condition) else "else_branch"
    return run_once(bodies, call.body(name), (), call)


def _choice(bodies: Bodies, call: ControlCall, condition: SymbolicTensor) -> Sequence[Bound]:
    """The results of the side that data choose; raises `StitchError` where sides differ in kind."""
    branches = [call.body(f"{name}_branch") for name in ("then", "else")]
    around = OuterValues(bodies, branches, call)
    #: What the first side gave, twice (the first time its types are found), and the second.
    written: list[list[Bound]] = []

    def side(branch: Any, shared: Scope) -> Callable[..., Sequence[SymbolicTensor]]:
        def write(entered: Sequence[SymbolicTensor]) -> Sequence[SymbolicTensor]:
            results = around.write(branch, shared, (), entered)
            written.append(results)
            if not all(isinstance(value, SymbolicTensor | TensorList) for value in results):
                raise Unsupported(call.op)
            return tensors_in(*results)

        return write

    then, other = [side(branch, bodies.body_scope(branch, call)) for branch in branches]
    made = choose(bodies.inside[-1], condition, (then, other), around.tensors)
    bodies.loops.given_up += 1  # What finding the types left behind.
    if any(list(map(_form, a)) != list(map(_form, b)) for a, b in pairwise(written)):
        raise Unsupported(call.op)
    for result, *sources in zip(made, *(tensors_in(*values) for values in written), strict=True):
        bodies.dependencies.note(call.op, [condition, *sources], [result])
    rest = iter(made)
    return [
        TensorList(tuple(next(rest) for _ in value.items))
        if isinstance(value, TensorList)
        else next(rest)
        for value in written[0]
    ]


def _form(value: Bound) -> int | None:
    """How many tensors a sequence has; None for a tensor."""
    return len(value.items) if isinstance(value, TensorList) else None


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
