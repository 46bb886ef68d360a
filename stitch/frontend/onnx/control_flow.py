"""Loops that stay loops: a body of ONNX's becomes the body of one scan.

A node with bodies: its operands and attributes, and what it asks of the walk over a model.

`OuterValues` are what a body reads of the values around it: what may not run at all (the side of a
choice, the rounds of a loop that ends by data) is given these as operands, so that nothing of it is
computed outside.

Loop and Scan: one scan of the body where it can be, else the body round by round.

A Loop whose trip count or condition data decide is a loop that ends by data (`repeat_while`), which
has states alone: where it collects values, their number would depend on data, and it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from stitch.errors import CompileError
from stitch.frontend.onnx.calls import AttributedNode
from stitch.frontend.onnx.node_refusals import Unsupported
from stitch.frontend.onnx.protos import element_type
from stitch.frontend.onnx.values import (
    FAILED,
    Bound,
    Failed,
    Given,
    Scope,
    TensorList,
    kind_of,
)
from stitch.graph import SymbolicTensor, repeat_while, scan
from stitch.program import MAX_ROUNDS as MOST_TRIPS
from stitch.program import Array

if TYPE_CHECKING:
    from stitch.frontend.onnx.node_walk import Walk

# --------------------------------------------------------------------------------------------------
# Loops that stay loops

#: Loops of at most so many rounds are written out: a few copies of a body are optimised together,
#: and cost less than going round.
UNROLLED_ROUNDS = 4

T = TypeVar("T")
Tensors = Sequence[SymbolicTensor]


@dataclass(slots=True)
class Loops:
    """From how many rounds on loops stay; how many have, and how many could not after all; how
    often a body was written."""

    unroll: int = UNROLLED_ROUNDS
    kept: int = 0
    given_up: int = 0
    written: int = 0


#: One round: its results, by states and elements.
Round = Callable[[Tensors, Tensors], Sequence[Bound]]


def keep_loop(
    bodies: Walk, op: str, count: int, states: Sequence[Given], write: Round,
    sequences: Tensors = (), **backward: Sequence[bool],
) -> list[SymbolicTensor] | None:  # fmt: skip
    """The last states and what rounds give; None for a loop that has to be written out.

    Args:
        sequences: Along their axis 0, some from their ends: `taken_backward`, `given_backward`.
    """
    if count <= bodies.loops.unroll:
        return None

    def scanned() -> list[SymbolicTensor]:
        around, first = bodies.inside[-1], _tensors(op, states)
        results: list[SymbolicTensor] = []

        def body(before: Tensors, elements: Tensors) -> tuple[Tensors, Tensors]:
            note, taken = bodies.dependencies.note, [*before, *elements]
            for source, inner in zip([*first, *sequences], taken, strict=True):
                note("Scan", [source], [inner])
            builders: list[Any] = [tensor.builder for tensor in taken[:1]]
            bodies.inside += builders
            try:
                results.extend(_tensors(op, write(before, elements)))
            finally:
                del bodies.inside[len(bodies.inside) - len(builders) :]
            # A state is what it was first, or after the round before.
            for source, state, after in zip(first, before, results, strict=False):
                note("Scan", [source, after], [state])
            return results[: len(before)], results[len(before) :]

        last, given = scan(around, body, first, sequences, count=count, **backward)
        made = [*last, *given]
        if not made or _is_known(made[0]):
            raise Unsupported(op)
        for inner, outer in zip(results, made, strict=True):
            bodies.dependencies.note("Scan", [inner], [outer])
        return made

    results = bodies.attempt(scanned)
    if results is None:
        bodies.loops.given_up += 1
    else:
        bodies.loops.kept += 1
    return results


def _tensors(op: str, values: Sequence[Bound]) -> list[SymbolicTensor]:
    """Values as tensors; sequences of tensors and values that were refused go round in no scan."""
    tensors = [value for value in values if isinstance(value, SymbolicTensor)]
    if len(tensors) != len(values):
        raise Unsupported(op)
    return tensors


def _is_known(result: SymbolicTensor) -> bool:
    """Whether the scan that made this reads nothing but small constants."""
    builder: Any = result.builder
    operands = [SymbolicTensor(builder, value) for value in builder.operations[-1].inputs]
    return all(builder.known_data(operand) is not None for operand in operands)


# --------------------------------------------------------------------------------------------------
# Bodies as functions


@dataclass(frozen=True, slots=True)
class ControlCall(AttributedNode):
    """A node with bodies; `scope` is where a body looks up names that are not its own."""

    op: str
    operands: tuple[Given, ...]
    outputs: int
    attributes: Mapping[str, Any]
    scope: Scope
    where: str

    def operand(self, index: int) -> Given:
        """An operand of any kind, None where it is absent."""
        return self.operands[index] if index < len(self.operands) else None

    def body(self, name: str) -> Any:
        """A graph that is an attribute."""
        graph = self.attributes.get(name)
        if graph is None or not hasattr(graph, "node"):
            missing = "a branch" if self.op == "If" else f"its {name}"
            raise self.malformed(f"{self.op} lacks {missing}")
        return graph


def known_number(
    bodies: Walk, call: ControlCall, value: Given, *, integers_only: bool = True
) -> Array:
    """The one element of a condition or trip count.

    Where it is not known the inputs that decide it are wanted, with `integers_only` those of real
    numbers not.
    """
    if not isinstance(value, SymbolicTensor):
        raise call.malformed(f"{call.op} is given no tensor where it wants one", got=kind_of(value))
    data = bodies.builder.known_data(value)
    if data is None or data.size != 1:
        bodies.dependencies.want(value, integers_only=integers_only)
        raise Unsupported(call.op)
    return data.reshape(())


class OuterValues:
    """The tensors around bodies that these read and that nobody knows yet."""

    def __init__(self, bodies: Walk, graphs: Sequence[Any], call: ControlCall) -> None:
        self._bodies, self._call = bodies, call
        names = dict.fromkeys(name for graph in graphs for name in names_in(graph))
        self._values = {
            name: bodies.look_up(name, call.scope, call.where)
            for name in names
            if call.scope.has(name)
        }
        tensors = [t for value in self._values.values() for t in tensors_in(value)]
        unknown = [t for t in tensors if bodies.builder.known_data(t) is None]
        self.tensors = list({(id(t.builder), t.index): t for t in unknown}.values())

    def write(
        self, body: Any, shared: Scope, operands: Sequence[Given], entered: Sequence[SymbolicTensor]
    ) -> list[Bound]:
        """Write a body where `entered` stand for the tensors around it; raises `StitchError`.

        Args:
            shared: What `Walk.body_scope` gave for the body.
            operands: The body's own inputs.
        """
        bodies, call = self._bodies, self._call
        inside = {}
        for outer, inner in zip(self.tensors, entered, strict=True):
            bodies.dependencies.note(call.op, [outer], [inner])
            inside[id(outer.builder), outer.index] = inner
        scope = shared.inner()
        own = {tensor.name for tensor in body.initializer}
        own |= {tensor.values.name for tensor in body.sparse_initializer}
        for name, value in self._values.items():
            if name not in own:
                scope.define(name, _replaced(value, inside), call.where)
        within: list[Any] = [t.builder for t in (*entered, *tensors_in(*operands))][:1]
        bodies.inside += within
        try:
            return bodies.body(body, scope, operands, call)
        finally:
            del bodies.inside[len(bodies.inside) - len(within) :]


def names_in(graph: Any) -> dict[str, None]:
    """The names that the nodes and outputs of a body read, also within bodies inside it."""
    pending, found = [graph], dict[str, None]()
    while pending:
        inner = pending.pop()
        found |= dict.fromkeys(output.name for output in inner.output)
        for node in inner.node:
            found |= dict.fromkeys(name for name in node.input if name)
            for attribute in node.attribute:
                pending += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
    return found


def tensors_in(*values: object) -> list[SymbolicTensor]:
    """The tensors among values, those of sequences as well."""
    found: list[SymbolicTensor] = []
    for value in values:
        found += value.items if isinstance(value, TensorList) else ()
        found += [value] if isinstance(value, SymbolicTensor) else []
    return found


def _replaced(value: Bound, inside: Mapping[tuple[int, int], SymbolicTensor]) -> Bound:
    def of(tensor: SymbolicTensor) -> SymbolicTensor:
        return inside.get((id(tensor.builder), tensor.index), tensor)

    if isinstance(value, TensorList):
        return TensorList(tuple(map(of, value.items)))
    return of(value) if isinstance(value, SymbolicTensor) else value


def check_body(call: ControlCall, body: Any, inputs: int, outputs: int) -> None:
    """Refuses a body with other slots than the node has."""
    if len(body.input) != inputs or len(body.output) < outputs:
        raise call.malformed(
            f"the body of {call.op} does not fit its operands",
            expected=f"{inputs} inputs and at least {outputs} outputs",
            got=f"{len(body.input)} and {len(body.output)}",
        )  # fmt: skip


def bound(value: Bound) -> Given:
    """A value that was not refused."""
    assert not isinstance(value, Failed)
    return value


# --------------------------------------------------------------------------------------------------
# Loop, Scan and If nodes

#: Most rounds of one loop: every round is a copy of its body.
MAX_ROUNDS = 4096
_NO_AXES, _FIRST = np.zeros(0, np.int64), np.zeros((), np.int64)
#: From this opset on a Scan goes along any axis, and has no axis of a batch.
BATCHLESS_SCAN = 9


def lower_loop(bodies: Walk, call: ControlCall) -> Sequence[Bound]:
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


def _is_decided_later(bodies: Walk, value: Given) -> bool:
    """Whether a number is known only when the program runs."""
    if not isinstance(value, SymbolicTensor):
        return False
    return value.size == 1 and bodies.builder.known_data(value) is None


def _known(
    bodies: Walk, call: ControlCall, value: Given, collects: bool, *, integers_only: bool = True
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


def _repeated(bodies: Walk, call: ControlCall, body: Any) -> Sequence[Bound] | None:
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
    bodies: Walk, call: ControlCall, body: Any, shared: Scope, states: Sequence[Given],
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

    kept = keep_loop(bodies, call.op, rounds, [*counters, *states], write)
    return None if kept is None else kept[len(counters) :]


def lower_scan(bodies: Walk, call: ControlCall) -> Sequence[Bound]:
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
    axes, backward = (_integers(call, f"scan_input_{n}", scanned) for n in ("axes", "directions"))
    results = len(body.output) - count
    out_axes, prepend = (
        _integers(call, f"scan_output_{n}", results) for n in ("axes", "directions")
    )
    sources = [_scan_node(call, value, axis) for value, axis in zip(
        call.operands[count:], axes, strict=True)]  # fmt: skip
    lengths = {tensor.shape[axis] for tensor, axis in sources}
    if len(lengths) != 1:
        raise call.malformed(
            "the inputs that Scan goes along differ in length", got=str(sorted(lengths))
        )
    (rounds,) = lengths
    shared = bodies.body_scope(body, call)
    kept = keep_loop(
        bodies, call.op, rounds, states,
        lambda inside, elements: bodies.body(body, shared, (*inside, *elements), call),
        [_moved(bodies, t, axis, 0) for t, axis in sources],
        taken_backward=list(map(bool, backward)), given_backward=list(map(bool, prepend)),
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


def _moved(bodies: Walk, tensor: SymbolicTensor, source: int, target: int) -> SymbolicTensor:
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


def _integers(call: ControlCall, name: str, count: int) -> tuple[int, ...]:
    """A list of integers, zeros where it is not written."""
    return call.wholes(name, count) if call.attributes.get(name) else (0,) * count


def _scan_node(call: ControlCall, value: Given, axis: int) -> tuple[SymbolicTensor, int]:
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
    bodies: Walk, call: ControlCall, values: Sequence[Bound], info: Any, axis: int
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
