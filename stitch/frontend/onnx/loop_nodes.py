"""Loop and Scan: one scan of the body where it can be, else the body round by round.

A Loop whose trip count or condition data decide is a loop that ends by data (`repeat_while`), which
has states alone: where it collects values, their number would depend on data, and it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.errors import CompileError
from stitch.frontend.onnx.control_calls import (
    Bodies,
    ControlCall,
    OuterValues,
    bound,
    check_body,
    known_number,
    names_in,
    tensors_in,
)
from stitch.frontend.onnx.kept_loops import LoopForm, Tensors, keep_loop
from stitch.frontend.onnx.node_refusals import Unsupported
from stitch.frontend.onnx.protos import element_type
from stitch.frontend.onnx.values import FAILED, Bound, Failed, Given, Scope, kind_of
from stitch.graph import SymbolicTensor, repeat_while
from stitch.program import MAX_ROUNDS as MOST_TRIPS
from stitch.program import Array

#: Most rounds of one loop: every round is a copy of its body.
MAX_ROUNDS = 4096
_NO_AXES, _FIRST = np.zeros(0, np.int64), np.zeros((), np.int64)
#: From this opset on a Scan goes along any axis, and has no axis of a batch.
BATCHLESS_SCAN = 9


def lower_loop(bodies: Bodies, call: ControlCall) -> Sequence[Bound]:
    body, builder = call.body("body"), bodies.builder
    states: list[Given] = list(call.operands[2:])
    check_body(call, body, 2 + len(states), 1 + len(states))
    limit, first = call.operand(0), call.operand(1)
    collects = call.outputs > len(states)
    made = None
    if not collects and (_is_decided_later(bodies, limit) or _is_decided_later(bodies, first)):
        made = _repeated(bodies, call, body)
    if made is not None:
        return made
    rounds = None
    if limit is not None:
        rounds = int(_known(bodies, call, limit, collects, integers_only=False))
    goes_on = first is None or bool(_known(bodies, call, first, collects))
    shared, index = bodies.body_scope(body, call), 0
    if goes_on and rounds is not None:
        kept = _kept_loop(bodies, call, body, shared, states, rounds)
        if kept is not None:
            return kept
    collected: list[list[Bound]] = [[] for _ in body.output[1 + len(states) :]]
    while goes_on and (rounds is None or index < rounds):
        if index == MAX_ROUNDS and not collects:
            made = _repeated(bodies, call, body)
        if made is not None:
            return made
        _check_rounds(call, index + 1)
        counter = builder.constant(np.full(_shape_of(body.input[0]), index, np.int64))
        asked = builder.constant(np.full(_shape_of(body.input[1]), True))
        results = bodies.body(body, shared, (counter, asked, *states), call)
        if any(isinstance(value, Failed) for value in results):
            return [FAILED] * call.outputs
        if not collects and _is_decided_later(bodies, bound(results[0])):
            made = _repeated(bodies, call, body)
        if made is not None:
            return made
        goes_on = bool(_known(bodies, call, bound(results[0]), collects))
        states = [bound(value) for value in results[1 : 1 + len(states)]]
        for values, value in zip(collected, results[1 + len(states) :], strict=True):
            values.append(value)
        index += 1
    infos = body.output[1 + len(states) :]
    pairs = zip(collected, infos, strict=True)
    return [*states, *(_stacked(bodies, call, values, info, 0) for values, info in pairs)]


def _is_decided_later(bodies: Bodies, value: Given) -> bool:
    """Whether a number is known only when the program runs."""
    if not isinstance(value, SymbolicTensor):
        return False
    return value.size == 1 and bodies.builder.known_data(value) is None


def _known(
    bodies: Bodies, call: ControlCall, value: Given, collects: bool, *, integers_only: bool = True
) -> Array:
    """As `known_number`, which is asked how many values a loop collects."""
    try:
        return known_number(bodies, call, value, integers_only=integers_only)
    except Unsupported:
        if not collects:
            raise
    raise call.refused(
        "operator Loop is not supported where data decide how many values it collects: "
        "the size of its result depends on data",
        remedy="give the loop a trip count and a condition that do not depend on data, or let it "
        "write into a state of its largest size",
    )


def _repeated(bodies: Bodies, call: ControlCall, body: Any) -> Sequence[Bound] | None:
    """The states after a loop that ends by data; None where they are no tensors that keep their
    types, or where the body is refused."""
    builder, (limit, goes_on) = bodies.builder, (call.operand(0), call.operand(1))
    first = tensors_in(*call.operands[2:])
    bodies.loops.given_up += 1  # Rounds that were written out before.
    if len(first) < len(call.operands[2:]):
        return None
    if limit is not None:
        data = builder.known_data(limit) if isinstance(limit, SymbolicTensor) else None
        limit = None if data is not None and data.size == 1 and data.item() >= MOST_TRIPS else limit
    around, shared = OuterValues(bodies, [body], call), bodies.body_scope(body, call)
    operands = [*around.tensors, *tensors_in(limit)]

    def truth(asked: Bound, number: SymbolicTensor | Array, most: Sequence[SymbolicTensor]) -> Any:
        """Whether a round of this number runs."""
        if not isinstance(asked, SymbolicTensor):
            raise Unsupported(call.op)
        asked = builder.op("Reshape", asked, _NO_AXES) if asked.shape else asked
        for bound_ in most:
            scalar = builder.op("Reshape", bound_, _NO_AXES) if bound_.shape else bound_
            asked = builder.op("And", asked, builder.op("Less", number, scalar))
        return asked

    def following(given: Sequence[SymbolicTensor]) -> Sequence[SymbolicTensor]:
        (_, number, *before), entered = given[: 2 + len(first)], given[2 + len(first) :]
        shape = _shape_of(body.input[0])
        counter = builder.op("Reshape", number, list(shape)) if shape else number
        asked = builder.constant(np.full(_shape_of(body.input[1]), True))
        seen, most = entered[: len(around.tensors)], entered[len(around.tensors) :]
        for source, inner in zip(operands, entered, strict=True):
            bodies.dependencies.note(call.op, [source], [inner])
        again, *after = around.write(body, shared, (counter, asked, *before), seen)
        made = tensors_in(*after[: len(first)])
        if len(made) < len(first):
            raise Unsupported(call.op)
        for source, state, result in zip(first, before, made, strict=True):
            bodies.dependencies.note(call.op, [source, result, *tensors_in(again)], [state])
        after_this = builder.op("Add", number, np.asarray(1, np.int64))
        return [truth(again, after_this, most), after_this, *made]

    try:
        asked = builder.constant(np.asarray(True)) if goes_on is None else goes_on
        start = [truth(asked, _FIRST, tensors_in(limit)), _FIRST, *first]
        last = repeat_while(bodies.inside[-1], lambda given: given[0], following, start, operands)
    except (CompileError, Unsupported):
        return None
    for source, result in zip(first, last[2:], strict=True):
        bodies.dependencies.note(call.op, [source, *tensors_in(limit, goes_on)], [result])
    return last[2:]


def _kept_loop(
    bodies: Bodies, call: ControlCall, body: Any, shared: Scope, states: Sequence[Given],
    rounds: int,
) -> Sequence[Bound] | None:  # fmt: skip
    """The loop as one scan; the round's number is its first state, if the body asks for it."""
    builder = bodies.builder
    zero = np.zeros(_shape_of(body.input[0]), np.int64)
    counters = [builder.constant(zero)] if body.input[0].name in names_in(body) else []
    asked = builder.constant(np.full(_shape_of(body.input[1]), True))

    def write(inside: Tensors, _: Tensors) -> Sequence[Bound]:
        counter = inside[0] if counters else builder.constant(zero)
        following = [builder.op("Add", counter, zero + 1)] if counters else []
        operands = (counter, asked, *inside[len(counters) :])
        goes_on, *results = bodies.body(body, shared, operands, call)
        if isinstance(goes_on, Failed) or not known_number(bodies, call, goes_on):
            raise Unsupported(call.op)
        return [*following, *results]

    form = LoopForm(call.op, rounds, [*counters, *states])
    kept = keep_loop(bodies, form, write)
    return None if kept is None else kept[len(counters) :]


