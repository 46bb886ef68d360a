"""`LocalTaskBackend`: the tasks of a model on one device, and the tensors that they work on.

What runs are programs on the device's queue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from stitch.argument_kinds import MAPPING, TEXT, WORDS, instance_of, member_of, optional, takes
from stitch.errors import CompileError, TaskError, UsageError, closest
from stitch.graph import ComputationGraph
from stitch.machine import load_machine
from stitch.program import Array, InputKind, Role, Space
from stitch.report import Device
from stitch.runtime import RuntimeDevice, Tensor
from stitch.tasks import Future, TaskGraph
from stitch.training.graphs import KEPT_KINDS, MASTER, as_trainable
from stitch.training.local_backend.layers import LayerGraph, LayerTasks, layer_graph
from stitch.training.local_backend.signatures import (
    RuntimeArgument,
    TaskInvocation,
    TaskSignature,
    gradient_name,
)
from stitch.training.local_backend.store import (
    LayerTask,
    LoadedTask,
    ProgramTask,
    TaskArgumentAccessor,
    TaskImplementation,
    TaskStore,
    execute,
)
from stitch.training.losses import LOSS_KIND, Loss, loss_from_config
from stitch.training.optimizers import OPTIMIZER_KIND, Optimizer, optimizer_from_config
from stitch.training.programs import LABEL, LOSS, prediction_of

# --------------------------------------------------------------------------------------------------
# A part of a training step as a task graph: what others aggregate, show, or run elsewhere.


def stage_graph(
    name: str, stage: Sequence[LayerTask], tasks: Mapping[str, ProgramTask], kept: Collection[str]
) -> TaskGraph:
    """The tasks of a stage as calls of their programs; `kept`: the tensors that are outputs."""
    graph = TaskGraph(name)
    #: What a tensor is after the tasks so far.
    now: dict[str, Future] = {}
    made: dict[str, None] = {}
    for layer in stage:
        task, binding = tasks[layer.invocation.task_id], layer.invocation.binding
        given = []
        for i, port in enumerate(task.inputs):
            tensor = port.name(binding)
            if tensor not in now:
                now[tensor] = graph.input(task.program.input_desc(i), tensor)
            given.append(now[tensor])
        results = graph.call(task.program, *given)
        names = [port.name(binding) for port in task.outputs]
        now.update(zip(names, (results,) if isinstance(results, Future) else results, strict=True))
        made |= dict.fromkeys(names)
    for tensor in made:
        if tensor in kept:
            graph.output(now[tensor], tensor)
    return graph


# --------------------------------------------------------------------------------------------------
# The tasks that are registered: signatures and implementations by id, and how one of them runs.


class TaskRegistry:
    """Tasks by id, over the tensors and arguments of a store."""

    def __init__(self, device: RuntimeDevice, store: TaskStore) -> None:
        self.device, self.store = device, store
        self._implementations: dict[str, TaskImplementation] = {}
        self._closed = False

    @takes(task_id=TEXT, signature=instance_of("a TaskSignature", TaskSignature))
    def register_task(
        self, task_id: str, signature: TaskSignature, implementation: TaskImplementation
    ) -> None:
        """Make a task known by its id; one that is known may get another implementation.

        Raises `UsageError` where its signature is another then.
        """
        known = self.store.signatures.get(task_id)
        if known is not None and known != signature:
            raise UsageError(
                f"there is a task {task_id!r} with another signature",
                remedy="register it under another id, or with the signature that it has: "
                "backend.signature(task_id)",
            )
        if not callable(implementation):
            raise UsageError(f"task {task_id!r} needs a function", got=repr(implementation))
        self.store.signatures[task_id] = signature
        self._implementations[task_id] = implementation

    def signature(self, task_id: str) -> TaskSignature:
        """The signature of a task; raises `TaskError` for one that is not registered."""
        self._check_known(task_id)
        return self.store.signatures[task_id]

    def get_args(self, invocation: TaskInvocation) -> TaskArgumentAccessor:
        """What an invocation may see and change; raises `TaskError` for an unknown task,
        `UsageError` for a binding that does not fit."""
        self._check_known(invocation.task_id)
        return TaskArgumentAccessor(self.store, invocation)

    def get_task_impl(self, invocation: TaskInvocation) -> TaskImplementation:
        """What an invocation does; raises `TaskError` for an unknown task."""
        self._check_known(invocation.task_id)
        return self._implementations[invocation.task_id]

    def check_open(self) -> None:
        """Raise `UsageError` once it is closed."""
        if self._closed or self.device.is_closed:
            raise UsageError("this backend is closed", remedy="make another one")

    def _check_known(self, task_id: str) -> None:
        self.check_open()
        if task_id not in self._implementations:
            raise TaskError(
                f"no task {task_id!r} is registered",
                expected=", ".join(self._implementations) or "none",
                remedy=closest(task_id, self._implementations) or None,
            )


# --------------------------------------------------------------------------------------------------
# What a backend trains: a user's graph as layers, and the values that its parameters start with.


def trained_layers(
    graph: ComputationGraph, loss: Loss | None, wanted: Iterable[str] | None,
    weights: Mapping[str, Any],
) -> tuple[LayerGraph, Mapping[str, Any]]:  # fmt: skip
    """The layers of a graph, and the values of its parameters, as far as there are any.

    Gradients come in for the prediction where there is a loss, else for all floating outputs.
    Raises `CompileError` for placement options, and naming operators without a gradient;
    `UsageError` for weights of other names.
    """
    _check_placement(graph)
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
    """The graph with its parameters as inputs, and the values that they start with, if any."""
    kept = [slot.name for slot in graph.inputs if slot.kind in KEPT_KINDS]
    if kept or not graph.constants:
        check_names("weights", weights, kept)
        return graph, weights
    try:
        model = as_trainable(graph, weights)
    except CompileError:
        return graph, weights
    return model.graph, model.values


def check_names(parameter: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise `UsageError` for names that are no tensors."""
    for name in given:
        if name not in known:
            raise UsageError(
                f"LocalTaskBackend has no tensor {name!r} for {parameter}=",
                expected=", ".join(sorted(known)) or "none", remedy=closest(name, known) or None,
            )  # fmt: skip


