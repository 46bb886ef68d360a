"""The graphs of a training: trainable models, evaluation, and the update of parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from stitch.compiler import rewrite_graph, write_graph
from stitch.errors import CompileError, UsageError, unknown
from stitch.graph import ComputationGraph, ComputationGraphBuilder, PlacementOption
from stitch.ops import onnx_code
from stitch.program import (
    Array,
    Body,
    Constant,
    DataType,
    InputKind,
    InputSlot,
    Operation,
    Ownership,
    Program,
    ValueType,
)
from stitch.training.optimizers import Optimizer

#: Attributes that hold ONNX's number of a data type.
_TYPE_ATTRIBUTES = ("to", "dtype")
#: Kinds of inputs that persist between steps.
KEPT_KINDS = (InputKind.PARAMETER, InputKind.STATE)


def in_precision(graph: ComputationGraph, data_type: DataType) -> ComputationGraph:
    """Return the graph with `data_type` in place of float32; placement options are copied.

    Raises `CompileError` if an operator does not accept the type.
    """
    bodies = tuple([replace(body, **_retyped(body, data_type)) for body in graph.bodies])
    retyped = replace(graph, **_retyped(graph, data_type), bodies=bodies)
    builder = ComputationGraphBuilder(graph.name)
    inputs, outputs = ([slot.name for slot in slots] for slots in (graph.inputs, graph.outputs))

    def results_of(given: Sequence[Any]) -> list[Any]:
        made = write_graph(builder, retyped, dict(zip(inputs, given, strict=True)))
        return [made[name] for name in outputs]

    return rewrite_graph(retyped, builder, results_of)


def _retyped(part: ComputationGraph | Body, data_type: DataType) -> dict[str, Any]:
    """Return values, operations and constants with another type in place of float32."""
    before, after = (onnx_code(kind) for kind in (DataType.FLOAT32, data_type))

    def attributes(operation: Operation) -> dict[str, Any]:
        named = [name for name in _TYPE_ATTRIBUTES if operation.attributes.get(name) == before]
        return {**operation.attributes, **dict.fromkeys(named, after)}

    return {
        "values": tuple([
            replace(value, type=replace(value.type, data_type=data_type))
            if value.type.data_type is DataType.FLOAT32 else value
            for value in part.values
        ]),
        "operations": tuple([replace(o, attributes=attributes(o)) for o in part.operations]),
        "constants": tuple([
            replace(c, data=c.data.astype(data_type.dtype)) if c.data.dtype == np.float32 else c
            for c in part.constants
        ]),
    }  # fmt: skip


def evaluation_graph(graph: ComputationGraph) -> ComputationGraph:
    """Return the graph with BatchNormalization in inference mode and without next states."""
    state = {slot.name for slot in graph.inputs if slot.kind is InputKind.STATE}
    return replace(
        graph,
        name=f"{graph.name}_evaluation",
        outputs=tuple(slot for slot in graph.outputs if slot.name not in state),
        operations=tuple(map(_evaluating, graph.operations)),
        placement=tuple(w for w in graph.placement if w.side == "input"),
    )


def _evaluating(operation: Operation) -> Operation:
    if operation.domain or operation.op != "BatchNormalization":
        return operation
    if not operation.attributes.get("training_mode"):
        return operation
    attributes = {**operation.attributes, "training_mode": 0}
    return replace(operation, outputs=operation.outputs[:1], attributes=attributes)


def graph_of(program: Program) -> ComputationGraph:
    """Return the graph of a program, without layouts."""
    return ComputationGraph(
        program.name,
        program.inputs,
        tuple(replace(slot, aliases_input=None) for slot in program.outputs),
        tuple(replace(value, layout=None) for value in program.values),
        program.operations,
        program.constants,
        bodies=program.bodies,
    )


def with_weights(graph: ComputationGraph, values: Mapping[str, Array]) -> ComputationGraph:
    """Return the graph with parameters and buffers as constants, in the types of their inputs."""
    fixed = tuple(
        Constant(slot.value, values[slot.name].astype(graph.input_type(i).data_type.dtype))
        for i, slot in enumerate(graph.inputs)
        if slot.kind in KEPT_KINDS
    )
    inputs = tuple(slot for slot in graph.inputs if slot.kind not in KEPT_KINDS)
    return replace(graph, inputs=inputs, constants=(*graph.constants, *fixed))


# --------------------------------------------------------------------------------------------------
# Trainable modules

#: Positions of operands without gradients: running statistics that the forward pass updates.
_STATISTICS = {("", "BatchNormalization"): (3, 4)}
#: Names of unnamed constants.
_UNNAMED = re.compile(r"constant(_[0-9]+)?")


@dataclass(frozen=True, slots=True, eq=False)
class Trainable:
    """A graph whose PARAMETER inputs are trained and whose STATE inputs are buffers.

    `values` has the initial value of each, by input name. An output with the name of a STATE input
    is its next value. Raises `UsageError` for values that are missing or do not fit.
    """

    graph: ComputationGraph
    values: Mapping[str, Array] = field(repr=False)
    #: Has the same parameters and states, no next states and no random operators.
    evaluation: ComputationGraph

    def __post_init__(self) -> None:
        problems = []
        for i, slot in enumerate(self.graph.inputs):
            if slot.kind not in KEPT_KINDS:
                continue
            kind, value = self.graph.input_type(i), self.values.get(slot.name)
            if value is None:
                problems.append(f"{slot.name} ({kind.text()}) has no initial value")
            elif np.shape(value) != kind.shape:
                shape = list(np.shape(value))
                problems.append(f"{slot.name} is {kind.text()}, its value has shape {shape}")
        if problems:
            raise UsageError(
                f"graph {self.graph.name!r} cannot start training: " + "; ".join(problems),
                remedy="pass initial values by name: weights={'w': array}",
            )
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))

    def names(self, kind: InputKind) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.graph.inputs if slot.kind is kind)


def _refuse_dropout(graph: ComputationGraph) -> None:
    """Raise `CompileError` for an operator Dropout with a rate, which draws nothing."""
    rates = {constant.value: constant.data for constant in graph.constants}
    for operation in graph.operations:
        rate = rates.get(operation.inputs[1]) if len(operation.inputs) > 1 else None
        if operation.op == "Dropout" and not operation.domain and rate is not None and rate.any():
            raise CompileError(
                f"graph {graph.name!r} cannot be trained with the operator Dropout, which returns "
                "its operand",
                where=operation.location or f"operation {operation.op}",
                remedy="leave it out; of a torch module nn.Dropout is trained",
            )


def as_trainable(
    graph: ComputationGraph,
    weights: Mapping[str, Array] | None = None,
    trainable: Iterable[str] | None = None,
    evaluation: ComputationGraph | None = None,
) -> Trainable:
    """Return a graph as a trainable model; its PARAMETER inputs are the parameters if it has any.

    Args:
        weights: Initial values by name; they replace those of the graph.
        trainable: Names of the constants or parameters to train. By default all floating constants
            with a name and at least one axis, except statistics.
        evaluation: The graph for evaluation, if it is more than `graph` in inference mode.

    Raises:
        UsageError: A name is unknown, or a value does not fit.
        CompileError: The graph has no parameters, or a Dropout with a rate.
    """
    # Copies: the caller may overwrite its arrays before the training starts.
    initial = {name: np.array(value) for name, value in (weights or {}).items()}
    have = {slot.name for slot in graph.inputs if slot.kind is InputKind.PARAMETER}
    wanted = None if trainable is None else set(trainable)
    if wanted is not None or not have:
        graph, promoted = _promote_constants(graph, wanted)
        initial = {**promoted, **initial}
    if wanted is not None and have - wanted:
        graph = _freeze_parameters(graph, have - wanted)
    names = {slot.name for slot in graph.inputs if slot.kind in KEPT_KINDS}
    unknown = sorted(initial.keys() - names)
    if unknown:
        raise UsageError(
            f"graph {graph.name!r} has no parameter or state {', '.join(map(repr, unknown))}",
            expected=", ".join(sorted(names)) or "none",
        )
    if not any(slot.kind is InputKind.PARAMETER for slot in graph.inputs):
        raise CompileError(
            f"graph {graph.name!r} has no parameters to train",
            remedy="declare inputs with kind=parameter, name floating constants, or pass "
            "trainable=[...]",
        )
    _refuse_dropout(graph)
    if evaluation is None:
        evaluation = evaluation_graph(graph)
    elif wanted is not None:
        evaluation = _freeze_parameters(evaluation, have - wanted)
    return Trainable(graph, initial, evaluation)


def _promote_constants(
    graph: ComputationGraph, wanted: set[str] | None
) -> tuple[ComputationGraph, dict[str, Array]]:
    """Turn constants into PARAMETER inputs; return their data by name."""
    fixed = {
        operation.inputs[position]
        for operation in graph.operations
        for position in _STATISTICS.get((operation.domain, operation.op), ())
    }
    taken = {slot.name for slot in graph.inputs}
    slots, values = [], {}
    for constant in graph.constants:
        value = graph.values[constant.value]
        if wanted is not None:
            chosen = value.name in wanted
        else:
            chosen = bool(value.type.shape) and _UNNAMED.fullmatch(value.name) is None
            chosen = chosen and constant.value not in fixed
        if chosen and value.type.data_type.is_floating and value.name not in taken:
            slots.append(InputSlot(value.name, constant.value, InputKind.PARAMETER))
            values[value.name] = constant.data
    trained = [slot.name for slot in graph.inputs if slot.kind is InputKind.PARAMETER]
    missing = (wanted or set()).difference(trained, values)
    if missing:
        names = [*trained, *(graph.values[c.value].name for c in graph.constants)]
        raise unknown(
            f"graph {graph.name!r} has no parameter and no floating constant "
            f"{', '.join(sorted(missing))} to train",
            min(missing), names,
            remedy="omit trainable=: requires_grad of a torch module's parameters decides",
        )  # fmt: skip
    moved = {slot.value for slot in slots}
    constants = tuple(c for c in graph.constants if c.value not in moved)
    return replace(graph, inputs=(*graph.inputs, *slots), constants=constants), values


def _freeze_parameters(graph: ComputationGraph, frozen: set[str]) -> ComputationGraph:
    """Turn parameters into STATE inputs without a next value."""
    slots = tuple(
        replace(slot, kind=InputKind.STATE) if slot.name in frozen else slot
        for slot in graph.inputs
    )
    return replace(graph, inputs=slots)


# --------------------------------------------------------------------------------------------------
# The update graph

LEARNING_RATE = "learning_rate"
STEP = "step"
GRADIENT_NORM = "gradient_norm"
#: The factor by which clipping scales all gradients.
CLIP_FACTOR = "clip_factor"
#: State name of the float32 copy of a parameter whose programs have another precision.
MASTER = "master"
#: Name beside a parameter of the sum of squares of its gradient.
SQUARE = "square"
#: Prefix of the gradients of another micro-batch.
MORE = "more."
#: Added to the norm before the division, as in PyTorch's `clip_grad_norm_`.
_CLIP_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter to update: its name, type in the programs, and the slot of its gradient."""

    name: str
    type: ValueType
    gradient: str

    @property
    def has_master(self) -> bool:
        """Whether the update works on a float32 copy, and the programs get the rounded values."""
        return self.type.data_type is not DataType.FLOAT32

    def beside(self, state: str) -> str:
        """Return the slot of an optimizer state of this parameter."""
        return f"{self.name}.{state}"


