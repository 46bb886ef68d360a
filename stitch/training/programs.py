"""The programs of training: forward, loss, backward and update, each compiled on its own.

So saved activations, gradients and weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any

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
    Recomputation,
    compile_graph,
    differentiate,
    optimize,
)
from stitch.errors import CompileError, UsageError
from stitch.graph import (
    ComputationGraph,
    ComputationGraphBuilder,
    JsonObject,
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
    splice,
    update_graph,
)
from stitch.training.losses import Loss
from stitch.training.optimizers import Optimizer

# --------------------------------------------------------------------------------------------------
# Options

_TYPE = member_of(DataType, "a DataType or its word")
_SPACE = member_of(Space, "a Space or its word")
_SPACES = ArgumentKind(
    f"a mapping of names to each {_SPACE.text}",
    lambda value: (
        isinstance(value, Mapping)
        and all(isinstance(n, str) and _SPACE.accepts(s) for n, s in value.items())
    ),
)


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a model is trained, apart from its loss and its optimizer.

    `recompute`: what backward computes again (`none`, `cheap`, `all`; `every 8`: rounds of scans,
    from the states before every 8th). `accumulation_steps`: micro-batches whose gradients one
    update takes; a mean loss counts each by its share.
    `clip_grad_norm`: the most that the norm of all gradients may be. `precision`: the type that
    programs compute in; other than float32, weights have float32 masters. `spaces`: where tensors
    between the programs lie, by name, if not in DRAM. Types and spaces may be given by their words.
    Raises `UsageError`.

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
        Recomputation.parse(self.recompute)
        if self.accumulation_steps < 1:
            raise UsageError("an update takes at least one micro-batch",
                             got=f"accumulation_steps={self.accumulation_steps}")  # fmt: skip
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise UsageError("gradients are clipped to a norm above 0",
                             got=f"clip_grad_norm={self.clip_grad_norm}")  # fmt: skip
        if not self.precision.is_floating or self.precision.is_block or self.precision.is_narrow:
            raise UsageError("programs compute in a floating type", got=self.precision.value)


#: The words of the options, as a file has them.
OPTION_WORDS = tuple(field.name for field in fields(TrainingOptions))


def training_config(loss: Loss, optimizer: Optimizer, options: TrainingOptions) -> dict[str, Any]:
    """How a model is trained, as plain data; `options_from_record` reads the options back."""
    return {
        "loss": loss.config(),
        "optimizer": optimizer.config(),
        "recompute": options.recompute,
        "accumulation_steps": options.accumulation_steps,
        "clip_grad_norm": options.clip_grad_norm,
        "precision": options.precision.value,
        "spaces": {name: space.value for name, space in options.spaces.items()},
    }


def options_from_record(record: JsonObject) -> TrainingOptions | None:
    """The options in what `training_config` gave; None where a defect was noted."""
    given: dict[str, Any] = {}

    def option(word: str, value: Any) -> TrainingOptions:
        return TrainingOptions(**{word: value})

    for word in OPTION_WORDS:
        # One at a time, so that what is wrong is said of its own key.
        if record.made(word, partial(option, word)) is not None:
            given[word] = record.get(word)
    return TrainingOptions(**given) if len(given) == len(OPTION_WORDS) else None


LABEL, LOSS = "label", "loss"
#: Before the name of a value that forward hands out for backward alone.
SAVED = "saved."
#: Names that training itself gives to tensors.
RESERVED = (LABEL, LOSS, LEARNING_RATE, STEP, GRADIENT_NORM)


@dataclass(frozen=True, slots=True)
class TrainingGraphs:
    """The graphs of the four programs, and what belongs together in them."""

    forward: ComputationGraph
    loss: ComputationGraph
    backward: ComputationGraph
    update: ComputationGraph
    evaluation: ComputationGraph
    parameters: tuple[Parameter, ...]
    saved: tuple[str, ...]

    @property
    def in_order(self) -> tuple[tuple[Role, ComputationGraph], ...]:
        """The graphs in the order in which a step runs them; then that for evaluation."""
        return (
            (Role.FORWARD, self.forward), (Role.LOSS, self.loss),
            (Role.BACKWARD, self.backward), (Role.UPDATE, self.update),
            (Role.FORWARD, self.evaluation),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainingPrograms:
    """The four programs, in the order in which a step runs them, and one for evaluation.

    `loss` takes the prediction and the label and gives the loss and the prediction's gradient.
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
        """The programs of a binary that `in_order` filled; raises `UsageError` for others."""
        roles = [*Role, Role.FORWARD]
        if [program.role for program in programs] != roles:
            raise UsageError(
                "these are not the programs of a training",
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
        """The four programs of a step."""
        return (self.forward, self.loss, self.backward, self.update)

    @property
    def all(self) -> tuple[Program, ...]:
        """The programs as a binary holds them: in order, and the one for evaluation."""
        return (*self.in_order, self.evaluation)

    @property
    def prediction(self) -> str:
        """The name of the output that the loss judges."""
        return self.loss.inputs[0].name

    @property
    def prediction_type(self) -> ValueType:
        """Its shape and type."""
        return self.loss.values[self.loss.inputs[0].value].type

    @property
    def buffers(self) -> tuple[str, ...]:
        """STATE inputs of forward, whose next values are its outputs of the same names."""
        return tuple(s.name for s in self.forward.inputs if s.kind is InputKind.STATE)

    @property
    def changed_buffers(self) -> frozenset[str]:
        """Those of them that forward gives anew."""
        return frozenset(self.buffers).intersection(s.name for s in self.forward.outputs)


def training_graphs(
    model: Trainable, loss: Loss, optimizer: Optimizer, options: TrainingOptions
) -> TrainingGraphs:
    """The graphs of forward, loss, backward and update.

    Raises `CompileError` naming every operator on the way that has no gradient.
    """
    graph, evaluation = model.graph, model.evaluation
    if options.precision is not DataType.FLOAT32:
        graph = in_precision(graph, options.precision)
        evaluation = in_precision(evaluation, options.precision)
    prediction = prediction_of(graph)
    names = {slot.name for slot in graph.inputs} | {slot.name for slot in graph.outputs}
    reserved = names.intersection(RESERVED)
    if reserved:
        raise CompileError(
            f"graph {graph.name!r} uses names that training gives itself",
            got=", ".join(sorted(reserved)),
            remedy="rename these inputs and outputs",
        )
    wanted = [slot.name for slot in graph.inputs if slot.kind is InputKind.PARAMETER]
    differentiated = differentiate(graph, wanted, outputs=[prediction], recompute=options.recompute)
    types = {slot.name: graph.input_type(i) for i, slot in enumerate(graph.inputs)}
    parameters = tuple(
        Parameter(name, types[name], grad) for name, grad in differentiated.gradients
    )
    kinds = {slot.name: graph.output_type(i) for i, slot in enumerate(graph.outputs)}
    judged = loss_graph(loss, differentiated, kinds[prediction], options)
    update = update_graph(
        f"{graph.name}_update", parameters, optimizer, clip_grad_norm=options.clip_grad_norm
    )
    return TrainingGraphs(
        differentiated.forward, judged, differentiated.backward, update, evaluation, parameters,
        differentiated.saved,
    )  # fmt: skip


def prediction_of(graph: ComputationGraph) -> str:
    """The output that a loss judges: the first floating one that is no state's next value."""
    state = {slot.name for slot in graph.inputs if slot.kind is InputKind.STATE}
    for i, slot in enumerate(graph.outputs):
        if slot.name not in state and graph.output_type(i).data_type.is_floating:
            return slot.name
    raise CompileError(f"graph {graph.name!r} has no floating output for a loss to judge")


def loss_graph(
    loss: Loss, differentiated: Differentiated, pred: ValueType, options: TrainingOptions
) -> ComputationGraph:
    """The loss and, from its own backward graph, the gradient of the prediction: one graph."""
    ((output, seed),) = differentiated.seeds
    judged = differentiate(loss.graph(pred, output), [output], outputs=[LOSS])
    b = ComputationGraphBuilder(f"{differentiated.forward.name}_loss")
    given = {
        slot.name: b.input(slot.name, kind.shape, kind.data_type)
        for i, slot in enumerate(judged.forward.inputs)
        for kind in (judged.forward.input_type(i),)
    }
    results = splice(b, judged.forward, given)
    share = 1.0 / options.accumulation_steps if loss.reduction == "mean" else 1.0
    ((_, back),) = judged.seeds
    known = {**given, **results, back: b.constant(DataType.FLOAT32.dtype.type(share))}
    wanted = [slot.name for slot in judged.backward.inputs]
    gradients = splice(b, judged.backward, {name: known[name] for name in wanted})
    b.output(LOSS, results[LOSS])
    b.output(seed, gradients[f"{output}.grad"])
    # As it will be compiled, so that it is priced so: what the seed is scaled by is a constant.
    return optimize(b.build())


def compile_training(
    graphs: TrainingGraphs, machine: Machine, spaces: Mapping[str, Space] | None = None,
    executor: str | None = None,
) -> TrainingPrograms:  # fmt: skip
    """The four programs on a machine; slots of one name lie in one space.

    `spaces` says which tensors lie elsewhere than in DRAM, `executor` by whose rates loops are
    scheduled. Raises what compiling a graph raises.
    """
    made = [
        _compilation(role, graph, machine, spaces or {}, executor)
        for role, graph in graphs.in_order
    ]  # fmt: skip
    forward, loss, backward, update, evaluation = (each.program for each in made)
    warnings = tuple([warning for each in made for warning in each.warnings])
    return TrainingPrograms(
        forward, loss, backward, update, evaluation, graphs.parameters, warnings
    )


def _compilation(
    role: Role, graph: ComputationGraph, machine: Machine, spaces: Mapping[str, Space],
    executor: str | None,
) -> Compilation:  # fmt: skip
    placement = tuple(slot_places(graph, machine, spaces))
    return compile_graph(
        graph, machine, CompileOptions(placement=placement, role=role, executor=executor)
    )


def compile_step(
    model: Trainable, before: TrainingPrograms, loss: Loss, optimizer: Optimizer,
    options: TrainingOptions, machine: Machine, executor: str | None = None,
) -> tuple[Program, Program, Program]:  # fmt: skip
    """Forward, loss and backward of the same model for batches of another size, its slots where
    those of the programs are that there are.

    Raises `UsageError` where it has other parameters or states at that size.
    """
    graphs = training_graphs(model, loss, optimizer, options)
    had, has = _inputs_of(graph_of(before.forward)), _inputs_of(graphs.forward)
    if had != has:
        differ = sorted(name for name in had.keys() | has.keys() if had.get(name) != has.get(name))
        raise UsageError(
            "the model has other inputs, parameters or states there: " + ", ".join(differ[:4])
        )
    spaces = _spaces_of(before)
    made = [
        _compilation(role, graph, machine, spaces, executor).program
        for role, graph in graphs.in_order[:3]
    ]  # fmt: skip
    return made[0], made[1], made[2]


def _inputs_of(graph: ComputationGraph) -> dict[str, ValueType | None]:
    """A model's inputs by name: of what a training keeps the types, None of a batch."""
    return {
        slot.name: graph.input_type(i) if slot.kind in KEPT_KINDS else None
        for i, slot in enumerate(graph.inputs) if slot.kind is not InputKind.KEY
    }  # fmt: skip


def compile_evaluation(
    graph: ComputationGraph, before: TrainingPrograms, options: TrainingOptions, machine: Machine,
    executor: str | None = None,
) -> Program:  # fmt: skip
    """The program for evaluation of batches of another size, its slots where they are now."""
    if options.precision is not DataType.FLOAT32:
        graph = in_precision(graph, options.precision)
    return _compilation(Role.FORWARD, graph, machine, _spaces_of(before), executor).program


def _spaces_of(programs: TrainingPrograms) -> dict[str, Space]:
    """Where the slots of programs are, by name."""
    spaces: dict[str, Space] = {}
    for program in programs.all:
        named = [(slot.name, slot.value) for slot in program.inputs]
        named += [(slot.name, slot.value) for slot in program.outputs]
        spaces |= {name: program.values[value].desc.layout.space for name, value in named}
    return spaces


def graphs_of(programs: TrainingPrograms) -> TrainingGraphs:
    """The graphs that programs were before they were placed."""
    forward, loss, backward, update = map(graph_of, programs.in_order)
    saved = tuple(
        slot.name for slot in programs.backward.inputs
        if slot.kind is InputKind.SAVED and slot.name.startswith(SAVED)
    )  # fmt: skip
    return TrainingGraphs(
        forward, loss, backward, update, graph_of(programs.evaluation), programs.parameters, saved
    )


def compile_accumulation(programs: TrainingPrograms, machine: Machine) -> Program:
    """The program that adds another micro-batch's gradients to those so far."""
    graph = accumulation_graph(f"{programs.backward.name}_sum", programs.parameters)
    spaces = {
        slot.name: programs.backward.output_desc(i).layout.space
        for i, slot in enumerate(programs.backward.outputs)
    }
    # Backward writes into either.
    spaces |= {f"{MORE}{name}": space for name, space in spaces.items()}
    placement = tuple(slot_places(graph, machine, spaces))
    options = CompileOptions(placement=placement, role=Role.BACKWARD)
    return compile_graph(graph, machine, options).program


def compile_update(
    programs: TrainingPrograms, optimizer: Optimizer, options: TrainingOptions, machine: Machine
) -> Program:
    """The update program by an optimizer's settings as they are now, its slots where they were."""
    before = programs.update
    graph = update_graph(
        before.name, programs.parameters, optimizer, clip_grad_norm=options.clip_grad_norm
    )
    spaces = {slot.name: before.input_desc(i).layout.space for i, slot in enumerate(before.inputs)}
    placement = tuple(slot_places(graph, machine, spaces))
    return compile_graph(
        graph, machine, CompileOptions(placement=placement, role=Role.UPDATE)
    ).program


def home_space(machine: Machine) -> Space:
    """Where tensors between programs lie unless a placement option says otherwise."""
    return Space.HOST if machine.shape.dram is None else Space.DRAM


def slot_places(
    graph: ComputationGraph, machine: Machine, spaces: Mapping[str, Space]
) -> list[PlacementOption]:
    """Placement options for the spaces of all slots that the graph says nothing of: by name, else
    at home.
    """
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
