"""The tasks of a model's layers: forward in order, backward in reverse, loss and update.

Comes in: a `LayerGraph`, a machine, a loss, an optimizer. Goes out: tasks by id, and for each part
of a step the invocations in order. Equal operators share a task, whose program is compiled once.
Must not know: devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from stitch import ops
from stitch.graph import ComputationGraph
from stitch.machine import Machine
from stitch.program import ABSENT, InputKind, Role, Space
from stitch.tasks import Permission
from stitch.training.graphs import Parameter, update_graph
from stitch.training.local_backend.layer_graph import LayerGraph
from stitch.training.local_backend.operator_graphs import (
    GradientSum,
    gradient_graph,
    graph_key,
    input_slot,
    operator_graph,
    output_slot,
    summing_graph,
    zero_gradient,
)
from stitch.training.local_backend.program_task import ProgramTask, TaskPort, program_task
from stitch.training.local_backend.runtime_backing import LayerTask
from stitch.training.local_backend.task_binding import (
    RuntimeArgument,
    TaskBinding,
    TaskInvocation,
    backward_binding,
    gradient_name,
)
from stitch.training.local_backend.task_slots import (
    SlotKind,
    TaskSignature,
    TensorSlot,
    backward_signature,
    task_signature,
)
from stitch.training.local_backend.update_slots import update_slots
from stitch.training.losses import Loss
from stitch.training.optimizers import Optimizer
from stitch.training.programs import LABEL, LOSS, loss_graph
from stitch.training.training_options import TrainingOptions

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