def lower_scan(bodies: Bodies, call: ControlCall) -> Sequence[Bound]:
    body, builder = call.body("body"), bodies.builder
    if call.scope.opsets.get("", 0) < BATCHLESS_SCAN:
        raise call.refused(
            f"operator Scan is not supported before opset {BATCHLESS_SCAN}: it had a batch axis",
            remedy="export the model with a newer opset",
        )
    scanned = call.attributes.get("num_scan_inputs", 0)
    if not isinstance(scanned, int) or not 1 <= scanned <= len(call.operands):
        raise call.malformed(
            "num_scan_inputs of Scan does not fit", expected=f"1 to {len(call.operands)}",
            got=repr(scanned),
        )  # fmt: skip
    count = len(call.operands) - scanned
    states: list[Given] = list(call.operands[:count])
    check_body(call, body, len(call.operands), count)
    axes, backward = (call.integers(f"scan_input_{n}", scanned) for n in ("axes", "directions"))
    results = len(body.output) - count
    out_axes, prepend = (call.integers(f"scan_output_{n}", results) for n in ("axes", "directions"))
    sources = [_scanned(call, value, axis) for value, axis in zip(
        call.operands[count:], axes, strict=True)]  # fmt: skip
    lengths = {tensor.shape[axis] for tensor, axis in sources}
    if len(lengths) != 1:
        raise call.malformed(
            "the inputs that Scan goes along differ in length", got=str(sorted(lengths))
        )
    (rounds,) = lengths
    shared = bodies.body_scope(body, call)
    kept = keep_loop(
        bodies,
        LoopForm(
            call.op, rounds, states, [_moved(bodies, t, axis, 0) for t, axis in sources],
            [bool(back) for back in backward], [bool(front) for front in prepend],
        ),
        lambda inside, elements: bodies.body(body, shared, (*inside, *elements), call),
    )  # fmt: skip
    if kept is not None:
        given = zip(kept[count:], out_axes, strict=True)
        return [*kept[:count], *(_moved(bodies, tensor, 0, axis) for tensor, axis in given)]
    _check_rounds(call, rounds)
    collected: list[list[Bound]] = [[] for _ in range(results)]
    for index in range(rounds):
        slices = [
            builder.op(
                "Gather", tensor, np.asarray(rounds - 1 - index if back else index), axis=axis
            )
            for (tensor, axis), back in zip(sources, backward, strict=True)
        ]
        round_results = bodies.body(body, shared, (*states, *slices), call)
        if any(isinstance(value, Failed) for value in round_results):
            return [FAILED] * call.outputs
        states = [bound(value) for value in round_results[:count]]
        for values, value, front in zip(collected, round_results[count:], prepend, strict=True):
            values.insert(0 if front else len(values), value)
    outputs = zip(collected, body.output[count:], out_axes, strict=True)
    return [
        *states,
        *(_stacked(bodies, call, values, info, axis) for values, info, axis in outputs),
    ]


