"""If, Loop, Scan and SequenceMap: the branch that is taken, loops unrolled.

Comes in: a node with bodies. Goes out: what the last of its bodies made. A trip count or condition
that is computed from data is refused, but for an If whose sides make tensors of the same types and
cannot fail: then both are computed, and `Where` chooses. Must not know: files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from stitch.frontend.onnx.node_refusals import Refusing, Unsupported
from stitch.frontend.onnx.protos import element_type
from stitch.frontend.onnx.values import (
    FAILED,
    Bound,
    Dependencies,
    Failed,
    Given,
    Scope,
    TensorList,
    kind_of,
)
from stitch.graph import ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array


@dataclass(frozen=True, slots=True)
class ControlCall(Refusing):
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

    def integers(self, name: str, count: int) -> tuple[int, ...]:
        """A list of integers, zeros where it is not written."""
        values = self.attributes.get(name) or (0,) * count
        if not isinstance(values, tuple) or len(values) != count:
            raise self.malformed(
                f"attribute {name!r} of {self.op} does not fit", expected=f"{count} integers",
                got=repr(values),
            )  # fmt: skip
        return values


class Bodies(Protocol):
    """What writes bodies into a graph: the walk over a model."""

    builder: ComputationGraphBuilder
    dependencies: Dependencies

    def body_scope(self, body: Any, call: ControlCall) -> Scope:
        """The names that every run of a body shares."""

    def body(
        self, body: Any, shared: Scope, operands: Sequence[Given], call: ControlCall
    ) -> list[Bound]:
        """Writes a body once and gives its outputs."""


def known_number(
    bodies: Bodies, call: ControlCall, value: Given, *, integers_only: bool = True
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


def run_once(
    bodies: Bodies, body: Any, operands: Sequence[Given], call: ControlCall
) -> list[Bound]:
    """The outputs of a body that is written once."""
    return bodies.body(body, bodies.body_scope(body, call), operands, call)


#: Most rounds of one loop: every round is a copy of its body.
MAX_ROUNDS = 4096
#: Operators that stop where an index is out of range, and checks: not for a side that is not taken.
_MAY_STOP = frozenset(
    {"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Scatter",
     "ReverseSequence", "TensorScatter", "MaxUnpool", "RoiAlign", "Expect"}
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
    before = len(bodies.builder.operations)
    sides = [run_once(bodies, call.body(f"{name}_branch"), (), call) for name in ("then", "else")]
    if any(isinstance(value, Failed) for side in sides for value in side):
        return None
    operators = {one.op for one in bodies.builder.operations[before:]}
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


def _loop(bodies: Bodies, call: ControlCall) -> Sequence[Bound]:
    body, builder = call.body("body"), bodies.builder
    states: list[Given] = list(call.operands[2:])
    _check_body(call, body, 2 + len(states), 1 + len(states))
    limit, first = call.operand(0), call.operand(1)
    rounds = None
    if limit is not None:
        rounds = int(known_number(bodies, call, limit, integers_only=False))
    goes_on = first is None or bool(known_number(bodies, call, first))
    collected: list[list[Bound]] = [[] for _ in body.output[1 + len(states) :]]
    shared, index = bodies.body_scope(body, call), 0
    while goes_on and (rounds is None or index < rounds):
        _check_rounds(call, index + 1)
        counter = builder.constant(np.full(_shape_of(body.input[0]), index, np.int64))
        asked = builder.constant(np.full(_shape_of(body.input[1]), True))
        results = bodies.body(body, shared, (counter, asked, *states), call)
        if any(isinstance(value, Failed) for value in results):
            return [FAILED] * call.outputs
        goes_on = bool(known_number(bodies, call, _given(results[0])))
        states = [_given(value) for value in results[1 : 1 + len(states)]]
        for values, value in zip(collected, results[1 + len(states) :], strict=True):
            values.append(value)
        index += 1
    infos = body.output[1 + len(states) :]
    pairs = zip(collected, infos, strict=True)
    return [*states, *(_stacked(bodies, call, values, info, 0) for values, info in pairs)]


def _scan(bodies: Bodies, call: ControlCall) -> Sequence[Bound]:
    body, builder = call.body("body"), bodies.builder
    scanned = call.attributes.get("num_scan_inputs", 0)
    if not isinstance(scanned, int) or not 1 <= scanned <= len(call.operands):
        raise call.malformed(
            "num_scan_inputs of Scan does not fit", expected=f"1 to {len(call.operands)}",
            got=repr(scanned),
        )  # fmt: skip
    count = len(call.operands) - scanned
    states: list[Given] = list(call.operands[:count])
    _check_body(call, body, len(call.operands), count)
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
    _check_rounds(call, rounds)
    collected: list[list[Bound]] = [[] for _ in range(results)]
    shared = bodies.body_scope(body, call)
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
        states = [_given(value) for value in round_results[:count]]
        for values, value, front in zip(collected, round_results[count:], prepend, strict=True):
            values.insert(0 if front else len(values), value)
    outputs = zip(collected, body.output[count:], out_axes, strict=True)
    return [
        *states,
        *(_stacked(bodies, call, values, info, axis) for values, info, axis in outputs),
    ]


def _scanned(call: ControlCall, value: Given, axis: int) -> tuple[SymbolicTensor, int]:
    if not isinstance(value, SymbolicTensor) or not -len(value.shape) <= axis < len(value.shape):
        raise call.malformed(f"Scan cannot go along axis {axis}", got=kind_of(value))
    return value, axis % len(value.shape)


def _sequence_map(bodies: Bodies, call: ControlCall) -> Sequence[Bound]:
    body, first = call.body("body"), call.operand(0)
    if not isinstance(first, TensorList):
        raise call.malformed("operand 0 of SequenceMap is a sequence", got=kind_of(first))
    _check_body(call, body, len(call.operands), 0)
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


def _given(value: Bound) -> Given:
    assert not isinstance(value, Failed)
    return value


def _check_body(call: ControlCall, body: Any, inputs: int, outputs: int) -> None:
    if len(body.input) != inputs or len(body.output) < outputs:
        raise call.malformed(
            f"the body of {call.op} does not fit its operands",
            expected=f"{inputs} inputs and at least {outputs} outputs",
            got=f"{len(body.input)} and {len(body.output)}",
        )  # fmt: skip


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
            got=", ".join(sorted({kind_of(_given(value)) for value in values})),
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


_HANDLERS: dict[str, Callable[[Bodies, ControlCall], Sequence[Bound]]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceMap": _sequence_map,
}
CONTROL_OPERATORS = frozenset(_HANDLERS)
