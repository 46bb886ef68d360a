"""Stages of a training: programs for several devices, with the bits of the training on one.

The forward graph is cut after the compiler's passes and differentiated part by part. A stage reads
values of earlier stages and returns their gradients; the last stage has the loss. Each stage
updates the parameters that it reads first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from stitch.argument_kinds import LIST, WHOLE, either, instance_of, takes
from stitch.compiler import Differentiated, cuttable, differentiate_parts, prepare_for_parts
from stitch.graph import ComputationGraph
from stitch.machine import Machine
from stitch.program import DataType, InputKind, Ownership, Program, Role, Space
from stitch.training.graphs import (
    MORE,
    Parameter,
    Trainable,
    accumulation_graph,
    clipping_graph,
    in_precision,
    squares_graph,
    update_graph,
)
from stitch.training.losses import Loss
from stitch.training.optimizers import Optimizer
from stitch.training.programs import (
    RESERVED,
    TrainingOptions,
    check_names,
    compilation,
    loss_graph,
    prediction_of,
)

T = TypeVar("T", ComputationGraph, Program)


@dataclass(frozen=True, slots=True)
class PassedValue:
    """A value that a stage computes for another: its input slot, the source, the output slot."""

    slot: str
    source: int
    output: str


@dataclass(frozen=True, slots=True)
class Stage(Generic[T]):
    """The part of a training that one device runs, as graphs or compiled.

    Slots of one name are one tensor of the stage. A parameter may be an input of several stages;
    all but the one that updates it read a copy.

    Attributes:
        forward: Reads the batch, its keys, parameters, states and values of earlier stages.
        loss: The loss and the gradient of the prediction; None but in the last stage.
        backward: Reads what forward read or computed, and gradients; None if it has no gradients.
        accumulation: Adds the gradients of another micro-batch; None without parameters.
        squares: The sums of squares of the gradients; None without clipping.
        update: Updates the parameters; None without any.
        parameters: The parameters that this stage updates.
        arriving: Values of earlier stages that forward reads.
        returning: Gradients of later stages that backward reads.
    """

    forward: T
    loss: T | None
    backward: T | None
    accumulation: T | None
    squares: T | None
    update: T | None
    parameters: tuple[Parameter, ...]
    arriving: tuple[PassedValue, ...]
    returning: tuple[PassedValue, ...]

    @property
    def in_order(self) -> tuple[tuple[Role, T | None], ...]:
        """The graphs or programs with their roles, in the order of a step."""
        return (
            (Role.FORWARD, self.forward), (Role.LOSS, self.loss), (Role.BACKWARD, self.backward),
            (Role.BACKWARD, self.accumulation), (Role.UPDATE, self.squares),
            (Role.UPDATE, self.update),
        )  # fmt: skip

    @property
    def reread(self) -> tuple[str, ...]:
        """The states that forward replaces and of which backward reads the value before."""
        if self.backward is None:
            return ()
        read = {slot.name for slot in self.backward.inputs}
        changed = {slot.name for slot in self.forward.outputs}
        return tuple(
            slot.name for slot in self.forward.inputs
            if slot.kind is InputKind.STATE and slot.name in read & changed
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StagedGraphs:
    """The stages of a training.

    Attributes:
        clipping: The factor of clipping from the sums of squares of all stages, and the norm.
        parameters: The parameters of all stages, in the order of the training on one device.
    """

    stages: tuple[Stage[ComputationGraph], ...]
    clipping: ComputationGraph | None
    parameters: tuple[Parameter, ...]


@takes(model=instance_of("a trainable model", Trainable), cuts=either(WHOLE, LIST))
def stages_of(
    model: Trainable, loss: Loss, optimizer: Optimizer, options: TrainingOptions,
    cuts: int | Sequence[str], *, is_prepared: bool = False,
) -> StagedGraphs:  # fmt: skip
    """Return the stages of a training.

    Args:
        cuts: The number of stages, or the nodes to cut after, as for `split_graph`.
        is_prepared: The model's graph is one that `stage_graph` returned, divided.

    Raises:
        CompileError: An operator has no gradient, or the graph cannot be cut so.
    """
    graph = model.graph if is_prepared else _with_free_names(model.graph, options.precision)
    parts = differentiate_parts(
        graph, cuts, prediction_of(graph), recompute=options.recompute, is_prepared=is_prepared
    )
    parameters = tuple([
        Parameter(slot.name, graph.input_type(i), f"{slot.name}.grad")
        for i, slot in sorted(enumerate(graph.inputs), key=lambda pair: pair[1].value)
        if slot.kind is InputKind.PARAMETER
    ])  # fmt: skip
    stages = tuple([
        _stage(parts, index, loss, optimizer, options, parameters) for index in range(len(parts))
    ])  # fmt: skip
    clip = options.clip_grad_norm
    name = f"{graph.name}_clipping"
    clipping = None if clip is None else clipping_graph(name, parameters, clip)
    return StagedGraphs(stages, clipping, parameters)


def stage_graph(model: Trainable, options: TrainingOptions) -> ComputationGraph:
    """Return the forward graph that `stages_of` cuts: after the passes, with one prediction."""
    graph = _with_free_names(model.graph, options.precision)
    return cuttable(prepare_for_parts(graph, prediction_of(graph)))


def _with_free_names(graph: ComputationGraph, precision: DataType) -> ComputationGraph:
    """Return the graph in a precision, without the names that a training uses."""
    if precision is not DataType.FLOAT32:
        graph = in_precision(graph, precision)
    check_names(graph)
    values = tuple([
        replace(value, name=f"{value.name}_") if value.name in RESERVED else value
        for value in graph.values
    ])  # fmt: skip
    return replace(graph, values=values)


def _stage(
    parts: Sequence[Differentiated], index: int, loss: Loss, optimizer: Optimizer,
    options: TrainingOptions, parameters: Sequence[Parameter],
) -> Stage[ComputationGraph]:  # fmt: skip
    part = parts[index]
    name, forward, backward = part.forward.name, part.forward, part.backward
    read = {slot.name for slot in forward.inputs if slot.kind is InputKind.PARAMETER}
    read -= {slot.name for before in parts[:index] for slot in before.forward.inputs}
    own = tuple(parameter for parameter in parameters if parameter.name in read)
    makers = {s.name: k for k in range(index) for s in parts[k].forward.outputs}
    arriving = tuple([
        PassedValue(slot.name, makers[slot.name], slot.name)
        for slot in forward.inputs
        if slot.kind is InputKind.ACTIVATION and slot.name in makers
    ])  # fmt: skip
    is_last = index == len(parts) - 1
    returning = [] if is_last else [_gradient_source(parts, index, seed) for seed in part.seeds]
    factor = options.clip_grad_norm is not None
    kinds = {slot.name: forward.output_type(i) for i, slot in enumerate(forward.outputs)}
    return Stage(
        forward,
        loss_graph(loss, part, kinds[part.seeds[0][0]], options) if is_last else None,
        backward if part.gradients else None,
        accumulation_graph(f"{backward.name}_sum", own) if own else None,
        squares_graph(f"{name}_squares", own) if own and factor else None,
        update_graph(f"{name}_update", own, optimizer, takes_factor=factor) if own else None,
        own, arriving, tuple(returning),
    )  # fmt: skip


def _gradient_source(
    parts: Sequence[Differentiated], index: int, seed: tuple[str, str]
) -> PassedValue:
    """Return where the gradient of a value comes from: the next part that reads the value."""
    value, slot = seed
    for later in range(index + 1, len(parts)):
        for name, gradient in parts[later].gradients:
            if name == value:
                return PassedValue(slot, later, gradient)
    raise AssertionError(f"a later part returns the gradient of {value}")


def compile_stage(
    stage: Stage[ComputationGraph], machine: Machine, spaces: Mapping[str, Space] | None = None
) -> Stage[Program]:
    """Return a stage with the programs of its device; raise as `compile_graph`.

    Its programs overwrite no input, so that a step that fails leaves all tensors as they were.
    """
    spaces = dict(spaces or {})
    for parameter in stage.parameters:
        if parameter.gradient in spaces:
            spaces[f"{MORE}{parameter.gradient}"] = spaces[parameter.gradient]
    forward, loss, backward, accumulation, squares, update = (
        None
        if graph is None
        else compilation(role, _without_aliases(graph), machine, spaces).program
        for role, graph in stage.in_order
    )
    assert forward is not None, "every stage has one"
    return Stage(
        forward, loss, backward, accumulation, squares, update,
        stage.parameters, stage.arriving, stage.returning,
    )  # fmt: skip


def _without_aliases(graph: ComputationGraph) -> ComputationGraph:
    return replace(
        graph,
        inputs=tuple(replace(slot, ownership=Ownership.BORROW) for slot in graph.inputs),
        outputs=tuple(replace(slot, aliases_input=None) for slot in graph.outputs),
        placement=tuple(option for option in graph.placement if option.field != "alias"),
    )
