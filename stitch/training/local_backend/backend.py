"""`LocalTaskBackend`: the tasks of a model on one device, and the tensors that they read and write.

`LayerTasks` compiles a program for each operator and direction; equal operators share a program.
Running a task queues its program on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from stitch import ops
from stitch.argument_kinds import MAPPING, TEXT, WORDS, instance_of, member_of, optional, takes
from stitch.errors import CompileError, TaskError, UsageError, unknown
from stitch.graph import ComputationGraph
from stitch.machine import load_machine
from stitch.program import ABSENT, Array, InputKind, Role
from stitch.report import Device
from stitch.runtime import RuntimeDevice, Tensor
from stitch.tasks import Future, Permission, TaskGraph
from stitch.training.graphs import KEPT_KINDS, MASTER, Parameter, as_trainable, update_graph
from stitch.training.local_backend.signatures import (
    LayerGraph,
    LayerTask,
    RuntimeArgument,
    SlotKind,
    TaskBinding,
    TaskInvocation,
    TaskSignature,
    TensorSlot,
    backward_binding,
    backward_signature,
    gradient_graph,
    gradient_name,
    input_slot,
    layer_graph,
    named,
    operator_graph,
    output_slot,
    summing_graph,
    task_signature,
    update_task,
    zero_gradient,
)
from stitch.training.local_backend.store import (
    ProgramTask,
    TaskArgumentAccessor,
    TaskImplementation,
    TaskStore,
    execute,
)
from stitch.training.losses import LOSS_KIND, Loss, loss_from_config
from stitch.training.optimizers import OPTIMIZER_KIND, Optimizer, optimizer_from_config
from stitch.training.programs import LABEL, LOSS, TrainingOptions, loss_graph, prediction_of

#: The default machine, as for `open_device`.
_TARGET = "wormhole_n150"

# --------------------------------------------------------------------------------------------------
# The tasks of a model's layers

#: Arguments of every program task.
_PROFILING = MappingProxyType({"profiling": RuntimeArgument.PROFILING})
_SECONDS = float | None


class LayerTasks:
    """The compiled tasks of a model: `tasks` by id, `stages` by the part of a training step."""

    def __init__(
        self, layers: LayerGraph, device: RuntimeDevice, loss: Loss | None,
        optimizer: Optimizer | None,
    ) -> None:  # fmt: skip
        self.layers, self.device = layers, device
        self.tasks: dict[str, ProgramTask] = {}
        self._ids: dict[object, str] = {}
        self._counts: Counter[str] = Counter()
        #: The graph of each layer's operator alone.
        self._operators: list[ComputationGraph] = []
        forward = [self._forward(index) for index in range(len(layers.graph.operations))]
        self.stages: dict[Role, tuple[LayerTask, ...]] = {
            Role.FORWARD: tuple(forward),
            Role.LOSS: () if loss is None else (self._loss(loss),),
            Role.BACKWARD: self._all_backward(forward),
            Role.UPDATE: () if optimizer is None else (self._update(optimizer),),
        }

    def outputs_of(self, role: Role) -> tuple[str, ...]:
        """Return the tensors that the tasks of a stage write, each once."""
        return tuple(dict.fromkeys(
            name for layer in self.stages[role]
            for name, _ in self.of(layer).outputs(layer.invocation.binding)
        ))  # fmt: skip

    def of(self, layer: LayerTask) -> ProgramTask:
        return self.tasks[layer.invocation.task_id]

    def graph(self, role: Role, name: str) -> TaskGraph:
        """Return the tasks of a stage as calls of their programs in a task graph.

        Its outputs are what is used outside of the stage: outputs of the model, inputs of backward
        tasks, gradients in `wanted`, parameters and states.
        """
        graph = TaskGraph(name)
        #: The newest value of each tensor.
        now: dict[str, Future] = {}
        for layer in self.stages[role]:
            task, binding = self.of(layer), layer.invocation.binding
            operands = []
            for tensor, desc in task.inputs(binding):
                if tensor not in now:
                    now[tensor] = graph.input(desc, tensor)
                operands.append(now[tensor])
            results = graph.call(task.program, *operands)
            futures = (results,) if isinstance(results, Future) else results
            names = [tensor for tensor, _ in task.outputs(binding)]
            now.update(zip(names, futures, strict=True))
        outputs = self.outputs_of(role)
        live: Collection[str] = outputs
        if role is Role.FORWARD:
            layers = self.layers
            live = {layers.names[slot.value] for slot in layers.graph.outputs}
            for layer in self.stages[Role.BACKWARD]:
                read = self.of(layer).inputs(layer.invocation.binding)
                live |= {tensor for tensor, _ in read}
        elif role is Role.BACKWARD:
            live = {*map(gradient_name, self.layers.wanted)}
        for tensor in outputs:
            if tensor in live:
                graph.output(now[tensor], tensor)
        return graph

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
        task_id = self._task(graph, f"{operation.op}.forward", Role.FORWARD, signature)
        return self._layer_task(index, TaskInvocation(task_id, binding))

    def _signature(self, index: int, graph: ComputationGraph) -> TaskSignature:
        """Return the signature of an operator's task; constants are part of its program."""
        layers = self.layers
        operation, kinds = layers.graph.operations[index], layers.kinds
        least, _ = ops.definition_of(operation).inputs
        slots: dict[SlotKind, list[str]] = {kind: [] for kind in SlotKind}
        inputs = {slot.name for slot in graph.inputs}
        for i, v in enumerate(operation.inputs):
            if v != ABSENT and input_slot(i) not in inputs:
                continue
            kind = SlotKind.INPUT if i < least else SlotKind.OPTIONAL
            if v in layers.differentiable and kinds.get(v) is InputKind.PARAMETER:
                kind = SlotKind.WEIGHT
            elif v != ABSENT and v not in layers.differentiable:
                kind = SlotKind.UNTRAINABLE
            slots[kind].append(input_slot(i))
        return task_signature(
            inputs=slots[SlotKind.INPUT], optional=slots[SlotKind.OPTIONAL],
            untrainable=slots[SlotKind.UNTRAINABLE], weights=slots[SlotKind.WEIGHT],
            outputs=[slot.name for slot in graph.outputs],
            arguments={"attributes": Mapping, "profiling": bool}, returns=_SECONDS,
        )  # fmt: skip

    def _all_backward(self, forward: Sequence[LayerTask]) -> tuple[LayerTask, ...]:
        """Compile the backward tasks, in the order in which gradients are computed."""
        layers = self.layers
        seeded = {s.value for s in layers.graph.outputs if s.name in layers.seeds}
        tasks = []
        for index in reversed(range(len(forward))):
            task = self._backward(index, forward[index], seeded)
            if task is not None:
                tasks.append(task)
        alone = [
            slot.value for slot in layers.graph.inputs
            if slot.name in layers.wanted and slot.value not in seeded
        ]  # fmt: skip
        return (*tasks, *map(self._zeros, alone))

    def _backward(self, index: int, forward: LayerTask, seeded: set[int]) -> LayerTask | None:
        """Return a layer's backward task, None if it has no gradient; add its operands to
        `seeded`."""
        layers = self.layers
        operation, names = layers.graph.operations[index], layers.names
        coming = [i for i, v in enumerate(operation.outputs) if v in seeded]
        inputs = {slot.name for slot in self._operators[index].inputs}
        wanted = [
            i for i, v in enumerate(operation.inputs)
            if v in layers.differentiable and input_slot(i) in inputs
        ]  # fmt: skip
        if not coming or not wanted:
            return None
        rule, reached = gradient_graph(self._operators[index], wanted, coming)
        if not reached:
            return None
        positions: dict[int, list[int]] = {}
        for i in reached:
            positions.setdefault(operation.inputs[i], []).append(i)
        sums = {tuple(of): v in seeded for v, of in positions.items()}
        flows = {names[operation.outputs[i]] for i in coming} | {names[v] for v in positions}
        seeded.update(positions)
        task = forward.invocation
        signature = backward_signature(self.tasks[task.task_id].signature)
        binding = backward_binding(task.binding, signature, flows)
        graph = summing_graph(rule, sums)
        task_id = self._task(graph, f"{operation.op}.backward", Role.BACKWARD, signature)
        return self._layer_task(index, TaskInvocation(task_id, binding))

    def _zeros(self, value: int) -> LayerTask:
        """Return the task that zeroes the gradient of a weight that no output depends on."""
        name = self.layers.names[value]
        graph = zero_gradient(self.layers.graph.values[value].type)
        signature = TaskSignature(
            (TensorSlot(input_slot(0), SlotKind.WEIGHT, Permission.NONE, Permission.WRITE_ONLY),),
            {"profiling": bool}, _SECONDS,
        )  # fmt: skip
        binding = TaskBinding({input_slot(0): name}, {input_slot(0): gradient_name(name)},
                              _PROFILING)  # fmt: skip
        task_id = self._task(graph, "zeros.backward", Role.BACKWARD, signature)
        return LayerTask(name, "zeros", "", TaskInvocation(task_id, binding))

    def _loss(self, loss: Loss) -> LayerTask:
        """Return the task that computes the loss and the prediction's gradient."""
        differentiated = self.layers.differentiated
        assert differentiated is not None
        ((name, _),) = differentiated.seeds
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
        task_id = self._task(judged, LOSS, Role.LOSS, signature)
        return LayerTask(LOSS, loss.name, "", TaskInvocation(task_id, binding))

    def _update(self, optimizer: Optimizer) -> LayerTask:
        whole = self.layers.graph
        parameters = [
            Parameter(slot.name, whole.input_type(i), gradient_name(slot.name))
            for i, slot in enumerate(whole.inputs)
            if slot.name in self.layers.wanted and slot.kind is InputKind.PARAMETER
        ]
        graph = update_graph(f"{whole.name}_update", parameters, optimizer)
        signature, binding = update_task(graph, parameters)
        task_id = self._task(graph, "update", Role.UPDATE, signature)
        return LayerTask("update", optimizer.name, "", TaskInvocation(task_id, binding))

    def _layer_task(self, index: int, invocation: TaskInvocation) -> LayerTask:
        operation = self.layers.graph.operations[index]
        name = self.layers.layer_name(index)
        return LayerTask(name, operation.op, operation.location, invocation)

    def _task(
        self, graph: ComputationGraph, stem: str, role: Role, signature: TaskSignature
    ) -> str:
        """Return the id of an equal task, or compile a new one."""
        slots = graph.inputs, graph.outputs, signature.tensors, tuple(signature.arguments)
        key = stem, slots, graph.meaning
        equal = self._ids.get(key)
        if equal is not None:
            return equal
        self._counts[stem] += 1
        number = self._counts[stem]
        task_id = stem if number == 1 else f"{stem}.{number}"
        graph = replace(graph, name=task_id)
        self.tasks[task_id] = ProgramTask(graph, role, signature, self.device)
        self._ids[key] = task_id
        return task_id


