"""A model's graph as layers: operators in order, tensors by name, and how far gradients reach.

The tasks of a model's layers: forward in order, backward in reverse, loss and update.

Equal operators share a task, whose program is compiled once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from stitch import ops
from stitch.compiler import Differentiated, differentiate, optimize
from stitch.errors import CompileError
from stitch.graph import ComputationGraph, ComputationGraphBuilder, PlacementOption
from stitch.linker import drop_unused_values
from stitch.machine import Machine
from stitch.program import (
    ABSENT,
    Constant,
    FreeNames,
    InputKind,
    InputSlot,
    Operation,
    OutputSlot,
    Ownership,
    Role,
    Space,
    Value,
    ValueType,
)
from stitch.tasks import Permission
from stitch.training.graphs import LEARNING_RATE, Parameter, splice, update_graph
from stitch.training.local_backend.signatures import (
    RuntimeArgument,
    SlotKind,
    TaskBinding,
    TaskInvocation,
    TaskSignature,
    TensorSlot,
    backward_binding,
    backward_signature,
    gradient_name,
    task_signature,
)
from stitch.training.local_backend.store import LayerTask, ProgramTask, TaskPort, program_task
from stitch.training.losses import Loss
from stitch.training.optimizers import Optimizer
from stitch.training.programs import LABEL, LOSS, TrainingOptions, loss_graph

# --------------------------------------------------------------------------------------------------
# Layers of a graph


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """Layers are `graph.operations`; `names` are those of its values' tensors, by number.

    `reached`: the values that depend on an input whose gradient is wanted. `wanted` are those
    inputs, by name; `seeds` the outputs whose gradients come in from outside. `next_states`: the
    tensor that a state becomes, by its name.
    """

    graph: ComputationGraph
    names: tuple[str, ...]
    reached: frozenset[int]
    wanted: tuple[str, ...]
    seeds: tuple[str, ...]
    next_states: Mapping[str, str]
    differentiated: Differentiated | None

    @property
    def kinds(self) -> dict[int, InputKind]:
        """What the values are that are inputs."""
        return {slot.value: slot.kind for slot in self.graph.inputs}

    def layer_name(self, index: int) -> str:
        """A layer is called after its first result."""
        return self.names[next(v for v in self.graph.operations[index].outputs if v != ABSENT)]


def layer_graph(
    graph: ComputationGraph, wanted: Sequence[str], outputs: Sequence[str]
) -> LayerGraph:
    """The layers of a graph, with what gradients need: none where no input is wanted.

    Raises `CompileError` naming operators without a gradient, and for two tensors of one name.
    """
    differentiated = differentiate(graph, wanted, outputs=outputs) if wanted else None
    states = {slot.name for slot in graph.inputs if slot.kind is InputKind.STATE}
    seeds: tuple[str, ...] = ()
    given = {slot.name for slot in graph.outputs}
    if differentiated is None:
        whole = optimize(graph)
    else:
        seeds = tuple([name for name, _ in differentiated.seeds])
        # What a rule asks for is handed on as any tensor is.
        saving = differentiated.forward
        whole = replace(saving, outputs=tuple([s for s in saving.outputs if s.name in given]))
    whole = _with_outputs_apart(whole)
    names, after = _names(whole, states)
    return LayerGraph(
        whole, names, _reached(whole, wanted), tuple(wanted), seeds, after, differentiated
    )


def _with_outputs_apart(graph: ComputationGraph) -> ComputationGraph:
    """The graph whose outputs are made by an operation and read by none: else by an `Identity`.

    Their gradients come from outside then, and from nowhere else. The last of several comes first,
    so that going back the first one's gradient is the first to be added.
    """
    made = {v for operation in graph.operations for v in operation.outputs}
    read = {v for operation in graph.operations for v in operation.inputs}
    values, outputs, copies = list(graph.values), [], []
    for slot in graph.outputs:
        if slot.value not in made or slot.value in read:
            values.append(Value(slot.name, graph.values[slot.value].type))
            location = f"output {slot.name}"
            copies.append(
                Operation("Identity", (slot.value,), (len(values) - 1,), location=location)
            )
            slot = replace(slot, value=len(values) - 1)
        read.add(slot.value)
        outputs.append(slot)
    return replace(
        graph,
        values=tuple(values),
        operations=(*graph.operations, *reversed(copies)),
        outputs=tuple(outputs),
    )


def _names(
    graph: ComputationGraph, states: Collection[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """A name for each value, and for each state that of its next value.

    Slots keep theirs; other values are numbered where a name is taken.
    """
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
    taken = {*names.values()}
    both = [name for name in names.values() if gradient_name(name) in taken]
    if both or len(taken) < len(graph.values):
        known = list(names.values())
        name = gradient_name(both[0]) if both else next(n for n in known if known.count(n) > 1)
        raise CompileError(
            f"two tensors of graph {graph.name!r} would be called {name!r}",
            remedy="rename the input or output of this name",
        )
    return tuple([names[v] for v in range(len(graph.values))]), after


def _reached(graph: ComputationGraph, wanted: Collection[str]) -> frozenset[int]:
    """The floating values that depend on a wanted input."""
    reached = {slot.value for slot in graph.inputs if slot.name in wanted}
    for operation in graph.operations:
        if not reached.isdisjoint(operation.inputs):
            reached.update(
                v for v in operation.outputs
                if v != ABSENT and graph.values[v].type.data_type.is_floating
            )  # fmt: skip
    return frozenset(reached)


# --------------------------------------------------------------------------------------------------
# Tasks of layers

# --------------------------------------------------------------------------------------------------
# The graphs of tasks: an operator alone, its gradient rule, and sums of gradients.


def input_slot(position: int) -> str:
    """What an operand's slot is called."""
    return f"input{position}"


