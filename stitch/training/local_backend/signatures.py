"""Task signatures and bindings, and the graphs of a model's layers.

A signature lists the slots of a task; a binding names the tensor of each slot. `LayerGraph` is a
model's graph with a name for each value; functions here cut single operators, their gradient rules
and gradient sums out of it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, UnionType
from typing import Any, TypeAlias, TypeVar

from stitch.argument_kinds import MAPPING, WORDS, takes
from stitch.compiler import (
    Differentiated,
    add_output_identities,
    differentiate,
    optimize,
    write_graph,
)
from stitch.errors import CompileError, StitchError, UsageError, unknown
from stitch.graph import ComputationGraph, ComputationGraphBuilder, PlacementOption
from stitch.linker import drop_unused_values
from stitch.program import (
    ABSENT,
    Constant,
    FreeNames,
    InputKind,
    InputSlot,
    OutputSlot,
    Ownership,
    Value,
    ValueType,
)
from stitch.tasks import Permission
from stitch.training.graphs import LEARNING_RATE, Parameter

_T = TypeVar("_T")


def named(
    name: str, entries: Mapping[str, _T], what: str, error: type[StitchError] = UsageError
) -> _T:
    """Return an entry; raise an error that lists the names if there is none."""
    if name not in entries:
        raise unknown(what, name, entries, error)
    return entries[name]


# --------------------------------------------------------------------------------------------------
# Signatures


class SlotKind(enum.Enum):
    """The role of a tensor in a task. `UNTRAINABLE`: an input without a gradient."""

    INPUT = "input"
    OPTIONAL = "optional"
    UNTRAINABLE = "untrainable"
    OUTPUT = "output"
    WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A slot for one tensor, or for any number of tensors if `variadic`.

    `gradient` is the task's permission on the gradient of the bound tensor.
    """

    name: str
    kind: SlotKind
    permission: Permission
    gradient: Permission = Permission.NONE
    variadic: bool = False


@dataclass(frozen=True, slots=True)
class TaskSignature:
    """The slots of a task: tensors, arguments by name and type, and its return type.

    `returns` is None for a task that returns nothing. Raises `UsageError` for two slots of one
    name.
    """

    tensors: tuple[TensorSlot, ...] = ()
    arguments: Mapping[str, type | UnionType] = field(default_factory=dict)
    returns: type | UnionType | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", MappingProxyType(dict(self.arguments)))
        counts = Counter([*(slot.name for slot in self.tensors), *self.arguments])
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise UsageError(f"a task signature has two slots {twice[0]!r}",
                             expected="unique slot names")  # fmt: skip

    def tensor(self, name: str) -> TensorSlot:
        """Return the tensor slot `name`; raise `UsageError` if there is none."""
        slots = {slot.name: slot for slot in self.tensors}
        return named(name, slots, f"the task has no tensor slot {name!r}")

    def argument(self, name: str) -> type | UnionType:
        """Return the type of an argument slot; raise `UsageError` if there is none."""
        return named(name, self.arguments, f"the task has no argument slot {name!r}")


@takes(
    inputs=WORDS, optional=WORDS, untrainable=WORDS, weights=WORDS, outputs=WORDS, variadic=WORDS,
    arguments=MAPPING,
)  # fmt: skip
def task_signature(
    *,
    inputs: Iterable[str] = (),
    optional: Iterable[str] = (),
    untrainable: Iterable[str] = (),
    weights: Iterable[str] = (),
    outputs: Iterable[str] = (),
    variadic: Iterable[str] = (),
    arguments: Mapping[str, Any] = MappingProxyType({}),
    returns: type | UnionType | None = None,
) -> TaskSignature:
    """Return the signature of a forward task, which writes its outputs and reads all other slots.

    Args:
        variadic: Names among the slots that take any number of tensors.

    Raises:
        UsageError: Two slots have one name, or `variadic` names no slot.

    >>> task_signature(inputs=["x"], outputs=["y"]).tensor("y").permission
    <Permission.WRITE_ONLY: 'write_only'>
    """
    kinds = (
        (SlotKind.INPUT, inputs), (SlotKind.OPTIONAL, optional),
        (SlotKind.UNTRAINABLE, untrainable), (SlotKind.WEIGHT, weights),
        (SlotKind.OUTPUT, outputs),
    )  # fmt: skip
    many = set(variadic)
    slots = [
        TensorSlot(
            name, kind,
            Permission.WRITE_ONLY if kind is SlotKind.OUTPUT else Permission.READ_ONLY,
            variadic=name in many,
        )
        for kind, names in kinds for name in names
    ]  # fmt: skip
    signature = TaskSignature(tuple(slots), arguments, returns)
    for name in sorted(many):
        signature.tensor(name)
    return signature