def _check_placement(graph: ComputationGraph) -> None:
    """Raise `CompileError` for placement options that tasks of single operators cannot keep."""
    if graph.placement:
        raise CompileError(
            f"tasks of graph {graph.name!r} cannot keep its placement options",
            got=", ".join(option.text() for option in graph.placement[:8]),
            remedy="drop them, and give LocalTaskBackend spaces={name: space}",
        )


_ROLE, _SPACE = member_of(Role, "a role"), member_of(Space, "a space")


class LocalTaskBackend(TaskRegistry):
    """A `RuntimeBacking` of one device: a forward task for every operator of a graph, in
    topological order, backward tasks in reverse, a loss and an update.

    A graph without PARAMETER inputs has its named floating constants as parameters. `wanted` names
    the inputs whose gradients are wanted (default: the parameters), `weights` gives values that
    parameters start with, `spaces` says where tensors lie, by name, if not at home. Without a
    device it opens one, which it closes. Raises `CompileError` naming operators without a gradient.
    """

    @takes(
        graph=instance_of("a ComputationGraph", ComputationGraph),
        device=optional(instance_of("a device", RuntimeDevice)),
        optimizer=optional(OPTIMIZER_KIND), loss=optional(LOSS_KIND),
        wanted=optional(WORDS), weights=optional(MAPPING), spaces=optional(MAPPING),
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
        spaces: Mapping[str, Space | str] | None = None,
    ) -> None:
        self.graph = graph
        self.loss = None if loss is None else loss_from_config(loss)
        self.optimizer = None if optimizer is None else optimizer_from_config(optimizer)
        if self.optimizer is not None and self.optimizer.grouped:
            raise UsageError(
                "an update task has one rate, so the local backend takes no groups of parameters",
                got=", ".join(self.optimizer.grouped),
                remedy="stitch.compile(graph, optimizer=..., loss=...) takes them",
            )
        self.profiling = False
        #: How many updates there have been.
        self.iteration = 0
        layers, values = trained_layers(graph, self.loss, wanted, weights or {})
        if not layers.wanted and (self.loss or self.optimizer):
            raise CompileError(f"graph {graph.name!r} has nothing to train")
        machine = load_machine(_TARGET) if device is None else device.machine
        for name, space in (spaces or {}).items():
            _SPACE.check("LocalTaskBackend", f"the space of {name!r}", space)
        places = {name: Space(space) for name, space in (spaces or {}).items()}
        compiled = LayerTasks(layers, machine, places, self.loss, self.optimizer)
        check_names("spaces", places, compiled.names)
        self.layers = layers
        self._compiled = compiled
        self._owns_device = device is None
        device = Device(machine) if device is None else device
        super().__init__(device, TaskStore(device, {
            RuntimeArgument.DEVICE_STATE: lambda: self.device,
            RuntimeArgument.ITERATION: lambda: self.iteration,
            RuntimeArgument.PROFILING: lambda: self.profiling,
            RuntimeArgument.LEARNING_RATE: self._rate,
        }))  # fmt: skip
        #: Whether all gradients are those of one pass.
        self._has_gradients = False
        try:
            self._register()
            self._start(values)
        except BaseException:
            self.close()
            raise

    def _register(self) -> None:
        for task_id, compiled in self._compiled.tasks.items():
            self.register_task(task_id, compiled.signature, LoadedTask(compiled, self.device))
        for tasks in self._compiled.stages.values():
            for task in tasks:
                self._add_tensors(task.invocation)

    def _add_tensors(self, invocation: TaskInvocation) -> None:
        task = self._compiled.tasks[invocation.task_id]
        program = task.program
        for i, port in enumerate(task.inputs):
            if port.what != "argument":
                self.store.add_tensor(port.name(invocation.binding), program.input_desc(i))
        for i, port in enumerate(task.outputs):
            self.store.add_tensor(port.name(invocation.binding), program.output_desc(i))

    def _start(self, values: Mapping[str, Any]) -> None:
        """Values that are there from the start: weights, and what an optimizer keeps."""
        for task in self._compiled.stages[Role.UPDATE]:
            update = self._compiled.tasks[task.invocation.task_id]
            for slot, port in zip(update.program.inputs, update.inputs, strict=True):
                if slot.kind is InputKind.STATE and port.what == "tensor":
                    desc = self.store.desc(slot.name)
                    parameter, _, state = slot.name.rpartition(".")
                    assert self.optimizer is not None, "it updates"
                    start = self.optimizer.start_of_slot(parameter, state)
                    kind = desc.layout.data_type.dtype
                    self.store.write(slot.name, np.full(desc.shape, start, kind))
        known = set(self.store.names)
        for name, value in values.items():
            if name in known:
                self.set_tensor(name, value)

    def _rate(self) -> float:
        assert self.optimizer is not None
        return self.optimizer.rate(self.iteration)

    # -- tensors by name ---------------------------------------------------------------------------

    def set_tensor(self, name: str, value: Any) -> None:
        """Write a tensor: an input, a parameter, a label, a gradient that comes from outside.

        An array goes where the tensor lies; a device's tensor is taken as it is. Raises
        `UsageError` for a name that is unknown and for labels that do not fit the loss,
        `LinkError` where shape or kind of number differ.
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
        """The elements of a tensor: input, parameter, activation, gradient, optimizer state.

        Of a state that forward replaces, the newest. Raises `UsageError` for a name that is
        unknown, and for a tensor that is not there yet.
        """
        after = self.layers.next_states.get(name)
        if after is not None and self.store.find(after) is not None:
            name = after
        return self.store.tensor(name).numpy()

    # -- tasks -------------------------------------------------------------------------------------

    def execute(self, invocation: TaskInvocation) -> Any:
        """Run one task; see `stitch.training.execute`."""
        return execute(self, invocation)

    @takes(role=_ROLE)
    def tasks(self, role: Role | str) -> tuple[LayerTask, ...]:
        """The tasks of a part of a step, in the order in which they run."""
        return self._compiled.stages[Role(role)]

    @takes(role=_ROLE)
    def task_graph(self, role: Role | str) -> TaskGraph:
        """A part of a step as a task graph of programs: `aggregate` makes of it one task, which is
        the program of the whole. Its inputs and outputs are called after the tensors.

        Raises `TaskError` where a task of it has got another implementation.
        """
        role = Role(role)
        for layer in self.tasks(role):
            task_id = layer.invocation.task_id
            if not isinstance(self._implementations[task_id], LoadedTask):
                raise TaskError(
                    f"task {task_id!r} of layer {layer.layer!r} is no program any more",
                    remedy="register what only one run needs under an id of its own",
                )
        compiled = self._compiled
        name = f"{self.graph.name}_{role.value}"
        return stage_graph(name, self.tasks(role), compiled.tasks, compiled.kept(role))

    # -- in the loop -------------------------------------------------------------------------------

    @contextmanager
    def stage(self, role: Role) -> Iterator[Sequence[LayerTask]]:
        """The tasks of a part of a step, to be run inside: what they make anew is dropped before,
        and what they have done counts once all of them have run."""
        self.check_open()
        if role in (Role.LOSS, Role.BACKWARD):
            self._check_forward()
        if role is Role.FORWARD:
            self._before_forward()
        elif role is Role.LOSS and self.loss is not None:
            self.store.drop([LOSS, *map(gradient_name, self.layers.seeds)])
        elif role is Role.BACKWARD:
            self._before_backward()
        elif role is Role.UPDATE:
            self._check_update()
        yield self.tasks(role)
        if role is Role.BACKWARD:
            self._has_gradients = True
        elif role is Role.UPDATE:
            self.device.flush()
            self.iteration += 1

    def _before_forward(self) -> None:
        store = self.store
        for name, after in self.layers.next_states.items():
            tensor = store.find(after)
            if tensor is not None:
                store.hold(name, tensor)
        store.drop(self._compiled.made(Role.FORWARD))

    def _check_forward(self) -> None:
        """Raise `UsageError` where nothing that a forward pass makes is there."""
        made = self._compiled.made(Role.FORWARD)
        if made and all(self.store.find(name) is None for name in made):
            raise UsageError("backward() goes back from what a forward pass has left, and there "
                             "has been none", remedy="forward() first")  # fmt: skip

    def _before_backward(self) -> None:
        if not self.tasks(Role.BACKWARD):
            raise UsageError(
                f"graph {self.graph.name!r} has no gradients to make",
                remedy="give it parameters, or wanted=[...]",
            )
        self._has_gradients = False
        seeds = {gradient_name(name) for name in self.layers.seeds}
        made = self._compiled.made(Role.BACKWARD)
        self.store.drop(name for name in made if name not in seeds)

    def _check_update(self) -> None:
        if self.optimizer is None:
            raise UsageError("this backend has no optimizer to update with",
                             remedy="LocalTaskBackend(graph, optimizer=...)")  # fmt: skip
        if not self._has_gradients:
            raise UsageError("there are no gradients to step with", remedy="backward() first")

    def synchronize(self) -> None:
        """Wait for all that is queued."""
        self.device.flush()

    # -- life --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all tensors back; the device too, if it opened it itself. Twice is allowed."""
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


#: As for `open_device`.
_TARGET = "wormhole_n150"