# --------------------------------------------------------------------------------------------------
# The layers that a backend trains, and initial values


def trained_layers(
    graph: ComputationGraph, loss: Loss | None, wanted: Iterable[str] | None,
    weights: Mapping[str, Any],
) -> tuple[LayerGraph, Mapping[str, Any]]:  # fmt: skip
    """Return the layers of a graph and the initial values of its parameters.

    The backward pass starts at the prediction if there is a loss, else at all floating outputs.

    Raises:
        CompileError: The graph has placement options, or an operator has no gradient.
        UsageError: `weights` has unknown names.
    """
    if graph.placement:
        raise CompileError(
            f"graph {graph.name!r} has placement options, which tasks of single operators cannot "
            "keep",
            got=", ".join(option.text() for option in graph.placement[:8]),
        )
    trained, values = _with_parameters(graph, weights)
    if wanted is None:
        wanted = [
            slot.name for i, slot in enumerate(trained.inputs)
            if slot.kind is InputKind.PARAMETER and trained.input_type(i).data_type.is_floating
        ]  # fmt: skip
    states = {slot.name for slot in trained.inputs if slot.kind is InputKind.STATE}
    if loss is None:
        outputs = [
            slot.name for i, slot in enumerate(trained.outputs)
            if slot.name not in states and trained.output_type(i).data_type.is_floating
        ]  # fmt: skip
    else:
        outputs = [prediction_of(trained)]
    return layer_graph(trained, tuple(wanted), outputs), values