def backward_signature(forward: TaskSignature) -> TaskSignature:
    """Return the signature of the backward task: the same slots, read only, with gradient slots.

    Gradients of outputs are read. Gradients of inputs and weights are read and written, because
    several tasks add to them. Untrainable inputs have none.

    >>> forward = task_signature(inputs=["x"], outputs=["y"])
    >>> backward_signature(forward).tensor("x").gradient
    <Permission.READ_WRITE: 'read_write'>
    """
    of = {SlotKind.OUTPUT: Permission.READ_ONLY, SlotKind.UNTRAINABLE: Permission.NONE}
    return replace(
        forward,
        tensors=tuple([
            replace(
                slot, permission=Permission.READ_ONLY,
                gradient=of.get(slot.kind, Permission.READ_WRITE),
            )
            for slot in forward.tensors
        ]),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Bindings

#: The name of a tensor; several for a variadic slot.
Bound: TypeAlias = "str | tuple[str, ...]"


class RuntimeArgument(enum.Enum):
    """An argument by reference: the backend supplies its value when the task runs."""

    #: The device that the task runs on.
    DEVICE_STATE = "device state"
    #: Number of updates so far.
    ITERATION = "iteration"
    #: Whether tasks are timed.
    PROFILING = "profiling"
    #: The optimizer's learning rate in this iteration.
    LEARNING_RATE = "learning rate"


@dataclass(frozen=True, slots=True)
class TaskBinding:
    """The tensor that each slot stands for, by name; gradients are bound separately.

    `arguments` are values, or `RuntimeArgument`s.

    >>> TaskBinding({"x": "image", "y": "logits"}).tensors["y"]
    'logits'
    """

    tensors: Mapping[str, Bound] = field(default_factory=dict)
    gradients: Mapping[str, Bound] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for side in ("tensors", "gradients", "arguments"):
            object.__setattr__(self, side, MappingProxyType(dict(getattr(self, side))))

    def names(self) -> Iterator[str]:
        """Yield the names of all bound tensors and gradients."""
        for bound in (*self.tensors.values(), *self.gradients.values()):
            yield from names_of(bound)


@dataclass(frozen=True, slots=True)
class TaskInvocation:
    """A task, by its id, with a binding of its slots."""

    task_id: str
    binding: TaskBinding


def check_binding(signature: TaskSignature, invocation: TaskInvocation) -> None:
    """Raise one `UsageError` that lists every unbound or wrongly bound slot."""
    problems = [*_problems(signature, invocation.binding)]
    if problems:
        raise UsageError(
            f"the binding of task {invocation.task_id!r} does not match its signature: "
            + "; ".join(problems)
        )


def _problems(signature: TaskSignature, binding: TaskBinding) -> Iterator[str]:
    slots = {slot.name: slot for slot in signature.tensors}
    for slot in signature.tensors:
        if slot.name not in binding.tensors and slot.kind is not SlotKind.OPTIONAL:
            yield f"{slot.kind.value} slot {slot.name!r} is not bound"
    sides = (("tensor", binding.tensors), ("gradient", binding.gradients))
    for word, bound in sides:
        for name, value in bound.items():
            slot_of_name = slots.get(name)
            if slot_of_name is None or (
                word == "gradient" and slot_of_name.gradient is Permission.NONE
            ):
                yield f"there is no {word} slot {name!r}"
            elif slot_of_name.variadic is isinstance(value, str):
                expected = "a tuple of names" if slot_of_name.variadic else "one name"
                yield f"{word} slot {name!r} takes {expected}, not {value!r}"
    for name, kind in signature.arguments.items():
        given = binding.arguments.get(name)
        if name not in binding.arguments:
            yield f"argument {name!r} is not bound"
        elif not isinstance(given, RuntimeArgument | kind):
            yield f"argument {name!r} is {type(given).__name__}, expected {_type_name(kind)}"
    for name in binding.arguments.keys() - signature.arguments.keys():
        yield f"there is no argument slot {name!r}"


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def names_of(bound: Bound) -> tuple[str, ...]:
    return (bound,) if isinstance(bound, str) else bound


def gradient_name(tensor: str) -> str:
    """Return the name of a tensor's gradient.

    >>> gradient_name("fc.weight")
    'fc.weight.grad'
    """
    return f"{tensor}.grad"


def backward_binding(
    forward: TaskBinding, backward: TaskSignature, flowing: Container[str] | None = None
) -> TaskBinding:
    """Return the binding of a backward task: the forward binding, with the gradients of its
    tensors.

    Args:
        backward: The signature of the backward task.
        flowing: Tensors that have a gradient (default: all with a gradient slot).
    """
    gradients: dict[str, Bound] = {}
    for slot in backward.tensors:
        bound = forward.tensors.get(slot.name)
        if bound is None or slot.gradient is Permission.NONE:
            continue
        names = names_of(bound)
        if flowing is None or all(name in flowing for name in names):
            of = tuple(map(gradient_name, names))
            gradients[slot.name] = of[0] if isinstance(bound, str) else of
    return TaskBinding(forward.tensors, gradients, forward.arguments)


def tensor_of(binding: TaskBinding, slot: str) -> str:
    """Return the tensor of a program's slot, which has the name of a tensor slot or of its
    gradient."""
    bound = binding.tensors.get(slot) or binding.gradients[slot.removesuffix(gradient_name(""))]
    assert isinstance(bound, str), "programs have a slot for each tensor"
    return bound


@dataclass(frozen=True, slots=True)
class LayerTask:
    """A task of one layer.

    Attributes:
        layer: Name of the layer's first result.
        op: ONNX name of the operator.
        location: Line of the user's source, or "".
        invocation: The task and its binding.
    """

    layer: str
    op: str
    location: str
    invocation: TaskInvocation


# --------------------------------------------------------------------------------------------------
# Layers of a graph


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """A graph whose operations are the layers of a model.

    Attributes:
        names: Tensor name of each value, by value number.
        differentiable: Values that depend on an input in `wanted`.
        wanted: Inputs whose gradients are computed.
        seeds: Outputs whose gradients are inputs of the backward pass.
        next_states: For each STATE input, the tensor of its next value.
    """

    graph: ComputationGraph
    names: tuple[str, ...]
    differentiable: frozenset[int]
    wanted: tuple[str, ...]
    seeds: tuple[str, ...]
    next_states: Mapping[str, str]
    differentiated: Differentiated | None

    @property
    def kinds(self) -> dict[int, InputKind]:
        return {slot.value: slot.kind for slot in self.graph.inputs}

    def layer_name(self, index: int) -> str:
        """Return the name of the first result of operation `index`."""
        return self.names[next(v for v in self.graph.operations[index].outputs if v != ABSENT)]


def layer_graph(
    graph: ComputationGraph, wanted: Sequence[str], outputs: Sequence[str]
) -> LayerGraph:
    """Return the layers of a graph; without `wanted` inputs there are no gradients.

    Raises:
        CompileError: An operator has no gradient, or two tensors have one name.
    """
    differentiated = differentiate(graph, wanted, outputs=outputs) if wanted else None
    states = {slot.name for slot in graph.inputs if slot.kind is InputKind.STATE}
    seeds: tuple[str, ...] = ()
    outputs_by_name = {slot.name for slot in graph.outputs}
    if differentiated is None:
        whole = optimize(graph)
    else:
        seeds = tuple([name for name, _ in differentiated.seeds])
        # Drop the outputs that gradient rules need: layers pass all their tensors anyway.
        saving = differentiated.forward
        whole = replace(
            saving, outputs=tuple([s for s in saving.outputs if s.name in outputs_by_name])
        )
    whole = _with_outputs_apart(whole)
    names, after = _names(whole, states)
    return LayerGraph(
        whole, names, _differentiable(whole, wanted), tuple(wanted), seeds, after, differentiated
    )


def _with_outputs_apart(graph: ComputationGraph) -> ComputationGraph:
    """Insert `Identity` for outputs that are inputs, or that an operation reads.

    The gradient of such an output then has no other source. The `Identity` of the first output
    comes last, so that the backward pass adds its gradient first.
    """
    apart = add_output_identities(graph, rounded=range(len(graph.outputs)))
    count = len(graph.operations)
    own, copies = apart.operations[:count], apart.operations[count:]
    return replace(apart, operations=(*own, *reversed(copies)))


def _names(
    graph: ComputationGraph, states: Collection[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return a unique name for each value, and the name of each state's next value."""
    names = {slot.value: slot.name for slot in graph.inputs}
    after = {}
    for slot in graph.outputs:
        names[slot.value] = slot.name
        if slot.name in states:
            names[slot.value] = after[slot.name] = f"{slot.name}.next"
    free = FreeNames(names.values())
    for v, value in enumerate(graph.values):
        if v in names:
            continue
        names[v] = free.free(value.name)
    counts = Counter(names.values())
    gradients = set(map(gradient_name, counts))
    name = next((n for n, count in counts.items() if count > 1 or n in gradients), None)
    if name is not None:
        raise CompileError(
            f"two tensors of graph {graph.name!r} would have the name {name!r}",
            remedy="rename the input or output of this name",
        )
    return tuple([names[v] for v in range(len(graph.values))]), after


def _differentiable(graph: ComputationGraph, wanted: Collection[str]) -> frozenset[int]:
    """Return the floating values that depend on a wanted input."""
    reached = {slot.value for slot in graph.inputs if slot.name in wanted}
    for operation in graph.operations:
        if not reached.isdisjoint(operation.inputs):
            reached.update(
                v for v in operation.outputs
                if v != ABSENT and graph.values[v].type.data_type.is_floating
            )  # fmt: skip
    return frozenset(reached)


# --------------------------------------------------------------------------------------------------
# Graphs of tasks: an operator alone, its gradient rule, and sums of gradients


def input_slot(position: int) -> str:
    return f"input{position}"


def output_slot(position: int) -> str:
    return f"output{position}"


def operator_graph(
    graph: ComputationGraph, index: int, kinds: Mapping[int, InputKind]
) -> ComputationGraph:
    """Return one operation as a graph with a slot for each operand that is not a constant.

    Args:
        kinds: `InputKind` of the values that are inputs of `graph`.
    """
    operation, data = graph.operations[index], graph.constant_data()
    values: list[Value] = []
    inputs, outputs, constants, operands, results = [], [], [], [], []
    for i, v in enumerate(operation.inputs):
        operands.append(ABSENT if v == ABSENT else len(values))
        if v == ABSENT:
            continue
        if v in data:
            constants.append(Constant(len(values), data[v]))
        else:
            kind = kinds.get(v, InputKind.ACTIVATION)
            inputs.append(InputSlot(input_slot(i), len(values), kind))
        values.append(Value(input_slot(i), graph.values[v].type))
    for i, v in enumerate(operation.outputs):
        results.append(ABSENT if v == ABSENT else len(values))
        if v != ABSENT:
            outputs.append(OutputSlot(output_slot(i), len(values)))
            values.append(Value(output_slot(i), graph.values[v].type))
    alone = replace(operation, inputs=tuple(operands), outputs=tuple(results))
    return drop_unused_values(ComputationGraph(
        operation.op, tuple(inputs), tuple(outputs), tuple(values), (alone,), tuple(constants),
        bodies=graph.bodies,
    ))  # fmt: skip


def gradient_graph(
    operator: ComputationGraph, wanted: Sequence[int], seeds: Sequence[int]
) -> tuple[ComputationGraph, tuple[int, ...]]:
    """Return the gradient rule of an operator, and the operands that have a gradient.

    Args:
        wanted: Positions of operands whose gradients are computed.
        seeds: Positions of the outputs whose gradients are given.
    """
    rule = differentiate(
        operator,
        [input_slot(i) for i in wanted],
        outputs=[output_slot(i) for i in seeds],
        zeros=False,
    )
    reached = {name for name, _ in rule.gradients}
    return rule.backward, tuple(i for i in wanted if input_slot(i) in reached)


def summing_graph(rule: ComputationGraph, sums: Mapping[tuple[int, ...], bool]) -> ComputationGraph:
    """Return the rule with its results summed per tensor, in the order of the operands.

    `sums` has the operands that are one tensor, whose slot is named after the first, and whether
    the sum accumulates: it reads its slot and is written to the same buffer.
    """
    b = ComputationGraphBuilder(rule.name)
    inputs = {
        slot.name: b.input(slot.name, kind.shape, kind.data_type, slot.kind)
        for i, slot in enumerate(rule.inputs)
        for kind in (rule.input_type(i),)
    }
    parts = write_graph(b, rule, inputs)
    for positions, accumulates in sums.items():
        first, *rest = [parts[gradient_name(input_slot(i))] for i in positions]
        name, value = gradient_name(input_slot(positions[0])), first
        if accumulates:
            kind, donate = first.type, Ownership.DONATE
            value = b.input(name, kind.shape, kind.data_type, InputKind.STATE, donate) + first
        for part in rest:
            value = value + part
        b.output(name, value)
        if accumulates and not rest:
            b.place(PlacementOption("output", name, "alias", name))
    return b.build()


def zero_gradient(kind: ValueType) -> ComputationGraph:
    """Return a graph that gives zeros: the gradient of a weight that no output depends on."""
    b = ComputationGraphBuilder("zeros")
    zero = b.constant(kind.data_type.dtype.type(0))
    b.output(gradient_name(input_slot(0)), b.op("Expand", zero, list(kind.shape)))
    return b.build()


def update_task(
    graph: ComputationGraph, parameters: Sequence[Parameter]
) -> tuple[TaskSignature, TaskBinding]:
    """Return signature and binding of the update task: a slot for each parameter and state.

    Slots that the update replaces are read and written; gradients are read; the learning rate is an
    argument by reference.
    """
    gradients = {parameter.name: parameter.gradient for parameter in parameters}
    taken = {slot.name: slot.ownership for slot in graph.inputs if slot.name != LEARNING_RATE}
    names = [name for name in taken if name not in gradients.values()]
    names += [slot.name for slot in graph.outputs if slot.name not in taken]
    slots = []
    for name in names:
        kind, permission = SlotKind.OUTPUT, Permission.WRITE_ONLY
        if name in taken:
            kind = SlotKind.WEIGHT if name in gradients else SlotKind.UNTRAINABLE
            is_replaced = taken[name] is Ownership.DONATE
            permission = Permission.READ_WRITE if is_replaced else Permission.READ_ONLY
        read = Permission.READ_ONLY if name in gradients else Permission.NONE
        slots.append(TensorSlot(name, kind, permission, read))
    binding = TaskBinding(
        {name: name for name in names}, gradients,
        {LEARNING_RATE: RuntimeArgument.LEARNING_RATE, "profiling": RuntimeArgument.PROFILING},
    )  # fmt: skip
    arguments = {LEARNING_RATE: float, "profiling": bool}
    return TaskSignature(tuple(slots), arguments, float | None), binding
