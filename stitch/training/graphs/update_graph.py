"""The update: one graph that takes all gradients and gives all parameters and states anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stitch.graph import ComputationGraph, ComputationGraphBuilder, PlacementOption
from stitch.program import DataType, InputKind, Ownership, ValueType
from stitch.training.optimizers import Optimizer

LEARNING_RATE = "learning_rate"
STEP = "step"
GRADIENT_NORM = "gradient_norm"
#: Parameters of programs in another precision have a float32 one beside them.
MASTER = "master"
#: Before the name of a gradient: that of another micro-batch.
MORE = "more."
#: PyTorch's `clip_grad_norm_` divides by the norm and this.
_CLIP_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter to update: the name of its slot, the type in the programs, its gradient's slot.

    `has_master`: the update works on a float32 copy, and the programs get it rounded.
    """

    name: str
    type: ValueType
    gradient: str

    @property
    def has_master(self) -> bool:
        return self.type.data_type is not DataType.FLOAT32

    def beside(self, state: str) -> str:
        """The slot of a state that belongs to it."""
        return f"{self.name}.{state}"


def update_graph(
    name: str,
    parameters: Sequence[Parameter],
    optimizer: Optimizer,
    *,
    clip_grad_norm: float | None = None,
) -> ComputationGraph:
    """The update of all parameters; with clipping, the gradients' norm is an output as well.

    Raises `CompileError` where a parameter's type has no way to float32.
    """
    b = ComputationGraphBuilder(name)
    groups = {number: optimizer.groups[number] for number in group_numbers(parameters, optimizer)}
    given = {
        number: b.input(rate_name(number), (), DataType.FLOAT32, InputKind.STATE)
        for number in groups
    }
    step = None
    if any(group.counts_steps for group in groups.values()):
        before = b.input(STEP, (), DataType.INT64, InputKind.STATE, Ownership.DONATE)
        step = before + 1
        _replace(b, STEP, step)
    gradients = [_gradient(b, parameter) for parameter in parameters]
    if clip_grad_norm is not None:
        gradients = _clipped(b, gradients, clip_grad_norm)
    rates = {n: group.write_rates(b, given[n], step) for n, group in groups.items()}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        number = optimizer.group_of(parameter.name)
        _write_step(b, parameter, gradient, groups[number], rates[number])
    return b.build()


def rate_name(group: int) -> str:
    """The slot of a group's learning rate."""
    return f"{LEARNING_RATE}.{group}" if group else LEARNING_RATE


def is_rate(name: str) -> bool:
    """Whether a slot of an update is a learning rate."""
    return name == LEARNING_RATE or name.startswith(f"{LEARNING_RATE}.")


def group_numbers(parameters: Sequence[Parameter], optimizer: Optimizer) -> tuple[int, ...]:
    """The groups that have parameters here."""
    return tuple(sorted({optimizer.group_of(parameter.name) for parameter in parameters}))


def _gradient(b: ComputationGraphBuilder, parameter: Parameter) -> Any:
    kind = parameter.type
    gradient = b.input(parameter.gradient, kind.shape, kind.data_type, InputKind.SAVED)
    return b.cast(gradient, DataType.FLOAT32)


def _clipped(b: ComputationGraphBuilder, gradients: list[Any], most: float) -> list[Any]:
    """`torch.nn.utils.clip_grad_norm_`: all gradients by one factor of at most 1."""
    total = b.op("ReduceSum", gradients[0] * gradients[0], keepdims=0)
    for gradient in gradients[1:]:
        total = total + b.op("ReduceSum", gradient * gradient, keepdims=0)
    norm = b.op("Sqrt", total)
    b.output(GRADIENT_NORM, norm)
    factor = b.op("Min", most / (norm + _CLIP_EPSILON), 1.0)
    return [gradient * factor for gradient in gradients]


def _write_step(
    b: ComputationGraphBuilder, parameter: Parameter, gradient: Any, optimizer: Optimizer,
    rates: tuple[Any, ...],
) -> None:  # fmt: skip
    shape = parameter.type.shape
    kept = parameter.beside(MASTER) if parameter.has_master else parameter.name
    kind = InputKind.STATE if parameter.has_master else InputKind.PARAMETER
    value = b.input(kept, shape, DataType.FLOAT32, kind, Ownership.DONATE)
    states = {
        state: b.input(
            parameter.beside(state), () if state in optimizer.scalar_states else shape,
            DataType.FLOAT32, InputKind.STATE, Ownership.DONATE,
        )
        for state in optimizer.states
    }  # fmt: skip
    if optimizer.maximize:
        gradient = -gradient
    stepped, after = optimizer.write(b, value, gradient, states, rates)
    _replace(b, kept, stepped)
    for state, tensor in after.items():
        _replace(b, parameter.beside(state), tensor)
    if parameter.has_master:
        b.output(parameter.name, b.cast(stepped, parameter.type.data_type))


def _replace(b: ComputationGraphBuilder, name: str, value: Any) -> None:
    """What is new takes the buffer of what it replaces."""
    b.output(name, value)
    b.place(PlacementOption("output", name, "alias", name))


def accumulation_graph(name: str, parameters: Sequence[Parameter]) -> ComputationGraph:
    """Gradients of another micro-batch added to those so far, in their buffers."""
    b = ComputationGraphBuilder(name)
    for parameter in parameters:
        kind = parameter.type
        so_far = b.input(
            parameter.gradient, kind.shape, kind.data_type, InputKind.STATE, Ownership.DONATE
        )
        more = b.input(f"{MORE}{parameter.gradient}", kind.shape, kind.data_type, InputKind.SAVED)
        _replace(b, parameter.gradient, so_far + more)
    return b.build()