def _with_parameters(
    graph: ComputationGraph, weights: Mapping[str, Any]
) -> tuple[ComputationGraph, Mapping[str, Any]]:
    """Turn named constants into parameter inputs if the graph has no parameters or states."""
    persistent = [slot.name for slot in graph.inputs if slot.kind in KEPT_KINDS]
    if persistent or not graph.constants:
        for name in weights:
            if name not in persistent:
                raise unknown(
                    f"weights= of LocalTaskBackend names {name!r}, which is no parameter or state",
                    name, persistent,
                )  # fmt: skip
        return graph, weights
    try:
        model = as_trainable(graph, weights)
    except CompileError:
        return graph, weights
    return model.graph, model.values


_ROLE = member_of(Role, "a role")


class LocalTaskBackend:
    """A `RuntimeBacking` of one device: forward tasks in topological order, backward tasks in
    reverse order, a loss task and an update task.

    Args:
        graph: The model. Without PARAMETER inputs its named floating constants are the parameters.
        device: Where the tasks run; by default the backend opens a device and closes it.
        wanted: Inputs whose gradients are computed (default: the parameters).
        weights: Initial values of parameters, by name.

    Raises:
        CompileError: An operator has no gradient.
    """

    @takes(
        graph=instance_of("a ComputationGraph", ComputationGraph),
        device=optional(instance_of("a device", RuntimeDevice)),
        optimizer=optional(OPTIMIZER_KIND), loss=optional(LOSS_KIND),
        wanted=optional(WORDS), weights=optional(MAPPING),
    )  # fmt: skip
    def __init__(
        self,
        graph: ComputationGraph,
        device: RuntimeDevice | None = None,
        optimizer: Optimizer | str | dict[str, Any] | None = None,
        loss: Loss | str | dict[str, Any] | None = None,
        *,
        wanted: Iterable[str] | None = None,
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        self.graph = graph
        self.loss = None if loss is None else loss_from_config(loss)
        self.optimizer = None if optimizer is None else optimizer_from_config(optimizer)
        if self.optimizer is not None and self.optimizer.grouped:
            raise UsageError(
                "LocalTaskBackend does not support parameter groups: its update task has one "
                "learning rate",
                got=", ".join(self.optimizer.grouped),
                remedy="use stitch.compile(graph, optimizer=..., loss=...)",
            )
        self.profiling = False
        #: Number of updates so far.
        self.iteration = 0
        layers, values = trained_layers(graph, self.loss, wanted, weights or {})
        if not layers.wanted and (self.loss or self.optimizer):
            raise CompileError(f"graph {graph.name!r} has no parameters to train")
        self.layers = layers
        self._owns_device = device is None
        self.device = Device(load_machine(_TARGET)) if device is None else device
        self.store = TaskStore(self.device, {
            RuntimeArgument.DEVICE_STATE: lambda: self.device,
            RuntimeArgument.ITERATION: lambda: self.iteration,
            RuntimeArgument.PROFILING: lambda: self.profiling,
            RuntimeArgument.LEARNING_RATE: self._rate,
        })  # fmt: skip
        self._implementations: dict[str, TaskImplementation] = {}
        self._closed = False
        #: Whether a complete backward pass has run.
        self._has_gradients = False
        try:
            self._compiled = LayerTasks(layers, self.device, self.loss, self.optimizer)
            for task_id, compiled in self._compiled.tasks.items():
                self.register_task(task_id, compiled.signature, compiled)
            for role in Role:
                for layer in self.tasks(role):
                    task, binding = self._compiled.of(layer), layer.invocation.binding
                    for name, desc in (*task.inputs(binding), *task.outputs(binding)):
                        self.store.add_tensor(name, desc)
            self._start(values)
        except BaseException:
            self.close()
            raise

    def _start(self, values: Mapping[str, Any]) -> None:
        """Write the initial optimizer state and weights."""
        for layer in self.tasks(Role.UPDATE):
            for slot in self._compiled.of(layer).program.inputs:
                if slot.kind is InputKind.STATE and slot.name in layer.invocation.binding.tensors:
                    desc = self.store.desc(slot.name)
                    parameter, _, state = slot.name.rpartition(".")
                    assert self.optimizer is not None
                    start = self.optimizer.start_of_slot(parameter, state)
                    kind = desc.layout.data_type.dtype
                    self.store.write(slot.name, np.full(desc.shape, start, kind))
        names = set(self.store.names)
        for name, value in values.items():
            if name in names:
                self.set_tensor(name, value)

    def _rate(self) -> float:
        assert self.optimizer is not None
        return self.optimizer.rate(self.iteration)

    def set_tensor(self, name: str, value: Any) -> None:
        """Write a tensor: an input, parameter, label or gradient.

        An array is copied into the tensor; a tensor of the device replaces it.

        Raises:
            UsageError: The name is unknown, or labels do not fit the loss.
            LinkError: Shape or kind of number differ.
        """
        if isinstance(value, Tensor):
            self.store.hold(name, value)
        else:
            array = np.asarray(value)
            if name == LABEL and self.loss is not None:
                graph, prediction = self.layers.graph, self.layers.seeds[0]
                places = [slot.name for slot in graph.outputs]
                self.loss.check_label(array, graph.output_type(places.index(prediction)))
                array = array.astype(self.store.desc(name).layout.data_type.dtype, copy=False)
            self.store.write(name, array)
        master = f"{name}.{MASTER}"
        if master in self.store.names:
            self.store.write(master, np.asarray(value).astype(np.float32))
        after = self.layers.next_states.get(name)
        if after is not None:
            self.store.drop([after])

    def get_tensor(self, name: str) -> Array:
        """Return the elements of an input, parameter, activation, gradient or optimizer state.

        Of a state that forward replaces, return the newest value. Raises `UsageError` for an
        unknown name, and for a tensor that is not written yet.
        """
        after = self.layers.next_states.get(name)
        if after is not None and self.store.find(after) is not None:
            name = after
        return self.store.tensor(name).numpy()

    @takes(task_id=TEXT, signature=instance_of("a TaskSignature", TaskSignature))
    def register_task(
        self, task_id: str, signature: TaskSignature, implementation: TaskImplementation
    ) -> None:
        """Register a task under an id; a registered id may get another implementation.

        Raises `UsageError` if the id has another signature.
        """
        registered = self.store.signatures.get(task_id)
        if registered is not None and registered != signature:
            raise UsageError(
                f"task {task_id!r} is registered with another signature",
                remedy="register it under another id, or with backend.signature(task_id)",
            )
        if not callable(implementation):
            raise UsageError(f"the implementation of task {task_id!r} cannot be called",
                             got=repr(implementation))  # fmt: skip
        self.store.signatures[task_id] = signature
        self._implementations[task_id] = implementation

    def signature(self, task_id: str) -> TaskSignature:
        """Return the signature of a task; raise `TaskError` if it is not registered."""
        self._check_known(task_id)
        return self.store.signatures[task_id]

    def get_args(self, invocation: TaskInvocation) -> TaskArgumentAccessor:
        """Return the accessor of an invocation.

        Raises `TaskError` for an unknown task, `UsageError` for a binding that does not match.
        """
        self._check_known(invocation.task_id)
        return TaskArgumentAccessor(self.store, invocation)

    def get_task_impl(self, invocation: TaskInvocation) -> TaskImplementation:
        """Return the implementation of a task; raise `TaskError` if it is not registered."""
        self._check_known(invocation.task_id)
        return self._implementations[invocation.task_id]

    def check_open(self) -> None:
        """Raise `UsageError` if the backend or its device is closed."""
        if self._closed or self.device.is_closed:
            raise UsageError("this backend is closed", remedy="create another one")

    def _check_known(self, task_id: str) -> None:
        self.check_open()
        named(task_id, self._implementations, f"no task {task_id!r} is registered", TaskError)

    def execute(self, invocation: TaskInvocation) -> Any:
        """Run one task; see `stitch.training.execute`."""
        return execute(self, invocation)

    @takes(role=_ROLE)
    def tasks(self, role: Role | str) -> tuple[LayerTask, ...]:
        """Return the tasks of one part of a step, in the order in which they run."""
        return self._compiled.stages[Role(role)]

    @takes(role=_ROLE)
    def task_graph(self, role: Role | str) -> TaskGraph:
        """Return one part of a step as a task graph of programs; `aggregate` makes it one task.

        Inputs and outputs have the names of the tensors.

        Raises `TaskError` if a task has another implementation than its program.
        """
        role = Role(role)
        for layer in self.tasks(role):
            task_id = layer.invocation.task_id
            if self._implementations[task_id] is not self._compiled.tasks[task_id]:
                raise TaskError(
                    f"task {task_id!r} of layer {layer.layer!r} was registered again: its "
                    "implementation is not a program",
                    remedy="register functions under other ids",
                )
        return self._compiled.graph(role, f"{self.graph.name}_{role.value}")

    @contextmanager
    def stage(self, role: Role) -> Iterator[Sequence[LayerTask]]:
        """Enter one part of a step: drop the tensors that it writes, and count it once its tasks
        have run."""
        self.check_open()
        store, renewed = self.store, self._compiled.outputs_of(role)
        if role is Role.FORWARD:
            for name, after in self.layers.next_states.items():
                tensor = store.find(after)
                if tensor is not None:
                    store.hold(name, tensor)
        elif role is Role.UPDATE:
            self._check_update()
            renewed = ()
        else:
            outputs = self._compiled.outputs_of(Role.FORWARD)
            if outputs and all(store.find(name) is None for name in outputs):
                raise UsageError("backward() was called before forward()",
                                 remedy="call forward() first")  # fmt: skip
        if role is Role.BACKWARD:
            if not self.tasks(role):
                raise UsageError(
                    f"graph {self.graph.name!r} has no gradients to compute",
                    remedy="give it parameters, or pass wanted=[...]",
                )
            self._has_gradients = False
            seeds = {gradient_name(name) for name in self.layers.seeds}
            renewed = tuple([name for name in renewed if name not in seeds])
        store.drop(renewed)
        yield self.tasks(role)
        if role is Role.BACKWARD:
            self._has_gradients = True
        elif role is Role.UPDATE:
            self.device.flush()
            self.iteration += 1

    def _check_update(self) -> None:
        if self.optimizer is None:
            raise UsageError("this backend has no optimizer",
                             remedy="LocalTaskBackend(graph, optimizer=...)")  # fmt: skip
        if not self._has_gradients:
            raise UsageError("update() was called before backward()",
                             remedy="call backward() first")  # fmt: skip

    def synchronize(self) -> None:
        """Run all queued work."""
        self.device.flush()

    def close(self) -> None:
        """Release all tensors, and close the device if the backend opened it. May be called
        twice."""
        if self._closed:
            return
        self._closed = True
        self.store.close()
        self._implementations.clear()
        if self._owns_device:
            self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        count = len(self.tasks(Role.FORWARD))
        return f"<LocalTaskBackend of {self.graph.name}: {count} layers on {self.device!r}>"