def _moved(bodies: Bodies, tensor: SymbolicTensor, source: int, target: int) -> SymbolicTensor:
    """A tensor with one axis elsewhere."""
    rank = len(tensor.shape)
    if not -rank <= target < rank:
        raise Unsupported("Scan")
    target %= rank
    if source == target:
        return tensor
    order = [axis for axis in range(rank) if axis != source]
    order.insert(target, source)
    return bodies.builder.op("Transpose", tensor, perm=order)


def _scanned(call: ControlCall, value: Given, axis: int) -> tuple[SymbolicTensor, int]:
    if not isinstance(value, SymbolicTensor) or not -len(value.shape) <= axis < len(value.shape):
        raise call.malformed(f"Scan cannot go along axis {axis}", got=kind_of(value))
    return value, axis % len(value.shape)


def _check_rounds(call: ControlCall, rounds: int) -> None:
    if rounds > MAX_ROUNDS:
        raise call.refused(
            f"operator {call.op} is not supported for more than {MAX_ROUNDS} rounds: "
            "every round becomes operations of its own"
        )


def _shape_of(info: Any) -> tuple[int, ...]:
    """The shape of one number, as a body declares it."""
    tensor = info.type.tensor_type
    return (1,) * len(tensor.shape.dim) if tensor.HasField("shape") else ()


def _stacked(
    bodies: Bodies, call: ControlCall, values: Sequence[Bound], info: Any, axis: int
) -> SymbolicTensor:
    """What rounds made, along a new axis."""
    tensors = [value for value in values if isinstance(value, SymbolicTensor)]
    if len(tensors) != len(values) or len({tensor.shape for tensor in tensors}) > 1:
        raise call.refused(
            f"operator {call.op} is not supported where the rounds make values of different shapes",
            got=", ".join(sorted({kind_of(bound(value)) for value in values})),
        )
    if tensors:
        rows = [bodies.builder.op("Unsqueeze", tensor, [axis]) for tensor in tensors]
        return bodies.builder.op("Concat", *rows, axis=axis)
    declared = info.type.tensor_type
    shape = [int(d.dim_value) if d.HasField("dim_value") else -1 for d in declared.shape.dim]
    if (
        not declared.HasField("shape")
        or -1 in shape
        or not -len(shape) <= axis + 1 <= len(shape) + 1
    ):
        raise call.refused(
            f"operator {call.op} is not supported where it runs no round and the body does not "
            "say the shapes of its results"
        )
    shape.insert(axis if axis >= 0 else axis + len(shape) + 1, 0)
    return bodies.builder.constant(
        np.zeros(shape, element_type(declared.elem_type, call.where).dtype)
    )