def output_slot(position: int) -> str:
    """What a result's slot is called."""
    return f"output{position}"


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Operands that are one tensor: their gradients go into one slot, after what `adds` up."""

    positions: tuple[int, ...]
    adds: bool

    @property
    def name(self) -> str:
        """The slot of the sum: that of the first operand's gradient."""
        return gradient_name(input_slot(self.positions[0]))


def operator_graph(
    graph: ComputationGraph, index: int, kinds: Mapping[int, InputKind]
) -> ComputationGraph:
    """One operation as a graph: every operand a slot of its own, but for constants.

    `kinds`: what values are that are inputs of the graph.
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
    operator: ComputationGraph, wanted: Sequence[int], flowing: Sequence[int]
) -> tuple[ComputationGraph, tuple[int, ...]]:
    """An operator's gradient rule: from the gradients of the outputs `flowing`, those of `wanted`
    operands; and to which of them something flows back."""
    rule = differentiate(
        operator,
        [input_slot(i) for i in wanted],
        outputs=[output_slot(i) for i in flowing],
        zeros=False,
    )
    reached = {name for name, _ in rule.gradients}
    return rule.backward, tuple(i for i in wanted if input_slot(i) in reached)


def summing_graph(rule: ComputationGraph, sums: Sequence[GradientSum]) -> ComputationGraph:
    """The rule with its results added to the gradients so far, in the order of the operands.

    A slot that adds is read, and its sum takes its buffer.
    """
    b = ComputationGraphBuilder(rule.name)
    given = {
        slot.name: b.input(slot.name, kind.shape, kind.data_type, slot.kind)
        for i, slot in enumerate(rule.inputs)
        for kind in (rule.input_type(i),)
    }
    kinds = {slot.name: rule.output_type(i) for i, slot in enumerate(rule.outputs)}
    so_far = {
        total.name: b.input(
            total.name, kinds[total.name].shape, kinds[total.name].data_type, InputKind.STATE,
            Ownership.DONATE,
        )
        for total in sums if total.adds
    }  # fmt: skip
    parts = splice(b, rule, given)
    for total in sums:
        first, *rest = [parts[gradient_name(input_slot(i))] for i in total.positions]
        value = so_far[total.name] + first if total.adds else first
        for part in rest:
            value = value + part
        b.output(total.name, value)
        if total.adds and not rest:
            b.place(PlacementOption("output", total.name, "alias", total.name))
    return b.build()


def zero_gradient(kind: ValueType) -> ComputationGraph:
    """The gradient of a weight that nothing depends on."""
    b = ComputationGraphBuilder("zeros")
    zero = b.constant(kind.data_type.dtype.type(0))
    b.output(gradient_name(input_slot(0)), b.op("Expand", zero, list(kind.shape)))
    return b.build()


def graph_key(graph: ComputationGraph) -> object:
    """Equal for graphs that differ in names of values and in lines of the user's alone."""
    return (
        graph.inputs,
        graph.outputs,
        tuple([value.type for value in graph.values]),
        tuple([
            (o.op, o.domain, o.opset, o.inputs, o.outputs, tuple(sorted(o.attributes.items())),
             o.body)
            for o in graph.operations
        ]),
        tuple([(c.value, c.data.dtype.str, c.data.tobytes()) for c in graph.constants]),
        tuple([body.meaning for body in graph.bodies]),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# The slots of the task that updates all parameters: what it steps, with what, at which rate.


def update_slots(
    graph: ComputationGraph, parameters: Sequence[Parameter]
) -> tuple[TaskSignature, TaskBinding, dict[str, TaskPort]]:
    """A slot for each parameter and state, called after it; the rate is an argument by reference.

    What is replaced is read and written, gradients are read.
    """
    gradients = {parameter.gradient: parameter.name for parameter in parameters}
    taken = {slot.name: slot for slot in graph.inputs if slot.name != LEARNING_RATE}
    names = [name for name in taken if name not in gradients]
    names += [slot.name for slot in graph.outputs if slot.name not in taken]
    slots = []
    for name in names:
        given = name in taken
        replaced = not given or taken[name].ownership is Ownership.DONATE
        kind = SlotKind.WEIGHT if name in gradients.values() else SlotKind.UNTRAINABLE
        slots.append(
            TensorSlot(
                name,
                kind if given else SlotKind.OUTPUT,
                _permission(reads=given, writes=replaced),
                Permission.READ_ONLY if kind is SlotKind.WEIGHT else Permission.NONE,
            )
        )
    arguments = {LEARNING_RATE: float, "profiling": bool}
    binding = TaskBinding(
        {name: name for name in names},
        {name: gradient for gradient, name in gradients.items()},
        {LEARNING_RATE: RuntimeArgument.LEARNING_RATE, "profiling": RuntimeArgument.PROFILING},
    )
    ports = {name: TaskPort("tensor", name) for name in names}
    ports |= {gradient: TaskPort("gradient", name) for gradient, name in gradients.items()}
    ports[LEARNING_RATE] = TaskPort("argument", LEARNING_RATE)
    signature = TaskSignature(tuple(slots), arguments, float | None)
    return signature, binding, ports


def _permission(*, reads: bool, writes: bool) -> Permission:
    one = Permission.READ_ONLY if reads else Permission.NONE
    return one.join(Permission.WRITE_ONLY if writes else Permission.NONE)


#: What every program's task is told, beside what belongs to it.
_PROFILING = MappingProxyType({"profiling": RuntimeArgument.PROFILING})
_SECONDS = float | None


class LayerTasks:
    """The tasks of a model, compiled: `tasks` by id, `stages` by the part of a step."""

    def __init__(
        self, layers: LayerGraph, machine: Machine, spaces: Mapping[str, Space],
        loss: Loss | None, optimizer: Optimizer | None,
    ) -> None:  # fmt: skip
        self.layers, self.machine, self.spaces = layers, machine, spaces
        self.tasks: dict[str, ProgramTask] = {}
        self._ids: dict[object, str] = {}
        self._counts: Counter[str] = Counter()
        #: Of each layer: its operator alone, and its forward task.
        self._operators: list[ComputationGraph] = []
        forward = [self._forward(index) for index in range(len(layers.graph.operations))]
        self.stages: dict[Role, tuple[LayerTask, ...]] = {
            Role.FORWARD: tuple(forward),
            Role.LOSS: () if loss is None else (self._loss(loss),),
            Role.BACKWARD: self._all_backward(forward),
            Role.UPDATE: () if optimizer is None else (self._update(optimizer),),
        }

    def made(self, role: Role) -> tuple[str, ...]:
        """The tensors that the tasks of a stage make, each once."""
        return self._tensors(role, "outputs")

    def kept(self, role: Role) -> frozenset[str]:
        """The tensors of a stage that are for others: outputs of the graph, what backward tasks
        read, gradients that are wanted, parameters and states."""
        if role is Role.FORWARD:
            layers = self.layers
            read = self._tensors(Role.BACKWARD, "inputs")
            return frozenset((*read, *[layers.names[slot.value] for slot in layers.graph.outputs]))
        if role is Role.BACKWARD:
            return frozenset(map(gradient_name, self.layers.wanted))
        return frozenset(self.made(role))

    def _tensors(self, role: Role, side: Literal["inputs", "outputs"]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for layer in self.stages[role]:
            task = self.tasks[layer.invocation.task_id]
            ports = task.inputs if side == "inputs" else task.outputs
            found |= dict.fromkeys([port.name(layer.invocation.binding) for port in ports])
        return tuple(found)

    @property
    def names(self) -> frozenset[str]:
        """All tensors that tasks read or make."""
        sides: tuple[Literal["inputs", "outputs"], ...] = ("inputs", "outputs")
        return frozenset(n for role in self.stages for side in sides
                         for n in self._tensors(role, side))  # fmt: skip

    # -- forward -----------------------------------------------------------------------------------

    def _forward(self, index: int) -> LayerTask:
        layers = self.layers
        operation, names = layers.graph.operations[index], layers.names
        graph = operator_graph(layers.graph, index, layers.kinds)
        self._operators.append(graph)
        bound = {
            slot(i): names[v]
            for slot, values in ((input_slot, operation.inputs), (output_slot, operation.outputs))
            for i, v in enumerate(values)
            if v != ABSENT and (slot is output_slot or slot(i) in {s.name for s in graph.inputs})
        }
        attributes = {"attributes": operation.attributes, **_PROFILING}
        binding = TaskBinding(bound, {}, attributes)
        signature = self._signature(index, graph)
        made = self._task(graph, f"{operation.op}.forward", Role.FORWARD, signature, binding)
        return self._of_layer(index, TaskInvocation(made, binding))

    def _signature(self, index: int, graph: ComputationGraph) -> TaskSignature:
        """What an operator's operands are to its task; constants are the program's own."""
        layers = self.layers
        operation, kinds = layers.graph.operations[index], layers.kinds
        least, _ = ops.definition_of(operation).inputs
        slots: dict[SlotKind, list[str]] = {kind: [] for kind in SlotKind}
        given = {slot.name for slot in graph.inputs}
        for i, v in enumerate(operation.inputs):
            if v != ABSENT and input_slot(i) not in given:
                continue
            kind = SlotKind.INPUT if i < least else SlotKind.OPTIONAL
            if v in layers.reached and kinds.get(v) is InputKind.PARAMETER:
                kind = SlotKind.WEIGHT
            elif v != ABSENT and v not in layers.reached:
                kind = SlotKind.UNTRAINABLE
            slots[kind].append(input_slot(i))
        return task_signature(
            inputs=slots[SlotKind.INPUT], optional=slots[SlotKind.OPTIONAL],
            untrainable=slots[SlotKind.UNTRAINABLE], weights=slots[SlotKind.WEIGHT],
            outputs=[slot.name for slot in graph.outputs],
            arguments={"attributes": Mapping, "profiling": bool}, returns=_SECONDS,
        )  # fmt: skip

    # -- backward ----------------------------------------------------------------------------------

    def _all_backward(self, forward: Sequence[LayerTask]) -> tuple[LayerTask, ...]:
        """The backward tasks, in the order in which gradients flow."""
        layers = self.layers
        flowing = {s.value for s in layers.graph.outputs if s.name in layers.seeds}
        made = []
        for index in reversed(range(len(forward))):
            task = self._backward(index, forward[index], flowing)
            if task is not None:
                made.append(task)
        alone = [
            slot.value for slot in layers.graph.inputs
            if slot.name in layers.wanted and slot.value not in flowing
        ]  # fmt: skip
        return (*made, *map(self._zeros, alone))

    def _backward(self, index: int, forward: LayerTask, flowing: set[int]) -> LayerTask | None:
        """A layer's backward task; None where nothing flows back. Values join `flowing`."""
        layers = self.layers
        operation, names = layers.graph.operations[index], layers.names
        coming = [i for i, v in enumerate(operation.outputs) if v in flowing]
        given = {slot.name for slot in self._operators[index].inputs}
        wanted = [
            i for i, v in enumerate(operation.inputs)
            if v in layers.reached and input_slot(i) in given
        ]  # fmt: skip
        if not coming or not wanted:
            return None
        rule, reached = gradient_graph(self._operators[index], wanted, coming)
        if not reached:
            return None
        positions: dict[int, list[int]] = {}
        for i in reached:
            positions.setdefault(operation.inputs[i], []).append(i)
        sums = [GradientSum(tuple(of), v in flowing) for v, of in positions.items()]
        flows = {names[operation.outputs[i]] for i in coming} | {names[v] for v in positions}
        flowing.update(positions)
        task = forward.invocation
        signature = backward_signature(self.tasks[task.task_id].signature)
        binding = backward_binding(task.binding, signature, flows)
        graph = summing_graph(rule, sums)
        made = self._task(graph, f"{operation.op}.backward", Role.BACKWARD, signature, binding)
        return self._of_layer(index, TaskInvocation(made, binding))

    def _zeros(self, value: int) -> LayerTask:
        """The gradient of a weight on which nothing depends."""
        name = self.layers.names[value]
        graph = zero_gradient(self.layers.graph.values[value].type)
        signature = TaskSignature(
            (TensorSlot(input_slot(0), SlotKind.WEIGHT, Permission.NONE, Permission.WRITE_ONLY),),
            {"profiling": bool}, _SECONDS,
        )  # fmt: skip
        binding = TaskBinding({input_slot(0): name}, {input_slot(0): gradient_name(name)},
                              _PROFILING)  # fmt: skip
        made = self._task(graph, "zeros.backward", Role.BACKWARD, signature, binding)
        return LayerTask(name, "zeros", "", TaskInvocation(made, binding))

    # -- loss and update ---------------------------------------------------------------------------

    def _loss(self, loss: Loss) -> LayerTask:
        """The task that judges the prediction, and makes its gradient."""
        differentiated = self.layers.differentiated
        assert differentiated is not None
        ((name, seed),) = differentiated.seeds
        graph = self.layers.graph
        index = next(i for i, slot in enumerate(graph.outputs) if slot.name == name)
        judged = loss_graph(loss, differentiated, graph.output_type(index), TrainingOptions())
        read, written = Permission.READ_ONLY, Permission.WRITE_ONLY
        signature = TaskSignature(
            (
                TensorSlot(name, SlotKind.INPUT, read, gradient=written),
                TensorSlot(LABEL, SlotKind.UNTRAINABLE, read),
                TensorSlot(LOSS, SlotKind.OUTPUT, written),
            ),
            {"profiling": bool}, _SECONDS,
        )  # fmt: skip
        binding = TaskBinding(
            {slot: slot for slot in (name, LABEL, LOSS)}, {name: gradient_name(name)}, _PROFILING
        )
        ports = {slot: TaskPort("tensor", slot) for slot in (name, LABEL, LOSS)}
        ports[seed] = TaskPort("gradient", name)
        made = self._compiled(judged, LOSS, Role.LOSS, signature, binding, ports)
        return LayerTask(LOSS, loss.name, "", TaskInvocation(made, binding))

    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters that are updated."""
        graph = self.layers.graph
        return tuple([
            Parameter(slot.name, graph.input_type(i), gradient_name(slot.name))
            for i, slot in enumerate(graph.inputs)
            if slot.name in self.layers.wanted and slot.kind is InputKind.PARAMETER
        ])  # fmt: skip

    def _update(self, optimizer: Optimizer) -> LayerTask:
        """The task that steps with all gradients."""
        parameters = self.parameters()
        graph = update_graph(f"{self.layers.graph.name}_update", parameters, optimizer)
        signature, binding, ports = update_slots(graph, parameters)
        made = self._compiled(graph, "update", Role.UPDATE, signature, binding, ports)
        return LayerTask("update", optimizer.name, "", TaskInvocation(made, binding))

    # -- tasks by what they do ---------------------------------------------------------------------

    def _of_layer(self, index: int, invocation: TaskInvocation) -> LayerTask:
        operation = self.layers.graph.operations[index]
        name = self.layers.layer_name(index)
        return LayerTask(name, operation.op, operation.location, invocation)

    def _task(
        self, graph: ComputationGraph, stem: str, role: Role, signature: TaskSignature,
        binding: TaskBinding,
    ) -> str:  # fmt: skip
        """The task of a graph with an operator's slots: one that there is, or a new one."""
        ports = {}
        for name in [*(slot.name for slot in graph.inputs), *(s.name for s in graph.outputs)]:
            plain = name.removesuffix(gradient_name(""))
            ports[name] = TaskPort("tensor" if plain == name else "gradient", plain)
        return self._compiled(graph, stem, role, signature, binding, ports)

    def _compiled(
        self, graph: ComputationGraph, stem: str, role: Role, signature: TaskSignature,
        binding: TaskBinding, ports: Mapping[str, TaskPort],
    ) -> str:  # fmt: skip
        where = {name: self.spaces.get(port.name(binding)) for name, port in ports.items()}
        spaces = {name: space for name, space in where.items() if space is not None}
        slots = (signature.tensors, tuple(signature.arguments))
        key = (stem, graph_key(graph), slots, tuple(sorted(spaces.items())))
        known = self._ids.get(key)
        if known is not None:
            return known
        self._counts[stem] += 1
        number = self._counts[stem]
        task_id = stem if number == 1 else f"{stem}.{number}"
        self.tasks[task_id] = program_task(
            graph, task_id, role, self.machine, signature, ports, spaces
        )
        self._ids[key] = task_id
        return task_id