def update_graph(
    name: str,
    parameters: Sequence[Parameter],
    optimizer: Optimizer,
    *,
    clip_grad_norm: float | None = None,
    takes_factor: bool = False,
) -> ComputationGraph:
    """Return the graph that updates all parameters.

    Args:
        clip_grad_norm: Clip the norm of all gradients to this value; the norm becomes an output.
        takes_factor: The factor of clipping is an input instead, for a part of the parameters.

    Raises:
        CompileError: A parameter's type cannot be cast to float32.
    """
    b = ComputationGraphBuilder(name)
    groups = {number: optimizer.groups[number] for number in group_numbers(parameters, optimizer)}
    rate_inputs = {
        number: b.input(rate_name(number), (), DataType.FLOAT32, InputKind.STATE)
        for number in groups
    }
    step = None
    if any(group.counts_steps for group in groups.values()):
        before = b.input(STEP, (), DataType.INT64, InputKind.STATE, Ownership.DONATE)
        step = before + 1
        _replace(b, STEP, step)
    gradients = [_gradient(b, parameter) for parameter in parameters]
    if takes_factor:
        factor = b.input(CLIP_FACTOR, (), DataType.FLOAT32)
        gradients = [gradient * factor for gradient in gradients]
    elif clip_grad_norm is not None:
        factor = _clip_factor(b, [_square(b, gradient) for gradient in gradients], clip_grad_norm)
        gradients = [gradient * factor for gradient in gradients]
    rates = {n: group.write_rates(b, rate_inputs[n], step) for n, group in groups.items()}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        number = optimizer.group_of(parameter.name)
        _write_step(b, parameter, gradient, groups[number], rates[number])
    return b.build()


