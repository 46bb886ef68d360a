"""The programs of a training step: forward, loss, backward and update, each compiled separately.

Activations, gradients and weights stay on the device between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from stitch.argument_kinds import (
    NUMBER,
    TEXT,
    WHOLE,
    ArgumentKind,
    check_fields,
    member_of,
    optional,
)
from stitch.compiler import (
    Compilation,
    CompileOptions,
    CompileWarning,
    Differentiated,
    check_recompute,
    compile_graph,
    differentiate,
    optimize,
    write_graph,
)
from stitch.errors import CompileError, UsageError
from stitch.graph import (
    ComputationGraph,
    ComputationGraphBuilder,
    PlacementOption,
    Side,
)
from stitch.machine import Machine
from stitch.program import (
    DataType,
    InputKind,
    InputSlot,
    OutputSlot,
    Program,
    Role,
    Space,
    ValueType,
)
from stitch.training.graphs import (
    GRADIENT_NORM,
    KEPT_KINDS,
    LEARNING_RATE,
    MORE,
    STEP,
    Parameter,
    Trainable,
    accumulation_graph,
    graph_of,
    in_precision,
    update_graph,
)
from stitch.training.losses import Loss
from stitch.training.optimizers import Optimizer

# --------------------------------------------------------------------------------------------------
# Options

_TYPE = member_of(DataType, "a DataType or its name")
_SPACE = member_of(Space, "a Space or its name")
_SPACES = ArgumentKind(
    f"a mapping of names to each {_SPACE.text}",
    lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(n, str) and _SPACE.accepts(s) for n, s in value.items())
    ),
)


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a model is trained, beside its loss and optimizer.

    Attributes:
        recompute: What backward recomputes: `none`, `cheap` or `all`.
        accumulation_steps: Micro-batches per update; a mean loss divides by it.
        clip_grad_norm: Upper bound of the norm of all gradients.
        precision: Data type of the programs; with any but float32, weights have float32 masters.
        spaces: Memory spaces of tensors between programs, by name; the default is DRAM.

    Raises:
        UsageError: A value is out of range.

    >>> TrainingOptions(precision="bfloat16", spaces={"saved.relu": "l1"}).spaces["saved.relu"]
    <Space.L1: 'l1'>
    """

    recompute: str = "none"
    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    precision: DataType = DataType.FLOAT32
    spaces: Mapping[str, Space] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        check_fields(
            self, recompute=TEXT, accumulation_steps=WHOLE, clip_grad_norm=optional(NUMBER),
            precision=_TYPE, spaces=_SPACES,
        )  # fmt: skip
        object.__setattr__(self, "precision", DataType(self.precision))
        spaces = MappingProxyType({name: Space(space) for name, space in self.spaces.items()})
        object.__setattr__(self, "spaces", spaces)
        check_recompute(self.recompute)
        if self.accumulation_steps < 1:
            raise UsageError("accumulation_steps must be at least 1",
                             got=str(self.accumulation_steps))  # fmt: skip
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise UsageError("clip_grad_norm must be above 0", got=str(self.clip_grad_norm))
        if not self.precision.is_floating or self.precision.is_block or self.precision.is_narrow:
            raise UsageError("precision must be a floating type of 16 bits or more",
                             got=self.precision.value)  # fmt: skip


LABEL, LOSS = "label", "loss"
#: Prefix of activations that forward outputs for backward.
SAVED = "saved."
#: Names of tensors that the training adds.
RESERVED = (LABEL, LOSS, LEARNING_RATE, STEP, GRADIENT_NORM)