def rate_name(group: int) -> str:
    """Return the slot of a parameter group's learning rate."""
    return f"{LEARNING_RATE}.{group}" if group else LEARNING_RATE


def is_rate(name: str) -> bool:
    return name == LEARNING_RATE or name.startswith(f"{LEARNING_RATE}.")


def group_numbers(parameters: Sequence[Parameter], optimizer: Optimizer) -> tuple[int, ...]:
    """Return the parameter groups that have parameters in `parameters`."""
    return tuple(sorted({optimizer.group_of(parameter.name) for parameter in parameters}))


def _gradient(b: ComputationGraphBuilder, parameter: Parameter) -> Any:
    kind = parameter.type
    gradient = b.input(parameter.gradient, kind.shape, kind.data_type, InputKind.SAVED)
    return b.cast(gradient, DataType.FLOAT32)


def _square(b: ComputationGraphBuilder, gradient: Any) -> Any:
    return b.op("ReduceSum", gradient * gradient, keepdims=0)


def _clip_factor(b: ComputationGraphBuilder, squares: list[Any], most: float) -> Any:
    """Return the factor, at most 1, by which `torch.nn.utils.clip_grad_norm_` scales gradients."""
    total = squares[0]
    for square in squares[1:]:
        total = total + square
    norm = b.op("Sqrt", total)
    b.output(GRADIENT_NORM, norm)
    return b.op("Min", most / (norm + _CLIP_EPSILON), 1.0)