@dataclass(frozen=True, slots=True)
class TrainingGraphs:
    """The graphs of a training's programs, its parameters, and the names of saved activations."""

    forward: ComputationGraph
    loss: ComputationGraph
    backward: ComputationGraph
    update: ComputationGraph
    evaluation: ComputationGraph
    parameters: tuple[Parameter, ...]
    saved: tuple[str, ...]

    @property
    def in_order(self) -> tuple[tuple[Role, ComputationGraph], ...]:
        """The graphs in the order of a step, then the evaluation graph."""
        return (
            (Role.FORWARD, self.forward), (Role.LOSS, self.loss),
            (Role.BACKWARD, self.backward), (Role.UPDATE, self.update),
            (Role.FORWARD, self.evaluation),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainingPrograms:
    """The four programs of a step, and one for evaluation.

    `loss` reads prediction and label and gives the loss and the prediction's gradient.
    """

    forward: Program
    loss: Program
    backward: Program
    update: Program
    evaluation: Program
    parameters: tuple[Parameter, ...]
    warnings: tuple[CompileWarning, ...] = ()

    @staticmethod
    def of(programs: tuple[Program, ...]) -> TrainingPrograms:
        """Return the programs of a binary that `all` filled; raise `UsageError` for others."""
        roles = [*Role, Role.FORWARD]
        if [program.role for program in programs] != roles:
            raise UsageError(
                "the binary does not have the programs of a training",
                expected=", ".join(role.value for role in roles),
                got=", ".join(f"{p.name} ({p.role.value})" for p in programs),
            )
        forward, loss, backward, update, evaluation = programs
        parameters = tuple(
            Parameter(slot.name, forward.values[slot.value].type, f"{slot.name}.grad")
            for slot in forward.inputs
            if slot.kind is InputKind.PARAMETER
        )
        return TrainingPrograms(forward, loss, backward, update, evaluation, parameters)

    @property
    def in_order(self) -> tuple[Program, Program, Program, Program]:
        """The four programs in the order of a step."""
        return (self.forward, self.loss, self.backward, self.update)

    @property
    def all(self) -> tuple[Program, ...]:
        """The programs in the order of a binary: those of a step, then evaluation."""
        return (*self.in_order, self.evaluation)

    @property
    def buffers(self) -> tuple[str, ...]:
        """STATE inputs of forward; its outputs of the same names are their next values."""
        return tuple(s.name for s in self.forward.inputs if s.kind is InputKind.STATE)

    @property
    def changed_buffers(self) -> frozenset[str]:
        """The buffers for which forward has a next value."""
        return frozenset(self.buffers).intersection(s.name for s in self.forward.outputs)


def training_graphs(
    model: Trainable, loss: Loss, optimizer: Optimizer, options: TrainingOptions
) -> TrainingGraphs:
    """Return the graphs of a training.

    Raises `CompileError` with the name of every operator that has no gradient.
    """
    graph, evaluation = model.graph, model.evaluation
    if options.precision is not DataType.FLOAT32:
        graph = in_precision(graph, options.precision)
        evaluation = in_precision(evaluation, options.precision)
    prediction = prediction_of(graph)
    check_names(graph)
    wanted = [slot.name for slot in graph.inputs if slot.kind is InputKind.PARAMETER]
    differentiated = differentiate(graph, wanted, outputs=[prediction], recompute=options.recompute)
    types = {slot.name: graph.input_type(i) for i, slot in enumerate(graph.inputs)}
    parameters = tuple(
        Parameter(name, types[name], grad) for name, grad in differentiated.gradients
    )
    kinds = {slot.name: graph.output_type(i) for i, slot in enumerate(graph.outputs)}
    with_loss = loss_graph(loss, differentiated, kinds[prediction], options)
    update = update_graph(
        f"{graph.name}_update", parameters, optimizer, clip_grad_norm=options.clip_grad_norm
    )
    return TrainingGraphs(
        differentiated.forward, with_loss, differentiated.backward, update, evaluation,
        parameters, differentiated.saved,
    )  # fmt: skip


def check_names(graph: ComputationGraph) -> None:
    """Raise `CompileError` for inputs and outputs with names that a training uses."""
    names = {slot.name for slot in graph.inputs} | {slot.name for slot in graph.outputs}
    reserved = names.intersection(RESERVED)
    if reserved:
        raise CompileError(
            f"graph {graph.name!r} uses names that are reserved for training",
            got=", ".join(sorted(reserved)),
            remedy="rename these inputs and outputs",
        )


def prediction_of(graph: ComputationGraph) -> str:
    """Return the output that a loss reads: the first floating output that is no next state."""
    state = {slot.name for slot in graph.inputs if slot.kind is InputKind.STATE}
    for i, slot in enumerate(graph.outputs):
        if slot.name not in state and graph.output_type(i).data_type.is_floating:
            return slot.name
    raise CompileError(f"graph {graph.name!r} has no floating output, which a loss needs")


def loss_graph(
    loss: Loss, differentiated: Differentiated, pred: ValueType, options: TrainingOptions
) -> ComputationGraph:
    """Return the graph of the loss and of the prediction's gradient."""
    ((output, seed),) = differentiated.seeds
    judged = differentiate(loss.graph(pred, output), [output], outputs=[LOSS])
    b = ComputationGraphBuilder(f"{differentiated.forward.name}_loss")
    inputs = {
        slot.name: b.input(slot.name, kind.shape, kind.data_type)
        for i, slot in enumerate(judged.forward.inputs)
        for kind in (judged.forward.input_type(i),)
    }
    results = write_graph(b, judged.forward, inputs)
    share = 1.0 / options.accumulation_steps if loss.reduction == "mean" else 1.0
    ((_, back),) = judged.seeds
    tensors = {**inputs, **results, back: b.constant(DataType.FLOAT32.dtype.type(share))}
    names = [slot.name for slot in judged.backward.inputs]
    gradients = write_graph(b, judged.backward, {name: tensors[name] for name in names})
    b.output(LOSS, results[LOSS])
    b.output(seed, gradients[f"{output}.grad"])
    # Fold constants before the search estimates costs: the scale of the seed is one.
    return optimize(b.build())


def compile_training(
    graphs: TrainingGraphs, machine: Machine, spaces: Mapping[str, Space] | None = None,
    executor: str | None = None,
) -> TrainingPrograms:  # fmt: skip
    """Compile the programs of a training; slots of one name are in one memory space.

    Args:
        spaces: Memory spaces by slot name; the default is `home_space(machine)`.
        executor: The executor whose rates decide loop schedules.
    """
    compilations = [
        compilation(role, graph, machine, spaces or {}, executor)
        for role, graph in graphs.in_order
    ]  # fmt: skip
    forward, loss, backward, update, evaluation = (each.program for each in compilations)
    warnings = tuple([warning for each in compilations for warning in each.warnings])
    return TrainingPrograms(
        forward, loss, backward, update, evaluation, graphs.parameters, warnings
    )


def compilation(
    role: Role, graph: ComputationGraph, machine: Machine, spaces: Mapping[str, Space],
    executor: str | None = None,
) -> Compilation:  # fmt: skip
    placement = tuple(slot_places(graph, machine, spaces))
    return compile_graph(
        graph, machine, CompileOptions(placement=placement, role=role, executor=executor)
    )


def compile_step(
    model: Trainable, before: TrainingPrograms, loss: Loss, optimizer: Optimizer,
    options: TrainingOptions, machine: Machine, executor: str | None = None,
) -> tuple[Program, Program, Program]:  # fmt: skip
    """Compile forward, loss and backward for batches of another size, with the same placement.

    Raises `UsageError` if the model has other parameters or states at that size.
    """
    graphs = training_graphs(model, loss, optimizer, options)
    had, has = _inputs_of(graph_of(before.forward)), _inputs_of(graphs.forward)
    if had != has:
        differ = sorted(name for name in had.keys() | has.keys() if had.get(name) != has.get(name))
        raise UsageError(
            "the model has other inputs, parameters or states at this batch size: "
            + ", ".join(differ[:4])
        )
    spaces = _spaces_of(before)
    programs = [
        compilation(role, graph, machine, spaces, executor).program
        for role, graph in graphs.in_order[:3]
    ]  # fmt: skip
    return programs[0], programs[1], programs[2]


def _inputs_of(graph: ComputationGraph) -> dict[str, ValueType | None]:
    """Return a model's inputs by name, with the types of those that persist, None for a batch."""
    return {
        slot.name: graph.input_type(i) if slot.kind in KEPT_KINDS else None
        for i, slot in enumerate(graph.inputs) if slot.kind is not InputKind.KEY
    }  # fmt: skip


def compile_evaluation(
    graph: ComputationGraph, before: TrainingPrograms, options: TrainingOptions, machine: Machine,
    executor: str | None = None,
) -> Program:  # fmt: skip
    """Compile the evaluation program for batches of another size, with the same placement."""
    if options.precision is not DataType.FLOAT32:
        graph = in_precision(graph, options.precision)
    return compilation(Role.FORWARD, graph, machine, _spaces_of(before), executor).program


def _spaces_of(programs: TrainingPrograms) -> dict[str, Space]:
    """Return the memory space of each slot, by name."""
    spaces: dict[str, Space] = {}
    for program in programs.all:
        named = [(slot.name, slot.value) for slot in program.inputs]
        named += [(slot.name, slot.value) for slot in program.outputs]
        spaces |= {name: program.values[value].desc.layout.space for name, value in named}
    return spaces


def graphs_of(programs: TrainingPrograms) -> TrainingGraphs:
    """Return the graphs of compiled programs."""
    forward, loss, backward, update = map(graph_of, programs.in_order)
    saved = tuple(
        slot.name for slot in programs.backward.inputs
        if slot.kind is InputKind.SAVED and slot.name.startswith(SAVED)
    )  # fmt: skip
    return TrainingGraphs(
        forward, loss, backward, update, graph_of(programs.evaluation), programs.parameters, saved
    )


def compile_accumulation(programs: TrainingPrograms, machine: Machine) -> Program:
    """Compile the program that adds the gradients of another micro-batch to the sums."""
    graph = accumulation_graph(f"{programs.backward.name}_sum", programs.parameters)
    spaces = _spaces_of(programs)
    # Backward writes to both the sums and the gradients of another micro-batch.
    spaces |= {f"{MORE}{p.gradient}": spaces[p.gradient] for p in programs.parameters}
    return compilation(Role.BACKWARD, graph, machine, spaces).program


def compile_update(
    programs: TrainingPrograms, optimizer: Optimizer, options: TrainingOptions, machine: Machine
) -> Program:
    """Compile the update program for changed optimizer settings, with the same placement."""
    name, parameters = programs.update.name, programs.parameters
    graph = update_graph(name, parameters, optimizer, clip_grad_norm=options.clip_grad_norm)
    return compilation(Role.UPDATE, graph, machine, _spaces_of(programs)).program


def home_space(machine: Machine) -> Space:
    """Return the default memory space of tensors between programs."""
    return Space.HOST if machine.shape.dram is None else Space.DRAM


def slot_places(
    graph: ComputationGraph, machine: Machine, spaces: Mapping[str, Space]
) -> list[PlacementOption]:
    """Return placement options for the spaces of all slots for which the graph has none."""
    asked = {(w.side, graph.slot_index(w)) for w in graph.placement if w.field != "alias"}
    home = home_space(machine)
    sides: tuple[tuple[Side, Sequence[InputSlot | OutputSlot]], ...] = (
        ("input", graph.inputs), ("output", graph.outputs),
    )  # fmt: skip
    return [
        PlacementOption(side, i, "space", spaces.get(slot.name, home))
        for side, slots in sides
        for i, slot in enumerate(slots)
        if (side, i) not in asked
    ]