def squares_graph(name: str, parameters: Sequence[Parameter]) -> ComputationGraph:
    """Return the graph of the sum of squares of each gradient."""
    b = ComputationGraphBuilder(name)
    for parameter in parameters:
        b.output(parameter.beside(SQUARE), _square(b, _gradient(b, parameter)))
    return b.build()


def clipping_graph(
    name: str, parameters: Sequence[Parameter], clip_grad_norm: float
) -> ComputationGraph:
    """Return the graph of the factor of clipping from the sums of squares of all gradients.

    It and `update_graph` with `takes_factor` have the bits of `update_graph` with `clip_grad_norm`.
    """
    b = ComputationGraphBuilder(name)
    squares = [b.input(p.beside(SQUARE), (), DataType.FLOAT32) for p in parameters]
    b.output(CLIP_FACTOR, _clip_factor(b, squares, clip_grad_norm))
    return b.build()


def _write_step(
    b: ComputationGraphBuilder, parameter: Parameter, gradient: Any, optimizer: Optimizer,
    rates: tuple[Any, ...],
) -> None:  # fmt: skip
    shape = parameter.type.shape
    slot = parameter.beside(MASTER) if parameter.has_master else parameter.name
    kind = InputKind.STATE if parameter.has_master else InputKind.PARAMETER
    value = b.input(slot, shape, DataType.FLOAT32, kind, Ownership.DONATE)
    states = {
        state: b.input(
            parameter.beside(state), () if state in optimizer.scalar_states else shape,
            DataType.FLOAT32, InputKind.STATE, Ownership.DONATE,
        )
        for state in optimizer.states
    }  # fmt: skip
    if optimizer.maximize:
        gradient = -gradient
    if optimizer.weight_decay and not optimizer.shrinks:
        gradient = gradient + value * optimizer.weight_decay
    stepped, after = optimizer.write(b, value, gradient, states, rates)
    _replace(b, slot, stepped)
    for state, tensor in after.items():
        _replace(b, parameter.beside(state), tensor)
    if parameter.has_master:
        b.output(parameter.name, b.cast(stepped, parameter.type.data_type))


def _replace(b: ComputationGraphBuilder, name: str, value: Any) -> None:
    """Output a new value into the buffer of the input of that name."""
    b.output(name, value)
    b.place(PlacementOption("output", name, "alias", name))


def accumulation_graph(name: str, parameters: Sequence[Parameter]) -> ComputationGraph:
    """Return the graph that adds gradients of another micro-batch to the sums, in place."""
    b = ComputationGraphBuilder(name)
    for parameter in parameters:
        kind = parameter.type
        so_far = b.input(
            parameter.gradient, kind.shape, kind.data_type, InputKind.STATE, Ownership.DONATE
        )
        more = b.input(f"{MORE}{parameter.gradient}", kind.shape, kind.data_type, InputKind.SAVED)
        _replace(b, parameter.gradient, so_far + more)
    return b.build()
